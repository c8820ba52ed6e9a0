"""Ten steps of published optimizers, made again: see tests/goldens/README.md, and golden_cases.py for the tables."""

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import arrayopt as ao
from tests.conftest import BACKENDS
from tests.support import golden_more
from tests.support.golden_cases import ELSEWHERE, GOLDENS, LEFT_OUT, NOT_COMPARED, OTHERS, REST, SLOTS
from tests.support.slow import marked

pytestmark = pytest.mark.usefixtures("auto")

FOLDER = Path(__file__).parents[1] / "goldens"
FILES = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("**/*.npz"))

# Per tensor and step, |ours - theirs| may be at most a·max|p| + b·max|p - p0|
TOLERANCES = {
    "float64": (1e-10, 0.0),
    "float32": (1e-6, 1e-3),  # theirs is no better: 1 - 0.999^t, computed in float32, loses digits
    "float16": (4e-3, 0.0),  # 11 bits, rounded ten times
}
MOMENTS = 2e-5  # of the largest: in float32, 1 - 0.999 is wrong by 1.3e-5
RATES = 1e-6  # theirs are float32

# On every backend: the first file of each system, not of those in golden_more.py; and those with groups, an order,
# left-out gradients and float16
ON_BACKENDS = [
    *{file.partition("/")[0]: file for file in reversed(GOLDENS) if file not in golden_more.GOLDENS}.values(),
    "ms_lamb_ascend/groups_mixed",
    "ms_lamb_ascend/groups_seed_example",
    "mx_lans/fused_mults_skip",
    "mx_lans/fused_fp16_mp",
]
HAVE_EXTRAS = [file for file in GOLDENS if file.startswith(("ms_lamb_ascend/", "mx_")) or "schedulefree" in file]


@functools.cache
def load(file):
    """A golden file: `meta`, and its arrays as dicts of tensors, those of each step as lists of such dicts."""
    with np.load(FOLDER / f"{file}.npz") as saved:
        arrays = dict(saved)
    meta = json.loads(str(arrays.pop("meta")))
    shapes = dict(zip(meta["names"], map(tuple, meta["shapes"]), strict=True))
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes.values()])

    def tensors(flat):
        return {n: x.reshape(shapes[n]) for n, x in zip(shapes, np.split(flat, ends[:-1]), strict=True)}

    total = arrays["p0"].shape
    made = {
        key: tensors(x) if x.shape == total else [tensors(row) for row in x] if x.shape[1:] == total else x
        for key, x in arrays.items()
    }
    return SimpleNamespace(meta=meta, arrays=made, names=list(shapes), dtype=str(arrays["p0"].dtype), **made)


def optimizer(golden, row, backend):
    """An Optimizer over the first parameters of a golden file, and the names in the order of its params."""
    params = {name: backend.array(x, golden.dtype) for name, x in golden.p0.items()}
    if not isinstance(row.groups, list):
        return ao.Optimizer(params, row.rule, groups=row.groups, loss_scale=row.loss_scale), golden.names
    grouped = {name for names, _ in row.groups if names != REST for name in names}
    rest = [name for name in golden.names if name not in grouped]
    members = [rest if names == REST else names for names, _ in row.groups]
    entries = [
        {"params": {name: params[name] for name in names}, **overrides}
        for names, (_, overrides) in zip(members, row.groups, strict=True)
    ]
    order = golden.meta["order"]
    if order:
        entries.append({"order_params": [params[name] for name in order]})
    return ao.Optimizer(entries, row.rule), order or [name for names in members for name in names]


def steps(golden, row, backend):
    """The Optimizer and, after each step, the parameters by name as float64."""
    opt, order = optimizer(golden, row, backend)
    skip = golden.meta.get("skip") or {}
    for step, gradients in enumerate(golden.g):
        grads = {
            name: None if step in skip.get(name, ()) else backend.array(g, golden.dtype)
            for name, g in gradients.items()
        }
        if isinstance(row.groups, list):
            params = dict(zip(order, opt.step([grads[name] for name in order]), strict=True))
        else:
            params = opt.step(grads)
        yield opt, {name: backend.numpy(params[name]).astype("float64") for name in golden.names}


def error(ours, theirs, start, tolerance):
    """The largest difference as a multiple of what is allowed; infinite where theirs is NaN."""
    of_p, of_change = TOLERANCES[tolerance]
    ours, theirs, start = (np.asarray(x, dtype="float64") for x in (ours, theirs, start))
    if np.isnan(theirs).any():
        return float("inf")
    allowed = of_p * np.abs(theirs).max() + of_change * np.abs(theirs - start).max()
    return float(np.abs(ours - theirs).max()) / max(float(allowed), 1e-300)


def errors(file, row, backend=BACKENDS["numpy"]):
    """For each tensor the largest `error` over all steps; ours is finite in all of them."""
    golden = load(file)
    worst = dict.fromkeys(golden.names, 0.0)
    for theirs, (_, ours) in zip(golden.p, steps(golden, row, backend), strict=True):
        for name, start in golden.p0.items():
            assert np.isfinite(ours[name]).all(), name
            worst[name] = max(worst[name], error(ours[name], theirs[name], start, row.tolerance or golden.dtype))
    return worst


def compared(file, values):
    """Of a dict by tensor, what is not left out."""
    left_out = LEFT_OUT[file].tensors if file in LEFT_OUT else ()
    return {name: value for name, value in values.items() if name not in left_out}


def too_large(file, found, limit=1.0):
    """The tensors not left out whose error is above the limit."""
    return {name: value for name, value in compared(file, found).items() if not value <= limit}


# ---- the trajectories ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", GOLDENS)
def test_every_step_is_that_of_the_original(file):
    assert too_large(file, errors(file, GOLDENS[file])) == {}


LIBRARIES = [(file, library) for file in ON_BACKENDS for library in ("array_api_strict", "torch", "jax")]


@pytest.mark.parametrize(
    ("file", "backend"),
    marked(
        LIBRARIES, lambda file, library: library == "torch" or (library != "jax" and "lamb" in file) or "sgd" in file
    ),  # JAX compiles
    indirect=["backend"],
)
def test_it_is_the_same_in_other_libraries(file, backend):
    if not backend.has(load(file).dtype):
        pytest.skip(f"{backend.name} has no {load(file).dtype}")
    assert too_large(file, errors(file, GOLDENS[file], backend)) == {}


@pytest.mark.parametrize("file", HAVE_EXTRAS)
def test_moments_rates_and_counts_are_those_of_the_original(file):
    golden, row = load(file), GOLDENS[file]
    runs = [(opt, opt.step_count) for opt, _ in steps(golden, row, BACKENDS["numpy"])]
    opt, counts = runs[-1][0], [count for _, count in runs]
    rules = {name: group.rule for group in opt.groups for name in group.names}
    order = golden.meta.get("optimizer_order")
    for key, theirs in golden.arrays.items():
        if key == "w32":
            found = {n: error(opt.state[n]["master"], x, golden.p0[n], "float32") for n, x in theirs.items()}
            assert too_large(file, found) == {}, key
        elif key == "x":
            averaged = opt.averaged()
            found = {n: error(averaged[n], x, golden.p0[n], golden.dtype) for n, x in theirs.items()}
            assert too_large(file, found) == {}
            assert any(np.abs(averaged[n] - opt.params[n]).max() > 1e-3 for n in theirs)
        elif key in SLOTS:
            found = {
                name: np.abs(opt.state[name][SLOTS[key]] - x).max() / max(np.abs(x).max(), 1e-30)
                for name, x in compared(file, theirs).items()
            }
            assert too_large(file, found, MOMENTS) == {}, key
        elif key == "global_step_after":
            assert counts == theirs.tolist()
        elif key == "lr_after":
            np.testing.assert_allclose([row.rule.at(s)["lr"] for s in range(10)], theirs, rtol=RATES, atol=1e-15)
        elif key == "lr_used":
            ours = [[rules[name].at(s)["lr"] for name in order] for s in range(10)]
            np.testing.assert_allclose(ours, theirs, rtol=RATES)
    without_decay = [
        name for name, decays in zip(order or (), golden.meta.get("decay_flags", ()), strict=True) if not decays
    ]
    assert [name for name in without_decay if rules[name].weight_decay != 0.0] == []


# ---- the tables ------------------------------------------------------------------------------------------------------


def test_every_file_is_in_one_table():
    whole = [file for file, row in LEFT_OUT.items() if row.tensors is None]
    assert sorted([*GOLDENS, *whole, *ELSEWHERE]) == FILES
    assert [file for file in LEFT_OUT if file not in GOLDENS and file not in whole] == []


def test_everything_in_a_file_is_compared_or_listed():
    known = {"p0", "g", "p", *SLOTS, *OTHERS, *NOT_COMPARED}
    met = {key for file in [*GOLDENS, *LEFT_OUT] for key in load(file).arrays}
    assert met == known
    assert [file for file in GOLDENS if len(load(file).arrays) > 3] == HAVE_EXTRAS


@pytest.mark.parametrize("file", LEFT_OUT)
def test_what_is_left_out_differs(file):
    row = LEFT_OUT[file]
    found = errors(file, row.nearest or GOLDENS[file])
    assert [name for name in row.tensors or found if found[name] <= 1.0] == []


@pytest.mark.parametrize("file", ON_BACKENDS)
def test_options_that_are_off_by_a_tenth_are_seen(file):
    row, unseen = GOLDENS[file], []
    for field in ("lr", "beta1", "momentum", "decay_rate", "clip_threshold"):
        value = getattr(row.rule, field, None)
        if isinstance(value, float) and value > 0:
            changed = 1 - 1.1 * (1 - value) if field in ("beta1", "momentum") else 1.1 * value
            rule = dataclasses.replace(row.rule, **{field: changed})
            if not too_large(file, errors(file, dataclasses.replace(row, rule=rule))):
                unseen.append(field)
    assert unseen == []


@pytest.mark.parametrize(
    ("file", "switch"),
    [
        ("mx_lans/fused_bounds", "sequential"),
        ("mx_lans/step_bounds", "sequential"),
        ("mx_lans/fused_sched", "sequential"),
        ("mx_lans/step_sched", "sequential"),
        ("ms_adam/amsgrad", "amsgrad"),
    ],
)
def test_switches_that_matter_less_than_the_tolerance_fit_better_as_they_are(file, switch):
    row = GOLDENS[file]
    flipped = dataclasses.replace(row.rule, **{switch: not getattr(row.rule, switch)})
    right, wrong = errors(file, row), errors(file, dataclasses.replace(row, rule=flipped))
    assert max(right.values()) < max(wrong.values()) / 5
