"""Lowering a plan to a program for devices, whose blocks meet after each pass and each loop between
passes, and share out the pieces of such a stage.

Functions are shared in these ways. A pass has one statement, a `Body`: its pieces are ``tiles`` of
the tensor, or ``squares``, of what a matrix makes with its own transpose; the loops over rows and
columns are the device's. A pass over rings has statements after it: what a block does with a piece,
in turns. At ``positions``, of which ``i`` is one, statements are a thread's. At
``folds``, a `Fold` and what keeps it are one thread's or many threads'. A ``block`` makes the folds
of a tensor, and one of its threads does the rest. A ``library`` makes products.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import KEPT, Node, operands
from arrayopt.fusion.index import ZERO, Index, Place, name, number, product, ranges_of
from arrayopt.fusion.layout import layout
from arrayopt.fusion.lower_between import Statements
from arrayopt.fusion.lower_rings import in_turns, kept_room
from arrayopt.fusion.lower_waves import Waving
from arrayopt.fusion.lowering import Lowering, scratch_of
from arrayopt.fusion.passes import Loop, Pass, loops
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.rings import Rolled
from arrayopt.fusion.waves import in_waves
from arrayopt.state.quantized import scale_of

__all__ = ["apart", "in_stages", "turns_of"]

MOST = 640
"""A pass over rings has no more sums: they are to fit into a block's memory."""


@lru_cache(maxsize=KEPT)
def in_stages(plan: Plan) -> program.Program:
    """The program of a plan in stages. Where reductions are put together, the first loop over the
    same axes follows. Passes that differ in nothing but their scratch arrays have one function.
    """
    lowering = Stages(plan)
    for index, between in enumerate(plan.between):
        for loop in loops([*between.combine, *between.nodes], plan.element):
            lowering.loop(loop)
        if index < len(plan.passes):
            lowering.pass_(index, plan.passes[index])
        for axes in dict.fromkeys(plan.slots[slot] for slot in between.stores):
            lowering.store(axes, [x for x in between.stores if plan.slots[x] == axes])
    return program.Program(tuple(lowering.made))


class Stages(Lowering):
    """A program, which is being made."""

    def __init__(self, plan: Plan) -> None:
        where = layout(plan, device=True)
        super().__init__(plan, where, {*where.vectors, *where.tensor})
        self.made: list[program.Stage] = []
        self.functions: dict[Any, program.Function] = {}
        self.of_rings = set[Node]()  # what is reduced over rings
        self.waving = 0  # how many statements make waves by now

    def pass_(self, index: int, pass_: Pass) -> None:
        """A pass, or a product."""
        if pass_.multiplies:
            library = program.Function(f"product{index}", "library", ())
            self.made.append(program.Stage("product", pass_.axes, library))
            return
        body, scratch = self.body(index, pass_), scratch_of(pass_, self.plan)
        read_again = tuple(x in body.again for x in body.arrays)
        key: Any = self.described(pass_), read_again
        turns: Statements = []
        rings = self.rings(pass_, body) if len(pass_.sums) <= MOST else None
        if rings is not None and (turns := self._turns(index, pass_, rings, body)):
            key = index
            self.of_rings |= {*pass_.sums}
        if key not in self.functions:
            shared = "squares" if pass_.axes != self.plan.element else "tiles"
            whole = (body, *turns)
            self.functions[key] = program.Function(f"Pass{index}", shared, whole, scratch)
        self.made.append(program.Stage("pass", pass_.axes, self.functions[key], scratch))

    def _turns(self, index: int, pass_: Pass, rings: Rolled, body: program.Body) -> Statements:
        """What a block does with a piece of a pass over rings; nothing, where it knows no way."""
        first = min((self.partial[s] for s in pass_.sums), default=0)

        def into(reduction: Node, after: Index | None) -> Place:
            own = number(self.partial[reduction] - first)
            return Place("sums", own if after is None else own + after)

        made: Statements = []
        for one, values in rings.of.each.items():
            if all(n.op == "const" for n in values):
                made.append(bulk.Listed(str(one.data), values))
            elif any(n.op == "const" for n in values):
                return []
            else:
                made.append(bulk.Listed(str(one.data), tuple(map(self.place, values))))
        members = {*rings.of.member_of, *map(scale_of, rings.of.member_of)}
        for x, size in body.arrays.items():
            if x not in members:
                made.append(program.Array(x, size))
        turn = in_turns(index, pass_, rings, into, body.codes)
        read = dict[Node, None]()
        for elements in program.elements_of([turn]):
            read |= {n: None for n in elements.scalars if n not in rings.of.each}
        return [*made, *self.reads(read), *kept_room(rings), turn]

    def loop(self, loop: Loop) -> None:
        """A loop between passes."""
        if loop.reduces:
            fold = self.folded("sum", loop)
            keep = program.Write(self.place(fold.reduction, name("i")), fold.name)
            arrays = self._arrays(fold.reduction.args)
            self._between("folds", loop.axes, [*arrays, fold, keep])
            return
        rolled = [n for n in loop.nodes if n in self.of_rings]
        body: Statements = []
        for run in self.runs(rolled):
            each = number(len(run))
            body.append(program.Loop("which", ZERO, each, self.combined_all(run)))
        sums = [n for n in loop.nodes if n.reduces and n not in self.of_rings]
        body += [self.combined(f"sum{n.id}", n) for n in sums]
        nodes = tuple(n for n in loop.nodes if not n.reduces)
        waving = bool(self.where.leaves) and in_waves(nodes, loop.axes, self.plan.element)
        made, wide = set[Node](), not loop.axes
        for node in [*sums, *(() if waving else nodes)]:
            if node.reduces:
                body.append(program.Read(node, f"sum{node.id}", wide))
            else:
                # just before it is needed: some rules have too many values for the registers
                read = dict.fromkeys(a for a in node.args if a not in made)
                body += self._arrays(read if wide else ())
                body += [*self.reads(read, wide=wide), program.Compute(node)]
                made |= read.keys()
            made.add(node)
            if node in self.kept:
                body.append(program.Write(self.place(node, name("i")), node))
        body += [self.waves(nodes, {})] if waving else []
        arrays = [] if wide else self._arrays(operands(nodes))
        self._between("positions", loop.axes, [*arrays, *body])

    def store(self, axes: str, slots: list[str]) -> None:
        """Slots that are written, over the same axes."""
        if self.waving and not axes:
            stores = {slot: self.plan.small[slot] for slot in slots}
            self._between("positions", axes, [self.waves([], stores)])
            return
        values = dict.fromkeys(self.plan.small[slot] for slot in slots)
        # of a tensor, one by one, as registers are few; but what is written may be read, too
        early = [n for n in values if axes or n.op == "input"]
        first, body = {x.name: x for x in self._arrays(early)}, Statements()
        read, at = {*early}, name("i") if axes else ZERO
        for slot in slots:
            value, array = self.plan.small[slot], program.Array(slot, product(axes))
            if axes:
                first[slot] = array
            elif slot not in first:
                body.append(array)
            body += self.reads({value} - read, wide=not axes)
            read.add(value)
            body.append(program.Write(Place(f"at_{slot}", at), value))
        body = [*self.reads(early, wide=not axes), *body]
        self._between("positions", axes, [*first.values(), *body])

    def waves(self, nodes: Iterable[Node], stores: Mapping[str, Node]) -> bulk.Waves:
        """Values of the tensor in waves, and the slots written then; the first wave reads."""
        self.waving += 1
        made = Waving(f"numbers{self.waving}", self.where, self.plan.storage)
        if self.waving == 1:
            made.read()
        made.make(nodes)
        made.keep(stores)
        return made.made

    def _arrays(self, reads: Iterable[Node]) -> list[program.Array]:
        """Where the arrays among what is read lie."""
        arrays = {n.data: n.axes for n in reads if n.op == "input"}
        return [program.Array(x, product(axes)) for x, axes in arrays.items()]

    def _between(self, how: str, over: str, body: Statements) -> None:
        """A stage between passes, which begins with where arrays lie."""
        how = "block" if how == "positions" and not over else how
        first = next((i for i, x in enumerate(body) if not isinstance(x, program.Array)), len(body))
        whole = (*body[:first], *apart(ranges_of(over), name("i")), *body[first:])
        function = program.Function(f"stage{len(self.made)}", how, whole)
        self.made.append(program.Stage("between", over, function))


def turns_of(stage: program.Stage) -> tuple[program.Statement, ...]:
    """What a block does with a piece of a pass over rings; nothing of other stages."""
    return stage.function.body[1:] if stage.kind == "pass" else ()


def apart(ranges: Sequence[tuple[str, Index]], whole: Index) -> list[program.Let]:
    """Take a position among all that some ranges have together apart: the position in each."""
    made = []
    for i, (position, end) in reversed(list(enumerate(ranges))):
        made.append(program.Let(position, whole % end if i else whole))
        whole = whole // end
    return made
