"""The demo learns, its network's gradient is right, and the deconvolution example recovers what was blurred."""

import importlib.util
import io
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import array_api_compat.numpy as host
import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the demo's data come with scikit-learn")
pytest.importorskip("matplotlib", reason="the demo draws with matplotlib")
pytest.importorskip("rich", reason="the demo prints with rich")

from rich.console import Console

from arrayopt.demo import digits, network, report
from arrayopt.libraries import open_library
from tests.support.slow import marked

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "deconvolution.py"
SIZES = (7, 6, 5, 4)


@pytest.fixture(scope="module")
def data():
    return digits.load()


@pytest.fixture(scope="module")
def deconvolution():
    spec = importlib.util.spec_from_file_location("deconvolution", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


# ---- the network -----------------------------------------------------------------------------------------------------


def problem(dtype="float64"):
    """A small network away from its special initial gains and biases, and a batch."""
    rng = np.random.default_rng(1)
    params = network.init_params(host, SIZES, seed=0, dtype=dtype)
    for block in params["blocks"]:
        for name in ("gain", "bias"):
            block[name] += 0.3 * rng.standard_normal(block[name].shape).astype(dtype)
    x = rng.standard_normal((9, SIZES[0])).astype(dtype)
    return params, x, np.eye(SIZES[-1], dtype=dtype)[rng.integers(0, SIZES[-1], 9)]


def layers(params):
    return [*params["blocks"], params["head"]]


def test_the_gradient_agrees_with_finite_differences_in_every_element():
    params, x, targets = problem()
    _, grads = network.loss_and_grads(params, x, targets)
    h = 1e-5  # truncation error ~ h² = 1e-10, rounding ~ 1e-16 / h = 1e-11
    for layer, layer_grads in zip(layers(params), layers(grads), strict=True):
        assert layer.keys() == layer_grads.keys()
        for name, p in layer.items():
            for i in np.ndindex(p.shape):
                kept = p[i]
                p[i] = kept + h
                above = network.loss_and_grads(params, x, targets)[0]
                p[i] = kept - h
                below = network.loss_and_grads(params, x, targets)[0]
                p[i] = kept
                assert (above - below) / (2 * h) == pytest.approx(layer_grads[name][i], abs=1e-8)


def test_loss_and_gradient_agree_with_torch():
    torch = pytest.importorskip("torch", reason="its layers and autograd are the witness here")
    params, x, targets = problem()
    loss, grads = network.loss_and_grads(params, x, targets)

    leaves = [{name: torch.tensor(p, requires_grad=True) for name, p in layer.items()} for layer in layers(params)]
    *blocks, head = leaves
    y = torch.tensor(x)
    for block in blocks:
        z = torch.nn.functional.linear(y, block["weight"])
        y = torch.tanh(torch.nn.functional.layer_norm(z, z.shape[1:], block["gain"], block["bias"]))
    scores = torch.nn.functional.linear(y, head["weight"], head["bias"])
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor(targets.argmax(axis=1)))
    expected.backward()

    assert float(loss) == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(network.scores(params, x), scores.detach().numpy(), rtol=1e-12)
    for layer, witness in zip(layers(grads), leaves, strict=True):
        for name, g in layer.items():
            np.testing.assert_allclose(g, witness[name].grad.numpy(), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("library", ["array_api_strict", "array_api_compat.torch"])
def test_the_network_is_plain_array_api(library):
    xp = pytest.importorskip(library, reason="not installed", exc_type=ImportError)
    host_params, x, targets = problem("float32")
    params = {
        "blocks": [{name: xp.asarray(p) for name, p in block.items()} for block in host_params["blocks"]],
        "head": {name: xp.asarray(p) for name, p in host_params["head"].items()},
    }
    loss, grads = network.loss_and_grads(params, xp.asarray(x), xp.asarray(targets))
    host_loss, host_grads = network.loss_and_grads(host_params, x, targets)
    assert loss.dtype == xp.float32
    assert float(loss) == pytest.approx(float(host_loss), rel=1e-5)
    for layer, expected in zip(layers(grads), layers(host_grads), strict=True):
        for name, g in layer.items():
            assert g.dtype == xp.float32
            np.testing.assert_allclose(np.asarray(g), expected[name], rtol=1e-4, atol=1e-6)


# ---- the comparison --------------------------------------------------------------------------------------------------


def test_the_parts_are_disjoint_and_stratified(data):
    assert (len(data.train_x), len(data.test_x)) == (1347, 450)
    for labels in (data.train_labels, data.test_labels):
        assert np.ptp(np.bincount(labels) / len(labels)) < 0.01
    validation = digits.load(validation=True)
    assert len(validation.train_x) + len(validation.test_x) == len(data.train_x)
    seen = {row.tobytes() for row in np.concatenate([validation.train_x, validation.test_x])}
    assert seen == {row.tobytes() for row in data.train_x}


@pytest.mark.usefixtures("auto")
def test_lamb_reaches_97_percent_and_keeps_more_than_adamw_in_the_largest_batch(data):
    options = {"data": data, "backend": open_library("numpy"), "seed": 0}
    (run,) = digits.compare(["LAMB"], **options, steps=200, batch=128)
    assert run.accuracy >= 0.97
    assert run.final_loss < 0.05
    assert list(run.trust_ratios) == [f"blocks.{i}.weight" for i in range(len(digits.SIZES) - 2)] + ["head.weight"]
    for steps, ratios in run.trust_ratios.values():
        assert len(ratios) == len(steps) >= digits.RATIOS
        assert all(np.isfinite(ratios))
        assert min(ratios) > 0
    lamb, adamw = digits.compare(["LAMB", "AdamW"], **options, steps=20, batch=digits.BATCHES[-1])
    assert lamb.accuracy > adamw.accuracy


def test_a_batch_has_the_learning_rate_of_the_nearest_one():
    contender = digits.Contender(None, {128: 0.1, 512: 0.2})
    assert [contender.lr(batch) for batch in (1, 128, 255, 257, 10000)] == [0.1, 0.1, 0.1, 0.2, 0.2]


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize("rule", marked([("LAMB",), ("AdamW",)], lambda rule: rule == "LAMB"))
def test_float16_with_a_loss_scale_is_as_accurate_as_float32(data, rule):
    options = {"data": data, "backend": open_library("numpy"), "steps": 150, "batch": 512, "seed": 0}
    (wide,), (half,) = (digits.compare([rule], **options, dtype=dtype) for dtype in ("float32", "float16"))
    assert wide.accuracy > 0.96
    assert half.accuracy >= wide.accuracy - 0.01


def test_without_a_loss_scale_gradients_underflow_in_float16(data):
    params = network.init_params(host, digits.SIZES, seed=0, dtype="float16")
    targets = np.eye(10, dtype="float32")[data.train_labels]
    zeros = {}
    for scale in (1.0, 1024.0):
        _, grads = network.loss_and_grads(params, data.train_x, targets, scale=scale)
        zeros[scale] = np.mean(grads["blocks"][0]["weight"] == 0)
        assert grads["blocks"][0]["weight"].dtype == np.float16
    assert zeros[1024.0] < zeros[1.0]


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_every_rule_learns_from_the_same_start(data, backend):
    if backend == "torch":
        pytest.importorskip("torch", reason="not installed")
    counted = []
    runs = digits.compare(
        list(digits.CONTENDERS),
        data=data,
        backend=open_library(backend),
        steps=30,
        batch=512,
        seed=3,
        on_step=lambda rule, step: counted.append((rule, step)),
    )
    assert counted == [(rule, step) for rule in digits.CONTENDERS for step in range(1, 31)]
    assert len({run.losses[0] for run in runs}) == 1
    for run in runs:
        assert run.losses[-1] < 0.75 * run.losses[0]
        assert bool(run.trust_ratios) == (run.rule in ("LAMB", "LANS"))


def test_a_run_repeats(data):
    first, second = (
        digits.compare(["LAMB"], data=data, backend=open_library("numpy"), steps=10, batch=256, seed=1)[0]
        for _ in range(2)
    )
    assert first.losses == second.losses
    assert first.trust_ratios == second.trust_ratios


# ---- the report ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize("rules", [("LAMB", "SGD"), ("AdamW",)])
def test_a_short_run_prints_a_table_and_draws(data, rules, tmp_path, capsys, monkeypatch):
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    path = tmp_path / "figure.png"
    found = report.show(rules, data, open_library("numpy"), epochs=1, seeds=[0], output=path)
    printed, errors = capsys.readouterr()
    printed = " ".join(printed.split())
    assert path.read_bytes().startswith(b"\x89PNG")
    assert all(line.startswith("arrayopt: compiling") for line in errors.splitlines()), errors  # Numba, at first
    assert "\x1b" not in printed
    for word in (*rules, "test accuracy", "µs", "B/param", "engine ", "figure"):
        assert word in printed
    for runs in found:
        for batch in digits.BATCHES:
            assert f"{report.accuracy(runs, batch):.1%}" in printed
    options = {"data": data, "backend": open_library("numpy"), "seed": 0}  # two threads change no number
    assert [runs[0] for runs in found] == digits.compare(rules, **options, steps=10, batch=digits.BATCHES[0])


def test_an_error_in_one_thread_stops_the_other(data, tmp_path, monkeypatch):
    both = threading.Barrier(2, timeout=60)
    stopped = []

    def compare(rules, *, on_step, **_):
        both.wait()
        if rules == ["LAMB"]:
            raise KeyboardInterrupt
        try:
            for _ in range(1_000_000):
                on_step("SGD", 1)
        except CancelledError:
            stopped.append(rules)
            raise

    monkeypatch.setattr(report, "compare", compare)
    with pytest.raises(KeyboardInterrupt):
        report.show(("LAMB", "SGD"), data, open_library("numpy"), epochs=1, seeds=[0], output=tmp_path / "figure.png")
    assert stopped == [["SGD"]]


def test_on_a_terminal_there_are_bars():
    shown = io.StringIO()
    with report.progress(Console(file=shown, force_terminal=True, width=80), ["LAMB", "SGD"], 2) as on_step:
        for rule in ("LAMB", "SGD"):
            on_step(rule, 1)
            on_step(rule, 2)
    assert "2/2" in shown.getvalue()


def test_labels_keep_their_distance_and_their_order():
    heights = report._spread([0.0, 0.5, 0.51, 0.52, 0.97, 1.0], gap=0.1)
    assert min(np.diff(heights)) >= 0.1 - 1e-12
    assert heights[0] == 0.0
    assert heights[-1] == 1.0
    assert heights[1:4] == pytest.approx([0.41, 0.51, 0.61])


# ---- the deconvolution example ---------------------------------------------------------------------------------------


def test_the_deconvolution_gradient_agrees_with_finite_differences(deconvolution, monkeypatch):
    monkeypatch.setattr(deconvolution, "WEIGHT", 0.1)  # so that neither term hides the other's mistakes
    rng = np.random.default_rng(0)
    shape = (12, 15)
    window = (rng.random(shape) < 0.7).astype(np.float64)
    exposure = deconvolution.Exposure(rng.random(shape), window, deconvolution.transfer_of(shape).astype(np.float64))
    f, h = rng.random(shape), 1e-5
    _, grad = deconvolution.loss_and_grad(host, f, exposure)
    for i in np.ndindex(shape):
        d = np.zeros(shape)
        d[i] = h
        above, below = (deconvolution.loss_and_grad(host, f + sign * d, exposure)[0] for sign in (1, -1))
        assert (above - below) / (2 * h) == pytest.approx(
            grad[i], abs=1e-6
        )  # h² times the third derivative, ~ WEIGHT/ε²


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_deconvolution_beats_the_record_and_the_wiener_filter(deconvolution, backend):
    if backend == "torch":
        pytest.importorskip("torch", reason="not installed")
    images = deconvolution.run(backend, size=96, steps=100)
    truth, *others = images.values()
    recorded, wiener, recovered = (deconvolution.psnr(image, truth) for image in others)
    assert recovered > recorded + 2.0
    assert recovered > wiener > recorded


def test_the_example_runs_as_a_script(deconvolution, tmp_path, capsys):
    path = tmp_path / "picture.png"
    deconvolution.main(["--size", "48", "--steps", "5", "--output", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("PSNR") == 3
