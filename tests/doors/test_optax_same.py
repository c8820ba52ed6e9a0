"""Functions of `arrayopt.optax` that optax has too: its arguments, and the same numbers with each of them."""

import inspect
from functools import partial

import numpy as np
import pytest

import arrayopt as ao
from tests.support import refusals
from tests.support.namesakes import called, lacking
from tests.support.slow import marked

jax = pytest.importorskip("jax", reason="JAX is not installed: make test installs it")
optax = pytest.importorskip("optax", reason="optax is not installed: make test installs it")

import jax.numpy as jnp  # noqa: E402

import arrayopt.optax as door  # noqa: E402
from arrayopt.optax import transformation  # noqa: E402

SHAPES = {"s": (), "v": (5,), "w": (4, 3), "k": (3, 2, 4)}
MASK = {"s": True, "v": False, "w": True, "k": False}


def matrices(tree):
    """A mask that is a function."""
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def halved(step):
    """A schedule of optax's kind."""
    return 0.1 * 0.5**step


def kernels(params):
    """Which axes of which tensors are matrices, for muon."""
    axes = optax.contrib.MuonDimensionNumbers
    return {**dict.fromkeys(params), "w": axes(1, 0), "k": axes(0, (2, 1))}


TRIPLES = ((2.0, -1.5, 0.5), (3.0, -3.0, 1.0))
MOMENTS = {"b1": 0.5, "b2": 0.7, "eps": 1e-3, "eps_root": 1e-2}
# The last row of each has the most options at once. Rows before it have those that do not go with it.
ROWS = {
    "adafactor": [
        {"learning_rate": None},
        {"factored": False, "min_dim_size_to_factor": 2, "clipping_threshold": None},
        {"learning_rate": halved, "momentum": 0.9, "weight_decay_rate": halved, "weight_decay_mask": matrices},
        {"min_dim_size_to_factor": 2, "momentum": 0.5, "dtype_momentum": "bfloat16"},
        {
            "min_dim_size_to_factor": 2,
            "decay_rate": 0.5,
            "multiply_by_parameter_scale": False,
            "clipping_threshold": 0.5,
            "eps": 1e-3,
            "momentum": 0.5,
            "weight_decay_rate": 0.1,
            "weight_decay_mask": MASK,
        },
    ],
    "adabelief": [{"nesterov": True}, {**MOMENTS, "learning_rate": halved}],
    "adam": [{"learning_rate": halved, "mu_dtype": "float32"}, {**MOMENTS, "nesterov": True, "mu_dtype": None}],
    "adamw": [
        {"weight_decay": halved, "mask": None, "mu_dtype": "float32"},
        {"weight_decay": 0.3, "mask": True},
        {**MOMENTS, "weight_decay": 0.3, "mask": matrices, "nesterov": True},
    ],
    "adan": [{"eps_root": 0.0}, {**MOMENTS, "b3": 0.6, "weight_decay": 0.3, "mask": MASK}],
    "ademamix": [
        {"alpha": lambda k: 2.0 * (k + 1), "b3": lambda k: 0.5 + 0.05 * k},
        {**MOMENTS, "b3": 0.6, "alpha": 2.0, "weight_decay": 0.3, "mask": MASK},
    ],
    "prodigy": [
        {"weight_decay": 0.3, "estim_lr0": 1e-3},
        {
            "learning_rate": halved,
            "betas": (0.5, 0.9),
            "beta3": 0.8,
            "eps": 1e-3,
            "estim_lr0": 0.01,
            "estim_lr_coef": 2.0,
            "safeguard_warmup": True,
        },
    ],
    "lamb": [{"weight_decay": 0.3, "mask": matrices}, {**MOMENTS, "weight_decay": 0.3, "mask": MASK}],
    "lars": [
        {"learning_rate": halved, "weight_decay": 0.1, "trust_coefficient": 0.1},
        {"momentum": 0.0, "nesterov": True, "weight_decay_mask": False},
        {
            "weight_decay": 0.1,
            "weight_decay_mask": matrices,
            "trust_ratio_mask": MASK,
            "eps": 0.1,
            "momentum": 0.5,
            "nesterov": True,
        },
    ],
    "lion": [{"mu_dtype": "float32"}, {"b1": 0.5, "b2": 0.7, "weight_decay": 0.3, "mask": MASK}],
    "muon": [
        {"ns_coeffs": "dion", "beta": 0.5},
        {"muon_weight_dimension_numbers": kernels, "consistent_rms": 0.4, "weight_decay": 0.1},
        {
            "ns_steps": 3,
            "mu_dtype": "float32",
            "adam_b1": 0.5,
            "adam_b2": 0.7,
            "adam_eps_root": 0.1,
            "adam_weight_decay": 0.1,
            "adam_learning_rate": 0.3,
        },
        {"ns_coeffs": TRIPLES, "eps": 0.1, "weight_decay": 0.1, "weight_decay_mask": MASK, "nesterov": False},
    ],
    "nadam": [{"mu_dtype": "float32", "nesterov": False}, MOMENTS],
    "radam": [{"b2": 0.9}, {**MOMENTS, "b2": 0.95, "threshold": 4.5, "nesterov": True}],
    "rmsprop": [
        {"learning_rate": halved, "momentum": 0.9},
        {"nesterov": True},
        {"centered": True, "initial_scale": 1.0, "eps": 0.1},
        {
            "decay": 0.5,
            "eps": 1e-2,
            "initial_scale": 1.0,
            "eps_in_sqrt": False,
            "momentum": 0.9,
            "nesterov": True,
            "bias_correction": True,
        },
    ],
    "sgd": [
        {"learning_rate": halved, "momentum": 0.9},
        {"nesterov": True},
        {"momentum": 0.5, "accumulator_dtype": "float32", "nesterov": True},
    ],
    "sophia": [
        {"clip_threshold": None, "gamma": 10.0, "mu_dtype": "float32", "update_interval": 1},
        {"weight_decay": 0.3, "weight_decay_mask": MASK, "hessian_diagonal_fn": optax.scale(2.0)},
        {
            "b1": 0.5,
            "b2": 0.7,
            "eps": 1e-3,
            "gamma": 5.0,
            "clip_threshold": 0.5,
            "update_interval": 2,
            "weight_decay": 0.3,
            "weight_decay_mask": matrices,
        },
    ],
}
REFUSED = {
    "adafactor": {"decay_offset": 3},
    "ademamix": {"mu_dtype": "bfloat16"},
    "muon": {"adaptive": True, "preconditioning": "aol"},
    "sophia": {"verbose": True, "print_win_rate_every_n_steps": 10},
}
LONG = ("adafactor", "muon")  # in which there is more to compile than the others share
RUNS = [(name, i) for name, rows in ROWS.items() for i in range(-1, len(rows))]
QUICK = marked(RUNS, lambda name, i: i == len(ROWS[name]) - 1, lambda x: str(x))


def original(name):
    return getattr(optax, name, None) or getattr(optax.contrib, name)


def tree(seed, dtype):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()}


def quartic(params):
    """A function whose Hessian is diagonal, for sophia."""
    return sum((x**4).sum() for x in jax.tree.leaves(params))


def run(tx, dtype, jit, steps=4):
    """The parameters after each step. Without `jax.jit` functions share the operations that have been compiled."""
    params, made = tree(0, dtype), []
    update = partial(tx.update, obj_fn=quartic)
    state, update = tx.init(params), jax.jit(update) if jit else update
    for k in range(steps):
        updates, state = update(jax.tree.map(lambda x: 0.3 * x, tree(10 + k, dtype)), state, params)
        params = optax.apply_updates(params, updates)
        made.append(params)
    return jax.tree.map(lambda *x: np.stack(x), *made)


def test_the_table_has_every_function_and_every_option():
    both = [x for x in door.__all__ if hasattr(optax, x) or hasattr(optax.contrib, x)]
    assert sorted(ROWS) == sorted(both)
    for name, rows in ROWS.items():
        assert not lacking(original(name), rows, REFUSED.get(name, ())), name


@pytest.mark.parametrize("name", ROWS)
def test_the_signature_is_that_of_optax(name):
    """Fields of the rule that optax does not know come after its arguments, by name alone."""
    theirs, ours = called(original(name)), called(getattr(door, name))
    assert ours[: len(theirs)] == theirs
    assert {kind for _, kind, _ in ours[len(theirs) :]} <= {"KEYWORD_ONLY"}
    for option, value in REFUSED.get(name, {}).items():
        if option in inspect.signature(original(name)).parameters:
            call = partial(getattr(door, name), 0.1, **{option: value})
            refusals.raises(call, ValueError, f"{name}: `{option}` must be", f"Use optax's own {name}")


@pytest.mark.parametrize(("name", "row"), QUICK)
def test_the_numbers_are_those_of_optax(name, row):
    """Row -1 has the defaults."""
    options = {"learning_rate": 0.1, **(ROWS[name][row] if row >= 0 else {})}
    newer = options.keys() - {x for x, _, _ in called(original(name))}
    if newer:
        pytest.skip(f"optax {optax.__version__} has no {', '.join(newer)}")
    theirs, ours = (run(make(**options), "float64", name in LONG) for make in (original(name), getattr(door, name)))
    # optax computes adafactor's decay in float32; and what a slot in float32 is multiplied by is in float32 too
    narrow = name == "adafactor" or any("dtype" in x for x in options)
    for leaf, x in theirs.items():
        largest = np.abs(x).max()
        np.testing.assert_allclose(ours[leaf] / largest, x / largest, rtol=0, atol=2e-6 if narrow else 1e-12)


@pytest.mark.parametrize("name", marked([(x,) for x in ROWS], lambda x: x == "sgd", str))
def test_the_numbers_are_those_of_optax_in_float32(name):
    theirs, ours = (run(make(0.1), "float32", jit=True) for make in (original(name), getattr(door, name)))
    for leaf, x in theirs.items():
        largest = np.abs(x).max()
        np.testing.assert_allclose(ours[leaf] / largest, x / largest, rtol=0, atol=2e-5)


# ---- how they are called ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", marked([(x,) for x in ROWS], lambda x: x in ("adamw", "rmsprop", "lamb"), str))
def test_our_names_and_the_rules_other_fields_are_taken_too(name):
    make, params = getattr(door, name), {"w": jnp.ones((2, 2))}
    updates = []
    for options in ({"learning_rate": 0.5}, {"lr": 0.5}, {"learning_rate": 0.5, "project": None, "stacked": False}):
        tx = make(**options)
        updates.append(np.asarray(tx.update(params, tx.init(params), params, obj_fn=quartic)[0]["w"]))
    np.testing.assert_array_equal(updates[0], updates[1])
    np.testing.assert_array_equal(updates[0], updates[2])
    bounded = make(0.5, project=ao.projections.box(-1.0, 0.9))
    moved = params["w"] + bounded.update(params, bounded.init(params), params, obj_fn=quartic)[0]["w"]
    assert float(moved.max()) <= 0.9 + 1e-7


TURNED = [("muon", 4, {}), ("adafactor", 5, {"min_dim_size_to_factor": 2})]


@pytest.mark.parametrize(("name", "rows", "options"), marked(TURNED, lambda name, *_: name == "muon", str))
def test_projections_are_of_parameters_as_they_are(name, rows, options):
    """Though rules see kernels turned."""
    mask = np.triu(np.ones((rows, 4))) > 0
    centred = lambda xp, p, h: p - xp.mean(p, axis=0, keepdims=True)  # noqa: E731
    grads, params = jnp.asarray(np.random.default_rng(0).standard_normal(mask.shape)), jnp.ones(mask.shape)
    made = []
    for project in (ao.projections.support(mask), centred):
        tx = getattr(door, name)(0.1, project=project, **options)
        made.append(params + jax.jit(tx.update)(grads, tx.init(params), params)[0])
    np.testing.assert_array_equal(made[0] != 0, mask)
    np.testing.assert_allclose(made[1].mean(axis=0), 0.0, atol=1e-6)


def test_inject_hyperparams_has_the_names_of_optax():
    for name in ROWS:
        if name not in ("adafactor", "muon"):  # optax itself would make arrays of their whole numbers
            params = {"w": jnp.ones(2)}
            theirs, ours = (
                optax.inject_hyperparams(f)(0.1).init(params) for f in (original(name), getattr(door, name))
            )
            named = theirs.hyperparams.keys() - REFUSED.get(name, {}).keys()
            assert ours.hyperparams.keys() == named, name


def test_a_masked_parameter_is_not_raised():
    """What `optax.masked` would do with it, which hands the gradient on as the update."""
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    for tx in (
        door.adamw(0.1, weight_decay=0.5, mask={"w": True, "b": False}),
        door.lans(0.1, weight_decay=0.5, mask={"w": True, "b": False}),
        door.came(0.1, weight_decay=0.5, mask=lambda p: {"w": True, "b": False}),
        transformation(ao.SOAP(lr=0.1, weight_decay=0.5), mask={"w": True, "b": False}),
    ):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(params, state, params)
        assert float(updates["w"][0]) < float(updates["b"][0]) < 0


WRONG = [
    refusals.row("missing", lambda: door.adamw(), TypeError, "adamw: `learning_rate` must be given"),
    refusals.row("twice", lambda: door.adamw(0.1, lr=0.2), TypeError, "`learning_rate` is given twice, by its place"),
    refusals.row("two names", lambda: door.lion(0.1, b1=0.5, beta1=0.5), TypeError, "`b1` is given twice"),
    refusals.row(
        "many", lambda: door.sgd(0.1, 0.9, True, None, 3), TypeError, "sgd takes at most 4 positional arguments"
    ),
    refusals.row("unknown", lambda: door.rmsprop(0.1, decoy=0.9), TypeError, "has no `decoy`; did you mean `decay`?"),
    refusals.row("range", lambda: door.adamw(0.1, b2=1.0), ValueError, "adamw: `b2` must be in [0, 1); got 1.0"),
    refusals.row("dtype", lambda: door.adam(0.1, mu_dtype="int8"), ValueError, "adam: `mu_dtype` must be float16"),
    refusals.row(
        "mask", lambda: door.adamw(0.1, mask={"a": True}).init({"b": jnp.ones(2)}), ValueError, "`mask` must be a tree"
    ),
    refusals.row(
        "bools", lambda: door.lamb(0.1, mask={"b": 1.0}).init({"b": jnp.ones(2)}), TypeError, "a tree of bools"
    ),
    refusals.row(
        "no decay", lambda: transformation(ao.FISTA(lr=0.1), mask=True), TypeError, "FISTA has no weight decay"
    ),
    refusals.row("no mask", lambda: door.fista(0.1, mask=True), TypeError, "use optax.multi_transform"),
]


@pytest.mark.parametrize(("call", "exception", "words"), WRONG)
def test_wrong_calls(call, exception, words):
    refusals.raises(call, exception, *words)


# ---- trees of any leaves ---------------------------------------------------------------------------------------------

TREES = {
    "all": lambda: {"s": jnp.ones(()), **{f"{shape}": jnp.ones(shape) for shape in LEAVES}, "n": None},
    "vectors": lambda: [jnp.ones(4), jnp.ones(())],
    "matrix": lambda: jnp.ones((3, 2)),
    "16 bits": lambda: (jnp.ones(4, jnp.bfloat16), {"w": jnp.ones((3, 2), jnp.bfloat16), "f": jnp.ones(3)}),
    "none": dict,
}
LEAVES = [(4,), (3, 2), (2, 3, 2), (0,), (0, 3), (3, 0)]
NAMES = [name for name in door.__all__ if name[0].islower() and name != "transformation"]


@pytest.mark.parametrize("name", marked([(x,) for x in NAMES], lambda x: x in ("adafactor", "adamw", "soap"), str))
def test_tree_map_params_finds_all_slots_of_any_tree(name):
    for kind, make in TREES.items():
        params = make()
        if name in ("normuon", "muonh"):  # which are for matrices alone
            params = jax.tree.map(lambda x: x if x.ndim > 1 else jnp.ones((2, 2), x.dtype), params)
        tx = getattr(door, name)(0.1)
        state = tx.init(params)
        mapped = optax.tree_utils.tree_map_params(tx, lambda x: x + 1, state)
        assert jax.tree.structure(mapped) == jax.tree.structure(state), kind
        changed = jax.tree.map(lambda x, y: bool((x == y + 1).all()), mapped.slots, state.slots)
        assert all(jax.tree.leaves(changed)), kind
        places = jax.tree.map(lambda x: np.asarray(x.ndim), params)  # as specifications of shardings are given
        specified = optax.tree_utils.tree_map_params(tx, lambda x, place: place, state, places)
        for slot in state.slots:
            assert jax.tree.leaves(specified.slots[slot]) == jax.tree.leaves(places), (kind, slot)
