"""Lowering a plan to a program for CPUs: `lowered`, which the engines `numba` and `cpp` call.

For small matrices side by side (`arrayopt.fusion.segments`), it is a program in segments. A segment
copies some matrices into planes: a plane has the same element of all these matrices. Each pass is a
loop along a plane, inside loops over planes. Then the segment copies changed arrays back. Planes
are in the thread's own part of ``work``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import CACHED, POSITION, Node
from arrayopt.fusion.index import Index, Place, column, least, name, number, position_of, product
from arrayopt.fusion.layout import layout, outliving, read_elsewhere
from arrayopt.fusion.lower_between import loops_over
from arrayopt.fusion.lower_passes import Loops
from arrayopt.fusion.lowering import scratch_of
from arrayopt.fusion.passes import Pass, SmallLoop
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import Function, Program, Stage
from arrayopt.fusion.segments import Segment, Segmented


@lru_cache(maxsize=CACHED)
def lowered(plan: Plan, segmented: Segmented | None = None) -> Program:
    """Return the program of a plan; if it is `segmented`, in segments."""
    return _whole(plan) if segmented is None else _of_segments(plan, segmented)


def _whole(plan: Plan) -> Program:
    """Return the program of a plan. Passes that differ only in scratch arrays share a function."""
    lowering = Loops(plan, layout(plan), read_elsewhere(plan))
    stages: list[Stage] = []
    made: dict[Any, Function] = {}
    for index, between in enumerate(plan.between):
        before = lowering.between(index, between) if between else Function("", "", ())
        stages.append(Stage(before))
        if index == len(plan.passes):  # the last computation between is after all passes
            break
        pass_ = plan.passes[index]
        scratch = scratch_of(pass_, plan) if plan.multiplies else ()
        key = lowering.described(pass_) if plan.multiplies else index
        if key not in made:
            made[key] = replace(lowering.units(index, pass_), scratch=scratch)
        stages.append(Stage(made[key], scratch))
    return Program(tuple(stages))


def _of_segments(plan: Plan, segmented: Segmented) -> Program:
    """Return the program of a plan in segments."""
    lowering = Loops(plan, segmented.layout, {*segmented.layout.tensor, *segmented.layout.vectors})
    stages: list[Stage] = []
    planes = list[tuple[str, ...]]()
    for k, segment in enumerate(segmented.segments):
        lowered_segment = LoweredSegment(lowering, segment)
        stages.append(Stage(lowering.between(k, segment.before)))
        stages.append(Stage(lowered_segment.units(k)))
        planes.append(tuple(map(lowered_segment.plane_axes.__getitem__, lowered_segment.own)))
    stages.append(Stage(lowering.between(len(segmented.segments), segmented.last)))
    return Program(tuple(stages), tuple(planes))


class LoweredSegment:
    """Makes the function of a segment. Planes are named ``q_`` and an array, ``c`` and the id of a
    sum that other segments read, or ``v`` and the id of another value.

    Attributes
    ----------
    plane_axes : dict of str to str
        For each name of planes, the axes: there is a plane for each position along them.
    planes_of : dict of Node to str
        The name of the planes that hold a value.
    own, vectors : list of str, list of Node
        The names of the planes that no other segment reads; and the sums in the others.
    elements, written : of str
        The arrays of elements, and those of them that are written.
    """

    def __init__(self, lowering: Loops, segment: Segment) -> None:
        self.lowering, self.segment = lowering, segment
        self.passes = [lowering.plan.passes[i] for i in segment.passes]
        self.elements = list(dict.fromkeys(chain.from_iterable(x.arrays for x in self.passes)))
        self.written = dict.fromkeys(chain.from_iterable(x.stores for x in self.passes))
        self.sums = list(chain.from_iterable(x.sums for x in self.passes))
        own_sums = [node for node in self.sums if node.axes]
        held = {*segment.carried, *own_sums}
        self.vectors = [node for node in lowering.layout.vectors if node in held]
        self.planes_of, self.plane_axes = dict[Node, str](), dict[str, str]()
        for array, node in segment.reads.items():
            self._add(f"q_{array}", node)
        for array in self.elements:
            self.plane_axes[f"q_{array}"] = _inside(lowering.plan.element)
        for node in self.vectors:
            self._add(f"c{node.id}", node)
        for node in (*self._read_elsewhere(), *own_sums):
            if node not in self.planes_of:
                self._add(f"v{node.id}", node)
        shared = {self.planes_of[node] for node in self.vectors}
        self.own = [planes for planes in self.plane_axes if planes not in shared]

    def _read_elsewhere(self) -> Iterator[Node]:
        """Yield values between passes that are read outside of the loop that computes them."""
        read = outliving(self.passes, self.segment.small) | {*self.segment.writes.values()}
        for between in self.segment.small:
            yield from (node for node in between.nodes if node in read and node.op != "input")

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
        """Yield a pass whose arrays are planes: a loop along a plane, inside loops over planes."""
        width = name("n")
        inner = {*pass_.nodes, *pass_.loads.values()}
        given = dict.fromkeys(x for x in pass_.sources if x.op not in ("const", POSITION))
        outer = [node for node in given if node not in inner]
        scalars = [node for node in outer if node not in self.planes_of]
        reads = pass_.loads | {self.planes_of[x]: x for x in outer if x in self.planes_of}
        into = {node: self.planes_of[node] for node in pass_.sums if node.axes}
        slices = dict[str, bulk.Slice]()
        for planes in (*reads, *pass_.stores, *into.values()):
            first = position_of(self.plane_axes[planes]) * width
            slices[planes] = bulk.Slice(planes, first, first + width)
        sums = {node: node.args[0] for node in pass_.sums}
        values = tuple(scalars), reads, pass_.nodes, pass_.stores, sums
        loop = bulk.Elements(function, slices, *values, into, stride=product("RC"))
        if any(node.op == POSITION for node in pass_.sources):
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
        inside, scalars = tuple(self._unit(index)), dict[Node, None]()
        for loop in program.elements_of(inside):
            scalars |= dict.fromkeys(loop.scalars)
        body = program.extents([*"ABRC", "G"])
        body.append(program.Let("count", name("A") * name("B")))
        for array in dict.fromkeys([*self.elements, *segment.reads, *segment.writes]):
            body.append(program.Array(array, name("count") * self._size(array)))
        body += [program.Array(n.data, number(1)) for n in scalars if n.op == "input"]
        body += lowering.reads(scalars)
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
