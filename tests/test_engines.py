"""The fused engines against the reference: each runs every rule on every kind of tensor as array_api does."""

import importlib
import sys
from functools import cache

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from tests.cases import ALL, CASES, IDS, make
from tests.conftest import BACKENDS
from tests.test_trace import made
from tests.tolerances import TOLERANCES

REFERENCE, FUSED = "array_api", ("numpy", "numba")
ROWS = list(range(len(ALL)))
FIRST = {name: IDS.index(f"{name}-0") for name in CASES}
WITH_REPORTS = {IDS.index(f"{name}-1") for name in CASES}  # these rows also clip gradients and collect reports
FACTORED = ("CAME", "Adafactor")
COMPLEX = ("LAMB", "AdamW")
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
each_engine = pytest.mark.parametrize("engine", FUSED)
every_row = pytest.mark.parametrize("row", ROWS, ids=IDS)
all_and_first = pytest.mark.parametrize(
    ("engine", "row"),
    [*(("numpy", row) for row in ROWS), *(("numba", row) for row in FIRST.values())],
    ids=lambda x: x if isinstance(x, str) else IDS[x],
)
first_rows = pytest.mark.parametrize("row", FIRST.values(), ids=FIRST)


def drawn(rng, shape, dtype):
    """Normally distributed values of a dtype."""
    x = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.startswith("complex") else 0)
    return np.asarray(x).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@cache
def problem(shapes, dtype="float32", steps=3, grad_dtype=None):
    """Parameters, and gradients of each step, for (name, shape) pairs."""
    rng = np.random.default_rng(0)
    params = {name: drawn(rng, shape, dtype) for name, shape in shapes}
    grads = [{name: drawn(rng, shape, grad_dtype or dtype) for name, shape in shapes} for _ in range(steps)]
    for g in (g for step in grads for g in step.values() if g.ndim > 1 and g.size):
        # away from its mean: centralized it would be nothing but rounding errors, over the root of their squares
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
    """The optimizer after all steps, and what it held before the first and after each."""
    opt = ao.Optimizer(copied(params), rule, engine=engine, **options)
    history = [contents(opt)]
    for g in grads:
        opt.step(g)
        history.append(contents(opt))
    return opt, history


def agree(found, expected, dtype="float32"):
    """Two runs in one dtype, each within the tolerance of what is exact: so within twice the tolerance of each other.

    Averages of squares are compared by their roots: where a gradient less its mean is near zero, its error is that of
    any gradient, and relative to its square large.
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
    """Two runs, bit for bit."""
    for a, b in zip(found, expected, strict=True):
        assert list(a) == list(b)
        for key, x in b.items():
            assert (a[key].dtype, a[key].shape) == (x.dtype, x.shape), key
            assert a[key].tobytes() == x.tobytes(), key


# ---- every row and shape --------------------------------------------------------------------------------------------


def names_for(engine, row):
    """With Numba, where each rank takes a module of some seconds, not every row has all ranks."""
    if engine == "numpy" or row in FIRST.values():
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
    """The reference's run of a row."""
    opt, history = run(REFERENCE, make(*ALL[row]), *problem(shapes_of(names), dtype, steps), **options_of(row))
    return history, opt.stats.read() if opt.stats.enabled else None


@each_engine
@every_row
def test_every_row_on_every_shape(engine, row):
    names = names_for(engine, row)
    opt, history = run(engine, make(*ALL[row]), *problem(shapes_of(names)), **options_of(row))
    expected, reports = reference(row, names)
    agree(history, expected)
    if reports is not None:
        same_reports(opt.stats.read(), reports)


@every_row
def test_blocks_of_any_size(row, monkeypatch):
    """With NumPy a block is large, so that few tensors here are of several; in small ones all are."""
    monkeypatch.setattr(importlib.import_module("arrayopt.engines.numpy")._Blocks, "chunk", 1000, raising=False)
    history = run("numpy", make(*ALL[row]), *problem(shapes_of(tuple(SHAPES))), **options_of(row))[1]
    agree(history, reference(row, tuple(SHAPES))[0])


def same_reports(found, expected):
    """Reports of a step; the norm of an update is taken of p_new - p, whose error is as that of p."""
    assert {name: sorted(x) for name, x in found.items()} == {name: sorted(x) for name, x in expected.items()}
    for name, report in expected.items():
        for key, x in report.items():
            near = 1e-6 * report["param_norm"] if key == "update_norm" else 0.0
            assert found[name][key] == pytest.approx(x, rel=1e-5, abs=near), (name, key)


@each_engine
def test_reports_are_of_the_last_step_and_of_tensors_that_took_part(engine):
    params, grads = problem((("w", (5, 7)), ("b", (20011,)), ("e", (0, 3))), steps=2)
    rule = ao.LAMB(bias_correction=False)
    opt = ao.Optimizer(copied(params), rule, engine=engine, clip_norm=1e6, stats=True)
    reports = {}
    for g in ({**grads[0], "b": None}, {**grads[1], "w": None}):
        opt.step(g)
        reports |= {tuple(opt.stats): opt.stats.read()}
    assert list(reports) == [("w",), ("b",)]
    for name, g in (("w", grads[0]["w"]), ("b", grads[1]["b"])):
        report = reports[(name,)][name]
        assert report["grad_norm"] == pytest.approx(np.linalg.norm(g.astype(float)), rel=1e-6)
        assert report["param_norm"] == pytest.approx(np.linalg.norm(params[name].astype(float)), rel=1e-6)


@each_engine
def test_gradients_that_are_scalars_not_in_order_or_not_aligned(engine):
    """What lies otherwise than one aligned element after the other is copied first."""
    params, (g, *_) = problem((("scalar", ()), ("turned", (7, 11)), ("shifted", (13,)), ("strided", (20,))), steps=1)
    raw = np.zeros(13 * 4 + 1, np.uint8)
    raw[1:] = g["shifted"].view(np.uint8)
    odd = {
        "scalar": g["scalar"][()],
        "turned": np.asfortranarray(g["turned"]),
        "shifted": raw[1:].view("float32"),
        "strided": np.repeat(g["strided"], 2)[::2],
    }
    assert isinstance(odd["scalar"], np.float32)
    assert not odd["shifted"].flags.aligned
    same(run(engine, ao.LAMB(), params, [odd])[1], run(engine, ao.LAMB(), params, [g])[1])


@each_engine
@pytest.mark.parametrize("absent", [False, True], ids=["all", "some at a time"])
def test_thousands_of_tiny_tensors(engine, absent):
    rng = np.random.default_rng(1)
    shapes = tuple((f"layers.{i}", tuple(rng.integers(1, 5, rng.integers(0, 4)).tolist())) for i in range(1500))
    params, grads = problem(shapes)
    if absent:
        grads = [{name: g if rng.random() < 0.5 else None for name, g in step.items()} for step in grads]
    agree(run(engine, ao.LAMB(), params, grads)[1], run(REFERENCE, ao.LAMB(), params, grads)[1])


# ---- threads --------------------------------------------------------------------------------------------------------

SHARED = (("shared", (601, 1009)), ("b", (40009,)), ("c", (70001,)), *((f"tiny.{i}", (i,)) for i in range(1, 40)))


@all_and_first
def test_the_number_of_threads_changes_no_bit(engine, row, monkeypatch):
    rule, (params, grads) = make(*ALL[row]), problem(SHARED, steps=2)
    runs = {}
    for threads in (1, 2, 3, 7):
        monkeypatch.setenv("ARRAYOPT_NUM_THREADS", str(threads))
        opt, runs[threads] = run(engine, rule, params, grads, **options_of(row))
        assert f"{threads} threads" in opt.explain()
    for threads in (2, 3, 7):
        same(runs[threads], runs[1])
    agree(runs[1], run(REFERENCE, rule, params, grads, **options_of(row))[1])


@each_engine
def test_the_number_of_threads_may_change_between_steps(engine, monkeypatch):
    params, grads = problem(SHARED, steps=2)
    straight = run(engine, ao.LAMB(), params, grads)[1]
    opt = ao.Optimizer(copied(params), ao.LAMB(), engine=engine)
    for threads, g in zip((3, 1), grads, strict=True):
        monkeypatch.setenv("ARRAYOPT_NUM_THREADS", str(threads))
        opt.step(g)
    same([contents(opt)], straight[-1:])


@each_engine
@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "", " ", "²"])
def test_a_number_of_threads_that_is_none_is_refused_before_anything_is_written(engine, value, monkeypatch):
    params, (g, *_) = problem(shapes_of(LITTLE))
    opt = ao.Optimizer(copied(params), ao.SGD(lr=0.1), engine=engine)
    before = contents(opt)
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", value)
    with pytest.raises(ValueError, match=f"ARRAYOPT_NUM_THREADS must be a positive integer; got {value!r}"):
        opt.step(g)
    same([contents(opt)], [before])
    assert opt.step_count == 0


@pytest.mark.parametrize(
    ("cores", "quota", "expected"),
    [
        ({0, 1, 2, 3}, "max 100000", 4),
        ({0, 1, 2, 3}, "250000 100000", 3),
        ({0, 1, 2, 3}, "50000 100000", 1),
        ({2}, "400000 100000", 1),
        ({0, 5}, None, 2),
        ({0, 5}, "nonsense", 2),
    ],
)
def test_by_default_all_cores_that_the_process_may_use(cores, quota, expected, monkeypatch):
    threads = importlib.import_module("arrayopt.engines.threads")

    def read_text(path):
        if quota is None:
            raise FileNotFoundError(path)
        return f"{quota}\n"

    monkeypatch.delenv("ARRAYOPT_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: cores, raising=False)
    monkeypatch.setattr(threads.Path, "read_text", read_text)
    assert threads.thread_count() == expected
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "5")
    assert threads.thread_count() == 5


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_on_a_thread_is_raised_after_all_have_ended(failing):
    threads, done = importlib.import_module("arrayopt.engines.threads"), []

    def task(i):
        if i == failing:
            raise ArithmeticError(i)
        done.append(i)

    with pytest.raises(ArithmeticError, match=str(failing)):
        threads.run([lambda i=i: task(i) for i in range(3)])
    assert sorted([*done, failing]) == [0, 1, 2]


# ---- dtypes ---------------------------------------------------------------------------------------------------------

# with Numba each of these is a module to compile: so the rules are shared out
DTYPES = {
    "float16": ("LAMB", "SGD", "CAME"),
    "bfloat16": ("AdamW", "LANS", "Adafactor"),
    "float64": ("LARS", "Adam", "LAMB"),
}
NARROW = ("float16", "bfloat16")
WIDE_NAMES = ("scalar", "one", "prime", "empty", "matrix", "several chunks", "several tiles of rows", "no columns")


def placed(dtypes, *, narrow):
    """(engine, row, dtype): all rows with NumPy, first rows of some rules with Numba."""
    kinds = [dtype for dtype in dtypes if (dtype in NARROW) == narrow]
    made = [("numpy", row, dtype) for row in ROWS for dtype in kinds]
    made += [("numba", FIRST[name], dtype) for dtype in kinds for name in dtypes[dtype]]
    return [pytest.param(*case, id=f"{case[0]}-{IDS[case[1]]}-{case[2]}") for case in made]


def numba_names(engine, row, names):
    return tuple(name for name in names if engine == "numpy" or len(SHAPES[name]) != 1 or ALL[row][0] not in FACTORED)


@pytest.mark.parametrize(("engine", "row", "dtype"), placed(DTYPES, narrow=False))
def test_float64(engine, row, dtype):
    names = WIDE_NAMES if engine == "numpy" else numba_names(engine, row, WIDE_NAMES[1:])
    history = run(engine, make(*ALL[row]), *problem(shapes_of(names), dtype), **options_of(row))[1]
    agree(history, reference(row, names, dtype)[0], dtype)


@pytest.mark.parametrize(("engine", "row", "dtype"), placed(DTYPES, narrow=True))
def test_narrow_dtypes_have_float32_state_and_are_rounded_once(engine, row, dtype):
    """Each step from the reference's state: parameters then differ only where float32's error crosses a rounding."""
    names = WIDE_NAMES if engine == "numpy" else numba_names(engine, row, WIDE_NAMES[1:])
    params, grads = problem(shapes_of(names), dtype)
    opts = [ao.Optimizer(copied(params), make(*ALL[row]), engine=e, **options_of(row)) for e in (engine, REFERENCE)]
    for step, g in enumerate(grads):
        opts[0].load_state_dict(opts[1].state_dict())
        for name, p in opts[1].params.items():
            opts[0].params[name][...] = p
        for opt in opts:
            opt.step(g)
        found, expected = map(contents, opts)
        states = [{k: x for k, x in made.items() if not k.endswith(".p")} for made in (found, expected)]
        agree(states[:1], states[1:])
        for name in names:
            x, y = (made[f"{name}.p"] for made in (found, expected))
            assert (x.dtype, x.shape) == (y.dtype, y.shape) == (params[name].dtype, params[name].shape)
            off = np.abs(x.astype(float) - y.astype(float))
            unit = np.spacing(np.abs(y).astype(x.dtype)).astype(float)
            near = 2 * TOLERANCES["float32"].relative * largest_of(y.astype(float))
            assert np.all(off <= unit + near), (name, step, np.max(off / unit))
            assert x.size < 100 or np.mean(off != 0) <= 0.01, (name, step)


COMPLEX_CASES = [
    *(("numpy", row, d) for row in ROWS if ALL[row][0] in COMPLEX for d in ("complex64", "complex128")),
    *(("numba", IDS.index(name), "complex64") for name in ("LAMB-0", "LAMB-2", "AdamW-2")),
    ("numba", IDS.index("LAMB-1"), "complex128"),
]


@pytest.mark.parametrize(
    ("engine", "row", "dtype"),
    [pytest.param(*case, id=f"{case[0]}-{IDS[case[1]]}-{case[2]}") for case in COMPLEX_CASES],
)
def test_complex(engine, row, dtype):
    opt, history = run(engine, make(*ALL[row]), *problem(shapes_of(WIDE_NAMES), dtype), **options_of(row))
    expected, reports = reference(row, WIDE_NAMES, dtype)
    agree(history, expected, dtype)
    if reports is not None:
        same_reports(opt.stats.read(), reports)


OTHER_GRADS = [("float32", "float64"), ("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")]
OTHER_GRADS += [("float16", "float64"), ("float64", "float32")]


@pytest.mark.parametrize(
    ("engine", "row", "dtype", "grad_dtype"),
    [
        *(("numpy", row, *dtypes) for row in FIRST.values() for dtypes in OTHER_GRADS),
        *(("numba", IDS.index("SGD-1"), *dtypes) for dtypes in OTHER_GRADS),
    ],
    ids=lambda x: IDS[x] if isinstance(x, int) else x,
)
def test_gradients_of_another_dtype(engine, row, dtype, grad_dtype):
    params, grads = problem(shapes_of(WIDE_NAMES), dtype, 2, grad_dtype)
    found, expected = (run(e, make(*ALL[row]), params, grads[:1])[1] for e in (engine, REFERENCE))
    if dtype in NARROW:
        found, expected = ([{k: np.float32(x) for k, x in step.items()} for step in made] for made in (found, expected))
        for x, y in zip(found[-1].values(), expected[-1].values(), strict=True):
            np.testing.assert_allclose(x, y, rtol=2.0**-7, atol=1e-5)
    else:
        agree(found, expected, dtype)


@pytest.mark.parametrize(
    ("engine", "row"), [("numpy", FIRST["LAMB"]), ("numpy", FIRST["CAME"]), ("numba", IDS.index("SGD-1"))]
)
def test_gradients_of_several_dtypes_in_one_step(engine, row):
    """Also different ones in the next step, with some left out."""
    params, _ = problem(shapes_of(WIDE_NAMES))
    dtypes = ("float32", "float64", "float16", None, "float32")
    grads = []
    for step in range(3):
        drawn_ = problem(shapes_of(WIDE_NAMES), "float16", 3)[1][step]
        kinds = {name: dtypes[(i + step) % len(dtypes)] for i, name in enumerate(drawn_)}
        grads.append({name: None if kinds[name] is None else g.astype(kinds[name]) for name, g in drawn_.items()})
    found, expected = (run(e, make(*ALL[row]), params, grads)[1] for e in (engine, REFERENCE))
    agree(found, expected)


@each_engine
def test_parameters_of_several_dtypes_in_one_optimizer(engine):
    kinds = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
    rng = np.random.default_rng(0)
    params = {kind: drawn(rng, (20011,), kind) for kind in kinds}
    grads = [{kind: drawn(rng, (20011,), kind) for kind in kinds} for _ in range(2)]
    (opt, found), (_, expected) = (run(e, ao.AdamW(lr=0.1), params, grads) for e in (engine, REFERENCE))
    assert opt.explain().count(f"engine {engine} ") == len(opt._tensors.buckets()) == len(kinds)
    for kind in kinds:
        parts = [[{k: x for k, x in step.items() if k.startswith(f"{kind}.")} for step in y] for y in (found, expected)]
        if kind in NARROW:
            x, y = (part[-1][f"{kind}.p"].astype(float) for part in parts)
            np.testing.assert_allclose(x, y, rtol=2.0 ** (-6 if kind == "bfloat16" else -9), atol=1e-3)
        else:
            agree(*parts, kind)


# ---- layouts in memory ----------------------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda x: x.T,
    "strided": lambda x: x[::2, ::3],
    "offset": lambda x: x[2:, 1:],
    "negative": lambda x: x[::-1, ::-2],
    "column": lambda x: x[:, 3],
    "diagonal": lambda x: np.lib.stride_tricks.as_strided(x, (min(x.shape),), (sum(x.strides),)),
    "0-d": lambda x: x[1, 2, ...],
    "batches": lambda x: x[:130, :60].reshape(13, 10, 60).transpose(2, 0, 1),
    "misaligned": lambda x: np.frombuffer(bytearray(b"." + x.tobytes()), x.dtype, x.size, 1).reshape(x.shape),
}


@each_engine
@pytest.mark.parametrize("row", [FIRST["LAMB"], FIRST["CAME"], IDS.index("SGD-1")], ids=("LAMB", "CAME", "SGD"))
def test_layouts_change_no_bit_and_nothing_beside(engine, row):
    rng = np.random.default_rng(0)
    bases = {name: drawn(rng, (151, 67), "float32") for name in LAYOUTS}
    views = {name: view(bases[name]) for name, view in LAYOUTS.items()}
    untouched = copied(bases)
    grads = [{name: view(drawn(rng, (151, 67), "float32")) for name, view in LAYOUTS.items()} for _ in range(3)]
    dense = [{name: np.array(g, order="C") for name, g in step.items()} for step in grads]
    straight = run(engine, make(*ALL[row]), {name: np.array(x, order="C") for name, x in views.items()}, dense)[1]
    opt = ao.Optimizer(views, make(*ALL[row]), engine=engine)
    for step, g in enumerate(grads):
        opt.step(g)
        same([contents(opt)], [straight[step + 1]])
    for name, view in LAYOUTS.items():
        assert opt.params[name] is views[name]
        if name not in ("batches", "misaligned"):  # these are copies of their base
            view(untouched[name])[...] = views[name]
            assert bases[name].tobytes() == untouched[name].tobytes(), f"{name}: wrote beside the view"


@each_engine
def test_slots_may_lie_in_any_way(engine):
    params, grads = problem((("w", (300, 257)), ("b", (13,))))
    straight = run(engine, ao.LAMB(), params, grads)[1]
    opt = ao.Optimizer(copied(params), ao.LAMB(), engine=engine)
    for step, g in enumerate(grads):
        saved = opt.state_dict()
        for tensor in saved["tensors"].values():
            tensor["slots"] = {name: np.asfortranarray(x) for name, x in tensor["slots"].items()}
        opt.load_state_dict(saved)
        opt.step(g)
        same([contents(opt)], [straight[step + 1]])


@each_engine
def test_read_only_parameters_are_replaced(engine):
    params, grads = problem(shapes_of(("several chunks", "matrix", "scalar", "prime")))
    frozen = copied(params)
    for p in frozen.values():
        p.flags.writeable = False
    opt = ao.Optimizer(dict(frozen), ao.LAMB(), engine=engine)
    straight = run(engine, ao.LAMB(), params, grads)[1]
    for step, g in enumerate(grads):
        result = opt.step(g)
        assert all(result[name] is opt.params[name] is not frozen[name] for name in frozen)
        same([contents(opt)], [straight[step + 1]])
    assert all(frozen[name].tobytes() == p.tobytes() for name, p in params.items())


@each_engine
def test_read_only_gradients_and_numpy_scalars(engine):
    p, g = np.float32(3.0), np.ones(3, "float32")
    g.flags.writeable = False
    result = ao.Optimizer({"s": p, "w": np.ones(3, "float32")}, ao.SGD(lr=0.5), engine=engine).step(
        {"s": np.float32(2.0), "w": g}
    )
    assert (float(result["s"]), result["s"].dtype, result["s"].shape) == (2.0, np.float32, ())
    assert (result["w"].tolist(), g.tolist()) == ([0.5] * 3, [1.0] * 3)


@each_engine
def test_gradients_are_not_written(engine):
    params, grads = problem(shapes_of(LITTLE))
    given = [copied(g) for g in grads]
    run(engine, ao.LAMB(bias_correction=False), params, given, clip_norm=0.1, stats=True)
    same(given, grads)


@each_engine
def test_other_arrays_in_the_place_of_a_parameters_memory_are_seen(engine):
    """A parameter changed from outside between steps, and state that is loaded, are what the next step starts from."""
    params, grads = problem(shapes_of(("several chunks", "matrix")))
    opts = [ao.Optimizer(copied(params), ao.LAMB(), engine=e) for e in (engine, REFERENCE)]
    for opt in opts:
        opt.step(grads[0])
        saved = opt.state_dict()
        opt.step(grads[1])
        for name, p in params.items():
            opt.params[name][...] = p
        opt.load_state_dict(saved)
        opt.step(grads[2])
    agree(*([contents(opt)] for opt in opts))


# ---- awkward values -------------------------------------------------------------------------------------------------


def planted(params, grads, values, *, in_params):
    """Copies with values planted here and there."""
    params, grads = copied(params), [copied(g) for g in grads]
    for arrays in (params,) if in_params else grads:
        for x in arrays.values():
            if x.size > len(values):
                x.reshape(-1)[:: max(1, x.size // len(values))][: len(values)] = values
    return params, grads


AWKWARD = {
    "NaN": [np.nan],
    "infinities": [np.inf, -np.inf],
    "everything": [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-39, 1e30, 3e38, 1e-30],
    "subnormal": [1e-45, -1e-40, 1e-39],
    "tiny": [1e-23, 1e-30, -1e-20],
    "huge": [1e19, -1e20, 3e38],
    "zeros": [0.0, -0.0],
}


@each_engine
@first_rows
@pytest.mark.parametrize("kind", AWKWARD)
@pytest.mark.parametrize("in_params", [False, True], ids=["gradients", "parameters"])
def test_awkward_values_pass_through_as_in_the_reference(engine, row, kind, in_params):
    names = ("prime", "several chunks", "matrix", "wide")
    params, grads = planted(*problem(shapes_of(names), steps=2), AWKWARD[kind], in_params=in_params)
    histories = []
    for e in (engine, REFERENCE):
        with np.errstate(all="ignore"):
            histories.append(run(e, make(*ALL[row]), params, grads)[1])
    agree(*histories)
    for a, b in zip(*histories, strict=True):
        for key in a:
            assert np.array_equal(np.isnan(a[key]), np.isnan(b[key])), key
            assert np.array_equal(np.isinf(a[key]), np.isinf(b[key])), key


@all_and_first
@pytest.mark.parametrize("what", ["parameters", "gradients", "both"])
def test_zero_tensors(engine, row, what):
    params, grads = problem(shapes_of(("scalar", "prime", "matrix", "several chunks")))
    params = {name: p * 0 for name, p in params.items()} if what != "gradients" else params
    grads = [{name: g * 0 for name, g in step.items()} for step in grads] if what != "parameters" else grads
    found, expected = (run(e, make(*ALL[row]), params, grads)[1] for e in (engine, REFERENCE))
    agree(found, expected)
    assert all(np.isfinite(x).all() for x in found[-1].values())


@each_engine
@first_rows
@pytest.mark.parametrize("size", [1e-20, 1e-37, 1e18, 1e20])
def test_whole_tensors_of_extreme_size(engine, row, size):
    """Squares that vanish or overflow do so as in the reference."""
    params, grads = problem(shapes_of(("prime", "matrix")), steps=2)
    grads = [{name: (g.astype(float) * size).astype("float32") for name, g in step.items()} for step in grads]
    with np.errstate(all="ignore"):
        found, expected = (run(e, make(*ALL[row]), params, grads)[1] for e in (engine, REFERENCE))
    agree(found, expected)


@each_engine
def test_warnings_are_not_for_what_is_data(engine):
    """Overflow and NaN in a step raise no warnings (which are errors here)."""
    params, grads = problem(shapes_of(("prime", "matrix", "several chunks")))
    params, grads = planted(params, grads, AWKWARD["everything"], in_params=False)
    run(engine, ao.LAMB(), params, grads)


# ---- steps that leave tensors out, resuming, groups -----------------------------------------------------------------


@each_engine
@first_rows
def test_left_out_tensors_keep_their_own_count(engine, row):
    rng = np.random.default_rng(3)
    names = ("scalar", "one", "prime", "empty", "matrix", "wide", "several chunks", "no columns")
    params, grads = problem(shapes_of(names), steps=5)
    grads = [{name: None if rng.random() < 0.4 else g for name, g in step.items()} for step in grads]
    grads[2] = dict.fromkeys(names)
    found, expected = (run(e, make(*ALL[row]), params, grads)[1] for e in (engine, REFERENCE))
    agree(found, expected)
    same([found[3]], [found[2]])
    counts = {name: int(found[-1][f"{name}.t"]) for name in names}
    assert counts == {name: sum(step[name] is not None for step in grads) for name in names}


@each_engine
@first_rows
def test_a_resumed_run_is_the_same_to_the_bit(engine, row):
    params, grads = problem(shapes_of(WIDE_NAMES), steps=5)
    rule = make(*ALL[row])
    straight = run(engine, rule, params, grads)[1]
    first, _ = run(engine, rule, params, grads[:2])
    second = ao.Optimizer(copied(first.params), rule, engine=engine)
    second.load_state_dict(first.state_dict())
    for step, g in enumerate(grads[2:]):
        second.step(g)
        same([contents(second)], [straight[step + 3]])


@pytest.mark.parametrize(
    "order", [("numba", "numpy", REFERENCE), (REFERENCE, "numba", "numpy"), ("numpy", REFERENCE, "numba")]
)
@first_rows
def test_a_run_may_go_on_with_another_engine(order, row):
    params, grads = problem(shapes_of(WIDE_NAMES), steps=6)
    rule, history = make(*ALL[row]), []
    opt = None
    for i, engine in enumerate(order):
        before, opt = opt, ao.Optimizer(copied(opt.params if opt else params), rule, engine=engine)
        if before:
            opt.load_state_dict(before.state_dict())
        for g in grads[2 * i : 2 * i + 2]:
            opt.step(g)
            history.append(contents(opt))
    agree(history, run(REFERENCE, rule, params, grads)[1][1:])


def fused_modules():
    """The modules that have been generated so far."""
    return {name for name in sys.modules if name.startswith("arrayopt_fused_")}


@each_engine
def test_groups_that_differ_in_numbers_are_one_bucket(engine):
    names = ("scalar", "prime", "matrix", "several chunks", "wide", "several tiles of rows")
    params, grads = problem(shapes_of(names))
    groups = {
        "scalar": {"lr": 0.3, "weight_decay": 0.0},
        "several*": {"lr": [0.1, 0.2, 0.3], "beta1": 0.5},
        "wide": {"lr": lambda step: 0.1 / (step + 1), "eps": 1e-3},
    }
    before = fused_modules()
    opt, found = run(engine, ao.LAMB(lr=0.05), params, grads, groups=groups)
    agree(found, run(REFERENCE, ao.LAMB(lr=0.05), params, grads, groups=groups)[1])
    assert len(opt._tensors.buckets()) == 1
    assert opt.explain().count("engine ") == 1
    assert opt.explain().count("LAMB(") == 4
    assert len(fused_modules() - before) <= (engine == "numba")


@each_engine
def test_groups_that_differ_in_structure_are_buckets_of_their_own(engine):
    params, grads = problem(shapes_of(("prime", "matrix", "several chunks")))
    groups = {"prime": {"adapt": False}, "matrix": {"adapt": False, "weight_decay": 0.0}}
    opt, found = run(engine, ao.LAMB(lr=0.05), params, grads, groups=groups)
    assert [[x.name for x in bucket.tensors] for bucket in opt._tensors.buckets()] == [
        ["prime", "matrix"],
        ["several chunks"],
    ]
    agree(found, run(REFERENCE, ao.LAMB(lr=0.05), params, grads, groups=groups)[1])


@each_engine
def test_numbers_that_change_take_effect_and_compile_nothing(engine):
    params, grads = problem(shapes_of(("prime", "matrix", "several chunks")), steps=5)
    groups, histories = {"matrix": {"weight_decay": 0.3}}, []
    for e in (engine, REFERENCE):
        rule = ao.LAMB(lr=ao.schedules.Cosine(0.1, 4), bias_correction=False)
        opt = ao.Optimizer(copied(params), rule, groups=groups, engine=e, clip_norm=9.0, stats=True)
        opt.step(grads[0])
        before = fused_modules()
        buckets = list(opt._tensors.buckets())
        opt.step(grads[1])
        opt.lr = 0.5
        opt.groups[0].beta2 = 0.9
        opt.step(grads[2])
        opt.groups[0].lr = [0.0, 0.0, 0.0, 0.25, 0.125]
        opt.clip_norm = 1.0
        opt.step(grads[3])
        opt.weight_decay = 0.0
        opt.step(grads[4])
        histories.append([contents(opt)])
        assert opt._tensors.buckets() == buckets
        assert fused_modules() == before
    agree(*histories)


@each_engine
def test_a_change_of_structure_and_a_new_group_are_followed(engine):
    params, grads = problem(shapes_of(("prime", "matrix", "several chunks")))
    histories = []
    for e in (engine, REFERENCE):
        opt = ao.Optimizer({name: np.array(params[name]) for name in ("prime", "matrix")}, ao.LAMB(lr=0.1), engine=e)
        opt.step({name: grads[0][name] for name in ("prime", "matrix")})
        opt.add_group({"several chunks": np.array(params["several chunks"])}, lr=0.3)
        opt.step(grads[1])
        opt.adapt = False
        opt.step(grads[2])
        histories.append([contents(opt)])
    agree(*histories)


@each_engine
def test_two_optimizers_do_not_meet(engine):
    params, grads = problem(shapes_of(("prime", "matrix", "several chunks", "wide")))
    rules = ao.LAMB(lr=0.1), ao.LAMB(lr=0.2), ao.AdamW(lr=0.1)
    alone = [run(engine, rule, params, grads)[1] for rule in rules]
    opts = [ao.Optimizer(copied(params), rule, engine=engine) for rule in rules]
    for step, g in enumerate(grads):
        for opt, history in zip(opts, alone, strict=True):
            opt.step(g)
            same([contents(opt)], [history[step + 1]])


# ---- what an engine refuses, and what it says of itself -------------------------------------------------------------


def test_an_engine_of_no_such_name():
    with pytest.raises(
        ValueError, match=r"`engine` must be 'auto' or one of 'array_api', 'numpy', 'numba'.*; got 'nympy'"
    ):
        ao.Optimizer(np.ones(3), ao.LAMB(), engine="nympy")


@each_engine
def test_arrays_of_another_library_are_refused(engine):
    takes = {"numpy": "numpy arrays", "numba": "numpy and torch arrays"}[engine]
    with pytest.raises(ValueError, match=f"engine '{engine}' cannot run LAMB: it takes {takes}; got jax.numpy"):
        ao.Optimizer({"w": jnp.ones(3)}, ao.LAMB(), engine=engine)
    assert "engine array_api" in ao.Optimizer({"w": jnp.ones(3)}, ao.LAMB()).explain()
    strict = BACKENDS["array_api_strict"].array([1.0])
    with pytest.raises(ValueError, match=f"it takes {takes}; got array_api_strict"):
        ao.Optimizer({"w": np.ones(3), "x": strict}, ao.LAMB(), engine=engine)


def test_numba_that_is_not_installed(monkeypatch):
    engines = importlib.import_module("arrayopt.engines")
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"engine 'numba' cannot run LAMB: .*not installed; pip install 'arrayopt\[cpu\]'"
    ):
        ao.Optimizer(np.ones(3), ao.LAMB(), engine="numba")
    assert "engine numpy" in ao.Optimizer(np.ones(3), ao.LAMB()).explain()


def by_value(xp, p, g, s, h):
    return (p - g if xp.sum(g) > 0 else p + g), {}


@each_engine
def test_a_rule_that_cannot_be_traced_is_refused_with_the_reason(engine):
    why = "`if` and `and` cannot depend on an array's value.*engine='array_api' runs this one as it is"
    with pytest.raises(ValueError, match=f"engine '{engine}' cannot run Made: {why}"):
        ao.Optimizer(np.ones(3), made(by_value)(), engine=engine)


def test_by_default_a_rule_that_cannot_be_traced_is_run_as_it_is():
    opt = ao.Optimizer(np.zeros(3), made(by_value)())
    assert opt.step(np.ones(3)).tolist() == [-1.0] * 3
    assert "engine array_api (numba: `if` and `and` cannot depend on an array's value" in opt.explain()


@pytest.mark.parametrize(
    "update",
    [
        lambda xp, p, g, s, h: (p - (g.T).T, {}),
        lambda xp, p, g, s, h: (p - g / p.size, {}),
        lambda xp, p, g, s, h: (p - g % 2.0, {}),
        lambda xp, p, g, s, h: (p - xp.linalg.diagonal(g)[0], {}),
    ],
)
def test_by_default_whatever_else_cannot_be_traced_is_run_as_it_is(update):
    ao.Optimizer(np.ones((2, 2)), made(update)(), engine=REFERENCE).step(np.ones((2, 2)))
    ao.Optimizer(np.ones((2, 2)), made(update)()).step(np.ones((2, 2)))


@each_engine
def test_reports_that_cannot_be_fused_are_refused_at_once(engine):
    rule = made(lambda xp, p, g, s, h: (p - g, {"rows": xp.mean(g, axis=-1)}))()
    with pytest.raises(ValueError, match="only values per tensor can be reported"):
        ao.Optimizer(np.ones((2, 2)), rule, engine=engine, stats=True)


@each_engine
def test_a_step_that_raises_has_changed_nothing(engine):
    params, grads = problem(shapes_of(("prime", "matrix", "several chunks")))
    groups = {"matrix": {"lr": [0.1, 0.2]}, "prime": {"adapt": False}}
    opt, history = run(engine, ao.LAMB(lr=0.1), params, grads[:2], groups=groups)
    with pytest.raises(ValueError, match="has run out at step 2"):
        opt.step(grads[2])
    with pytest.raises(ValueError, match=r"shape \(14,\) at 'prime'"):
        opt.step({**grads[2], "prime": np.ones(14, "float32")})
    same([contents(opt)], [history[-1]])
    assert opt.step_count == 2


def test_constants_of_any_size_compile():
    rule = made(lambda xp, p, g, s, h: (p - h.lr * xp.where(xp.isfinite(g), xp.maximum(g, -1e-300), 3.0), {}))()
    params, grads = problem((("w", (13,)),))
    agree(run("numba", rule, params, grads)[1], run(REFERENCE, rule, params, grads)[1])


def test_infinite_constants_compile():
    rule = made(lambda xp, p, g, s, h: (p - h.lr * xp.minimum(g, np.inf), {}))()
    params, grads = problem((("w", (13,)),))
    agree(run("numba", rule, params, grads)[1], run(REFERENCE, rule, params, grads)[1])


def test_a_rule_that_does_not_compile_raises_before_anything_is_written():
    rule = made(lambda xp, p, g, s, h: (p - h.lr * xp.exp(g), {}), complex_ok=True)()
    params = {"real": np.ones(3), "complex": np.ones(3, complex)}
    try:
        opt = ao.Optimizer(copied(params), rule, engine="numba")
        opt.step({name: np.ones_like(p) for name, p in params.items()})
    except ValueError:
        return
    except Exception:
        same([copied(opt.params)], [params])
        raise AssertionError("not a ValueError") from None


def test_the_reference_may_hand_an_array_over():
    rule = made(lambda xp, p, g, s, h: (p - h.lr * g, {"before": p}), lambda xp, p: {"before": xp.zeros_like(p)})()
    before, opt = np.arange(3.0), ao.Optimizer({"w": np.arange(3.0)}, rule, engine=REFERENCE)
    opt.step({"w": np.ones(3)})
    assert opt.state["w"]["before"].tolist() == before.tolist()


EXPLAINED = """\
AdamW(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.01, bias_correction=True)
  3 tensors, 16 parameters, float32, numpy on cpu
  engine {engine} ({why}): {how}, 3 threads
    pass 0: load p g m v; store p m v; reduce -; 28 B
    28 bytes per float32 parameter"""
HOW = {"numpy": "NumPy on blocks that stay in cache", "numba": "fused loops"}


@pytest.mark.parametrize(
    ("asked", "engine", "why"),
    [
        ("numpy", "numpy", "asked for"),
        ("numba", "numba", "asked for"),
        ("auto", "numba", "the fastest for numpy arrays"),
    ],
)
def test_an_optimizer_explains_itself(asked, engine, why, monkeypatch):
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "3")
    params = {"w": np.ones((3, 4), "float32"), "b": np.ones(4, "float32"), "e": np.ones((0, 2), "float32")}
    opt = ao.Optimizer(params, ao.AdamW(lr=0.1), engine=asked)
    assert opt.explain() == EXPLAINED.format(engine=engine, why=why, how=HOW[engine])


@each_engine
def test_tensors_of_several_ranks_and_empty_ones_are_explained(engine):
    params = {"w": np.ones((3, 4)), "b": np.ones(4), "k": np.ones((2, 2, 2))}
    text = ao.Optimizer(params, ao.CAME(lr=0.1), engine=engine).explain()
    assert [line.strip() for line in text.splitlines() if "bytes" in line or "rank" in line] == [
        "rank 1:",
        "72 bytes per float64 parameter",
        "rank 2:",
        "64 bytes per float64 parameter",
        "rank 3:",
        "64 bytes per float64 parameter",
    ]
    params = {"s": np.ones(()), "b": np.ones(4), "w": np.ones((3, 4))}
    assert "\n    ranks 0, 1:\n      pass 0: load" in ao.Optimizer(params, ao.CAME(lr=0.1), engine=engine).explain()
    assert "rank" not in ao.Optimizer(params, ao.LAMB(), engine=engine).explain()  # one plan does for all
    assert ao.Optimizer(np.ones((0, 3)), ao.CAME(lr=0.1), engine=engine).explain().endswith("threads")
    assert ao.Optimizer(np.ones((0, 3)), ao.CAME(lr=0.1), engine=engine).step(np.ones((0, 3))).shape == (0, 3)
