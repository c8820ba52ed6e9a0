"""Printing a program as C++."""

from collections.abc import Iterable
from typing import ClassVar

from arrayopt.codecs import BLOCK
from arrayopt.engines.columns import native_columns
from arrayopt.engines.cplusplus import CPlusPlusPrinter
from arrayopt.engines.cpp.elements import ElementsPrinter
from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import POSITION, Node
from arrayopt.fusion.index import Place
from arrayopt.fusion.layout import Layout
from arrayopt.fusion.plan import Plan

__all__ = ["CppPrinter"]

REST = "int64_t* t, const double* scalars, double* values, W* work, double* part"
ARGUMENTS = {
    "": REST,
    "units": f"int64_t lo, int64_t hi, int64_t thread, {REST}",
    "threads": f"int64_t thread, int64_t threads, {REST}",
}
"""What a function takes, by how threads share it."""


class CppPrinter(CPlusPlusPrinter):
    """Prints a program as C++ for CPUs."""

    words: ClassVar[dict[str, str]] = {"min": "least", "max": "greatest", "//": "/"}
    whole = "int64_t"

    def __init__(self, plan: Plan, dtype: str, grad_dtype: str, layout: Layout) -> None:
        super().__init__(plan, dtype, grad_dtype, layout, native_columns(plan, layout))
        self.known: set[str] = set()

    def name(self, node: Node) -> str:
        if node.op in ("const", POSITION):
            return "position" if node.op == POSITION else self.constant(node)
        truth = node.on_host and node.dtype == "bool"
        return f"({self.bare(node)} != 0)" if truth else self.bare(node)

    def function(self, function: program.Function) -> None:
        """Print a function, after the loops over elements that it calls."""
        most = 0
        for elements in program.elements_of(function.body):
            ElementsPrinter(self, elements).print()
            most = max(most, len(elements.totals))
        given = [ARGUMENTS[function.shared], *(f"int64_t AT_{x}" for x in function.scratch)]
        self.put(0, "", f"static void {function.name}({', '.join(given)}) {{")
        self.put(1, *([f"W got[{most}];"] if most else []))
        self.statements(1, function.body)
        self.put(0, "}")

    def statements(self, depth: int, body: Iterable[program.Statement]) -> None:
        outer, self.known = self.known, set()
        super().statements(depth, body)
        self.known = outer

    def _again(self, name: str) -> bool:
        """Whether these statements have defined a name before."""
        found = name in self.known
        self.known.add(name)
        return found

    def statement(self, depth: int, statement: program.Statement) -> None:
        index = self.index
        match statement:
            case program.Let(name, value):
                kind = "" if self._again(name) else "int64_t "
                self.put(depth, f"{kind}{name} = {index(value)};")
            case program.Array(name, _, address):
                kind = self.stored(name)
                where = f"t[AT_{name}]" if address is None else index(address)
                self.put(depth, f"{kind}* const at_{name} = ({kind}*){where};")
            case program.View(name, room, first, _):
                self.put(depth, f"auto* const {name} = {room} + {index(first)};")
            case program.Read(node, place, wide):
                if not self._again(self.bare(node)):
                    self.put(depth, self._read(node, self.value(place), wide=wide))
            case program.Compute(node):
                kind = "auto" if node.dtype == "real" else self.kind(node)
                self.put(depth, f"const {kind} {self.name(node)} = {self.expression(node)};")
                self.known.add(self.name(node))
            case program.Start(into, reduction):
                kept = self.value(into)
                kind = "" if isinstance(into, Place) or self._again(kept) else "double "
                self.put(depth, f"{kind}{kept} = {self.start(reduction)};")
            case program.Fill(view, size, reduction):
                head = f"for (int64_t i = 0; i < {index(size)}; ++i)"
                self.put(depth, f"{head} {view}[i] = {self.start(reduction)};")
            case program.Take(reduction, into, value):
                self.put(depth, f"{self.take(reduction, self.value(into), self.place(value))};")
            case program.Write(place, value):
                self.put(depth, f"{self.place(place)} = {self.value(value)};")
            case bulk.Multiply(a, b, out, first, end, sides, factors):
                given = ["(void*)t[BLAS]"]
                given += [f"(W*)t[AT_{array}] + {index(start)}" for array, start in (a, b, out)]
                given += map(index, (first, end, *sides))
                given += [str(int(flag)) for flag in factors[:3]]
                self.put(depth, f"multiply({', '.join(given)});")
            case bulk.Spread(back, array, first, end, planes, each):
                way, count = "give" if back else "take", index((end - first) // each)
                source = f"at_{array} + {index(first)}"
                self.put(depth, f"{way}({source}, {planes}, {count}, {index(each)});")
            case bulk.Buffer(name, size):
                self.put(depth, f"W {name}[{size}];")
            case bulk.Codes(_, _, _, _, count, buffer):
                given = [*self._coded(statement), buffer, index(count)]
                self.put(depth, f"quantize({', '.join(given)});")
            case bulk.Elements():
                given = [index(statement.count)]
                for array, first, _ in statement.slices.values():
                    given.append(f"{array} + {index(first)}")
                for codes in statement.codes:
                    given += self._coded(codes)
                given += map(self.bare, statement.scalars)
                if statement.position is not None and statement.stride is not None:
                    given += [index(statement.position), index(statement.stride)]
                given += ["got"] if statement.totals else []
                self.put(depth, f"{statement.function}({', '.join(given)});")
            case _:
                super().statement(depth, statement)

    def _read(self, node: Node, place: str, *, wide: bool) -> str:
        """A scalar keeps its number, also where it is a truth value."""
        if node.on_host:
            kind = "double" if wide else "W"
            return f"const {kind} {self.bare(node)} = ({kind}){place};"
        if node.dtype == "bool":
            return f"const bool {self.name(node)} = {place} != 0;"
        return f"const {'auto' if wide else 'W'} {self.name(node)} = {place};"

    def _coded(self, codes: bulk.Codes) -> tuple[str, str]:
        """Where codes are, and their scales."""
        first = codes.first
        return (
            f"at_{codes.array} + {self.index(first)}",
            f"at_{codes.scale} + {self.index(first // BLOCK)}",
        )
