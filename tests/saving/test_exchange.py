"""State that goes to PyTorch's optimizers, and state that comes from optax's: runs go on as if they had been one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import arrayopt as ao
from arrayopt import torch as door
from arrayopt.exchange import to_torch
from arrayopt.schedules import Linear
from tests.support.optimizing import BASE, OTHER, drawn

SHAPES = {"w": (4, 3), "b": (3,), "s": ()}


def tree(seed=0, dtype="float64"):
    return {name: np.array(drawn(shape, seed + i), dtype) for i, (name, shape) in enumerate(SHAPES.items())}


RULES = {
    "AdamW": (ao.AdamW(lr=0.1), torch.optim.AdamW),
    "amsgrad": (ao.AdamW(lr=0.1, amsgrad=True, weight_decay=0.0), torch.optim.AdamW),
    "Adam": (ao.Adam(lr=0.1, weight_decay=0.1), torch.optim.Adam),
    "SGD": (ao.SGD(lr=0.1), torch.optim.SGD),
    "momentum": (ao.SGD(lr=0.1, momentum=0.9, nesterov=True), torch.optim.SGD),
    "RMSprop": (ao.RMSprop(lr=0.1, momentum=0.5, centered=True, alpha=0.7), torch.optim.RMSprop),
    "NAdam": (ao.NAdam(lr=0.1, decoupled=True), torch.optim.NAdam),
    "RAdam": (ao.RAdam(lr=0.1, beta2=0.9, decoupled=True), torch.optim.RAdam),
    "Adafactor": (
        ao.Adafactor(lr=0.1, variant="pytorch", relative_step=False, eps1=None, decay_rate=0.7),
        torch.optim.Adafactor,
    ),
    "Muon": (ao.Muon(lr=0.1, scale="match_rms_adamw"), torch.optim.Muon),
    "a schedule": (ao.AdamW(lr=Linear(0.1, 0.01, 10)), torch.optim.AdamW),
}


@pytest.mark.parametrize("engine", ["array_api", "numpy"])
@pytest.mark.parametrize("name", RULES)
def test_pytorch_goes_on(name, engine):
    rule, kind = RULES[name]
    muon = kind is torch.optim.Muon
    shapes = {"w": (4, 3), "b": (3, 5), "s": (2, 2)} if muon else SHAPES

    def tree(seed=0):
        return {name: np.array(drawn(shape, seed + i)) for i, (name, shape) in enumerate(shapes.items())}

    opt = ao.Optimizer(tree(), rule, groups={"b": {"weight_decay": 0.5}}, engine=engine)
    for k in range(3):
        opt.step(tree(10 * k + 5) | ({"s": None} if k != 1 else {}))
    saved = ao.to_torch(opt)
    params = {n: torch.nn.Parameter(torch.tensor(x)) for n, x in opt.params.items()}
    order = [n for group in opt.groups for n in group.names]
    theirs = kind([{"params": [(n, params[n]) for n in g.names]} for g in opt.groups], lr=99.0)
    theirs.load_state_dict(saved)
    assert [n for g in theirs.state_dict()["param_groups"] for n in g["param_names"]] == order
    assert [g["lr"] for g in theirs.param_groups] == [opt.now()] * 2
    opt.lr = opt.now()
    for k in range(3, 5):
        grads = tree(10 * k + 5)
        opt.step(grads)
        for n, p in params.items():
            p.grad = torch.tensor(grads[n])
        theirs.step()
    for n, p in params.items():
        far = {"atol": 0.01} if muon else {"rtol": 1e-7, "atol": 1e-7} if name == "NAdam" else {}  # bfloat16; float32
        np.testing.assert_allclose(p.detach().numpy(), opt.params[n], **{"rtol": 1e-10, "atol": 1e-12, **far})
    back = ao.Optimizer({n: p.detach().numpy() for n, p in params.items()}, rule, groups={"b": {}}, engine=engine)
    ao.load_torch(back, theirs.state_dict())
    if muon:
        assert back.state["w"]["m"].tolist() == theirs.state[params["w"]]["momentum_buffer"].tolist()
    elif kind is not torch.optim.SGD:
        assert {n: back.state[n]["t"] for n in SHAPES} == {n: opt.state[n]["t"] for n in SHAPES}


def begun(opt):
    """After one call of `step`."""
    opt.step(tree(1))
    return opt


@pytest.mark.parametrize(
    ("opt", "kind", "says"),
    [
        (
            lambda p: ao.Optimizer(p, ao.LAMB()),
            TypeError,
            "must be an Optimizer with the rule AdamW, Adam, SGD, RMSprop, NAdam, RAdam, Adafactor, Muon; got",
        ),
        (lambda p: None, TypeError, "to_torch: `opt` must be an Optimizer"),
        (lambda p: ao.Optimizer(p, ao.Adafactor()), ValueError, "no counterpart for variant='paper' in group 'all'"),
        (
            lambda p: ao.Optimizer({"k": np.ones((2, 2, 3))}, ao.Muon(lr=0.1, scale="none")),
            ValueError,
            "torch.optim.Muon has no counterpart for 'k', which is not a matrix; scale='none' in group 'all'",
        ),
        (
            lambda p: ao.Optimizer(p, ao.AdamW(eps_root=1e-8, clip_value=1.0, project=ao.projections.nonnegative)),
            ValueError,
            "no counterpart for clip_value=1.0 in group 'all'; project=nonnegative in group 'all'; eps_root=1e-08"
            " in group 'all'",
        ),
        (
            lambda p: ao.Optimizer(p, ao.AdamW(), groups={"b": ao.Adam()}),
            ValueError,
            "group 'rest' is under AdamW, and 'b' under Adam",
        ),
        (
            lambda p: ao.Optimizer({n: x.astype("float16") for n, x in p.items()}, ao.SGD(lr=1.0)),
            ValueError,
            "torch.optim.SGD has no counterpart for the master of 'w'",
        ),
        (
            lambda p: ao.Optimizer(p, ao.SGD(lr=1.0, rounding="stochastic")),
            ValueError,
            "torch.optim.SGD has no counterpart for rounding='stochastic' in group 'all'",
        ),
        (
            lambda p: begun(ao.Optimizer(p, ao.SGD(lr=1.0), accumulate=3)),
            ValueError,
            "no counterpart for accumulated gradients, after micro-step 1 of 3",
        ),
    ],
)
def test_what_pytorch_cannot_have(opt, kind, says):
    with pytest.raises(kind) as error:
        ao.to_torch(opt(tree()))
    assert says in str(error.value)


AWAY = OTHER | {"lr_in_momentum": True, "variant": "paper", "scale": "none", "matrix": "last", "ns_steps": 3}
AWAY |= {"ns_coefficients": ((2.0, -1.5, 0.5), (3.0, -3.0, 1.0)), "ns_dtype": "bfloat16"}
STARTS = [
    (kind, BASE[kind.__name__]) for kind in to_torch._THEIRS if kind.__name__ in BASE and kind is not ao.Adafactor
]
STARTS += [(ao.SGD, {"lr": 0.1}), (ao.Muon, {"lr": 0.1})]
STARTS += [(ao.Adafactor, {"lr": 0.1, "variant": "pytorch", "relative_step": False})]


@pytest.mark.parametrize(("kind", "start"), STARTS)
def test_pytorch_computes_the_same_or_it_is_refused(kind, start):
    """With each field of the rule."""
    taken = set()
    for key in {f.name for f in dataclasses.fields(kind)} - {f.name for f in dataclasses.fields(ao.Rule)}:
        try:
            rule = kind(**{**start, key: not start[key] if start.get(key) is False else AWAY.get(key)})
        except (TypeError, ValueError):  # it does not go together with `start`
            continue
        p, *grads = map(torch.tensor, drawn((4, 3), *range(5)))
        opt = ao.Optimizer([p], rule, engine="array_api")
        opt.step(grads[:1])
        try:
            saved = ao.to_torch(opt)
        except ValueError as error:
            assert f"no counterpart for {key}={getattr(rule, key)!r} in group 'all'" in str(error)  # noqa: PT017
            continue
        taken.add(key)
        before, q = p.clone(), torch.nn.Parameter(p.clone())
        theirs = getattr(torch.optim, kind.__name__)([q])
        theirs.load_state_dict(saved)
        for g in grads[1:]:
            opt.step([g])
            q.grad = g
            theirs.step()
        far = 0.1 if kind is ao.Muon else 1e-7  # bfloat16; NAdam's product is in float32
        assert torch.linalg.norm(q.detach() - p) <= far * torch.linalg.norm(p - before), key
    assert {"lr", "weight_decay"} <= taken


OPTAX = {
    "adamw": (lambda: optax.adamw(0.1, weight_decay=0.1), ao.AdamW(lr=0.1, weight_decay=0.1)),
    "a chain": (lambda: optax.chain(optax.clip(1e9), optax.adam(0.1)), ao.Adam(lr=0.1)),
    "lamb": (lambda: optax.lamb(0.1, weight_decay=0.1), ao.LAMB(lr=0.1, weight_decay=0.1)),
    "sgd": (lambda: optax.sgd(0.1, momentum=0.9), ao.SGD(lr=0.1, momentum=0.9)),
    "lars": (
        lambda: optax.lars(0.5, 0.1, nesterov=True),
        ao.LARS(lr=0.5, weight_decay=0.1, decayed_norm=True, nesterov=True),
    ),
    "lars, lr inside": (
        lambda: optax.lars(lambda k: 0.5 / (k + 1), 0.1),
        ao.LARS(lr=lambda k: 0.5 / (k + 1), weight_decay=0.1, decayed_norm=True, lr_in_momentum=True),
    ),
    "rmsprop": (lambda: optax.inject_hyperparams(optax.rmsprop)(0.1, decay=0.5), ao.RMSprop(eps_in_sqrt=True)),
    "injected": (lambda: optax.inject_hyperparams(optax.adamw)(0.1, b1=0.8, weight_decay=0.1), ao.AdamW(lr=9.0)),
}


@pytest.mark.parametrize("name", OPTAX)
def test_optax_is_gone_on_from(name):
    make, rule = OPTAX[name]
    theirs, params = make(), {n: jnp.asarray(x) for n, x in tree().items()}
    state, update = theirs.init(params), jax.jit(theirs.update)
    opt = None
    for k in range(6):
        if k == 3:
            opt = ao.Optimizer({n: np.array(x) for n, x in params.items()}, rule, engine="numpy")
            ao.load_optax(opt, state)
            assert (opt.step_count, opt.state["w"]["t"]) == ((1, 1) if name in ("sgd", "lars") else (3, 3))
        grads = tree(10 * k + 5)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if opt is not None:
            opt.step(grads)
    for n, x in params.items():
        np.testing.assert_allclose(opt.params[n], x, rtol=1e-9, atol=1e-12)


def test_what_of_optax_does_not_fit():
    params = {n: jnp.asarray(x) for n, x in tree().items()}
    opt = ao.Optimizer(tree(), ao.AdamW(), engine="numpy")
    before = opt.state_dict()
    for state, kind, says in [
        (optax.amsgrad(0.1).init(params), ValueError, "optax's amsgrad uses the maximum of bias-corrected moments"),
        (optax.sgd(0.1).init(params), TypeError, "that has `mu`, `nu` or `trace` once; got EmptyState, EmptyState"),
        (
            optax.sgd(0.1, momentum=0.9).init(params),
            TypeError,
            "the state for AdamW is ScaleByAdamState; got TraceState, which is that of SGD, LARS",
        ),
        (optax.adabelief(0.1).init(params), TypeError, "is ScaleByAdamState; got ScaleByBeliefState"),
        (optax.lion(0.1).init(params), TypeError, "got ScaleByLionState, which is that of Lion"),
        (optax.adamw(0.1).init({"w": params["w"], "z": params["b"]}), ValueError, "unexpected 'z'"),
        (optax.adamw(0.1).init({**params, "b": jnp.zeros(2)}), ValueError, r"shape (2,) of m of 'b', expected (3,)"),
        (None, TypeError, "got NoneType"),
    ]:
        with pytest.raises(kind) as error:
            ao.load_optax(opt, state)
        assert says in str(error.value)
    assert str(opt.state_dict()) == str(before)
    with pytest.raises(TypeError, match="load_optax: `opt` must be an Optimizer; got dict"):
        ao.load_optax({}, optax.adamw(0.1).init(params))


LOSES = {
    "acc_grads": lambda tx: optax.MultiSteps(tx, 2),
    "grad_acc": lambda tx: optax.chain(optax.apply_every(2), tx),
    "ema": lambda tx: optax.chain(tx, optax.ema(0.9)),
    "z": lambda tx: optax.contrib.schedule_free(tx, 0.1),
}


@pytest.mark.parametrize("name", LOSES)
def test_what_would_be_lost_of_optax_is_refused(name):
    theirs, params = LOSES[name](optax.adam(0.1)), {n: jnp.asarray(x) for n, x in tree().items()}
    _, state = theirs.update(params, theirs.init(params), params)
    opt = ao.Optimizer(tree(), ao.Adam(lr=0.1), engine="array_api")
    before = str(opt.state_dict())
    with pytest.raises(ValueError, match=rf"load_optax: the state also has .*{name}\.w.*, which would be lost"):
        ao.load_optax(opt, state)
    assert str(opt.state_dict()) == before
    ao.load_optax(opt, optax.adam(0.1).init(params))


def test_muon_of_optax_is_gone_on_from():
    """Its state has one of Adam, too, for what is no matrix."""
    theirs, params = optax.contrib.muon(0.1), {"w": jnp.asarray(drawn((4, 4), 1))}
    state = theirs.init(params)
    rule = ao.Muon(lr=0.1, weight_decay=0.0, bias_correction=True, eps_added=True, eps=1e-8)
    opt = None
    for k in range(4):
        if k == 2:
            opt = ao.Optimizer({"w": np.array(params["w"])}, rule, engine="array_api")
            ao.load_optax(opt, state)
        grads = {"w": drawn((4, 4), 10 + k)}
        updates, state = theirs.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if opt is not None:
            opt.step(grads)
    np.testing.assert_allclose(opt.params["w"], params["w"], rtol=1e-6)


def lars(lr, **options):
    return ao.LARS(lr=lr, decayed_norm=True, **options)


def own_chain(*parts):
    return optax.chain(*parts).init


TRACES = {
    "a schedule there": (lambda: optax.lars(lambda step: 0.1).init, lars(0.1), "which was a schedule"),
    "injected": (lambda: optax.inject_hyperparams(optax.lars)(0.1).init, lars(0.1), "which was injected"),
    "a schedule here": (lambda: optax.lars(0.1).init, lars(Linear(0.1, 0.01, 10)), "must be that number in all groups"),
    "zero": (lambda: optax.lars(0.1).init, lars(0.0), "and not 0; got 0.0 in group 'all'"),
    "sgd's": (lambda: optax.sgd(0.1, momentum=0.9).init, lars(0.1), "must be that of optax.lars alone"),
    "lars's": (lambda: optax.lars(0.1).init, ao.SGD(lr=0.1, momentum=0.9), "the state must show whether"),
    "after the rate": (
        lambda: own_chain(optax.scale(-0.1), optax.trace(0.9)),
        ao.SGD(lr=0.1, momentum=0.9),
        "got a chain of EmptyState, TraceState",
    ),
    "alone": (lambda: optax.trace(0.9).init, ao.SGD(lr=0.1, momentum=0.9), "got a chain of TraceState"),
}


@pytest.mark.parametrize(("init", "rule", "words"), TRACES.values(), ids=TRACES)
def test_a_trace_that_may_have_the_learning_rate_in_it_is_refused(init, rule, words):
    opt = ao.Optimizer(tree(), rule, engine="array_api")
    opt.step(tree(1))
    before = str(opt.state_dict())
    with pytest.raises(ValueError, match=r"^load_optax: the ") as error:
        ao.load_optax(opt, init()(tree()))
    assert words in str(error.value)
    assert str(opt.state_dict()) == before


def test_the_part_of_a_chain_from_the_trace_on_is_taken():
    state = own_chain(optax.clip(1.0), optax.trace(0.9), optax.scale(-0.1))(tree())
    state = optax.tree_utils.tree_set(state, trace=tree(1))
    opt = ao.Optimizer(tree(), ao.SGD(lr=0.1, momentum=0.9), engine="array_api")
    with pytest.raises(ValueError, match="the state must show whether"):
        ao.load_optax(opt, state)
    ao.load_optax(opt, state[1:])
    np.testing.assert_array_equal(opt.state["w"]["buf"], tree(1)["w"])


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (ao.SGD(lr=0.1, momentum=0.9), torch.optim.SGD),
        (ao.AdamW(lr=0.1), torch.optim.AdamW),
        (ao.RMSprop(lr=0.1, momentum=0.5), torch.optim.RMSprop),
    ],
    ids=["SGD", "AdamW", "RMSprop"],
)
def test_complex_tensors_go_there_and_back(rule, kind):
    """PyTorch has the second moments of real and imaginary parts apart: there are halves, and here their sum."""
    z = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))
    start = {"z": z.detach().numpy().copy()}
    theirs = kind([("z", z)], lr=0.1, **({} if kind is torch.optim.AdamW else {"momentum": rule.momentum}))
    for _ in range(3):
        z.grad = torch.randn_like(z)
        theirs.step()
    opt = ao.Optimizer(start, rule, engine="numpy")
    ao.load_torch(opt, theirs.state_dict())
    moment = {"exp_avg_sq", "square_avg"} & theirs.state[z].keys()
    for name in moment:
        x = theirs.state[z][name]
        np.testing.assert_allclose(opt.state["z"]["v"], (x.real + x.imag).numpy())
    theirs.load_state_dict(ao.to_torch(opt))
    for name in moment:
        assert torch.equal(theirs.state[z][name].real, theirs.state[z][name].imag)
    z.grad = torch.randn_like(z)
    theirs.step()
    again = ao.Optimizer(start, rule, engine="numpy")
    ao.load_torch(again, ao.to_torch(opt))
    for slot, x in opt.state["z"].items():
        np.testing.assert_allclose(np.asarray(again.state["z"][slot]), np.asarray(x))


@pytest.mark.parametrize("ours", [door.AdamW, lambda groups, lr: ao.Optimizer(groups, ao.AdamW(lr=lr))])
@pytest.mark.parametrize("sizes", [[4], [1, 3]])
def test_a_state_of_other_groups_needs_names(sizes, ours):
    """Its order is that of its own groups, so moments would go to other tensors of the same shape."""
    tensors = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
    theirs = torch.optim.AdamW([{"params": tensors[:1]}, {"params": tensors[1:]}] if sizes == [1, 3] else tensors)
    for i, p in enumerate(tensors):
        p.grad = torch.full((3,), i + 1.0)
    theirs.step()
    opt = ours([{"params": tensors[::2]}, {"params": tensors[1::2]}], lr=0.5)
    with pytest.raises(ValueError, match=r"those of the optimizer \[2, 2\]; pass `names`, which lists \['0', '1',"):
        ao.load_torch(opt, theirs.state_dict())
    ao.load_torch(opt, theirs.state_dict(), names=["0", "2", "1", "3"])
    for p, name in zip(tensors, "0213", strict=True):
        m = opt.state[name if isinstance(opt, ao.Optimizer) else p]["m"]
        torch.testing.assert_close(m, 0.1 * p.grad)


def test_another_model_is_said_to_be_one():
    small, large = torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3))
    state = torch.optim.AdamW(small.parameters()).state_dict()
    opt = ao.Optimizer(dict(large.named_parameters()), ao.AdamW())
    with pytest.raises(ValueError, match=r"the state is for 2 parameters, but the optimizer has 4,.*must be the same"):
        ao.load_torch(opt, state)
    named = torch.optim.AdamW(small.named_parameters()).state_dict()
    with pytest.raises(ValueError, match=r"parameters \['weight', 'bias'\], but the optimizer has \['0.weight'"):
        ao.load_torch(opt, named)
    split = torch.optim.AdamW([{"params": [p]} for p in small.parameters()]).state_dict()
    with pytest.raises(ValueError, match="the state has 2 groups and no names; pass `names`"):
        ao.load_torch(ao.Optimizer(dict(small.named_parameters()), ao.AdamW()), split)
