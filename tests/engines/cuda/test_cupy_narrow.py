"""Iterations in bfloat16 on the CuPy engine: what is rounded, how it is kept and multiplied, and captured steps."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.fusion.graph import PRODUCT
from arrayopt.fusion.ops import OPS
from arrayopt.fusion.plans import plan_for
from tests.cudacpu import standin
from tests.engines.cuda.test_cupy import bits, trees
from tests.support.engines import COMPILED
from tests.support.slow import marked

RULE = ao.Muon(lr=0.1, ns_steps=1, ns_dtype="bfloat16")
SHAPES = {"wide": (12, 20), "same": (8, 8), "odd": (3, 5), "tall": (20, 6), "none": (0, 3)}
LAYERS = {"batch": (3, 5, 7), "words": (2, 8, 16), **SHAPES}


@pytest.fixture
def unchecked():
    """Launches without checks, which are faster, for tests of numbers only."""
    with standin.checking(check=False):
        yield


def there(cupy, shapes, dtype, seed, scale=1.0):
    return {name: cupy.asarray(x) for name, x in trees(shapes, dtype, seed, scale).items()}


# ---- what it computes -----------------------------------------------------------------------------------------------

CASES = {
    "one step": (RULE, SHAPES, "float32"),
    "more": (dataclasses.replace(RULE, ns_steps=3), SHAPES, "float32"),
    "a batch": (ao.NorMuon(lr=0.1, ns_steps=2, ns_dtype="bfloat16", matrix="last"), LAYERS, "float32"),
    "flattened": (ao.MuonH(lr=0.1, ns_steps=2, ns_dtype="bfloat16"), LAYERS, "float32"),
    "in doubles": (dataclasses.replace(RULE, ns_steps=2), SHAPES, "float64"),
    "half parameters": (dataclasses.replace(RULE, ns_steps=2), SHAPES, "bfloat16"),
}


@pytest.mark.parametrize("case", marked([(case,) for case in CASES], lambda case: case == "one step"))
def test_it_computes_what_the_rule_does_on_tensors(cupy, case, unchecked):
    """PyTorch's tensors, on engine `array_api`: each operation rounds its result there, and so it does here.

    What differs is the order in which products are added up, and a division by a norm that is a multiplication here.
    Either may turn a rounding: no element may be further off than that takes it, and hardly any may be off.
    """
    rule, shapes, dtype = CASES[case]
    wide = "float32" if dtype == "bfloat16" else dtype

    def tensors(seed, scale=1.0):
        kind = getattr(torch, dtype)
        return {n: torch.tensor(x.astype(wide)).to(kind) for n, x in trees(shapes, dtype, seed, scale).items()}

    plain = dataclasses.replace(rule, ns_dtype=None)
    opt = ao.Optimizer(there(cupy, shapes, dtype, 1, 0.3), rule, engine="cupy")
    exact, other = (ao.Optimizer(tensors(1, 0.3), r, engine="array_api") for r in (rule, plain))
    for seed in (5, 6):
        opt.step(there(cupy, shapes, dtype, seed))
        exact.step(tensors(seed))
        other.step(tensors(seed))
    for name in (n for n, s in shapes.items() if 0 not in s):
        found = [np.asarray(x.to(torch.float64)) for x in (exact.params[name], other.params[name])]
        off, apart = (np.abs(opt.params[name].get().astype("f8") - x) for x in found)
        size = max(1.0, float(np.abs(found[0]).max()))
        assert off.max() <= 2.0**-6 * size * (1.0 if dtype == "bfloat16" else 0.1), name
        assert off.mean() <= 2e-5 * size, name
        if dtype != "bfloat16":
            assert apart.mean() > 10 * off.mean(), name


def test_the_nearest_number_of_bfloat16():
    rng = np.random.default_rng(0)
    x = np.frombuffer(rng.bytes(1 << 16), np.float32)
    x = np.concatenate([x, np.float32([0.0, -0.0, np.inf, -np.inf, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 3.4e38, 1e-45])])
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(OPS["bfloat16"].numpy(x), x.astype(ml_dtypes.bfloat16).astype("f4"))


def test_without_a_product_too(cupy):
    """Sums and multiples in bfloat16, of numbers that are awkward."""

    @dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
    class Halved(ao.Rule):
        def slots(self, xp, p):
            return {}

        def update(self, xp, p, g, s, h):
            x, y = (xp.astype(v, xp.bfloat16) for v in (p, g))
            return xp.astype(0.3 * x + y * h.t, p.dtype), {}

    awkward = np.float32([0.0, -0.0, 1.0, -1.3, 1e-3, 3e38, -3e38, 1e-42, np.inf, np.nan])
    p, g = (np.ascontiguousarray(x) for x in np.meshgrid(awkward, awkward))
    half = ml_dtypes.bfloat16
    with np.errstate(all="ignore"):
        parts = [(np.float32(0.3) * p.astype(half).astype("f4")).astype(half), g.astype(half)]
        expected = (parts[0].astype("f4") + parts[1].astype("f4")).astype(half).astype("f4")
    found = ao.Optimizer(cupy.asarray(p), Halved(), engine="cupy").step(cupy.asarray(g))
    np.testing.assert_array_equal(found.get(), expected)
    for engine in COMPILED:
        with pytest.raises(ValueError, match=f"'{engine}' cannot run Halved: arithmetic in bfloat16 is not fused"):
            ao.Optimizer(p, Halved(), engine=engine)


# ---- how it is kept, and multiplied ---------------------------------------------------------------------------------


def test_what_is_multiplied_is_kept_in_bfloat16():
    wide, narrow = (
        plan_for(dataclasses.replace(RULE, ns_steps=5, ns_dtype=x), 2, "float32", shape=(3, 4), lean=True)
        for x in (None, "bfloat16")
    )
    assert {narrow.storage[name] for name in narrow.spilled} == {"bfloat16"}
    assert (wide.narrow, narrow.narrow) == ("", "bfloat16")
    assert len(narrow.passes) == len(wide.passes)
    made = [n for p in narrow.passes if p.axes == "Rr" and not p.multiplies for n in p.nodes]
    assert [n.op for n in made] == ["mul", "bfloat16", "mul", "bfloat16", "add", "bfloat16"] * 5
    assert [p.nodes[0].data.symmetric for p in narrow.passes if p.multiplies] == [True, True, False] * 5
    assert all(n.narrow for p in narrow.passes for n in p.nodes if n.op == PRODUCT)
    halves = sum(len(p.loads) + len(p.stores) for p in narrow.passes if p.axes == "RC" and not p.multiplies)
    assert narrow.bytes_per_parameter() < wide.bytes_per_parameter() <= 4 * halves + 12


def test_it_says_what_it_does(cupy):
    text = ao.Optimizer({"w": cupy.ones((3, 4), cupy.float32)}, RULE).explain()
    assert "engine cupy (the fastest for cupy arrays): CUDA kernels over all tensors at once" in text
    assert "product spill0 spill0ᵀ over Rr in bfloat16, symmetric; store spill1; R R C FLOPs" in text
    assert "BFloat16* const at_spill0" in ao.source(RULE, engine="cupy")
    with pytest.raises(TypeError, match="arithmetic in bfloat16 is not fused; engine='array_api' works"):
        ao.source(RULE, engine=COMPILED[0])


# ---- captured -------------------------------------------------------------------------------------------------------


def test_a_captured_step_is_an_eager_one(cupy, unchecked):
    opts = [ao.Optimizer(there(cupy, SHAPES, "float32", 1, 0.3), RULE, engine="cupy") for _ in range(2)]
    given, graph = there(cupy, SHAPES, "float32", 0), None
    stream = cupy.cuda.Stream(non_blocking=True)
    for seed in range(3):
        grads = trees(SHAPES, "float32", 10 * seed)
        opts[0].step({name: cupy.asarray(g) for name, g in grads.items()})
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            for name, g in grads.items():
                given[name].set(g)
            if seed == 0:
                opts[1].step(given)
                continue
            opts[1].advance()
            if graph is None:
                stream.begin_capture()
                with standin.forbidden("allocation"):
                    opts[1].launch(given)
                graph = stream.end_capture()
            graph.launch(stream)
        stream.synchronize()
    assert opts[1].state["wide"]["t"] == 3
    assert bits(opts[0]) == bits(opts[1])
