"""Groups of `arrayopt.torch` with rules of their own: one optimizer does what one for each rule does."""

import copy
import io
import pickle

import pytest
import torch

import arrayopt as ao
import arrayopt.torch as door
from tests.support import cases, refusals


def model(seed=0):
    torch.manual_seed(seed)
    layers = [torch.nn.Embedding(7, 4), torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)]
    return torch.nn.Sequential(*layers).double()


def sorts(net):
    matrices = [net[1].weight]
    return matrices, [p for p in net.parameters() if p is not net[1].weight]


def one(net, rule=door.Muon, **more):
    matrices, others = sorts(net)
    groups = [{"params": matrices, "rule": rule, "lr": 0.02, **more}, {"params": others}]
    return door.AdamW(groups, lr=0.01, engine=cases.REFERENCE)


def two(net):
    matrices, others = sorts(net)
    muon = door.Muon(matrices, lr=0.02, engine=cases.REFERENCE)
    return muon, door.AdamW(others, lr=0.01, engine=cases.REFERENCE)


def train(net, opts, steps=4, schedulers=()):
    for k in range(steps):
        torch.manual_seed(k)
        for opt in opts:
            opt.zero_grad()
        net(torch.randint(7, (5,))).square().sum().backward()
        for x in (*opts, *schedulers):
            x.step()
    return list(net.parameters())


def scheduled(opt):
    return torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6)


@pytest.mark.parametrize("rule", [door.Muon, ao.Muon], ids=["a class of the door", "a class of rules"])
def test_one_optimizer_does_what_two_do(rule):
    a, b = model(), model()
    opt, both = one(a, rule), two(b)
    found = train(a, [opt], schedulers=[scheduled(opt)])
    expected = train(b, both, schedulers=[scheduled(x) for x in both])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_rule_with_its_values():
    a, b = model(), model()
    matrices, others = sorts(a)
    groups = [{"params": matrices, "rule": ao.Muon(lr=0.02, momentum=0.5)}, {"params": others}]
    opt = door.AdamW(groups, lr=0.01, engine=cases.REFERENCE)
    other = one(b, momentum=0.5)
    assert opt.param_groups[0]["momentum"] == 0.5
    torch.testing.assert_close(train(a, [opt]), train(b, [other]), rtol=0, atol=0)


def through_a_file(net, opt):
    file = io.BytesIO()
    torch.save((net.state_dict(), opt.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other = model(1)
    other.load_state_dict(weights)
    again = one(other)
    again.load_state_dict(state)
    return other, again


WAYS = {
    "file": through_a_file,
    "deepcopy": lambda net, opt: copy.deepcopy((net, opt)),
    "pickle": lambda net, opt: pickle.loads(pickle.dumps((net, opt))),
}


@pytest.mark.parametrize("way", WAYS)
def test_copies_go_on_as_the_original(way):
    net = model()
    opt = one(net)
    train(net, [opt])
    other, again = WAYS[way](net, opt)
    assert [type(group.rule) for group in again.inner.groups] == [ao.Muon, ao.AdamW]
    torch.testing.assert_close(train(other, [again]), train(net, [opt]), rtol=0, atol=0)


def test_a_group_that_comes_later():
    net = model()
    matrices, others = sorts(net)
    opt = door.AdamW(others, lr=0.01, engine=cases.REFERENCE)
    opt.add_param_group({"params": matrices, "rule": door.Muon, "lr": 0.02})
    assert "beta1" not in opt.param_groups[1]
    assert "momentum" not in opt.param_groups[0]
    assert opt.defaults["lr"] == 0.01
    twin = model()
    torch.testing.assert_close(train(net, [opt]), train(twin, two(twin)), rtol=0, atol=0)


def test_settings_of_each_rule_are_read_and_written():
    net = model()
    opt = one(net)
    train(net, [opt])
    opt.param_groups[0]["momentum"] = 0.5
    opt.param_groups[1]["betas"] = (0.5, 0.7)
    train(net, [opt], 1)
    assert [group.rule.lr for group in opt.inner.groups] == [0.02, 0.01]
    assert (opt.inner.groups[0].rule.momentum, opt.inner.groups[1].rule.beta1) == (0.5, 0.5)


def test_gradients_that_are_scaled():
    a, b = model(), model()
    opt, twin, scaler = one(a), one(b), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for k in range(3):
        torch.manual_seed(k)
        opt.zero_grad()
        scaler.scale(a(torch.randint(7, (5,))).square().sum()).backward()
        scaler.step(opt)
        scaler.update()
    torch.testing.assert_close(list(a.parameters()), train(b, [twin], 3))


def test_what_cannot_be():
    net = model()
    opt = one(net)
    train(net, [opt])
    plain = door.AdamW(sorts(net)[0], engine=cases.REFERENCE)
    plain.add_param_group({"params": sorts(net)[1]})
    refusals.raises(lambda: plain.load_state_dict(opt.state_dict()), ValueError, "group 0 is under Muon, here None")
    with pytest.raises(TypeError, match="`rule` cannot change"):
        opt.param_groups[0]["rule"] = ao.SGD
    refusals.raises(lambda: ao.to_torch(opt), TypeError, "an optimizer of PyTorch has one rule")


def test_split():
    a, b = model(), model()
    opt = door.split(a, matrices=ao.Muon(lr=0.02), rest=ao.AdamW(lr=0.01), exclude=("3",), engine=cases.REFERENCE)
    assert [group["param_names"] for group in opt.param_groups] == [
        ["1.weight"],
        ["0.weight", "1.bias", "3.weight", "3.bias"],
    ]
    matrices, others = sorts(b)
    rules = (ao.Muon(lr=0.02), ao.AdamW(lr=0.01))
    given = zip((matrices, others), rules, strict=True)
    both = [ao.Optimizer(params, rule, engine=cases.REFERENCE) for params, rule in given]
    for k in range(3):
        torch.manual_seed(k)
        b.zero_grad()
        b(torch.randint(7, (5,))).square().sum().backward()
        for inner, params in zip(both, (matrices, others), strict=True):
            inner.step([p.grad for p in params])
    torch.testing.assert_close(train(a, [opt], 3), list(b.parameters()), rtol=0, atol=0)


def test_options_of_split():
    made = model()
    opt = door.split(made, matrices=MUON, rest=ADAMW, exclude=("3",), clip_norm=1.0, stats=True)
    train(made, [opt], 1)
    assert opt.inner.clip_norm == 1.0
    assert "update_norm" in opt.inner.stats.read()["1.weight"]
    made = model()
    released = door.split(made, matrices=MUON, rest=ADAMW, exclude=("3",), release=True)
    train(made, [released], 1)
    assert all(p.grad is None for p in made.parameters())


MUON, ADAMW = ao.Muon(lr=0.02), ao.AdamW(lr=0.01)
WRONG = [
    refusals.row("pattern", lambda: door.split(model(), matrices=MUON, rest=ADAMW, exclude=["x"]), ValueError, "['x']"),
    refusals.row("string", lambda: door.split(model(), matrices=MUON, rest=ADAMW, exclude="3"), TypeError, "['3']"),
    refusals.row("class", lambda: door.split(model(), matrices=door.Muon, rest=ADAMW), TypeError, "Muon(lr=0.02)"),
    refusals.row("model", lambda: door.split([], matrices=MUON, rest=ADAMW), TypeError, "a torch.nn.Module"),
    refusals.row(
        "option", lambda: door.split(model(), matrices=MUON, rest=ADAMW, lr=0.1), TypeError, "clip_norm", "got 'lr'"
    ),
    refusals.row("none", lambda: door.split(model()[0], matrices=MUON, rest=ADAMW), ValueError, "no matrix"),
]


@pytest.mark.parametrize(("call", "exception", "words"), WRONG)
def test_wrong_calls_of_split(call, exception, words):
    refusals.raises(call, exception, *words)


@pytest.mark.parametrize("kind", [ao.LBFGS, ao.CG])
def test_a_line_search_goes_on_where_its_state_is_loaded(kind):
    """After any step: the first one is in the middle of a line."""

    def made(start):
        p = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
        return p, door.optimizer(kind)([p], engine="array_api")

    def steps(p, opt, count):
        def closure():
            opt.zero_grad()
            value = 100.0 * (p[1] - p[0] ** 2) ** 2 + (1.0 - p[0]) ** 2
            value.backward()
            return value

        for _ in range(count):
            opt.step(closure)

    for before in (1, 2, 3):
        p, straight = made([-1.2, 1.0])
        steps(p, straight, before)
        q, resumed = made(p.detach().tolist())
        resumed.load_state_dict(straight.state_dict())
        assert resumed.state[q]["step"] == before
        steps(p, straight, 5)
        steps(q, resumed, 5)
        assert torch.equal(p, q)


@pytest.mark.parametrize("rule", [ao.Muon(lr=0.1), ao.SOAP(lr=0.1)], ids=["Muon", "SOAP"])
def test_autocast_around_a_step_rounds_no_product(rule):
    def run(enabled):
        torch.manual_seed(0)
        grads, w = torch.randn(3, 20, 30), torch.randn(20, 30)
        params, opt = {"w": w.clone()}, ao.Optimizer({"w": w}, rule, engine="array_api")
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            state = ao.init(rule, params)
            for g in grads:
                opt.step({"w": g})
                params, state = ao.update(rule, params, {"w": g}, state)
        return w.tolist(), params["w"].tolist()

    assert run(enabled=True) == run(enabled=False)
