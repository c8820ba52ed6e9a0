"""What holds for every rule whatever the numbers are: invariances, independence of tensors, saving, changing."""

import dataclasses
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import arrayopt as ao
from tests.conftest import BACKENDS
from tests.support.cases import ALL, CASES, ENGINES, IDS, PLACES, QUICK_ROWS, REFERENCE, each_run, make
from tests.support.slow import PROFILE, marked
from tests.support.tolerances import TOLERANCES

# The same examples in each run, more in `make test-all`; HYPOTHESIS_PROFILE=search looks for new ones.
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)  # without Phase.explain, which takes minutes
for profile, number in {"quick": 2, "all": 6}.items():
    settings.register_profile(
        profile, derandomize=True, deadline=None, database=None, phases=PHASES, max_examples=number
    )
settings.register_profile("search", deadline=None, database=None, max_examples=200)
settings.load_profile(PROFILE)

ROWS = range(len(ALL))
every_row = pytest.mark.parametrize("row", QUICK_ROWS)
every_place = pytest.mark.parametrize(("engine", "library"), PLACES)
every_engine = pytest.mark.parametrize("engine", [name for name, libraries in ENGINES.items() if "numpy" in libraries])
SHAPES = [(), (1,), (5,), (3, 2), (1, 1), (5, 1), (2, 1, 3), (2, 3, 2, 2), (0,), (0, 3), (3, 0)]
POWERS = st.integers(-20, 20).map(lambda k: 2.0**k)


@st.composite
def problems(draw, shapes=tuple(SHAPES), dtypes=("float32", "float64"), steps=4, zeros=True):
    """Parameters by name, and so many steps' gradients; some are zero, some have zeros, some are None now and then."""
    chosen = draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def values(shape, kinds):
        x = rng.standard_normal(shape) * {"few": rng.random(shape) < 0.5, "none": 0.0}.get(rng.choice(kinds), 1.0)
        return np.asarray(x, dtype)

    params = {f"p{i}": values(shape, ["all", "all", "none"] if zeros else ["all"]) for i, shape in enumerate(chosen)}
    kinds = ["all", "all", "few", "none"] if zeros else ["all"]
    return params, [{name: values(p.shape, kinds) for name, p in params.items()} for _ in range(steps)]


def copied(tree):
    """A dict with copies of its arrays."""
    return {name: x.copy() for name, x in tree.items()}


def run(engine, rule, params, grads, **options):
    """An Optimizer over copies of the parameters, after a step for each set of gradients."""
    opt = ao.Optimizer(copied(params), rule, engine=engine, **options)
    for g in grads:
        opt.step(g)
    return opt


def contents(opt):
    """Everything that a step changes, by name: parameter, t and slots."""
    return {name: {"param": opt.params[name], **opt.state[name]} for name in opt.params}


def bits(x):
    """A value such that equality means the same bits."""
    return (x.dtype, x.shape, x.tobytes()) if hasattr(x, "dtype") else x


def assert_same(actual, expected):
    """That two trees of `contents` are the same bit for bit."""
    assert list(actual) == list(expected)
    for name in actual:
        assert set(actual[name]) == set(expected[name]), name
        for key, x in actual[name].items():
            assert bits(x) == bits(expected[name][key]), (name, key, x, expected[name][key])


def assert_agree(engine, actual, expected):
    """The same as another way to compute it: bit for bit where the engine does as the rule is written, else nearly."""
    if engine == REFERENCE:
        return assert_same(actual, expected)
    for name in actual:
        assert set(actual[name]) == set(expected[name]), name
        for key, x in actual[name].items():
            exact = np.asarray(expected[name][key])
            tolerance = TOLERANCES["float64" if exact.dtype.kind == "i" else exact.dtype.name].each
            np.testing.assert_allclose(x, exact, rtol=tolerance, atol=tolerance, err_msg=f"{name}.{key}")
    return None


# ---- invariances ----------------------------------------------------------------------------------------------------

# LANS as it is; the others where what breaks it is off (1e-300 is below every root of a second moment)
CLIPS = {"clip_value", "clip_tensor_norm", "clip_unit_ratio"}
FREE_OF_GRADIENT_SCALE = [
    *(("LANS", options) for options in CASES["LANS"]),
    *(("LAMB", {**options, "eps": 1e-300, "eps_root": 0.0}) for options in CASES["LAMB"] if not CLIPS & set(options)),
    ("LAMB", {"eps": 1e-300, "weight_decay": 0.0}),
    *(
        ("AdamW", {**options, "eps": 1e-300, "eps_root": 0.0})
        for options in CASES["AdamW"]
        if not {"mars", *CLIPS} & set(options)  # whose gradient has a norm of 1 at most
    ),
    *(("Adam", {**options, "eps": 1e-300, "eps_root": 0.0, "weight_decay": 0.0}) for options in CASES["Adam"]),
    ("LARS", {"lr": 0.1}),
    ("LARS", {"lr": 0.1, "decayed_norm": True, "grad_centralization": True}),
    *(
        (rule, {**options, "eps1": 0.0})
        for rule in ("CAME", "Adafactor")
        for options in CASES[rule]
        if not CLIPS & set(options)
    ),
]


@pytest.mark.parametrize(("rule", "options"), FREE_OF_GRADIENT_SCALE)
@every_engine
@given(problems(dtypes=("float64",)), POWERS)
def test_the_scale_of_all_gradients_does_not_matter(engine, rule, options, problem, scale):
    params, grads = problem
    scaled = [{name: g * scale for name, g in step.items()} for step in grads]
    straight, other = (run(engine, make(rule, options), params, g) for g in (grads, scaled))
    for name, p in straight.params.items():
        if rule == "LARS" and not params[name].any():
            continue  # LARS steps from zero by the gradient itself
        assert bits(p) == bits(other.params[name])


@pytest.mark.parametrize("options", CASES["LANS"])
@every_engine
@given(problems(dtypes=("float64",)), st.lists(st.floats(1e-6, 1e6), min_size=4, max_size=4))
def test_lans_does_not_see_the_scale_of_any_gradient(engine, options, problem, scales):
    params, grads = problem
    scaled = [{name: g * scale for name, g in step.items()} for step, scale in zip(grads, scales, strict=True)]
    straight, other = (run(engine, ao.LANS(**options), params, g) for g in (grads, scaled))
    for name, p in straight.params.items():
        near = TOLERANCES["float64"].relative * max(1.0, np.abs(p).max(initial=0.0))
        np.testing.assert_allclose(other.params[name], p, rtol=0, atol=near)


@pytest.mark.parametrize(
    "rule",
    [
        ao.LAMB(lr=0.1, weight_decay=0.0),
        ao.LANS(lr=0.1, weight_decay=0.0),
        ao.LARS(lr=10.0),
        ao.Adafactor(eps_scale=0.0),
        ao.CAME(lr=0.1, scale_parameter=True, eps_scale=0.0),
    ],
)
@every_engine
@given(problems(zeros=False), POWERS)
def test_steps_are_in_proportion_to_the_parameter(engine, rule, problem, scale):
    params, grads = problem
    small = run(engine, rule, params, grads).params
    large = run(engine, rule, {name: (p * scale).astype(p.dtype) for name, p in params.items()}, grads).params
    for name, p in small.items():
        assert bits((p * scale).astype(p.dtype)) == bits(large[name])


@every_engine
@given(problems(dtypes=("float64",), zeros=False))
def test_a_step_of_lamb_is_lr_times_the_norm_of_the_parameter(engine, problem):
    params, grads = problem
    after = run(engine, ao.LAMB(lr=0.25), params, grads[:1]).params
    for name, p in params.items():
        step = np.linalg.norm((after[name] - p).ravel())
        assert step == pytest.approx(0.25 * np.linalg.norm(p.ravel()), rel=TOLERANCES["float64"].relative)


# ---- each tensor by itself ------------------------------------------------------------------------------------------


@every_row
@every_engine
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_tensors_does_not_matter(engine, row, problem, random):
    params, grads = problem
    names = random.sample(list(params), len(params))
    shuffled = run(engine, make(*ALL[row]), {name: params[name] for name in names}, grads)
    straight = contents(run(engine, make(*ALL[row]), params, grads))
    assert_same(contents(shuffled), {name: straight[name] for name in names})


@every_row
@every_engine
@given(problems())
def test_each_tensor_is_updated_as_if_it_were_alone(engine, row, problem):
    params, grads = problem
    rule = make(*ALL[row])
    together = contents(run(engine, rule, params, grads))
    for name in params:
        alone = run(engine, rule, {name: params[name]}, [{name: g[name]} for g in grads])
        assert_same(contents(alone), {name: together[name]})


@every_row
@every_engine
@given(problems(), st.data())
def test_a_tensor_without_a_gradient_is_left_as_it_is(engine, row, problem, data):
    params, grads = problem
    left_out = [data.draw(st.sets(st.sampled_from(list(params)))) for _ in grads]
    given_some = [{n: None if n in out else g[n] for n in g} for g, out in zip(grads, left_out, strict=True)]
    opt = ao.Optimizer(copied(params), make(*ALL[row]), engine=engine)
    for g in given_some:
        before = {name: {key: bits(x) for key, x in all_of.items()} for name, all_of in contents(opt).items()}
        opt.step(g)
        for name in (name for name in params if g[name] is None):
            assert {key: bits(x) for key, x in contents(opt)[name].items()} == before[name]
    assert opt.step_count == len(grads)
    for name in params:  # and afterwards it is as if those steps had not been
        alone = run(
            engine, make(*ALL[row]), {name: params[name]}, [{name: g[name]} for g in given_some if g[name] is not None]
        )
        assert_same(contents(alone), {name: contents(opt)[name]})


# ---- runs -----------------------------------------------------------------------------------------------------------


@every_row
@every_engine
@given(problems(), st.integers(0, 4))
def test_a_run_that_is_saved_and_resumed_equals_a_straight_one(engine, row, problem, when):
    params, grads = problem
    rule = make(*ALL[row])
    straight = run(engine, rule, params, grads)
    first = run(engine, rule, params, grads[:when])
    saved = pickle.dumps((first.params, first.state_dict()))
    kept = first.state_dict()
    for g in grads:
        first.step(g)  # a snapshot does not change when its optimizer goes on
    loaded, state = pickle.loads(saved)
    second, third = (ao.Optimizer(copied(loaded), rule, engine=engine) for _ in range(2))
    second.load_state_dict(state)
    third.load_state_dict(kept)
    for g in grads[when:]:
        second.step(g)
        third.step(g)
    assert_same(contents(second), contents(straight))
    assert_same(contents(third), contents(straight))
    assert second.step_count == third.step_count == straight.step_count == len(grads)


@every_row
@every_engine
@given(problems())
def test_two_runs_are_the_same(engine, row, problem):
    assert_same(*(contents(run(engine, make(*ALL[row]), *problem)) for _ in range(2)))


@every_row
@every_engine
@given(problems(), st.data())
def test_the_functional_form_equals_the_optimizer(engine, row, problem, data):
    params, grads = problem
    rule, groups = make(*ALL[row]), {"p0": {"grad_centralization": True, "clip_value": 0.25}}
    grads = [{name: data.draw(st.sampled_from([g, g, None])) for name, g in step.items()} for step in grads]
    opt = run(engine, rule, params, grads, groups=groups)
    pure, state = params, ao.init(rule, params, groups=groups)
    originals = {name: bits(p) for name, p in params.items()}
    for g in grads:
        pure, state = ao.update(rule, pure, g, state, groups=groups)
    assert state["step"] == opt.step_count
    assert_agree(engine, contents(opt), {name: {"param": pure[name], **state["tensors"][name]} for name in pure})
    assert {name: bits(p) for name, p in params.items()} == originals


# ---- hyper-parameters -----------------------------------------------------------------------------------------------

with_lr = pytest.mark.parametrize("row", [x for x in QUICK_ROWS if make(*ALL[x.values[0]]).lr is not None])


@with_lr
@every_engine
@given(problems())
def test_without_a_learning_rate_parameters_stay_and_state_moves(engine, row, problem):
    params, grads = problem
    rule = dataclasses.replace(make(*ALL[row]), lr=0.0)
    opt = ao.Optimizer(copied(params), rule, engine=engine)
    for t, g in enumerate(grads, start=1):
        opt.step(g)
        for name, p in params.items():
            assert np.array_equal(opt.params[name], p)
            assert opt.state[name]["t"] == t
            slots = [x for key, x in opt.state[name].items() if key not in ("t", "slow", "ema")]  # which follow p
            seen = centralize(g[name]) if rule.grad_centralization else g[name]
            averages_steps = getattr(rule, "lr_in_momentum", False)  # which have no length
            assert any(x.any() for x in slots) or not (slots and seen.any()) or averages_steps


def decay_of(rule):
    """A number besides the learning rate: the weight decay, where a rule has it."""
    return "weight_decay" if hasattr(rule, "weight_decay") else "clip_value"


@with_lr
@every_engine
@given(problems())
def test_a_schedule_equals_setting_the_value_before_each_step(engine, row, problem):
    params, grads = problem
    rule = make(*ALL[row])
    other = decay_of(rule)
    rates, decays = [0.5 / (step + 1) for step in range(len(grads))], [0.1, 0.4 * (other != "weight_decay"), 0.3, 0.2]
    by_hand = ao.Optimizer(copied(params), dataclasses.replace(rule, **{other: decays[0]}), engine=engine)
    for rate, decay, g in zip(rates, decays, grads, strict=True):
        by_hand.lr = rate
        setattr(by_hand, other, decay)
        by_hand.step(g)
    for lr, decay in [
        (lambda step: 0.5 / (step + 1), lambda step: decays[step]),
        (rates, decays),
        (np.asarray(rates), tuple(decays)),
    ]:
        scheduled = run(engine, dataclasses.replace(rule, lr=lr, **{other: decay}), params, grads)
        assert_same(contents(scheduled), contents(by_hand))
    assert by_hand.lr == rates[-1]


@with_lr
@every_engine
@given(problems(), st.floats(1e-4, 1.0), st.floats(1e-4, 0.5))
def test_a_change_takes_effect_in_the_next_step(engine, row, problem, lr, decay):
    params, grads = problem
    rule = make(*ALL[row])
    opt = run(engine, rule, params, grads[:2])
    pure, state = params, rule.init(params)
    for g in grads[:2]:
        pure, state = ao.update(rule, pure, g, state)
    opt.lr = lr
    setattr(opt, decay_of(rule), decay)
    changed = dataclasses.replace(rule, lr=lr, **{decay_of(rule): decay})
    for g in grads[2:]:
        opt.step(g)
        pure, state = ao.update(changed, pure, g, state)
    assert_agree(engine, contents(opt), {name: {"param": pure[name], **state["tensors"][name]} for name in pure})


@every_row
@every_engine
@given(problems())
def test_groups_equal_optimizers_of_their_own(engine, row, problem):
    params, grads = problem
    rule = make(*ALL[row])
    changes = [{decay_of(rule): 0.2}, {"grad_centralization": not rule.grad_centralization}, {}]
    parts = [{name: p for i, (name, p) in enumerate(params.items()) if i % 3 == k} for k in range(3)]
    groups = [(lambda name, p, part=part: name in part, change) for part, change in zip(parts, changes, strict=True)]
    together = run(engine, rule, params, grads, groups=[pair for pair, part in zip(groups, parts, strict=True) if part])
    for part, change in zip(parts, changes, strict=True):
        if part:
            own = run(
                engine, dataclasses.replace(rule, **change), part, [{name: g[name] for name in part} for g in grads]
            )
            assert_same(contents(own), {name: contents(together)[name] for name in part})


@every_row
@every_engine
@given(problems())
def test_gradient_centralization_equals_centralizing_by_hand(engine, row, problem):
    params, grads = problem
    rule = dataclasses.replace(make(*ALL[row]), grad_centralization=True)
    plain = dataclasses.replace(rule, grad_centralization=False)
    centralized = [{name: centralize(g) for name, g in step.items()} for step in grads]
    assert_agree(
        engine, *(contents(run(engine, *one)) for one in ((rule, params, grads), (plain, params, centralized)))
    )


def centralize(g):
    """g less the mean over all of its axes but the first."""
    if g.ndim < 2 or g.size == 0:
        return g
    return g - g.reshape(g.shape[0], -1).mean(axis=1).reshape(g.shape[0], *[1] * (g.ndim - 1))


# ---- zeros, NaN and infinity ----------------------------------------------------------------------------------------

EDGES = {
    "LAMB": [{}, {"weight_decay": 0.0}, {"min_norm": 0.0, "max_norm": 0.0}, {"beta1": 0.0, "beta2": 0.0}],
    "LANS": [{}, {"weight_decay": 0.0}, {"min_ratio": 0.0, "max_ratio": 0.0}, {"beta1": 0.0, "beta2": 0.0}],
    "CAME": [{}, {"eps1": 0.0}, {"eps2": 0.0}, {"eps1": 0.0, "eps2": 0.0, "eps_scale": 0.0, "decay_rate": 0.8}],
    "LARS": [{"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.1, "momentum": 0.0}],
    "AdamW": [{}, {"beta1": 0.0, "beta2": 0.0}, {"mars": 0.025}],
    "Adam": [{}, {"weight_decay": 0.1}, {"beta1": 0.0, "beta2": 0.0}],
    "SGD": [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "dampening": 1.0, "weight_decay": 0.1}],
    "Adafactor": [{}, {"eps1": 0.0, "beta1": 0.9}, {"eps1": 0.0, "eps_scale": 0.0, "decay_rate": 0.0}],
    "Lion": [{}, {"mars": 0.025}, {"beta1": 0.0, "beta2": 0.0, "weight_decay": 0.1}],
    "RMSprop": [
        {"momentum": 0.9},
        {"alpha": 0.0, "momentum": 0.5, "weight_decay": 0.1},
        {"initial_scale": 1.0, "momentum": 0.5},
    ],
    "NAdam": [{}, {"beta1": 0.0, "beta2": 0.0}, {"momentum_decay": 0.0, "weight_decay": 0.1}],
    "RAdam": [{}, {"beta1": 0.0, "beta2": 0.0}, {"beta2": 0.6, "threshold": 4.1, "weight_decay": 0.1}],
    "Adan": [{}, {"beta1": 0.0, "beta2": 0.0, "beta3": 0.0}],
    "AdEMAMix": [{}, {"beta1": 0.0, "beta3": 0.0, "beta3_warmup": 2.0, "alpha_warmup": 2.0}],
    "ScheduleFreeAdamW": [{}, {"lr": 0.0}, {"lr": 0.0, "weight_lr_power": 0.0, "warmup_steps": 2.0}],
    "AdamH": [{}, {"radius": 2.0}, {"beta1": 0.0, "beta2": 0.0}],
    "AdaBelief": [{}, {"beta1": 0.0, "beta2": 0.0}, {"eps_root": 0.0, "weight_decay": 0.1}],
    "Sophia": [{}, {"beta1": 0.0, "weight_decay": 0.1}],
    "FISTA": [{"lr": 0.1}],
}


def all_flags(name):
    """The rules of a name with every combination of switches that goes together, over each of the edges."""
    switches = [f.name for f in dataclasses.fields(getattr(ao, name)) if isinstance(f.default, bool)]
    switches.remove("stacked")  # which scalars cannot be
    for edge in EDGES[name]:
        for values in itertools.product([False, True], repeat=len(switches)):
            options = {**edge, **dict(zip(switches, values, strict=True))}
            if options.get("nesterov") and not options.get("momentum", 1.0):
                continue
            if name in ("CAME", "Adafactor"):
                if options["warmup_init"] and not options["relative_step"]:
                    continue
                options["lr"] = None if options["relative_step"] else 0.01
            yield make(name, options)


@pytest.mark.parametrize("name", marked([(name,) for name in CASES], lambda name: name in ("AdamW", "SGD")))
@every_engine
def test_zeros_train_on_or_stand_still_whatever_is_switched(engine, name):
    shapes = [(), (3,), (2, 3), (2, 2, 3), (0,), (2, 0)]
    zeros, ones = ({str(i): f(shape, "float32") for i, shape in enumerate(shapes)} for f in (np.zeros, np.ones))
    some = {name: np.asarray((x.cumsum() - 2).reshape(x.shape), "float32") for name, x in ones.items()}
    for rule in all_flags(name):
        still = run(engine, rule, zeros, [zeros] * 3)
        for p in still.params.values():
            assert not p.any(), rule
        woken = run(engine, rule, zeros, [zeros, zeros, some, some])
        stopped = run(engine, rule, ones, [some, zeros, zeros])
        resting = run(engine, rule, ones, [zeros] * 3)
        for opt in (still, woken, stopped, resting):
            for all_of in contents(opt).values():
                assert all(np.all(np.isfinite(x)) for x in all_of.values()), rule
        stuck = getattr(rule, "scale_parameter", False) and rule.eps_scale == 0
        stuck |= getattr(rule, "max_norm", None) == 0 or getattr(rule, "max_ratio", None) == 0
        stuck |= getattr(rule, "dampening", 0) == 1 or rule.lr == 0 or not getattr(rule, "degenerated_to_sgd", True)
        assert stuck or all(p.any() for p in woken.params.values() if p.size), rule
        if getattr(rule, "weight_decay", 0) == 0:
            assert all(np.all(p == 1) for p in resting.params.values()), rule


def each_of(rows):
    """Rows on each engine and library, of which each run has some."""
    cases = ((*place, row) for place in PLACES for row in rows)
    name = lambda x: IDS[x] if isinstance(x, int) else x  # noqa: E731
    quick = marked(cases, lambda engine, library, row: each_run(library, row, "float32"), name)
    return pytest.mark.parametrize(("engine", "library", "row"), quick)


# clip_value limits an infinity as it does any magnitude, before the rule sees it: that is what it is for. So does the
# clipping of Sophia's steps.
LIMITED = [row for row in ROWS if (ALL[row][0] != "LANS" and "clip_value" in ALL[row][1]) or ALL[row][0] == "Sophia"]
SHOWS = [row for row in ROWS if row not in LIMITED]


@each_of(ROWS)
@pytest.mark.parametrize("shape", [(5,), (3, 2)])
def test_nan_reaches_the_parameter(engine, library, row, shape):
    reaches(engine, BACKENDS[library], row, shape, np.nan)


@each_of(SHOWS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf])
def test_infinity_reaches_the_parameter(engine, library, row, bad):
    reaches(engine, BACKENDS[library], row, (3, 2), bad)


def reaches(engine, backend, row, shape, bad):
    """That after one bad element, at the second step, its parameter is not finite."""
    values = np.random.default_rng(0).standard_normal((2, *shape))
    opt = ao.Optimizer({"w": backend.array(values[0])}, make(*ALL[row]), engine=engine)
    opt.step({"w": backend.array(values[1])})
    values[1][-1] = bad
    params = opt.step({"w": backend.array(values[1])})
    assert not np.isfinite(backend.numpy(params["w"])[-1]).any()


# ---- in place -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule_name", CASES)
@every_place
def test_writable_arrays_are_updated_in_place_and_others_replaced(engine, library, rule_name):
    backend = BACKENDS[library]
    values = np.random.default_rng(0).standard_normal((7, 5))
    tree = {
        "a": [backend.array(values), (backend.array(values[:, 0]),)],
        "empty": backend.array(values[:0]),
        "no": None,
    }
    leaves = [tree["a"][0], tree["a"][1][0], tree["empty"]]
    before = [backend.numpy(x).copy() for x in leaves]
    opt = ao.Optimizer(tree, make(rule_name, CASES[rule_name][0]), engine=engine)
    for _ in range(2):
        grads = {"a": [backend.array(values * 2), (backend.array(values[:, 1]),)], "empty": leaves[2], "no": None}
        originals = [backend.numpy(g).copy() for g in (grads["a"][0], grads["a"][1][0])]
        result = opt.step(grads)
        new = [result["a"][0], result["a"][1][0], result["empty"]]
        assert opt.params is result
        assert [type(result["a"]), type(result["a"][1]), result["no"]] == [list, tuple, None]
        for g, original in zip((grads["a"][0], grads["a"][1][0]), originals, strict=True):
            assert np.array_equal(backend.numpy(g), original)
        if backend.name == "jax":
            assert result is not tree
            for x, old, value in zip(leaves[:2], new[:2], before[:2], strict=True):
                assert x is not old
                assert np.array_equal(backend.numpy(x), value)
                assert not np.array_equal(backend.numpy(old), value)
        else:
            assert result is tree
            for x, same, value in zip(leaves, new, before, strict=True):
                assert x is same
                assert value.size == 0 or not np.array_equal(backend.numpy(x), value)
