"""Lowering segments, for small matrices side by side (`arrayopt.fusion.lanes`), to functions for
CPUs.

A segment copies some matrices into planes: a plane has the same element of all these matrices. Each
pass is a loop over the lanes of a plane, inside loops over planes. Then the segment copies changed
arrays back. Planes are in the thread's own part of ``work``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import POSITION, Node
from arrayopt.fusion.index import Index, Place, column, least, name, number, position_of, product
from arrayopt.fusion.lanes import Segment
from arrayopt.fusion.layout import outliving
from arrayopt.fusion.lower_between import loops_over
from arrayopt.fusion.lower_passes import Loops
from arrayopt.fusion.passes import Pass, SmallLoop


class LoweredSegment:
    """Makes the function of a segment.

    Attributes
    ----------
    plane_axes : dict of str to str
        For each name of planes, the axes: there is a plane for each position along them.
    own : list of str
        The names of the planes that no other segment reads.
    planes_of : dict of Node to str
        The name of the planes that hold a value.
    elements, written : of str
        The arrays of elements, and those of them that are written.
    scalars : dict of Node
        The values that are the same for all matrices.
    """

    def __init__(self, lowering: Loops, segment: Segment) -> None:
        self.lowering, self.segment = lowering, segment
        self.passes = [lowering.plan.passes[i] for i in segment.passes]
        elements, self.written = dict[str, None](), dict[str, None]()
        self.sums = list[Node]()
        for pass_ in self.passes:
            elements |= dict.fromkeys(pass_.arrays)
            self.written |= dict.fromkeys(pass_.stores)
            self.sums += pass_.sums
        self.elements = list(elements)
        self.scalars: dict[Node, None] = {}
        self.planes_of, self.plane_axes = dict[Node, str](), dict[str, str]()
        for array, node in segment.reads.items():
            self._add(f"q_{array}", node)
        for array in self.elements:
            self.plane_axes[f"q_{array}"] = _inside(lowering.plan.element)
        local = [node for node in self.sums if node.axes]
        self.vectors = [n for n in lowering.layout.vectors if n in segment.carried or n in local]
        for node in self.vectors:
            self._add(f"c{node.id}", node)
        outlive = outliving(self.passes, segment.small) | set(segment.writes.values())
        small = list[Node]()
        for between in segment.small:
            small += [node for node in between.nodes if node in outlive and node.op != "input"]
        for node in (*small, *local):
            if node not in self.planes_of:
                self._add(f"v{node.id}", node)
        shared = {self.planes_of[node] for node in self.vectors}
        self.own = [planes for planes in self.plane_axes if planes not in shared]

    def _add(self, planes: str, node: Node) -> None:
        """Add the planes that hold a value."""
        self.planes_of[node] = planes
        self.plane_axes[planes] = _inside(node.axes)

    def _size(self, array: str) -> Index:
        """Return how many numbers a matrix has in an array."""
        return product(_inside(self.lowering.plan.slots.get(array, self.lowering.plan.element)))

    def _body(self, index: int) -> Iterator[program.Statement]:
        """Yield the statements of all passes, and of the computation between them."""
        for turn, between in enumerate(self.segment.small):
            for i, loop in enumerate(between.loops):
                yield from self._over(f"small_{index}_{turn}_{i}", self._as_pass(loop))
            if turn < len(self.passes):
                pass_ = self.passes[turn]
                loads = {f"q_{array}": node for array, node in pass_.loads.items()}
                stores = {f"q_{array}": node for array, node in pass_.stores.items()}
                function = f"pass_{self.segment.passes[turn]}"
                yield from self._over(function, replace(pass_, loads=loads, stores=stores))

    def _as_pass(self, loop: SmallLoop) -> Pass:
        """Return a loop between passes as a pass, which stores the values that others read."""
        if loop.reduces:
            return Pass({}, (), {}, loop.nodes, loop.nodes[0].args[0].axes)
        stores = {self.planes_of[node]: node for node in loop.nodes if node in self.planes_of}
        return Pass({}, loop.nodes, stores, (), loop.axes)

    def _over(self, function: str, pass_: Pass) -> Iterator[program.Statement]:
        """Yield a pass whose arrays are planes: a loop over lanes, inside loops over planes."""
        here, width = {*pass_.nodes, *pass_.loads.values()}, name("n")
        used = dict.fromkeys(pass_.sources)
        reads, scalars = dict(pass_.loads), list[Node]()
        for node in used:
            if node in here or node.op in ("const", POSITION):
                continue
            if node in self.planes_of:
                reads[self.planes_of[node]] = node
            else:
                scalars.append(node)
        self.scalars |= dict.fromkeys(scalars)
        into = {node: self.planes_of[node] for node in pass_.sums if node.axes}
        slices = dict[str, bulk.Slice]()
        for planes in (*reads, *pass_.stores, *into.values()):
            first = position_of(self.plane_axes[planes]) * width
            slices[planes] = bulk.Slice(planes, first, first + width)
        sums = {node: node.args[0] for node in pass_.sums}
        values = tuple(scalars), reads, pass_.nodes, pass_.stores, sums
        loop = bulk.Elements(function, slices, *values, into, stride=product("RC"))
        if any(node.op == POSITION for node in used):
            loop = replace(loop, position=name("start") + name("r") * name("C") + name("c"))
        for node, planes in into.items():
            yield program.Fill(planes, width * product(self.plane_axes[planes]), node)
        inside: list[program.Statement] = [loop]
        for i, node in enumerate(loop.totals):
            inside.append(program.Take(node, f"t{node.id}", Place("got", number(i))))
        yield from loops_over(_inside(pass_.axes), inside)

    def units(self, index: int) -> program.Function:
        """Return the segment's function, for units lo to hi of one tensor."""
        lowering, segment = self.lowering, self.segment
        inside = tuple(self._unit(index))
        body = program.extents([*"ABRC", "G"])
        body.append(program.Let("count", name("A") * name("B")))
        for array in dict.fromkeys([*self.elements, *segment.reads, *segment.writes]):
            body.append(program.Array(array, name("count") * self._size(array)))
        body += [program.Array(n.data, number(1)) for n in self.scalars if n.op == "input"]
        body += lowering.reads(self.scalars)
        own = name("thread") * name("G") * self._count(self.own)
        body.append(program.Let("own", column("OWN") + own))
        # every second segment runs backwards, to start with what the one before left in the cache
        body.append(program.Loop("unit", name("lo"), name("hi"), inside, index % 2 == 1))
        return program.Function(f"units_{index}", "units", tuple(body))

    def _unit(self, index: int) -> Iterator[program.Statement]:
        """Yield the statements for a unit: some matrices."""
        lowering, segment, ab = self.lowering, self.segment, name("ab")
        loops = list(self._body(index))
        yield program.Let("ab", name("unit") * name("G"))
        yield program.Let("n", least(name("count"), ab + name("G")) - ab)
        if lowering.plan.draws:
            yield program.Let("start", column("START") + ab * name("R") * name("C"))
        for i, planes in enumerate(self.own):
            first = name("own") + name("G") * self._count(self.own[:i])
            yield program.View(planes, "work", first, name("n") * product(self.plane_axes[planes]))
        for node in self.vectors:
            each = product(_inside(node.axes))
            first = column(f"VEC{lowering.vector[node]}") + ab * each
            yield program.View(f"c{node.id}", "work", first, name("n") * each)
        before = set[str]()
        for pass_ in self.passes:
            yield from (self._spread(x, f"q_{x}") for x in pass_.loads if x not in before)
            before.update(pass_.arrays)
        yield from (self._spread(array, f"q_{array}") for array in segment.reads)
        totals = [node for node in self.sums if not node.axes]
        yield from (program.Start(f"t{node.id}", node) for node in totals)
        yield from loops
        for node in totals:
            yield program.Write(Place("part", lowering.part(node) + name("unit")), f"t{node.id}")
        yield from (self._spread(array, f"q_{array}", back=True) for array in self.written)
        for slot, node in segment.writes.items():
            yield self._spread(slot, self.planes_of[node], back=True)

    def _spread(self, array: str, planes: str, *, back: bool = False) -> bulk.Spread:
        """Return the statement that copies a unit's matrices from an array to planes, or back."""
        each, ab = self._size(array), name("ab")
        return bulk.Spread(back, array, ab * each, (ab + name("n")) * each, planes, each)

    def _count(self, several: Sequence[str]) -> Index:
        """Return the number of planes under several names."""
        axes, found = [self.plane_axes[planes] for planes in several], number(0)
        for each in dict.fromkeys(axes):
            found = found + number(axes.count(each)) * product(each)
        return found


def _inside(axes: str) -> str:
    """Return those of the axes that are inside a matrix."""
    return "".join(axis for axis in axes if axis in "RC")
