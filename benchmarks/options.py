"""What an option costs: steps of a rule with it, beside those of the rule alone, in turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ml_dtypes

import arrayopt as ao
from benchmarks import ours
from benchmarks.contest import Contestant, Running, by_threads, race
from benchmarks.problems import Problem
from benchmarks.results import Sheet

__all__ = ["OPTIONS", "Option", "costs"]

ALONE = "the rule alone"


@dataclass(frozen=True)
class Option:
    """What is switched on.

    Attributes
    ----------
    rule, optimizer : dict
        Fields of the rule, and options of the optimizer.
    dtype : dtype
        What parameters and gradients are stored in.
    """

    rule: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    dtype: Any = "float32"


INT8 = {"state_dtype": "int8"}
SPLIT = {"master_weights": "split"}
HALF = ml_dtypes.bfloat16
OPTIONS = {
    ALONE: Option(),
    "`caution`": Option({"caution": True}),
    "`clip_norm`": Option(optimizer={"clip_norm": 1.0}),
    "`skip_nonfinite`": Option(optimizer={"skip_nonfinite": True}),
    "`stats`": Option(optimizer={"stats": True}),
    "no weight decay for half of the tensors": Option(optimizer={"groups": {"*[13579]": {"weight_decay": 0.0}}}),
    "`ema_decay`": Option({"ema_decay": 0.999}),
    "`lookahead_steps`": Option({"lookahead_steps": 5}),
    "`project`, a box": Option({"project": ao.projections.box(-1.0, 1.0)}),
    "state in bfloat16": Option({"state_dtype": "bfloat16"}),
    "state in int8": Option(INT8),
    "bfloat16 with masters": Option(dtype=HALF),
    "bfloat16, split masters": Option(SPLIT, dtype=HALF),
    "bfloat16, split masters, state in int8": Option(SPLIT | INT8, dtype=HALF),
    "bfloat16, stochastic rounding": Option({"rounding": "stochastic"}, dtype=HALF),
    "bfloat16, stochastic rounding, state in int8": Option({"rounding": "stochastic", **INT8}, dtype=HALF),
    "float16 with masters": Option(dtype="float16"),
    "float16, split masters, state in int8": Option(SPLIT | INT8, dtype="float16"),
}
"""Each option by the name that the table has for it."""


def ready(rule: str, option: Option, problem: Problem, engine: str) -> Running:
    """An optimizer with an option, ready."""
    params = {str(i): x.astype(option.dtype) for i, x in enumerate(problem.params())}
    grads = {str(i): x.astype(option.dtype) for i, x in enumerate(problem.grads)}
    made = replace(ours.RULES[rule], **option.rule)
    opt = ao.Optimizer(params, made, engine=engine, **option.optimizer)
    settings = by_threads() if engine in ours.FUSED else {}
    return Running(lambda: opt.step(grads), lambda: [x.astype("f4") for x in opt.params.values()], settings=settings)


def costs(
    rules: Sequence[str], problem: Problem, engines: Sequence[str], say: Callable[[str], object], **pace: Any
) -> Sheet:
    """A line for each rule and option: ns per element in each engine, and how many times as long as the rule alone."""
    lines, held = [], 4.0 * problem.elements * 6
    for rule in rules:
        cells: dict[str, list[str]] = {name: [] for name in OPTIONS}
        for engine in engines:
            say(f"options of {rule} in {engine}")
            builds = {name: partial(ready, rule, option, problem, engine) for name, option in OPTIONS.items()}
            times = race([Contestant(name, build, held) for name, build in builds.items()], **pace)
            for name in OPTIONS:
                if name in times.left_out:
                    raise RuntimeError(f"{rule} with {name}: {times.left_out[name]}")
                ns = 1e9 * times.seconds(name) / problem.elements
                cells[name].append(f"{ns:.2f} ({times.ratio(name, ALONE):.2f})")
        lines += [(rule, name, *cells[name]) for name in OPTIONS]
    columns = ("rule", "with", *(f"{engine}, ns" for engine in engines))
    note = f"Time per element over {problem.title}; in parentheses, as a multiple of the rule's without the option."
    return Sheet("What an option costs", columns, lines, names=2, notes=(note,))
