"""Staging: which loops between the passes are one stage on a device. Blocks synchronize after each
stage, so few are best. `lower_stages.py` lowers them.

No operation changes. A value is computed in the loop that needs it, independent loops are one
stage, and a slot is written in the loop that computes its value.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from arrayopt.fusion.graph import Node, operands
from arrayopt.fusion.passes import SmallLoop, in_loops
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.waves import in_waves


class Staging:
    """The stages between the passes of a plan. In a plan with waves, each loop is a stage.

    Attributes
    ----------
    gaps : list of list of list of SmallLoop
        The stages before each pass, and after the last one. A stage is a list of loops.
    waving : bool
        Whether some values are computed in waves.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.fixed = {*plan.reports.values()}  # values that others than loops need
        for pass_ in plan.passes:
            self.fixed.update(pass_.sources)
        gap, self.waving = dict[Node, int](), False
        for number, between in enumerate(plan.between):
            gap |= dict.fromkeys([*between.combine, *between.nodes], number)
            for loop in between.loops:
                self.waving |= in_waves(loop.nodes, loop.axes, plan.element)
        if not self.waving:
            self._delay(gap)
        self.gaps = list[list[list[SmallLoop]]]()
        for number in range(len(plan.between)):
            nodes = [node for node, first in gap.items() if first == number]
            alone = [[loop] for loop in in_loops(nodes, plan.element)]
            self.gaps.append(alone if self.waving else _stages(nodes, plan.element))
        left = dict[str, dict[str, Node]]()
        for slot, value in plan.between[-1].stores.items():
            if self.waving or not self._stored(slot, value):
                left.setdefault(plan.slots[slot], {})[slot] = value
        if left:
            self.gaps[-1].append([SmallLoop(axes, (), False, some) for axes, some in left.items()])

    @property
    def loops(self) -> Iterator[tuple[int, int, SmallLoop]]:
        """All loops, each with the number of passes before it, and its stage there."""
        for k, stages in enumerate(self.gaps):
            for level, stage in enumerate(stages):
                yield from ((k, level, loop) for loop in stage)

    @property
    def needed(self) -> set[Node]:
        """The values that are needed outside of the loop that computes them."""
        found = set(self.fixed)
        for *_, loop in self.loops:
            found |= {*operands(loop.nodes), *loop.stores.values()}.difference(loop.nodes)
        return found

    def _delay(self, gap: dict[Node, int]) -> None:
        """Delay values that only operations over the same axes need, to the first of these."""
        fixed = self.fixed.union(self.plan.small.values())
        for node in reversed([*gap]):
            users = [user for user in gap if node in user.args]
            alike = all(user.axes == node.axes and not user.reduces for user in users)
            if users and alike and not node.reduces and node not in fixed:
                gap[node] = min(map(gap.__getitem__, users))

    def _stored(self, slot: str, value: Node) -> bool:
        """Write a slot in the loop that computes it; False if its old value is needed later."""
        for after, level, loop in self.loops:
            own = value in loop.nodes and loop.axes == self.plan.slots[slot] and not loop.reduces
            if own and slot not in self._read_later(after, level, loop):
                stage = self.gaps[after][level]
                stage[stage.index(loop)] = replace(loop, stores={**loop.stores, slot: value})
                return True
        return False

    def _read_later(self, after: int, level: int, loop: SmallLoop) -> set[str]:
        """Return the slots that passes after a loop read, and other loops of its stage or later."""
        read = list[Node]()
        for pass_ in self.plan.passes[after:]:
            read += pass_.sources
        for *at, other in self.loops:
            read += operands(other.nodes) if at >= [after, level] and other is not loop else ()
        return {node.data for node in read if node.op == "input"}


class _Loop(NamedTuple):
    """A loop that is being made: in a stage, it is the one over these axes after a reduction."""

    stage: int
    axes: str
    reduction: Node | None


def _stages(nodes: Iterable[Node], element: str) -> list[list[SmallLoop]]:
    """Return the stages of loops that compute values. A loop has values over the same axes. It is a
    new one for each reduction of values over fewer axes than the elements, and what follows.
    """
    made, loop_of = dict[_Loop, list[Node]](), dict[Node, _Loop]()
    for node in nodes:
        loop = loop_of[node] = _loop_for(node, loop_of, element)
        made.setdefault(loop, []).append(node)
    stages = dict[int, list[SmallLoop]]()
    for loop, some in made.items():
        small = SmallLoop(loop.axes, tuple(some), loop.reduction is not None)
        stages.setdefault(loop.stage, []).append(small)
    return list(stages.values())


def _loop_for(node: Node, loop_of: dict[Node, _Loop], element: str) -> _Loop:
    """Return the loop that computes a value: that of its operands if possible, else another one."""
    alone = node.reduces and node.args[0].axes != element
    stage, before = 0, [operand for operand in node.args if operand in loop_of]
    for operand in before:
        waits = alone or operand.axes != node.axes  # for the end of the operand's stage
        stage = max(stage, loop_of[operand].stage + waits)
    joined = {loop_of[operand] for operand in before if loop_of[operand].stage == stage}
    if len(joined) == 1:
        return joined.pop()
    # values of several loops are known when their stage has ended
    return _Loop(stage + bool(joined), node.axes, node if alone and node.axes else None)
