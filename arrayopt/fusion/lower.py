"""Lowering a plan to a program, which the engines that compile for CPUs print."""

from functools import lru_cache

from arrayopt.fusion.graph import KEPT
from arrayopt.fusion.lanes import Lanes
from arrayopt.fusion.layout import layout
from arrayopt.fusion.lower_lanes import LoweredSegment
from arrayopt.fusion.lower_passes import Lowering
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import Function, Program

__all__ = ["lowered"]


@lru_cache(maxsize=KEPT)
def lowered(plan: Plan, split: Lanes | None = None) -> Program:
    """The program of a plan; with `split`, of the plan in segments, for matrices that are laid side by side."""
    stages: list[Function | None] = []
    if split is None:
        m = Lowering(plan, layout(plan))
        for k, b in enumerate(m.form.between):
            stages.append(m.between(k, b) if b else None)
            if k < len(m.form.passes):
                stages.append(m.units(k, m.form.passes[k]))
        return Program(tuple(stages))
    m, planes = Lowering(plan, split.where), []
    for k, s in enumerate(split.segments):
        segment = LoweredSegment(m, s)
        stages += [m.between(k, s.before), segment.units(k)]
        planes.append(segment.planes)
    stages.append(m.between(len(split.segments), split.after))
    return Program(tuple(stages), tuple(planes))
