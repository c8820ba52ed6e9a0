"""State in 8 bits: codes, what engines make of them, and what they cost in accuracy."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.state.quantized import TINY, dequantized, quantized
from tests.conftest import BACKENDS
from tests.support.cases import CASES, make
from tests.support.engines import EVERY, SLOW
from tests.support.slow import marked

SHAPES = {
    "rows": (24, 64),
    "ragged": (7, 45),
    "kernel": (9, 5, 3, 3),
    "long": (8192 + 1024 + 33,),
    "short": (31,),
    "block": (32,),
    "one": (1,),
    "scalar": (),
    "empty": (0, 3),
}


def witness(x, top):
    """Codes, scales and what they stand for, written a second time: block by block, in plain Python."""
    flat = np.asarray(x, np.float32).reshape(-1)
    codes, scales, values = [], [], []
    for first in range(0, flat.size, 32):
        block = flat[first : first + 32]
        largest = np.float32(np.nan) if np.isnan(block).any() else np.max(np.abs(block))
        scale = np.float32(ml_dtypes.bfloat16(largest))
        scale = np.float32(0) if scale < TINY else scale
        scales.append(scale)
        for value in block:
            if not np.isfinite(scale):
                codes.append(0)
                values.append(np.float32(np.nan))
            elif scale == 0:
                codes.append(0)
                values.append(np.float32(0))
            else:
                code = value * (np.float32(top) / scale)
                code = 1 if top == 255 and 2.0**-100 < code < 1 else min(np.rint(code), top)
                codes.append(int(code))
                values.append(np.float32(code) * (scale * np.float32(1 / top)))
    return codes, scales, values


def awkward(n, *, positive):
    """Numbers of many magnitudes, with zeros, and blocks of nothing else."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal(n) * 10.0 ** rng.integers(-30, 20, n)
    x[rng.random(n) < 0.1] = 0
    x[64:96] = 0
    x[128:160] = 1e-42
    x[160:192] *= 1e-8
    return (np.abs(x) if positive else x).astype(np.float32)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("n", [0, 31, 33, 500])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_codes_are_those_of_the_definition(n, dtype, library):
    x = awkward(n, positive=dtype == "uint8")
    codes, scales, values = witness(x, 127 if dtype == "int8" else 255)
    backend = BACKENDS[library]
    made = quantized(backend.array(x), dtype)
    assert backend.numpy(made[0]).tolist() == codes
    assert backend.numpy(made[1]).astype("float32").tolist() == scales
    assert backend.numpy(dequantized(*made)).tolist() == values


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_factors_are_quotients(library):
    """The reciprocal times the top, which PyTorch takes for the top over an array, has another last bit."""
    x = np.array([1.03125, float.fromhex("0x1.8d8d8cp-8")], np.float32)
    codes, _, _ = witness(x, 255)
    backend = BACKENDS[library]
    assert backend.numpy(quantized(backend.array(x), "uint8")[0]).tolist() == codes


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_never_becomes_one(bad):
    x = np.ones(70, np.float32)
    x[40] = bad
    read = dequantized(*quantized(x, "int8"))
    assert np.isnan(read[32:64]).all()
    assert (read[:32] == 1).all()
    assert (read[64:] == 1).all()


def kept(rule_dtype="float32"):
    """A rule that stores the gradient as it is, and its square: so engines are given the same numbers."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Kept(ao.Rule):
        squares = ("v",)

        def slots(self, xp, p):
            return {"m": xp.zeros_like(p), "v": xp.zeros_like(p)}

        def update(self, xp, p, g, s, h):
            return p + s["m"] - s["v"], {"m": g, "v": g * g}

    return Kept(state_dtype="int8")


def there(opt, shape_name):
    """What is stored of a tensor, as bytes."""
    return {slot: as_host(x).tobytes() for slot, x in opt.state[shape_name].items() if slot != "t"}


def as_host(x):
    return x.get() if hasattr(x, "get") else np.asarray(x)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("engine", marked([(e,) for e in EVERY if e != "array_api"], lambda e: e not in SLOW))
def test_engines_make_the_same_codes_of_the_same_numbers(engine, dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    rng = np.random.default_rng(3)
    params = {name: np.asarray(rng.standard_normal(shape)).astype(kind) for name, shape in SHAPES.items()}
    both = [
        ao.Optimizer({name: x.copy() for name, x in params.items()}, kept(), engine=e) for e in ("array_api", engine)
    ]
    for k in range(3):
        grads = {name: awkward(x.size, positive=False).reshape(x.shape).astype(kind) for name, x in params.items()}
        grads["rows"][3, 5 + k] = np.nan
        grads["long"][8195 + k] = np.inf
        for opt in both:
            opt.step(grads)
        for name in SHAPES:
            mine, theirs = (there(opt, name) for opt in both)
            assert {slot: mine[slot] == theirs[slot] for slot in ("m", "scale_m", "v", "scale_v")} == dict.fromkeys(
                ("m", "scale_m", "v", "scale_v"), True
            )


@pytest.mark.parametrize(
    ("engine", "name"),
    marked(
        [(e, name) for e in EVERY if e != "array_api" for name in CASES],
        lambda e, name: e not in SLOW and name in ("LAMB", "CAME", "SGD"),
    ),
)
@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
def test_engines_agree(engine, name):
    """Codes may differ by one where a number lies between two of them, and arithmetic was rounded otherwise."""
    rule = dataclasses.replace(make(name, CASES[name][-1]), state_dtype="int8")
    rng = np.random.default_rng(5)
    params = {n: np.asarray(0.3 * rng.standard_normal(s)).astype("float32") for n, s in SHAPES.items()}
    both = [ao.Optimizer({n: x.copy() for n, x in params.items()}, rule, engine=e) for e in ("array_api", engine)]
    for _ in range(3):
        grads = {n: np.asarray(rng.standard_normal(s)).astype("float32") for n, s in SHAPES.items()}
        for opt in both:
            opt.step(grads)
    off = total = 0
    for n in SHAPES:
        mine, theirs = (opt.state[n] for opt in both)
        for slot, x in mine.items():
            if slot != "t" and x.dtype in (np.int8, np.uint8):
                apart = np.abs(x.astype(int) - theirs[slot].astype(int))
                off, total = off + int((apart > 0).sum()), total + x.size
                assert apart.max(initial=0) <= 2
        assert np.allclose(both[0].params[n], both[1].params[n], rtol=1e-2, atol=1e-3)
    assert off <= 0.001 * total + 2


def error(stored_m, stored_v):
    """How far an update goes astray, for gradients of many sizes: a row is a unit, as in a network."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-3, 0, (128, 1)) * 10.0 ** rng.uniform(-2, 0, (128, 128))
    m = v = np.zeros((128, 128))
    for _ in range(100):
        g = sizes * rng.standard_normal((128, 128))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    exact = m / (np.sqrt(v) + 1e-8)
    return np.linalg.norm(stored_m(m) / (np.sqrt(stored_v(v)) + 1e-8) - exact) / np.linalg.norm(exact)


def read(x, dtype):
    return dequantized(*quantized(x.astype(np.float32), dtype)).astype(float)


def one_scale(x, top):
    step = np.abs(x).max() / top
    return np.rint(x / step) * step


def test_blocks_and_roots_are_both_needed():
    """The controls leave out one of them, and an update is far from the exact one."""
    assert error(lambda m: read(m, "int8"), lambda v: read(np.sqrt(v), "uint8") ** 2) < 0.15
    assert error(lambda m: one_scale(m, 127), lambda v: one_scale(np.sqrt(v), 255) ** 2) > 0.5, "one scale per tensor"
    assert error(lambda m: read(m, "int8"), lambda v: read(v, "uint8")) > 0.3, "no roots"


@pytest.mark.parametrize("storage", ["int8", {"v": "int8"}, {"m": "bfloat16", "v": "int8"}], ids=str)
def test_no_root_is_lost_so_no_step_is_huge(storage):
    """Neighbours of very different size, with gradients that are often zero."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-6, 0, 4096)
    opt = ao.Optimizer(np.zeros(4096), ao.AdamW(lr=0.01, weight_decay=0.0, state_dtype=storage))
    for _ in range(60):
        before = opt.params.copy()
        opt.step(rng.standard_normal(4096) * sizes * (rng.random(4096) < 0.5))
        assert np.abs(opt.params - before).max() < 0.03  # 0.010 with state in float64


@pytest.mark.parametrize("storage", ["int8", {"m": "int8"}], ids=str)
def test_in_a_basis_directions_without_gradients_stay_still(storage):
    rng = np.random.default_rng(1)
    opt = ao.Optimizer(np.zeros((16, 8), "float32"), ao.SOAP(lr=0.01, state_dtype=storage), engine="numpy")
    for _ in range(8):
        before = opt.params.copy()
        g = rng.standard_normal((16, 8)) @ np.diag(10.0 ** -np.arange(8))
        opt.step(g.astype("float32"))
        assert np.abs(opt.params - before).max() < 0.05


def test_state_takes_a_third_of_the_memory():
    opt = ao.Optimizer(np.zeros((1000, 1024), "float32"), ao.AdamW(state_dtype="int8"))
    held = sum(x.nbytes for slot, x in opt.state["param"].items() if slot != "t")
    assert held == 2 * (1 + 2 / 32) * 1000 * 1024


def test_each_slot_may_have_its_own_storage():
    rule = ao.AdamW(state_dtype={"m": "bfloat16", "v": "int8"})
    state = ao.Optimizer(np.zeros((4, 8), "float32"), rule).state["param"]
    assert {slot: str(x.dtype) for slot, x in state.items() if slot != "t"} == {
        "m": "bfloat16",
        "v": "uint8",
        "scale_v": "bfloat16",
    }
    assert rule == ao.AdamW(state_dtype={"v": "int8", "m": "bfloat16"})
    assert hash(rule) == hash(ao.AdamW(state_dtype=rule.state_dtype))
    only = ao.Optimizer(np.zeros((4, 8), "float32"), ao.AdamW(state_dtype={"m": "int8", "v": None})).state["param"]
    assert [str(only[slot].dtype) for slot in ("m", "v")] == ["int8", "float32"]


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("int4", ValueError, "AdamW: `state_dtype` must be None, 'float16', 'bfloat16' or 'int8'; got 'int4'"),
        (8, TypeError, "'int8'; got 8; to set it per slot, pass a mapping"),
        ({"m": 8}, TypeError, "AdamW: `state_dtype` of slot 'm' must be None"),
        ({"m": "int9"}, ValueError, "AdamW: `state_dtype` of slot 'm' must be None"),
        ({1: "int8"}, TypeError, "AdamW: `state_dtype` must map names of slots; got 1"),
    ],
)
def test_what_cannot_be_a_storage_is_refused(value, error, words):
    with pytest.raises(error, match=words):
        ao.AdamW(state_dtype=value)


def test_slots_that_a_rule_does_not_have_are_refused():
    with pytest.raises(
        ValueError, match="AdamW: `state_dtype` must name slots of the rule; got 'w'; the slots are m, v"
    ):
        ao.Optimizer(np.zeros(3, "float32"), ao.AdamW(state_dtype={"w": "int8"}))
    with pytest.raises(ValueError, match="slot 'z' must keep full precision, which the rule needs; got 'int8'"):
        ao.Optimizer(np.zeros(3, "float32"), ao.ScheduleFreeAdamW(state_dtype={"z": "int8"}))


@pytest.mark.parametrize("engine", marked([(e,) for e in EVERY], lambda e: e not in SLOW))
def test_layers_have_blocks_of_their_own(engine):
    """A stacked tensor holds, byte for byte, what its layers hold that are tensors of their own."""
    rng = np.random.default_rng(0)
    stack = rng.standard_normal((3, 5, 9)).astype("float32")
    rule = ao.LAMB(lr=0.1, state_dtype="int8")
    one = ao.Optimizer({"w": stack.copy()}, dataclasses.replace(rule, stacked=True), engine=engine)
    each = ao.Optimizer({str(i): x.copy() for i, x in enumerate(stack)}, rule, engine=engine)
    for _ in range(3):
        grads = rng.standard_normal(stack.shape).astype("float32")
        one.step({"w": grads})
        each.step({str(i): g for i, g in enumerate(grads)})
    for i in range(3):
        assert one.params["w"][i].tobytes() == each.params[str(i)].tobytes()
        for slot in ("m", "scale_m", "v", "scale_v"):
            assert one.state["w"][slot][i].tobytes() == each.state[str(i)][slot].tobytes()


def test_a_checkpoint_in_another_storage_says_how_it_is_loaded():
    params = {"w": np.ones((4, 32), "f4")}
    saved = ao.Optimizer(params, ao.LAMB(state_dtype="int8")).state_dict()
    with pytest.raises(ValueError, match=r"state_dtype='int8', here None.*set that of the optimizer then$"):
        ao.Optimizer(params, ao.LAMB()).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"missing 'v'$"):
        ao.Optimizer(params | {"v": np.ones(3, "f4")}, ao.LAMB(state_dtype="int8")).load_state_dict(saved)


def test_a_checkpoint_holds_codes_as_they_are(tmp_path):
    params = {"w": np.ones((4, 40), "float32")}
    opts = [ao.Optimizer({"w": params["w"].copy()}, ao.LAMB(state_dtype="int8")) for _ in range(2)]
    grads = [np.random.default_rng(i).standard_normal((4, 40)).astype("float32") for i in range(4)]
    for g in grads[:2]:
        opts[0].step({"w": g})
    opts[0].save(tmp_path / "x.safetensors")
    opts[1].load(tmp_path / "x.safetensors")
    for opt in opts:
        for g in grads[2:]:
            opt.step({"w": g})
    assert opts[0].params["w"].tobytes() == opts[1].params["w"].tobytes()
    assert there(opts[0], "w") == there(opts[1], "w")


def test_the_functional_form_does_the_same_under_jit():
    import jax

    rule = ao.LAMB(lr=0.1, state_dtype="int8")
    params = {"w": np.linspace(-1, 1, 77).astype("float32")}
    grads = {"w": np.cos(np.arange(77)).astype("float32")}
    opt = ao.Optimizer({"w": params["w"].copy()}, rule, engine="array_api")
    state, traced = rule.init({"w": jax.numpy.asarray(params["w"])}), {"w": jax.numpy.asarray(params["w"])}
    given = {"w": jax.numpy.asarray(grads["w"])}
    step = jax.jit(lambda p, s: ao.update(rule, p, given, s))
    for _ in range(3):
        opt.step(grads)
        with jax.debug_nans(True):
            traced, state = step(traced, state)
    assert np.allclose(traced["w"], opt.params["w"], rtol=1e-5)
    assert np.abs(np.asarray(state["tensors"]["w"]["m"]).astype(int) - opt.state["w"]["m"]).max() <= 1


@pytest.mark.parametrize("name", marked([(n,) for n in ("LAMB", "CAME", "SGD", "Muon")], lambda n: n == "SGD"))
@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
def test_cuda_kernels_make_the_same_codes(cupy, name):
    rules = {
        "LAMB": ao.LAMB(lr=0.1, state_dtype="int8"),
        "CAME": ao.CAME(lr=0.1, state_dtype="int8"),
        "SGD": kept(),
        "Muon": ao.Muon(lr=0.1, momentum=0.9, ns_steps=1, state_dtype="int8"),
    }
    shapes = {"rows": (6, 64), "wide": (3, 160), "odd": (4096 + 77,), "short": (31,)}
    if name in ("CAME", "Muon"):
        shapes = {"rows": (6, 64), "wide": (3, 160)}
    rng = np.random.default_rng(1)
    params = {n: rng.standard_normal(s).astype("float32") for n, s in shapes.items()}
    opts = [
        ao.Optimizer({n: x.copy() for n, x in params.items()}, rules[name], engine="array_api"),
        ao.Optimizer({n: cupy.asarray(x) for n, x in params.items()}, rules[name], engine="cupy"),
    ]
    for _ in range(2):
        grads = {n: rng.standard_normal(s).astype("float32") for n, s in shapes.items()}
        opts[0].step(grads)
        opts[1].step({n: cupy.asarray(g) for n, g in grads.items()})
    for n in shapes:
        mine, theirs = (opt.state[n] for opt in opts)
        for slot in mine:
            if slot != "t" and mine[slot].dtype.itemsize == 1:
                apart = np.abs(mine[slot].astype(int) - theirs[slot].get().astype(int))
                assert apart.max() <= (0 if name == "SGD" else 1)
        assert np.allclose(opts[0].params[n], opts[1].params[n].get(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stacked", [False, True])
def test_on_cuda_rows_that_are_no_blocks_are_widened_before_a_step(cupy, stacked):
    rng = np.random.default_rng(1)
    shape = (3, 5, 33) if stacked else (5, 33)
    p, rule = rng.standard_normal(shape).astype("float32"), ao.CAME(lr=0.1, state_dtype="int8", stacked=stacked)
    one = ao.Optimizer(p.copy(), rule, engine="array_api")
    other = ao.Optimizer(cupy.asarray(p), rule, engine="cupy")
    for _ in range(3):
        g = rng.standard_normal(shape).astype("float32")
        one.step(g)
        other.step(cupy.asarray(g))
    for slot in ("m", "scale_m"):
        mine, theirs = one.state["param"][slot], other.state["param"][slot].get()
        assert np.abs(mine.astype(float) - theirs.astype(float)).max() <= (1 if slot == "m" else 1e-2)
    assert np.allclose(one.params, other.params.get(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["f4", "c8"])
def test_on_cuda_what_is_widened_lasts_no_longer_than_the_step(cupy, dtype):
    rule = ao.CAME(lr=0.1, state_dtype="int8") if dtype == "f4" else ao.AdamW(state_dtype="int8")
    p, g = cupy.ones((300, 333), dtype=dtype), cupy.ones((300, 333), dtype=dtype)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    opt = ao.Optimizer(p, rule, engine="cupy")
    opt.step(g)
    cupy.cuda.Device().synchronize()
    assert pool.used_bytes() - before < p.nbytes  # the codes; copies that were kept beside them were larger


def test_what_is_widened_before_a_step_cannot_be_captured(cupy):
    opt = ao.Optimizer(cupy.ones((5, 33), dtype="float32"), ao.CAME(lr=0.1, state_dtype="int8"), engine="cupy")
    g = cupy.ones((5, 33), dtype="float32")
    opt.step(g)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        opt.advance()
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="8 bits is decoded to a temporary copy: use another"):
            opt.launch(g)
        stream.end_capture()
        opt.launch(g)


@pytest.mark.parametrize("engine", marked([(e,) for e in EVERY], lambda e: e not in SLOW))
def test_a_run_may_go_on_in_another_storage(engine):
    """Numbers stay what they are, but for rounding; from wide to codes and back."""
    rng = np.random.default_rng(0)
    params = {"w": np.ones((6, 40), "float32"), "b": np.ones(7, "float32"), "number": np.array(1, "float32")}
    opt = ao.Optimizer(params, ao.LAMB(lr=0.01), engine=engine)
    for storage in ("int8", "bfloat16", {"v": "int8"}, None):
        opt.step({name: rng.standard_normal(x.shape).astype("float32") for name, x in opt.params.items()})
        before = wide_state(opt)
        opt.state_dtype = storage
        fresh = ao.Optimizer(dict(opt.params), opt.rule).state
        for name, state in wide_state(opt).items():
            assert [(k, type(x), x.dtype, x.shape) for k, x in opt.state[name].items() if k != "t"] == [
                (k, type(x), x.dtype, x.shape) for k, x in fresh[name].items() if k != "t"
            ]
            for slot, x in state.items():
                assert np.allclose(x, before[name][slot], rtol=0.02, atol=0.01 * np.abs(x).max())


def wide_state(opt):
    """Both moments of each tensor as numbers."""
    found = {}
    for name, state in opt.state.items():
        stored = opt.rule.storage(1)
        found[name] = {}
        for slot in ("m", "v"):
            x = state[slot]
            x = dequantized(x, state[f"scale_{slot}"]) if f"scale_{slot}" in state else x.astype(np.float32)
            found[name][slot] = x * x if slot == "v" and slot in stored else x
    return found


def test_only_what_every_tensor_can_have_is_taken_up():
    opt = ao.Optimizer({"w": np.ones(3, "float32"), "c": np.ones(3, "complex64")}, ao.AdamW())
    with pytest.raises(ValueError, match="must be None or 'int8'; got 'bfloat16', and 'c'"):
        opt.state_dtype = "bfloat16"
    assert opt.state["w"]["m"].dtype == np.float32
    assert opt.state_dtype is None


def test_explain_says_which_slots_are_codes():
    tensors = {"w": np.ones((4, 64), "f4"), "b": np.ones(3, "f4")}
    told = ao.Optimizer(tensors, ao.AdamW(state_dtype={"v": "int8"}), groups={"b": {"state_dtype": "int8"}}).explain()
    assert "\nstate in 8 bits: v (uint8, the root), m (int8); with a scale in bfloat16 for each 32 elements\n" in told
    assert "8 bits" not in ao.Optimizer(tensors, ao.AdamW(state_dtype="bfloat16")).explain()


NUMBER, NEEDED = "not one value for each element", "the rule needs its precision"


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (ao.CAME(lr=0.1, state_dtype="int8"), [f"r, c, ir, ic ({NUMBER})"]),
        (ao.CAME(lr=0.1, state_dtype="int8", stacked=True), []),
        (ao.CAME(lr=0.1, state_dtype="int8", blocks=2), [f"r, c, ir, ic ({NUMBER})"]),
        (ao.CAME(lr=0.1, state_dtype={"m": "int8"}), []),
        (ao.SOAP(lr=0.1, state_dtype="int8"), [f"m, l, ql, r, qr ({NEEDED})"]),
        (ao.Sophia(state_dtype="int8", ema_decay=0.9), [f"hess ({NEEDED})", "ema (a copy of the parameter)"]),
        (ao.LAMB(state_dtype="int8", project=ao.projections.support(np.eye(4, 6) > 0)), []),
        (ao.AdamW(), []),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", EVERY)
def test_explain_says_why_a_slot_is_wide(rule, told, engine):
    lines = ao.Optimizer({"w": np.ones((4, 6), "f4")}, rule, engine=engine).explain().splitlines()
    assert [x.strip() for x in lines if "precision" in x] == [f"keep their precision: {x}" for x in told]


@pytest.mark.parametrize("master", ["split", "auto"])
def test_explain_says_why_a_master_is_wide(master):
    rule = ao.LAMB(state_dtype="int8", master_weights=master)
    told = ao.Optimizer({"w": np.ones(3, ml_dtypes.bfloat16)}, rule).explain()
    assert ("keep their precision: master (a copy of the parameter)" in told) is (master == "auto")


@pytest.mark.parametrize(
    ("engine", "rule", "shape", "dtype", "copied"),
    [
        ("cpp", ao.CAME(lr=0.1, state_dtype="int8"), (4, 64), "f4", False),
        ("cpp", ao.CAME(lr=0.1, state_dtype="int8"), (4, 33), "f4", True),
        ("cpp", ao.LAMB(state_dtype="int8"), (4, 33), "f4", False),
        ("cpp", ao.LAMB(state_dtype="int8"), (4, 64), "c8", True),
        ("numpy", ao.LAMB(state_dtype="int8"), (4, 64), "f4", True),
        ("numpy", ao.LAMB(state_dtype="bfloat16"), (4, 64), "f4", False),
    ],
)
def test_explain_says_which_shapes_need_a_temporary_copy(engine, rule, shape, dtype, copied):
    told = ao.Optimizer({"w": np.ones(shape, dtype)}, rule, engine=engine).explain()
    assert ("state in 8 bits is decoded to a temporary copy" in told) is copied


@dataclasses.dataclass(frozen=True, kw_only=True)
class Far(ao.Rule):
    """What it keeps is large where the gradient is zero, as it may be behind the end of an array."""

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        return p + s["m"], {"m": g + 64.0}


def test_what_lies_behind_the_end_is_in_no_scale(cupy):
    rng, opts = np.random.default_rng(1), []
    grads = {f"n{n}": (rng.standard_normal(n) - 64).astype("float32") for n in (31, 33, 4096 + 77)}
    for own, engine in ((np.asarray, "array_api"), (cupy.asarray, "cupy")):
        params = {name: own(np.zeros_like(g)) for name, g in grads.items()}
        opts.append(ao.Optimizer(params, Far(state_dtype="int8"), engine=engine))
        opts[-1].step({name: own(g) for name, g in grads.items()})
    for name in grads:
        assert there(opts[0], name) == there(opts[1], name)
