"""Rules for matrices, Muon beside PyTorch's and optax's, in float32, in turns: ``python -m benchmarks.products``.

PyTorch's Muon multiplies in bfloat16. It takes part twice: as it is, and with its products in float32. The NorMuon of
pytorch_optimizer multiplies in bfloat16, too. So does ours over PyTorch's tensors, if asked to. MuonH has no peer. Of
SOAP's steps one in ten changes the basis: what is timed are ten.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before any library starts its threads

import arrayopt as ao
from benchmarks.contest import Contestant, Running, by_threads, race
from benchmarks.ours import FUSED, REFERENCE
from benchmarks.problems import Problem, equal

__all__ = ["PROBLEMS", "RULES", "contestants", "main", "rules_over"]

LR, MOMENTUM, EPS = 0.02, 0.95, 1e-7
"""Every contestant's; no weight decay."""

SMALL, EVERY = 3e-3, 10
"""SOAP's learning rate, and how many of its steps there are for each change of the basis, and in what is timed."""

RULES: dict[str, ao.Rule] = {
    "Muon": ao.Muon(lr=LR, momentum=MOMENTUM, eps=EPS, weight_decay=0.0),
    "NorMuon": ao.NorMuon(lr=LR, momentum=MOMENTUM, eps=EPS, weight_decay=0.0),
    "MuonH": ao.MuonH(lr=LR, momentum=MOMENTUM, eps=EPS),
    "SOAP": ao.SOAP(lr=SMALL, weight_decay=0.0, precondition_frequency=EVERY),
}


def _mixed() -> tuple[tuple[int, int], ...]:
    """126 matrices of 16 to 128 rows and columns."""
    rng, sides = np.random.default_rng(0), [16, 24, 32, 48, 64, 96, 128]
    return tuple((int(rng.choice(sides)), int(rng.choice(sides))) for _ in range(126))


PROBLEMS = {
    "mixed": Problem("mixed", "126 matrices of 16 to 128", _mixed()),
    "equal": equal(1_000, (32, 32)),
    "gpt2": Problem("gpt2", "a layer of GPT-2", ((768, 2304), (768, 768), (768, 3072), (3072, 768))),
    "square": Problem("square", "a matrix of 768 × 768", ((768, 768),)),
}


def rules_over(problem: Problem) -> list[str]:
    """The rules that a problem is for. Over a layer, ten steps of SOAP take 14 s: it gets one of the matrices."""
    left = {"gpt2": {"SOAP"}, "square": set(RULES) - {"SOAP"}}.get(problem.name, set())
    return [rule for rule in RULES if rule not in left]


def contestants(rule: str, problem: Problem, patience: float = 300.0) -> list[Contestant]:
    """All of a rule; ours first. XLA may compile for `patience` seconds."""
    made = [Contestant(f"arrayopt {engine}", partial(_ours, rule, problem, engine)) for engine in FUSED]
    halves = ("arrayopt array_api bfloat16", "torch", partial(_in_bfloat16, rule, problem))
    kinds: dict[str, list[tuple[str, str, Callable[[], Running]]]] = {
        "Muon": [
            halves,
            ("torch", "torch", partial(_torch, problem, float32=False)),
            ("torch float32", "torch", partial(_torch, problem, float32=True)),
            ("optax", "optax", partial(_optax, problem)),
        ],
        "NorMuon": [halves, ("pytorch_optimizer", "pytorch_optimizer", partial(_normuon, problem))],
        "SOAP": [("pytorch_optimizer", "pytorch_optimizer", partial(_soap, problem))],
    }
    count = len(problem.shapes)
    compiling = 0.1 * count * max(1.0, count / 100)  # seconds: 13 for 126 matrices, and 20 minutes for 1,000
    for name, module, build in kinds.get(rule, []):
        left_out = "" if find_spec(module) else f"{module} is not installed"
        if name == "optax" and not left_out and compiling > patience:
            left_out = f"XLA takes about {compiling:,.0f} s to compile a step over {count:,} matrices"
        made.append(Contestant(name, build, left_out=left_out))
    return made


def _ours(rule: str, problem: Problem, engine: str) -> Running:
    """An engine of this library."""
    names = [str(i) for i in range(len(problem.shapes))]
    params, grads = (dict(zip(names, x, strict=True)) for x in (problem.params(), problem.grads))
    opt = ao.Optimizer(params, RULES[rule], engine=engine)
    step = _timed(rule, lambda: opt.step(grads))
    return Running(step, lambda: list(opt.params.values()), settings=by_threads())


def _in_bfloat16(rule: str, problem: Problem) -> Running:
    """Our rule over PyTorch's tensors, which multiply in bfloat16, as those of its peers do."""
    import torch

    params = {str(i): torch.tensor(x) for i, x in enumerate(problem.params())}
    grads = {str(i): torch.tensor(x) for i, x in enumerate(problem.grads)}
    opt = ao.Optimizer(params, dataclasses.replace(RULES[rule], ns_dtype="bfloat16"), engine="array_api")
    return Running(lambda: opt.step(grads), lambda: [p.numpy() for p in params.values()], settings=_torch_threads())


def _torch_threads() -> dict[str, Callable[[], object]]:
    import torch

    return by_threads(torch.set_num_threads)


def _timed(rule: str, step: Callable[[], object]) -> Callable[[], None]:
    """What is timed: a step, or of SOAP so many that one of them changes the basis."""

    def several() -> None:
        for _ in range(EVERY if rule == "SOAP" else 1):
            step()

    return several


def _parameters(problem: Problem) -> list[Any]:
    """PyTorch's, with their gradients."""
    import torch

    params = [torch.nn.Parameter(torch.tensor(x)) for x in problem.params()]
    for p, g in zip(params, problem.grads, strict=True):
        p.grad = torch.tensor(g)
    return params


def _normuon(problem: Problem) -> Running:
    import pytorch_optimizer

    params = _parameters(problem)
    groups = [{"params": params, "use_muon": True}]
    opt = pytorch_optimizer.NorMuon(groups, lr=LR, momentum=MOMENTUM, weight_decay=0.0)
    return Running(opt.step, lambda: [p.detach().numpy() for p in params], settings=_torch_threads())


def _soap(problem: Problem) -> Running:
    import pytorch_optimizer

    params = _parameters(problem)
    opt = pytorch_optimizer.SOAP(params, lr=SMALL, weight_decay=0.0, precondition_frequency=EVERY)
    return Running(_timed("SOAP", opt.step), lambda: [p.detach().numpy() for p in params], settings=_torch_threads())


def _torch(problem: Problem, *, float32: bool) -> Running:
    """`torch.optim.Muon`; with `float32`, what it casts to bfloat16 it copies."""
    import torch

    params = _parameters(problem)
    opt = torch.optim.Muon(params, lr=LR, momentum=MOMENTUM, eps=EPS, weight_decay=0.0)

    def step() -> None:
        kept = torch.Tensor.bfloat16
        if float32:
            torch.Tensor.bfloat16 = torch.Tensor.clone
        try:
            opt.step()
        finally:
            torch.Tensor.bfloat16 = kept

    return Running(step, lambda: [p.detach().numpy() for p in params], settings=_torch_threads())


def _optax(problem: Problem) -> Running:
    """`optax.contrib.muon` under ``jax.jit`` with donated buffers."""
    import jax
    import optax

    rule = optax.contrib.muon(LR, beta=MOMENTUM, eps=EPS)
    params, grads = ([jax.numpy.array(x) for x in xs] for xs in (problem.params(), problem.grads))
    held = [params, rule.init(params)]
    del params

    def update(params, state, grads):
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(update, donate_argnums=(0, 1))

    def step() -> None:
        held[:] = compiled(*held, grads)
        jax.block_until_ready(held)

    return Running(step, lambda: [np.asarray(x) for x in held[0]])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rule", default="Muon", choices=list(RULES))
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS), help=f"some of {', '.join(PROBLEMS)}")
    parser.add_argument("--rounds", type=int, default=15, help="how often each is timed")
    parser.add_argument("--patience", type=float, default=300.0, metavar="SECONDS", help="how long XLA may compile")
    given = parser.parse_args()
    for name in given.problems:
        times = race(contestants(given.rule, PROBLEMS[name], given.patience), rounds=given.rounds)
        lines = ["", PROBLEMS[name].title, "", f"| contestant | ms | times as long as {REFERENCE} |", "|---|---|---|"]
        own = ((who, times.seconds(who), times.ratio(who, REFERENCE)) for who in times.names)
        lines += [f"| {who} | {1e3 * seconds:.4g} | {ratio:.3g} |" for who, seconds, ratio in own]
        lines += [f"| {who} | | {why} |" for who, why in times.left_out.items()]
        sys.stdout.write("\n".join([*lines, ""]))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
