"""The examples of the page "On a GPU" run, over the stand-in for CuPy."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import arrayopt as ao
from tests.cudacpu import standin
from tests.engines.cuda.test_cupy_streams import near, over, pytorch  # noqa: F401
from tests.support.slow import marked

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "cuda.md").read_text("utf-8")
FIRST, TORCH, GRAPHS, SOURCE = re.findall(
    r"^```{code-block} python\n:caption:[^\n]*\n\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE
)


SEEDS = marked([(seed,) for seed in range(50)], lambda seed: seed < 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_captured_step_of_the_page_in_any_order(cupy, seed):
    """It has the numbers of the same steps one by one, whichever work CUDA does first."""
    example, rule = GRAPHS.replace("range(100)", "range(3)"), ao.LAMB(lr=lambda s: 0.1 / (1 + s))
    r = np.random.default_rng(0)
    values = [
        {"w": r.standard_normal((40, 30)).astype("f4"), "b": r.standard_normal(30).astype("f4")} for _ in range(5)
    ]
    host = {name: x.copy() for name, x in values[-1].items()}
    opt = ao.Optimizer(host, rule, engine="numpy", clip_norm=1.0)
    for k in (0, 0, 1, 2, 3):
        opt.step(values[k])
    with standin.any_order(seed):
        params = {name: cupy.asarray(x) for name, x in values[-1].items()}
        grads, coming = {name: cupy.asarray(g) for name, g in values[0].items()}, iter(values[1:])

        def compute(grads):
            for name, g in next(coming).items():
                grads[name].set(g)

        known = {"cp": cupy, "opt": ao.Optimizer(params, rule, clip_norm=1.0), "grads": grads, "compute": compute}
        exec(example, known)
        for name, x in host.items():
            np.testing.assert_allclose(params[name].get(), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["the results are read", "gradients are written"])
def test_the_captured_step_of_the_page_on_streams_that_nothing_orders_is_a_race(cupy, how):
    """What is the user's to order."""
    example, grads = GRAPHS.replace("range(100)", "range(3)"), {"w": cupy.ones((40, 30), "f4")}
    params = {"w": cupy.ones((40, 30), "f4")}

    def compute(grads):
        if how == "gradients are written":
            with cupy.cuda.Stream.null:
                grads["w"] += cupy.float32(1)

    known = {"cp": cupy, "opt": ao.Optimizer(params, ao.LAMB()), "grads": grads, "compute": compute}
    read = "opt.params['w'].get(); cp.cuda.Device().synchronize()"
    with pytest.raises(standin.Race, match=r"kernel run of a graph on stream .* nothing orders the two"):
        exec(example.replace("stream.synchronize()", read), known)


def test_the_examples_of_the_page(cupy):
    known = {"print": lambda text: shown.append(text)}
    shown = []
    exec(FIRST.replace("1024", "128"), known)
    assert "engine cupy" in shown[0]
    known["grads"] = {"w": cupy.ones((128, 128), cupy.float32), "b": cupy.ones(128, cupy.float32)}
    known["compute"] = lambda grads: None
    exec(GRAPHS.replace("range(100)", "range(3)"), known)
    assert known["opt"].step_count == known["opt"].state["w"]["t"] == 1 + 1 + 1 + 3
    exec(SOURCE, known)
    assert shown[1] == ao.source(ao.LAMB(), engine="cupy")


@pytest.mark.parametrize("seed", SEEDS)
def test_pytorch_s_tensors_as_on_the_page_in_any_order(cupy, seed, pytorch):  # noqa: F811
    """Gradients are still to come, on the current stream, when the step is asked for; SGD, for it has no slots."""
    streams, tensor = pytorch
    r = np.random.default_rng(0)
    values = {name: r.standard_normal(300).astype("f4") for name in ("weight", "bias")}
    grads = {name: r.standard_normal(300).astype("f4") for name in values}
    params = {name: tensor(x) for name, x in values.items()}

    def backward():
        for name, p in params.items():
            p.grad = tensor(np.zeros(300, "f4"))
            over(cupy, p.grad).set(grads[name], streams.now[0].it)

    model = SimpleNamespace(named_parameters=params.items)
    loss = SimpleNamespace(sum=lambda: SimpleNamespace(backward=backward))
    call = TORCH.replace("import torch\n", "").replace("model(torch", "loss(torch").replace("LAMB", "SGD")
    torch = SimpleNamespace(nn=SimpleNamespace(Linear=lambda *_, device: model), ones=lambda *_, device: None)
    known = {"ao": ao, "torch": torch, "loss": lambda _: loss}
    with standin.any_order(seed):
        exec(call, known)
    assert "engine cupy" in known["opt"].explain()
    one = ao.Optimizer(values, ao.SGD(lr=1e-3), engine="numpy")
    one.step(grads)
    for name, x in values.items():
        near(x, params[name].detach().numpy(force=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hand_written_adam_and_what_replaces_it_in_any_order(cupy, seed):
    """The page for those who come from CuPy, with CuPy; what it needs besides is drawn by NumPy."""
    page = (DOCS / "coming-from" / "cupy.md").read_text("utf-8")
    before, after, _ = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    data = ("import numpy as xp\n", "rng = xp.random", "range(1, 501)", "range(500)")
    for old, new in zip(data, ("", "rng = np.random", "range(1, 5)", "range(4)"), strict=True):
        assert old in before + after
        before, after = before.replace(old, new), after.replace(old, new)
    there = "a, x_true = xp.asarray(a), xp.asarray(x_true)\nb = a @ x_true"
    with standin.any_order(seed):
        known = {"xp": cupy, "np": np}
        exec(before.replace("b = a @ x_true", there), known)
        exec(after, known)
        assert "engine cupy" in known["opt"].explain()
