"""Lowering the computation between passes to functions for CPUs: loops over axes."""

from collections.abc import Iterable, Sequence

from arrayopt.fusion import program
from arrayopt.fusion.graph import Node, operands
from arrayopt.fusion.index import ZERO, Index, Place, column, name, number, position_of, product
from arrayopt.fusion.layout import Layout
from arrayopt.fusion.lowering import Lowering
from arrayopt.fusion.passes import Between, SmallLoop
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.ring_members import LEAST_ON_CPU

Statements = list[program.Statement]


class LoweredBetween(Lowering):
    """Makes the function of a `Between` for CPUs. It uses the vectors in `views` as `View`s."""

    def __init__(self, plan: Plan, layout: Layout, outliving: Iterable[Node]) -> None:
        super().__init__(plan, layout, outliving)
        self.views: dict[Node, None] = {}

    def place(self, node: Node, at: Index | None = None) -> Place:
        """See `Lowering.place`. A vector is a view, whose first number has index 0."""
        if node not in self.vector:
            return super().place(node, at)
        self.views[node] = None
        return Place(f"w{self.vector[node]}", position_of(node.axes) if at is None else at)

    def function(self, index: int, between: Between) -> program.Function:
        """The function before pass `index`: combine partial results, compute, write slots."""
        body = program.extents([*"ABRC", "NR", "NC"])
        reads = dict.fromkeys([*operands(between.nodes), *between.stores.values()])
        arrays = {n.data: n.axes for n in reads if n.op == "input"}
        arrays |= {x: self.plan.slots[x] for x in between.stores}
        body += [program.Array(x, product(axes)) for x, axes in arrays.items()]
        body += self.reads([n for n in reads if n.on_host], wide=True)
        rest: Statements = []
        for run in self.runs(between.combine):
            if len(run) >= LEAST_ON_CPU:
                fold, kept = self.combined_all(run)
                each = number(len(run))
                rest.append(program.Loop("which", ZERO, each, (*fold.serial, kept)))
            else:
                for reduction in run:
                    rest += self._combine(reduction)
        for loop in between.loops:
            if loop.reduces:
                rest += self._folded(self.folded("acc", *loop.nodes), loop.axes)
            else:
                rest += self._small(loop)
        for array, node in between.stores.items():
            axes = self.plan.slots[array]
            value = node if node.on_host else self.place(node)
            written = program.Write(Place(f"at_{array}", position_of(axes)), value)
            rest += loops_over(axes, [written])
        for node in self.views:
            i = self.vector[node]
            body.append(program.View(f"w{i}", "work", column(f"VEC{i}"), product(node.axes)))
        return program.Function(f"between_{index}", "", (*body, *rest))

    def _folded(self, fold: program.Fold, axes: str) -> Statements:
        """Return loops that reduce at each position along some axes, and write the results."""
        kept = program.Write(self.place(fold.reduction), fold.name)
        return loops_over(axes, [*fold.serial, kept])

    def _combine(self, reduction: Node) -> Statements:
        """Combine partial results in order, or copy them if each result has one."""
        fold = self.combined("acc", reduction)
        made = self._folded(fold, reduction.axes)
        if self.layout.partials[reduction] not in ("row", "column"):
            return made
        length = product(reduction.axes)
        view = program.View("one", "work", self.part(reduction), length)
        copy = program.Write(self.place(reduction, name("i")), Place("one", name("i")))
        copied = view, program.Loop("i", ZERO, length, (copy,))
        ((_, count),) = fold.ranges
        return [program.When(count, number(1), copied, tuple(made))]

    def _small(self, loop: SmallLoop) -> Statements:
        """Return the statements of a loop of operations."""
        made = set(loop.nodes)
        taken = dict.fromkeys(operands(loop.nodes))
        read = [a for a in taken if not (a in made or a.on_host)]
        before = self.reads([n for n in read if not n.axes], wide=True)
        inside: Statements = [*self.reads([n for n in read if n.axes])]
        for n in loop.nodes:
            inside.append(program.Compute(n))
            if n in self.outliving:
                inside.append(program.Write(self.place(n), n))
        return [*before, *loops_over(loop.axes, inside)]


def loops_over(axes: str, body: Sequence[program.Statement]) -> Statements:
    """Return statements in nested loops over axes."""
    made = list(body)
    for x in reversed(axes):
        made = [program.Loop(x.lower(), ZERO, name(x), tuple(made))]
    return made
