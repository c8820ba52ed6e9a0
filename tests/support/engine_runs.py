"""Problems for tests of engines, runs of them, and comparisons of runs with the engine `array_api`."""

from functools import cache

import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from tests.support.cases import ALL, CASES, IDS, make
from tests.support.engines import COMPILED, FUSED, SLOW
from tests.support.slow import marked
from tests.support.tolerances import TOLERANCES

REFERENCE = "array_api"
ROWS = list(range(len(ALL)))
FIRST = {name: IDS.index(f"{name}-0") for name in CASES}
WITH_REPORTS = {IDS.index(f"{name}-1") for name in CASES}  # these rows also clip gradients and collect reports
FACTORED = ("CAME", "Adafactor")
PLAIN = {name: row for name, row in FIRST.items() if name not in FACTORED}  # compiled code is the same for all ranks
COMPLEX = [name for name in CASES if getattr(ao, name).complex_ok]
SECOND = ("v", "v_max", "r", "c", "ir", "ic")  # averages of squares

SHAPES = {
    "scalar": (),
    "one": (1,),
    "prime": (13,),
    "several chunks": (20011,),
    "empty": (0,),
    "matrix": (5, 7),
    "row": (1, 11),
    "column": (11, 1),
    "several tiles of rows": (300, 257),
    "wide": (2, 8200),
    "several tiles both ways": (5, 8200),
    "tall": (2000, 3),
    "no rows": (0, 3),
    "no columns": (3, 0),
    "batches": (2, 3, 5),
    "many batches": (600, 5, 11),
    "kernel": (5, 4, 3, 3),
    "kernel of several tiles": (2, 2, 2, 8200),
    "rank 5": (2, 3, 2, 3, 4),
    "no batches": (2, 0, 3, 3),
}
LITTLE = ("scalar", "one", "prime", "empty", "matrix", "no columns")
every_row = pytest.mark.parametrize("row", ROWS, ids=IDS)


def named(x):
    """The name of an engine, a row or a dtype, for the identifier of a case."""
    return IDS[x] if isinstance(x, int) else str(x)


all_rows_of_each_engine = pytest.mark.parametrize(
    ("engine", "row"),
    marked(
        ((engine, row) for engine in FUSED for row in ROWS),
        lambda engine, row: (
            engine not in COMPILED or (engine not in SLOW and (row in PLAIN.values() or row == IDS.index("LAMB-1")))
        ),
        named,
    ),
)
ALL_AND_FIRST = [(engine, row) for engine in FUSED for row in (FIRST.values() if engine in COMPILED else ROWS)]
first_rows = pytest.mark.parametrize(
    ("engine", "row"),
    marked(
        ((engine, row) for engine in FUSED for row in FIRST.values()),
        lambda engine, row: engine not in SLOW,
        named,
    ),
)


def drawn(rng, shape, dtype):
    """An array of normally distributed values."""
    x = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.startswith("complex") else 0)
    return np.asarray(x).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@cache
def problem(shapes, dtype="float32", steps=3, grad_dtype=None):
    """Parameters, and gradients of each step, for (name, shape) pairs."""
    rng = np.random.default_rng(0)
    params = {name: drawn(rng, shape, dtype) for name, shape in shapes}
    grads = [{name: drawn(rng, shape, grad_dtype or dtype) for name, shape in shapes} for _ in range(steps)]
    for g in (g for step in grads for g in step.values() if g.ndim > 1 and g.size):
        # keep g away from its mean: centralized, it would be a rounding error divided by its own magnitude
        mean = np.mean(g.astype(complex), axis=tuple(range(1, g.ndim)), keepdims=True)
        g[np.abs(g.astype(complex) - mean) < 1e-3] += 0.01
    return params, grads


def shapes_of(names):
    return tuple((name, SHAPES[name]) for name in names)


def copied(params):
    return {name: np.array(p) for name, p in params.items()}


def contents(opt):
    """Copies of all parameters and slots, and counts."""
    return {
        f"{name}.{key}": np.array(x)
        for name, state in opt.state.items()
        for key, x in {"p": opt.params[name], **state}.items()
    }


def run(engine, rule, params, grads, **options):
    """Return the optimizer after all steps, and its `contents` before the first and after each step."""
    opt = ao.Optimizer(copied(params), rule, engine=engine, **options)
    history = [contents(opt)]
    for g in grads:
        opt.step(g)
        history.append(contents(opt))
    return opt, history


def agree(found, expected, dtype="float32"):
    """Assert that two runs in one dtype agree within twice the tolerance, because each may have that error.

    Averages of squares are compared by their roots: where a gradient is near its mean, the error of the difference is
    as usual, but large in relation to its square.
    """
    tolerance, largest = TOLERANCES[dtype], {}
    assert len(found) == len(expected)
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert list(a) == list(b)
        for key, exact in b.items():
            x, y, name = a[key], exact, key.rpartition(".")[2]
            assert (x.dtype, x.shape) == (y.dtype, y.shape), key
            if name == "t":
                assert x == y, key
                continue
            if name in SECOND:
                x, y = np.sqrt(x), np.sqrt(y)
            largest[key] = max(largest.get(key, 0.0), largest_of(y))
            np.testing.assert_allclose(
                x, y, rtol=2 * tolerance.each, atol=2 * tolerance.relative * largest[key], err_msg=f"{key}, step {step}"
            )


def largest_of(x):
    """The largest finite magnitude."""
    finite = np.abs(x[np.isfinite(x)])
    return float(finite.max()) if finite.size else 0.0


def same(found, expected):
    """Assert that two runs are equal, bit for bit."""
    for a, b in zip(found, expected, strict=True):
        assert list(a) == list(b)
        for key, x in b.items():
            assert (a[key].dtype, a[key].shape) == (x.dtype, x.shape), key
            assert a[key].tobytes() == x.tobytes(), key


def names_for(engine, row):
    """The shapes for a row: not all ranks, if the engine compiles each rank separately."""
    if engine not in COMPILED or row in FIRST.values():
        return tuple(SHAPES)
    name, options = ALL[row]
    if name in FACTORED and row not in WITH_REPORTS and "grad_centralization" not in options:
        return tuple(name for name, shape in SHAPES.items() if len(shape) == 2)
    by_shape = name in FACTORED or ("grad_centralization" in options and name != "SGD")
    return tuple(name for name, shape in SHAPES.items() if len(shape) <= 2 or not by_shape)


def options_of(row):
    return {"clip_norm": 3.0, "stats": True} if row in WITH_REPORTS else {}


@cache
def reference(row, names, dtype="float32", steps=3):
    """The history and the reports of a row in the reference engine."""
    opt, history = run(REFERENCE, make(*ALL[row]), *problem(shapes_of(names), dtype, steps), **options_of(row))
    return history, opt.stats.read() if opt.stats.enabled else None


def same_reports(found, expected):
    """Assert that reports agree. `update_norm` is the norm of p_new - p, and has the rounding error of p."""
    assert {name: sorted(x) for name, x in found.items()} == {name: sorted(x) for name, x in expected.items()}
    for name, report in expected.items():
        for key, x in report.items():
            near = 1e-6 * report["param_norm"] if key == "update_norm" else 0.0
            assert found[name][key] == pytest.approx(x, rel=1e-5, abs=near), (name, key)


WIDE_NAMES = ("scalar", "one", "prime", "empty", "matrix", "several chunks", "several tiles of rows", "no columns")
