"""Printing the statements that C++ for CPUs and CUDA have in common."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from arrayopt.codecs import STORED
from arrayopt.engines.printer import Lines, Printer
from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import Node

__all__ = ["CPlusPlus", "Words"]


class Words(Lines):
    """The words of a source: types, and numbers."""

    language = "cuda"  # its texts are C++, with the functions of the headers
    special: ClassVar[dict[str, str]] = {"nan": "NAN", "inf": "INFINITY", "-inf": "-INFINITY"}

    def comment(self, text: str) -> None:
        """Add a comment, and a line between."""
        self.put(0, *(f"// {line}".rstrip() for line in text.splitlines()), "")

    def kind(self, n: Node) -> str:
        """The type of a value."""
        return {"bool": "bool", "complex": "Complex", "real": self.type}[n.dtype]

    def constant(self, n: Node) -> str:
        """A constant."""
        if n.dtype == "bool":
            return str(n.data).lower()
        finite = math.isfinite(n.data)
        return f"({self.type}){n.data!r}" if finite else f"({self.type}){self.special[str(n.data)]}"


class CPlusPlus(Words, Printer):
    """Prints statements that are the same on CPUs and on a device."""

    whole: ClassVar[str]
    """The type of whole numbers."""
    table: ClassVar[str] = "static const"
    """What tables in the code are."""
    each: ClassVar[str] = "int i = 0; i < n; ++i"
    """How one goes over the numbers of a wave."""

    def column(self, name: str) -> str:
        return f"t[{name}]"

    def stored(self, array: str) -> str:
        """The type of what an array holds."""
        return STORED[self.storage[array]].cuda

    def tables(self, body: Iterable[program.Statement]) -> None:
        """Print the tables of the waves among a function's statements, before it."""
        for waves in body:
            if isinstance(waves, bulk.Waves):
                name = waves.name
                rows = ", ".join(f"{{{', '.join(map(str, row))}}}" for row in waves.waves)
                self.put(0, f"{self.table} int {name}_waves[][4] = {{{rows}}};")
                self._table("int", f"{name}_levels", waves.levels)
                self._table("int", f"{name}_sources", waves.sources)
                self._table("double", f"{name}_constants", map(self.constant, waves.constants))

    def _table(self, kind: str, name: str, values: Iterable[Any]) -> None:
        if text := ", ".join(map(str, values)):
            self.put(0, f"{self.table} {kind} {name}[] = {{{text}}};")

    def wave(self, depth: int, waves: bulk.Waves) -> None:
        """Print what makes a wave, whose number is `wave`."""
        self.put(depth, f"const int* const made = {waves.name}_waves[wave];")
        self.put(depth, "const int n = made[1], first = made[2], begin = made[3];")
        self.put(depth, "(void)first;", "switch (made[0]) {")
        for number, body in enumerate(waves.cases):
            self.put(depth, f"case {number}:")
            self.block(depth + 1, f"for ({self.each})", body)
            self.put(depth + 1, "break;")
        self.put(depth, "}")

    def block(self, depth: int, head: str, body: Sequence[program.Statement]) -> None:
        """Print statements in braces."""
        self.put(depth, f"{head} {{")
        self.statements(depth + 1, body)
        self.put(depth, "}")

    def statement(self, depth: int, statement: program.Statement) -> None:
        match statement:
            case program.Fold():
                self.statements(depth, statement.serial)
            case program.Loop(name, first, end, inside, turned):
                a, b = self.index(first), self.index(end)
                head = f"{self.whole} {name} = {a}; {name} < {b}; ++{name}"
                if turned:
                    head = f"{self.whole} {name} = {self.index(end - 1)}; {name} >= {a}; --{name}"
                self.block(depth, f"for ({head})", inside)
            case bulk.Waves():
                self.put(depth, f"for (int wave = 0; wave < {len(statement.waves)}; ++wave) {{")
                self.wave(depth + 1, statement)
                self.put(depth, "}")
            case program.When(left, right, then, otherwise):
                self.block(depth, f"if ({self.index(left)} == {self.index(right)})", then)
                self.block(depth, "else", otherwise)
            case _:
                raise NotImplementedError(type(statement).__name__)
