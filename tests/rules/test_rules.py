"""Every row of the table of rules on every library and dtype, against the witness: parameters and state."""

import dataclasses
import zlib
from functools import cache

import array_api_compat
import dask.array
import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from tests.conftest import BACKENDS
from tests.support import witness, witness_more
from tests.support.cases import ALL, CASES, IDS, PLACES, REFERENCE, each_run, make
from tests.support.refusals import Signs
from tests.support.slow import marked
from tests.support.tolerances import TOLERANCES

STEPS = 6
ROWS = list(range(len(ALL)))
FIRST_OF_RULE = {name: IDS.index(f"{name}-0") for name in CASES}
HALF = [(*place, dtype) for place in PLACES for dtype in ("float16", "bfloat16") if BACKENDS[place[1]].has(dtype)]
MIXED = [
    (*place, dtype, other)
    for place in PLACES
    for dtype, other in (("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float32"))
    if BACKENDS[place[1]].has(dtype) and BACKENDS[place[1]].has(other)
]


def every_row(places, rows=ROWS):
    """Each row on each (engine, library, dtype), of which each run has some."""
    cases = ((*place, row) for place in places for row in rows)
    quick = marked(cases, lambda engine, library, dtype, row: each_run(library, row, dtype), named)
    return pytest.mark.parametrize(("engine", "library", "dtype", "row"), quick)


def named(x):
    return IDS[x] if isinstance(x, int) else x


def placed(*dtypes):
    return [(*place, dtype) for dtype in dtypes for place in PLACES]


# name: (shape, magnitude of p, magnitude of g, steps at first without a gradient)
TENSORS = {
    "scalar": ((), 1, 1, 0),
    "one": ((1,), 1, 1, 0),
    "empty": ((0,), 1, 1, 0),
    "blocks.0.bias": ((7,), 1, 1, 0),
    "blocks.0.weight": ((7, 5), 1, 1, 0),
    "blocks.1.bias": ((7,), 0, 1, 3),
    "blocks.1.weight": ((7, 5), 0, 1, 0),
    "head.0": ((2, 3, 5), 1, 1, 0),
    "head.1": ((2, 2, 3, 5), 1, 1, 0),
    "head.2": ((0, 3), 1, 1, 0),
    "still": ((7, 5), 1, 1, STEPS),
    "dead": ((7,), 0, 1, STEPS),
    "late": ((7, 5), 1, 1, 3),
    "sparse": ((7, 5), 1, 1, 0),
    "tiny": ((7, 5), 1e-8, 1e-8, 0),
    "huge": ((7, 5), 1e6, 1e6, 0),
    "vanishing": ((7,), 1, 1e-8, 0),
    "exploding": ((7,), 1e-8, 1e6, 0),
    "empty_last": ((3, 0), 1, 1, 0),
}
REAL = ("v", "v_max", "r", "c", "ir", "ic", "mu_product", "lr_max", "points", "radius", "theta")  # slots of any tensors
FEWER = ("scalar", "empty", "blocks.0.bias", "blocks.0.weight", "blocks.1.bias", "head.0", "late", "empty_last")


def rounded(x, dtype):
    """Values that the dtype holds exactly, as float64 or complex128."""
    if dtype in ("float16", "bfloat16"):  # 1e-8 and 1e6 are out of float16's range
        x = np.clip(np.where(np.abs(x) < 1e-6, x * 1e3, x), -1e3, 1e3)
    narrow = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return narrow.astype("complex128" if dtype.startswith("complex") else "float64")


def drawn(rng, shape, magnitude, dtype):
    """Normally distributed values of a dtype."""
    x = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.startswith("complex") else 0)
    return rounded(np.asarray(x * magnitude), dtype)


@cache
def problem(dtype, names=tuple(TENSORS)):
    """Initial parameters and the gradients of each step, by tensor name, in values that the dtype holds exactly."""
    params, grads = {}, [{} for _ in range(STEPS)]
    for name in names:
        shape, p_magnitude, g_magnitude, silent = TENSORS[name]
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        params[name] = drawn(rng, shape, p_magnitude, dtype)
        for step in range(STEPS):
            g = drawn(rng, shape, g_magnitude if step >= silent else 0, dtype)
            if name == "sparse" and step < 3:
                g[0] = 0
            grads[step][name] = g
    return params, grads


def tree(flat):
    """The tensors as a model might have them: dicts, a list of dicts, a tuple."""
    nested = {}
    for name, x in flat.items():
        head, *rest = name.split(".")
        if head == "blocks":
            blocks = nested.setdefault(head, [])
            if int(rest[0]) == len(blocks):
                blocks.append({})
            blocks[int(rest[0])][rest[1]] = x
        elif head == "head":
            nested[head] = (*nested.get(head, ()), x)
        else:
            nested[name] = x
    return nested


def leaves(node, path=""):
    """The arrays of a tree by name."""
    if isinstance(node, dict | list | tuple):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return {k: x for key, child in items for k, x in leaves(child, f"{path}.{key}").items()}
    return {path[1:]: node}


@cache
def trajectory(row, dtype):
    """What the witness makes of `problem`: for each step {name: (p, slots, largest)}, flat lists and magnitudes."""
    params, grads = problem(dtype)
    now = {name: (p.ravel().tolist(), {}, {}) for name, p in params.items()}
    history = []
    for step, g in enumerate(grads):
        now = {
            name: witness_step(row, params[name].shape, p, g[name].ravel().tolist(), slots, step + 1, largest)
            for name, (p, slots, largest) in now.items()
        }
        history.append(now)
    return history


def witness_step(row, shape, p, g, slots, t, largest):
    """One step of the witness; with the largest magnitude that each thing has had so far, which its error goes by."""
    new_p, slots = witness.step(*ALL[row], shape, p, g, slots, t)
    things = {"p": [*p, *new_p], **slots}
    return new_p, slots, {k: max([largest.get(k, 0.0), *map(abs, x)]) for k, x in things.items()}


def expected_slots(row, shape):
    """The names of a tensor's slots, and their shapes."""
    rule_name, options = ALL[row]
    h = witness.Options(rule_name, options)
    return own_slots(rule_name, h, shape) | dict.fromkeys(witness.around_slots(h, ()), shape)


def own_slots(rule_name, h, shape):
    """Those of the rule itself."""
    if rule_name in witness_more.SLOTS:
        slots = witness_more.SLOTS[rule_name](h, [0.0] * 99)
        return {slot: shape if len(x) == 99 else () for slot, x in slots.items()}
    if rule_name in ("SGD", "LARS"):
        return {"buf": shape} if h.momentum or rule_name == "LARS" else {}
    if rule_name in ("LAMB", "LANS", "AdamW", "Adam"):
        names = ["m", "v", *(["v_max"] if getattr(h, "amsgrad", False) else [])]
        names += ["previous"] if rule_name == "AdamW" and h.mars is not None else []
        return dict.fromkeys(names, shape)
    slots = {} if h.beta1 is None else {"m": shape}
    if len(shape) < 2 or not getattr(h, "factored", True):
        return slots | {"v": shape}
    pairs = [("r", "c"), ("ir", "ic")][: 2 if rule_name == "CAME" else 1]
    return slots | {k: x for r, c in pairs for k, x in ((r, shape[:-1]), (c, (*shape[:-2], shape[-1])))}


def same_kind(actual, like, dtype, shape, where):
    """Namespace, dtype, shape and device, which must be right before values are worth a look."""
    assert array_api_compat.is_array_api_obj(actual), where
    assert array_api_compat.array_namespace(actual) is array_api_compat.array_namespace(like), where
    assert str(actual.dtype).rsplit(".", 1)[-1] == dtype, where
    assert tuple(actual.shape) == tuple(shape), where
    assert array_api_compat.device(actual) == array_api_compat.device(like), where


def close(actual, expected, relative, scale, where):
    """Within the tolerance relative to `scale`, or to each element where that is None."""
    wide = actual.astype("complex128" if actual.dtype.kind == "c" else "float64")
    expected = np.asarray(expected).reshape(actual.shape)
    scale = np.abs(expected) if scale is None else scale
    error = np.abs(wide - expected)
    assert np.all(error <= relative * scale), f"{where}: off by {np.max(error / np.where(scale == 0, 1, scale)):.3g}"


def close_slots(backend, state, expected, largest, tolerance, where):
    """First moments and buffers relative to their largest magnitude so far; second moments to each element."""
    for slot, x in state.items():
        if slot != "t":
            signed = slot in ("m", "buf", "slow", "ema", "d", "previous", "m_slow", "z", "x")
            relative, scale = (tolerance.relative, largest[slot]) if signed else (tolerance.each, None)
            close(backend.numpy(x), expected[slot], relative, scale, f"{where}.{slot}")


def real_dtype(dtype):
    """The dtype of second moments and the like."""
    return {"complex64": "float32", "complex128": "float64", "float16": "float32", "bfloat16": "float32"}.get(
        dtype, dtype
    )


def state_dtype(dtype):
    """The dtype of first moments and buffers."""
    return {"float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)


def check(backend, row, dtype, tensors, state, expected, like, where):
    """Parameters and slots after a step, against the witness."""
    for name, p in tensors.items():
        here = f"{where}: {name}"
        exact, exact_slots, largest = expected[name]
        shape = TENSORS[name][0]
        same_kind(p, like[name], dtype, shape, here)
        check_slots_kind(row, dtype, shape, state[name], like[name], here)
        close(backend.numpy(p), exact, TOLERANCES[dtype].relative, largest["p"], here)
        close_slots(backend, state[name], exact_slots, largest, TOLERANCES[dtype], here)


def check_slots_kind(row, dtype, shape, state, like, where):
    """That a tensor's slots are those documented, each of the right kind."""
    slots = expected_slots(row, shape)
    assert set(state) == {"t", *slots}, where
    for slot, slot_shape in slots.items():
        slot_dtype = (real_dtype if slot in REAL else state_dtype)(dtype)
        same_kind(state[slot], like, slot_dtype, slot_shape, f"{where}.{slot}")


def run_against_witness(place, row, dtype, names=tuple(TENSORS), steps=STEPS, array=None):
    """A run of the Optimizer, each of its steps compared with the witness."""
    engine, backend = place[0], BACKENDS[place[1]]
    array = array or backend.array
    params, grads = problem(dtype)
    given = tree({name: array(params[name], dtype) for name in names})
    like = leaves(given)
    opt = ao.Optimizer(given, make(*ALL[row]), engine=engine)
    for step in range(steps):
        result = opt.step(tree({name: array(grads[step][name], dtype) for name in names}))
        assert list(leaves(result)) == list(opt.state)
        where = f"{IDS[row]}, {engine}, {backend.name}, {dtype}, step {step}"
        check(backend, row, dtype, leaves(result), opt.state, trajectory(row, dtype)[step], like, where)
    assert {name: state["t"] for name, state in opt.state.items()} == dict.fromkeys(like, steps)
    assert opt.step_count == steps


@every_row(placed("float64", "float32"))
def test_a_run_equals_the_witness(engine, library, row, dtype):
    run_against_witness((engine, library), row, dtype)


@every_row(placed("complex128", "complex64"), [row for row in ROWS if make(*ALL[row]).complex_ok])
def test_a_complex_run_equals_the_witness(engine, library, row, dtype):
    run_against_witness((engine, library), row, dtype, FEWER)


@pytest.mark.parametrize("dtype", ["complex128", "complex64"])
def test_rules_that_do_not_say_so_refuse_complex_parameters(backend, dtype):
    params = {"real": backend.array([1.0]), "phase": backend.array([1.0], dtype)}
    with pytest.raises(TypeError, match=r"Signs is not defined for complex parameters.*'phase'"):
        ao.Optimizer(params, Signs())


@pytest.mark.parametrize("rule_name", marked([(name,) for name in CASES], lambda name: name in ("LAMB", "CAME")))
def test_a_dask_run_equals_the_witness(rule_name):
    row = FIRST_OF_RULE[rule_name] + 2  # a row with several options
    names = ("scalar", "empty", "blocks.0.bias", "head.0")
    run_against_witness(("array_api", "dask"), row, "float64", names, 2, in_chunks)


def in_chunks(x, dtype):
    """A Dask array whose sums go over several chunks."""
    return dask.array.from_array(x.astype(dtype), chunks=2)


def test_an_empty_dask_matrix_is_left_as_it_is():
    empty = BACKENDS["dask"].array(np.ones((0, 3)))
    assert ao.Optimizer(empty, ao.SGD(lr=0.1)).step(empty + 1) is empty


@every_row(HALF)
def test_half_precision_without_masters_keeps_state_in_float32_and_rounds_once(engine, library, row, dtype):
    backend = BACKENDS[library]
    params, grads = problem(dtype)
    given = {name: backend.array(params[name], dtype) for name in FEWER}
    like = dict(given)
    slots, largest = ({name: {} for name in FEWER} for _ in range(2))
    opt = ao.Optimizer(given, dataclasses.replace(make(*ALL[row]), master_weights=False), engine=engine)
    for step in range(4):
        before = {name: backend.numpy(p).astype("float64").ravel().tolist() for name, p in given.items()}
        given = opt.step({name: backend.array(grads[step][name], dtype) for name in FEWER})
        for name, p in given.items():
            where, shape = f"{IDS[row]}, {engine}, {backend.name}, {dtype}, step {step}: {name}", TENSORS[name][0]
            g = grads[step][name].ravel().tolist()
            exact, slots[name], largest[name] = witness_step(
                row, shape, before[name], g, slots[name], step + 1, largest[name]
            )
            same_kind(p, like[name], dtype, shape, where)
            check_slots_kind(row, dtype, shape, opt.state[name], like[name], where)
            within_ulps(backend.numpy(p), exact, TOLERANCES[dtype].ulps, where)
            close_slots(backend, opt.state[name], slots[name], largest[name], TOLERANCES["float32"], where)


@every_row(HALF)
def test_half_precision_has_masters_in_float32(engine, library, row, dtype):
    """The masters run as the witness does from the same start, and parameters are their rounding."""
    backend = BACKENDS[library]
    params, grads = problem(dtype)
    given = {name: backend.array(params[name], dtype) for name in FEWER}
    opt = ao.Optimizer(given, make(*ALL[row]), engine=engine)
    for step in range(4):
        given = opt.step({name: backend.array(grads[step][name], dtype) for name in FEWER})
        for name, p in given.items():
            where = f"{IDS[row]}, {engine}, {backend.name}, {dtype}, step {step}: {name}"
            exact, slots, largest = trajectory(row, dtype)[step][name]
            state = dict(opt.state[name])
            master = backend.numpy(state.pop("master"))
            same_kind(p, given[name], dtype, TENSORS[name][0], where)
            assert backend.numpy(p).tobytes() == master.astype(backend.numpy(p).dtype).tobytes(), where
            close(master, exact, TOLERANCES["float32"].relative, largest["p"], where)
            close_slots(backend, state, slots, largest, TOLERANCES["float32"], where)


def within_ulps(actual, expected, ulps, where):
    """Within so many units in the last place of each element, or of the smallest normal number."""
    expected = np.asarray(expected).reshape(actual.shape)
    kind = ml_dtypes.finfo(actual.dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(expected), float(kind.smallest_normal))))
    error = np.abs(actual.astype("float64") - expected) / 2.0 ** (exponent - kind.nmant)
    assert np.all(error <= ulps), f"{where}: off by {np.max(error):.3g} ulp"


@pytest.mark.parametrize(
    ("engine", "library", "dtype", "other", "rule_name"),
    marked(
        ((*place, name) for place in MIXED for name in CASES),
        lambda engine, library, dtype, other, name: (
            library in ("numpy", "torch") or (dtype, name) == ("float32", "LAMB")
        ),
    ),
)
def test_a_gradient_may_be_of_another_floating_dtype(engine, library, rule_name, dtype, other):
    backend, work = BACKENDS[library], state_dtype(dtype)
    values, grads = problem("bfloat16")
    rule = make(*ALL[FIRST_OF_RULE[rule_name]])
    mixed, same = ({name: backend.array(values[name], dtype) for name in FEWER} for _ in range(2))
    mixed = ao.Optimizer(mixed, rule, engine=engine).step(
        {name: backend.array(grads[0][name], other) for name in FEWER}
    )
    same = ao.Optimizer(same, rule, engine=engine).step({name: backend.array(grads[0][name], work) for name in FEWER})
    for name in FEWER:
        same_kind(mixed[name], same[name], dtype, TENSORS[name][0], name)
        if engine == REFERENCE:
            assert backend.numpy(mixed[name]).tobytes() == backend.numpy(same[name]).tobytes(), name
        else:
            relative = TOLERANCES[dtype].relative or TOLERANCES[dtype].ulps * 2.0**-7
            close(backend.numpy(mixed[name]), backend.numpy(same[name]).astype("float64"), relative, 10.0, name)


# ---- memory layouts --------------------------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": ((5, 7), lambda x: x.T),
    "strided": ((13, 9), lambda x: x[::2, ::2]),
    "last axis strided": ((7, 15), lambda x: x[:, 1::3]),
    "offset": ((9, 6), lambda x: x[2:, 1:]),
    "negative strides": ((7, 5), lambda x: x[::-1, ::-1]),
    "negative and strided": ((13, 5), lambda x: x[::-2, ::-1]),
    "vector": ((7, 5), lambda x: x[:, 3]),
    "reversed vector": ((7,), lambda x: x[::-1]),
    "scalar": ((3,), lambda x: x[1, ...]),
    "empty": ((7, 5), lambda x: x[:0, ::2]),
}


@every_row([place for place in placed("float32") if place[1] != "jax"])  # which has no views
def test_layout_in_memory_changes_nothing(engine, library, dtype, row):
    backend, rule = BACKENDS[library], make(*ALL[row])
    layouts = {k: v for k, v in LAYOUTS.items() if not (library == "torch" and ("negative" in k or "reversed" in k))}
    bases, views, dense = {}, {}, {}
    for name, (shape, view) in layouts.items():
        bases[name] = backend.array(drawn(np.random.default_rng(0), shape, 1, "float32"))
        views[name] = view(bases[name])
        dense[name] = backend.array(backend.numpy(views[name]).copy(order="C"))
    if library == "numpy":
        bases["fortran"] = views["fortran"] = np.asfortranarray(dense["transposed"])
        dense["fortran"] = dense["transposed"].copy()
    untouched = {name: backend.numpy(x).copy() for name, x in bases.items()}
    before = {name: backend.numpy(x).copy() for name, x in dense.items()}
    strided, straight = (ao.Optimizer(x, rule, engine=engine) for x in (views, dense))
    for step in range(3):
        grads = {name: drawn(np.random.default_rng(step), x.shape, 1, "float32") for name, x in before.items()}
        result = strided.step({name: in_layout(backend, layouts.get(name), g) for name, g in grads.items()})
        straight.step({name: backend.array(g) for name, g in grads.items()})
        for name in views:
            assert result[name] is views[name], name
            same_values(row, backend.numpy(views[name]), backend.numpy(dense[name]), f"{name}, step {step}")
    for name, (_, view) in layouts.items():
        view(untouched[name])[...] = backend.numpy(views[name])
        assert np.array_equal(backend.numpy(bases[name]), untouched[name]), f"{name}: wrote beside the view"


def same_values(row, actual, expected, where):
    """The same bits; but a library sums in the order of memory, so where the rule sums, only up to rounding."""
    rule_name, options = ALL[row]
    elementwise = rule_name in ("SGD", "Adam", "AdamW") or (rule_name in ("LAMB", "LARS") and "adapt" in options)
    summing = {"grad_centralization", "clip_tensor_norm", "clip_unit_ratio", "mars", "caution"}
    if elementwise and not summing & set(options):
        assert np.array_equal(actual, expected), where
    else:
        close(actual, expected.astype("float64"), TOLERANCES["float32"].relative, 1.0, where)


def in_layout(backend, layout, g):
    """A gradient laid out like its parameter."""
    if layout is None:
        return backend.array(np.asfortranarray(g))
    shape, view = layout
    base = np.full(shape, 99.0)
    view(base)[...] = g
    return view(backend.array(base))
