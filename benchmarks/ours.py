"""This library's rules and engines as contestants, and how they use memory."""

import math
import tracemalloc
from dataclasses import replace
from typing import Any

import arrayopt as ao
from arrayopt.engines import registry
from arrayopt.fusion.plans import plan_for
from benchmarks.contest import Contestant, Running, by_threads
from benchmarks.problems import Problem

__all__ = [
    "ENGINES",
    "FUSED",
    "MORE",
    "REFERENCE",
    "RULES",
    "bytes_per_parameter",
    "contestants",
    "running",
    "step_memory",
]

RULES: dict[str, ao.Rule] = {
    "LAMB": ao.LAMB(lr=1e-3, weight_decay=0.01),
    "LANS": ao.LANS(lr=1e-3, weight_decay=0.01),
    "CAME": ao.CAME(lr=2e-4),
    "LARS": ao.LARS(lr=0.1, weight_decay=1e-4),
    "AdamW": ao.AdamW(lr=1e-3, weight_decay=0.01),
    "SGD": ao.SGD(lr=0.01, momentum=0.9),
}
"""Every contestant of a rule has these options."""

MORE: dict[str, ao.Rule] = {
    "Lion": ao.Lion(lr=1e-4, weight_decay=0.01),
    "RMSprop": ao.RMSprop(lr=1e-3),
    "NAdam": ao.NAdam(lr=2e-3),
    "RAdam": ao.RAdam(lr=1e-3),
    "Adan": ao.Adan(lr=1e-3, weight_decay=0.01),
    "AdEMAMix": ao.AdEMAMix(lr=1e-3, weight_decay=0.01),
    "ScheduleFreeAdamW": ao.ScheduleFreeAdamW(lr=2.5e-3, weight_decay=0.01),
    "AdamH": ao.AdamH(lr=0.01),
    "FISTA": ao.FISTA(lr=0.01),
    "Prodigy": ao.Prodigy(lr=1.0, growth_rate=1.02),  # else d, and so steps, grow without end under one gradient
    "LBFGS": ao.LBFGS(memory=5, line_search=None),
}
"""Rules that have one contest only, over one model's shapes. Those for matrices are in `benchmarks.products`."""

STATE = {"LAMB": 2, "LANS": 2, "CAME": 1, "LARS": 1, "AdamW": 2, "SGD": 1}
STATE |= {"Lion": 1, "RMSprop": 1, "NAdam": 2, "RAdam": 2, "Adan": 4, "AdEMAMix": 3, "ScheduleFreeAdamW": 2}
STATE |= {"AdamH": 2, "FISTA": 2, "Prodigy": 4, "LBFGS": 10}
"""Arrays of state for each parameter array; CAME's rows and columns are few beside its one."""


def _works(engine: str) -> bool:
    """Whether an engine has what it needs, as a compiler."""
    try:
        registry.ENGINES[engine].open()
    except ValueError:
        return False
    return True


ENGINES = (*registry.FUSED["numpy"], "array_api")
"""The engines that take arrays of NumPy, fastest first."""

FUSED = tuple(engine for engine in registry.FUSED["numpy"] if _works(engine))
"""Those of them that run plans, and work here."""

REFERENCE = f"arrayopt {FUSED[0]}"
"""Whom all others are compared with."""


def contestants(rule: str, problem: Problem, clip: float | None = None) -> list[Contestant]:
    """Every engine of this library, the reference first. `clip` is as in `optimizer`."""
    size = 4.0 * problem.elements
    return [
        Contestant(
            f"arrayopt {engine}",
            lambda engine=engine: running(rule, problem, engine, clip),
            held=size * (1 + STATE[rule]),
            extra=0.0 if engine in FUSED else size * (4 + STATE[rule]),
            left_out="" if engine in (*FUSED, "array_api") else "what it needs is not installed",
        )
        for engine in sorted(ENGINES, key=lambda engine: engine != FUSED[0])
    ]


def optimizer(
    rule: str, problem: Problem, engine: str, dtype: Any = "float32", clip: float | None = None, **options: Any
) -> tuple[ao.Optimizer, dict]:
    """An optimizer over a problem in a dtype, its rule with these options, and the gradients to give it.

    `clip` is the limit of the norm of all gradients together.
    """
    params = {str(i): x.astype(dtype, copy=False) for i, x in enumerate(problem.params())}
    grads = {str(i): x.astype(dtype, copy=False) for i, x in enumerate(problem.grads)}
    made = replace((RULES | MORE)[rule], **options)
    return ao.Optimizer(params, made, engine=engine, clip_norm=clip), grads


def running(rule: str, problem: Problem, engine: str, clip: float | None = None) -> Running:
    """One engine, ready."""
    opt, grads = optimizer(rule, problem, engine, clip=clip)
    settings = by_threads() if engine in FUSED else {}
    return Running(lambda: opt.step(grads), lambda: list(opt.params.values()), settings=settings)


def bytes_per_parameter(rule: str, problem: Problem) -> float:
    """Bytes that a fused engine's passes read and write for each parameter: the plans', weighted by size."""
    by_rank: dict[int, int] = {}
    for shape in problem.shapes:
        by_rank[len(shape)] = by_rank.get(len(shape), 0) + math.prod(shape)
    moved = sum(
        n * plan_for((RULES | MORE)[rule], rank, "float32").bytes_per_parameter() for rank, n in by_rank.items()
    )
    return moved / problem.elements


def step_memory(rule: str, problem: Problem, engine: str) -> float:
    """The most that a step allocates at a time, as a share of parameters and state."""
    opt, grads = optimizer(rule, problem, engine)
    opt.step(grads)
    opt.step(grads)
    slots = [x for state in opt.state.values() for name, x in state.items() if name != "t"]
    lasting = sum(x.nbytes for x in [*opt.params.values(), *slots])
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        opt.step(grads)
        return (tracemalloc.get_traced_memory()[1] - before) / lasting
    finally:
        tracemalloc.stop()
