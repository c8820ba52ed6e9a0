"""Lowering a plan to a program, which the engines that compile for CPUs print."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from arrayopt.fusion.alike import described, scratch_of
from arrayopt.fusion.graph import KEPT
from arrayopt.fusion.lanes import Lanes
from arrayopt.fusion.layout import layout, outliving
from arrayopt.fusion.lower_between import lowered_between
from arrayopt.fusion.lower_lanes import LoweredSegment
from arrayopt.fusion.lower_passes import LoweringPasses
from arrayopt.fusion.lowering import Lowering
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import Call, Function, Program

__all__ = ["lowered"]


@lru_cache(maxsize=KEPT)
def lowered(plan: Plan, split: Lanes | None = None) -> Program:
    """The program of a plan; with `split`, of the plan in segments, for matrices that are laid side
    by side.
    """
    return _whole(plan) if split is None else _in_segments(plan, split)


def _whole(plan: Plan) -> Program:
    """The program of a plan; passes that differ in nothing but their scratch arrays have one
    function.
    """
    where = layout(plan)
    kept = {*outliving(plan.passes, plan.between), *plan.small.values(), *plan.reports.values()}
    lowering = LoweringPasses(plan, where, kept)
    stages: list[Call | None] = []
    made: dict[Any, Function] = {}
    for index, between in enumerate(plan.between):
        stages.append(Call(lowered_between(lowering, index, between)) if between else None)
        if index == len(plan.passes):
            break
        pass_ = plan.passes[index]
        if not plan.multiplies:
            stages.append(Call(lowering.units(index, pass_)))
            continue
        scratch, key = scratch_of(pass_, plan), described(pass_, plan, where)
        if key not in made:
            made[key] = replace(lowering.units(index, pass_), scratch=scratch)
        stages.append(Call(made[key], scratch))
    return Program(tuple(stages))


def _in_segments(plan: Plan, split: Lanes) -> Program:
    """The program of a plan in segments."""
    lowering = Lowering(plan, split.where, {*split.where.tensor, *split.where.vectors})
    stages: list[Call | None] = []
    planes = []
    for k, s in enumerate(split.segments):
        segment = LoweredSegment(lowering, s)
        stages += [Call(lowered_between(lowering, k, s.before)), Call(segment.units(k))]
        planes.append(segment.planes)
    stages.append(Call(lowered_between(lowering, len(split.segments), split.after)))
    return Program(tuple(stages), tuple(planes))
