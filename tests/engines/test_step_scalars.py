"""Scalars of a step, which engines keep from step to step: they are those of this step, whatever the last one was."""

import sys
from dataclasses import dataclass

import numpy as np

import arrayopt as ao
from arrayopt import interrupts
from arrayopt.engines import step_scalars
from tests.support.engines import each_fused
from tests.support.entered import Fault, contents


@dataclass(frozen=True)
class Valued(ao.Rule):
    """A rule that multiplies its step by the function's value."""

    lr: ao.Hyper = 0.1

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        return p - h.lr * h.value * g, {}


@each_fused
def test_a_value_follows_values_of_layers(engine):
    """One number for all layers, also zero, replaces those of the last step."""

    def run(name):
        opt = ao.Optimizer(np.ones((3, 5)), Valued(stacked=True), engine=name)
        for value in (np.arange(1.0, 4), 0.0, 2.0, np.arange(2.0, 5), 2.0, 0.0):
            opt.step(np.ones((3, 5)), value=value)
        return opt.params

    np.testing.assert_allclose(run(engine), run("array_api"), rtol=1e-12)


class _AtLine:
    """Raises at a line of `step_scalars.py`, by number; where a step writes, it does not."""

    def __init__(self, at):
        self.at, self.count = at, 0

    def __call__(self, frame, event, arg):
        return self.line if frame.f_code.co_filename == step_scalars.__file__ else None

    def line(self, frame, event, arg):
        if event == "line" and not interrupts._inside:
            self.count += 1
            if self.count > self.at:
                self.at = np.inf
                raise Fault
        return self.line


@each_fused
def test_a_step_that_ends_between_any_two_lines_leaves_no_half_of_its_scalars(engine):
    """As by Ctrl-C. Other hyper-parameters, or the same ones, may come next."""
    rng = np.random.default_rng(0)
    grads = [{"w": rng.standard_normal((3, 4)), "b": rng.standard_normal(4)} for _ in range(4)]

    def run(at, lr):
        params = {"w": np.ones((3, 4)), "b": np.zeros(4)}
        opt = ao.Optimizer(params, ao.AdamW(lr=0.1), groups={"b": {"weight_decay": 0.5}}, engine=engine)
        opt.step(grads[0])
        lines, former = _AtLine(at), sys.gettrace()
        opt.lr = 0.2
        sys.settrace(lines)
        try:
            opt.step(grads[1])
        except Fault:
            sys.settrace(former)
            opt.lr = lr
            opt.step(grads[1])
        finally:
            sys.settrace(former)
        for g in grads[2:]:
            opt.step(g)
        return contents(opt), lines.at is np.inf

    for lr in (0.1, 0.2):
        at, raised, straight = 0, True, None
        while raised:
            found, raised = run(at, lr)
            straight = straight or found
            at += 1
            if raised:
                assert found == straight, at
        assert at > 10
