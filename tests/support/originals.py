"""How this library treats calls that the original optimizers refuse: it refuses them, too, or it works; with checks."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

import arrayopt as ao
from tests.support import witness
from tests.support.refusals import A, fails_without_a_trace, ones, optimizer, raises
from tests.support.tolerances import TOLERANCES

GOLDENS = Path(__file__).parents[1] / "goldens"


@dataclass(frozen=True)
class Refused:
    """We refuse the call, too, with these words; `why`, if for another reason than the original."""

    call: object
    exception: type
    words: str
    why: str = ""

    def __call__(self):
        raises(self.call, self.exception, self.words)


@dataclass(frozen=True)
class Works:
    """The call works here, as `check` confirms; `why` it does."""

    check: object
    why: str = ""

    def __call__(self):
        self.check()


def follows_witness(rule, options, *, shape=(4, 3), dtype="float64", other=None, **given):
    """Check that steps with the options `given` equal those of the witness with `options`, and not with `other`."""
    rng = np.random.default_rng(7)
    start, *grads = (rng.standard_normal(shape).astype(dtype).astype("float64") for _ in range(4))
    opt = ao.Optimizer(np.array(start.astype(dtype)), getattr(ao, rule)(**given or options))
    unit = np.finfo(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16)
    for s, g in enumerate(grads):
        opt.step(g.astype(dtype))
        assert all(
            x.dtype == ("float64" if dtype == "float64" else "float32") for x in list(opt.state["param"].values())[1:]
        )
        exact = by_witness(rule, options, start, grads[: s + 1])
        if dtype == "float64":
            np.testing.assert_allclose(opt.params, exact, rtol=1e-12, atol=1e-12)
        elif s == 0:  # rounded once; later steps start from the rounded value
            ulp = np.spacing(np.abs(exact).astype(dtype)).astype("float64")
            assert np.all(np.abs(opt.params.astype("float64") - exact) <= TOLERANCES[dtype].ulps * ulp)
            assert np.any(opt.params != start.astype(dtype))
    assert opt.params.dtype == dtype
    assert np.isfinite(opt.params).all()
    if other is not None:
        assert np.abs(exact - by_witness(rule, other, start, grads)).max() > 100 * unit.eps


def by_witness(rule, options, p, grads):
    """An array after updates of the witness with these gradients; `options` is a dict, or one for each step."""
    flat, state = [float(x) for x in np.ravel(p)], {}
    for t, g in enumerate(grads, 1):
        now = options if isinstance(options, dict) else options[t - 1]
        flat, state = witness.step(rule, now, np.shape(p), flat, [float(x) for x in np.ravel(g)], state, t)
    return np.reshape(flat, np.shape(p))


def group_follows_witness(rule, options, change):
    """Check that a group in a list of group dicts uses its own value, and other tensors the rule's."""
    p, g = np.asarray([[3.0, -4.0], [1.0, 2.0]]), np.asarray([[1.0, 0.5], [-2.0, 0.25]])
    opt = ao.Optimizer([{"params": [p.copy()], **change}, {"params": [p.copy()]}], getattr(ao, rule)(**options))
    grads = [g, -3 * g, g.T]
    for g in grads:
        own, rest = opt.step([g, g])
    expected = by_witness(rule, options | change, p, grads), by_witness(rule, options, p, grads)
    assert np.abs(expected[0] - expected[1]).max() > 1e-3
    np.testing.assert_allclose(own, expected[0], rtol=1e-12)
    np.testing.assert_allclose(rest, expected[1], rtol=1e-12)


def same_as(rule, one, other):
    """Check that two ways to set an option make equal rules, whose steps equal the witness's."""
    assert getattr(ao, rule)(**one) == getattr(ao, rule)(**other)
    follows_witness(rule, other, **one)


def group_takes_beta1():
    group_follows_witness("LAMB", {"lr": 0.1}, {"beta1": 0.5})
    raises(lambda: optimizer(made=[{"params": A, "beta9": 1}]), ValueError, "LAMB has no `beta9`; did you mean `beta")


def sequences_are_independent():
    opt = optimizer(ao.SGD(lr=[1.0, 2.0, 4.0]), [{"params": [ones(1)], "lr": [8.0, 16.0]}, {"params": [ones(1)]}])
    for _ in range(2):
        opt.step([ones(1), ones(1)])
    assert [x.item() for x in opt.params] == [1 - 8 - 16, 1 - 1 - 2]
    fails_without_a_trace(
        opt, lambda: opt.step([ones(1)] * 2), ValueError, "the sequence has 2 values", "run out at step 2"
    )


def one_more_step(opt, steps):
    for _ in range(steps):
        opt.step(ones(2))
    fails_without_a_trace(
        opt, lambda: opt.step(ones(2)), ValueError, f"the sequence has {steps} values", f"at step {steps}"
    )


def from_a_generator():
    arrays = [ones(2), ones(3)]
    opt = ao.Optimizer((x for x in arrays), ao.SGD(lr=0.5))
    opt.step([ones(2), ones(3)])
    assert [x.tolist() for x in arrays] == [[0.5, 0.5], [0.5, 0.5, 0.5]]


def plain_tensors():
    made = [torch.ones(2), torch.ones(2, requires_grad=True)]
    ao.Optimizer(made, ao.SGD(lr=0.5)).step([torch.ones(2), torch.ones(2)])
    assert [x.tolist() for x in made] == [[0.5, 0.5], [0.5, 0.5]]
    raises(lambda: optimizer(made=[torch.ones(2), "weight"]), TypeError, "got str at '1'")


def many_tensors(count):
    rng = np.random.default_rng(0)
    start, grads = rng.standard_normal((count, 3)), rng.standard_normal((count, 3))
    opt = ao.Optimizer(list(start.copy()), ao.LANS(lr=0.1))
    opt.step(list(grads))
    for p, p0, g in zip(opt.params, start, grads, strict=True):
        np.testing.assert_allclose(p, by_witness("LANS", {"lr": 0.1}, p0, [g]), rtol=1e-12)


def runs_as_it_comes():
    raises(lambda: ao.CAME(lr=0.1, use_fused_ada_factor=True), TypeError, "`use_fused_ada_factor`")
    follows_witness("CAME", {"lr": 0.1})


def eps_as_int():
    raises(lambda: ao.CAME(lr=0.1, eps=1), TypeError, "CAME has no `eps`; it is `eps1` and `eps_scale` and `eps2` here")
    same_as(
        "CAME",
        {"lr": 0.1, "eps1": 1, "eps2": 1, "eps_scale": 1},
        {"lr": 0.1, "eps1": 1.0, "eps2": 1.0, "eps_scale": 1.0},
    )


def eps_zero():
    off = {"lr": 0.1, "eps1": 0.0, "eps2": 0.0, "eps_scale": 0.0}
    follows_witness("CAME", off, other={"lr": 0.1, "eps1": 0.1})
    opt = optimizer(ao.CAME(**off))
    opt.step({"w": np.zeros((2, 3)), "b": np.zeros(3)})
    assert [np.asarray(x).ravel().tolist() for x in opt.params.values()] == [[1] * 6, [1] * 3]


def lars_by_name():
    """MindSpore's `lars_filter` excludes layers by name; here, a group with adapt=False does."""
    p, g = np.asarray([3.0, 4.0]), np.asarray([0.6, 0.8])
    opt = ao.Optimizer({"w": p.copy(), "bias": p.copy()}, ao.LARS(lr=0.5), groups={"*bias*": {"adapt": False}})
    opt.step({"w": g, "bias": g})
    np.testing.assert_allclose(opt.params["w"], by_witness("LARS", {"lr": 0.5}, p, [g]), rtol=1e-14)
    np.testing.assert_allclose(opt.params["bias"], p - 0.5 * g, rtol=1e-14)


def unknown(name, rule="CAME", **options):
    return Refused(lambda: getattr(ao, rule)(lr=0.1, **options), TypeError, f"{rule} has no `{name}`")


def because(answer, why):
    return dataclasses.replace(answer, why=why)
