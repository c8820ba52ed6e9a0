"""Lowering passes: loops over units, rows and columns; every place is an explicit index."""

from collections.abc import Iterator

from arrayopt.codecs import BLOCK
from arrayopt.fusion.bulk import Buffer, Codes, Elements
from arrayopt.fusion.index import ONE, ZERO, Index, column, least, name, number, product
from arrayopt.fusion.layout import CHUNK
from arrayopt.fusion.lower_products import lowered_product, shared
from arrayopt.fusion.lower_rings import STRETCH, in_turns, member_room
from arrayopt.fusion.lowering import Lowering, position_of
from arrayopt.fusion.passes import KINDS, Pass
from arrayopt.fusion.program import (
    Array,
    Fill,
    Function,
    Let,
    Loop,
    Place,
    Read,
    Start,
    Statement,
    Take,
    View,
    Write,
)
from arrayopt.fusion.rings import Rolled, rolled
from arrayopt.fusion.windows import WINDOW
from arrayopt.state.quantized import scale_of

__all__ = ["LoweringPasses"]

PIECE = 256
"""So many elements of slots of codes are widened at a time; with more, memory waits meanwhile."""

AT_ONCE = 16
"""So many sums over a tensor are made in one loop: with more, registers would be few."""


class LoweringPasses(Lowering):
    """A plan whose passes are lowered one by one."""

    # ---- passes ----------------------------------------------------------------------------------

    def units(self, index: int, pass_: Pass) -> Function:
        """Pass k over units lo to hi of one tensor."""
        if pass_.multiplies:
            return lowered_product(index, pass_)
        if pass_.axes != self.plan.element:
            return self._square(index, pass_)
        matrices = self.plan.element != "C"
        body: list[Statement] = [Let("size", column("IN_SIZE")), Let("TC", column("IN_TC"))]
        if matrices:
            body += [Let(x, column(f"IN_{x}")) for x in "ABRC"]
        rings = self._rings(pass_)
        of_rings = set() if rings is None else {*rings.of.member_of}
        body += [Array(x, name("size")) for x in pass_.arrays if x not in of_rings]
        for array in self._codes(pass_):
            body.append(Array(scale_of(array), (name("size") + (BLOCK - 1)) // BLOCK))
            body.append(Buffer(f"wide_{array}", CHUNK if matrices else STRETCH))
        inputs = {n.data: n for kind in KINDS for n in pass_.using(kind) if n.op == "input"}
        body += [Array(x, product(n.axes)) for x, n in inputs.items()]
        body += self.scalars(pass_.using("host"))
        body += [Read(n, self.place(n)) for n in pass_.using("tensor")]
        if rings is not None:
            body += member_room(rings)
        if matrices:
            body += [Let(x, column(f"IN_{x}")) for x in (*WINDOW, "TR", "G", "NR", "NC")]
            for array in "RC":
                tile = name(f"T{array}")
                body.append(
                    Let(f"M{array}", (name(f"{array}_1") - name(f"{array}_0") + tile - 1) // tile)
                )
        # every other pass runs backwards, so that it begins with what the one before has left in
        # the cache
        # in turns it would be one loop more to compile
        # codes are widened in pieces, which memory brings sooner one after the other
        turned = index % 2 == 1 and not self.plan.multiplies and not self._codes(pass_)
        inside = self._tile(index, pass_) if matrices else self._stretch(index, pass_)
        body.append(Loop("unit", name("lo"), name("hi"), tuple(inside), turned))
        return Function(f"units_{index}", "units", tuple(body))

    def _rings(self, pass_: Pass) -> Rolled | None:
        """The pass in loops over members of rings, if it is such a one."""
        if self.plan.element != "C" or self._codes(pass_):
            return None
        if pass_ not in self.rolled:
            self.rolled[pass_] = rolled(pass_, [*self.plan.slots])
        return self.rolled[pass_]

    def _codes(self, pass_: Pass) -> list[str]:
        """The slots of a pass that are stored as codes."""
        return [x for x in pass_.arrays if x in self.plan.quantized]

    def _wide(
        self, pass_: Pass, slices: dict[str, tuple[str, Index, Index]], at: Index
    ) -> Iterator[Codes]:
        """What reads a stretch of slots of codes into their buffers, from a place on; the loop over
        the elements finds these there.
        """
        for array in self._codes(pass_):
            _, first, end = slices[f"at_{array}"]
            count, buffer = end - first, f"wide_{array}"
            slices[f"at_{array}"] = buffer, at, at + count
            if array in pass_.loads:
                yield Codes(False, array, scale_of(array), first, count, buffer, at)

    def _stored(self, pass_: Pass, first: Index, end: Index) -> Iterator[Codes]:
        """What stores a stretch of slots of codes from their buffers."""
        for array in self._codes(pass_):
            if array in pass_.stores:
                yield Codes(True, array, scale_of(array), first, end - first, f"wide_{array}", ZERO)

    def _elements(
        self, index: int | str, pass_: Pass, slices: dict[str, tuple[str, Index, Index]], at: Index
    ) -> Elements:
        """The loop over the elements of a stretch."""
        columns = {f"v{n.id}": n for n in pass_.using("column")}
        reduced = [*pass_.reducing("tensor", "row", "batch"), *pass_.reducing("column")]
        sums = {s: s.args[0] for s in reduced}
        guards = {x: n for x, n in pass_.guards.items() if x not in self.plan.quantized}
        stores = dict(pass_.stores)
        for x in guards:  # where it is written, it is the second of `where`'s operands
            stores[x] = stores[x].args[1]
        used = {*stores.values(), *sums.values()}
        for node in reversed(pass_.nodes):
            if node in used:
                used |= {*node.args}
        return Elements(
            f"pass_{index}",
            slices,
            tuple(n for kind in ("host", "tensor", "row", "batch") for n in pass_.using(kind)),
            {f"at_{x}": n for x, n in pass_.loads.items()} | columns,
            tuple(n for n in pass_.nodes if n in used),
            {f"at_{x}": n for x, n in stores.items()},
            sums,
            {s: f"s{s.id}" for s in pass_.reducing("column")},
            {f"at_{x}": x for x in pass_.arrays if x not in self.plan.quantized},
            column("START") + at if pass_.draws else None,
            ONE,
            {f"at_{x}": n for x, n in guards.items()},
        )

    def _stretch(self, index: int, pass_: Pass) -> Iterator[Statement]:
        """A unit of a tensor that is seen as one row of elements."""
        start, end_of_unit = name("o"), name("e")
        yield Let("o", name("unit") * name("TC"))
        yield Let("e", least(name("size"), start + name("TC")))
        rings = self._rings(pass_)
        if rings is not None:
            yield from in_turns(index, pass_, rings, self.part)
            return
        turns = pass_.in_turns(AT_ONCE)
        if not self._codes(pass_) and len(turns) == 1:
            slices = {f"at_{x}": (f"at_{x}", start, end_of_unit) for x in pass_.arrays}
            yield self._elements(index, pass_, slices, start)
            for order, reduction in enumerate(pass_.sums):
                part = Place("part", self.part(reduction) + name("unit"))
                yield Write(part, Place("got", number(order)))
            return
        first, end, turn = name("first"), name("end"), name("turn")
        inside: list[Statement] = [
            Let("first", start + turn * STRETCH),
            Let("end", least(end_of_unit, first + STRETCH)),
        ]
        if self._codes(pass_):
            inside += self._in_pieces(index, pass_, first, end)
        for place, turned in enumerate([] if self._codes(pass_) else turns):
            slices = {f"at_{x}": (f"at_{x}", first, end) for x in turned.arrays}
            here = f"{index}_{place}" if place else index
            inside += [self._elements(here, turned, slices, first), *self._taken(turned)]
        yield from (Start(f"t{s.id}", s) for s in pass_.sums)
        yield Loop("turn", ZERO, (end_of_unit - start + (STRETCH - 1)) // STRETCH, tuple(inside))
        for reduction in pass_.sums:
            yield Write(Place("part", self.part(reduction) + name("unit")), f"t{reduction.id}")

    def _in_pieces(self, index: int, pass_: Pass, first: Index, end: Index) -> Iterator[Statement]:
        """A stretch with slots of codes: these are widened piece by piece, and stored together."""
        piece, here, there = name("piece"), name("here"), name("there")
        slices = {f"at_{x}": (f"at_{x}", here, there) for x in pass_.arrays}
        inside: list[Statement] = [Let("here", first + piece * PIECE)]
        inside.append(Let("there", least(end, here + PIECE)))
        inside += self._wide(pass_, slices, here - first)
        inside += [self._elements(index, pass_, slices, here), *self._taken(pass_)]
        yield Loop("piece", ZERO, (end - first + (PIECE - 1)) // PIECE, tuple(inside))
        yield from self._stored(pass_, first, end)

    def _taken(self, pass_: Pass) -> Iterator[Take]:
        """What the sums of a loop over elements are added to."""
        for order, reduction in enumerate(pass_.sums):
            yield Take(reduction, f"t{reduction.id}", Place("got", number(order)))

    def _tile(self, index: int, pass_: Pass) -> Iterator[Statement]:
        """A unit of a tensor that is seen as matrices: some rows and columns of one, or several
        whole ones.
        """
        unit, at, rt, ct = map(name, ("unit", "at", "rt", "ct"))
        rows, columns = name("MR"), name("MC")
        yield Let("ct", unit % columns)
        yield Let("rt", unit // columns % rows)
        yield Let("at", unit // columns // rows)
        tiles = (("A", "G", "ab", at), ("R", "TR", "r", rt), ("C", "TC", "c", ct))
        for axis, extent, first, tile in tiles:
            yield Let(f"{first}0", name(f"{axis}_0") + tile * name(extent))
        for axis, extent, first, _ in tiles:
            yield Let(f"{first}1", least(name(f"{axis}_1"), name(f"{first}0") + name(extent)))
        for axis, number_of in (("C", "ct"), ("R", "rt"), ("A", "at")):
            yield Let(number_of, name(number_of) + name(f"{axis}_T"))
        sums = {kind: pass_.reducing(kind) for kind in KINDS}
        yield from (Start(f"t{s.id}", s) for s in sums["tensor"])
        yield Loop("ab", name("ab0"), name("ab1"), tuple(self._batch(index, pass_)))
        for s in sums["tensor"]:
            here = self.part(s) + (at * name("NR") + rt) * name("NC") + ct
            yield Write(Place("part", here), f"t{s.id}")

    def _batch(self, index: int, pass_: Pass) -> Iterator[Statement]:
        """The rows of one matrix in a unit."""
        ab, rt, ct, c0, c1 = map(name, ("ab", "rt", "ct", "c0", "c1"))
        yield Let("a", ab // name("B"))
        yield Let("b", ab % name("B"))
        yield from (Read(n, self.place(n)) for n in pass_.using("batch"))
        for node in pass_.using("column"):
            axes = node.axes.replace("C", "")
            first = position_of(axes) * name("C") + c0 if axes else c0
            room = f"at_{node.data}" if node.op == "input" else "work"
            first = first if node.op == "input" else column(f"VEC{self.vector[node]}") + first
            yield View(f"v{node.id}", room, first, c1 - c0)
        for reduction in pass_.reducing("column"):
            yield View(
                f"s{reduction.id}",
                "work",
                self.part(reduction) + (ab * name("NR") + rt) * name("C") + c0,
                c1 - c0,
            )
            yield Fill(f"s{reduction.id}", c1 - c0, reduction)
        yield from (Start(f"y{s.id}", s) for s in pass_.reducing("batch"))
        yield Loop("r", name("r0"), name("r1"), tuple(self._row(index, pass_)))
        for reduction in pass_.reducing("batch"):
            here = self.part(reduction) + (ab * name("NR") + rt) * name("NC") + ct
            yield Write(Place("part", here), f"y{reduction.id}")

    def _row(self, index: int, pass_: Pass) -> Iterator[Statement]:
        """A row of a matrix in a unit."""
        ab, row, start, c0, c1 = map(name, ("ab", "r", "o", "c0", "c1"))
        rows, columns = name("R_1") - name("R_0"), name("C_1") - name("C_0")
        yield Let("o", ((ab - name("A_0")) * rows + row - name("R_0")) * columns + c0 - name("C_0"))
        yield Let("e", start + c1 - c0)
        yield from (Read(n, self.place(n)) for n in pass_.using("row"))
        slices = {f"at_{x}": (f"at_{x}", start, name("e")) for x in pass_.arrays}
        views = [
            *(f"v{n.id}" for n in pass_.using("column")),
            *(f"s{s.id}" for s in pass_.reducing("column")),
        ]
        slices |= {x: (x, ZERO, c1 - c0) for x in views}
        yield from self._wide(pass_, slices, ZERO)
        yield self._elements(index, pass_, slices, (ab * name("R") + row) * name("C") + c0)
        yield from self._stored(pass_, start, name("e"))
        for i, reduction in enumerate(pass_.reducing("tensor", "row", "batch")):
            got, kind = Place("got", number(i)), pass_.reductions[reduction]
            if kind == "row":
                yield Write(
                    Place(
                        "work",
                        self.part(reduction) + (ab * name("R") + row) * name("NC") + name("ct"),
                    ),
                    got,
                )
            else:
                yield Take(reduction, f"{'t' if kind == 'tensor' else 'y'}{reduction.id}", got)

    def _square(self, index: int, pass_: Pass) -> Function:
        """Pass k over the elements of products of matrices with their own transposes: this thread's
        share of them.
        """
        side, size, units, unit, ab, start = map(
            name, (pass_.axes[-1].upper(), "size", "units", "unit", "ab", "o")
        )
        body: list[Statement] = [Let(x, column(f"IN_{x}")) for x in "ABRC"]
        body += [Let("size", side * side), Let("units", (size + (CHUNK - 1)) // CHUNK)]
        body.append(Let("total", name("A") * name("B") * units))
        body += [Array(x, name("A") * name("B") * size) for x in pass_.arrays]
        inputs = {n.data: n for n in pass_.using("batch", "tensor") if n.op == "input"}
        body += [Array(x, product(n.axes)) for x, n in inputs.items()]
        body += self.scalars(pass_.using("host"))
        body += [Read(n, self.place(n)) for n in pass_.using("tensor")]
        here: list[Statement] = [
            Let("ab", unit // units),
            Let("a", ab // name("B")),
            Let("b", ab % name("B")),
        ]
        here += [Read(n, self.place(n)) for n in pass_.using("batch")]
        here.append(Let("o", ab * size + unit % units * CHUNK))
        here.append(Let("e", least((ab + 1) * size, start + CHUNK)))
        here.append(
            self._elements(
                index, pass_, {f"at_{x}": (f"at_{x}", start, name("e")) for x in pass_.arrays}, ZERO
            )
        )
        return Function(f"units_{index}", "threads", (*body, shared(here)))
