"""Lowering common to CPUs and devices: places of values, bodies of passes, and combining."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from arrayopt.codecs import BLOCK
from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import POSITION, Node, within
from arrayopt.fusion.index import (
    ONE,
    Index,
    Place,
    column,
    name,
    number,
    position_of,
    product,
    ranges_of,
)
from arrayopt.fusion.layout import Layout
from arrayopt.fusion.passes import KINDS, Pass
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.ring_members import LEAST_ON_DEVICE
from arrayopt.fusion.rings import Rolled, rolled
from arrayopt.state.quantized import scale_of


class Lowering:
    """Makes the statements of a plan's program, given the places of its values.

    Attributes
    ----------
    outliving : set of Node
        Values between passes that are stored, as other loops or passes read them.
    least, rolls_wide : int, bool
        The least number of members of a ring that becomes a loop, and whether members may be
        complex, or stored as codes.
    """

    least, rolls_wide = LEAST_ON_DEVICE, True

    def __init__(self, plan: Plan, layout: Layout, outliving: Iterable[Node]) -> None:
        self.plan, self.layout, self.outliving = plan, layout, set(outliving)
        self.vector = {node: i for i, node in enumerate(layout.vectors)}
        self.partial = {node: i for i, node in enumerate(layout.partials)}

    # ---- places ----------------------------------------------------------------------------------

    def part(self, reduction: Node, after: Index | None = None) -> Index:
        """Where the partial results of a reduction begin, or of the one `after` so many more."""
        return column(f"PART{self.partial[reduction]}", after)

    def place(self, node: Node, at: Index | None = None) -> Place:
        """The place of a value over fewer axes than the elements; by default at this position."""
        if node.on_host:
            return Place("scalars", number(self.layout.scalars[node]))
        if node in self.layout.tensor:
            return Place("values", number(self.layout.tensor[node]))
        at = position_of(node.axes) if at is None else at
        if node.op == "input":
            return Place(f"at_{node.data}", at)
        return Place("work", column(f"VEC{self.vector[node]}") + at)

    def reads(self, nodes: Iterable[Node], *, wide: bool = False) -> tuple[program.Read, ...]:
        """Return the reads of values over fewer axes than the elements."""
        return tuple(program.Read(x, self.place(x), wide) for x in nodes if x.op != "const")

    # ---- passes ----------------------------------------------------------------------------------

    def body(self, index: int, pass_: Pass) -> program.Body:
        """Return what pass `index` does per tensor, matrix, row, column and element."""
        size, plan = name("size"), self.plan
        codes = tuple(array for array in pass_.arrays if array in plan.quantized)
        several = name("A") * name("B") * size
        arrays = dict.fromkeys(pass_.arrays, size if pass_.axes == plan.element else several)
        arrays |= dict.fromkeys(map(scale_of, codes), (size + (BLOCK - 1)) // BLOCK)
        sums = dict[str, dict[Node, Index]]()
        for kind in KINDS:
            sums[kind] = {node: self.part(node) for node in pass_.reducing(kind)}
            for node in pass_.using(kind):
                if node.op == "input":
                    arrays[node.data] = product(node.axes)
        columns = dict[Node, Place]()
        for node in pass_.using("column"):
            columns[node] = self.place(node, position_of(node.axes[:-1]) * name("C"))
        later = set[str]().union(*(other.loads for other in plan.passes[index + 1 :]))
        return program.Body(
            tensor=self.reads([*pass_.using("host"), *pass_.using("tensor")]),
            batch=self.reads(pass_.using("batch")),
            row=self.reads(pass_.using("row")),
            columns=columns,
            elements=self.elements(f"pass_{index}", pass_),
            sums=sums,
            arrays=arrays,
            codes=codes,
            again=frozenset(later & arrays.keys()),
        )

    def rings(self, pass_: Pass, body: program.Body) -> Rolled | None:
        """Return the pass as loops over members of rings, or None if it is no such pass."""
        is_complex = any(n.kind == "complex" for n in (*pass_.loads.values(), *pass_.nodes))
        wide = is_complex or bool(body.codes)
        supported = not wide or (self.rolls_wide and not (body.codes and is_complex))
        if self.plan.element != "C" or not supported:
            return None
        return rolled(self._guarded(pass_), [*self.plan.slots], self.least, wide=wide)

    def _guarded(self, pass_: Pass) -> Pass:
        """Return a pass without guards of arrays of codes, which are always written."""
        guards = {x: node for x, node in pass_.guards.items() if x not in self.plan.quantized}
        return pass_ if guards == pass_.guards else replace(pass_, guards=guards)

    def elements(self, function: str, pass_: Pass) -> bulk.Elements:
        """Return the loop over elements, without slices."""
        pass_ = self._guarded(pass_)
        columns, reduced = pass_.reducing("column"), pass_.reducing("tensor", "row", "batch")
        sums = {node: node.args[0] for node in (*reduced, *columns)}
        loads = bulk.stored(pass_.loads)
        loads |= {f"v{node.id}": node for node in pass_.using("column")}
        scalars = list[Node]()
        for kind in ("host", "tensor", "row", "batch"):
            scalars += pass_.using(kind)
        used = within([*pass_.new.values(), *sums.values()], pass_.nodes)
        return bulk.Elements(
            function,
            slices={},
            scalars=tuple(scalars),
            loads=loads,
            nodes=tuple(node for node in pass_.nodes if node in used),
            stores=bulk.stored(pass_.new),
            sums=sums,
            into={node: f"s{node.id}" for node in columns},
            storage={f"at_{array}": array for array in pass_.arrays},
            position=column("START") if pass_.draws else None,
            stride=ONE,
            guards=bulk.stored(pass_.guards),
        )

    # ---- between passes --------------------------------------------------------------------------

    def combined(self, variable: str, reduction: Node) -> program.Fold:
        """The statement that combines partial results of a reduction over elements, in order."""
        base, element = self.part(reduction), self.plan.element
        kind = self.layout.partials[reduction]
        if kind == "tensor":
            units = (("unit", column("IN_UNITS")),)
            return program.Fold(variable, reduction, units, Place("part", base + name("unit")))
        outer = [x for x in "AB" if x not in reduction.axes and x in element]
        ab = position_of(element[:-2])
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
        ranges = (*ranges_of(outer), (along, count))
        return program.Fold(variable, reduction, ranges, here)

    def runs(self, reductions: Iterable[Node]) -> list[list[Node]]:
        """Group reductions whose results are adjacent in memory, as those of rings are."""
        runs = list[list[Node]]()
        for reduction in sorted(reductions, key=self.partial.__getitem__):
            last = runs[-1][-1] if runs else None
            if (
                last is not None
                and last.op == reduction.op
                and self.layout.partials[last] == self.layout.partials[reduction] == "tensor"
                and self.partial[reduction] == self.partial[last] + 1
                and self.layout.tensor[reduction] == self.layout.tensor[last] + 1
            ):
                runs[-1].append(reduction)
            else:
                runs.append([reduction])
        return runs

    def combined_all(self, run: Sequence[Node]) -> tuple[program.Fold, program.Write]:
        """Return statements that combine reduction number ``which`` of a run of adjacent ones."""
        first, which = run[0], name("which")
        here = Place("part", self.part(first, which) + name("unit"))
        fold = program.Fold("acc", first, (("unit", column("IN_UNITS")),), here)
        into = Place("values", number(self.layout.tensor[first]) + which)
        return fold, program.Write(into, "acc")

    def folded(self, variable: str, reduction: Node) -> program.Fold:
        """Return the statement that reduces a value over fewer axes than the elements."""
        (term,) = reduction.args
        gone = [x for x in term.axes if x not in reduction.axes]
        return program.Fold(variable, reduction, ranges_of(gone), self.place(term))

    # ---- passes that are alike -------------------------------------------------------------------

    def described(self, pass_: Pass) -> tuple[Any, ...]:
        """Return a description of a pass without the names of its values and scratch arrays.

        Passes of a plan with equal descriptions share a function, which takes scratch arrays.
        """
        arrays: dict[str, Any] = {array: array for array in pass_.arrays}
        scratch = enumerate(scratch_of(pass_, self.plan))
        arrays |= {array: (i, self.plan.storage[array]) for i, array in scratch}
        numbers: dict[Node, int] = {}

        def of(node: Node) -> Any:
            """Return a constant itself, or a number for any other value."""
            constant = node.kind, repr(node.data)
            return constant if node.op == "const" else numbers.setdefault(node, len(numbers))

        found: list[Any] = [pass_.axes, pass_.multiplies]
        for array, node in pass_.loads.items():
            found.append((arrays[array], of(node), node.axes, node.kind))
        for node, kind in pass_.uses.items():
            place = node.op == POSITION or self.place(node)
            found.append((kind, of(node), node.axes, node.kind, place))
        for node in pass_.nodes:
            args = tuple(map(of, node.args))
            found.append((node.op, node.kind, node.axes, repr(node.data), args, of(node)))
        for node, kind in pass_.reductions.items():
            found.append((node.op, kind, self.partial[node], of(node.args[0])))
        found += [(arrays[array], of(node)) for array, node in pass_.stores.items()]
        return tuple(found)


def scratch_of(pass_: Pass, plan: Plan) -> tuple[str, ...]:
    """Return the scratch arrays that a pass reads or writes."""
    return tuple(array for array in pass_.arrays if array in plan.spilled)
