"""`diagnose` on optimizers that other people wrote: timm's, pytorch_optimizer's, PyTorch's, and the formula of apex."""

import numpy as np
import pytest

from arrayopt.testing import diagnose
from arrayopt.testing.diagnosis.trajectory import parameters
from tests.support.timms import timms


def tensors():
    torch = pytest.importorskip("torch")
    return [torch.nn.Parameter(torch.tensor(x)) for x in parameters().values()]


def apex(lr=0.01, decay=0.02, eps=1e-6):
    """The formula of apex's FusedLAMB: gradients are clipped together, and the decay is in the update and its norm."""
    m, v, t = {}, {}, [0]

    def step(params, grads):
        t[0] += 1
        clip = max(1.0, np.sqrt(sum(np.sum(g**2) for g in grads.values())))
        new = {}
        for name, p in params.items():
            g = grads[name] / clip
            m[name] = 0.9 * m.get(name, 0.0) + 0.1 * g
            v[name] = 0.999 * v.get(name, 0.0) + 0.001 * g**2
            u = m[name] / (1 - 0.9 ** t[0]) / (np.sqrt(v[name] / (1 - 0.999 ** t[0])) + eps) + decay * p
            a, b = np.linalg.norm(p), np.linalg.norm(u)
            new[name] = p - lr * (a / b if a > 0 and b > 0 else 1.0) * u
        return new

    return step


NUMBERS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.02}


@pytest.mark.parametrize("known", [NUMBERS, pytest.param({}, marks=pytest.mark.slow)], ids=["known", "unknown"])
def test_apex_is_lamb_with_gradients_clipped_together(known):
    found = diagnose(apex(), known=known, depth=1)
    assert found.name == "LAMB", str(found)
    assert found.changes == ("all gradients are scaled down together to a global norm of 1",)
    assert {name: found.hypers[name] for name in NUMBERS} == pytest.approx(NUMBERS)


@pytest.mark.parametrize("correct", [True, False])
def test_timms_lamb_is_lamb_with_gradients_clipped_together(correct):
    module = timms("lamb")
    made = module.Lamb(tensors(), lr=0.01, weight_decay=0.05, bias_correction=correct)
    found = diagnose(made)
    assert found.name == "LAMB", str(found)
    assert found.changes[-1] == "all gradients are scaled down together to a global norm of 1"
    assert ("no bias correction" in found.changes) == (not correct)


def test_nadam_with_a_product_in_float32_is_named():
    torch = pytest.importorskip("torch")
    found = diagnose(torch.optim.NAdam(tensors()[2:3], lr=0.002), steps=3, depth=0)
    assert (found.name, found.explained, found.is_coarse) == ("NAdam", False, True)
    assert str(found).startswith("NAdam is NAdam to ")
    assert "something may be computed in a lower precision" in str(found)


def test_attributes_of_optimizers_are_copied():
    """PyTorch's own way to copy optimizers drops what classes of others have added."""
    torch = pytest.importorskip("torch")

    class Slow(torch.optim.SGD):
        def __init__(self, params, factor):
            super().__init__(params, lr=0.5)
            self.factor = factor

        def step(self):
            for p in self.param_groups[0]["params"]:
                p.grad *= self.factor
            super().step()

    found = diagnose(Slow(tensors()[2:3], 0.5), steps=3, depth=0)
    assert found.name == "SGD"
    assert found.hypers["lr"] == 0.25
    assert "lr is 0.5 times the 0.5 that it is said to be" in str(found)


@pytest.mark.parametrize(("name", "words"), [("Lamb", "It is near LAMB, to "), ("Yogi", ""), ("AdaBound", "")])
def test_what_is_not_known_is_said_to_be_so(name, words):
    """Lamb has three changes at once; a rate fitted for each step makes up for most of them, which is no identity."""
    others = pytest.importorskip("pytorch_optimizer")
    found = diagnose(getattr(others, name)(tensors(), lr=0.003))
    assert not found.explained
    assert found.complete
    assert f"follows no rule that is known here. {words}" in str(found)
