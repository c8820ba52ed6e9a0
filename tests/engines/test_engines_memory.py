"""The fused engines against the reference: arrays that lie anyhow in memory, and awkward values in them."""

import itertools

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines.numpy import engine as numpy_engine
from tests.support.cases import ALL, IDS, make
from tests.support.engine_runs import (
    ALL_AND_FIRST,
    FIRST,
    LITTLE,
    REFERENCE,
    agree,
    contents,
    copied,
    drawn,
    first_rows,
    named,
    problem,
    run,
    same,
    shapes_of,
)
from tests.support.engines import FUSED, SLOW, each_fused, each_of_torch
from tests.support.slow import marked

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


@pytest.mark.parametrize(
    ("engine", "row"),
    marked(
        ((engine, row) for engine in FUSED for row in (FIRST["LAMB"], FIRST["CAME"], IDS.index("SGD-1"))),
        lambda engine, row: engine not in SLOW,
        named,
    ),
)
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


@each_fused
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


@each_fused
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


@each_fused
def test_read_only_gradients_and_numpy_scalars(engine):
    p, g = np.float32(3.0), np.ones(3, "float32")
    g.flags.writeable = False
    result = ao.Optimizer({"s": p, "w": np.ones(3, "float32")}, ao.SGD(lr=0.5), engine=engine).step(
        {"s": np.float32(2.0), "w": g}
    )
    assert (float(result["s"]), result["s"].dtype, result["s"].shape) == (2.0, np.float32, ())
    assert (result["w"].tolist(), g.tolist()) == ([0.5] * 3, [1.0] * 3)


@each_fused
def test_gradients_are_not_written(engine):
    params, grads = problem(shapes_of(LITTLE))
    given = [copied(g) for g in grads]
    run(engine, ao.LAMB(bias_correction=False), params, given, clip_norm=0.1, stats=True)
    same(given, grads)


@each_fused
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


@each_of_torch
def test_other_data_of_a_pytorch_parameter_is_seen(engine):
    """``p.data = x`` leaves the object, and lays it elsewhere."""
    torch = pytest.importorskip("torch")
    opts = [ao.Optimizer(torch.ones(5), ao.SGD(lr=1.0, momentum=0.5), engine=e) for e in (engine, REFERENCE)]
    for opt in opts:
        opt.step(torch.ones(5))
        opt.params.data = torch.full((5,), 7.0)
        opt.step(torch.ones(5))
    assert torch.equal(*(opt.params for opt in opts))


@each_of_torch
@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_other_kinds_of_data_of_a_pytorch_parameter_are_refused(engine, what):
    torch = pytest.importorskip("torch")
    p, q, g = torch.ones(2, 3), torch.ones(4), [torch.ones(2, 3), torch.ones(4)]
    opt = ao.Optimizer([q, p], ao.SGD(lr=1.0), engine=engine)
    opt.step(g[::-1])
    p.data = p.data.T if what == "shape" else p.data.to(torch.float16)
    with pytest.raises(
        ValueError, match=r"Optimizer: '1' must keep shape, dtype, library and device.* make a new Optimizer"
    ):
        opt.step([torch.ones(4), torch.ones(p.shape)])
    assert (q == 0.0).all()
    assert (p == 0.0).all()


def test_threads_get_even_shares_of_tensors_that_lie_side_by_side():
    from arrayopt.engines.threads import divide

    r = np.random.default_rng(0)
    for loads, parts in [
        (np.full(1000, 3), 4),
        (np.append(r.integers(1, 9, 500), [900, 900, 40]), 3),
        (np.array([5, 5, 5]), 2),
        (np.zeros(3, int), 2),
        (np.zeros(0, int), 2),
    ]:
        rows = np.sort(r.choice(10**4, len(loads), replace=False))
        shares = divide(rows, loads, parts)
        assert len(shares) == parts
        assert sorted(np.concatenate(shares)) == rows.tolist()
        held = [int(loads[np.isin(rows, x)].sum()) for x in shares]
        assert max(held) - min(held) <= max(loads.max(initial=0), loads.sum() // (32 * parts))
        small = [set(rows[loads <= loads.sum() // (64 * parts)]) & set(x) for x in shares]
        assert all(max(x) < min(y) for x, y in itertools.pairwise(small) if x and y)


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


@pytest.mark.parametrize(
    ("engine", "row", "what"),
    marked(
        ((*place, what) for place in ALL_AND_FIRST for what in ("parameters", "gradients", "both")),
        lambda engine, row, what: (row in FIRST.values() or what == "both") and engine not in SLOW,
        named,
    ),
)
def test_zero_tensors(engine, row, what):
    params, grads = problem(shapes_of(("scalar", "prime", "matrix", "several chunks")))
    params = {name: p * 0 for name, p in params.items()} if what != "gradients" else params
    grads = [{name: g * 0 for name, g in step.items()} for step in grads] if what != "parameters" else grads
    found, expected = (run(e, make(*ALL[row]), params, grads)[1] for e in (engine, REFERENCE))
    agree(found, expected)
    assert all(np.isfinite(x).all() for x in found[-1].values())


@first_rows
@pytest.mark.parametrize("size", [1e-20, 1e-37, 1e18, 1e20])
def test_whole_tensors_of_extreme_size(engine, row, size):
    """Squares that vanish or overflow do so as in the reference."""
    params, grads = problem(shapes_of(("prime", "matrix")), steps=2)
    grads = [{name: (g.astype(float) * size).astype("float32") for name, g in step.items()} for step in grads]
    with np.errstate(all="ignore"):
        found, expected = (run(e, make(*ALL[row]), params, grads)[1] for e in (engine, REFERENCE))
    agree(found, expected)


@each_fused
def test_warnings_are_not_for_what_is_data(engine):
    """Overflow and NaN in a step raise no warnings (which are errors here)."""
    params, grads = problem(shapes_of(("prime", "matrix", "several chunks")))
    params, grads = planted(params, grads, AWKWARD["everything"], in_params=False)
    run(engine, ao.LAMB(), params, grads)


@pytest.mark.parametrize("rule", [ao.AdamW(lr=0.1), ao.LAMB(lr=0.1)], ids=lambda rule: type(rule).__name__)
def test_large_tensors_of_one_size_are_updated_where_they_lie(rule, monkeypatch):
    monkeypatch.setattr(numpy_engine, "joined", lambda name, arrays: pytest.fail(f"{name} was copied"))
    start, rng = np.linspace(-1, 1, 40_000).astype("f4"), np.random.default_rng(0)
    grads = {name: rng.standard_normal(40_000).astype("f4") for name in "abc"}
    opt = ao.Optimizer({name: start.copy() for name in grads}, rule, engine="numpy")
    opt.step(grads)
    for name, g in grads.items():
        alone = ao.Optimizer({name: start.copy()}, rule, engine="numpy").step({name: g})
        np.testing.assert_array_equal(opt.params[name], alone[name])
