"""`arrayopt.torch`: what a PyTorch loop does with an optimizer, beside `arrayopt.Optimizer` on the same gradients."""

import copy
import dataclasses
import gc
import inspect
import io
import pickle
import re
import weakref

import pytest
import torch

import arrayopt as ao
import arrayopt.torch as door
from arrayopt.engines import registry
from arrayopt.torch.settings import check_group
from arrayopt.torch.spelled import more_of, otherwise_all, spelled
from tests.support import cases, refusals
from tests.support.slow import marked

RULES = [getattr(ao.rules, name) for name in ao.rules.__all__ if name != "Rule"]
ENGINE = cases.REFERENCE  # which compiles nothing


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Heavy(ao.Rule):
    """A rule of one's own.

    Parameters
    ----------
    lr : number
        The learning rate.
    """

    lr: ao.Hyper = ao.real("[0, inf)", 0.1)
    mu: ao.Hyper = ao.real("[0, 1)", 0.5, zero_is_off=True)

    def slots(self, xp, p):
        return {} if self.mu == 0.0 else {"b": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        b = h.mu * s["b"] + g if "b" in s else g
        return p - h.lr * b, {"b": b} if "b" in s else {}


class Mine(door.LAMB):
    """A class on top of one of ours."""


def tensors(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(n, dtype=dtype)) for n in ((4, 3), (5,), (2, 3, 2), ())]


def twins(seed=0, dtype=torch.float32):
    """Equal parameters, twice."""
    return tensors(seed, dtype), tensors(seed, dtype)


def give(step, *lists, without=()):
    """The same gradients for several lists of parameters; the gradients."""
    torch.manual_seed(100 + step)
    for many in zip(*lists, strict=True):
        g = torch.randn(many[0].shape).to(many[0].dtype)
        for p in many:
            p.grad = None if step in without else g.clone()
    return [p.grad for p in lists[0]]


def same(a, b):
    return all(torch.equal(p.detach(), q.detach()) for p, q in zip(a, b, strict=True))


def made(cls, params, **options):
    """An optimizer on the engine that compiles nothing; with a learning rate if the rule asks for one."""
    needs = cls is door.CAME or inspect.signature(cls).parameters["lr"].default is inspect.Parameter.empty
    return cls(params, **{**({"lr": 0.1} if needs else {}), **options}, engine=ENGINE)


def state_of(opt):
    return [{name: x.clone() for name, x in entry.items()} for entry in opt.state.values()]


def alike(a, b):
    """Whether two optimizers have the same state."""
    pairs = zip(state_of(a), state_of(b), strict=True)
    return all(x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in pairs)


# ---- what it computes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), cases.RUNS, ids=cases.RUN_IDS)
def test_every_rule_computes_what_it_does_elsewhere(name, options):
    a, b = twins()
    rule = getattr(ao, name)
    given = {**otherwise_all(rule, options), **options}
    given.pop("decoupled_weight_decay", None)
    if name == "SGD" and not given.get("momentum"):
        given["dampening"] = 0.0  # as in PyTorch
    one = ao.Optimizer(a, rule(**given), engine=ENGINE)
    many = (getattr(door, name, None) or door.optimizer(rule))(b, **options, engine=ENGINE)
    for step in range(3):
        one.step(give(step, a, b, without=(1,)))
        many.step()
    assert same(a, b)
    for x, y in zip(one.state.values(), many.state.values(), strict=True):
        assert y["step"] == x["t"]
        assert all(torch.equal(y[slot], x[slot]) for slot in x if slot != "t")


@pytest.mark.parametrize("engine", [pytest.param(ENGINE), *(e for (e,) in [("auto",)])])
def test_groups_have_settings_of_their_own(engine):
    a, b = twins()
    one = ao.Optimizer(a, ao.AdamW(lr=0.1), groups={"[13]": {"lr": 0.5, "weight_decay": 0.0}}, engine=engine)
    many = door.AdamW(
        [{"params": [b[1], b[3]], "lr": 0.5, "weight_decay": 0.0}, {"params": []}, {"params": [b[0], b[2]]}],
        0.1,
        engine=engine,
    )
    for step in range(3):
        one.step(give(step, a, b))
        many.step()
    assert same(a, b)
    assert [group["lr"] for group in many.param_groups] == [0.5, 0.1, 0.1]


def test_maximize_goes_up():
    a, b = twins()
    down, up = made(door.AdamW, a), made(door.AdamW, b, maximize=True)
    for step in range(2):
        give(step, a, b)
        for p in a:
            p.grad.neg_()
        down.step()
        up.step()
    assert same(a, b)
    up.param_groups[0]["maximize"] = False
    for opt in (up, down):
        give(3, a, b)
        opt.step()
    assert same(a, b)


def test_numbers_change_between_steps():
    a, b = twins()
    one = ao.Optimizer(a, ao.LAMB(), engine=ENGINE)
    many = door.LAMB(b, engine=ENGINE)
    for step, (lr, beta1, decay) in enumerate([(0.1, 0.9, 0.0), (0.2, 0.8, 0.1), (torch.tensor(0.25), 0.7, 0.0)]):
        one.lr, one.beta1, one.weight_decay = float(lr), beta1, decay
        many.param_groups[0].update({"lr": lr, "betas": (beta1, 0.999)}, weight_decay=decay)
        one.step(give(step, a, b))
        many.step()
    many.param_groups[0]["lr"].fill_(0.5)
    one.lr = 0.5
    one.step(give(3, a, b))
    many.step()
    assert same(a, b)
    assert many.inner.lr == 0.5


def test_schedules_of_this_library_work_too():
    a, b = twins()
    one = ao.Optimizer(a, ao.SGD(lr=lambda step: 1 / (step + 1)), engine=ENGINE)
    many = door.SGD(b, lambda step: 1 / (step + 1), engine=ENGINE)
    for step in range(3):
        one.step(give(step, a, b))
        many.step()
    assert same(a, b)


def test_a_closure_is_called_once_with_gradients():
    (a, b), calls = twins(), []
    one, many = ao.Optimizer(a, ao.LAMB(), engine=ENGINE), made(door.LAMB, b)

    def closure():
        calls.append(torch.is_grad_enabled())
        many.zero_grad()
        loss = sum((p**2).sum() for p in b)
        loss.backward()
        return loss

    with torch.no_grad():
        loss = many.step(closure)
    one.step([2 * p.detach() for p in a])
    assert calls == [True]
    assert loss.requires_grad
    assert same(a, b)
    many.zero_grad()
    assert all(p.grad is None for p in b)


def test_hooks_are_called():
    b, calls = tensors(), []
    opt = made(door.SGD, b)
    opt.register_step_pre_hook(lambda o, args, kwargs: calls.append("before"))
    opt.register_step_post_hook(lambda o, args, kwargs: calls.append("after"))
    opt.register_state_dict_pre_hook(lambda o: calls.append("saving"))
    opt.register_state_dict_post_hook(lambda o, saved: {**saved, "more": 1})
    opt.register_load_state_dict_pre_hook(lambda o, saved: {**saved, "step_count": 7})
    opt.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    give(0, b)
    opt.step()
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert calls == ["before", "after", "saving", "loaded"]
    assert saved["more"] == 1
    assert saved["step_count"] == 1
    assert opt.inner.step_count == 7


def test_hooks_are_called_once_around_a_step_on_top_of_ours():
    class Louder(door.SGD):
        def step(self, closure=None):
            calls.append("mine")
            return super().step(closure)

    b, calls = tensors(), []
    opt = made(Louder, b)
    opt.register_step_pre_hook(lambda o, args, kwargs: calls.append("before"))
    opt.step()
    assert calls == ["before", "mine"]


def test_options_are_those_of_the_optimizer_below():
    a, b = twins()
    one = ao.Optimizer(a, ao.LAMB(), engine=ENGINE, clip_norm=0.1, skip_nonfinite=True, stats=True)
    many = door.LAMB(b, engine=ENGINE, clip_norm=0.1, skip_nonfinite=True, stats=True)
    for step in range(2):
        one.step(give(step, a, b))
        many.step()
    assert same(a, b)
    assert many.inner.stats.read() == one.stats.read()
    give(2, b)
    b[0].grad[0, 0] = torch.nan
    many.step()
    assert same(a, b)
    many.inner.clip_norm = 0.2
    many.add_param_group({"params": torch.nn.Parameter(torch.ones(2))})
    assert copy.deepcopy(many).inner.clip_norm == 0.2


# ---- groups and classes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_class_is_made_of_a_rules_fields(rule):
    cls = getattr(door, rule.__name__)
    assert cls is door.optimizer(rule)
    assert issubclass(cls, torch.optim.Optimizer)
    assert rule.__name__ in door.__all__
    parameters = inspect.signature(cls).parameters
    assert list(parameters)[:2] == ["params", "lr"]
    theirs = otherwise_all(rule, {})
    for f in dataclasses.fields(rule):
        if any((x := spelled(rule, name)) is not None and x.field == f.name for name in parameters):
            continue
        default = inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default
        assert parameters[f.name].default == theirs.get(f.name, default)
        assert (
            rule.__base__ is not ao.Rule
            or f.name in cls.__doc__
            or f.name in {x.name for x in dataclasses.fields(ao.Rule)}
        )
    group = made(cls, [torch.nn.Parameter(torch.ones(2, 3))]).param_groups[0]
    assert group.keys() == {"params", "maximize", *more_of(rule), *(f.name for f in dataclasses.fields(rule))} - {
        "lookahead_alpha"
    }


def test_a_rule_of_ones_own():
    cls, (a, b) = door.optimizer(Heavy), twins()
    assert "The learning rate." in cls.__doc__
    one, many = ao.Optimizer(a, Heavy(mu=0.9), engine=ENGINE), cls(b, mu=0.9, engine=ENGINE)
    for step in range(2):
        one.step(give(step, a, b))
        many.step()
    assert same(a, b)
    twin = pickle.loads(pickle.dumps(many))
    assert type(twin) is cls
    assert alike(twin, many)


def test_names_of_other_libraries_stand_for_several_fields():
    b = tensors()
    opt = made(door.CAME, b, betas=(0.8, 0.9, 0.95), eps=(1e-20, 1e-10))
    group = opt.param_groups[0]
    assert (group["beta1"], group["beta2"], group["beta3"]) == (0.8, 0.9, 0.95)
    assert (group["eps1"], group["eps2"]) == (1e-20, 1e-10)
    assert group["betas"] == (0.8, 0.9, 0.95)
    assert group.get("betas") == group.setdefault("betas", None) == (0.8, 0.9, 0.95)
    assert group.get("nothing", 3) == 3
    assert "betas" in group
    assert "betas" in opt.defaults
    assert "betas" not in dict(group)
    group["betas"] = (0.5, 0.6, 0.7)
    assert opt.inner.beta2 == 0.6
    with pytest.raises(ValueError, match=r"`betas` must be \(beta1, beta2, beta3\) or \(beta1, beta2\); got 0.9"):
        group["betas"] = 0.9
    with pytest.raises(KeyError, match="momentum"):
        group["momentum"]
    adam = made(door.AdamW, [{"params": b, "betas": [0.5, 0.6]}])
    assert adam.param_groups[0]["beta2"] == 0.6
    assert "betas" not in made(door.SGD, b).param_groups[0]


def test_named_parameters_name_the_tensors():
    net = torch.nn.Linear(2, 3)
    opt = made(door.SGD, [{"params": net.named_parameters()}])
    assert opt.param_groups[0]["param_names"] == ["weight", "bias"]
    assert list(opt.inner.state) == ["weight", "bias"]
    twice = made(door.SGD, [{"params": net.named_parameters()}, {"params": torch.nn.Linear(2, 3).named_parameters()}])
    assert list(twice.inner.state) == ["0", "1", "2", "3"]  # names that are not one tensor's each are not used


def test_groups_are_added_while_training():
    a, b = twins()
    one = ao.Optimizer(a[:2], ao.LAMB(lr=0.1), engine=ENGINE)
    many = door.LAMB(b[:2], 0.1, engine=ENGINE)
    one.step(give(0, a[:2], b[:2]))
    many.step()
    one.add_group(a[2:], weight_decay=0.0)
    many.add_param_group({"params": b[2:], "weight_decay": 0.0, "note": "new"})
    assert many.param_groups[1]["note"] == "new"
    for step in (1, 2):
        one.step(give(step, a, b))
        many.step()
    assert same(a, b)
    assert [int(entry["step"]) for entry in many.state.values()] == [3, 3, 2, 2]


def test_parameters_can_be_exchanged():
    """As some frameworks do, when they shard a model that has an optimizer already."""
    a, b = twins()
    opt = made(door.SGD, a, momentum=0.9)
    give(0, a)
    opt.step()
    opt.param_groups[0]["params"] = [a[0], *b[1:]]
    give(1, a, b)
    opt.step()
    assert [int(entry["step"]) for entry in opt.state.values()] == [2, 1, 1, 1]
    opt.param_groups[0]["params"] = []
    opt.step()
    assert opt.inner is None
    assert opt.state == {}
    opt.state.clear()
    assert opt.state_dict()["state"] == {}


def test_switches_change_until_there_is_state_that_would_be_lost():
    b = tensors()
    opt = made(door.SGD, b)
    opt.param_groups[0]["momentum"] = 0.9
    assert opt.state[b[0]].keys() == {"step", "buf"}
    give(0, b)
    opt.step()
    before = state_of(opt)
    opt.param_groups[0]["momentum"] = 0.0
    words = "momentum cannot change like this while training", "momentum=lambda step: 0.0 in place of 0 has this state"
    refusals.raises(opt.step, ValueError, "SGD: group '0': ", *words)
    opt.param_groups[0].update(momentum=0.9, nesterov=True)
    assert opt.inner.rule.nesterov
    assert all(torch.equal(x["buf"], y["buf"]) for x, y in zip(before, opt.state.values(), strict=True))


def test_a_model_may_move_before_the_first_step():
    net = torch.nn.Linear(2, 3)
    opt = made(door.SGD, net.parameters(), momentum=0.9)
    net.to(torch.float64)
    assert opt.state[net.weight]["buf"].dtype is torch.float64
    net(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    opt.step()
    assert torch.equal(opt.state[net.weight]["buf"], net.weight.grad)


def test_a_model_of_another_dtype_needs_another_optimizer():
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
    opt = made(door.SGD, net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    opt.step()
    net.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected torch.float32; and 32 more;.* make a new Optimizer$") as caught:
        opt.step()
    assert len(str(caught.value)) < 800


def one():
    return [torch.nn.Parameter(torch.ones(2))]


ROWS = [
    refusals.row("no rule", lambda: door.Optimizer(one()), TypeError, "arrayopt.torch.LAMB", "optimizer(MyRule)"),
    refusals.row("a tensor", lambda: door.LAMB(torch.ones(2)), TypeError, "iterable of Tensors or dicts"),
    refusals.row("nothing", lambda: door.LAMB([]), ValueError, "empty parameter list"),
    refusals.row("no lr", lambda: door.CAME(one()), ValueError, "CAME: `lr` must be given"),
    refusals.row("unknown", lambda: door.LAMB(one(), nestrov=True), TypeError, "LAMB has no `nestrov`"),
    refusals.row("how", lambda: door.AdamW(one(), differentiable=True), TypeError, "use arrayopt.update, which is"),
    refusals.row("advice", lambda: door.LAMB(one(), momentum=0.9), TypeError, "LAMB has no `momentum`; pass beta1=0.9"),
    refusals.row("range", lambda: door.LAMB(one(), lr=-1.0), ValueError, "LAMB: `lr` must be in [0, inf); got -1.0"),
    refusals.row("vector", lambda: door.LAMB(one(), torch.ones(2)), ValueError, "`lr` as a tensor must have one"),
    refusals.row(
        "maximize", lambda: door.LAMB(one(), maximize=1), TypeError, "`maximize` must be True or False; got 1"
    ),
    refusals.row("betas", lambda: door.LAMB(one(), betas=0.9), ValueError, "`betas` must be (beta1, beta2); got 0.9"),
    refusals.row("engine", lambda: door.LAMB(one(), engine="warp"), ValueError, "`engine` must be 'auto' or one of"),
    refusals.row("position", lambda: door.LAMB(one(), 0.1, (0.9, 0.99)), TypeError, "by name, such as betas=("),
    refusals.row(
        "positions", lambda: door.SGD(one(), *[0.1] * 6), TypeError, "momentum, dampening, weight_decay, nest"
    ),
    refusals.row("both", lambda: door.SGD(one(), 0.1, 0.9, momentum=0.9), TypeError, "`momentum` is passed twice"),
    refusals.row("names", lambda: door.Adafactor(one(), d=1.0, clip_threshold=2.0), TypeError, "pass `d` or `clip_thr"),
    refusals.row("twice", lambda: door.AdamW(one(), betas=(0.9, 0.99), beta1=0.5), TypeError, "`betas` or `beta1`"),
    refusals.row("two", lambda: door.AdamW(one(), eps=(1e-8, 1e-9)), ValueError, "`eps` must be one number for AdamW"),
    refusals.row(
        "None",
        lambda: door.Adafactor(one(), relative_step=True, eps=(None, 1e-3)),
        TypeError,
        "with variant='pytorch'",
    ),
    refusals.row("patterns", lambda: door.LAMB(one(), groups={}), TypeError, "pass group dicts: [{"),
    refusals.row("mask", lambda: door.LAMB(one(), mask=None), TypeError, "pass group dicts: [{"),
    refusals.row("mean", lambda: door.LAMB(one(), accumulate=2), TypeError, "call backward() several times"),
    refusals.row("scale", lambda: door.LAMB(one(), loss_scale=2.0), TypeError, "use torch.amp.GradScaler"),
    refusals.row("a vector", lambda: door.Muon(one(), 0.1), ValueError, "not a matrix; give vectors a group"),
    refusals.row("integers", lambda: door.LAMB([torch.ones(2, dtype=torch.int64)]), TypeError, "floating-point"),
    refusals.row("no state", lambda: door.LAMB(one()).load_state_dict({}), ValueError, "no 'param_groups' and no 'st"),
    refusals.row("class", lambda: door.optimizer(3), TypeError, "`rule` must be a class of rules", "got 3"),
    refusals.row("base", lambda: door.optimizer(ao.Rule), TypeError, "`rule` must be a class of rules"),
]


@pytest.mark.parametrize(("call", "exception", "words"), ROWS)
def test_wrong_calls(call, exception, words):
    refusals.raises(call, exception, *words)


KEYS = [
    ({"rule": "SGD"}, "`rule` of a parameter group must be a rule such as Muon; got 'SGD'"),
    ({"clip_norm": 1.0}, "it is an option: AdamW(params, clip_norm=...)"),
    ({"max_grad_norm": 1.0}, "it is the option clip_norm here"),
    ({"lrr": 1.0}, "did you mean `lr`?"),
    ({"learning_rate": 1.0}, "pass lr=1.0"),
    ({"differentiable": True}, "use arrayopt.update, which is"),
    ({"betas": (0.9, 0.99), "beta1": 0.5}, "pass `betas` or `beta1`, not both"),
]


@pytest.mark.parametrize(("keys", "words"), KEYS, ids=[next(iter(keys)) for keys, _ in KEYS])
def test_wrong_keys_of_groups(keys, words):
    opt, known = made(door.AdamW, one()), {"params": one()}
    refusals.raises(lambda: door.AdamW([known | keys]), TypeError, words)
    refusals.raises(lambda: opt.add_param_group(known | keys), TypeError, words)
    assert len(opt.param_groups) == 1


def test_a_wrong_key_that_is_written_later_is_an_error_in_the_next_step():
    a, b = twins()
    opt, twin = made(door.AdamW, a), made(door.AdamW, b)
    for step in range(2):
        give(step, a, b)
        opt.param_groups[0]["engine"] = 5.0
        for _ in range(2):
            refusals.raises(opt.step, TypeError, "AdamW: a parameter group has no `engine`; it is an")
        del opt.param_groups[0]["engine"]
        opt.step()
        twin.step()
    assert same(a, b)
    assert alike(opt, twin)


@pytest.mark.parametrize("rule", RULES)
def test_schedulers_write_keys_of_their_own(rule):
    written = ["initial_lr", "max_lr", "min_lr", "base_lr", "base_momentum", "max_momentum", "swa_lr", "lr_scale"]
    check_group(rule.__name__, rule, dict.fromkeys([*written, "param_names"], 0.1), {})


def test_groups_may_have_keys_of_ones_own():
    theirs = torch.optim.AdamW(one(), lr=0.5, fused=None, foreach=False).param_groups[0]
    own = "name lr_scale lr_mult layer layer_id tag initial_lr max_lr min_lr base_momentum swa_lr wd_mult group_name"
    opt = door.AdamW([{**theirs, **dict.fromkeys(own.split(), 3)}], fused=False, foreach=None, engine=ENGINE)
    assert opt.param_groups[0].keys() >= set(own.split())
    assert opt.inner.lr == 0.5


def test_plain_dicts_become_groups():
    b = tensors()
    opt = made(door.AdamW, b)
    opt.param_groups = [{**group, "lr": 0.25} for group in opt.param_groups]
    opt.param_groups[0]["betas"] = (0.5, 0.6)
    give(0, b)
    opt.step()
    assert (opt.inner.lr, opt.inner.beta1, opt.inner.beta2) == (0.25, 0.5, 0.6)
    group = opt.param_groups[0]
    for twin in (copy.copy(group), group.copy(), copy.deepcopy(group)):
        assert twin["betas"] == twin.pop("betas") == (0.5, 0.6)
        assert not twin.keys() & {"beta1", "beta2"}
        assert twin.pop("betas", None) is None
    assert group["betas"] == (0.5, 0.6)


def test_a_field_of_the_name_of_an_option_is_refused():
    @dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
    class Greedy(Heavy):
        maximize: ao.Hyper = ao.real("[0, inf)", 0.1)

    refusals.raises(lambda: door.optimizer(Greedy), TypeError, "Greedy must not have a field 'maximize'")


def test_what_fails_changes_nothing():
    a, b = twins()
    opt, twin = made(door.LAMB, a), made(door.LAMB, b)
    give(0, a, b)
    opt.step()
    twin.step()
    opt.param_groups[0]["lr"] = -1.0
    refusals.raises(opt.step, ValueError, "got -1.0")
    opt.param_groups[0]["lr"] = twin.param_groups[0]["lr"]
    bad = {"params": [torch.nn.Parameter(torch.ones(2))], "lr": -1.0}
    refusals.raises(lambda: opt.add_param_group(bad), ValueError, "got -1.0")
    del opt.param_groups[0]["beta1"]
    refusals.raises(opt.step, ValueError, "`beta1` must be given; a parameter group has none")
    opt.param_groups[0]["beta1"] = 0.9
    saved = opt.state_dict()
    for change, words in [
        ({"state": {0: {"step": 1}}}, "parameter 0: expected step, m, v; got step"),
        ({"state": {0: {**saved["state"][0], "m": torch.ones(7)}}}, "parameter 0: m is torch.float32 (7,)"),
        ({"state": {0: {**saved["state"][0], "m": 3}}}, "parameter 0: m must be a tensor; got int"),
        ({"state": {0: {**saved["state"][0], "step": 0.5}}}, "parameter 0: step must be an integer"),
        ({"state": {0: 3}}, "parameter 0: expected step, m, v; got int"),
        ({"state": {9: saved["state"][0]}}, "the state has [9]"),
        ({"param_groups": []}, "the groups of the state have [] parameters, but those of the optimizer have [4]"),
        ({"param_groups": [{**saved["param_groups"][0], "lr": -1.0}]}, "`lr` must be in"),
    ]:
        refusals.raises(lambda change=change: opt.load_state_dict({**saved, **change}), ValueError, words)
    give(1, a, b)
    opt.step()
    twin.step()
    assert same(a, b)
    assert alike(opt, twin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_written_from_outside_stay(dtype):
    """As by ``load_state_dict`` of a model or ``torch.nn.init``: their masters follow in the next step, no others."""
    b = tensors(dtype=dtype)
    opt = made(door.SGD, b, lr=1e-5)
    one = ao.Optimizer(b[3], ao.SGD(lr=1e-5), engine=ENGINE)
    torch.nn.init.constant_(b[0], 3.0)  # before the first step
    give(0, b)
    opt.step()
    assert torch.allclose(b[0], torch.full((4, 3), 3.0, dtype=dtype))
    kept = [entry["master"].clone() for entry in opt.state.values()]
    with torch.no_grad():
        b[1][0] = 7.0
    b[2].data[0] = 9.0
    others = copy.deepcopy((b, opt)), pickle.loads(pickle.dumps((b, opt)))
    for params, each in ((b, opt), *others):
        for p in params:
            p.grad = torch.zeros_like(p)
        each.step()
        now = [each.state[p]["master"] for p in params]
        assert now[1][0] == 7.0
        assert torch.all(now[2][0] == 9.0)
        assert torch.equal(now[1][1:], kept[1][1:])  # with the bits below the parameter's
        assert torch.equal(now[2][1:], kept[2][1:])
        assert all(torch.equal(now[i], kept[i]) for i in (0, 3))
    with torch.no_grad():
        b[3].fill_(5.0)
    one.step(torch.ones((), dtype=dtype))
    assert one.state["param"]["master"] == torch.tensor(5.0) - 1e-5


# ---- state -----------------------------------------------------------------------------------------------------------


def test_state_is_what_steps_write_and_can_be_set():
    b = tensors()
    opt = made(door.SGD, b, momentum=0.9)
    entry = opt.state[b[0]]
    give(0, b)
    opt.step()
    assert torch.equal(entry["buf"], b[0].grad)
    entry["buf"] = torch.ones(4, 3)
    opt.state[b[1]] = {"step": 5, "buf": torch.zeros(5, dtype=torch.float64)}
    assert torch.equal(opt.state[b[0]]["buf"], torch.ones(4, 3))
    assert opt.state[b[1]]["step"] == 5
    assert opt.state[b[1]]["buf"].dtype is torch.float32
    entry["buf"].zero_()
    assert torch.equal(opt.state[b[0]]["buf"], torch.zeros(4, 3))
    assert len(opt.state) == 4
    assert "buf" in repr(opt.state)
    with pytest.raises(KeyError):
        opt.state[torch.ones(2)] = {}
    opt.state.clear()
    assert all(entry["step"] == 0 and not entry["buf"].any() for entry in opt.state.values())
    give(1, b)
    opt.step()
    opt.state = {b[0]: dict(opt.state[b[0]])}
    assert [int(entry["step"]) for entry in opt.state.values()] == [1, 0, 0, 0]


def test_what_is_set_below_is_taken_up_or_refused():
    b = tensors()
    opt = made(door.AdamW, [{"params": b[:1]}, {"params": b[1:], "lr": 0.5}])
    opt.inner.groups[1].lr = 0.25
    give(0, b)
    opt.step()
    assert [group["lr"] for group in opt.param_groups] == [1e-3, 0.25]
    kept = [p.detach().clone() for p in b]
    opt.inner.lr = 0.75
    refusals.raises(opt.step, ValueError, "AdamW: settings were changed on `inner`; set them in `param_groups`")
    assert same(kept, b)
    opt.step()
    assert opt.inner.now() == {"0": 1e-3, "1": 0.25}


def test_state_moves_to_another_parameter():
    """As where points are added to a cloud, and pruned."""
    a = tensors()
    opt = made(door.SGD, a, momentum=0.9)
    give(0, a)
    opt.step()
    stored = opt.state.pop(a[1])
    assert opt.state[a[1]]["step"] == 0
    stored["buf"] = torch.cat([stored["buf"], torch.ones(2)])
    new = torch.nn.Parameter(torch.zeros(7))
    opt.param_groups[0]["params"][1] = new
    opt.state[new] = stored
    assert torch.equal(opt.state.setdefault(new, {})["buf"], stored["buf"])
    assert [int(entry["step"]) for entry in opt.state.values()] == [1, 1, 1, 1]
    del opt.state[new]
    assert [int(entry["step"]) for entry in opt.state.values()] == [1, 0, 1, 1]
    assert opt.state.pop(a[1], None) is None
    with pytest.raises(KeyError):
        opt.state.pop(a[1])


@pytest.mark.parametrize("how", ["straight", "loaded"])
def test_a_parameter_that_has_left_is_let_go(how):
    """It may be large, as a cloud of points is, and many follow each other."""
    a = tensors()
    opt = made(door.SGD, a, momentum=0.9)
    give(0, a)
    opt.step()
    if how == "loaded":
        opt.load_state_dict(opt.state_dict())
    stored = opt.state.pop(a[1])
    opt.param_groups[0]["params"][1] = new = torch.nn.Parameter(torch.zeros(7))
    opt.state[new] = {**stored, "buf": torch.zeros(7)}
    gone = weakref.ref(a.pop(1))
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("groups", [1, 2])
def test_states_of_pytorchs_optimizers_are_exchanged(groups):
    """With their settings: there is one truth about them."""
    a, b = twins(dtype=torch.float64)
    split = [lambda ps: [{"params": ps}], lambda ps: [{"params": ps[:1], "lr": 0.5}, {"params": ps[1:]}]][groups - 1]
    theirs, ours = torch.optim.AdamW(split(a), lr=0.25), made(door.AdamW, split(b))
    give(0, a)
    theirs.step()
    ao.load_torch(ours, theirs.state_dict())
    assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in theirs.param_groups]
    assert all(torch.equal(ours.state[q]["m"], theirs.state[p]["exp_avg"]) for p, q in zip(a, b, strict=True))
    with torch.no_grad():
        [q.copy_(p) for p, q in zip(a, b, strict=True)]
    give(1, a, b)
    theirs.step()
    ours.step()
    assert all(torch.allclose(p, q, rtol=1e-12) for p, q in zip(a, b, strict=True))
    back = torch.optim.AdamW(split(b))
    back.load_state_dict(ao.to_torch(ours))
    assert [group["lr"] for group in back.param_groups] == [group["lr"] for group in theirs.param_groups]
    assert all(torch.equal(back.state[q]["exp_avg"], ours.state[q]["m"]) for q in b)
    refusals.raises(
        lambda: ao.load_torch(theirs, {}), TypeError, "`opt` must be an Optimizer with the rule", "; got AdamW"
    )


def test_both_go_up_or_down():
    b = tensors()
    split = [{"params": b[:2], "maximize": True}, {"params": b[2:]}]
    theirs, ours = torch.optim.AdamW(split, lr=0.1), made(door.AdamW, [dict(group) for group in split])
    give(0, b)
    theirs.step()
    ao.load_torch(ours, theirs.state_dict())
    assert [group["maximize"] for group in ours.param_groups] == [True, False]
    assert all(torch.equal(ours.state[p]["m"], theirs.state[p]["exp_avg"]) for p in b)
    assert [group["maximize"] for group in ao.to_torch(ours)["param_groups"]] == [True, False]
    ours.param_groups[1]["maximize"] = True
    words = "set `maximize` in param_groups as it is in the state: '2' has maximize=False, here True; '3' has"
    refusals.raises(lambda: ao.load_torch(ours, theirs.state_dict()), ValueError, words)


DTYPES = marked([(torch.float32,), (torch.bfloat16,), (torch.float64,)], lambda dtype: dtype is not torch.float64)


def test_a_state_of_other_settings_is_refused():
    a = tensors()
    opt, lamb = made(door.AdamW, a, amsgrad=True), made(door.LAMB, a)
    with pytest.raises(ValueError, match="LAMB: the state is for AdamW, but the rule here is LAMB"):
        lamb.load_state_dict(made(door.AdamW, a).state_dict())
    with pytest.raises(ValueError, match="group 0 had amsgrad=False, here True"):
        opt.load_state_dict(made(door.AdamW, a, lr=0.7).state_dict())
    assert (opt.inner.amsgrad, opt.inner.lr) == (True, 1e-3)
    give(0, a)
    theirs = torch.optim.AdamW(a)
    theirs.step()
    with pytest.raises(ValueError, match=r"from an optimizer of PyTorch.* use arrayopt.load_torch\(opt, state\)$"):
        opt.load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match=r"state_dtype=None, here 'int8'\. First set param_groups\[i\]\['state"):
        made(door.AdamW, a, state_dtype="int8").load_state_dict(made(door.AdamW, a).state_dict())
    older = made(door.AdamW, a, amsgrad=True, lr=0.5).state_dict()
    del older["rule"]
    opt.load_state_dict(older)
    assert opt.inner.lr == 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["file", "deepcopy", "pickle"])
def test_a_resumed_run_is_the_straight_one(how, dtype):
    """With masters and averages, which PyTorch's own load would round to the dtype of the parameters."""
    a = tensors(dtype=dtype)
    options = {"lr": 0.1, "ema_decay": 0.5, "betas": (0.5, 0.7), "clip_norm": 1.0}
    opt = made(door.LAMB, [{"params": a[:2]}, {"params": a[2:], "lr": lambda s: 0.1 + s}], **options)
    if how != "deepcopy":
        opt.param_groups[1]["lr"] = 0.2
    for step in range(2):
        give(step, a)
        opt.step()
    if how == "file":
        b, buffer = [torch.nn.Parameter(p.detach().clone()) for p in a], io.BytesIO()
        torch.save(opt.state_dict(), buffer)
        buffer.seek(0)
        twin = made(door.LAMB, [{"params": b[:2]}, {"params": b[2:]}], ema_decay=0.5, clip_norm=1.0)
        twin.load_state_dict(torch.load(buffer, weights_only=True))
    else:
        b, twin = copy.deepcopy((a, opt)) if how == "deepcopy" else pickle.loads(pickle.dumps((a, opt)))
    assert alike(opt, twin)
    for step in range(2, 4):
        give(step, a, b)
        opt.step()
        twin.step()
    assert same(a, b)
    assert alike(opt, twin)
    assert twin.inner.step_count == 4


def test_a_state_without_the_number_of_steps():
    """Other software takes states apart, and keeps what it knows."""
    a = tensors()
    opt = made(door.SGD, a)
    for step in range(3):
        give(step, a)
        opt.step()
    saved = opt.state_dict()
    twin = made(door.SGD, a)
    twin.load_state_dict({"state": saved["state"], "param_groups": saved["param_groups"]})
    assert twin.inner.step_count == 3
    twin.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1, 2, 3]}]})
    assert [int(entry["step"]) for entry in twin.state.values()] == [0] * 4


def test_a_class_on_top_of_ours_is_pickled_as_what_it_is():
    opt = Mine(tensors(), engine=ENGINE)
    assert type(pickle.loads(pickle.dumps(opt))) is Mine
    assert type(copy.deepcopy(opt)) is Mine


# ---- loss scales, compiled code --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["step", "unscale_", "clip_norm"])
def test_grad_scaler(how):
    a, b = twins()
    options = {"clip_norm": 1.0} if how == "clip_norm" else {}
    one = ao.Optimizer(a, ao.LAMB(lr=0.1), engine=ENGINE, **options)
    many = made(door.LAMB, b, lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for step in range(4):
        loss = sum((p**2).sum() * (step + 1) for p in b)
        many.zero_grad()
        scaler.scale(loss).backward()
        if step == 1:
            b[2].grad[0, 0, 0] = torch.inf
        else:
            one.step([2 * p.detach() * (step + 1) for p in a])
        if how == "unscale_":
            scaler.unscale_(many)
        scaler.step(many)
        scaler.update()
    assert all(torch.allclose(p, q, rtol=1e-6, atol=1e-7) for p, q in zip(a, b, strict=True))
    assert [int(entry["step"]) for entry in many.state.values()] == [3] * 4
    assert scaler.get_scale() == 2.0**8
    assert many._step_supports_amp_scaling == (how != "clip_norm")


def test_compiled_code_steps_quietly(capfd):
    a, b = twins()
    one, many = ao.Optimizer(a, ao.LAMB(lr=0.1), engine=ENGINE), made(door.LAMB, b, lr=0.1)

    def train():
        many.zero_grad()
        sum((p**2).sum() for p in b).backward()
        many.step()

    compiled = torch.compile(train, backend="eager")
    for _ in range(3):
        compiled()
        one.step([2 * p.detach() for p in a])
    torch._dynamo.reset()
    assert all(torch.allclose(p, q) for p, q in zip(a, b, strict=True))
    assert int(many.state[b[0]]["step"]) == 3
    assert capfd.readouterr() == ("", "")


def test_it_shows_what_it_offers():
    rules = {name for name in ao.rules.__all__ if name != "Rule"}
    assert set(dir(door)) == {*rules, "Optimizer", "optimizer", "overlap", "split"}


def test_it_is_not_imported_with_the_package():
    import subprocess
    import sys

    code = "import sys, arrayopt; assert 'torch' not in sys.modules and 'arrayopt.torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_engines_say_who_they_are():
    many = door.LAMB(tensors(), ema_decay=0.9, state_dtype="int8")
    told = many.inner.explain()
    assert re.search(r"engine (\w+)", told).group(1) in registry.ENGINES
    assert "\n    keep their precision: ema (a copy of the parameter)\n" in told


def test_what_would_have_no_effect_is_refused():
    """`opt.lr = 0.1` is how an `arrayopt.Optimizer` is set; PyTorch's keeps it in groups."""
    opt = door.LAMB(one(), 0.1)
    with pytest.raises(AttributeError, match=r"'LAMB' object has no attribute 'lr'; read and set opt.param_groups"):
        opt.lr = 0.2
    with pytest.raises(AttributeError, match=r"it is opt.inner.clip_norm here"):
        opt.clip_norm = 1.0
    with pytest.raises(TypeError, match=r"LAMB.step: gradients are in p.grad; `closure` must be a function; got list"):
        opt.step([torch.ones(2)])
    with pytest.raises(KeyError, match="exp_avg; the state has step, m, v"):
        opt.state[opt.param_groups[0]["params"][0]]["exp_avg"]
    mine = Mine(one(), 0.1)
    mine.lr = "of a class on top"


def test_hooks_and_monitors_of_the_inner_optimizer_go_on():
    """It is another one after parameters have come, or a state has been loaded."""
    (w,), steps = one(), []
    opt = door.LAMB([w], 0.1, engine=ENGINE)
    with pytest.raises(TypeError, match=r"must be an Optimizer; got LAMB; pass opt.inner"):
        ao.Monitor(opt)
    monitor, remove = ao.Monitor(opt.inner), opt.inner.after_step(lambda inner: steps.append(inner.step_count))
    changes = [
        lambda: None,
        lambda: opt.add_param_group({"params": one()}),
        lambda: opt.load_state_dict(opt.state_dict()),
    ]
    for change in changes:
        change()
        w.grad = torch.ones_like(w)
        opt.step()
    remove()
    opt.step()
    assert steps == [1, 2, 3]
    assert [row["step"] for row in monitor.read()] == [0, 1, 2, 3]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, door.SGD])
def test_a_copy_has_no_hooks_as_one_of_pytorch_has_none(kind, way):
    called = []
    w = torch.nn.Parameter(torch.ones(2))
    opt = kind([w], lr=0.1)
    opt.register_step_post_hook(lambda *args: called.append("outside"))
    if kind is door.SGD:
        opt.inner.after_step(lambda inner: called.append("inside"))
    other = way(opt)
    other.step()
    assert called == []
    opt.step()
    assert called[-1:] == ["outside"]


def test_skipped_steps_are_counted_on_with_new_groups_and_after_a_load():
    (w,) = one()
    opt = door.SGD([w], 0.1, engine=ENGINE, skip_nonfinite=True)
    for k in range(2):
        w.grad = torch.full_like(w, torch.nan)
        opt.step()
        opt.add_param_group({"params": one()})
        opt.load_state_dict(opt.state_dict())
        assert int(opt.inner.stats.skipped) == k + 1
