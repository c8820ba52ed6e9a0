"""What wraps an optimizer keeps things in its state and its groups: they stay, and mean nothing to it."""

import contextlib
import copy
import functools
import io
import pickle

import pytest
import torch

import arrayopt as ao
import arrayopt.torch as door
from tests.support import cases, refusals
from tests.support.engines import STAND_IN
from tests.support.entered import Fault, Raising


def parameters(seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(n)) for n in ((4, 3), (5,))]


def give(params):
    for p in params:
        p.grad = p.detach() * 0.5 + 1.0


class Slow:
    """Lookahead as wrappers write it: slow weights in the state, a counter in the groups, a dict under a word."""

    def __init__(self, base, alpha=0.25, every=2):
        self.base, self.every = base, every
        base.defaults.update(lookahead_alpha=alpha, lookahead_step=0)
        for group in base.param_groups:
            group.setdefault("lookahead_alpha", alpha)
            group.setdefault("lookahead_step", 0)
            group.setdefault("rho", "mine")

    @torch.no_grad()
    def step(self):
        self.base.step()
        for group in self.base.param_groups:
            group["lookahead_step"] += 1
            for p in group["params"]:
                state = self.base.state[p]
                if "slow" not in state and "kept_slow" not in state:
                    state["kept_slow"] = p.detach().clone()
                    state.setdefault("kept", {})["at"] = group["lookahead_step"]
                self.base.state["wrapper"][p] = group["lookahead_step"]
                if group["lookahead_step"] % self.every == 0:
                    state["kept_slow"].lerp_(p, group["lookahead_alpha"])
                    p.copy_(state["kept_slow"])


def run(base, params, steps=5, wrapper=None):
    wrapper = wrapper or Slow(base)
    for _ in range(steps):
        give(params)
        wrapper.step()
    return wrapper


PAIRS = [("AdamW", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9})]


def both(name, options):
    a, b = parameters(), parameters()
    return (a, getattr(torch.optim, name)(a, **options)), (b, getattr(door, name)(b, **options, engine=cases.REFERENCE))


@pytest.mark.parametrize(("name", "options"), PAIRS)
def test_a_wrapper_does_what_it_does_over_pytorchs(name, options):
    (a, theirs), (b, ours) = both(name, options)
    run(theirs, a)
    run(ours, b)
    torch.testing.assert_close(a, b)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(ours.state[q]["kept_slow"], theirs.state[p]["kept_slow"])
        assert ours.state[q]["kept"] == {"at": 1}
        assert ours.state["wrapper"][q] == 5
    assert ours.param_groups[0]["lookahead_step"] == 5


def loaded(opt, params):
    """The same state, by way of a file, in an optimizer over other parameters."""
    file = io.BytesIO()
    saved = opt.state_dict()
    saved["state"].pop("wrapper")  # it holds parameters as keys
    torch.save(saved, file)
    file.seek(0)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    again = door.AdamW(others, lr=0.3, engine=cases.REFERENCE)
    again.load_state_dict(torch.load(file, weights_only=True))
    again.state["wrapper"] = {}
    return others, again


WAYS = {
    "deepcopy": lambda opt, params: copy.deepcopy((params, opt)),
    "pickle": lambda opt, params: pickle.loads(pickle.dumps((params, opt))),
    "state_dict": loaded,
}


@pytest.mark.parametrize("way", WAYS)
def test_copies_go_on_as_the_original(way):
    params = parameters()
    opt = door.AdamW(params, lr=0.1, engine=cases.REFERENCE)
    wrapper = run(opt, params, 3)
    others, again = WAYS[way](opt, params)
    for p, q in zip(params, others, strict=True):
        assert torch.equal(again.state[q]["kept_slow"], opt.state[p]["kept_slow"])
        assert again.state[q]["kept_slow"] is not opt.state[p]["kept_slow"]
        assert again.state[q]["kept"] == {"at": 1}
    assert again.param_groups[0]["rho"] == "mine"
    wrapper_again = copy.copy(wrapper)
    wrapper_again.base = again
    run(opt, params, 3, wrapper)
    run(again, others, 3, wrapper_again)
    assert all(map(torch.equal, params, others))


@pytest.mark.parametrize(("name", "options"), PAIRS)
def test_guests_go_to_pytorch_and_back(name, options):
    """What schedulers and wrappers keep in groups and states: PyTorch's `load_state_dict` replaces all of it."""
    (a, plain), (b, ours) = both(name, options)
    for opt in (plain, ours):
        opt.param_groups[0]["lr_scale"] = 0.5
        torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, 9)
        opt.state["word"] = {"x": 1}
    wrappers = [run(plain, a, 3), run(ours, b, 3)]
    there = getattr(torch.optim, name)(b)
    there.load_state_dict(ao.to_torch(ours))
    back = getattr(door, name)(b, **options, engine=cases.REFERENCE)
    for opt in (there, back):
        if opt is back:
            ao.load_torch(back, there.state_dict())
        for key in ("lr", "lr_scale", "initial_lr", "max_lr", "min_lr", "base_momentum", "lookahead_step", "rho"):
            assert opt.param_groups[0][key] == plain.param_groups[0][key], key
        assert opt.state["word"] == {"x": 1}
        wrappers[1].base = opt
        run(plain, a, 3, wrappers[0])
        run(opt, b, 3, wrappers[1])
        torch.testing.assert_close(b, a)
    assert back.state[b[0]]["kept_slow"] is not there.state[b[0]]["kept_slow"]


def test_entries_are_dicts_of_both():
    params = parameters()
    opt = door.AdamW(params, lr=0.1, engine=cases.REFERENCE)
    state = opt.state[params[0]]
    state.update(a=1, b=2)
    assert state.pop("a") == 1
    assert state.pop("a", None) is None
    assert opt.state[params[0]]["b"] == 2
    del opt.state[params[0]]["b"]
    assert set(opt.state[params[0]]) == {"step", "m", "v"}
    opt.state[params[0]] = {**opt.state[params[0]], "c": 3, "step": 4}
    assert (opt.state[params[0]]["c"], opt.state[params[0]]["step"], "c" in opt.state[params[1]]) == (3, 4, False)
    opt.state["word"]["x"] = 5
    assert list(opt.state) == [*params, "word"]
    assert opt.state.pop("word") == {"x": 5}
    assert len(opt.state) == 2
    assert opt.state.pop(params[0])["c"] == 3
    assert set(opt.state[params[0]]) == {"step", "m", "v"}
    opt.state[params[1]]["c"] = 6
    opt.add_param_group({"params": parameters(1), "adaptive": True, "k": 3})
    opt.step()
    assert opt.state[params[1]]["c"] == 6
    opt.state = {p: dict(opt.state[p]) for p in opt.state}
    assert opt.state[params[1]]["c"] == 6
    opt.state.clear()
    assert "c" not in opt.state[params[1]]


@pytest.mark.parametrize("engine", [STAND_IN, cases.REFERENCE])
@pytest.mark.parametrize("of", ["state", "state_dict", "an optimizer that was made anew"])
def test_state_whose_data_is_put_elsewhere_goes_on_from_there(engine, of):
    """As where it is brought to the host's memory and back."""
    w = parameters()[0]
    begin = w.detach().clone()
    opt = door.SGD([w], lr=1.0, momentum=0.5, engine=engine)
    w.grad = torch.zeros_like(w)
    opt.step()
    buf = opt.state[w]["buf"] if of != "state_dict" else opt.state_dict()["state"][0]["buf"]
    if of.startswith("an"):
        opt.add_param_group({"params": parameters()})
    opt.step()
    buf.data = torch.ones_like(w)
    opt.step()
    assert torch.equal(w, begin - 0.5)
    assert torch.equal(opt.state[w]["buf"], torch.full_like(w, 0.5))


def test_what_is_the_optimizers_own_is_checked_beside():
    params = parameters()
    opt = door.AdamW(params, lr=0.1, engine=cases.REFERENCE)
    kept = {**opt.state[params[0]], "guest": 1}
    for wrong in ({**kept, "m": torch.ones(7)}, {"guest": 1, "m": kept["m"]}, {**kept, "master": kept["m"]}):
        refusals.raises(lambda wrong=wrong: opt.state.__setitem__(params[0], wrong), ValueError, "state does not fit")
    assert "guest" not in opt.state[params[0]]


# ---- the wrappers themselves, where they are installed --------------------------------------------------------------


def timms(base):
    return pytest.importorskip("timm.optim").Lookahead(base, alpha=0.8, k=2)


def lookahead(base):
    return pytest.importorskip("pytorch_optimizer").Lookahead(base, k=2)


def trac(base):
    return pytest.importorskip("pytorch_optimizer").TRAC(base)


def schedule_free(base):
    return pytest.importorskip("schedulefree").ScheduleFreeWrapper(base)


WRAPPERS = [(wrap, *pair) for wrap in (timms, lookahead, trac) for pair in PAIRS]
WRAPPERS.append((schedule_free, *PAIRS[1]))  # over PyTorch's AdamW it fails


@pytest.mark.parametrize(("wrap", "name", "options"), WRAPPERS, ids=lambda x: getattr(x, "__name__", None))
def test_wrappers(wrap, name, options):
    runs = []
    for params, base in both(name, options):
        opt = wrap(base)
        if hasattr(opt, "train"):
            opt.train()
        for k in range(6):
            give(params)
            opt.step()
            if k == 2:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        runs.append(params)
    torch.testing.assert_close(*runs)


@pytest.mark.parametrize(("name", "options"), PAIRS)
def test_sharpness_aware_minimization(name, options):
    sam = pytest.importorskip("pytorch_optimizer").SAM
    runs = []
    for made, more in ((torch.optim, {}), (door, {"engine": cases.REFERENCE})):
        params = parameters()
        opt = sam(params, base_optimizer=getattr(made, name), rho=0.05, adaptive=True, **options, **more)
        for k in range(5):
            give(params)
            opt.step(lambda params=params: give(params))
            if k == 2:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        runs.append(params)
    torch.testing.assert_close(*runs)


@pytest.mark.parametrize(("name", "options"), PAIRS)
def test_averages_of_pytorch(name, options):
    runs = []
    for params, opt in both(name, options):
        model = torch.nn.ParameterList(params)
        average = torch.optim.swa_utils.AveragedModel(model)
        scheduler = torch.optim.swa_utils.SWALR(opt, swa_lr=0.01, anneal_epochs=2)
        for _ in range(4):
            give(params)
            opt.step()
            average.update_parameters(model)
            scheduler.step()
        runs.append([*params, *average.module.parameters()])
    torch.testing.assert_close(*runs)


class Ascending(torch.optim.Optimizer):
    """A wrapper that makes its base over its own groups, shares them, and writes the way it went into the state."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)

    @torch.no_grad()
    def climb(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad, alpha=group["rho"])

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base.step()


@pytest.mark.parametrize(("name", "options"), PAIRS)
def test_a_wrapper_that_shares_its_groups_and_puts_data_back(name, options):
    runs = []
    for made, more in ((torch.optim, {}), (door, {"engine": cases.REFERENCE})):
        params, base = parameters(), functools.partial(getattr(made, name), **more)
        opt = Ascending(params, base, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
        for k in range(6):
            give(params)
            opt.climb()
            give(params)
            opt.step()
            scheduler.step()
            if k == 2:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        runs.append(params)
    torch.testing.assert_close(*runs)


@pytest.mark.parametrize(("name", "options"), PAIRS)
def test_averages_that_are_swapped_in_and_out(name, options):
    runs = []
    for params, opt in both(name, options):
        shadow = [p.detach().clone() for p in params]
        for _ in range(5):
            give(params)
            opt.step()
            for s, p in zip(shadow, params, strict=True):
                s.lerp_(p.detach(), 0.5)
            kept = [p.data for p in params]
            for p, s in zip(params, shadow, strict=True):
                p.data = s.clone()  # to evaluate
            for p, x in zip(params, kept, strict=True):
                p.data = x
            for p, s in zip(params, shadow, strict=True):
                p.data.copy_(p.data * 0.5 + s * 0.5)
        runs.append([*params, *shadow])
    torch.testing.assert_close(*runs)


# a fault in a generator that is being closed, or where an object is deleted, reaches nobody
unraised = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@unraised
def test_an_error_in_a_load_leaves_all_or_nothing_of_a_state():
    """Entries of other code belong to it, as do settings and slots. The error may be that of a signal's handler."""

    def made():
        p = torch.nn.Parameter(torch.ones(3))
        opt = door.SGD([p], lr=0.1, momentum=0.9)
        p.grad = torch.ones(3)
        opt.step()
        opt.state[p]["theirs"] = torch.zeros(3)
        return p, opt

    def shown(p, opt):
        return [x.tolist() for x in opt.state[p].values() if isinstance(x, torch.Tensor)], opt.param_groups[0]["lr"]

    p, opt = made()
    opt.param_groups[0]["lr"], opt.state[p]["theirs"] = 0.5, torch.ones(3)
    opt.step()
    saved, after = copy.deepcopy(opt.state_dict()), shown(p, opt)
    p, opt = made()
    before, found = shown(p, opt), []
    with Raising() as calls:
        opt.load_state_dict(saved)
    for at in range(max(0, calls.count - 40), calls.count):
        p, opt = made()
        with contextlib.suppress(Fault), Raising(at):
            opt.load_state_dict(saved)
        found.append(shown(p, opt))
    assert [x for x in found if x not in (before, after)] == []
    assert after in found


CHANGES = {
    "a group": lambda p, opt: opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.5}),
    "a slot": lambda p, opt: opt.state[p].__setitem__("buf", torch.full((3,), 7.0)),
    "a step with another rate": lambda p, opt: (opt.param_groups[0].update(lr=0.5), opt.step()),
}


@unraised
@pytest.mark.parametrize("change", CHANGES)
def test_an_error_in_a_change_leaves_all_or_nothing_of_it(change):
    def made():
        p = torch.nn.Parameter(torch.ones(3))
        opt = door.SGD([p], lr=0.1, momentum=0.9)
        p.grad = torch.ones(3)
        opt.step()
        return p, opt

    def end(p, opt):
        opt.param_groups[0]["lr"] = 0.25
        opt.step()
        return p.tolist(), opt.state[p]["buf"].tolist(), len(opt.param_groups), opt.state_dict()["step_count"]

    p, opt = made()
    with Raising() as calls:
        CHANGES[change](p, opt)
    ends = [end(*made()), end(p, opt)]
    for at in range(calls.count - 24, calls.count):
        p, opt = made()
        with contextlib.suppress(Fault), Raising(at):
            CHANGES[change](p, opt)
        assert end(p, opt) in ends, at
