"""Lowering a plan to a program for CPUs: `lowered`, which the engines `numba` and `cpp` call."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from arrayopt.fusion.graph import CACHED
from arrayopt.fusion.lanes import Lanes
from arrayopt.fusion.layout import layout, read_elsewhere
from arrayopt.fusion.lower_lanes import LoweredSegment
from arrayopt.fusion.lower_passes import Loops
from arrayopt.fusion.lowering import scratch_of
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import Function, Program, Stage


@lru_cache(maxsize=CACHED)
def lowered(plan: Plan, lanes: Lanes | None = None) -> Program:
    """Return the program of a plan; with `lanes`, in segments, for small matrices side by side."""
    return _whole(plan) if lanes is None else _in_segments(plan, lanes)


def _whole(plan: Plan) -> Program:
    """Return the program of a plan. Passes that differ only in scratch arrays share a function."""
    lowering = Loops(plan, layout(plan), read_elsewhere(plan))
    stages: list[Stage] = []
    made: dict[Any, Function] = {}
    for index, between in enumerate(plan.between):
        before = lowering.between(index, between) if between else Function("", "", ())
        stages.append(Stage(before))
        if index == len(plan.passes):
            break
        pass_ = plan.passes[index]
        scratch = scratch_of(pass_, plan) if plan.multiplies else ()
        key = lowering.described(pass_) if plan.multiplies else index
        if key not in made:
            made[key] = replace(lowering.units(index, pass_), scratch=scratch)
        stages.append(Stage(made[key], scratch))
    return Program(tuple(stages))


def _in_segments(plan: Plan, lanes: Lanes) -> Program:
    """Return the program of a plan in segments."""
    lowering = Loops(plan, lanes.layout, {*lanes.layout.tensor, *lanes.layout.vectors})
    stages: list[Stage] = []
    planes = list[tuple[str, ...]]()
    for k, segment in enumerate(lanes.segments):
        lowered_segment = LoweredSegment(lowering, segment)
        stages.append(Stage(lowering.between(k, segment.before)))
        stages.append(Stage(lowered_segment.units(k)))
        planes.append(tuple(map(lowered_segment.plane_axes.__getitem__, lowered_segment.own)))
    stages.append(Stage(lowering.between(len(lanes.segments), lanes.last)))
    return Program(tuple(stages), tuple(planes))
