"""`comm=` and `overlap=` of the optimizers of `arrayopt.torch`: several processes make the step of one."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch

import arrayopt as ao
import arrayopt.torch as at
from arrayopt.ranks import Ranks, gather, layout, run
from tests.support.overlapping import WAYS, Net, alone, groups, passes, together, unlike


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "ROUND", 1 << 16)
    monkeypatch.setattr(layout, "FOR_EACH", 1 << 12)
    monkeypatch.setattr(layout, "GROUPS", 1.5)  # groups of buckets, also with two ranks
    monkeypatch.setattr(gather, "ROUND", 1 << 14)
    monkeypatch.setattr(gather, "LARGE", 1 << 12)


@pytest.mark.parametrize("label", WAYS)
def test_ranks_make_the_step_of_one_process(label: str) -> None:
    options = WAYS[label]
    kept = {name: x for name, x in options.items() if name not in ("overlap", "release", "held")}
    for ranks, rule in ((1, "AdamW"), (2, "LAMB"), (3, "CAME"))[:: 1 if label == "overlap" else 2]:
        one = alone(rule, ranks, 3, **kept)
        before = {name: p.detach().clone() for name, p in one[0].named_parameters()}
        found = run(ranks, lambda comm, rule=rule, one=one: unlike(one, together(comm, rule, 3, **options)))
        assert found == [[]] * ranks
        assert all(torch.equal(p, before[name]) for name, p in one[0].named_parameters())


def test_a_state_of_ranks_goes_on_anywhere() -> None:
    two, five = alone("LAMB", 2, 2), alone("LAMB", 2, 5)

    def rank(comm: Any, state: Any) -> Any:
        net, opt = together(comm, "LAMB", 2, overlap=True)
        if state is not None:
            net.load_state_dict(two[0].state_dict())
            opt.load_state_dict(state)
        saved = copy.deepcopy(opt.state_dict())
        for step in range(2, 5):
            passes(net, comm.rank, step)
            opt.step()
        return saved, unlike(five, (net, opt))

    found = run(2, lambda comm: rank(comm, None))
    assert [wrong for _, wrong in found] == [[], []]
    assert [wrong for _, wrong in run(3, lambda comm: rank(comm, None))] != [[]] * 3  # their mean is another
    assert [wrong for _, wrong in run(2, lambda comm: rank(comm, two[1].state_dict()))] == [[], []]
    net, opt = Net(), None
    net.load_state_dict(two[0].state_dict())
    opt = at.LAMB(groups(net), lr=0.01)
    opt.load_state_dict(found[0][0])
    assert unlike(two, (net, opt)) == []


def test_a_state_that_one_rank_cannot_load_is_refused_on_all() -> None:
    def rank(comm: Any) -> str:
        net, opt = together(comm, "AdamW", 1, overlap=True)
        state = opt.state_dict()
        if comm.rank:
            state["state"][0]["m"] = torch.ones(3)
        with pytest.raises((ValueError, ao.RankError), match=r"m is torch\.float32"):
            opt.load_state_dict(state)
        passes(net, comm.rank, 1)
        opt.step()
        return unlike(alone("AdamW", 2, 2), (net, opt))

    assert run(2, rank) == [[], []]


def test_ranks_that_differ_in_what_has_gradients_are_told() -> None:
    def rank(comm: Any) -> Any:
        net, opt = together(comm, "LAMB", 1, overlap=True)
        passes(net, comm.rank, 1, extra=comm.rank == 0)
        with pytest.raises(ValueError, match=r"nothing was changed.*tensors without a gradient.*extra\.weight"):
            opt.step()
        passes(net, comm.rank, 1)
        opt.step()
        return unlike(alone("LAMB", 2, 2), (net, opt))

    assert run(2, rank) == [[], []]


def test_a_rank_without_any_gradient_is_told_and_all_without_are_a_step() -> None:
    def rank(comm: Any) -> int:
        net, opt = together(comm, "AdamW", 1, overlap=True)
        opt.wait()
        before = [p.detach().clone() for p in net.parameters()]
        opt.step()
        if comm.rank:
            passes(net, comm.rank, 1)
        with pytest.raises(ValueError, match="tensors without a gradient"):
            opt.step()
        assert all(map(torch.equal, net.parameters(), before))
        return opt.inner.step_count

    assert run(2, rank) == [2, 2]


def test_parameters_are_whole_wherever_modules_and_optimizers_show_them() -> None:
    one = alone("AdamW", 2, 1)[0].state_dict()

    def rank(comm: Any) -> None:
        for ask in ("state_dict", "wait", "inner", "state"):
            net, opt = together(comm, "AdamW", 1, overlap=True)
            assert opt._below.made._step.is_arriving
            if ask == "state_dict":
                assert all(torch.equal(x, one[name]) for name, x in net.state_dict().items())
            elif ask == "wait":
                opt.wait()
            else:
                getattr(opt, ask)
            assert not opt._below.made._step.is_arriving
            assert all(torch.equal(x, one[name]) for name, x in net.named_parameters())

    run(2, rank)


def test_only_modules_that_were_called_are_left_to_wait() -> None:
    """`aside` is never called, and the step waits for its weight."""

    def rank(comm: Any) -> set[str]:
        net, opt = together(comm, "AdamW", 1, overlap=True)
        return {name for name, p in net.named_parameters() if id(p) not in opt._release._heard}

    assert run(2, rank) == [{"aside.weight"}] * 2


def test_hooks_end_with_the_optimizer_and_copies_have_none() -> None:
    def rank(comm: Any) -> None:
        net, opt = together(comm, "AdamW", 1, overlap=True)
        other = copy.deepcopy(net)
        passes(other, comm.rank, 1)
        assert all(p.grad is not None for p in other.parameters())
        read = pickle.loads(pickle.dumps(net))
        passes(read, comm.rank, 1)
        opt.wait()
        del opt
        gc.collect()
        passes(net, comm.rank, 1)
        assert all(p.grad is not None for p in net.parameters())

    run(2, rank)


def test_copies_and_pickles() -> None:
    one = alone("LAMB", 2, 3)

    def rank(comm: Any) -> Any:
        pair = together(comm, "LAMB", 2, overlap=True)
        with pytest.raises(TypeError, match="a communicator cannot be pickled"):
            pickle.dumps(pair[1])
        net, opt = copy.deepcopy(pair)
        passes(net, comm.rank, 2)
        assert all(p.grad is None for p in net.parameters())
        opt.step()
        return unlike(one, (net, opt)), unlike(alone("LAMB", 2, 2), pair)

    assert run(2, rank) == [([], [])] * 2


def test_parameters_that_come_later() -> None:
    def rank(comm: Any, overlap: bool) -> Any:
        net, more = Net(), torch.nn.Linear(60, 60)
        torch.nn.init.ones_(more.weight)
        torch.nn.init.ones_(more.bias)
        opt = at.AdamW(groups(net), lr=0.01, comm=Ranks(comm, grads="mean"), overlap=overlap)
        passes(net, comm.rank, 0)
        opt.step()
        opt.zero_grad()
        opt.add_param_group({"params": list(more.named_parameters()), "lr": 0.1})
        for _ in range(2):
            (net(torch.tensor([1 + comm.rank])).sum() + more(net.embed.weight).square().sum()).backward()
            opt.step()
            assert not overlap or more.weight.grad is None
            opt.zero_grad()
        opt.wait()
        return [p.detach().clone() for p in (*net.parameters(), *more.parameters())]

    at_once, hooked = (run(2, lambda comm, x=x: rank(comm, x)) for x in (False, True))
    assert all(map(torch.equal, at_once[0], hooked[0]))
    assert all(map(torch.equal, hooked[1], hooked[0]))


def test_a_parameter_with_the_id_of_one_that_has_gone_is_waited_for() -> None:
    """The modules of the one before were called; nothing waits for the new one but `step`."""

    def rank(comm: Any) -> bool:
        opt = at.SGD([torch.nn.Parameter(torch.ones(50, 60))], lr=0.1, comm=Ranks(comm, grads="mean"), overlap=True)
        new = torch.nn.Parameter(torch.ones(50, 60))
        assert opt._release is not None
        opt._release._heard[id(new)] = None
        opt.param_groups[0]["params"] = [new]
        new.sum().backward()
        opt.step()
        assert opt._below is not None
        assert opt._below.made is not None
        return opt._below.made._step.is_arriving

    assert run(2, rank) == [False, False]


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
def test_a_scaler_is_refused(options: Any, unscaled: bool) -> None:
    def rank(comm: Any) -> None:
        net, opt = together(comm, "AdamW", 1, **options)
        opt.wait()
        before = [p.detach().clone() for p in net.parameters()]
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(net(torch.tensor([1])).sum()).backward()
        if unscaled:
            scaler.unscale_(opt)
        with pytest.raises(RuntimeError, match="AdamW: a GradScaler cannot be used"):
            scaler.step(opt)
        assert all(map(torch.equal, net.parameters(), before))

    run(2, rank)


def test_what_does_not_fit_is_told_at_once() -> None:
    params = Net().parameters()
    with pytest.raises(ValueError, match=r"SGD: `overlap` needs `comm`, such as"):
        at.SGD(params, lr=0.1, overlap=True)
    with pytest.raises(TypeError, match=r"SGD: `overlap` must be True, False, or the number of backward passes"):
        at.SGD(params, lr=0.1, overlap="yes")
    with pytest.raises(TypeError, match=r"`comm` must be a communicator"):
        at.SGD(params, lr=0.1, comm=3)

    def rank(comm: Any) -> None:
        net = Net()
        with pytest.raises(ValueError, match=r"leave out `release`"):
            at.SGD(net.parameters(), lr=0.1, overlap=True, release=True, comm=comm)
        with pytest.raises(
            ValueError, match=r'adds up the gradients of the processes; pass comm=Ranks\(group, grads="mean"'
        ):
            at.SGD(net.parameters(), lr=0.1, overlap=True, comm=Ranks(comm))
        with pytest.raises(ValueError, match=r"`grads='reduced'` of Ranks a step needs all"):
            at.SGD(net.parameters(), lr=0.1, release=True, comm=comm)
        at.SGD(net.parameters(), lr=0.1, overlap=True, comm=comm)  # the mean, as of DistributedDataParallel
        torch.nn.init.constant_(net.extra.weight, comm.rank)
        with pytest.raises(ValueError, match=r"nothing was changed, for the ranks do not agree: .*extra\.weight"):
            at.SGD(net.named_parameters(), lr=0.1, overlap=True, comm=comm)

    run(2, rank)


def test_parameters_arrive_where_the_optimizer_is_dropped() -> None:
    def rank(comm: Any) -> Any:
        net, opt = together(comm, "AdamW", 1, overlap=True)
        assert opt._below.made._step.is_arriving
        del opt
        return [p.detach().clone() for p in net.parameters()]

    one = list(alone("AdamW", 2, 1)[0].parameters())
    assert all(all(map(torch.equal, found, one)) for found in run(2, rank))


def test_a_loss_of_each_rank_is_a_value_for_rules_that_read_it_alone() -> None:
    def rank(comm: Any, made: Any) -> None:
        net, opt = torch.nn.Linear(3, 1), None
        torch.nn.init.ones_(net.weight)
        torch.nn.init.ones_(net.bias)
        opt = made(net.parameters(), comm=Ranks(comm, grads="mean"))

        def closure() -> torch.Tensor:
            loss = net(torch.full((1, 3), 1.0 + comm.rank)).square().sum()
            loss.backward()
            return loss

        opt.step(closure)

    run(2, lambda comm: rank(comm, at.AdamW))
    with pytest.raises(ValueError, match=r"`value` of group '0' \(all-reduce the loss, so .* is 16.0 on rank 0, 49"):
        run(2, lambda comm: rank(comm, at.optimizer(ao.CG)))


def test_a_rank_that_fails_is_an_error_of_the_others_at_the_next_call() -> None:
    errors = []

    def rank(comm: Any) -> None:
        net, opt = together(comm, "AdamW", 2, overlap=True)
        if comm.rank == 1:
            opt.wait()
            raise KeyError("mine")
        try:
            for step in range(2, 4):
                passes(net, comm.rank, step)
                opt.step()
        except ao.RankError as error:
            errors.append(error)

    with pytest.raises(KeyError, match="mine"):
        run(3, rank)
    assert len(errors) == 2
