"""What a door costs: a step of `arrayopt.torch` beside one of `arrayopt.Optimizer` over the same 200 tensors, in turns.

python -m benchmarks.doors            # rounds of many steps, medians; --help lists the options
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from arrayopt import Optimizer
from arrayopt.params.groups import fields_of
from benchmarks import ours, peers_jax
from benchmarks.contest import Contestant, Race, Running, race
from benchmarks.problems import Problem, equal
from benchmarks.results import Row

__all__ = ["BELOW", "DOOR", "SCHEDULED", "SHAPES", "beside", "main", "through_doors", "under_jit"]

BELOW, DOOR, SCHEDULED = "arrayopt.Optimizer", "arrayopt.torch", ", lr set in each step"

SHAPES = ((64,), (64, 64), (256, 256))


def tensors(problem: Problem) -> list[Any]:
    """The parameters as PyTorch's, with their gradients."""
    import torch

    params = [torch.nn.Parameter(torch.from_numpy(p)) for p in problem.params()]
    for p, g in zip(params, problem.grads, strict=True):
        p.grad = torch.from_numpy(g)
    return params


def below(rule: str, problem: Problem, steps: int, engine: str, *, scheduled: bool) -> Running:
    """What the door is measured by: gradients are taken from the parameters here, too."""
    params = tensors(problem)
    opt = Optimizer(params, ours.RULES[rule], engine=engine)
    lr = opt.lr

    def step() -> None:
        for i in range(steps):
            if scheduled:
                opt.lr = lr * (1 - 1e-3 * i)
            opt.step([p.grad for p in params])

    return Running(step)


def through(rule: str, problem: Problem, steps: int, engine: str, *, scheduled: bool) -> Running:
    """The optimizer of PyTorch."""
    import arrayopt.torch as door

    own = ours.RULES[rule]
    fields = {name: getattr(own, name) for name in fields_of(type(own))}
    opt = getattr(door, rule)(tensors(problem), **fields, engine=engine)
    lr = own.lr

    def step() -> None:
        for i in range(steps):
            if scheduled:
                opt.param_groups[0]["lr"] = lr * (1 - 1e-3 * i)
            opt.step()

    return Running(step)


def beside(rule: str, problem: Problem, steps: int, engine: str = "auto", **pace: Any) -> Race:
    """The times of so many steps."""
    entered = [
        Contestant(
            f"{name}{SCHEDULED if scheduled else ''}", partial(make, rule, problem, steps, engine, scheduled=scheduled)
        )
        for scheduled in (False, True)
        for name, make in ((BELOW, below), (DOOR, through))
    ]
    return race(entered, **pace)


def through_doors(
    shapes: Sequence[tuple[int, ...]], rules: Sequence[str] = ("AdamW", "LAMB"), **pace: Any
) -> list[Row]:
    """A row for each contestant, rule and shape of 200 tensors; times are of one step of twenty."""
    made, steps = [], 20
    for rule in rules:
        for shape in shapes:
            problem = equal(200, shape)
            times = beside(rule, problem, steps, **pace)
            for name in times.names:
                ms, ratio = 1e3 * times.seconds(name) / steps, times.ratio(name, name.replace(DOOR, BELOW))
                made.append(Row(rule, f"200 of {' × '.join(map(str, shape))}", name, ms, ratio))
    return made


def under_jit(shapes: Sequence[tuple[int, ...]], rules: Sequence[str] = ("AdamW", "LAMB"), **pace: Any) -> list[Row]:
    """A row for `arrayopt.optax` and one for optax, by rule and shape of 20 tensors, both under `jax.jit`."""
    made = []
    for rule in rules:
        for shape in shapes:
            problem = equal(20, shape)
            both = reversed(peers_jax.transforms(rule).items())
            times = race([Contestant(name, partial(peers_jax.running, tx, problem)) for name, tx in both], **pace)
            for name in times.names:
                row = 1e3 * times.seconds(name), times.ratio(name, times.names[0])
                made.append(Row(rule, f"20 of {' × '.join(map(str, shape))}", name, *row))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", nargs="+", default=["AdamW", "LAMB"], choices=list(ours.RULES))
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=20, help="so many are timed together")
    parser.add_argument("--engine", default="auto")
    chosen = parser.parse_args(arguments)
    sys.stdout.write("| rule | tensors | | ms per step | beside arrayopt.Optimizer |\n|---|---|---|---|---|\n")
    for rule in chosen.rules:
        for shape in SHAPES:
            problem = equal(chosen.tensors, shape)
            times = beside(rule, problem, chosen.steps, chosen.engine, rounds=chosen.rounds, warmup=2)
            for name in times.names:
                ms, ratio = 1e3 * times.seconds(name) / chosen.steps, times.ratio(name, name.replace(DOOR, BELOW))
                sys.stdout.write(f"| {rule} | {chosen.tensors} of {shape} | {name} | {ms:.3f} | {ratio:.3f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
