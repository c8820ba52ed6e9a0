"""This library's rules beside each other, and beside the update that everyone knows the price of."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import ours, peers_torch
from benchmarks.contest import Contestant, race
from benchmarks.machine import COPY, copying
from benchmarks.problems import Problem
from benchmarks.results import Row

__all__ = ["side_by_side"]


def side_by_side(rules: Sequence[str], problem: Problem, copied: int, **pace: Any) -> list[Row]:
    """Our fastest engine for each rule, as a multiple of PyTorch's fused AdamW; without PyTorch, of the first rule."""
    entered = [_named("torch fused AdamW", c) for c in peers_torch.contestants("AdamW", problem) if "fused" in c.name]
    entered = [c for c in entered if not c.left_out]
    entered += [_named(rule, c) for rule in rules for c in ours.contestants(rule, problem) if c.name == ours.REFERENCE]
    times = race(entered, always=[copying(copied)], **pace)
    made = []
    for name in times.names:
        if name != COPY:
            moved = ours.bytes_per_parameter(name, problem) if name in ours.RULES else None
            share = None if moved is None else times.ratio(COPY, name) * moved * problem.elements / (2 * copied)
            known = 1e3 * times.seconds(name), times.ratio(name, entered[0].name)
            made.append(Row(name, problem.title, name, *known, moved, share))
    return made


def _named(name: str, contestant: Contestant) -> Contestant:
    return replace(contestant, name=name)
