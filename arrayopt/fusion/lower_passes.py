"""Lowering passes to functions for CPUs: loops over units, rows, columns and elements."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import Node
from arrayopt.fusion.index import ZERO, Index, Place, greatest, least, name, number, product
from arrayopt.fusion.layout import BANDS, CHUNK
from arrayopt.fusion.lower_between import LoweredBetween, Statements
from arrayopt.fusion.lower_rings import (
    STRETCH,
    buffers_of,
    in_turns,
    initialized,
    member_values,
    turns_over,
)
from arrayopt.fusion.lowering import Lowering
from arrayopt.fusion.passes import Between, Pass
from arrayopt.fusion.ring_members import LEAST_ON_CPU
from arrayopt.fusion.rings import Rolled
from arrayopt.fusion.windows import WINDOW
from arrayopt.state.quantized import scale_of

SUMS_AT_ONCE = 16
"""The most sums over a tensor in one loop: more would need too many registers."""


class Loops(Lowering):
    """The functions of a program for CPUs."""

    least, rolls_wide = LEAST_ON_CPU, False  # loops over complex numbers or codes are not faster

    def between(self, index: int, between: Between) -> program.Function:
        """Return the function of the computation before pass `index`."""
        return LoweredBetween(self.plan, self.layout, self.outliving).function(index, between)

    def units(self, index: int, pass_: Pass) -> program.Function:
        """Return the function of a pass, or product, for units lo to hi of one tensor."""
        if pass_.multiplies:
            return _product(index, pass_)
        body = self.body(index, pass_)
        if pass_.axes != self.plan.element:
            return self._square(index, pass_.axes[-1].upper(), body)
        matrices = self.plan.element != "C"
        lets = ["size", "TC", *("ABRC" if matrices else "")]
        made = program.extents(lets)
        rings = self.rings(pass_, body)
        of_rings = {} if rings is None else rings.member_of
        made += [program.Array(x, size) for x, size in body.arrays.items() if x not in of_rings]
        wide = CHUNK if matrices else STRETCH
        made += [bulk.Buffer(f"wide_{x}", wide) for x in body.codes]
        made += body.tensor
        made += [] if rings is None else [*member_values(rings), *buffers_of(rings)]
        if matrices:
            made += program.extents([*WINDOW, "TR", "G", "NR", "NC"])
            for axis in "RC":
                extent, tile = name(f"{axis}_1") - name(f"{axis}_0"), name(f"T{axis}")
                made.append(program.Let(f"M{axis}", (extent + tile - 1) // tile))
        # every second pass runs backwards, to start with elements that the pass before left in the
        # cache; but not in plans with products, where this would be one more loop to compile; and
        # not over codes, which are read faster forwards
        backwards = index % 2 == 1 and not self.plan.multiplies and not body.codes
        inside = self._tile(body) if matrices else self._stretch(index, pass_, body, rings)
        made.append(program.Loop("unit", name("lo"), name("hi"), tuple(inside), backwards))
        return program.Function(f"units_{index}", "units", tuple(made))

    def _stored(self, body: program.Body, first: Index, end: Index) -> Iterator[program.Statement]:
        """Encode buffers into a range of the slots of codes that are written."""
        for array in body.codes:
            if f"at_{array}" in body.elements.stores:
                buffer = f"wide_{array}"
                yield bulk.Codes(True, array, scale_of(array), first, end - first, buffer)

    def _elements(
        self, body: program.Body, loop: bulk.Elements, slices: dict[str, bulk.Slice], at: Index
    ) -> bulk.Elements:
        """Return a loop over a range of elements. It sees slots of codes as numbers in buffers."""
        read = []
        for array in body.codes:
            here, buffer = slices[f"at_{array}"], f"wide_{array}"
            count = here.end - here.first
            slices[f"at_{array}"] = bulk.Slice(buffer, ZERO, count)
            if f"at_{array}" in loop.loads:
                scale = scale_of(array)
                read.append(bulk.Codes(False, array, scale, here.first, count, buffer))
        storage = {x: array for x, array in loop.storage.items() if array not in body.codes}
        position = None if loop.position is None else loop.position + at
        return replace(loop, slices=slices, storage=storage, position=position, codes=tuple(read))

    def _stretch(
        self, index: int, pass_: Pass, body: program.Body, rings: Rolled | None
    ) -> Iterator[program.Statement]:
        """Yield the statements for a unit of a tensor that is seen as one row of elements."""
        start, end = name("o"), name("e")
        yield program.Let("o", name("unit") * name("TC"))
        yield program.Let("e", least(name("size"), start + name("TC")))
        sums = body.sums["tensor"]
        parts = [pass_] if body.codes else pass_.divided(SUMS_AT_ONCE)
        if rings is not None:
            yield from initialized(rings, self._partial)
            yield turns_over(index, pass_, rings, self._partial)
        elif body.codes or len(parts) > 1:
            loops = [body.elements]
            if len(parts) > 1:
                loops = [self.elements(f"pass_{index}_{i}", part) for i, part in enumerate(parts)]
            yield from (program.Start(f"t{s.id}", s) for s in sums)
            yield self._turns(body, loops)
            yield from (program.Write(self._partial(s), f"t{s.id}") for s in sums)
        else:  # one loop over all of the unit
            slices = bulk.sliced(body.elements.storage, start, end)
            yield self._elements(body, body.elements, slices, start)
            for order, reduction in enumerate(sums):
                yield program.Write(self._partial(reduction), Place("got", number(order)))

    def _turns(self, body: program.Body, loops: Sequence[bulk.Elements]) -> program.Loop:
        """Return a loop that runs all `loops` on one `STRETCH` of a unit after the other."""
        first, end, inside = name("first"), name("end"), Statements()
        for loop in loops:
            slices = bulk.sliced(loop.storage, first, end)
            inside.append(self._elements(body, loop, slices, first))
            for order, reduction in enumerate(loop.totals):
                got = Place("got", number(order))
                inside.append(program.Take(reduction, f"t{reduction.id}", got))
        return in_turns([*inside, *self._stored(body, first, end)])

    def _partial(self, reduction: Node, after: Index | None = None) -> Place:
        """The place of the unit's partial result of a reduction, or of one `after` so many."""
        return Place("part", self.part(reduction, after) + name("unit"))

    def _tile(self, body: program.Body) -> Iterator[program.Statement]:
        """The statements for a unit: some rows and columns of a matrix, or several matrices."""
        unit, at, rt, ct = map(name, ("unit", "at", "rt", "ct"))
        rows, columns = name("MR"), name("MC")
        yield program.Let("ct", unit % columns)
        yield program.Let("rt", unit // columns % rows)
        yield program.Let("at", unit // columns // rows)
        tiles = (("A", "G", "ab", at), ("R", "TR", "r", rt), ("C", "TC", "c", ct))
        for axis, extent, first, tile in tiles:
            yield program.Let(f"{first}0", name(f"{axis}_0") + tile * name(extent))
        for axis, extent, first, _ in tiles:
            end = name(f"{first}0") + name(extent)
            yield program.Let(f"{first}1", least(name(f"{axis}_1"), end))
        for axis, number_of in (("C", "ct"), ("R", "rt"), ("A", "at")):
            yield program.Let(number_of, name(number_of) + name(f"{axis}_T"))
        yield from (program.Start(f"t{s.id}", s) for s in body.sums["tensor"])
        yield program.Loop("ab", name("ab0"), name("ab1"), tuple(self._batch(body)))
        for s, first_one in body.sums["tensor"].items():
            here = first_one + (at * name("NR") + rt) * name("NC") + ct
            yield program.Write(Place("part", here), f"t{s.id}")

    def _batch(self, body: program.Body) -> Iterator[program.Statement]:
        """Yield the statements for the rows of one matrix in a unit."""
        ab, c0, width = name("ab"), name("c0"), name("c1") - name("c0")
        tile = ab * name("NR") + name("rt")
        yield program.Let("a", ab // name("B"))
        yield program.Let("b", ab % name("B"))
        yield from body.batch
        for node, place in body.columns.items():
            yield program.View(f"v{node.id}", place.room, place.index + c0, width)
        for reduction, at in body.sums["column"].items():
            view = f"s{reduction.id}"
            yield program.View(view, "work", at + tile * name("C") + c0, width)
            yield program.Fill(view, width, reduction)
        yield from (program.Start(f"y{s.id}", s) for s in body.sums["batch"])
        yield program.Loop("r", name("r0"), name("r1"), tuple(self._row(body)))
        for reduction, at in body.sums["batch"].items():
            here = Place("part", at + tile * name("NC") + name("ct"))
            yield program.Write(here, f"y{reduction.id}")

    def _row(self, body: program.Body) -> Iterator[program.Statement]:
        """Yield the statements for one row of a matrix in a unit."""
        ab, row, start, c0, c1 = map(name, ("ab", "r", "o", "c0", "c1"))
        rows, columns = name("R_1") - name("R_0"), name("C_1") - name("C_0")
        row_here = (ab - name("A_0")) * rows + row - name("R_0")
        yield program.Let("o", row_here * columns + c0 - name("C_0"))
        yield program.Let("e", start + c1 - c0)
        yield from body.row
        loop = body.elements
        slices = bulk.sliced(loop.storage, start, name("e"))
        views = [*(x for x in loop.loads if x not in loop.storage), *loop.into.values()]
        slices |= bulk.sliced(views, ZERO, c1 - c0)
        row_of_all = ab * name("R") + row
        yield self._elements(body, loop, slices, row_of_all * name("C") + c0)
        yield from self._stored(body, start, name("e"))
        for order, reduction in enumerate(loop.totals):
            got, rows_of = Place("got", number(order)), body.sums["row"]
            if reduction in rows_of:
                here = rows_of[reduction] + row_of_all * name("NC") + name("ct")
                yield program.Write(Place("work", here), got)
            else:
                kind = "t" if reduction in body.sums["tensor"] else "y"
                yield program.Take(reduction, f"{kind}{reduction.id}", got)

    def _square(self, index: int, extent: str, body: program.Body) -> program.Function:
        """The function of a pass over elements of products X Xᵀ, for one thread's share."""
        side, size, units, unit, ab, start = map(name, (extent, "size", "units", "unit", "ab", "o"))
        made = program.extents("ABRC")
        made.append(program.Let("size", side * side))
        made.append(program.Let("units", (size + (CHUNK - 1)) // CHUNK))
        made.append(program.Let("total", name("A") * name("B") * units))
        made += [program.Array(x, length) for x, length in body.arrays.items()]
        made += body.tensor
        here: Statements = [
            program.Let("ab", unit // units),
            program.Let("a", ab // name("B")),
            program.Let("b", ab % name("B")),
            *body.batch,
            program.Let("o", ab * size + unit % units * CHUNK),
            program.Let("e", least((ab + 1) * size, start + CHUNK)),
        ]
        slices = bulk.sliced(body.elements.storage, start, name("e"))
        here.append(self._elements(body, body.elements, slices, ZERO))
        return program.Function(f"units_{index}", "threads", (*made, _shared(here)))


def _product(index: int, pass_: Pass) -> program.Function:
    """Return the function of a product, for one thread's share of the bands.

    Bands are taken from both ends in turn: in a symmetric product, the last ones take longest.
    """
    (made,), names = pass_.nodes, list(pass_.loads)
    rows, columns, length = map(name, (*pass_.axes[-2:].upper(), made.multiplied[-1]))
    ab, band, bands, high, turn = map(name, ("ab", "band", "bands", "high", "turn"))
    body = program.extents("ABRC")
    body.append(program.Let("high", least(greatest(rows // 4, BANDS[0]), BANDS[1])))
    body.append(program.Let("bands", (rows + high - 1) // high))
    body.append(program.Let("total", name("A") * name("B") * bands))
    half, odd = turn // 2, turn % 2
    operands = zip((names[0], names[-1], *pass_.stores), (*made.args, made), strict=True)
    starts = [(x, ab * product(node.axes[-2:].upper())) for x, node in operands]
    first, end, sides = name("i0"), name("i1"), (rows, columns, length)
    here: Statements = [
        program.Let("ab", name("unit") // bands),
        program.Let("turn", name("unit") % bands),
        program.Let("band", (number(1) - odd) * half + odd * (bands - 1 - half)),
        program.Let("i0", band * high),
        program.Let("i1", least(rows, first + high)),
        bulk.Multiply(starts[0], starts[1], starts[2], first, end, sides, made.data),
    ]
    return program.Function(f"units_{index}", "threads", (*body, _shared(here)))


def _shared(body: Sequence[program.Statement]) -> program.Loop:
    """Return the loop over this thread's share of ``total`` units."""
    total, thread, threads = map(name, ("total", "thread", "threads"))
    return program.Loop(
        "unit", total * thread // threads, total * (thread + 1) // threads, tuple(body)
    )
