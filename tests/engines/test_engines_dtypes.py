"""The fused engines against the reference: parameters and gradients of every dtype."""

import numpy as np
import pytest

import arrayopt as ao
from tests.support.cases import ALL, IDS, make
from tests.support.engine_runs import (
    COMPLEX,
    FACTORED,
    FIRST,
    REFERENCE,
    ROWS,
    SHAPES,
    WIDE_NAMES,
    agree,
    contents,
    copied,
    drawn,
    largest_of,
    named,
    options_of,
    problem,
    reference,
    run,
    same_reports,
    shapes_of,
)
from tests.support.engines import COMPILED, SLOW, each_fused
from tests.support.slow import marked
from tests.support.tolerances import TOLERANCES

# each of these is compiled: so the rules are shared out, and each run has the first of a dtype
DTYPES = {
    "float16": ("SGD", "LAMB", "CAME"),
    "bfloat16": ("AdamW", "LANS", "Adafactor"),
    "float64": ("LARS", "Adam", "LAMB"),
}
NARROW = ("float16", "bfloat16")


def placed(dtypes, *, narrow):
    """(engine, row, dtype): all rows with NumPy, first rows of some rules compiled; each run has first rows."""
    kinds = [dtype for dtype in dtypes if (dtype in NARROW) == narrow]
    made = [("numpy", row, dtype) for row in ROWS for dtype in kinds]
    made += [(engine, FIRST[name], dtype) for engine in COMPILED for dtype in kinds for name in dtypes[dtype]]

    def quick(engine, row, dtype):
        if engine in SLOW:
            return (row, dtype) == (FIRST["SGD"], "float16")
        return row in FIRST.values() if engine not in COMPILED else ALL[row][0] == dtypes[dtype][0]

    return marked(made, quick, named)


def names_of(engine, row):
    """The shapes: where each rank is compiled anew, not all."""
    if engine not in COMPILED:
        return WIDE_NAMES
    return tuple(name for name in WIDE_NAMES[1:] if len(SHAPES[name]) != 1 or ALL[row][0] not in FACTORED)


@pytest.mark.parametrize(("engine", "row", "dtype"), placed(DTYPES, narrow=False))
def test_float64(engine, row, dtype):
    names = names_of(engine, row)
    history = run(engine, make(*ALL[row]), *problem(shapes_of(names), dtype), **options_of(row))[1]
    agree(history, reference(row, names, dtype)[0], dtype)


@pytest.mark.parametrize(("engine", "row", "dtype"), placed(DTYPES, narrow=True))
def test_narrow_dtypes_have_float32_state_and_are_rounded_once(engine, row, dtype):
    """Each step from the reference's state: parameters then differ only where float32's error crosses a rounding."""
    names = names_of(engine, row)
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
    *((engine, IDS.index(name), "complex64") for engine in COMPILED for name in ("LAMB-0", "LAMB-2", "AdamW-2")),
    *((engine, IDS.index("LAMB-1"), "complex128") for engine in COMPILED),
]


@pytest.mark.parametrize(
    ("engine", "row", "dtype"),
    marked(COMPLEX_CASES, lambda engine, row, dtype: row in FIRST.values() and engine not in SLOW, named),
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
    marked(
        [
            *(("numpy", row, *dtypes) for row in FIRST.values() for dtypes in OTHER_GRADS),
            *((engine, IDS.index("SGD-1"), *dtypes) for engine in COMPILED for dtypes in OTHER_GRADS),
        ],
        lambda engine, row, *dtypes: (
            engine not in COMPILED or (engine not in SLOW and dtypes in (OTHER_GRADS[0], OTHER_GRADS[3]))
        ),
        named,
    ),
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
    ("engine", "row"),
    marked(
        [("numpy", FIRST["LAMB"]), ("numpy", FIRST["CAME"]), *((engine, IDS.index("SGD-1")) for engine in COMPILED)],
        lambda engine, row: engine not in SLOW,
        named,
    ),
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


@each_fused
def test_parameters_of_several_dtypes_in_one_optimizer(engine):
    kinds = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
    rng = np.random.default_rng(0)
    params = {kind: drawn(rng, (20011,), kind) for kind in kinds}
    grads = [{kind: drawn(rng, (20011,), kind) for kind in kinds} for _ in range(2)]
    (opt, found), (_, expected) = (run(e, ao.AdamW(lr=0.1), params, grads) for e in (engine, REFERENCE))
    assert opt.explain().count(f"engine {engine} ") == len(opt._step.buckets) == len(kinds)
    for kind in kinds:
        parts = [[{k: x for k, x in step.items() if k.startswith(f"{kind}.")} for step in y] for y in (found, expected)]
        if kind in NARROW:
            x, y = (part[-1][f"{kind}.p"].astype(float) for part in parts)
            np.testing.assert_allclose(x, y, rtol=2.0 ** (-6 if kind == "bfloat16" else -9), atol=1e-3)
        else:
            agree(*parts, kind)
