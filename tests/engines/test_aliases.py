"""Slots are the optimizer's own: whatever a rule returns under several names, engines compute what `ao.update` does."""

import copy

import ml_dtypes  # noqa: F401 - NumPy's bfloat16
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines.array_api import apply_one
from arrayopt.state import slots as slots_module
from arrayopt.testing import assert_equivalent
from tests.support.aliases import ALIASES, drawn_rule
from tests.support.engines import COMPILED, EVERY, SLOW
from tests.support.slow import marked
from tests.support.tracing import made

STORED = {
    "float64": ("float64", {}),
    "masters": ("float16", {}),
    "narrow slots": ("float32", {"state_dtype": "bfloat16"}),
    "stacked": ("float64", {"stacked": True}),
    "around": ("float64", {"ema_decay": 0.5, "lookahead_steps": 2, "project": lambda xp, p, h: xp.minimum(p, 2.5)}),
}
SHAPES = {"w": (3, 4, 5), "long": (3, 40, 90)}
STEPS = 3
FEW = ("the parameter", "one array twice", "slots exchanged")


def problem(dtype, shapes=SHAPES):
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    grads = [{name: rng.standard_normal(p.shape).astype(dtype) for name, p in params.items()} for _ in range(STEPS)]
    return params, grads


def expected(rule, params, grads):
    """What the functional form makes of it; of each tensor its parameter and slots."""
    params = {name: p.copy() for name, p in params.items()}
    state = rule.init(params)
    for g in grads:
        params, state = ao.update(rule, params, g, state)
    return {name: {"p": p, **state["tensors"][name]} for name, p in params.items()}


def stepped(params, rule, grads, engine, library=np, **options):
    """An optimizer after all steps, each of whose gradients is overwritten afterwards."""
    opt = ao.Optimizer({name: library.asarray(p.copy()) for name, p in params.items()}, rule, engine=engine, **options)
    for g in grads:
        given = {name: library.asarray(x.copy()) for name, x in g.items()}
        opt.step(given)
        for x in given.values():
            x[...] = 99.0
    return opt


def check(opt, exact, near=1e-9, numpy=np.asarray):
    for name, want in exact.items():
        for key, x in want.items():
            got = opt.params[name] if key == "p" else opt.state[name][key]
            x, y = (np.asarray(z, "float64") for z in (x, got if key == "t" else numpy(got)))
            np.testing.assert_allclose(y, x, rtol=0, atol=near * max(1.0, np.abs(x).max()), err_msg=f"{name}.{key}")


def fused(name):
    """Whether a rule can be traced: views are made by a shape of numbers."""
    return name not in ("a broadcast", "a view")


NEAR = {"float64": 1e-9, "float32": 2e-2, "float16": 4e-3}


@pytest.mark.parametrize(
    ("engine", "name", "stored"),
    marked(
        [(e, n, how) for e in EVERY for n in ALIASES for how in STORED if e == "array_api" or fused(n)],
        lambda engine, name, stored: (
            engine not in SLOW and (name in FEW or (stored == "float64" and engine not in COMPILED))
        ),
    ),
)
def test_every_alias_in_every_engine(engine, name, stored):
    dtype, options = STORED[stored]
    slots, update = ALIASES[name]
    rule, (params, grads) = made(update, slots)(**options), problem(dtype)
    opt = stepped(params, rule, grads, engine)
    check(opt, expected(rule, params, grads), NEAR[dtype])


@pytest.mark.parametrize(
    "name",
    marked([(n,) for n in ALIASES if fused(n)], lambda name: name in ("the parameter", "two values under one name")),
)
def test_every_alias_on_a_gpu(name, cupy):
    from tests.cudacpu import standin

    slots, update = ALIASES[name]
    rule, (params, grads) = made(update, slots)(), problem("float32")
    with standin.checking(check=False):
        check(stepped(params, rule, grads, "cupy", cupy), expected(rule, params, grads), 1e-4, lambda x: x.get())


@pytest.mark.parametrize(
    ("engine", "seed"),
    marked(
        [(engine, seed) for engine in EVERY for seed in range(60 if engine == "numpy" else 20)],
        lambda engine, seed: engine == "numpy" and seed < 12,
    ),
)
def test_rules_drawn_at_random(engine, seed):
    rule, (params, grads) = drawn_rule(seed)(), problem("float64")
    check(stepped(params, rule, grads, engine), expected(rule, params, grads))


@pytest.mark.parametrize("name", ALIASES)
def test_arrays_that_cannot_be_written(name):
    slots, update = ALIASES[name]
    rule, (params, grads) = made(update, slots)(), problem("float64")
    fixed = {n: p.copy() for n, p in params.items()}
    for p in fixed.values():
        p.flags.writeable = False
    opt = ao.Optimizer(fixed, rule, engine="array_api")
    for g in grads:
        given = {n: x.copy() for n, x in g.items()}
        opt.step(given)
        for x in given.values():
            x[...] = 99.0
    check(opt, expected(rule, params, grads))


@pytest.mark.parametrize("name", ALIASES)
def test_the_functional_form_shares_nothing_with_what_it_was_given(name):
    slots, update = ALIASES[name]
    rule, (params, grads) = made(update, slots)(), problem("float64")
    state, exact = rule.init(params), expected(rule, params, grads)
    now = {n: p.copy() for n, p in params.items()}
    state = rule.init(now)
    for g in grads:
        g = {n: x.copy() for n, x in g.items()}
        new, state = ao.update(rule, now, g, state)
        for old in (*now.values(), *g.values()):
            old[...] = 99.0
        now = new
    for n, want in exact.items():
        got = {"p": now[n], **state["tensors"][n]}
        assert all(np.array_equal(got[key], x) for key, x in want.items())


@pytest.mark.parametrize("engine", ["array_api", "numpy"])
@pytest.mark.parametrize("name", FEW)
def test_what_is_copied_saved_and_loaded_shares_nothing_either(name, engine):
    slots, update = ALIASES[name]
    rule, (params, grads) = made(update, slots)(), problem("float64")
    exact = expected(rule, params, grads)

    def halfway():
        return stepped(params, rule, grads[:1], engine)

    def loaded(saved):
        opt = ao.Optimizer({n: p.copy() for n, p in start.params.items()}, rule, engine=engine)
        opt.load_state_dict(saved)
        return opt

    start = halfway()
    saved = start.state_dict()
    before = copy.deepcopy(saved)
    for opt in (copy.deepcopy(start), loaded(saved), start):
        for g in grads[1:]:
            opt.step(g)
        check(opt, exact)
    for n, about in saved["tensors"].items():
        for slot, x in about["slots"].items():
            assert np.array_equal(x, before["tensors"][n]["slots"][slot])
    again = halfway()
    saved = again.state_dict()
    shared = np.zeros(SHAPES["w"])
    for slot in saved["tensors"]["w"]["slots"]:
        saved["tensors"]["w"]["slots"][slot] = shared
    again.load_state_dict(saved)
    again.step(grads[1])
    assert not shared.any()
    arrays = [again.params["w"], *(x for slot, x in again.state["w"].items() if slot != "t")]
    assert not any(np.may_share_memory(x, y) for i, x in enumerate(arrays) for y in arrays[:i])


@pytest.mark.parametrize("how", ["in the tree", "a tree", "a group", "a view"])
def test_a_slot_cannot_become_a_parameter(how):
    opt = ao.Optimizer({"w": np.ones(4), "v": np.ones(4)}, ao.AdamW(lr=0.1, ema_decay=0.5), engine="numpy")
    opt.step({"w": np.ones(4), "v": np.ones(4)})
    slot, kept = opt.state["w"]["ema"], opt.params["w"]
    words = r"must not share memory with slots; ('[wz]' and )?slot 'ema' of 'w'( and '[wz]')? do; pass a copy"

    def give():
        if how == "a tree":
            opt.params = {"w": slot, "v": opt.params["v"]}
        elif how == "a group":
            opt.add_group({"z": slot})
        else:
            opt.params["w"] = slot if how == "in the tree" else slot[::-1]
            opt.step({"w": np.ones(4), "v": np.ones(4)})

    with pytest.raises(ValueError, match=words):
        give()
    opt.params["w"] = kept
    opt.params["w"] = opt.averaged()["w"]
    opt.step({"w": np.ones(4), "v": np.ones(4)})
    assert opt.step_count == 2


@pytest.mark.parametrize("name", marked([(name,) for name in ALIASES], lambda name: name in FEW[:2]))
def test_doors(name):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    pytest.importorskip("optax")
    from arrayopt.optax import transformation
    from arrayopt.torch import optimizer

    slots, update = ALIASES[name]
    kind, (params, grads) = made(update, slots), problem("float32", {"w": (3, 4, 5)})
    exact = expected(kind(), params, grads)
    p = torch.nn.Parameter(torch.tensor(params["w"]))
    door = optimizer(kind)([p], engine="array_api")
    tx, there = transformation(kind()), jax.numpy.asarray(params["w"])
    state = tx.init(there)
    donated = jax.jit(lambda p, g, state: tx.update(g, state, p), donate_argnums=2)  # no buffer may be given twice
    for g in grads:
        p.grad = torch.tensor(g["w"])
        door.step()
        door.load_state_dict(door.state_dict())
        difference, state = donated(there, g["w"], state)
        there = there + difference
    np.testing.assert_allclose(p.detach().numpy(), exact["w"]["p"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(there, exact["w"]["p"], rtol=1e-4, atol=1e-5)
    for slot, x in door.state[p].items():
        if slot != "step":
            np.testing.assert_allclose(x.numpy(), exact["w"][slot], rtol=1e-4, atol=1e-5)


def test_an_ordinary_start_and_step_copy_nothing(monkeypatch):
    copies = []
    for module in (slots_module, apply_one):
        monkeypatch.setattr(module, "copied", lambda x: copies.append(x) or np.array(x))
    opt = ao.Optimizer({"w": np.ones((2, 3))}, ao.AdamW(lr=0.1), engine="array_api")
    opt.step({"w": np.ones((2, 3))})
    assert not copies
    slots, update = ALIASES["the parameter"]
    ao.Optimizer({"w": np.ones((2, 3))}, made(update, slots)())
    assert len(copies) == 1


@pytest.mark.parametrize("name", ["the parameter", "one array twice"])
def test_assert_equivalent_finds_slots_that_are_not_the_optimizers_own(name, monkeypatch):
    slots, update = ALIASES[name]
    rule, (params, grads) = made(update, slots)(), problem("float64")
    engines = ["numpy:array_api", "numpy:numpy", "torch:array_api"]
    found = assert_equivalent(rule, params, lambda now, step: grads[step], engines=engines, steps=STEPS)
    assert all(outcome.difference.ulps < 8 for outcome in found.values())
    monkeypatch.setattr(slots_module, "_own", lambda p, slots: slots)
    with pytest.raises(AssertionError, match=r"is not what arrayopt\.update computes") as caught:
        assert_equivalent(rule, params, lambda now, step: grads[step], engines=engines, steps=STEPS)
    assert all(engine in str(caught.value) for engine in engines)
