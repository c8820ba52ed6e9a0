"""State of PyTorch's optimizers goes on here as it would there."""

from functools import partial

import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.conftest import BACKENDS
from tests.support.checkpoints import contents
from tests.support.recorded import recorded
from tests.support.timms import timms

pytestmark = pytest.mark.usefixtures("auto")

SHAPES = {"w": (4, 3), "b": (3,), "unused": (2,)}


def parameters(dtype=torch.float64):
    torch.manual_seed(1)
    return {name: torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for name, shape in SHAPES.items()}


def grads(step, dtype=torch.float64):
    torch.manual_seed(100 + step)
    made = {name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()}
    return {**made, "unused": None} if step < 3 else made


def run(theirs, params, steps):
    for s in steps:
        for name, g in grads(s, params["w"].dtype).items():
            params[name].grad = g
        theirs.step()


def compare(theirs, params, opt, backend=BACKENDS["torch"], steps=6, rtol=1e-12):
    """Both go on from here, and stay together."""
    for s in range(3, 3 + steps):
        run(theirs, params, [s])
        found = opt.step({k: None if g is None else backend.array(g.numpy(), "float64") for k, g in grads(s).items()})
        for name, p in params.items():
            np.testing.assert_allclose(backend.numpy(found[name]), p.detach().numpy(), rtol=rtol, atol=rtol)


SOURCES = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}, ao.AdamW()),
    "AdamW-amsgrad": (torch.optim.AdamW, {"amsgrad": True, "foreach": True}, ao.AdamW(amsgrad=True)),
    "AdamW-fused": (torch.optim.AdamW, {"fused": True}, ao.AdamW()),
    "Adam": (torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.1}, ao.Adam()),
    "SGD": (torch.optim.SGD, {"lr": 0.02, "weight_decay": 0.1}, ao.SGD(lr=1.0)),
    "SGD-dampening": (torch.optim.SGD, {"lr": 0.02, "dampening": 0.5}, ao.SGD(lr=1.0, dampening=0.1)),
    "SGD-momentum": (
        torch.optim.SGD,
        {"lr": 0.02, "momentum": 0.9, "dampening": 0.3},
        ao.SGD(lr=1.0, momentum=0.1),
    ),
    "SGD-nesterov": (
        torch.optim.SGD,
        {"lr": 0.02, "momentum": 0.9, "nesterov": True},
        ao.SGD(lr=1.0, momentum=0.1, nesterov=True),
    ),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.02, "alpha": 0.9, "weight_decay": 0.1}, ao.RMSprop()),
    "RMSprop-momentum": (
        torch.optim.RMSprop,
        {"lr": 0.02, "momentum": 0.9, "centered": True},
        ao.RMSprop(momentum=0.1, centered=True),
    ),
    "NAdam": (
        torch.optim.NAdam,
        {"lr": 0.02, "momentum_decay": 0.1, "decoupled_weight_decay": True},
        ao.NAdam(decoupled=True),
    ),
    "RAdam": (torch.optim.RAdam, {"lr": 0.02, "betas": (0.8, 0.98), "weight_decay": 0.1}, ao.RAdam()),
}


@pytest.mark.parametrize("library", ["torch", "numpy", "jax"])
@pytest.mark.parametrize(("kind", "options", "rule"), SOURCES.values(), ids=SOURCES)
def test_torch_goes_on_here(kind, options, rule, library):
    params, backend = parameters(), BACKENDS[library]
    theirs = kind(params.values(), **options)
    run(theirs, params, range(3))
    opt = ao.Optimizer({name: backend.array(p.detach().numpy(), "float64") for name, p in params.items()}, rule)
    ao.load_torch(opt, theirs.state_dict())
    keeps_count = kind is not torch.optim.SGD
    assert (opt.step_count, opt.state["w"]["t"]) == (3 * keeps_count, 3 if keeps_count else int("momentum" in options))
    assert opt.state["unused"]["t"] == 0
    assert opt.groups[0].overridden == set()
    assert opt.lr == opt.groups[0].lr == theirs.param_groups[0]["lr"]
    compare(theirs, params, opt, backend, rtol=1e-6 if kind is torch.optim.NAdam else 1e-12)  # its mu is in float32


class Lamb(torch.optim.Optimizer):
    """LAMB as timm's documentation has it, with the state dict that timm's has (version 1.0.31)."""

    def __init__(self, params, **options):
        default = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
        default |= {"grad_averaging": True, "max_grad_norm": 1.0, "trust_clip": False, "always_adapt": False}
        default |= {"caution": False, "decoupled_decay": False, "corrected_weight_decay": False, "foreach": None}
        super().__init__(params, {**default, "max_lr_snapshot": None, **options})

    @torch.no_grad()
    def step(self):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum((p.grad**2).sum() for p in every) ** 0.5
        for h in self.param_groups:
            h["step"] = h.get("step", torch.tensor(0.0)) + 1
            (b1, b2), t = h["betas"], float(h["step"]) if h["bias_correction"] else float("inf")
            for p in h["params"]:
                if p.grad is not None:
                    s = self.state.setdefault(p, {}) or self.state[p]
                    g = p.grad / max(1.0, norm / h["max_grad_norm"]) if h["max_grad_norm"] else p.grad
                    s["exp_avg"] = b1 * s.get("exp_avg", 0) + (1 - b1 if h["grad_averaging"] else 1) * g
                    s["exp_avg_sq"] = b2 * s.get("exp_avg_sq", 0) + (1 - b2) * g * g
                    u = s["exp_avg"] / (1 - b1**t) / ((s["exp_avg_sq"] / (1 - b2**t)) ** 0.5 + h["eps"])
                    u = u + h["weight_decay"] * p
                    ratio = p.norm() / u.norm() if h["weight_decay"] or h["always_adapt"] else p.new_ones(())
                    p -= h["lr"] * (ratio.clamp(max=1.0) if h["trust_clip"] else ratio) * u


def timm_lamb(params, **options):
    """timm's own."""
    return timms("lamb").Lamb(params, **options)


LAMBS = {
    "plain": ({"lr": 0.02, "weight_decay": 0.1}, ao.LAMB(), {}),
    "no clipping": ({"max_grad_norm": None, "betas": (0.5, 0.75), "eps": 1e-3}, ao.LAMB(), {}),
    "trust_clip": (
        {"lr": 0.1, "trust_clip": True, "bias_correction": False},
        ao.LAMB(max_ratio=5, bias_correction=False),
        {},
    ),
    "grad_averaging": ({"lr": 0.02, "grad_averaging": False}, ao.LAMB(grad_averaging=False), {}),
    "always_adapt": ({"lr": 0.1, "weight_decay": 0.0, "always_adapt": True}, ao.LAMB(), {}),
    "groups": ({"lr": 0.1}, ao.LAMB(), {"b": {"adapt": False}}),
}


@pytest.mark.parametrize("kind", [Lamb, timm_lamb])
@pytest.mark.parametrize(("options", "rule", "groups"), LAMBS.values(), ids=LAMBS)
def test_timm_goes_on_here(kind, options, rule, groups):
    params = parameters()
    others = [p for name, p in params.items() if name != "b"]
    split = [{"params": [params["b"]], "weight_decay": 0.0}, {"params": others}] if groups else list(params.values())
    theirs = kind(split, **options)
    run(theirs, params, range(3))
    copied = {name: p.detach().clone() for name, p in params.items()}
    opt = ao.Optimizer(copied, rule, groups=groups, clip_norm=7.0)
    ao.load_torch(opt, theirs.state_dict(), names=["b", "w", "unused"] if groups else None)
    assert (opt.step_count, opt.clip_norm) == (3, theirs.param_groups[0]["max_grad_norm"])
    assert opt.state["unused"]["t"] == 3  # timm counts for a whole group
    if groups:
        assert (opt.groups[0].weight_decay, opt.groups[0].overridden) == (0.0, {"adapt", "weight_decay"})
    compare(theirs, params, opt)


def adamw(**options):
    """PyTorch's and ours, over the same parameters; PyTorch's has made a step."""
    params = parameters()
    theirs = torch.optim.AdamW(params.values(), **options)
    run(theirs, params, [0])
    return theirs, params


def test_groups_and_names():
    """PyTorch's groups in another order than ours, found by its own names or by those given."""
    params = parameters()
    for named in (False, True):
        split = [("b", "unused"), ("w",)]
        made = [[(n, params[n]) if named else params[n] for n in names] for names in split]
        theirs = torch.optim.AdamW([{"params": made[0], "weight_decay": 0.0}, {"params": made[1], "lr": 0.5}], lr=0.1)
        run(theirs, params, range(3))
        copied = {name: p.detach().clone() for name, p in params.items()}
        opt = ao.Optimizer(copied, ao.AdamW(), groups={"w": {"lr": 3.0}})
        ao.load_torch(opt, theirs.state_dict(), names=None if named else ["b", "unused", "w"])
        assert [(g.lr, g.weight_decay, g.overridden) for g in opt.groups] == [
            (0.5, 0.01, {"lr", "weight_decay"}),
            (0.1, 0.0, set()),
        ]
        compare(theirs, params, opt)


@pytest.mark.parametrize("momenta", [(0.9, 0.0), (0.0, 0.9)])
@pytest.mark.parametrize("whose", [0, 1, 2])
def test_momentum_in_one_group_alone(momenta, whose):
    """And in the rule of the optimizer, which may be that of either group, or of none."""
    params = parameters()
    groups = [{"params": [params["w"]], "momentum": momenta[0]}, {"params": [params["b"], params["unused"]]}]
    theirs = torch.optim.SGD(groups, lr=0.1, momentum=momenta[1])
    run(theirs, params, range(3))
    copied = {name: p.detach().clone() for name, p in params.items()}
    rules = [ao.SGD(lr=1.0, momentum=0.1 if momentum else 0.0) for momentum in momenta]
    given = [{"w": rules[0]}, {"[!w]*": rules[1]}, {"w": rules[0], "*": rules[1]}][whose]
    opt = ao.Optimizer(copied, rules[(1, 0, 0)[whose]], groups=given)
    ao.load_torch(opt, theirs.state_dict(), names=["w", "b", "unused"])
    compare(theirs, params, opt)


def test_schedules_stay_and_state_is_replaced():
    theirs, params = adamw(lr=0.5)
    opt = ao.Optimizer(params, ao.AdamW(lr=ao.schedules.Cosine(0.1, 10), beta1=0.1))
    for _ in range(3):
        opt.step({name: torch.ones_like(p) for name, p in params.items()})
    ao.load_torch(opt, theirs.state_dict())
    assert (opt.lr, opt.beta1, opt.step_count) == (ao.schedules.Cosine(0.1, 10), 0.9, 1)
    assert opt.state["unused"]["t"] == 0
    assert not opt.state["unused"]["m"].any()
    torch.testing.assert_close(opt.state["w"]["m"], theirs.state[params["w"]]["exp_avg"], rtol=0, atol=0)
    theirs.state[params["w"]]["exp_avg"].zero_()
    assert opt.state["w"]["m"].all()


def test_half_precision_state_becomes_float32():
    params = parameters(torch.bfloat16)
    theirs = torch.optim.AdamW(params.values())
    run(theirs, params, range(2))
    opt = ao.Optimizer(params, ao.AdamW())
    ao.load_torch(opt, theirs.state_dict())
    assert opt.state["w"]["v"].dtype == torch.float32
    torch.testing.assert_close(opt.state["w"]["v"], theirs.state[params["w"]]["exp_avg_sq"].float(), rtol=0, atol=0)


def changed(change):
    def make():
        state = adamw()[0].state_dict()
        change(state, state["param_groups"][0], state["state"][0])
        return state

    return make


def stepped(kind):
    """The state of another optimizer after a step."""
    params = parameters()
    theirs = kind(params.values())
    run(theirs, params, [0])
    return theirs.state_dict()


REFUSED = {
    "maximize": (
        changed(lambda s, g, w: g.update(maximize=True)),
        ValueError,
        "no counterpart for maximize=True: an Optimizer minimizes",
    ),
    "Adam": (
        changed(lambda s, g, w: g.update(decoupled_weight_decay=False)),
        ValueError,
        "decoupled_weight_decay=False",
    ),
    "unknown": (
        changed(lambda s, g, w: g.update(caution=True)),
        ValueError,
        "caution=True in group 0, which is not known",
    ),
    "amsgrad": (
        changed(lambda s, g, w: g.update(amsgrad=True)),
        ValueError,
        "group 'all' had amsgrad=True, here False",
    ),
    "too few": (
        changed(lambda s, g, w: g["params"].pop()),
        ValueError,
        "for 2 parameters, but the optimizer has 3, ['w',",
    ),
    "a shape": (changed(lambda s, g, w: w.update(exp_avg=torch.ones(3))), ValueError, "m of 'w' is float64 (3,)"),
    "complex": (
        changed(lambda s, g, w: w.update(exp_avg=w["exp_avg"] * 1j)),
        ValueError,
        "m of 'w' is complex128 (4, 3), expected float64 (4, 3)",
    ),
    "no moment": (
        changed(lambda s, g, w: w.pop("exp_avg_sq")),
        TypeError,
        "that of parameter 0 has no exp_avg_sq or state2, but step, exp_avg",
    ),
    "a range": (
        changed(lambda s, g, w: g.update(lr=-1.0)),
        ValueError,
        "load_torch: AdamW: `lr` must be in",
    ),
    "a count": (
        changed(lambda s, g, w: w.update(step=-1)),
        ValueError,
        "t of 'w' must be an integer of at least 0, below 2**53; got -1",
    ),
    "Adagrad's": (
        lambda: stepped(torch.optim.Adagrad),
        TypeError,
        "under AdamW it needs the state of PyTorch's or bitsandbytes' AdamW, or apex's FusedAdam; group 0 has no"
        " 'betas', but lr, lr_decay, eps,",
    ),
    "Adamax's": (
        lambda: stepped(torch.optim.Adamax),
        TypeError,
        "that of parameter 0 has no exp_avg_sq or state2, but step, exp_avg, exp_inf",
    ),
    "no groups": (changed(lambda s, g, w: s.pop("param_groups")), TypeError, "got dict with the keys ['state']"),
    "a whole checkpoint": (lambda: {"model": {}, "optimizer": {}}, TypeError, "with the keys ['model', 'optimizer']"),
    "None": (lambda: None, TypeError, "must be a state_dict() of PyTorch's"),
}


@pytest.mark.parametrize(("state", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(state, error, words):
    opt = ao.Optimizer({name: p.detach().clone() for name, p in parameters().items()}, ao.AdamW())
    opt.step({name: torch.ones_like(p) for name, p in opt.params.items()})
    before = contents(opt)
    with pytest.raises(error, match=r"^load_torch: ") as caught:
        ao.load_torch(opt, state())
    assert words in str(caught.value)
    assert contents(opt) == before


def test_several_groups_without_names_are_refused():
    params = parameters()
    state = torch.optim.AdamW([{"params": [p]} for p in params.values()]).state_dict()
    with pytest.raises(ValueError, match="the state has 3 groups and no names; pass `names`"):
        ao.load_torch(ao.Optimizer(params, ao.AdamW()), state)


def test_tensors_with_different_options_must_be_in_different_groups():
    params = parameters()
    split = [{"params": [params["w"], params["unused"]]}, {"params": [params["b"]], "weight_decay": 0.0}]
    state = torch.optim.AdamW(split).state_dict()
    opt = ao.Optimizer(params, ao.AdamW())
    with pytest.raises(ValueError, match=r"in 'all', weight_decay of 'w' is 0.01, 'b' is 0.0, 'unused' is 0.01"):
        ao.load_torch(opt, state, names=["w", "unused", "b"])


@pytest.mark.parametrize("names", [["w", "b"], ["w", "w", "b"], ["w", "b", "x"]])
def test_names_must_be_those_that_there_are(names):
    theirs, params = adamw()
    with pytest.raises(ValueError, match="`names` must name the 3 tensors of PyTorch's groups"):
        ao.load_torch(ao.Optimizer(params, ao.AdamW()), theirs.state_dict(), names=names)


def test_rules_without_a_source_are_refused():
    with pytest.raises(
        TypeError,
        match=r"AdamW, Adam, SGD, RMSprop, NAdam, RAdam, Adafactor, Muon, LAMB; got an Optimizer under CAME",
    ):
        ao.load_torch(ao.Optimizer(parameters(), ao.CAME(lr=0.1)), {})
    with pytest.raises(TypeError, match="`opt` must be an Optimizer"):
        ao.load_torch(ao.AdamW(), {})


# ---- apex and bitsandbytes: dicts of their form ----------------------------------------------------------------------


def adam_state(kind=torch.optim.AdamW, **options):
    """Three steps of PyTorch's AdamW, or SGD: the parameters and the state."""
    params = {"a": torch.nn.Parameter(torch.ones(3)), "b": torch.nn.Parameter(torch.full((2, 2), 0.5))}
    opt = kind(params.values(), lr=0.1, weight_decay=0.05, **options)
    for k in range(3):
        for p in params.values():
            p.grad = torch.full_like(p, 0.5 - k) * p.detach()
        opt.step()
    return params, opt.state_dict()


def as_apex(saved):
    """The number of steps stands in the group."""
    (group,) = saved["param_groups"]
    kept = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "params")}
    state = {i: {name: x for name, x in s.items() if name != "step"} for i, s in saved["state"].items()}
    return {"state": state, "param_groups": [{**kept, "bias_correction": True, "step": 3}]}


def as_bitsandbytes(saved):
    """The arrays are called state1 and state2."""
    names = {"exp_avg": "state1", "exp_avg_sq": "state2", "momentum_buffer": "state1"}
    state = {i: {names.get(name, name): x for name, x in s.items()} for i, s in saved["state"].items()}
    known = ("lr", "betas", "eps", "weight_decay", "params", "momentum", "dampening", "nesterov")
    groups = [{k: x for k, x in g.items() if k in known} for g in saved["param_groups"]]
    return {
        "state": {i: {**s, **({"step": 3} if "step" in s else {})} for i, s in state.items()},
        "param_groups": groups,
    }


@pytest.mark.parametrize("form", [as_apex, as_bitsandbytes])
def test_adam_of_apex_and_bitsandbytes(form):
    params, saved = adam_state()
    made = [ao.Optimizer({n: p.detach().clone() for n, p in params.items()}, ao.AdamW()) for _ in range(2)]
    ao.load_torch(made[0], saved)
    ao.load_torch(made[1], form(saved))
    assert made[1].step_count == made[1].state["a"]["t"] == 3
    for opt in made:
        opt.step({n: torch.ones_like(p) for n, p in params.items()})
    assert all(torch.equal(made[0].params[n], made[1].params[n]) for n in params)
    assert made[0].rule == made[1].rule


def test_momentum_of_bitsandbytes():
    params, saved = adam_state(torch.optim.SGD, momentum=0.9)
    opt = ao.Optimizer(dict(params), ao.SGD(lr=1.0, momentum=0.5))
    ao.load_torch(opt, as_bitsandbytes(saved))
    assert opt.momentum == 0.9
    assert torch.equal(opt.state["b"]["buf"], saved["state"][1]["momentum_buffer"])


def test_lamb_of_apex():
    params, saved = adam_state()
    given = as_apex(saved)
    given["param_groups"][0] |= {"grad_averaging": True, "max_grad_norm": 1.0}
    opt = ao.Optimizer(dict(params), ao.LAMB())
    ao.load_torch(opt, given)
    assert (opt.clip_norm, opt.step_count, opt.adapt, opt.max_ratio) == (1.0, 3, True, None)


def in_codes(x, table, block=256):
    """Codes of the nearest numbers of a table, and the largest magnitude of each block, as bitsandbytes has them."""
    flat = x.reshape(-1)
    count = -(-len(flat) // block)
    padded = torch.zeros(count * block).index_copy(0, torch.arange(len(flat)), flat).reshape(count, block)
    largest = padded.abs().amax(1)
    parts = padded / largest.clamp(min=1e-30)[:, None]
    codes = (parts[..., None] - table).abs().argmin(-1).reshape(-1)[: len(flat)]
    return codes.to(torch.uint8).reshape(x.shape), largest


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("state_dtype", [None, "bfloat16", "int8"])
def test_eight_bits_of_bitsandbytes(nested, state_dtype):
    torch.manual_seed(0)
    params = {"a": torch.randn(30, 21), "b": torch.randn(300)}
    tables = torch.linspace(-1, 1, 256), torch.linspace(0, 1, 256)
    state, exact = {}, {}
    for i, (name, p) in enumerate(params.items()):
        m, v = torch.randn(p.shape), torch.rand(p.shape)
        held = {}
        for k, (x, table) in enumerate(zip((m, v), tables, strict=True), start=1):
            codes, largest = in_codes(x, table)
            held |= {f"state{k}": codes, f"qmap{k}": table, f"absmax{k}": largest}
            blocks = largest.repeat_interleave(256)[: x.numel()].reshape(x.shape)
            exact[name, k] = table[codes.long()] * blocks
        state[i] = {"step": 3, **({"__bnb_optimizer_quant_state__": held} if nested else held)}
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0, 1]}
    opt = ao.Optimizer(params, ao.AdamW(state_dtype=state_dtype))
    ao.load_torch(opt, {"state": state, "param_groups": [group]})
    opt.state_dtype = None
    near = {None: 1e-6, "bfloat16": 0.01, "int8": 0.02}[state_dtype]
    for name in params:
        assert opt.state[name]["t"] == 3
        for k, slot in ((1, "m"), (2, "v")):
            assert torch.allclose(opt.state[name][slot], exact[name, k], rtol=near, atol=near)


def test_eight_bits_with_one_scale_or_of_no_blocks_are_refused():
    params, saved = adam_state()
    given = as_bitsandbytes(saved)
    given["state"][0] |= {"qmap1": torch.zeros(256)}
    with pytest.raises(ValueError, match="load_torch: cannot read an 8-bit state with one scale per tensor"):
        ao.load_torch(ao.Optimizer(dict(params), ao.AdamW()), given)
    given["state"][0] |= {"absmax1": torch.zeros(77)}
    with pytest.raises(ValueError, match="codes cannot have 77 scales: the block sizes of"):
        ao.load_torch(ao.Optimizer(dict(params), ao.AdamW()), given)


def drawn(k):
    return torch.from_numpy(np.random.default_rng(k).standard_normal((30, 21)).astype("float32"))


def of_eight_bits(package, **options):
    """A parameter and its state after three steps of a library's AdamW in 8 bits, and the parameter after a fourth."""
    theirs = pytest.importorskip(f"{package}.optim").AdamW8bit
    w = torch.nn.Parameter(drawn(0))
    opt = theirs([w], lr=1e-3, **options)
    found = {}
    for k in range(1, 5):
        w.grad = drawn(k)
        opt.step()
        if k == 3:
            state = opt.state_dict()["state"][0]
            state = state.get("__bnb_optimizer_quant_state__", state)
            wide = {name: x.dequantize() if package == "torchao" else x for name, x in state.items()}
            found = {
                name: x.clone().numpy() for name, x in wide.items() if name != "step"
            }  # the next step writes there
            found["p"] = w.detach().clone().numpy()
    return found | {"after": w.detach().numpy()}


class Widening:
    """A tensor of torchao's, which widens itself."""

    __module__ = "torchao.optim.subclass_8bit"

    def __init__(self, x):
        self.dequantize = lambda: x


@pytest.mark.parametrize(("package", "options"), [("bitsandbytes", {"min_8bit_size": 64}), ("torchao", {})])
def test_libraries_of_eight_bits_are_gone_on_from(package, options):
    """From what they have recorded, and from themselves where they are installed."""
    made = recorded(package, f"{package} AdamW8bit", partial(of_eight_bits, package, **options))
    made = {name: torch.from_numpy(x).to(torch.float32) for name, x in made.items()}
    before, after = made.pop("p"), made.pop("after")
    for name, x in made.items():
        made[name] = Widening(x) if package == "torchao" else x.to(torch.uint8) if name[:5] == "state" else x
    state = made if package == "torchao" else {"__bnb_optimizer_quant_state__": made}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0]}
    for storage, near in ((None, 1e-8), ("int8", 4e-5)):
        opt = ao.Optimizer({"w": before.clone()}, ao.AdamW(state_dtype=storage))
        ao.load_torch(opt, {"state": {0: {"step": 3, **state}}, "param_groups": [group]})
        new = opt.step({"w": drawn(4)})["w"]
        assert opt.state["w"]["t"] == 4
        assert torch.allclose(new, after, rtol=2.5e-7, atol=near)


def test_state_in_half_precision_takes_roots():
    params, saved = adam_state()
    copies = [{n: p.detach().clone() for n, p in params.items()} for _ in range(2)]
    wide, narrow = ao.Optimizer(copies[0], ao.AdamW()), ao.Optimizer(copies[1], ao.AdamW(state_dtype="bfloat16"))
    for opt in (wide, narrow):
        ao.load_torch(opt, saved)
    root = wide.state["a"]["v"].sqrt()
    assert torch.allclose(narrow.state["a"]["v"].float(), root, rtol=0.01)
