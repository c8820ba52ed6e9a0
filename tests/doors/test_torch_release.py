"""Gradients that are let go during the backward pass."""

import copy
import gc
import pickle

import pytest
import torch

import arrayopt.torch as at


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4), torch.nn.Linear(4, 1))


def batches(n):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 8, generator=generator) for _ in range(n)]


def trained(optimizer, net, steps=4, scheduler=None):
    for x in batches(steps):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("kind", [at.LAMB, at.AdamW, at.CAME])
@pytest.mark.parametrize("maximize", [False, True])
def test_it_is_the_step_of_all_gradients(kind, maximize):
    one, other = model(), model()
    plain = kind(one.parameters(), lr=0.01, maximize=maximize)
    released = kind(other.parameters(), lr=0.01, maximize=maximize, release=True)
    schedulers = [torch.optim.lr_scheduler.StepLR(x, 2, 0.5) for x in (plain, released)]
    for a, b in zip(trained(plain, one, 4, schedulers[0]), trained(released, other, 4, schedulers[1]), strict=True):
        assert torch.equal(a, b)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert plain.state[p]["step"] == released.state[q]["step"] == 4


def test_gradients_never_exist_together():
    net = model()
    optimizer = at.AdamW(net.parameters(), lr=0.01, release=True)
    most = 0

    def count(p):
        nonlocal most
        most = max(most, sum(x.grad is not None for x in net.parameters()))

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(count)
    trained(optimizer, net, 2)
    assert most <= 1


def test_parameters_that_come_later_are_released_too():
    net, more = model(), torch.nn.Linear(1, 1)
    optimizer = at.AdamW(net.parameters(), lr=0.01, release=True)
    optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.1})
    before = copy.deepcopy(more.weight)
    more(net(batches(1)[0])).sum().backward()
    assert more.weight.grad is None
    optimizer.step()
    assert not torch.equal(before, more.weight)


def test_a_second_backward_pass_before_the_step_is_refused():
    net = model()
    optimizer = at.AdamW(net.parameters(), lr=0.01, release=True)
    net(batches(1)[0]).sum().backward()
    with pytest.raises(ValueError, match=r"'5' \(bias of Linear.* step; call step\(\) .*, or set release=2$"):
        net(batches(1)[0]).sum().backward()
    optimizer.step()


def test_what_needs_all_gradients_refuses():
    with pytest.raises(ValueError, match=r"AdamW: `release` uses .* `clip_norm` and `skip_nonfinite` a step needs all"):
        at.AdamW(model().parameters(), lr=0.01, clip_norm=1.0, skip_nonfinite=True, release=True)


def test_hooks_end_with_the_optimizer():
    net = model()
    released = at.AdamW(net.parameters(), lr=0.01, release=True)
    trained(released, net, steps=2)
    del released
    gc.collect()
    before = [p.detach().clone() for p in net.parameters()]
    trained(at.AdamW(net.parameters(), lr=0.0, weight_decay=0.0), net, steps=1)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_a_new_scaler_is_found_before_anything_is_updated():
    net = model()
    before = copy.deepcopy(list(net.parameters()))
    optimizer, scaler = at.SGD(net.parameters(), lr=0.01, release=True), torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match=r"SGD: `release` .* before a GradScaler divides them; nothing was updated"):
        scaler.scale(net(batches(1)[0]).sum()).backward()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    optimizer.zero_grad()  # the scaler lives on
    trained(optimizer, net)


def test_scalers_of_other_optimizers_and_scalers_that_are_off_do_no_harm():
    net, other = model(), model()
    off, scaler = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")
    plain, optimizer = at.SGD(other.parameters(), lr=0.01), at.SGD(net.parameters(), lr=0.01, release=True)
    unused = torch.amp.GradScaler("cpu")
    scaler.scale(other(batches(1)[0]).sum()).backward()
    scaler.step(plain)
    off.scale(net(batches(1)[0]).sum()).backward()
    off.step(optimizer)
    scaler.update()
    later = at.SGD(net.parameters(), lr=0.01, release=True)
    del optimizer
    trained(later, net)
    assert unused.is_enabled()


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_scaler_that_comes_too_late_is_told(unscaled):
    net = model()
    optimizer = at.SGD(net.parameters(), lr=0.01, release=True)
    trained(optimizer, net, steps=1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(batches(1)[0]).sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"SGD: a GradScaler cannot be used .* 6 parameters have been updated"):
        scaler.step(optimizer)


@pytest.mark.parametrize("value", ["yes", -1, 1.5])
def test_release_is_a_flag_or_a_number_of_passes(value):
    with pytest.raises(TypeError, match="AdamW: `release` must be True, False, or the number of backward passes"):
        at.AdamW(model().parameters(), lr=0.01, release=value)


def test_the_last_of_several_backward_passes_releases():
    one, other = model(), model()
    plain = at.LAMB(one.parameters(), lr=0.01)
    released = at.LAMB(other.parameters(), lr=0.01, release=3)
    for k, x in enumerate(batches(9)):
        for net in (one, other):  # the last layer takes no part in the last pass
            (net[:3](x) if k % 3 == 2 else net(x)).square().mean().backward()
        if k % 3 == 2:
            assert [p.grad is None for p in other.parameters()] == [True] * 4 + [False] * 2
            plain.step()
            plain.zero_grad()
            released.step()
            assert all(p.grad is None for p in other.parameters())
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert plain.state[p]["step"] == released.state[q]["step"] == 3


@pytest.mark.parametrize("way", ["zero_grad", "load_state_dict"])
def test_passes_of_a_step_that_is_dropped_do_not_count(way):
    """Of three passes in a step one is made; then all three are made again."""
    one, other = model(), model()
    optimizer, plain = at.AdamW(one.parameters(), lr=0.01, release=3), at.AdamW(other.parameters(), lr=0.01)
    saved = copy.deepcopy(optimizer.state_dict())
    x = batches(1)[0]
    one(x).square().mean().backward()
    if way == "load_state_dict":
        one.zero_grad()
        optimizer.load_state_dict(saved)
    else:
        optimizer.zero_grad()
    for _ in range(3):
        one(x).square().mean().backward()
        other(x).square().mean().backward()
    optimizer.step()
    plain.step()
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert optimizer.inner.step_count == 1


def test_zero_grad_does_not_take_back_what_was_used():
    net = model()
    optimizer = at.AdamW(net.parameters(), lr=0.01, release=2)
    for _ in range(2):
        net(batches(1)[0]).sum().backward()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="was already used in this step"):
        net(batches(1)[0]).sum().backward()


def test_a_parameter_at_the_address_of_one_that_has_gone_is_released():
    first, last = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.ones(2))
    optimizer = at.SGD([{"params": list(first.parameters())}, {"params": [last]}], lr=0.1, release=True)
    x, there = torch.ones(1, 3), id(last)
    optimizer.param_groups.pop()
    del last
    first(x).sum().backward()
    optimizer.step()
    others = []
    while len(others) < 5000 and (not others or id(others[-1]) != there):
        others.append(torch.nn.Parameter(torch.ones(2)))
    optimizer.add_param_group({"params": [others[-1]]})
    (first(x) * others[-1]).sum().backward()
    assert others[-1].grad is None


def test_rules_with_totals_are_told_when_they_are_made():
    with pytest.raises(ValueError, match=r"Prodigy: `release` uses .* with totals a step needs all gradients"):
        at.Prodigy(model().parameters(), release=True)
    optimizer = at.AdamW(model().parameters(), lr=0.01, release=True)
    more = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"AdamW: `release` uses .* with totals a step needs all gradients"):
        optimizer.add_param_group({"params": list(more.parameters()), "rule": at.Prodigy})
    assert len(optimizer.param_groups) == 1
    trained(optimizer, model())


def test_settings_that_change_in_the_middle_of_a_step_are_refused():
    net = model()
    optimizer = at.AdamW(net.parameters(), lr=0.01, release=True)
    net(batches(1)[0]).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.02
    with pytest.raises(RuntimeError, match=r"settings changed during a step, after 6 of its tensors"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    net(batches(1)[0]).sum().backward()
    more = torch.nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match=r"AdamW: groups have changed: an unfinished step has 6 gradients"):
        optimizer.add_param_group({"params": list(more.parameters())})
    optimizer.step()
    optimizer.add_param_group({"params": list(more.parameters())})
    assert optimizer.inner.step_count == 2


def test_copies_release_too():
    pair = model(), None
    pair = pair[0], at.AdamW(pair[0].parameters(), lr=0.01, release=True)
    trained(pair[1], pair[0], steps=1)
    net, optimizer = copy.deepcopy(pair)
    net(batches(1)[0]).sum().backward()
    assert all(p.grad is None for p in net.parameters())
    assert all(p.grad is None for p in pair[0].parameters())
    optimizer.step()
    assert (optimizer.inner.step_count, pair[1].inner.step_count) == (2, 1)


def test_the_optimizer_that_is_made_last_gets_the_gradients():
    net = model()
    former = at.AdamW(net.parameters(), lr=0.01, release=True)
    trained(former, net, steps=1)
    optimizer = at.SGD(net.parameters(), lr=0.5, release=True)
    other = copy.deepcopy(net)
    got = trained(optimizer, net, steps=2)
    for p, q in zip(got, trained(torch.optim.SGD(other.parameters(), lr=0.5), other, steps=2), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(RuntimeError, match=r"AdamW.step: an optimizer that was made later, SGD, takes the gradients"):
        former.step()
    del optimizer
    gc.collect()
    trained(former, net, steps=1)
    assert former.state[net[0].weight]["step"] == 2


def test_parameters_may_move_to_another_optimizer():
    net = model()
    first = at.SGD([{"params": net[:3].parameters()}, {"params": net[3:].parameters()}], lr=0.1, release=True)
    trained(first, net, steps=1)
    second = at.AdamW(first.param_groups.pop()["params"], lr=0.1, release=True)
    net(batches(1)[0]).square().mean().backward()
    first.step()
    second.step()
    assert all(p.grad is None for p in net.parameters())
    assert (first.state[net[0].weight]["step"], second.state[net[3].weight]["step"]) == (2, 1)


WAYS = {"state_dict": lambda x: x.state_dict(), "copy": copy.deepcopy, "pickle": pickle.dumps}


@pytest.mark.parametrize("way", WAYS)
def test_half_a_step_is_neither_saved_nor_copied(way):
    net = model()
    optimizer = at.AdamW(net.named_parameters(), lr=0.01, release=True)
    net[:3](batches(1)[0]).sum().backward()  # without the last layer
    said = r"AdamW: (state_dict|a copy): an unfinished step has 4 gradients .*; not: 3.weight, 3.bias\); call"
    with pytest.raises(RuntimeError, match=said):
        WAYS[way](optimizer)
    optimizer.step()
    WAYS[way](optimizer)


def test_a_state_that_is_loaded_in_the_middle_of_a_step_has_that_step_forgotten():
    net, other = model(), model()
    optimizer, plain = at.AdamW(net.parameters(), lr=0.01, release=True), at.AdamW(other.parameters(), lr=0.01)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    net[:3](batches(1)[0]).sum().backward()
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for p, q in zip(trained(optimizer, net), trained(plain, other), strict=True):
        assert torch.equal(p, q)
