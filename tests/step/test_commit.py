"""A step has one commit point: whatever is raised, and wherever, the state is the one before it or the one after."""

import contextlib
import signal
import threading

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.step.ready import Ready
from tests.support.engines import EVERY, SLOW, each_engine
from tests.support.entered import Fault, Raising, check, contents
from tests.support.slow import marked

# a fault in a generator that is being closed reaches nobody
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SHAPES = {"w": (9, 6), "b": (6,), "turned": (5, 4)}
OPTIONS = {
    "plain": {},
    "clip": {"clip_norm": 0.5},
    "scaled": {"loss_scale": ao.LossScale(init=4.0, window=2)},
    "stats": {"stats": True, "skip_nonfinite": True},
    "all": {"clip_norm": 0.5, "loss_scale": ao.LossScale(init=4.0, window=1), "stats": True},
}


def rules():
    """A rule that engines fuse, one with updates that run as written, and one with products."""
    return {
        "LAMB": ao.LAMB(lr=0.1, ema_decay=0.9),
        "CAME": ao.CAME(lr=0.1),
        "SOAP": ao.SOAP(lr=0.1, precondition_frequency=2),
    }


def made(engine, rule, options, accumulate, xp=np):
    """An optimizer one call before the end of its second step, and the gradients of each call."""
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    params["turned"] = np.asfortranarray(params["turned"])  # engines work on a copy
    params = {name: xp.asarray(p) for name, p in params.items()}
    opt = ao.Optimizer(params, rule, engine=engine, accumulate=accumulate, **options)
    every = [
        {name: xp.asarray(rng.standard_normal(shape).astype(np.float32)) for name, shape in SHAPES.items()}
        for _ in range(3 * accumulate)
    ]
    for grads in every[: 2 * accumulate - 1]:
        opt.step(grads)
    return opt, every[2 * accumulate - 1 :]


EACH = [
    (engine, rule, options, every) for engine in EVERY for rule in rules() for options in OPTIONS for every in (1, 3)
]
each = pytest.mark.parametrize(
    ("engine", "rule", "options", "every"),
    marked(EACH, lambda engine, rule, options, every: engine not in SLOW and rule == "LAMB" and options == "all"),
)


@each
def test_a_fault_at_any_call(engine, rule, options, every):
    new = lambda: made(engine, rules()[rule], OPTIONS[options], every)  # noqa: E731
    assert check(new, 60) == {False, True}


@each
def test_a_signal_at_any_call(engine, rule, options, every):
    """The handler of a signal may raise; SIGINT is not the only one."""

    def handler(number, frame):
        raise Fault

    number = {1: signal.SIGUSR1, 3: signal.SIGTERM}[every]
    former = signal.signal(number, handler)
    try:
        new = lambda: made(engine, rules()[rule], OPTIONS[options], every)  # noqa: E731
        found = check(new, 60, lambda: signal.raise_signal(number))
    finally:
        signal.signal(number, former)
    assert found == {False, True}


@each_engine
def test_what_breaks_off_while_it_writes_is_remembered(engine, monkeypatch):
    """Nothing may fail there. If something does, nobody goes on from a half of a step."""
    opt, (last, *_) = made(engine, rules()["LAMB"], {}, 1)
    saved, params = opt.state_dict(), {name: p.copy() for name, p in opt.params.items()}
    run = Ready.run

    def broken(ready, team):
        run(ready, team)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Ready, "run", broken)
        with pytest.raises(MemoryError):
            opt.step(last)
    for call in (lambda: opt.step(last), opt.state_dict, opt.averaged):
        with pytest.raises(RuntimeError, match=r"a step was broken off \(MemoryError: \)"):
            call()
    opt.params = params
    opt.load_state_dict(saved)
    straight, _ = made(engine, rules()["LAMB"], {}, 1)
    opt.step(last)
    straight.step(last)
    assert contents(opt) == contents(straight)


def test_a_fault_leaves_no_thread_outside():
    """What is raised while a thread is let in, or goes out, does not keep the others out for ever."""
    opt, (last, *_) = made("numpy", rules()["LAMB"], {}, 1)
    looked = []
    opt.step(last)
    with Raising() as calls:
        opt.step(last)
    places = [*range(12), *range(calls.count - 8, calls.count)]
    for at in places:
        opt.step(last)
        with contextlib.suppress(Fault), Raising(at):
            opt.step(last)
        thread = threading.Thread(target=lambda: looked.append(opt.state_dict()["step"]))
        thread.start()
        thread.join()
    assert len(looked) == len(places)


def handled(act, at):
    """The second step of an optimizer with a handler of a signal, which acts on it at a call of the step."""
    params = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    opt, errors = ao.Optimizer(params, ao.LAMB(lr=0.1, ema_decay=0.9), engine="numpy"), []
    opt.step({name: p - 1 for name, p in params.items()})

    def handler(number, frame):
        try:
            act(opt)
        except RuntimeError as error:
            errors.append(str(error))

    former = signal.signal(signal.SIGUSR1, handler)
    try:
        with Raising(at, lambda: signal.raise_signal(signal.SIGUSR1)) as calls:
            opt.step({name: p + 1 for name, p in params.items()})
    finally:
        signal.signal(signal.SIGUSR1, former)
    return opt, errors, calls.count


def test_the_handler_of_a_signal_may_save_in_the_middle_of_a_step():
    """As one of SIGTERM does: the step goes on, and what is saved is the state before or after it."""
    straight, _, count = handled(None, None)
    for at in np.linspace(0, count - 1, 40).astype(int).tolist():
        seen = []
        opt, errors, _ = handled(lambda opt, seen=seen: seen.append(opt.state_dict()), at)
        assert (errors, contents(opt)) == ([], contents(straight)), at
        assert seen[0]["step"] in (1, 2), at


INSIDE = {
    "step": lambda opt: opt.step(opt.params),
    "load_state_dict": lambda opt: opt.load_state_dict(opt.state_dict()),
    "add_group": lambda opt: opt.add_group({"new": np.ones(3, np.float32)}),
    "params": lambda opt: setattr(opt, "params", opt.params),
    "state": lambda opt: opt.state["w"].__setitem__("m", np.ones((9, 6), np.float32)),
    "storage": lambda opt: setattr(opt, "state_dtype", "int8"),
    "storage of a group": lambda opt: setattr(opt.groups[0], "state_dtype", "int8"),
}


@pytest.mark.parametrize("change", INSIDE)
def test_what_would_change_an_optimizer_is_refused_in_the_middle_of_a_step(change):
    straight, _, count = handled(None, None)
    for at in np.linspace(8, count - 40, 6).astype(int).tolist():
        opt, errors, _ = handled(INSIDE[change], at)
        assert contents(opt) == contents(straight)
        assert len(errors) == 1
        inside = "cannot change during a call of" if change.startswith("storage") else "called during Optimizer.step of"
        assert f"{inside} this Optimizer" in errors[0]


def test_hooks_may_change_an_optimizer():
    """They are called before the step has looked at anything, and when it is made."""
    opt, (last, *_) = made("numpy", rules()["LAMB"], {}, 1)
    saved = opt.state_dict()
    remove = opt.before_step(lambda opt, grads: opt.load_state_dict(saved))
    opt.after_step(lambda opt: opt.load_state_dict(saved))
    opt.step(last)
    remove()
    opt.step(last)
    assert opt.step_count == saved["step"]


def grown():
    """An optimizer of two groups, before the last of three micro-steps."""
    params = {name: np.linspace(-1, 1, np.prod(shape)).reshape(shape) for name, shape in SHAPES.items()}
    opt = ao.Optimizer(params, ao.LAMB(lr=0.1), groups={"b": {"weight_decay": 0.0}}, engine="numpy", accumulate=3)
    for _ in range(5):
        opt.step(opt.params)
    return opt


CHANGES = {
    "a group": lambda opt: opt.add_group({"new": np.ones(3)}, lr=0.3),
    "a tree": lambda opt: setattr(opt, "params", {name: p + 1.0 for name, p in opt.params.items()}),
    "a number": lambda opt: setattr(opt, "lr", 0.5),
    "a group's number": lambda opt: setattr(opt.groups[0], "lr", 0.5),
    "a group's storage": lambda opt: setattr(opt.groups[1], "state_dtype", "int8"),
    "the storage": lambda opt: setattr(opt, "state_dtype", "int8"),
    "a state": lambda opt: opt.load_state_dict(grown().state_dict() | {"step": 7}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_signal_at_any_call_of_what_changes_an_optimizer(change):
    """It is as it was, or has changed: all of it, and goes on from there."""

    def handler(number, frame):
        raise Fault

    def all_of(opt):
        saved = opt.state_dict()
        return contents(opt) | {key: repr(saved[key]) for key in ("rule", "groups")}

    def end(opt):
        opt.step(opt.params)
        return all_of(opt)

    opt = grown()
    before = all_of(opt)
    with Raising(act=int) as calls:
        change(opt)
    ends = [(before, end(grown())), (all_of(opt), end(opt))]
    former = signal.signal(signal.SIGUSR1, handler)
    try:
        for at in [*range(calls.count - 400, calls.count - 20, 16), *range(calls.count - 20, calls.count)]:
            opt = grown()
            with contextlib.suppress(Fault), Raising(at, lambda: signal.raise_signal(signal.SIGUSR1)):
                change(opt)
            assert (all_of(opt), end(opt)) in ends, at
    finally:
        signal.signal(signal.SIGUSR1, former)
