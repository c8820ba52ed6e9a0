"""Small steps, where the time is the host's: AdamW over a few tensors of 64 elements, ours beside PyTorch's; then
with gradients clipped by their global norm.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import ours, peers_torch
from benchmarks.contest import Contestant, Running, race
from benchmarks.problems import equal
from benchmarks.results import Row

__all__ = ["small_steps"]

RULE = "AdamW"
AT_ONCE = 100
"""So many steps are timed together: one is too short for a clock."""


def small_steps(counts: Sequence[int], **pace: Any) -> list[Row]:
    """A row for each contestant and number of tensors, without clipping and with it; times are of one step."""
    made = []
    for clip, said in ((None, ""), (1.0, ", clipped")):
        for count in counts:
            problem = equal(count, (64,))
            entered = [c for c in ours.contestants(RULE, problem, clip) if c.name == ours.REFERENCE]
            peers = peers_torch.contestants(RULE, problem, clip)
            entered += [c for c in peers if c.name in ("torch foreach", "torch fused")]
            times = race([_many(c) for c in entered], **pace)
            for name in times.names:
                milliseconds = 1e3 * times.seconds(name) / AT_ONCE
                ratio, setting = times.ratio(name, ours.REFERENCE), times.settings.get(name, "")
                made.append(Row(RULE, problem.title + said, name, milliseconds, ratio, setting=setting))
    return made


def _many(contestant: Contestant) -> Contestant:
    """The same, `AT_ONCE` steps at a time."""

    def build() -> Running:
        one = contestant.build()

        def step() -> None:
            for _ in range(AT_ONCE):
                one.step()

        return replace(one, step=step)

    return replace(contestant, build=build)
