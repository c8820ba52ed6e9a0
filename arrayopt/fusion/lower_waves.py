"""Lowering waves for devices: tables, and the statements for one number of a wave."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import Node
from arrayopt.fusion.index import ONE, ZERO, Index, Place, column, entry, name
from arrayopt.fusion.layout import Layout
from arrayopt.fusion.lower_between import Statements
from arrayopt.fusion.waves import waves

Sources = Sequence[Sequence[int | str]]
OWN = Place("values", name("first") + name("i"))
"""The place of the i-th number of a wave."""


class Waving:
    """Makes a `Waves` statement, `made`, wave by wave. `storage` has the dtypes of slots."""

    def __init__(self, table: str, layout: Layout, storage: Mapping[str, str]) -> None:
        self.table, self.layout, self.storage = table, layout, storage
        self.places = layout.tensor | layout.leaves
        self.constants, self.sources = list[Node](), list[int | str]()
        self.waves, self.levels = list[bulk.Wave](), [0]
        self.cases = dict[Any, Statements]()

    @property
    def made(self) -> bulk.Waves:
        """The statement, with all waves so far."""
        cases = tuple(map(tuple, self.cases.values()))
        tables = tuple(self.waves), tuple(self.levels), tuple(self.sources), tuple(self.constants)
        return bulk.Waves(self.table, *tables, cases)

    def read(self) -> None:
        """Add waves that read the operands which no wave computes."""
        self.constants += [n for n in self.layout.leaves if n.op == "const"]
        number_of = self.layout.scalars | {n: i for i, n in enumerate(self.constants)}
        number, (own,) = self._at(0), self._operands("real")
        for (op, dtype), run in groupby(self.layout.leaves, self._kind):
            same, body = [*run], Statements()
            if op == "input":  # the number is that of the column with the slot's address
                sources: list[int | str] = [f"AT_{leaf.data}" for leaf in same]
                body.append(program.Array(same[0].data, ONE, column("0", number)))
                place = Place(f"at_{same[0].data}", ZERO)
            else:
                sources = [number_of[leaf] for leaf in same]
                place = Place(f"{self.table}_constants" if op == "const" else "scalars", number)
            body += [program.Read(own.node, place, wide=True), program.Write(OWN, own.node)]
            self._wave((op, dtype), self.places[same[0]], [sources], body)
        self.levels.append(len(self.waves))

    def _kind(self, leaf: Node) -> tuple[str, str]:
        """Return how a leaf is read: its operation, and for an input its storage dtype."""
        if leaf.op == "input":
            return "input", self.storage[leaf.data]
        return leaf.op if leaf.op == "const" else "host", ""

    def make(self, nodes: Iterable[Node]) -> None:
        """Add waves that compute values."""
        for level in waves(nodes):
            for same in level:
                first, kinds = same[0], [a.kind for a in same[0].args]
                operands = self._operands(*kinds)
                node = replace(first, args=tuple(x.node for x in operands))
                body: Statements = [*operands, program.Compute(node), program.Write(OWN, node)]
                taken = zip(*(n.args for n in same), strict=True)
                sources = [list(map(self.places.__getitem__, each)) for each in taken]
                self._wave((first.op, first.kind, *kinds), self.places[first], sources, body)
            self.levels.append(len(self.waves))

    def keep(self, stores: Mapping[str, Node]) -> None:
        """Add waves that write values to slots."""
        for kind, run in groupby(sorted(stores, key=self.storage.__getitem__), self.storage.get):
            slots = [*run]
            (x,) = self._operands("real")
            slot = program.Array(slots[0], ONE, column("0", self._at(1)))
            body: Statements = [x, slot, program.Write(Place(f"at_{slots[0]}", ZERO), x.node)]
            values = [self.places[stores[name]] for name in slots]
            self._wave(("kept", kind), 0, [values, [f"AT_{name}" for name in slots]], body)
        self.levels.append(len(self.waves))

    def _operands(self, *kinds: str) -> list[program.Read]:
        """Return the reads of the operands of the i-th number."""
        found = list[program.Read]()
        for j, kind in enumerate(kinds):
            node = Node("input", (), "", 0, kind, f"x{j}", -1)
            found.append(program.Read(node, Place("values", self._at(j)), wide=True))
        return found

    def _at(self, j: int) -> Index:
        """Return the index, in the table of sources, of the j-th operand of the i-th number."""
        return entry(f"{self.table}_sources", name("begin") + name("n") * j + name("i"))

    def _wave(self, case: Any, first: int, sources: Sources, body: Statements) -> None:
        self.cases.setdefault(case, body)
        number = [*self.cases].index(case)
        self.waves.append(bulk.Wave(number, len(sources[0]), first, len(self.sources)))
        for each in sources:
            self.sources += each
