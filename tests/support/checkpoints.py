"""Parameters, gradients and steps for tests that save and resume a run."""

from pathlib import Path

import numpy as np

import arrayopt as ao
from arrayopt.params.trees import flatten

S = ao.schedules
ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(5)
SHAPES = {"w": (7, 5), "stack": (2, 3, 4), "b": (5,), "scalar": (), "empty": (0, 3)}
START = {name: RNG.normal(size=shape) for name, shape in SHAPES.items()}
GRADS = [{name: RNG.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(6)]


def run(opt, array, steps):
    """Make these steps, each with its gradients; the second has no gradient for ``b``. Return the optimizer."""
    for s in steps:
        opt.step({name: None if (s, name) == (1, "b") else array(g) for name, g in GRADS[s].items()})
    return opt


def contents(opt):
    """Everything on which a step depends, as bytes and strings, for comparison."""
    arrays = {
        name: [(k, x if k == "t" else (str(x.dtype), tuple(x.shape), to_bytes(x))) for k, x in state.items()]
        for name, state in opt.state.items()
    }
    params = [(name, to_bytes(x)) for name, x in flatten(opt.params)]
    rules = [(repr(g.rule), sorted(g.overridden), g.names) for g in opt.groups]
    return params, arrays, rules, repr(opt.rule), opt.step_count, repr(opt.clip_norm)


def to_bytes(x):
    return ao.arrays.to_host(x).tobytes()


def small(value=1.0, **options):
    opt = ao.Optimizer({"w": np.full((2, 3), value), "b": np.ones(3)}, ao.SGD(lr=0.1, momentum=0.5), **options)
    opt.step({"w": np.ones((2, 3)), "b": np.ones(3)})
    return opt
