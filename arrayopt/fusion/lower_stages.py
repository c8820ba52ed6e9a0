"""Lowering a plan to a program for devices, whose blocks meet after each pass and each loop between
passes, and share out the pieces of such a stage.

Functions are shared in these ways. A pass has one statement, a `Body`: its pieces are ``tiles`` of
the tensor, or ``squares``, of what a matrix makes with its own transpose; the loops over rows and
columns are the device's. At ``positions``, of which ``i`` is one, statements are a thread's. At
``folds``, a `Fold` and what keeps it are one thread's or many threads'. A ``block`` makes the folds
of a tensor, and one of its threads does the rest. A ``library`` makes products.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from arrayopt.fusion import program
from arrayopt.fusion.graph import KEPT, Node, operands
from arrayopt.fusion.index import ZERO, Index, Place, name, product, ranges_of
from arrayopt.fusion.layout import layout
from arrayopt.fusion.lower_between import Statements
from arrayopt.fusion.lowering import Lowering, scratch_of
from arrayopt.fusion.passes import Loop, Pass, loops
from arrayopt.fusion.plan import Plan

__all__ = ["apart", "in_stages"]


@lru_cache(maxsize=KEPT)
def in_stages(plan: Plan) -> program.Program:
    """The program of a plan in stages. Where reductions are put together, the first loop over the
    same axes follows. Passes that differ in nothing but their scratch arrays have one function.
    """
    lowering = Stages(plan)
    for number, between in enumerate(plan.between):
        for loop in loops([*between.combine, *between.nodes], plan.element):
            lowering.loop(loop)
        if number < len(plan.passes):
            lowering.pass_(number, plan.passes[number])
        for axes in dict.fromkeys(plan.slots[slot] for slot in between.stores):
            lowering.store(axes, [x for x in between.stores if plan.slots[x] == axes])
    return program.Program(tuple(lowering.made))


class Stages(Lowering):
    """A program, which is being made."""

    def __init__(self, plan: Plan) -> None:
        where = layout(plan)
        super().__init__(plan, where, {*where.vectors, *where.tensor})
        self.made: list[program.Stage] = []
        self.functions: dict[Any, program.Function] = {}

    def pass_(self, index: int, pass_: Pass) -> None:
        """A pass, or a product."""
        if pass_.multiplies:
            library = program.Function(f"product{index}", "library", ())
            self.made.append(program.Stage("product", pass_.axes, library))
            return
        body, scratch = self.body(index, pass_), scratch_of(pass_, self.plan)
        read_again = tuple(x in body.again for x in body.arrays)
        key = self.described(pass_), read_again
        if key not in self.functions:
            shared = "squares" if pass_.axes != self.plan.element else "tiles"
            self.functions[key] = program.Function(f"Pass{index}", shared, (body,), scratch)
        self.made.append(program.Stage("pass", pass_.axes, self.functions[key], scratch))

    def loop(self, loop: Loop) -> None:
        """A loop between passes."""
        if loop.reduces:
            fold = self.folded("sum", loop)
            keep = program.Write(self.place(fold.reduction, name("i")), fold.name)
            self._between("folds", loop.axes, [fold, keep], fold.reduction.args)
            return
        sums = [n for n in loop.nodes if n.reduces]
        body: Statements = [self.combined(f"sum{n.id}", n) for n in sums]
        made, wide = set(loop.nodes), not loop.axes
        for node in [*sums, *(n for n in loop.nodes if not n.reduces)]:
            if node.reduces:
                body.append(program.Read(node, f"sum{node.id}", wide))
            else:
                # just before it is needed: some rules have too many values for the registers
                read = dict.fromkeys(a for a in node.args if a not in made)
                body += [*self.reads(read, wide=wide), program.Compute(node)]
                made |= read.keys()
            if node in self.kept:
                body.append(program.Write(self.place(node, name("i")), node))
        read_here = operands(n for n in loop.nodes if not n.reduces)
        self._between("positions", loop.axes, body, read_here)

    def store(self, axes: str, slots: list[str]) -> None:
        """Slots that are written, over the same axes."""
        values = [self.plan.small[slot] for slot in slots]
        body: Statements = [*self.reads(dict.fromkeys(values), wide=not axes)]
        at = name("i") if axes else ZERO
        for slot, value in zip(slots, values, strict=True):
            body.append(program.Write(Place(f"at_{slot}", at), value))
        self._between("positions", axes, body, values, *slots)

    def _between(
        self, how: str, over: str, body: Statements, reads: Iterable[Node], *slots: str
    ) -> None:
        """A stage between passes, which begins with where the arrays lie."""
        arrays = {n.data: n.axes for n in reads if n.op == "input"}
        arrays |= {x: self.plan.slots[x] for x in slots}
        found = [program.Array(x, product(axes)) for x, axes in arrays.items()]
        how = "block" if how == "positions" and not over else how
        at = apart(ranges_of(over), name("i"))
        function = program.Function(f"stage{len(self.made)}", how, (*found, *at, *body))
        self.made.append(program.Stage("between", over, function))


def apart(ranges: Sequence[tuple[str, Index]], whole: Index) -> list[program.Let]:
    """Take a position among all that some ranges have together apart: the position in each."""
    made = []
    for i, (position, end) in reversed(list(enumerate(ranges))):
        made.append(program.Let(position, whole % end if i else whole))
        whole = whole // end
    return made
