"""Lowering a plan to a program for CPUs: loops over units, rows and columns, in which every place
is an explicit index.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from arrayopt.fusion import program
from arrayopt.fusion.graph import Node
from arrayopt.fusion.index import (
    INDEX,
    ONE,
    ZERO,
    Index,
    Place,
    column,
    greatest,
    least,
    name,
    number,
    position_of,
    product,
)
from arrayopt.fusion.layout import BANDS, CHUNK
from arrayopt.fusion.lowering import Lowering
from arrayopt.fusion.passes import Between, Pass
from arrayopt.fusion.passes import Loop as Small
from arrayopt.fusion.windows import WINDOW
from arrayopt.state.quantized import scale_of

__all__ = ["Loops", "loops_over"]

STRETCH = 1024
"""So many elements of slots of codes are widened at a time: they stay in the first cache."""

AT_ONCE = 16
"""So many sums over a tensor are made in one loop: with more, registers would be few."""

Statements = list[program.Statement]
Slices = dict[str, tuple[str, Index, Index]]


class Loops(Lowering):
    """A program for CPUs, which is being made.

    Attributes
    ----------
    seen : dict of Node
        Vectors that the function that is being made has looked at, by a view.
    """

    seen: dict[Node, None] | None = None

    def place(self, node: Node, at: Index | None = None) -> Place:
        """See `Lowering.place`; between passes, where loops begin at 0, a vector is seen by a view,
        which is noted.
        """
        if self.seen is None or node not in self.vector:
            return super().place(node, at)
        self.seen[node] = None
        return Place(f"w{self.vector[node]}", position_of(node.axes) if at is None else at)

    # ---- passes ----------------------------------------------------------------------------------

    def units(self, index: int, pass_: Pass) -> program.Function:
        """Pass k over units lo to hi of one tensor."""
        if pass_.multiplies:
            return self._product(index, pass_)
        body = self.body(index, pass_)
        if pass_.axes != self.plan.element:
            return self._square(index, pass_.axes[-1].upper(), body)
        matrices = self.plan.element != "C"
        lets = ["size", "TC", *("ABRC" if matrices else "")]
        made: Statements = [program.Let(x, column(f"IN_{x.upper()}")) for x in lets]
        made += [program.Array(x, size) for x, size in body.arrays.items()]
        wide = CHUNK if matrices else STRETCH
        made += [program.Buffer(f"wide_{x}", wide) for x in body.codes]
        made += body.tensor
        if matrices:
            made += [program.Let(x, column(f"IN_{x}")) for x in (*WINDOW, "TR", "G", "NR", "NC")]
            for axis in "RC":
                extent, tile = name(f"{axis}_1") - name(f"{axis}_0"), name(f"T{axis}")
                made.append(program.Let(f"M{axis}", (extent + tile - 1) // tile))
        # every other pass runs backwards, so that it begins with what the one before has left in
        # the cache
        # in turns it would be one loop more to compile
        turned = index % 2 == 1 and not self.plan.multiplies
        inside = self._tile(body) if matrices else self._stretch(index, pass_, body)
        made.append(program.Loop("unit", name("lo"), name("hi"), tuple(inside), turned))
        return program.Function(f"units_{index}", "units", tuple(made))

    def _elements(
        self, body: program.Body, loop: program.Elements, slices: Slices, at: Index
    ) -> Statements:
        """A loop over the elements of a stretch, with what reads and stores codes before and after
        it.
        """
        before: Statements = []
        after: Statements = []
        storage = dict(loop.storage)
        for array in body.codes:
            here, buffer = f"at_{array}", f"wide_{array}"
            _, first, end = slices[here]
            slices[here] = buffer, ZERO, end - first
            stretch = array, scale_of(array), first, end - first, buffer
            if here in loop.loads:
                before.append(program.Codes(False, *stretch))
            if here in loop.stores:
                after.append(program.Codes(True, *stretch))
            del storage[here]
        position = None if loop.position is None else loop.position + at
        return [*before, replace(loop, slices=slices, storage=storage, position=position), *after]

    def _stretch(self, index: int, pass_: Pass, body: program.Body) -> Iterator[program.Statement]:
        """A unit of a tensor that is seen as one row of elements."""
        start, end_of_unit = name("o"), name("e")
        yield program.Let("o", name("unit") * name("TC"))
        yield program.Let("e", least(name("size"), start + name("TC")))
        parts = [pass_] if body.codes else pass_.in_turns(AT_ONCE)
        turns = [body.elements]
        if len(parts) > 1:
            turns = [self.elements(f"pass_{index}_{i}", part) for i, part in enumerate(parts)]
        places = {s: Place("part", at + name("unit")) for s, at in body.sums["tensor"].items()}
        if not body.codes and len(turns) == 1:
            slices = {x: (x, start, end_of_unit) for x in body.elements.storage}
            yield from self._elements(body, body.elements, slices, start)
            for order, reduction in enumerate(places):
                yield program.Write(places[reduction], Place("got", number(order)))
            return
        first, end = name("first"), name("end")
        inside: Statements = [
            program.Let("first", start + name("turn") * STRETCH),
            program.Let("end", least(end_of_unit, first + STRETCH)),
        ]
        for loop in turns:
            inside += self._elements(body, loop, {x: (x, first, end) for x in loop.storage}, first)
            for order, reduction in enumerate(loop.totals):
                got = Place("got", number(order))
                inside.append(program.Take(reduction, f"t{reduction.id}", got))
        yield from (program.Start(f"t{s.id}", s) for s in places)
        count = (end_of_unit - start + (STRETCH - 1)) // STRETCH
        yield program.Loop("turn", ZERO, count, tuple(inside))
        for reduction, place in places.items():
            yield program.Write(place, f"t{reduction.id}")

    def _tile(self, body: program.Body) -> Iterator[program.Statement]:
        """A unit of a tensor that is seen as matrices: some rows and columns of one, or several
        whole ones.
        """
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
        """The rows of one matrix in a unit."""
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
        """A row of a matrix in a unit."""
        ab, row, start, c0, c1 = map(name, ("ab", "r", "o", "c0", "c1"))
        rows, columns = name("R_1") - name("R_0"), name("C_1") - name("C_0")
        row_here = (ab - name("A_0")) * rows + row - name("R_0")
        yield program.Let("o", row_here * columns + c0 - name("C_0"))
        yield program.Let("e", start + c1 - c0)
        yield from body.row
        loop = body.elements
        slices = {x: (x, start, name("e")) for x in loop.storage}
        views = [*(x for x in loop.loads if x not in loop.storage), *loop.into.values()]
        slices |= {x: (x, ZERO, c1 - c0) for x in views}
        row_of_all = ab * name("R") + row
        yield from self._elements(body, loop, slices, row_of_all * name("C") + c0)
        for order, reduction in enumerate(loop.totals):
            got, rows_of = Place("got", number(order)), body.sums["row"]
            if reduction in rows_of:
                here = rows_of[reduction] + row_of_all * name("NC") + name("ct")
                yield program.Write(Place("work", here), got)
            else:
                kind = "t" if reduction in body.sums["tensor"] else "y"
                yield program.Take(reduction, f"{kind}{reduction.id}", got)

    # ---- products of matrices --------------------------------------------------------------------

    def _product(self, index: int, pass_: Pass) -> program.Function:
        """Product k: this thread's share of the bands, from outside in.

        Of a symmetric product the last bands take longest.
        """
        (made,), names = pass_.nodes, list(pass_.loads)
        turned_left, turned_right, symmetric, _ = made.data
        rows, columns = (x.upper() for x in pass_.axes[-2:])
        left = made.args[0].axes[-2:].upper()
        length = left[0] if turned_left else left[1]
        ab, band, bands = name("ab"), name("band"), name("bands")
        operands = [
            (names[0], made.args[0]),
            (names[-1], made.args[1]),
            (next(iter(pass_.stores)), made),
        ]
        starts = [(x, ab * product(node.axes[-2:].upper())) for x, node in operands]
        left_start, right_start, out = starts
        body: Statements = [program.Let(x, column(f"IN_{x}")) for x in "ABRC"]
        body.append(program.Let("high", least(greatest(name(rows) // 4, BANDS[0]), BANDS[1])))
        body.append(program.Let("bands", (name(rows) + name("high") - 1) // name("high")))
        body.append(program.Let("total", name("A") * name("B") * bands))
        here: Statements = [
            program.Let("ab", name("unit") // bands),
            program.Let("turn", name("unit") % bands),
        ]
        half, odd = name("turn") // 2, name("turn") % 2
        here.append(program.Let("band", (ONE - odd) * half + odd * (bands - 1 - half)))
        here += [
            program.Let("i0", band * name("high")),
            program.Let("i1", least(name(rows), name("i0") + name("high"))),
        ]
        sides = name(rows), name(columns), name(length)
        here.append(
            program.Multiply(
                left_start,
                right_start,
                out,
                name("i0"),
                name("i1"),
                sides,
                (turned_left, turned_right),
                symmetric,
            )
        )
        return program.Function(f"units_{index}", "threads", (*body, self._shared(here)))

    def _shared(self, body: Sequence[program.Statement]) -> program.Loop:
        """This thread's share of ``total`` units."""
        total, thread, threads = map(name, ("total", "thread", "threads"))
        return program.Loop(
            "unit", total * thread // threads, total * (thread + 1) // threads, tuple(body)
        )

    def _square(self, index: int, extent: str, body: program.Body) -> program.Function:
        """Pass k over the elements of products of matrices with their own transposes: this thread's
        share of them.
        """
        side, size, units, unit, ab, start = map(name, (extent, "size", "units", "unit", "ab", "o"))
        made: Statements = [program.Let(x, column(f"IN_{x}")) for x in "ABRC"]
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
        slices = {x: (x, start, name("e")) for x in body.elements.storage}
        here += self._elements(body, body.elements, slices, ZERO)
        return program.Function(f"units_{index}", "threads", (*made, self._shared(here)))

    # ---- between passes --------------------------------------------------------------------------

    def between(self, index: int, between: Between) -> program.Function:
        """What comes before pass k: partial results are combined, then values computed and slots
        written.
        """
        body: Statements = [program.Let(x, column(f"IN_{x}")) for x in (*"ABRC", "NR", "NC")]
        operands = [a for n in between.nodes for a in n.args]
        reads = dict.fromkeys([*operands, *between.stores.values()])
        arrays = {n.data: n.axes for n in reads if n.op == "input"}
        arrays |= {x: self.plan.slots[x] for x in between.stores}
        body += [program.Array(x, product(axes)) for x, axes in arrays.items()]
        body += self.reads([n for n in reads if n.on_host], wide=True)
        self.seen = {}
        rest: Statements = []
        for reduction in between.combine:
            rest += self._combine(reduction)
        for loop in between.after:
            if loop.reduces:
                rest += self._folded(self.folded("acc", loop), loop.axes)
            else:
                rest += self._small(loop)
        for array, node in between.stores.items():
            axes = self.plan.slots[array]
            value = node if self.where.place(node) in ("const", "scalar") else self.place(node)
            rest += loops_over(
                axes, [program.Write(Place(f"at_{array}", position_of(axes)), value)]
            )
        for node in self.seen:
            i = self.vector[node]
            body.append(program.View(f"w{i}", "work", column(f"VEC{i}"), product(node.axes)))
        self.seen = None
        return program.Function(f"between_{index}", "", (*body, *rest))

    def _folded(self, fold: program.Fold, axes: str) -> Statements:
        """A reduction at each position along some axes, each kept."""
        kept = program.Write(self.place(fold.reduction), fold.name)
        return loops_over(axes, [*fold.serial, kept])

    def _combine(self, reduction: Node) -> Statements:
        """Put a reduction over elements together from its partial results, in their order; copy
        them where there is one of each.
        """
        fold = self.combined("acc", reduction)
        made = self._folded(fold, reduction.axes)
        if self.where.partials[reduction] not in ("row", "column"):
            return made
        length = product(reduction.axes)
        view = program.View("one", "work", self.part(reduction), length)
        copy = program.Write(self.place(reduction, name("i")), Place("one", name("i")))
        copied = view, program.Loop("i", ZERO, length, (copy,))
        ((_, count),) = fold.ranges
        return [program.When(count, ONE, copied, tuple(made))]

    def _small(self, loop: Small) -> Statements:
        """Operations over the same axes."""
        made, wide = set(loop.nodes), not loop.axes
        read = dict.fromkeys(a for x in loop.nodes for a in x.args if a not in made)
        read = {n: None for n in read if not n.on_host}
        before = self.reads([n for n in read if not n.axes], wide=wide)
        inside: Statements = [*self.reads([n for n in read if n.axes], wide=wide)]
        for n in loop.nodes:
            inside.append(program.Compute(n))
            if n in self.kept:
                inside.append(program.Write(self.place(n), n))
        return [*before, *loops_over(loop.axes, inside)]


def loops_over(axes: str, body: Sequence[program.Statement]) -> Statements:
    """Statements in a loop for each axis."""
    made = list(body)
    for x in reversed(axes):
        made = [program.Loop(INDEX[x], ZERO, name(x), tuple(made))]
    return made
