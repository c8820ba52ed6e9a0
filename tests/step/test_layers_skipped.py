"""A layer of stacked tensors whose gradient is not finite is skipped alone: the others go on as if they were alone."""

import copy
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import arrayopt as ao
import arrayopt.torch as door
from tests.support.cases import CASES, make
from tests.support.engines import COMPILED, EVERY, each, each_compiled
from tests.support.slow import marked

N = 6
SHAPES = {"w": (N, 3, 4), "b": (N, 5), "s": (N,)}
STEPS = 7

RULES = {
    "every": ("LAMB", {"lr": 0.1, "lookahead_steps": 2, "ema_decay": 0.5}),
    "FISTA": ("FISTA", {"lr": 0.1, "restart": True, "project": ao.projections.box(-1.0, 1.0)}),
    "points": ("ScheduleFreeAdamW", {"lr": 0.1, "warmup_steps": 3}),
    "branches": ("SOAP", {"lr": 0.1, "precondition_frequency": 3}),
    "masters": ("AdamW", {"lr": 0.1, "master_weights": True}),
    "by chance": ("AdamW", {"lr": 0.1, "rounding": "stochastic", "state_dtype": "bfloat16"}),
}
RULES |= {name: (name, rows[0]) for name, rows in CASES.items() if name not in ("LAMB", "FISTA")}
NARROW = {"masters": "float16", "by chance": "float16"}


def parameters(dtype="float32"):
    return {name: np.random.default_rng(i).standard_normal(SHAPES[name]).astype(dtype) for i, name in enumerate(SHAPES)}


def gradients(step, dtype="float32", shapes=SHAPES):
    """Gradients of a step: in some of them layers of one tensor, or of several, are not finite."""
    rng = np.random.default_rng(100 + step)
    grads = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    if step % 2:
        grads["w"][step % N, 1, 2] = np.nan
    if step == 4:
        grads["b"][1, 0], grads["s"][2] = np.inf, np.nan
    return grads


LEFT = [[], [1], [], [3], [1, 2], [5], []]
"""Which layers each step is to leave out."""

SKIPPED = [sum(i in step for step in LEFT) for i in range(N)]


def layer(tree, i):
    return {name: None if x is None else np.array(x[i, ...]) for name, x in tree.items()}


def same(opt, single, skipped=SKIPPED):
    """That each layer is what it is alone, bit for bit, with its own number of updates."""
    for i, alone in enumerate(single):
        for name, p in opt.params.items():
            assert np.array_equal(p[i, ...], alone.params[name]), (name, i)
            of_all, own = opt.state[name], alone.state[name]
            assert of_all["t"] - opt.skipped_layers()[name][i] == own["t"]
            for slot in own:
                assert slot == "t" or np.array_equal(of_all[slot][i, ...], own[slot]), (name, i, slot)
    assert all(opt.skipped_layers()[name].tolist() == skipped for name in opt.params)


def both(rule, fields, dtype="float32", **options):
    """A stacked optimizer, and one for each layer."""
    kind, params = getattr(ao, rule), parameters(dtype)
    single = [ao.Optimizer(layer(params, i), kind(**fields), skip_nonfinite=True, **options) for i in range(N)]
    return ao.Optimizer(params, kind(**fields, stacked=True), skip_nonfinite=True, **options), single


def run(opts, steps, dtype="float32"):
    opt, single = opts
    for k in steps:
        grads = gradients(k, dtype)
        for i, alone in enumerate(single):
            alone.step(layer(grads, i))
        opt.step(grads)


PLACES = [(engine, name) for engine in EVERY for name in RULES]


@pytest.mark.parametrize(
    ("engine", "name"),
    marked(PLACES, lambda engine, name: engine == "array_api" or (engine == "numpy" and name in list(RULES)[:6])),
)
def test_the_others_go_on_as_if_they_were_alone(engine, name):
    rule, fields = RULES[name]
    dtype = NARROW.get(name, "float32")
    if engine != "array_api" and getattr(ao, rule)(**fields).branches and engine in COMPILED:
        pytest.skip("as written over layers, as numpy's")
    opts = both(rule, {"seed": 3, **fields}, dtype, engine=engine)
    if name == "by chance":  # random numbers follow from names and positions, which those alone have not
        run((opts[0], []), range(STEPS), dtype)
        frozen, grads = {k: x.copy() for k, x in opts[0].params.items()}, gradients(3, dtype)
        opts[0].step(grads)
        assert all(np.array_equal(opts[0].params[k][3], x[3]) for k, x in frozen.items())
        return
    run(opts, range(STEPS), dtype)
    same(*opts)
    assert opts[0].stats.skipped == 0


@each_compiled
def test_compiled_engines(engine):
    opts = both("LAMB", {"lr": 0.1}, engine=engine)
    run(opts, range(STEPS))
    same(*opts)


def test_cupy(cupy):
    def there(tree):
        return {name: cupy.asarray(x) for name, x in tree.items()}

    rule, params = ao.AdamW(lr=0.1, stacked=True), parameters()
    opt = ao.Optimizer(there(params), rule, engine="cupy", skip_nonfinite=True, clip_norm=2.0, stats=True)
    host = ao.Optimizer(params, rule, engine="numpy", skip_nonfinite=True, clip_norm=2.0)
    stream, grads = cupy.cuda.Stream(non_blocking=True), there(gradients(0))
    graph = None
    for k in range(STEPS + 1):
        now = gradients(k) if k < STEPS else {name: np.full_like(g, np.nan) for name, g in gradients(0).items()}
        host.step(now)
        for name, g in now.items():
            grads[name].set(g)
        if k < 3:
            opt.step(grads)
            assert opt.stats.read()["w[1]"]["update_norm"] > 0 or k == 1
            continue
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            opt.advance()
            if graph is None:
                stream.begin_capture()
                opt.launch(grads)
                graph = stream.end_capture()
            graph.launch(stream)
        stream.synchronize()
    for name, p in host.params.items():
        np.testing.assert_allclose(opt.params[name].get(), p, rtol=1e-5, atol=1e-6)
        assert opt.skipped_layers()[name].tolist() == SKIPPED
        assert opt.state[name]["t"] == host.state[name]["t"] == STEPS
    assert int(opt.stats.skipped) == host.stats.skipped == 1


def test_cupy_says_of_mixed_trees_what_the_host_says(cupy):
    shapes = {"a": (4, 3), "h": (4, 2), "c": (3, 2), "x": (5,)}
    options = {"groups": {"x": {"stacked": False}}, "skip_nonfinite": True, "clip_norm": 1.0, "stats": True}

    def drawn(seed):
        rng = np.random.default_rng(seed)
        return {k: rng.standard_normal(n).astype("float16" if k == "h" else "float32") for k, n in shapes.items()}

    rule, every = ao.AdamW(lr=0.1, stacked=True), slice(None)
    host = ao.Optimizer(drawn(0), rule, engine="numpy", **options)
    there = ao.Optimizer({k: cupy.asarray(x) for k, x in drawn(0).items()}, rule, engine="cupy", **options)
    bad = [{}, {"a": 2}, {"x": 0}, {"x": 1, "a": 0}, {"h": 1, "c": 1}, {"c": every}, {"a": every, "c": 0}, {"h": 3}]
    for k, places in enumerate(bad):
        grads = drawn(10 + k)
        for name, i in places.items():
            grads[name][i] = np.nan
        if k == 7:
            grads["a"] = None
        host.step(grads)
        there.step({name: g if g is None else cupy.asarray(g) for name, g in grads.items()})
        assert sorted(host.nonfinite()) == sorted(there.nonfinite())
        assert host.stats.skipped == int(there.stats.skipped)
        reports = there.stats.read()
        assert {n for n, x in reports.items() if not np.isnan(list(x.values())).any()} == set(host.stats)
        for name in shapes:
            near = 1e-2 if name == "h" else 1e-5
            np.testing.assert_allclose(there.params[name].get(), host.params[name], rtol=near, atol=1e-6)
            assert host.state[name]["t"] == there.state[name]["t"]
        found, own = host.skipped_layers(), there.skipped_layers()
        assert all(own[name].tolist() == x.tolist() for name, x in found.items())
    host.load_state_dict(there.state_dict())
    assert host.skipped_layers()["a"].tolist() == [1, 2, 2, 1]


def test_arrays_that_are_replaced():
    """JAX's, and read-only ones, are stacked as a whole."""
    rule, single = ao.AdamW(lr=0.1), both("AdamW", {"lr": 0.1}, engine="array_api")[1]
    stacked = ao.AdamW(lr=0.1, stacked=True)
    fixed = parameters()
    for x in fixed.values():
        x.flags.writeable = False
    of_jax = {name: jnp.asarray(x) for name, x in fixed.items()}
    opts = [ao.Optimizer(p, stacked, skip_nonfinite=True, stats=True, engine="array_api") for p in (fixed, of_jax)]
    for k in range(STEPS):
        grads = gradients(k)
        opts[0].step(grads)
        opts[1].step({name: jnp.asarray(g) for name, g in grads.items()})
        assert opts[0].nonfinite() == opts[1].nonfinite()
        assert sorted(opts[0].stats) == [f"{name}[{i}]" for name in "bsw" for i in range(N) if i not in LEFT[k]]
        for i, alone in enumerate(single):
            alone.step(layer(grads, i))
    same(opts[0], single)
    for name, p in opts[1].params.items():
        np.testing.assert_allclose(p, opts[0].params[name], rtol=1e-5, atol=1e-6)
        assert opts[1].skipped_layers()[name].tolist() == SKIPPED
    assert rule.stacked is False


# ---- what belongs together -------------------------------------------------------------------------------------------


def made(params, engine="numpy", **options):
    return ao.Optimizer(
        {k: x.copy() for k, x in params.items()}, ao.AdamW(lr=0.1, stacked=True), engine=engine, **options
    )


PARAMS = {"a": np.ones((4, 2)), "b": np.ones(4), "c": np.ones((3, 2))}


def ones(**changes):
    grads = {name: np.ones_like(x) for name, x in PARAMS.items()}
    for name, i in changes.items():
        grads[name][i] = np.nan
    return grads


@each([engine for engine in EVERY if engine not in COMPILED])
def test_layers_of_one_place_are_skipped_together_where_there_are_as_many(engine):
    opt = made(PARAMS, engine, skip_nonfinite=True, stats=True)
    opt.step(ones(a=2))
    assert {name: x.tolist() for name, x in opt.skipped_layers().items()} == {
        "a": [0, 0, 1, 0],
        "b": [0, 0, 1, 0],
        "c": [0, 0, 0],
    }
    assert (opt.params["b"] == 1).tolist() == [False, False, True, False]
    assert (opt.params["c"] != 1).all()
    assert opt.nonfinite() == ["a[2]"]
    assert not {"a[2]", "b[2]"} & set(opt.stats)
    assert opt.stats.skipped == 0
    opt.step({**ones(a=1), "b": None})  # what takes no part skips nothing
    assert opt.skipped_layers()["b"].tolist() == [0, 0, 1, 0]
    assert opt.state["b"]["t"] == 1


def test_where_nothing_is_left_the_step_is_skipped():
    opt = made(PARAMS, skip_nonfinite=True)
    opt.step(ones(a=slice(None), c=slice(None)))
    assert opt.stats.skipped == 1
    assert all(opt.state[name]["t"] == 0 and not x.any() for name, x in opt.skipped_layers().items())


@each([engine for engine in EVERY if engine not in COMPILED])
def test_a_whole_stack_that_is_left_out(engine):
    opt = made(PARAMS, engine, skip_nonfinite=True)
    opt.step(ones(b=slice(None)))
    assert (opt.params["a"] == 1).all()
    assert (opt.params["c"] != 1).all()
    assert (opt.stats.skipped, opt.state["a"]["t"]) == (0, 1)
    assert opt.skipped_layers()["a"].tolist() == [1, 1, 1, 1]


@dataclass(frozen=True, kw_only=True)
class Ahead(ao.AdamW):
    """Evaluates at a point that depends on the number of updates."""

    evaluated_from = ("m",)

    def evaluated(self, p, s, h):
        return p + s["m"] * h.t


def test_points_to_evaluate_at_know_the_number_of_each_layer():
    opts = [ao.Optimizer({"a": np.ones((4, 2))}, Ahead(stacked=x), skip_nonfinite=True) for x in (True, False)]
    for k in range(3):
        opts[0].step({"a": ones(a=2)["a"] if k else ones()["a"]})
        if k == 0:
            opts[1].step({"a": ones()["a"]})
    assert np.array_equal(opts[0].averaged()["a"][2], opts[1].averaged()["a"][2])


@pytest.mark.parametrize("bad", ["plain", "both"])
def test_a_tensor_that_is_not_stacked_skips_the_step(bad):
    opt = ao.Optimizer(
        {"a": np.ones((4, 2)), "x": np.ones(3)}, ao.SGD(lr=1.0), groups={"a": {"stacked": True}}, skip_nonfinite=True
    )
    grads = {"a": np.ones((4, 2)), "x": np.full(3, np.inf)}
    grads["a"][1] = np.nan if bad == "both" else 1.0
    opt.step(grads)
    assert opt.stats.skipped == 1
    assert (opt.params["a"] == 1).all()
    grads["x"][:], grads["a"][1] = 1.0, np.nan
    opt.step(grads)
    assert opt.params["a"].tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
    assert (opt.params["x"] == 0).all()


def test_an_overflow_of_a_scaled_loss_skips_everything():
    opt = made(PARAMS, skip_nonfinite=True, loss_scale=ao.LossScale(init=4.0))
    opt.step(ones(a=1))
    assert (opt.stats.skipped, opt.loss_scale) == (1, 2.0)
    assert not opt.skipped_layers()["a"].any()
    opt = made(PARAMS, skip_nonfinite=True)
    opt.step(ones(a=1), loss_scale=8.0)
    assert opt.stats.skipped == 1
    assert opt.state["a"]["t"] == 0


@each([engine for engine in EVERY if engine not in COMPILED])
def test_the_joint_norm_is_of_what_goes_on(engine):
    opt = made({"a": np.ones((4, 2))}, engine, skip_nonfinite=True, clip_norm=1.0)
    rest = made({"a": np.ones((3, 2))}, engine, clip_norm=1.0)
    opt.step({"a": np.array([[1.0, 2.0], [np.nan, 1.0], [3.0, 4.0], [5.0, 6.0]])})
    rest.step({"a": np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])})
    assert opt.stats.global_norm == rest.stats.global_norm
    assert np.array_equal(opt.params["a"][[0, 2, 3]], rest.params["a"])


def test_the_sum_of_micro_steps_is_what_is_looked_at():
    opts = both("AdamW", {"lr": 0.1}, engine="numpy", accumulate=2)
    run(opts, range(6))
    same(*opts, skipped=[0, 2, 1, 1, 0, 1])


def test_empty_stacks_and_stacks_of_one_layer():
    opt = made(
        {"e": np.ones((4, 0)), "n": np.ones((0, 3)), "a": np.ones((4, 2)), "one": np.ones(1)}, skip_nonfinite=True
    )
    grads = {name: np.ones_like(x) for name, x in opt.params.items()}
    grads["a"][2] = grads["one"][0] = np.nan
    opt.step(grads)
    assert opt.skipped_layers()["a"].tolist() == [0, 0, 1, 0]
    assert opt.skipped_layers()["one"].tolist() == [1]
    assert [opt.state[name]["t"] for name in opt.params] == [1, 1, 1, 1]


# ---- saved, loaded, changed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["state_dict", "file", "copy"])
def test_a_resumed_run_goes_on_with_the_numbers_of_each_layer(how, tmp_path):
    opts = both("LAMB", {"lr": 0.1}, engine="numpy")
    run(opts, range(5))
    opt = copy.deepcopy(opts[0]) if how == "copy" else both("LAMB", {"lr": 0.1}, engine="array_api")[0]
    if how == "file":
        opts[0].save(tmp_path / "a")
        opt.load(tmp_path / "a")
    elif how == "state_dict":
        opt.params = {name: x.copy() for name, x in opts[0].params.items()}
        opt.load_state_dict(opts[0].state_dict())
    assert opt.skipped_layers()["w"].tolist() == [0, 2, 1, 1, 0, 0]
    opts[0].params = {name: x.copy() for name, x in opts[0].params.items()}
    run((opt, opts[1]), range(5, STEPS))
    if how == "copy":  # the same engine, the same bits
        same(opt, opts[1])
    for name, x in opt.skipped_layers().items():
        assert x.tolist() == SKIPPED
        np.testing.assert_allclose(opt.params[name][1], opts[1][1].params[name], rtol=1e-5)


def test_a_state_of_before_and_one_that_does_not_fit():
    opt = made(PARAMS, skip_nonfinite=True)
    opt.step(ones())
    saved = opt.state_dict()
    assert "skipped" not in saved["tensors"]["a"]  # as it was before layers were skipped alone
    opt.step(ones(a=1))
    later = opt.state_dict()
    assert later["tensors"]["a"]["skipped"] == [0, 1, 0, 0]
    for wrong in ([0, 1], [0, 3, 0, 0], [0, -1, 0, 0], [0, 0.5, 0, 0], "abcd"):
        bad = copy.deepcopy(later)
        bad["tensors"]["a"]["skipped"] = wrong
        with pytest.raises((ValueError, TypeError), match="skipped of 'a' must be 4 whole numbers up to t"):
            opt.load_state_dict(bad)
        assert opt.skipped_layers()["a"].tolist() == [0, 1, 0, 0]
    opt.load_state_dict(saved)
    assert opt.skipped_layers()["a"].tolist() == [0, 0, 0, 0]
    assert opt.state["a"]["t"] == 1


def test_stacked_cannot_change():
    opt = made(PARAMS, skip_nonfinite=True)
    with pytest.raises(ValueError, match=r"`stacked` cannot change while training: each layer .* make a new Optimizer"):
        opt.stacked = False
    opt.lr = 0.2
    opt.stacked = True


def test_layers_that_are_added_have_numbers_of_their_own():
    opt = made(PARAMS, skip_nonfinite=True)
    opt.step(ones(a=1))
    opt.add_group({"d": np.ones((4, 3)), "e": np.ones(2)})
    opt.add_group({"x": np.ones(4)}, rule=ao.SGD(lr=1.0))
    more = {"d": np.ones((4, 3)), "e": np.ones(2), "x": np.ones(4)}
    opt.step({**ones(a=3), **more})
    found = {name: (opt.state[name]["t"], x.tolist()) for name, x in opt.skipped_layers().items()}
    assert found == {
        "a": (2, [0, 1, 0, 1]),
        "b": (2, [0, 1, 0, 1]),
        "c": (2, [0, 0, 0]),
        "d": (1, [0, 0, 0, 1]),
        "e": (1, [0, 0]),
    }
    assert opt.state["x"]["t"] == 1


def test_as_many_layers_as_there_are_when_training_begins():
    x = torch.ones(4, 2)
    opt = ao.Optimizer({"a": x}, ao.AdamW(stacked=True), engine="array_api", skip_nonfinite=True)
    x.data = torch.ones(3, 2)
    opt.step({"a": torch.tensor([[1, 1], [1, torch.nan], [1, 1]])})
    assert opt.skipped_layers()["a"].tolist() == [0, 1, 0]


# ---- ranks, PyTorch, the functional form -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_over_ranks(ranks):
    alone = both("LAMB", {"lr": 0.1}, engine="numpy")[0]
    run((alone, []), range(STEPS))

    def work(comm):
        opt = both("LAMB", {"lr": 0.1}, engine="numpy", comm=None)[0]
        opt = ao.Optimizer(opt.params, opt.rule, engine="numpy", skip_nonfinite=True, comm=comm)
        run((opt, []), range(STEPS))
        return opt.params, opt.state_dict()["tensors"]

    for params, tensors in ao.ranks.run(ranks, work):
        for name, p in alone.params.items():
            assert np.array_equal(params[name], p)
            assert tensors[name]["skipped"] == SKIPPED


def test_over_ranks_of_arrays_that_are_replaced():
    def work(comm):
        params = parameters()
        for x in params.values():
            x.flags.writeable = False
        rule = ao.AdamW(lr=0.1, stacked=True)
        opt = ao.Optimizer(params, rule, skip_nonfinite=True, comm=comm, engine="array_api")
        run((opt, []), range(STEPS))
        return {name: np.asarray(x) for name, x in opt.params.items()}, opt.state_dict()["tensors"]

    alone = both("AdamW", {"lr": 0.1}, engine="array_api")[0]
    run((alone, []), range(STEPS))
    for params, tensors in ao.ranks.run(2, work):
        for name, p in alone.params.items():
            assert np.array_equal(params[name], p)
            assert tensors[name]["skipped"] == SKIPPED


def test_the_door_of_pytorch():
    params = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in parameters().items()}
    alone = both("Adam", {"lr": 0.1}, engine="array_api")[0]

    def opened():
        return door.Adam(params.values(), lr=0.1, stacked=True, skip_nonfinite=True, engine="array_api")

    opt = opened()
    for k in range(STEPS):
        alone.step(gradients(k))
        for name, g in gradients(k).items():
            params[name].grad = torch.tensor(g)
        opt.step()
        if k == 3:
            assert opt.state[params["w"]]["step"].tolist() == [4, 3, 4, 3, 4, 4]
            saved, opt = copy.deepcopy(opt.state_dict()), opened()
            opt.load_state_dict(saved)
        if k == 5:
            opt.param_groups[0]["amsgrad"] = False
            opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(N))]})
    for name, p in params.items():
        np.testing.assert_allclose(p.detach(), alone.params[name], rtol=1e-5, atol=1e-6)
        assert opt.state[p]["step"].tolist() == [STEPS - n for n in SKIPPED]


def test_a_verdict_of_pytorchs_scaler_skips_everything():
    p = torch.nn.Parameter(torch.ones(4, 2))
    opt, scaler = door.Adam([p], lr=0.1, stacked=True), torch.amp.GradScaler("cpu", init_scale=4.0)
    grad = torch.ones(4, 2)
    grad[1] = torch.inf
    scaler.scale(torch.ones(())), setattr(p, "grad", grad)
    scaler.step(opt)
    scaler.update()
    assert (p == 1).all()


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_the_functional_form(library):
    array = {"numpy": np.asarray, "torch": torch.tensor, "jax": jnp.asarray}[library]

    def own(tree):
        return {name: array(x) for name, x in tree.items()}

    rule = make("AdamW", {"lr": 0.1, "stacked": True})
    alone = both("AdamW", {"lr": 0.1}, engine="numpy", clip_norm=2.0)[0]
    alone = ao.Optimizer(alone.params, rule, engine="numpy", skip_nonfinite=True, clip_norm=2.0)
    params = own(parameters())
    state = rule.init(params, skip_nonfinite=library == "jax")
    step = jax.jit(lambda *x: ao.update(rule, *x, skip_nonfinite=True, clip_norm=2.0))
    step = step if library == "jax" else step.__wrapped__
    for k in range(STEPS):
        alone.step(gradients(k))
        params, state = step(params, own(gradients(k)), state)
    for name, p in alone.params.items():
        np.testing.assert_allclose(params[name], p, rtol=1e-5, atol=1e-6)
        assert np.asarray(state["tensors"][name]["t"]).tolist() == [STEPS - n for n in SKIPPED]
    bad = own({name: np.full_like(x, np.nan) for name, x in parameters().items()})
    same_params, after = step(params, bad, state)
    assert all((np.asarray(same_params[name]) == np.asarray(x)).all() for name, x in params.items())
    assert all(bool((after["tensors"][name]["t"] == x["t"]).all()) for name, x in state["tensors"].items())


def test_a_scan():
    rule = ao.AdamW(lr=0.1, stacked=True)
    params = {name: jnp.asarray(x) for name, x in parameters().items()}
    every = [gradients(k) for k in range(STEPS)]

    def body(carry, grads):
        return ao.update(rule, carry[0], grads, carry[1], skip_nonfinite=True), None

    grads = {name: jnp.stack([g[name] for g in every]) for name in params}
    (_, state), _ = jax.lax.scan(body, (params, rule.init(params, skip_nonfinite=True)), grads)
    assert state["tensors"]["w"]["t"].tolist() == [STEPS - n for n in SKIPPED]
    with pytest.raises(TypeError, match="init: `skip_nonfinite` must be True or False; got 1"):
        rule.init(params, skip_nonfinite=1)
