"""Staging: which loops between the passes are one stage on a device. Blocks synchronize after each
stage, so few are best. `lower_stages.py` lowers them.

No operation changes. A value is computed in the loop that needs it, independent loops are one
stage, and a slot is written in the loop that computes its value.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

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
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, stores = plan, plan.between[-1].stores
        after = chain.from_iterable(x.loops for x in plan.between)
        plain = any(in_waves(loop.nodes, loop.axes, plan.element) for loop in after)
        parts = [[*x.combine, *x.nodes] for x in plan.between]
        gap = dict[Node, int]()
        for number, part in enumerate(parts):
            gap |= dict.fromkeys(part, number)
        if not plain:
            self._delay(gap)
        self.gaps = list[list[list[SmallLoop]]]()
        for number in range(len(parts)):
            some = [n for n, first in gap.items() if first == number]
            alone = [[loop] for loop in in_loops(some, plan.element)]
            self.gaps.append(alone if plain else _stages(some, plan.element))
        left = dict[str, dict[str, Node]]()
        for slot, value in stores.items():
            if plain or not self._stored(slot, value):
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
        found = {*self.plan.reports.values()}.union(*(p.sources for p in self.plan.passes))
        for *_, loop in self.loops:
            found |= {*operands(loop.nodes), *loop.stores.values()}.difference(loop.nodes)
        return found

    def _delay(self, gap: dict[Node, int]) -> None:
        """Delay values that only operations over the same axes need, to the first of these."""
        fixed = {*self.plan.small.values(), *self.plan.reports.values()}
        fixed.update(*(p.sources for p in self.plan.passes))
        for n in reversed([*gap]):
            users = [m for m in gap if n in m.args]
            alike = all(m.axes == n.axes and not m.reduces for m in users)
            if users and alike and not n.reduces and n not in fixed:
                gap[n] = min(gap[m] for m in users)

    def _stored(self, slot: str, value: Node) -> bool:
        """Write a slot in the loop that computes it; False if its old value is needed later."""

        def reads(nodes: Iterable[Node]) -> bool:
            return any(n.op == "input" and n.data == slot for n in nodes)

        for after, level, loop in self.loops:
            if value in loop.nodes and loop.axes == self.plan.slots[slot] and not loop.reduces:
                later = [p.sources for p in self.plan.passes[after:]]
                for *at, other in self.loops:
                    waits = at >= [after, level] and other is not loop
                    later += [operands(other.nodes)] if waits else []
                if not any(map(reads, later)):
                    own = replace(loop, stores={**loop.stores, slot: value})
                    stage = self.gaps[after][level]
                    stage[stage.index(loop)] = own
                    return True
        return False


def _stages(nodes: Iterable[Node], element: str) -> list[list[SmallLoop]]:
    """Return the stages of loops that compute values. A loop has values over the same axes. It is a
    new one for each reduction of values over fewer axes than the elements, and what follows.
    """
    stages = list[dict[tuple[str, Node | None], list[Node]]]()
    at = dict[Node, tuple[int, tuple[str, Node | None]]]()
    for node in nodes:
        apart = node.reduces and node.args[0].axes != element
        before = [a for a in node.args if a in at]
        level = max((at[a][0] + (apart or a.axes != node.axes) for a in before), default=0)
        joined = {at[a][1] for a in before if at[a][0] == level}
        level += len(joined) > 1
        reduction = node if apart and node.axes else None
        key = joined.pop() if len(joined) == 1 else (node.axes, reduction)
        stages += [{}] if level == len(stages) else []
        stages[level].setdefault(key, []).append(node)
        at[node] = level, key
    made = list[list[SmallLoop]]()
    for stage in stages:
        loops = stage.items()
        made.append([SmallLoop(axes, tuple(x), one is not None) for (axes, one), x in loops])
    return made
