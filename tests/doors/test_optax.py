"""`arrayopt.optax`: what optax asks of each of its own optimizers, of every rule; and what programs make of them."""

import copy
import dataclasses
import inspect
import pickle
from functools import partial

import numpy as np
import pytest

import arrayopt as ao
from tests.support import cases, refusals
from tests.support.slow import marked

jax = pytest.importorskip("jax", reason="JAX is not installed: make test installs it")
optax = pytest.importorskip("optax", reason="optax is not installed: make test installs it")

import jax.numpy as jnp  # noqa: E402

import arrayopt.optax as door  # noqa: E402
from arrayopt.optax import transformation  # noqa: E402
from arrayopt.optax.same import SAME, Same  # noqa: E402

ROWS = [(name, row) for name, rows in cases.CASES.items() for row in rows]
FIRST = marked(
    ROWS,
    lambda name, row: name in ("LAMB", "SGD") and row is cases.CASES[name][0],
    lambda x: x if isinstance(x, str) else "",
)
MEETING = marked([("Prodigy", cases.JOINT["Prodigy"][1]), ("LBFGS", cases.JOINT["LBFGS"][0])], lambda *_: False)
LAMB = marked(ROWS, lambda name, row: name == "SGD" and row is cases.CASES[name][0], lambda x: str(x))


def made(name, row):
    return transformation(cases.make(name, row))


def tree(seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = {"w": (4, 3), "b": (5,)}
    leaves = {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    return {"layers": [leaves, (jnp.asarray(rng.standard_normal((2, 3, 2)), dtype),)]}


def looks(x):
    """The shape, dtype and weakness of each leaf."""
    return jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), x)


def close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), **tolerance), a, b)


# ---- what optax asks of its own --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "row"), FIRST + MEETING)
def test_updates_lead_to_the_new_parameters_and_states_keep_their_form(name, row):
    tx, rule = made(name, row), cases.make(name, row)
    params, theirs = tree(), tree()
    state, own = jax.jit(tx.init)(params), rule.init(theirs)
    first, step = looks(state), jax.jit(tx.update)
    plain = jax.jit(lambda p, g, s: ao.update(rule, p, g, s))
    for k in range(3):
        grads = tree(k + 1)
        updates, state = step(grads, state, params, unexpected=1)
        assert looks(updates) == looks(params)
        params = optax.apply_updates(params, updates)
        theirs, own = plain(theirs, grads, own)
    assert looks(state) == first
    assert int(state.count) == 3
    close(params, theirs, rtol=2e-5, atol=2e-6)
    for slot, x in state.slots.items():
        for path, got in jax.tree_util.tree_leaves_with_path(x):
            expected = own["tensors"][jax.tree_util.keystr(path, simple=True, separator=".")].get(slot, np.zeros(1))
            np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-4, atol=1e-6)


DTYPES = marked([("float32",), ("bfloat16",), ("float16",)], lambda dtype: dtype == "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_stay_where_a_step_may_not_be_made(dtype):
    tx, params = door.lamb(0.1, ema_decay=0.5), tree(0, dtype)["layers"][0]["w"]

    @jax.jit
    def step(flag, params, state):
        here = lambda: tx.update(params, state, params)  # noqa: E731
        updates, state = jax.lax.cond(flag, here, lambda: (jax.tree.map(jnp.zeros_like, params), state))
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    first = looks(state)
    for flag in (True, False, True):
        params, state = step(flag, params, state)
    assert looks(state) == first
    assert int(state.count) == 2
    assert ("master" in state.slots) == (dtype != "float32")


@pytest.mark.parametrize(("name", "row"), LAMB)
def test_inject_hyperparams(name, row):
    """Numbers become arrays in the state; a schedule is one of optax's."""
    make, params, grads = getattr(door, name.lower()), tree(), tree(1)
    theirs = SAME.get(name.lower(), Same(getattr(ao, name)))  # it may be another rule, with fields that are fixed
    known = {f.name for f in dataclasses.fields(theirs.rule)} - theirs.always.keys()
    options = {key: x for key, x in {"lr": 0.1, **row}.items() if key in known}
    if options.get("relative_step"):
        del options["lr"]
    tx, inner = make(**options), optax.inject_hyperparams(make)(**options)
    loss = lambda params: sum((x**4).sum() for x in jax.tree.leaves(params))  # noqa: E731 - for sophia
    updates, state = jax.jit(partial(tx.update, obj_fn=loss))(grads, tx.init(params), params)
    others, injected = jax.jit(partial(inner.update, obj_fn=loss))(grads, inner.init(params), params)
    close(updates, others, rtol=1e-3, atol=2e-5)  # 1 - 0.9999 of a number in float32
    for slot, x in state.slots.items():
        close(x, injected.inner_state.slots[slot], rtol=1e-3, atol=2e-5)


def test_inject_hyperparams_leaves_whole_numbers_of_structure_as_they_are():
    """Even where they are defaults."""
    params = {"w": jnp.eye(3), "b": jnp.ones(2)}
    tx = optax.inject_hyperparams(door.soap)(learning_rate=0.1, precondition_frequency=2)
    state = tx.init(params)
    assert "precondition_frequency" not in state.hyperparams
    assert "max_precondition_dim" not in state.hyperparams
    assert float(state.hyperparams["lr"]) == np.float32(0.1)


def test_inject_hyperparams_leaves_fields_out_that_are_named():
    params = {"w": jnp.ones((2, 3))}
    inject = optax.inject_hyperparams(door.lamb, static_args=("max_ratio", "adapt"))
    tx = inject(learning_rate=0.1, max_ratio=2.0, adapt=True)
    state = tx.init(params)
    assert "max_ratio" not in state.hyperparams
    close(
        tx.update(params, state, params)[0],
        door.lamb(0.1, max_ratio=2.0).update(params, door.lamb(0.1).init(params), params)[0],
    )


def test_inject_hyperparams_with_a_schedule():
    tx = optax.inject_hyperparams(door.sgd)(lr=optax.linear_schedule(1.0, 0.0, 2))
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.ones(2)}
    state, seen = tx.init(params), []
    for _ in range(3):
        updates, state = tx.update(grads, state, params)
        seen.append(float(updates["w"][0]))
    assert seen == [-1.0, -0.5, 0.0]


def test_inject_hyperparams_takes_what_the_function_takes():
    params = {"w": jnp.full(2, 3.0)}
    inject = optax.inject_hyperparams(door.adamw)
    bounded = inject(learning_rate=0.1, b1=0.5, project=ao.projections.box(-1.0, 1.0))
    state = bounded.init(params)
    assert (float(state.hyperparams["learning_rate"]), float(state.hyperparams["b1"])) == (np.float32(0.1), 0.5)
    updates, _ = jax.jit(bounded.update)(params, state, params)
    assert updates["w"].tolist() == [-2.0, -2.0]
    assert float(inject(0.1).init(params).hyperparams["learning_rate"]) == np.float32(0.1)
    refusals.raises(lambda: inject(0.1, learning_rate=0.2), TypeError, "adamw: `learning_rate` is given twice")
    refusals.raises(lambda: inject(0.1, weight_dcay=0.2), TypeError, "did you mean `weight_decay`?")
    narrow = {"w": jnp.ones(2, jnp.bfloat16)}
    refusals.raises(
        lambda: inject(0.1).init(narrow), ValueError, "`b2` must be in [0, 1)", "hyperparam_dtype=jnp.float32"
    )
    wide = optax.inject_hyperparams(door.adamw, hyperparam_dtype=jnp.float32)(0.1)
    assert wide.update(narrow, wide.init(narrow), narrow)[0]["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("target", ["parabola", "rosenbrock"])
def test_optimization(target):
    """optax's own aims, for LAMB; it must find them within so many steps as optax's is given."""
    start, aim, loss = {
        "parabola": ([-1.0, 10.0, 1.0], [1.0, -1.0, 1.0], lambda p: jnp.sum((p - jnp.array([1.0, -1.0, 1.0])) ** 2)),
        "rosenbrock": ([0.0, 0.0], [1.0, 1.0], lambda p: (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2),
    }[target]
    tx = door.lamb(1e-3, weight_decay=0.0)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    params = jnp.array(start)
    (params, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, None, length=10_000))((params, tx.init(params)))
    np.testing.assert_allclose(np.asarray(params), aim, rtol=3e-2, atol=3e-2)


def test_tree_map_params_finds_what_lies_along_parameters():
    tx = door.adamw(1e-3)
    state = optax.tree_utils.tree_map_params(tx, lambda x: x + 1, tx.init(tree()))
    assert all(bool((x == 1).all()) for x in jax.tree.leaves(state.slots))
    assert int(state.count) == 0


# ---- what programs make of them --------------------------------------------------------------------------------------


def test_several_steps_make_one():
    tx, params = door.sgd(0.1, momentum=0.9), tree()
    several = optax.MultiSteps(tx, every_k_schedule=2)
    state, step = several.init(params), jax.jit(several.update)
    first, state = step(tree(1), state, params)
    assert not any(bool(x.any()) for x in jax.tree.leaves(first))
    second, state = step(tree(2), state, params)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, tree(1), tree(2))
    expected, _ = jax.jit(tx.update)(mean, tx.init(params), params)
    close(second, expected, rtol=1e-5, atol=1e-7)


def test_labels_masks_and_chains():
    params, grads = {"a": jnp.ones((3, 2)), "b": jnp.ones(3)}, {"a": jnp.full((3, 2), 2.0), "b": jnp.full(3, 2.0)}
    labels = {"a": "lars", "b": "sgd"}
    tx = optax.multi_transform({"lars": door.lars(1.0), "sgd": door.sgd(0.5), "none": door.came(lr=0.1)}, labels)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    close(updates, {"a": jnp.full((3, 2), -1e-3), "b": jnp.full(3, -1.0)}, rtol=1e-4)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(door.sgd(1.0), {"a": True, "b": False}))
    updates, _ = tx.update(grads, tx.init(params), params)
    clipped = 2.0 / np.sqrt(4 * 9)
    close(updates, {"a": jnp.full((3, 2), -clipped), "b": jnp.full(3, clipped)}, rtol=1e-6)
    empty = door.lamb(0.1)
    assert empty.update({}, empty.init({}), {})[0] == {}


def test_vmap_trains_many_at_once():
    tx, many = door.lars(1.0), [{"w": tree(k)["layers"][0]["w"]} for k in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *many)
    updates, state = jax.jit(jax.vmap(tx.update))(stacked, jax.jit(jax.vmap(tx.init))(stacked), stacked)
    step = jax.jit(tx.update)
    for i, params in enumerate(many):
        alone, _ = step(params, tx.init(params), params)
        close(jax.tree.map(lambda x, i=i: x[i], updates), alone, rtol=1e-5, atol=1e-7)
    assert state.count.shape == (3,)


def test_shardings_stay():
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    place = NamedSharding(mesh, PartitionSpec("x"))
    params = {"w": jax.device_put(jnp.ones((8, 3)), place)}
    tx = door.lamb(0.1)
    updates, state = jax.jit(tx.update)(params, jax.jit(tx.init)(params), params)
    for x in (updates["w"], state.slots["m"]["w"], state.slots["v"]["w"]):
        assert x.sharding.is_equivalent_to(place, 2)


def test_a_rule_of_ones_own():
    tx = transformation(refusals.Signs(lr=0.5))
    params = jnp.array([1.0, -2.0])
    updates, state = tx.update(params, tx.init(params), params)
    assert updates.tolist() == [-0.5, 0.5]
    assert state.slots == {}


def test_schedules_see_the_number_of_updates():
    tx, params = door.sgd(lambda step: 1.0 / (step + 1)), jnp.ones(1)
    state, step, seen = tx.init(params), jax.jit(tx.update), []
    for _ in range(3):
        updates, state = step(jnp.ones(1), state, params)
        seen.append(round(1 / -float(updates[0])))
    assert seen == [1, 2, 3]


def test_paths_that_are_alike_are_no_trouble():
    params = {"a.b": jnp.ones(1), "a": {"b": jnp.ones(2)}}
    tx = door.sgd(0.5)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["a"]["b"].tolist() == [-0.5, -0.5]


def train(tx, params, state, steps, jit=True):
    step = jax.jit(tx.update) if jit else tx.update
    for _ in range(steps):
        updates, state = step(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_masters_follow_what_becomes_of_updates():
    """A later transformation, freezing, and a write from outside: what a parameter is now, is what counts."""
    half = lambda x: {"w": jnp.full(3, x, jnp.float16)}  # noqa: E731
    tx = optax.chain(door.sgd(1e-2), optax.scale(0.1))
    params, _ = train(tx, half(1.0), tx.init(half(1.0)), 50)
    close(params, {"w": np.full(3, 0.95)}, atol=5e-3)

    frozen = optax.chain(door.sgd(1e-2), optax.scale_by_schedule(lambda k: jnp.where(k < 10, 0.0, 1.0)))
    params, _ = train(frozen, half(1.0), frozen.init(half(1.0)), 11)
    close(params, {"w": np.full(3, 0.99)}, atol=1e-3)

    tx = door.sgd(1e-2, momentum=0.0)
    params, state = train(tx, half(1.0), tx.init(half(1.0)), 3)
    written = {"w": params["w"].at[1].set(0.0)}
    before = state.slots["master"]["w"]
    params, state = train(tx, written, state, 1)
    close(params, {"w": np.array([0.96, -0.01, 0.96])}, atol=1e-3)
    np.testing.assert_array_equal(state.slots["master"]["w"][::2], (before - np.float32(1e-2))[::2])  # goes on


@pytest.mark.parametrize(("dtype", "jit"), [("bfloat16", True), ("float16", False)])
def test_masters_of_a_plain_run_are_those_of_the_functional_form(dtype, jit):
    """Bit for bit: small steps add up in the master, though the parameter does not move."""
    params = theirs = {"w": jnp.asarray(np.linspace(0.5, 2.0, 40), dtype)}
    rule, tx = ao.SGD(lr=1e-4), door.sgd(1e-4)
    state, own = tx.init(params), rule.init(theirs)
    params, state = train(tx, params, state, 60, jit)
    plain = jax.jit(lambda p, s: ao.update(rule, p, {"w": jnp.ones(40, dtype)}, s))
    for _ in range(60):
        theirs, own = plain(theirs, own)
    assert bool((theirs["w"] != jnp.asarray(np.linspace(0.5, 2.0, 40), dtype)).any())
    np.testing.assert_array_equal(np.asarray(params["w"]), np.asarray(theirs["w"]))
    np.testing.assert_array_equal(state.slots["master"]["w"], own["tensors"]["w"]["master"])


def test_masters_are_each_their_own_under_vmap():
    tx, params = door.sgd(1e-4), {"w": jnp.ones((2, 3), jnp.bfloat16)}
    state = jax.vmap(tx.init)(params)
    for _ in range(2):
        _, state = jax.jit(jax.vmap(tx.update))(params, state, params)
    params = {"w": params["w"].at[1].set(0.5)}
    _, state = jax.jit(jax.vmap(tx.update))({"w": jnp.ones((2, 3), jnp.bfloat16)}, state, params)
    expected = np.repeat(np.array([[1.0 - 3e-4], [0.5 - 1e-4]]), 3, axis=1)
    np.testing.assert_allclose(state.slots["master"]["w"], expected, rtol=1e-6)


# ---- what is taken, and what is not ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in cases.CASES if not hasattr(optax, name.lower())])
def test_a_function_is_made_of_a_rules_fields(name):
    """Where optax has none of that name."""
    if hasattr(optax.contrib, name.lower()):
        return
    make, rule = getattr(door, name.lower()), getattr(ao, name)
    parameters = inspect.signature(make).parameters
    assert next(iter(parameters)) == "lr"
    assert set(parameters) - {"mask"} == {f.name for f in dataclasses.fields(rule)}
    assert make.__name__ in door.__all__
    assert name in make.__doc__


def test_names_of_optax_are_known():
    params = jnp.ones(3)
    states = [
        jax.jit(tx.update)(params, tx.init(params), params)
        for tx in (door.adamw(0.1, beta1=0.5, beta2=0.6), door.adamw(learning_rate=0.1, b1=0.5, b2=0.6))
    ]
    close(*states)


def test_a_state_is_its_rules_own():
    params = {"w": jnp.ones(3)}
    tx = door.lamb(0.1)
    state = door.adamw(0.1).init(params)
    for other, name in ((state, "AdamWState"), (optax.adamw(0.1).init(params), "tuple"), ({}, "dict")):
        with pytest.raises(TypeError, match=f"LAMB: `state` must be what init .* got {name}. Make one with tx.init"):
            jax.jit(tx.update)(params, other, params)
    with pytest.raises(ValueError, match="must hold"):
        door.adamw(0.1, amsgrad=True).update(params, state, params)
    tx = door.adamw(0.2)
    expected, after = tx.update(params, state, params)
    plain = door.State(state.count, state.slots)  # one that a program has made
    for same in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state), state._replace(count=state.count), plain):
        updates, new = tx.update(params, same, params)
        assert isinstance(new, door.State)
        assert type(new) is type(same)
        close(updates, expected)
    assert type(after) is type(state)
    assert type(pickle.loads(pickle.dumps(plain))) is door.State


def test_restored_arrays_of_numpy_are_taken():
    """As from a checkpoint, outside of `jax.jit`."""
    params, tx = {"w": jnp.ones((3, 2))}, door.lamb(0.1)
    _, state = tx.update(params, tx.init(params), params)
    restored = [jax.tree.map(np.asarray, x) for x in (params, state, params)]
    close(tx.update(*restored)[0], tx.update(params, state, params)[0])
    assert isinstance(tx.init(restored[0]).slots["m"]["w"], jax.Array)


def test_a_state_of_optax_goes_on():
    """The recipe of the page."""
    params, grads = {"w": jnp.ones((3, 2))}, {"w": jnp.full((3, 2), 0.5)}
    theirs, tx = optax.adamw(0.1), door.adamw(0.1, weight_decay=1e-4)
    updates, old = theirs.update(grads, theirs.init(params), params)
    params = optax.apply_updates(params, updates)
    adam, state = old[0], tx.init(params)
    state = state._replace(count=adam.count, slots={**state.slots, "m": adam.mu, "v": adam.nu})
    close(tx.update(grads, state, params)[0], theirs.update(grads, old, params)[0], rtol=1e-5)


def test_an_optimizer_goes_on_from_a_state_of_this_door():
    params = {"w": jnp.ones((3, 2), jnp.bfloat16), "b": [jnp.zeros(3)]}
    tx = optax.chain(optax.clip(1.0), door.adamw(1e-3))
    params, state = train(tx, params, tx.init(params), 3)
    opt = ao.Optimizer(params, ao.AdamW(lr=1e-3))
    ao.load_optax(opt, state)
    assert (opt.step_count, opt.state["b.0"]["t"]) == (3, 3)
    close({name: opt.state["w"][name] for name in ("m", "v", "master")}, {n: x["w"] for n, x in state[1].slots.items()})
    before = str(opt.state_dict())
    other = door.adamw(1e-3, amsgrad=True).init(params)
    refusals.raises(lambda: ao.load_optax(opt, other), ValueError, "the state has v_max, which the optimizer's rule")
    other = door.lamb(1e-3).init(params)
    refusals.raises(lambda: ao.load_optax(opt, other), TypeError, "is a LAMBState, but the optimizer's rule is AdamW")
    other = door.adamw(1e-3, state_dtype="float16").init(params)
    refusals.raises(lambda: ao.load_optax(opt, other), ValueError, "float16 of v of 'w', expected float32 (set `state")
    assert str(opt.state_dict()) == before


@pytest.mark.parametrize("storage", ["float16", "int8"])
def test_a_state_of_optax_is_loaded_into_any_storage(storage):
    """With roots of second moments, as the storage has them."""
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 2.0)}
    theirs = optax.adamw(0.1)
    _, state = theirs.update(grads, theirs.init(params), params)
    opt = ao.Optimizer(params, ao.AdamW(lr=0.1, weight_decay=1e-4, state_dtype=storage))
    ao.load_optax(opt, state)
    wanted, _ = theirs.update(grads, state, params)
    close(opt.step(grads)["w"], params["w"] + wanted["w"], rtol=1e-3)


def test_a_sequence_runs_out():
    params, tx = jnp.ones(2), door.sgd([0.1, 0.2])
    params, state = train(tx, params, tx.init(params), 2, jit=False)
    with pytest.raises(ValueError, match="SGD: `lr`: the sequence has 2 values and has run out at step 2"):
        tx.update(params, state, params)
    assert bool(jnp.isnan(jax.jit(tx.update)(params, state, params)[0]).all())


PAIR = {"w": jnp.ones(2), "b": jnp.ones(1)}


ERRORS = [
    refusals.row(
        "lr twice",
        lambda: door.sgd(0.1, learning_rate=0.5),
        TypeError,
        "given twice, by its place and as `learning_rate`",
    ),
    refusals.row(
        "twice", lambda: door.adamw(b1=0.1, beta1=0.9), TypeError, "`b1` is given twice, as `b1` and as `beta1`"
    ),
    refusals.row(
        "unknown", lambda: door.sgd(0.1, mask=None), TypeError, "sgd has no `mask`", "use optax.multi_transform"
    ),
    *(
        refusals.row(name, lambda name=name: door.lamb(0.1, **{name: 1}), TypeError, f"lamb has no `{name}`", words)
        for name, words in {
            "accumulate": "optax.MultiSteps",
            "clip_norm": "optax.clip_by_global_norm",
            "max_grad_norm": "optax.clip_by_global_norm",
            "engine": "leave it out: JAX",
            "foreach": "leave it out: JAX",
            "groups": "optax.multi_transform",
            "loss_scale": "optax.scale(1 / scale)",
            "params": "tx.init(params)",
            "skip_nonfinite": "optax.apply_if_finite",
            "stats": "arrayopt.update",
            "warmup_steps": "use a schedule",
        }.items()
    ),
    refusals.row("range", lambda: door.lamb(-1.0), ValueError, "lamb: `learning_rate` must be in [0, inf); got -1.0"),
    refusals.row("no rule", lambda: transformation(3), TypeError, "`rule` must be a Rule", "got 3"),
    refusals.row("a class", lambda: transformation(ao.LAMB), TypeError, "`rule` must be a Rule"),
    refusals.row(
        "no params",
        lambda: door.lamb(0.1).update(jnp.ones(2), door.lamb(0.1).init(jnp.ones(2))),
        ValueError,
        "LAMB: an update needs the parameters",
    ),
    refusals.row(
        "vector", lambda: door.normuon(0.1).init(jnp.ones(2)), ValueError, "is not a matrix", "optax.multi_transform"
    ),
    *(
        refusals.row(name, lambda g=grads: door.sgd(0.1).update(g, door.sgd(0.1).init(PAIR), PAIR), ValueError, words)
        for name, grads, words in [
            ("missing", {"w": jnp.ones(2)}, "SGD: grads do not match params: missing 'b'"),
            ("unexpected", {"w": jnp.ones(2), "b": None, "c": None}, "params: unexpected 'c'"),
            ("a list", [jnp.ones(2)], "params: missing 'b'; missing 'w'; unexpected '0'"),
        ]
    ),
    refusals.row(
        "slots",
        lambda: door.lamb(0.1).update(PAIR, door.lamb(0.1).init({"w": jnp.ones(2)}), PAIR),
        ValueError,
        "LAMB: the slots of state do not match params: missing 'b'",
    ),
    refusals.row("integers", lambda: door.lamb(0.1).init({"n": jnp.arange(3)}), TypeError, "floating-point"),
    refusals.row(
        "shapes",
        lambda: door.lamb(0.1).update({"w": jnp.ones(3)}, door.lamb(0.1).init({"w": jnp.ones(2)}), {"w": jnp.ones(2)}),
        ValueError,
        "shape (3,) at 'w', expected (2,)",
    ),
]


@pytest.mark.parametrize(("call", "exception", "words"), ERRORS)
def test_wrong_calls(call, exception, words):
    refusals.raises(call, exception, *words)


# ---- flax ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_flax():
    """A TrainState, and NNX's Optimizer: `make test-doors` has flax."""
    train_state = pytest.importorskip(
        "flax.training.train_state", reason="flax is not installed: make test-doors has it"
    )
    from flax import linen, nnx

    x = jnp.ones((4, 3))
    net = linen.Dense(2)
    params = net.init(jax.random.key(0), x)["params"]
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=door.lamb(0.1))
    loss = lambda p: (net.apply({"params": p}, x) ** 2).sum()  # noqa: E731
    step = jax.jit(lambda s: s.apply_gradients(grads=jax.grad(loss)(s.params)))
    before = float(loss(state.params))
    for _ in range(5):
        state = step(state)
    assert float(loss(state.params)) < before

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, door.lamb(0.1), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer):
        value, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).sum())(model)
        optimizer.update(model, grads)
        return value

    values = [float(train(model, optimizer)) for _ in range(5)]
    assert values[-1] < values[0]


def test_what_optax_programs_ask_for_first():
    assert not hasattr(door, "lbfgs")
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    tx = optax.multi_transform({"x": optax.adamw(0.1), "y": optax.adamw(0.2)}, {"a": "x", "b": "y"})
    state = tx.init(params)
    with pytest.raises(TypeError, match=r"of optax\.multi_transform load each of its `inner_states` into an optimizer"):
        ao.load_optax(ao.Optimizer(params, ao.AdamW()), state)
    ao.load_optax(ao.Optimizer({"a": params["a"]}, ao.AdamW()), state.inner_states["x"])
