"""Stacked layers: what the layers give one by one, in every engine, with everything around it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt import rules
from arrayopt.engines import layers
from arrayopt.engines.array_api import apply
from arrayopt.engines.numpy import engine as blocks
from arrayopt.fusion.plans import plan_for
from arrayopt.rules.fields import hypers
from tests.support.cases import ALL, IDS, make
from tests.support.engines import EVERY, each_compiled, each_engine
from tests.support.entered import contents
from tests.support.optimizing import drawn
from tests.support.slow import marked
from tests.support.tracing import made

SHAPES = {"w": (6, 5), "b": (7,), "s": ()}
N = 3
RULES = {
    "LAMB": {"lr": 0.1},
    "LANS": {"lr": 0.1, "lookahead_steps": 2, "ema_decay": 0.5},
    "CAME": {"lr": 0.1, "grad_centralization": True},
    "LARS": {"lr": 0.1, "momentum": 0.9, "clip_unit_ratio": 0.1},
    "AdamW": {"lr": 0.1, "project": ao.projections.ball(1.5)},
}


def arrays(seed=0, dtype="float64"):
    return {name: drawn((N, *shape), seed + i).astype(dtype) for i, (name, shape) in enumerate(SHAPES.items())}


def apart(tree):
    """The layers, each by itself."""
    return {f"{name}[{i}]": np.array(x[i, ...]) for name, x in tree.items() for i in range(N)}


def run(opt, n=4, of=lambda tree: tree, lacking=()):
    for k in range(n):
        grads = arrays(100 * k + 9, str(opt.params[next(iter(opt.params))].dtype).removeprefix("torch."))
        opt.step({name: None if k == 1 and name in lacking else g for name, g in of(grads).items()})
    return opt


def same(stacked, single):
    for name, x in stacked.params.items():
        for i in range(N):
            assert np.array_equal(x[i, ...], single.params[f"{name}[{i}]"])
            of_layer, own = stacked.state[name], single.state[f"{name}[{i}]"]
            assert of_layer["t"] == own["t"]
            assert all(np.array_equal(of_layer[slot][i, ...], own[slot]) for slot in own if slot != "t")


def both(rule, fields, dtype="float64", **options):
    kind = getattr(ao, rule)
    opts = ao.Optimizer(arrays(dtype=dtype), kind(**fields, stacked=True), **options)
    return opts, ao.Optimizer(apart(arrays(dtype=dtype)), kind(**fields), **options)


@each_engine
@pytest.mark.parametrize("rule", RULES)
def test_as_the_layers_one_by_one(rule, engine):
    stacked, single = both(rule, RULES[rule], engine=engine, stats=True, clip_norm=2.0)
    run(stacked, lacking=["b"])
    run(single, of=apart, lacking=[f"b[{i}]" for i in range(N)])
    same(stacked, single)
    assert stacked.stats.read() == single.stats.read()
    assert stacked.stats.global_norm == single.stats.global_norm


def every_rule():
    """A rule of each class, stacked."""
    for name in sorted(set(rules.__all__) - {"Rule"}):
        kind = getattr(ao, name)
        needs_lr = "lr" in hypers(kind) and name != "Adafactor"
        yield pytest.param(kind(stacked=True, **({"lr": 0.1} if needs_lr else {})), id=name)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("rule", list(every_rule()))
def test_array_api_updates_all_layers_at_once(rule, library, monkeypatch):
    """Of each rule and rank, and with all that is around it; what the layers give one by one."""
    make = np.asarray if library == "numpy" else torch.asarray
    rule = replace(rule, clip_tensor_norm=0.5, ema_decay=0.9, lookahead_steps=2)
    for shape in [(3, 5, 4), (3, 2, 2, 3), (3, 5), (3,)]:
        p, gs = drawn(shape, 1), [drawn(shape, 2 + k) for k in range(3)]
        if rule.refuses(np, p[0, ...]):
            continue
        found = []
        for split in (None, apply.split):
            monkeypatch.setattr(apply, "split", split)
            if split:
                monkeypatch.setattr(apply, "apply_one", layers_alone(apply.apply_one))
            opt = ao.Optimizer({"w": make(p.copy())}, rule, engine="array_api", stats=True)
            for g in gs:
                opt.step({"w": make(g)})
            state = {slot: np.asarray(x) for slot, x in opt.state["w"].items()}
            found.append({"w": np.asarray(opt.params["w"]), **state, **flat(opt.stats.read())})
        monkeypatch.undo()
        assert found[0].keys() == found[1].keys()
        for name, x in found[1].items():
            np.testing.assert_allclose(found[0][name], x, rtol=1e-9, atol=1e-12, err_msg=f"{name} of {shape}")


def layers_alone(one):
    """`apply_one`, which refuses all layers at once."""

    def call(*args, together=False, **options):
        if together:
            raise TypeError("not at once")
        return one(*args, **options)

    return call


def flat(stats):
    return {f"{name} {what}": x for name, each in stats.items() for what, x in each.items()}


def test_a_rule_of_which_not_all_is_known_at_once_runs_layer_by_layer():
    def update(xp, p, g, s, h):
        first = p[0] if p.ndim else p  # an index, which is of a layer
        return p - h.lr * g * xp.abs(first), {}

    rule = made(update)(lr=0.1, stacked=True)
    p, g = drawn((3, 5), 1), drawn((3, 5), 2)
    found = ao.Optimizer(p.copy(), rule, engine="array_api").step(g)
    np.testing.assert_allclose(found, p - 0.1 * g * abs(p[:, :1]), rtol=1e-12)


def test_slots_without_elements():
    def slots(xp, p):
        return {"none": xp.zeros((0, 3), dtype=p.dtype), "m": xp.zeros_like(p)}

    def update(xp, p, g, s, h):
        m = s["m"] + (g[0] if p.ndim else g)  # an index, which is of a layer
        return p - h.lr * m, {"none": s["none"], "m": m}

    p, g = drawn((3, 5), 1), drawn((3, 5), 2)
    opt = ao.Optimizer(p.copy(), made(update, slots)(lr=0.1, stacked=True), engine="array_api")
    np.testing.assert_allclose(opt.step(g), p - 0.1 * g[:, :1], rtol=1e-12)
    assert opt.state["param"]["none"].shape == (3, 0, 3)


def test_numpy_takes_layers_where_they_lie(monkeypatch):
    """Neither parameter nor slots nor gradients are copied, nor split."""
    p, g = drawn((40, 6), 1), drawn((40, 6), 2)
    opt = ao.Optimizer(p, ao.LAMB(lr=0.1, stacked=True), engine="numpy")
    opt.step(g)
    for name in ("joined", "setitem"):
        monkeypatch.setattr(blocks, name, None)
    monkeypatch.setattr(layers, "split", None)
    assert opt.step(g) is p


@each_engine
@pytest.mark.parametrize("rule", ["LAMB", "SOAP"])
def test_layers_are_taken_at_once_where_one_is_skipped_and_after(rule, engine, monkeypatch):
    """No gradient is split; and where numbers of updates differ, a call is for all layers of one number."""
    fields = {"LAMB": {}, "SOAP": {"precondition_frequency": 2}}[rule]
    p, calls = {"w": drawn((40, 6, 2), 1), "v": drawn((40, 3, 2), 2)}, []
    opt = ao.Optimizer(p, getattr(ao, rule)(lr=0.1, stacked=True, **fields), engine=engine, skip_nonfinite=True)
    opt.step({name: drawn(x.shape, 3) for name, x in p.items()})
    one = apply.apply_one

    def noted(*args, **options):
        calls.append(1)
        return one(*args, **options)

    for name, value in (("split", None), ("apply_one", noted)):
        monkeypatch.setattr(apply, name, value)
    monkeypatch.setattr(layers, "split", None)
    for k in range(1, 8):
        grads = {name: drawn(x.shape, 3 + k) for name, x in p.items()}
        if k < 6:
            grads["w"][[k, 20]] = np.nan
        opt.step(grads)
    assert len(calls) <= 2 * (1 + 7) * 7
    assert opt.skipped_layers()["v"].sum() == 10


@pytest.mark.parametrize("engine", ["array_api", "numpy"])
@pytest.mark.parametrize("options", [{"clip_norm": 0.1}, {"skip_nonfinite": True}, {"loss_scale": 8.0}], ids=str)
def test_large_stacks_are_measured(engine, options):
    """Of more elements than `numpy` takes end to end."""
    x = np.linspace(-1.0, 1.0, blocks.PACKED + 64).reshape(-1, 64)
    stacked, whole = (
        ao.Optimizer({"w": x.copy()}, ao.SGD(lr=0.5, stacked=y), engine=engine, **options) for y in (True, False)
    )
    for opt in (stacked, whole):
        opt.step({"w": x})
    np.testing.assert_allclose(stacked.params["w"], whole.params["w"], rtol=1e-12)
    assert stacked.stats.global_norm == pytest.approx(whole.stats.global_norm, rel=1e-12)


@each_compiled
def test_in_single_precision(engine):
    stacked, single = both("LAMB", {"lr": 0.1}, "float32", engine=engine)
    same(run(stacked), run(single, of=apart))


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"loss_scale": 8.0}, {"skip_nonfinite": True}], ids=str)
def test_what_is_around_a_step(options):
    stacked, single = both("LAMB", {"lr": 0.1, "master_weights": True}, "float16", engine="numpy", **options)
    same(run(stacked), run(single, of=apart))
    if "accumulate" not in options:
        bad = arrays(5, "float16")
        bad["w"][1, 0, 0] = np.inf
        stacked.step(bad)
        assert stacked.nonfinite() == ["w[1]"]
        assert stacked.stats.skipped == ("loss_scale" in options)
        assert stacked.skipped_layers()["b"].tolist() == ([0, 0, 0] if "loss_scale" in options else [0, 1, 0])


def test_no_layers_and_no_elements():
    params = {"none": np.zeros((0, 3)), "empty": np.zeros((2, 0)), "w": np.ones((2, 3))}
    for engine in ("array_api", "numpy"):
        opt = ao.Optimizer(params, ao.LAMB(lr=0.1, stacked=True), engine=engine)
        opt.step({name: np.ones_like(x) for name, x in params.items()})
        assert [opt.state[name]["t"] for name in params] == [1, 1, 1]
        assert opt.state["none"]["m"].shape == (0, 3)
    with pytest.raises(
        ValueError, match="LAMB: `stacked=True` is for tensors whose first axis counts layers; 'p' has no"
    ):
        ao.Optimizer({"p": np.array(1.0)}, ao.LAMB(stacked=True))


def test_pytorch():
    made = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in arrays().items()}
    opt = ao.Optimizer(made, ao.LAMB(lr=0.1, stacked=True), engine="array_api")
    before = made["w"]._version
    for k in range(4):
        opt.step({name: torch.tensor(g) for name, g in arrays(100 * k + 9).items()})
    single = run(both("LAMB", {"lr": 0.1}, engine="array_api")[1], of=apart)
    for name, x in made.items():
        for i in range(N):
            np.testing.assert_allclose(x[i, ...].detach().numpy(), single.params[f"{name}[{i}]"], rtol=1e-12)
    assert made["w"]._version > before


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
def test_jax_and_arrays_that_cannot_be_written():
    single = run(both("LAMB", {"lr": 0.1}, engine="array_api")[1], of=apart)
    fixed = arrays()
    for x in fixed.values():
        x.flags.writeable = False
    for params in ({name: jnp.asarray(x) for name, x in arrays().items()}, fixed):
        xp = jnp if params is not fixed else np
        opt = ao.Optimizer(params, ao.LAMB(lr=0.1, stacked=True), stats=True)
        for k in range(4):
            opt.step({name: xp.asarray(g) for name, g in arrays(100 * k + 9).items()})
        assert sorted(opt.stats)[0] == "b[0]"
        for name, x in opt.params.items():
            for i in range(N):
                np.testing.assert_allclose(x[i, ...], single.params[f"{name}[{i}]"], rtol=1e-12)
    with pytest.raises(ValueError, match="it supports stacked tensors only if they are writable in place"):
        ao.Optimizer(fixed, ao.LAMB(stacked=True), engine="numpy")


def test_the_functional_form_of_a_model_that_is_scanned():
    rule, rng = ao.LAMB(lr=0.05, stacked=True), np.random.default_rng(0)
    x, y = rng.standard_normal((16, 4)), rng.standard_normal((16, 4))

    def loss(params, stacked):
        def layer(h, p):
            return jnp.tanh(h @ p["w"] + p["b"]), None

        if stacked:
            h, _ = jax.lax.scan(layer, x, params)
        else:
            h = x
            for i in range(N):
                h, _ = layer(h, {"w": params[f"w{i}"], "b": params[f"b{i}"]})
        return jnp.mean((h - y) ** 2)

    params = {"w": jnp.asarray(drawn((N, 4, 4), 1)), "b": jnp.zeros((N, 4))}
    single = {f"{name}{i}": x[i] for name, x in params.items() for i in range(N)}

    def step(rule, stacked):
        return jax.jit(lambda p, s: ao.update(rule, p, jax.grad(loss)(p, stacked), s))

    state, states = rule.init(params), ao.LAMB(lr=0.05).init(single)
    of_all, of_each = step(rule, True), step(ao.LAMB(lr=0.05), False)
    for _ in range(5):
        params, state = of_all(params, state)
        single, states = of_each(single, states)
    for name, value in params.items():
        for i in range(N):
            np.testing.assert_allclose(value[i], single[f"{name}{i}"], rtol=1e-11)


def test_reports_of_the_functional_form_are_of_each_layer():
    params = arrays()
    rule = ao.LAMB(stacked=True, adapt=False)
    _, _, reports = ao.update(rule, params, arrays(3), rule.init(params), stats=True)
    assert {name: x.shape for name, x in reports["w"].items()} == dict.fromkeys(reports["w"], (N,))


def test_ranks_keep_stacks_whole():
    alone = run(both("LAMB", {"lr": 0.1}, engine="numpy", clip_norm=1.0)[0])
    alone.params = {name: x.copy() for name, x in alone.params.items()}

    def work(comm):
        return run(both("LAMB", {"lr": 0.1}, engine="numpy", clip_norm=1.0, comm=comm)[0]).params

    for params in ao.ranks.run(2, work):
        assert all(np.array_equal(params[name], x) for name, x in alone.params.items())


def test_a_resumed_run_equals_a_straight_one(tmp_path):
    straight = run(both("CAME", RULES["CAME"], engine="numpy")[0], 2)
    straight.save(tmp_path / "a")
    resumed = both("CAME", RULES["CAME"], engine="numpy")[0]
    resumed.load(tmp_path / "a")
    for opt in (straight, resumed):
        opt.step(arrays(77))
    assert all(np.array_equal(straight.params[name], resumed.params[name]) for name in SHAPES)
    with pytest.raises(ValueError, match="group 'all' had stacked=True, here False"):
        ao.Optimizer(arrays(), ao.CAME(lr=0.1, grad_centralization=True)).load(tmp_path / "a")


def test_replaced_and_moved_arrays_are_followed():
    stacked, single = both("LAMB", {"lr": 0.1}, engine="numpy")
    run(stacked, 1), run(single, 1, of=apart)
    stacked.params["w"] = np.clip(stacked.params["w"], -0.5, 0.5)
    for i in range(N):
        single.params[f"w[{i}]"] = np.clip(single.params[f"w[{i}]"], -0.5, 0.5)
    same(run(stacked, 2), run(single, 2, of=apart))
    stacked.params["w"].flags.writeable = False
    before = contents(stacked)
    for _ in range(2):  # a second try is refused, too
        with pytest.raises(ValueError, match="'w' must remain writable in place, because it is stacked"):
            run(stacked, 1)
    assert contents(stacked) == before


def test_a_monitor_keeps_each_layer():
    opt = both("LAMB", {"lr": 0.1}, engine="numpy")[0]
    monitor = ao.Monitor(opt)
    run(opt, 1)
    rows = monitor.read()
    assert [row["tensor"] for row in rows] == [f"{name}[{i}]" for name in SHAPES for i in range(N)]
    assert all(row["lr"] == 0.1 for row in rows)


def test_explain_counts_stacks_and_layers():
    assert "3 tensors of 9 layers, 114 parameters" in both("LAMB", {}, engine="numpy")[0].explain()


EMPTY = [(0,), (0, 3), (3, 0), (0, 3, 4), (2, 0, 3), (2, 3, 0), (0, 0)]


@pytest.mark.parametrize(
    ("engine", "row"),
    marked(
        [(engine, row) for engine in EVERY for row in IDS],
        lambda engine, row: engine == "numpy" and row in ("LAMB-0", "Muon-0", "CAME-0", "Adafactor-0"),
    ),
)
@pytest.mark.parametrize("stacked", [True, False])
def test_every_rule_without_elements(engine, row, stacked):
    """Such tensors are counted; their slots are those of the functional form, and are saved and loaded."""
    rule = replace(make(*ALL[IDS.index(row)]), stacked=stacked)
    every = {str(shape): np.zeros(shape, "float32") for shape in EMPTY}
    params = {name: p for name, p in every.items() if not rule.refuses(np, p[0] if stacked and len(p) else p)}
    comm = ao.ranks.threads(1)[0]
    opt = ao.Optimizer(params, rule, engine=engine, stats=True, comm=comm)
    for _ in range(2):
        opt.step({name: p.copy() for name, p in params.items()})
    again = ao.Optimizer(params, rule, engine=engine)
    again.load_state_dict(opt.state_dict())
    again.step(params)
    again.averaged()
    _, state = ao.update(rule, params, params, rule.init(params))
    for bucket in opt._step.buckets if engine == "numpy" else ():
        for x in bucket.tensors:
            assert set(plan_for(rule, x.array.ndim, "float32", shape=x.shape).slots) == set(x.slots)
    for name in params:
        assert (opt.state[name]["t"], again.state[name]["t"]) == (2, 3)
        own, exact = dict(opt.state[name]), state["tensors"][name]
        assert list(own) == list(exact)
        assert [np.shape(x) for x in own.values()] == [np.shape(x) for x in exact.values()]


@each_engine
def test_totals_of_layers_that_are_scalars(engine):
    """Of a stack, each layer has totals over the layers of all tensors with its number."""
    many = arrays()
    stacked = ao.Optimizer(arrays(), ao.Prodigy(stacked=True), engine=engine)
    ones = [
        ao.Optimizer({name: np.array(x[i, ...]) for name, x in many.items()}, ao.Prodigy(), engine=engine)
        for i in range(N)
    ]
    run(stacked, 3)
    for i, one in enumerate(ones):
        run(one, 3, of=lambda grads, i=i: {name: np.array(x[i, ...]) for name, x in grads.items()})
        assert all(np.array_equal(stacked.params[name][i, ...], p) for name, p in one.params.items())
