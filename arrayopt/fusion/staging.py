"""What is done between the passes on a device, in few stages: blocks meet after each.

No operation changes. A value is made in the loop that needs it; loops that need nothing of each
other are one stage; a few operations on a row are made in the pass that needs them; and a slot is
written where its value is made.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from arrayopt.fusion.graph import Node, operands
from arrayopt.fusion.passes import Loop, Pass, loops
from arrayopt.fusion.plan import Plan

__all__ = ["Staging"]

FEW = 4
"""So many operations on a row need no stage: a pass makes them in each tile of the row."""


class Staging:
    """The passes of a plan, and what is between them.

    Attributes
    ----------
    passes : list of Pass
        The passes.
    gaps : list of list of list of Loop
        Before each pass, and after the last, the stages, each as its loops.
    late : list of str
        The small slots that are written after all that.
    """

    def __init__(self, plan: Plan, *, plain: bool) -> None:
        self.plan, self.passes, self.late = plan, [*plan.passes], [*plan.between[-1].stores]
        parts = [[*x.combine, *x.nodes] for x in plan.between]
        self.gaps = [[[loop] for loop in loops(part, plan.element)] for part in parts]
        if plain:
            return
        gap = {n: k for k, part in enumerate(parts) for n in part}
        self._delay(gap)
        for k in range(len(parts)):
            self.gaps[k] = _levels(loops([n for n in gap if gap[n] == k], plan.element))
        for k, stages in enumerate(self.gaps):
            for stage in reversed(stages):
                if all(map(self._is_few, stage)):
                    stages.remove(stage)
                    for loop in stage:
                        self.passes = [*self.passes[:k], *(_with(loop, p) for p in self.passes[k:])]
        for slot in [*self.late]:
            self._store_early(slot)

    @property
    def loops(self) -> Iterator[tuple[int, int, Loop]]:
        """All loops, each with the passes before it and its stage."""
        for k, stages in enumerate(self.gaps):
            for level, stage in enumerate(stages):
                yield from ((k, level, loop) for loop in stage)

    @property
    def needed(self) -> set[Node]:
        """What is needed elsewhere than in the loop that makes it."""
        found = {self.plan.small[slot] for slot in self.late} | {*self.plan.reports.values()}
        found.update(*(p.sources for p in self.passes))
        for *_, loop in self.loops:
            found |= {*operands(loop.nodes)}.difference(loop.nodes)
        return found

    def _delay(self, gap: dict[Node, int]) -> None:
        """Make values before the first pass that something waits for them, if that is over the same
        axes.
        """
        fixed = {*self.plan.small.values(), *self.plan.reports.values()}
        fixed.update(*(p.sources for p in self.passes))
        users = dict[Node, list[Node]]()
        for n in reversed([*gap]):
            own = users.get(n, [])
            alike = all(m.axes == n.axes and m.args[0].axes != self.plan.element for m in own)
            if own and alike and not n.reduces and n not in fixed:
                gap[n] = min(gap[m] for m in own)
            for a in n.args:
                users.setdefault(a, []).append(n)

    def _is_few(self, loop: Loop) -> bool:
        """Whether a loop is a few operations on rows or matrices, which passes alone need."""
        if not loop.axes or "C" in loop.axes or any(n.reduces for n in loop.nodes):
            return False
        taken = {*self.plan.small.values(), *self.plan.reports.values()}
        for p in self.passes:
            taken |= {*p.stores.values(), *operands(p.sums)}
        for *_, other in self.loops:
            taken |= {*operands(other.nodes)} if other is not loop else set()
        return len(loop.nodes) <= FEW and not taken.intersection(loop.nodes)

    def _store_early(self, slot: str) -> None:
        """Write a slot in the loop that makes its value, if nothing reads what it held after that."""
        value, made = self.plan.small[slot], None
        for k, level, loop in self.loops:
            if value in loop.nodes and loop.axes == self.plan.slots[slot] and not loop.reduces:
                made = k, level, loop
        if made is None:
            return

        def reads(nodes: Iterable[Node]) -> bool:
            return any(n.op == "input" and n.data == slot for n in nodes)

        k, level, here = made
        later = any(reads(p.sources) for p in self.passes[k:])
        for *when, loop in self.loops:
            later |= loop is not here and when >= [k, level] and reads(operands(loop.nodes))
        if not later:
            own = replace(here, stores={**here.stores, slot: value})
            self.gaps[k][level] = [own if x is here else x for x in self.gaps[k][level]]
            self.late.remove(slot)


def _levels(found: Iterable[Loop]) -> list[list[Loop]]:
    """Loops in stages. One goes on with what a reduction over its axes has made; those over no axes
    are one.
    """
    stages, at = list[list[Loop]](), dict[Node, int]()
    for loop in found:
        needed = {n for n in operands(loop.nodes) if n in at}
        level, joined = max((at[n] + 1 for n in needed), default=0), list[Loop]()
        if level and not (loop.axes and loop.reduces):
            last = [x for x in stages[level - 1] if needed.intersection(x.nodes)]
            alike = last[0].axes == loop.axes and (last[0].reduces or not loop.axes)
            joined, level = (last, level - 1) if len(last) == 1 and alike else ([], level)
        stages += [[]] if level == len(stages) else []
        joined = joined or [x for x in stages[level] if not x.axes and not loop.axes]
        for x in joined:
            stages[level].remove(x)
            loop = Loop(x.axes, (*x.nodes, *loop.nodes), x.reduces and x.axes != "")
        stages[level].append(loop)
        at |= dict.fromkeys(loop.nodes, level)
    return stages


def _with(loop: Loop, p: Pass) -> Pass:
    """A pass that makes what it needs of a loop's values."""
    used, own = {*operands(p.nodes)}, list[Node]()
    for n in reversed(loop.nodes):
        if n in used:
            own.insert(0, n)
            used |= {*n.args}
    return replace(p, nodes=(*own, *p.nodes)) if own else p
