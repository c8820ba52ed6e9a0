"""Lowering what lies between passes: results are combined, values computed, slots written."""

from collections.abc import Sequence

from arrayopt.fusion.graph import Node
from arrayopt.fusion.index import ONE, ZERO, column, name, number, product
from arrayopt.fusion.lowering import Lowering, loops_over, position_of
from arrayopt.fusion.passes import Between
from arrayopt.fusion.passes import Loop as Small
from arrayopt.fusion.program import (
    Array,
    Compute,
    Function,
    Let,
    Loop,
    Place,
    Read,
    Start,
    Statement,
    Take,
    View,
    When,
    Write,
)
from arrayopt.fusion.ring_members import LEAST

__all__ = ["lowered_between"]


def lowered_between(lowering: Lowering, index: int, between: Between) -> Function:
    """What comes before pass k: partial results are combined, then values computed and slots
    written.
    """
    body: list[Statement] = [Let(x, column(f"IN_{x}")) for x in (*"ABRC", "NR", "NC")]
    reads = list(
        dict.fromkeys([*(a for n in between.nodes for a in n.args), *between.stores.values()])
    )
    arrays = {n.data: n.axes for n in reads if n.op == "input"}
    arrays |= {x: lowering.plan.slots[x] for x in between.stores}
    body += [Array(x, product(axes)) for x, axes in arrays.items()]
    body += lowering.scalars(reads, wide=True)
    lowering.seen = {}
    rest: list[Statement] = []
    for run in _runs(lowering, between.combine):
        rest += _combine_all(lowering, run) if len(run) >= LEAST else _combine(lowering, run[0])
    for loop in between.after:
        rest += _reduce(lowering, loop) if loop.reduces else _small(lowering, loop)
    for array, node in between.stores.items():
        axes = lowering.plan.slots[array]
        value = node if lowering.where.place(node) in ("const", "scalar") else lowering.place(node)
        rest += loops_over(axes, [Write(Place(f"at_{array}", position_of(axes)), value)])
    for node in lowering.seen:
        i = lowering.vector[node]
        body.append(View(f"w{i}", "work", column(f"VEC{i}"), product(node.axes)))
    lowering.seen = None
    return Function(f"between_{index}", "", (*body, *rest))


def _runs(lowering: Lowering, reductions: Sequence[Node]) -> list[list[Node]]:
    """Reductions over tensors whose partial results and values lie side by side, as those of
    the members of rings do; others, and few, alone.
    """
    runs = list[list[Node]]()
    for reduction in sorted(reductions, key=lowering.partial.__getitem__):
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and last.op == reduction.op
            and lowering.where.partials[last] == lowering.where.partials[reduction] == "tensor"
            and lowering.partial[reduction] == lowering.partial[last] + 1
            and lowering.where.tensor[reduction] == lowering.where.tensor[last] + 1
        ):
            runs[-1].append(reduction)
        else:
            runs.append([reduction])
    found = list[list[Node]]()
    for run in runs:
        found += [run] if len(run) >= LEAST else [[reduction] for reduction in run]
    return found


def _combine_all(lowering: Lowering, run: Sequence[Node]) -> list[Statement]:
    """Put reductions together whose partial results lie side by side."""
    first, which = run[0], name("which")
    base = column(f"PART{lowering.partial[first]}", which)
    each = Take(first, "acc", Place("part", base + name("unit")))
    taken = Loop("unit", ZERO, column("IN_UNITS"), (each,))
    into = Place("values", number(lowering.where.tensor[first]) + which)
    body: tuple[Statement, ...] = (Start("acc", first), taken, Write(into, "acc"))
    return [Loop("which", ZERO, number(len(run)), body)]


def _combine(lowering: Lowering, reduction: Node) -> list[Statement]:
    """Put a reduction over elements together from its partial results, in their order."""
    base, kind, element = (
        lowering.part(reduction),
        lowering.where.partials[reduction],
        lowering.plan.element,
    )
    if kind == "tensor":
        each = Take(reduction, "acc", Place("part", base + name("unit")))
        taken = Loop("unit", ZERO, column("IN_UNITS"), (each,))
        return [Start("acc", reduction), taken, Write(lowering.place(reduction), "acc")]
    outer = "".join(x for x in "AB" if x not in reduction.axes and x in element)
    ab = (
        ZERO
        if element == "RC"
        else name("a")
        if element == "ARC"
        else name("a") * name("B") + name("b")
    )
    rows, columns = name("NR"), name("NC")
    if kind == "row":
        along, count = "ct", columns
        here = Place("work", base + (ab * name("R") + name("r")) * columns + name("ct"))
    elif kind == "column":
        along, count = "rt", rows
        here = Place("work", base + (ab * rows + name("rt")) * name("C") + name("c"))
    else:
        along, count = "unit", rows * columns
        here = Place("part", base + ab * rows * columns + name("unit"))
    inside = loops_over(outer, [Loop(along, ZERO, count, (Take(reduction, "acc", here),))])
    combined = loops_over(
        reduction.axes, [Start("acc", reduction), *inside, Write(lowering.place(reduction), "acc")]
    )
    if kind not in ("row", "column") or outer:
        return combined
    view = View("one", "work", base, product(reduction.axes))
    copy = Write(lowering.place(reduction, name("i")), Place("one", name("i")))
    copied: tuple[Statement, ...] = (view, Loop("i", ZERO, product(reduction.axes), (copy,)))
    return [When(count, ONE, copied, tuple(combined))]


def _small(lowering: Lowering, loop: Small) -> list[Statement]:
    """Operations over the same axes."""
    made, wide = set(loop.nodes), not loop.axes
    read = dict.fromkeys(a for x in loop.nodes for a in x.args if a not in made)
    read = {n: None for n in read if lowering.where.place(n) not in ("const", "scalar")}
    before: list[Statement] = [Read(n, lowering.place(n), wide) for n in read if not n.axes]
    inside: list[Statement] = [Read(n, lowering.place(n), wide) for n in read if n.axes]
    for n in loop.nodes:
        inside.append(Compute(n))
        if n in lowering.kept:
            inside.append(Write(lowering.place(n), n))
    return [*before, *loops_over(loop.axes, inside)]


def _reduce(lowering: Lowering, loop: Small) -> list[Statement]:
    """A reduction over some of the axes of a value that goes over few."""
    (n,) = loop.nodes
    (x,) = n.args
    inside = loops_over(
        "".join(a for a in x.axes if a not in n.axes), [Take(n, "acc", lowering.place(x))]
    )
    return loops_over(n.axes, [Start("acc", n), *inside, Write(lowering.place(n), "acc")])
