"""Lowering a plan to a program: loops over units, rows and columns, in which every place is an
explicit index.
"""

from collections.abc import Iterable, Iterator, Sequence

from arrayopt.codecs import BLOCK
from arrayopt.fusion.graph import Node
from arrayopt.fusion.layout import BANDS, CHUNK, Layout
from arrayopt.fusion.passes import KINDS, Between, Pass
from arrayopt.fusion.passes import Loop as Small
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import (
    Array,
    Buffer,
    Codes,
    Compute,
    Elements,
    Fill,
    Function,
    Index,
    Let,
    Loop,
    Multiply,
    Place,
    Read,
    Start,
    Statement,
    Take,
    View,
    When,
    Write,
    column,
    greatest,
    least,
    name,
    number,
    product,
)
from arrayopt.fusion.windows import WINDOW
from arrayopt.state.quantized import scale_of

__all__ = ["INDEX", "Lowering", "loops_over", "position_of"]

INDEX = {"A": "a", "B": "b", "R": "r", "C": "c"}
"""What the position along an axis is called."""


ZERO, ONE = number(0), number(1)

STRETCH = 1024
"""So many elements are taken at a time where codes are stored, or sums made in turns: what they are
in between stays in the first cache.
"""

PIECE = 256
"""So many elements of slots of codes are widened at a time. With more, memory waits while this is
done.
"""

AT_ONCE = 16
"""So many sums over a tensor are made in one loop: with more, registers would be few."""


def position_of(axes: str) -> Index:
    """The number of a value over some axes, as it lies in memory, at the positions along these."""
    found = None
    for x in axes:
        found = name(INDEX[x]) if found is None else found * name(x) + name(INDEX[x])
    return found or ZERO


class Lowering:
    """A plan, where its values lie, and its program, which is being made.

    Attributes
    ----------
    kept : set of Node
        Values between passes that are kept; others are read in the loop alone that makes them.
    seen : dict of Node
        Vectors that the function that is being made has looked at, by a view.
    """

    def __init__(self, plan: Plan, where: Layout, kept: Iterable[Node]) -> None:
        self.plan, self.where, self.kept = plan, where, set(kept)
        self.vector = {n: i for i, n in enumerate(where.vectors)}
        self.partial = {n: i for i, n in enumerate(where.partials)}
        self.seen: dict[Node, None] | None = None

    # ---- places ----------------------------------------------------------------------------------

    def part(self, reduction: Node) -> Index:
        """Where the partial results of a reduction begin."""
        return column(f"PART{self.partial[reduction]}")

    def place(self, node: Node, at: Index | None = None) -> Place:
        """Where a value over fewer axes lies, where the positions along its axes are known."""
        kind = self.where.place(node)
        if kind == "tensor":
            return Place("values", number(self.where.tensor[node]))
        at = position_of(node.axes) if at is None else at
        if node.op == "input":
            return Place(f"at_{node.data}", at)
        if self.seen is None:
            return Place("work", column(f"VEC{self.vector[node]}") + at)
        self.seen[node] = None
        return Place(f"w{self.vector[node]}", at)

    def scalars(self, nodes: Sequence[Node], *, wide: bool = False) -> list[Statement]:
        """Scalars of the step."""
        found = [n for n in nodes if n.on_host and n.op != "const"]
        return [Read(n, Place("scalars", number(self.where.scalars[n])), wide) for n in found]

    # ---- passes ----------------------------------------------------------------------------------

    def units(self, index: int, pass_: Pass) -> Function:
        """Pass k over units lo to hi of one tensor."""
        if pass_.multiplies:
            return self._product(index, pass_)
        if pass_.axes != self.plan.element:
            return self._square(index, pass_)
        matrices = self.plan.element != "C"
        body: list[Statement] = [Let("size", column("IN_SIZE")), Let("TC", column("IN_TC"))]
        if matrices:
            body += [Let(x, column(f"IN_{x}")) for x in "ABRC"]
        body += [Array(x, name("size")) for x in pass_.arrays]
        for array in self._codes(pass_):
            body.append(Array(scale_of(array), (name("size") + (BLOCK - 1)) // BLOCK))
            body.append(Buffer(f"wide_{array}", CHUNK if matrices else STRETCH))
        inputs = {n.data: n for kind in KINDS for n in pass_.using(kind) if n.op == "input"}
        body += [Array(x, product(n.axes)) for x, n in inputs.items()]
        body += self.scalars(pass_.using("host"))
        body += [Read(n, self.place(n)) for n in pass_.using("tensor")]
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
        turns = pass_.in_turns(AT_ONCE)
        if not self._codes(pass_) and len(turns) == 1:
            yield self._elements(
                index,
                pass_,
                {f"at_{x}": (f"at_{x}", start, end_of_unit) for x in pass_.arrays},
                start,
            )
            for order, reduction in enumerate(pass_.sums):
                yield Write(
                    Place("part", self.part(reduction) + name("unit")), Place("got", number(order))
                )
            return
        first, end, turn = name("first"), name("end"), name("turn")
        inside: list[Statement] = [
            Let("first", start + turn * STRETCH),
            Let("end", least(end_of_unit, first + STRETCH)),
        ]
        if self._codes(pass_):
            inside += self._in_pieces(index, pass_, first, end)
        for place, part in enumerate([] if self._codes(pass_) else turns):
            slices = {f"at_{x}": (f"at_{x}", first, end) for x in part.arrays}
            here = f"{index}_{place}" if place else index
            inside += [self._elements(here, part, slices, first), *self._taken(part)]
        yield from (Start(f"t{s.id}", s) for s in pass_.sums)
        yield Loop("turn", ZERO, (end_of_unit - start + (STRETCH - 1)) // STRETCH, tuple(inside))
        for reduction in pass_.sums:
            yield Write(Place("part", self.part(reduction) + name("unit")), f"t{reduction.id}")

    def _in_pieces(self, index: int, pass_: Pass, first: Index, end: Index) -> Iterator[Statement]:
        """A stretch with slots of codes: these are widened piece by piece, and stored together."""
        piece, here, there = name("piece"), name("here"), name("there")
        slices = {f"at_{x}": (f"at_{x}", here, there) for x in pass_.arrays}
        inside: list[Statement] = [
            Let("here", first + piece * PIECE),
            Let("there", least(end, here + PIECE)),
        ]
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

    # ---- products of matrices --------------------------------------------------------------------

    def _product(self, index: int, pass_: Pass) -> Function:
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
        body: list[Statement] = [Let(x, column(f"IN_{x}")) for x in "ABRC"]
        body.append(Let("high", least(greatest(name(rows) // 4, BANDS[0]), BANDS[1])))
        body.append(Let("bands", (name(rows) + name("high") - 1) // name("high")))
        body.append(Let("total", name("A") * name("B") * bands))
        here: list[Statement] = [
            Let("ab", name("unit") // bands),
            Let("turn", name("unit") % bands),
        ]
        half, odd = name("turn") // 2, name("turn") % 2
        here.append(Let("band", (ONE - odd) * half + odd * (bands - 1 - half)))
        here += [
            Let("i0", band * name("high")),
            Let("i1", least(name(rows), name("i0") + name("high"))),
        ]
        sides = name(rows), name(columns), name(length)
        here.append(
            Multiply(
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
        return Function(f"units_{index}", "threads", (*body, self._shared(here)))

    def _shared(self, body: Sequence[Statement]) -> Loop:
        """This thread's share of ``total`` units."""
        total, thread, threads = map(name, ("total", "thread", "threads"))
        return Loop("unit", total * thread // threads, total * (thread + 1) // threads, tuple(body))

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
        return Function(f"units_{index}", "threads", (*body, self._shared(here)))

    # ---- between passes --------------------------------------------------------------------------

    def between(self, index: int, between: Between) -> Function:
        """What comes before pass k: partial results are combined, then values computed and slots
        written.
        """
        body: list[Statement] = [Let(x, column(f"IN_{x}")) for x in (*"ABRC", "NR", "NC")]
        reads = list(
            dict.fromkeys([*(a for n in between.nodes for a in n.args), *between.stores.values()])
        )
        arrays = {n.data: n.axes for n in reads if n.op == "input"}
        arrays |= {x: self.plan.slots[x] for x in between.stores}
        body += [Array(x, product(axes)) for x, axes in arrays.items()]
        body += self.scalars(reads, wide=True)
        self.seen = {}
        rest: list[Statement] = []
        for reduction in between.combine:
            rest += self._combine(reduction)
        for loop in between.after:
            rest += self._reduce(loop) if loop.reduces else self._small(loop)
        for array, node in between.stores.items():
            axes = self.plan.slots[array]
            value = node if self.where.place(node) in ("const", "scalar") else self.place(node)
            rest += loops_over(axes, [Write(Place(f"at_{array}", position_of(axes)), value)])
        for node in self.seen:
            i = self.vector[node]
            body.append(View(f"w{i}", "work", column(f"VEC{i}"), product(node.axes)))
        self.seen = None
        return Function(f"between_{index}", "", (*body, *rest))

    def _combine(self, reduction: Node) -> list[Statement]:
        """Put a reduction over elements together from its partial results, in their order."""
        base, kind, element = (
            self.part(reduction),
            self.where.partials[reduction],
            self.plan.element,
        )
        if kind == "tensor":
            each = Take(reduction, "acc", Place("part", base + name("unit")))
            taken = Loop("unit", ZERO, column("IN_UNITS"), (each,))
            return [Start("acc", reduction), taken, Write(self.place(reduction), "acc")]
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
            reduction.axes, [Start("acc", reduction), *inside, Write(self.place(reduction), "acc")]
        )
        if kind not in ("row", "column") or outer:
            return combined
        view = View("one", "work", base, product(reduction.axes))
        copy = Write(self.place(reduction, name("i")), Place("one", name("i")))
        copied: tuple[Statement, ...] = (view, Loop("i", ZERO, product(reduction.axes), (copy,)))
        return [When(count, ONE, copied, tuple(combined))]

    def _small(self, loop: Small) -> list[Statement]:
        """Operations over the same axes."""
        made, wide = set(loop.nodes), not loop.axes
        read = dict.fromkeys(a for x in loop.nodes for a in x.args if a not in made)
        read = {n: None for n in read if self.where.place(n) not in ("const", "scalar")}
        before: list[Statement] = [Read(n, self.place(n), wide) for n in read if not n.axes]
        inside: list[Statement] = [Read(n, self.place(n), wide) for n in read if n.axes]
        for n in loop.nodes:
            inside.append(Compute(n))
            if n in self.kept:
                inside.append(Write(self.place(n), n))
        return [*before, *loops_over(loop.axes, inside)]

    def _reduce(self, loop: Small) -> list[Statement]:
        """A reduction over some of the axes of a value that goes over few."""
        (n,) = loop.nodes
        (x,) = n.args
        inside = loops_over(
            "".join(a for a in x.axes if a not in n.axes), [Take(n, "acc", self.place(x))]
        )
        return loops_over(n.axes, [Start("acc", n), *inside, Write(self.place(n), "acc")])


def loops_over(axes: str, body: Sequence[Statement]) -> list[Statement]:
    """Statements in a loop for each axis."""
    made = list(body)
    for x in reversed(axes):
        made = [Loop(INDEX[x], ZERO, name(x), tuple(made))]
    return made
