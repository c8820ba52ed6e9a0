"""This library's rules beside each other, and beside the update that everyone knows the price of."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import ours, peers_torch
from benchmarks.contest import race
from benchmarks.machine import copying
from benchmarks.problems import Problem
from benchmarks.results import Row, rows

__all__ = ["side_by_side"]


def side_by_side(rules: Sequence[str], problem: Problem, copied: int, **pace: Any) -> list[Row]:
    """Our fastest engine for each rule, as a multiple of PyTorch's fused AdamW; without PyTorch, of the first rule."""
    peers = [c for c in peers_torch.contestants("AdamW", problem) if c.name == "torch fused" and not c.left_out]
    entered = [replace(c, name="torch fused AdamW") for c in peers]
    for rule in rules:
        entered += [replace(c, name=rule) for c in ours.contestants(rule, problem) if c.name == ours.REFERENCE]
    times = race(entered, always=[copying(copied)], **pace)
    moved = {rule: ours.bytes_per_parameter(rule, problem) for rule in rules}
    return rows(times, problem, moved, 2 * copied, to=entered[0].name)
