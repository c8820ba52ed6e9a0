"""Lowering segments, for small matrices side by side (`arrayopt.fusion.lanes`), to functions for
CPUs.

A segment copies some matrices into planes: a plane has the same element of all these matrices. Each
pass is a loop over the lanes of a plane, inside loops over planes. Then the segment copies changed
arrays back. Planes are in the thread's own part of ``work``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import POSITION, Node, operands
from arrayopt.fusion.index import Index, Place, column, least, name, number, position_of, product
from arrayopt.fusion.lanes import Segment
from arrayopt.fusion.layout import outliving
from arrayopt.fusion.lower_between import loops_over
from arrayopt.fusion.lower_passes import Loops
from arrayopt.fusion.passes import Pass, SmallLoop


def _inside(axes: str) -> str:
    """Return those of the axes that are inside a matrix."""
    return "".join(x for x in axes if x in "RC")


class LoweredSegment:
    """Makes the function of a segment.

    Attributes
    ----------
    plane_axes : dict of str to str
        For each name of planes, the axes: there is a plane for each position along them.
    carried_axes : dict of str to str
        The same for planes that later segments read.
    planes_of : dict of Node to str
        The name of the planes that hold a value.
    reduced : list of Node
        The reductions over the whole tensor.
    elements, stored : of str
        The arrays of elements, and those of them that are written.
    """

    def __init__(self, lowering: Loops, segment: Segment) -> None:
        self.lowering, self.segment = lowering, segment
        self.passes = [lowering.plan.passes[i] for i in segment.passes]
        sums, self.reduced = list[Node](), list[Node]()
        elements, self.stored = dict[str, None](), dict[str, None]()
        for pass_ in self.passes:
            sums += [x for x in pass_.sums if x.axes]
            self.reduced += pass_.reducing("tensor")
            elements |= dict.fromkeys(pass_.arrays)
            self.stored |= dict.fromkeys(pass_.stores)
        self.vectors = [n for n in lowering.layout.vectors if n in segment.carried or n in sums]
        self.carried_axes = {f"c{n.id}": _inside(n.axes) for n in self.vectors}
        self.planes_of = {n: f"q_{x}" for x, n in segment.reads.items()}
        self.planes_of |= {n: f"c{n.id}" for n in self.vectors}
        self.elements = list(elements)
        self.plane_axes = {f"q_{x}": _inside(n.axes) for x, n in segment.reads.items()}
        self.plane_axes |= {f"q_{x}": _inside(lowering.plan.element) for x in self.elements}
        outlive = outliving(self.passes, segment.small) | set(segment.writes.values())
        small = list[Node]()
        for between in segment.small:
            small += [n for n in between.nodes if n in outlive and n.op != "input"]
        for n in [*small, *sums]:
            if n not in self.planes_of:
                self.planes_of[n] = f"v{n.id}"
                self.plane_axes[f"v{n.id}"] = _inside(n.axes)
        self.scalars: dict[Node, None] = {}

    def _size(self, array: str) -> Index:
        """Return how many numbers a matrix has in an array."""
        return product(_inside(self.lowering.plan.slots.get(array, self.lowering.plan.element)))

    # ---- loops over lanes ------------------------------------------------------------------------

    def _body(self, k: int) -> Iterator[program.Statement]:
        """Yield the statements of all passes, and of the computation between them."""
        for j, b in enumerate(self.segment.small):
            for i, loop in enumerate(b.loops):
                yield from self._small(f"small_{k}_{j}_{i}", loop)
            if j < len(self.passes):
                yield from self._pass(f"pass_{self.segment.passes[j]}", self.passes[j])

    def _small(self, function: str, loop: SmallLoop) -> Iterator[program.Statement]:
        """Yield the statements for values per row, column or matrix."""
        first = loop.nodes[0]
        if loop.reduces:
            (x,) = first.args
            yield self._fill(first)
            yield from self._over(function, x.axes, {}, (), {}, {first: x})
        else:
            stores = {self.planes_of[n]: n for n in loop.nodes if n in self.planes_of}
            yield from self._over(function, loop.axes, {}, loop.nodes, stores, {})

    def _fill(self, reduction: Node) -> program.Fill:
        """Return the statement that sets all planes of a reduction to its initial value."""
        planes = self.planes_of[reduction]
        size = name("n") * product((self.plane_axes | self.carried_axes)[planes])
        return program.Fill(planes, size, reduction)

    def _pass(self, function: str, pass_: Pass) -> Iterator[program.Statement]:
        """Yield the statements of a pass over the elements."""
        yield from (self._fill(x) for x in pass_.sums if x.axes)
        loads = {f"q_{x}": n for x, n in pass_.loads.items()}
        stores = {f"q_{x}": n for x, n in pass_.stores.items()}
        sums = {x: x.args[0] for x in pass_.sums}
        yield from self._over(function, pass_.axes, loads, pass_.nodes, stores, sums)

    def _over(
        self,
        function: str,
        axes: str,
        loads: dict[str, Node],
        nodes: Sequence[Node],
        stores: dict[str, Node],
        sums: dict[Node, Node],
    ) -> list[program.Statement]:
        """Return a loop over the lanes of a plane, inside loops over planes."""
        used = [*operands(nodes), *stores.values(), *sums.values()]
        known = {*nodes, *loads.values()}
        named = [n for n in dict.fromkeys(used) if n.op not in ("const", POSITION)]
        outer = [n for n in named if n not in known]
        reads = loads | {self.planes_of[n]: n for n in outer if n in self.planes_of}
        scalars = tuple(n for n in outer if n not in self.planes_of)
        self.scalars |= dict.fromkeys(scalars)
        into = {s: self.planes_of[s] for s in sums if s.axes}
        slices = {}
        for planes in dict.fromkeys([*reads, *stores, *into.values()]):
            first = position_of((self.plane_axes | self.carried_axes)[planes]) * name("n")
            slices[planes] = planes, first, first + name("n")
        position = None
        if any(n.op == POSITION for n in used):
            position = name("start") + name("r") * name("C") + name("c")
        made = bulk.Elements(function, slices, scalars, reads, tuple(nodes), stores, sums, into)
        each = replace(made, position=position, stride=product("RC"))
        takes = list[program.Statement]()
        for i, s in enumerate(each.totals):
            takes.append(program.Take(s, f"t{s.id}", Place("got", number(i))))
        return loops_over(_inside(axes), [each, *takes])

    # ---- all of it -------------------------------------------------------------------------------

    def units(self, index: int) -> program.Function:
        """Return the segment's function, for units lo to hi of one tensor."""
        lowering, segment = self.lowering, self.segment
        inside = list(self._unit(index))
        body: list[program.Statement] = [program.Let(x, column(f"IN_{x}")) for x in (*"ABRC", "G")]
        body.append(program.Let("count", name("A") * name("B")))
        slots = list(dict.fromkeys([*segment.reads, *segment.writes]))
        body += [program.Array(x, name("count") * self._size(x)) for x in [*self.elements, *slots]]
        body += [program.Array(n.data, number(1)) for n in self.scalars if n.op == "input"]
        body += lowering.reads(self.scalars)
        every = _count_of_planes(list(self.plane_axes.values()))
        body.append(program.Let("own", column("OWN") + name("thread") * name("G") * every))
        # every second segment runs backwards, to start with what the one before left in the cache
        body.append(program.Loop("unit", name("lo"), name("hi"), tuple(inside), index % 2 == 1))
        return program.Function(f"units_{index}", "units", tuple(body))

    def _unit(self, k: int) -> Iterator[program.Statement]:
        """Yield the statements for a unit: some matrices."""
        lowering, segment, ab = self.lowering, self.segment, name("ab")
        loops = list(self._body(k))
        yield program.Let("ab", name("unit") * name("G"))
        yield program.Let("n", least(name("count"), ab + name("G")) - ab)
        if lowering.plan.draws:
            yield program.Let("start", column("START") + ab * name("R") * name("C"))
        for i, (planes, axes) in enumerate(self.plane_axes.items()):
            first = name("own") + name("G") * _count_of_planes(list(self.plane_axes.values())[:i])
            yield program.View(planes, "work", first, name("n") * product(axes))
        for n in self.vectors:
            each = product(_inside(n.axes))
            yield program.View(
                f"c{n.id}", "work", column(f"VEC{lowering.vector[n]}") + ab * each, name("n") * each
            )
        written: set[str] = set()
        for p in self.passes:
            yield from (self._spread(x, f"q_{x}") for x in p.loads if x not in written)
            written |= {*p.loads, *p.stores}
        yield from (self._spread(x, f"q_{x}") for x in segment.reads)
        yield from (program.Start(f"t{x.id}", x) for x in self.reduced)
        yield from loops
        for x in self.reduced:
            yield program.Write(Place("part", lowering.part(x) + name("unit")), f"t{x.id}")
        yield from (self._spread(x, f"q_{x}", back=True) for x in self.stored)
        for slot, node in segment.writes.items():
            yield self._spread(slot, self.planes_of[node], back=True)

    def _spread(self, array: str, planes: str, *, back: bool = False) -> bulk.Spread:
        """Return the statement that copies a unit's matrices from an array to planes, or back."""
        each = self._size(array)
        return bulk.Spread(
            back, array, name("ab") * each, (name("ab") + name("n")) * each, planes, each
        )


def _count_of_planes(counts: list[str]) -> Index:
    """Return the number of planes, given the axes of each value."""
    made = number(0)
    for axes in dict.fromkeys(counts):
        made = made + number(counts.count(axes)) * product(axes)
    return made
