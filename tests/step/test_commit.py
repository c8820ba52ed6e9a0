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
    """What is raised while a thread is let in does not keep the others out for ever."""
    opt, (last, *_) = made("numpy", rules()["LAMB"], {}, 1)
    looked = []
    for at in range(12):
        with contextlib.suppress(Fault), Raising(at):
            opt.step(last)
        thread = threading.Thread(target=lambda: looked.append(opt.state_dict()["step"]))
        thread.start()
        thread.join()
    assert len(looked) == 12


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
