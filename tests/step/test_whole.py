"""A step is whole: Ctrl-C waits for its end, and no other thread comes between."""

import copy
import os
import pickle
import signal
import threading

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines import batch
from arrayopt.step import step
from tests.support.engines import each_fused

SHAPES = {"w": (40, 30), "b": (30,), "h": (7,)}
DTYPES = {"w": "f4", "b": "f8", "h": "f2"}


def made(engine):
    """An optimizer of several batches, and gradients."""
    params = {name: np.ones(shape, DTYPES[name]) for name, shape in SHAPES.items()}
    rule = ao.CAME(lr=0.1) if engine == "numpy" else ao.AdamW(lr=0.1)
    opt = ao.Optimizer(params, rule, engine=engine, loss_scale=ao.LossScale(init=4.0, window=1))
    return opt, {name: np.full_like(p, 2.0) for name, p in params.items()}


def state(opt):
    """All that a step changes."""
    numbers = opt.step_count, opt.loss_scale, {name: x["t"] for name, x in opt.state.items()}
    return numbers, {name: p.tobytes() for name, p in opt.params.items()}


@each_fused
@pytest.mark.parametrize("when", [1, 2, 3])
def test_an_interrupt_waits_until_the_step_is_whole(engine, when, monkeypatch):
    straight, grads = made(engine)
    for _ in range(3):
        straight.step(grads)
    opt, grads = made(engine)
    opt.step(grads)
    launches = []

    def written(batch, rows):
        launches.extend([batch] * ("p" in batch.plan.written))  # others measure gradients
        if len(launches) == when and "p" in batch.plan.written:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(batch.Batch, "written", written)
    with pytest.raises(KeyboardInterrupt):
        opt.step(grads)
    assert len(launches) == 3
    opt.step(grads)
    assert state(opt) == state(straight)


def test_an_interrupt_before_the_first_write_changes_nothing(monkeypatch):
    opt, grads = made("numpy")
    opt.step(grads)
    before = state(opt)
    locate = batch.Batch.locate

    def interrupted(batch):
        locate(batch)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(batch.Batch, "locate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opt.step(grads)
    assert state(opt) == before


@pytest.mark.parametrize("every", [1, 2])
def test_a_gradient_that_was_given_is_noted_before_an_interrupt(every, monkeypatch):
    class Interrupted(step.Commit):
        def __enter__(self):
            super().__enter__()
            os.kill(os.getpid(), signal.SIGINT)

    opt = ao.Optimizer({"w": np.ones(2), "b": np.zeros(2)}, ao.SGD(lr=0.1), engine="numpy", accumulate=every)
    monkeypatch.setattr(step, "Commit", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        opt.give("w", np.ones(2))
    with pytest.raises(RuntimeError, match=r"an unfinished step has 1 gradient "):
        opt.state_dict()
    with pytest.raises(ValueError, match="'w' was already given"):
        opt.give("w", np.ones(2))


def test_two_threads_in_one_optimizer():
    """Each step that is made is made whole; each that is not says why."""
    opt, grads = made("numpy")
    refused, begin = [], threading.Barrier(4)

    def steps():
        begin.wait()
        for _ in range(50):
            try:
                opt.step(grads)
            except RuntimeError as error:
                refused.append(str(error))

    pool = [threading.Thread(target=steps) for _ in range(4)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    straight, _ = made("numpy")
    for _ in range(200 - len(refused)):
        straight.step(grads)
    assert state(opt) == state(straight)
    assert all(words.startswith("Optimizer.step: another thread is in Optimizer.step") for words in refused)


def test_a_hook_may_use_the_optimizer_that_called_it(tmp_path):
    opt, grads = made("numpy")
    opt.after_step(lambda opt: opt.save(tmp_path / "x"))
    opt.step(grads)
    again, _ = made("numpy")
    again.load(tmp_path / "x")
    assert state(again) == state(opt)


def test_a_copy_has_a_guard_of_its_own():
    opt, grads = made("numpy")
    raised = []
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        opt.after_step(lambda opt, twin=twin: run(lambda: twin.step(grads), raised))
    opt.step(grads)
    assert raised == [None, None]


def run(call, raised):
    """Make a call on another thread, and keep what it raises."""

    def caught():
        try:
            call()
        except RuntimeError as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
