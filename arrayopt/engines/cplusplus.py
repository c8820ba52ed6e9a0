"""The printer of statements that are the same in C++ for CPUs and CUDA, and the texts of the
headers in ``kernels/``. `cpp/emit.py` and `cuda/printer.py` extend it.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from arrayopt.codecs import STORED
from arrayopt.engines.printer import Lines, Printer
from arrayopt.fusion import program
from arrayopt.fusion.graph import Node


@cache
def _folder() -> Path:
    """Return the folder of headers: beside the package in a source tree, in it if installed."""
    package = Path(__file__).resolve().parents[1]
    beside = package.parent / "kernels"
    in_tree = (package.parent / "pyproject.toml").exists() and beside.is_dir()
    return beside if in_tree else package / "_kernels"


@cache
def header(name: str) -> str:
    """Return the text of a header of ``kernels/``."""
    return (_folder() / name).read_text()


class CPlusPlusLines(Lines):
    """Text in C++: comments, types and constants."""

    language = "cplusplus"
    special: ClassVar[dict[str, str]] = {"nan": "NAN", "inf": "INFINITY", "-inf": "-INFINITY"}

    def comment(self, text: str) -> None:
        """Add a comment, and an empty line."""
        self.put(0, *(f"// {line}".rstrip() for line in text.splitlines()), "")

    def type_of(self, n: Node) -> str:
        """Return the C++ type of a value."""
        return {"bool": "bool", "complex": "Complex", "real": self.type}[n.kind]

    def constant(self, n: Node) -> str:
        """Return the text of a constant."""
        if n.kind == "bool":
            return str(n.data).lower()
        finite = math.isfinite(n.data)
        return f"({self.type}){n.data!r}" if finite else f"({self.type}){self.special[str(n.data)]}"


class CPlusPlusPrinter(CPlusPlusLines, Printer):
    """Prints the statements that CPUs and devices have in common."""

    integer: ClassVar[str]
    """The C++ type of integers."""

    def stored(self, array: str) -> str:
        """Return the C++ type of an array's elements."""
        return STORED[self.storage[array]].cplusplus

    def block(self, depth: int, head: str, body: Sequence[program.Statement]) -> None:
        """Print statements in braces, after a head such as ``for (...)``."""
        self.put(depth, f"{head} {{")
        self.statements(depth + 1, body)
        self.put(depth, "}")

    def statement(self, depth: int, statement: program.Statement) -> None:
        match statement:
            case program.Fold():
                self.statements(depth, statement.serial)
            case program.Loop(name, first, end, inside, backwards):
                a, b = self.index(first), self.index(end)
                head = f"{self.integer} {name} = {a}; {name} < {b}; ++{name}"
                if backwards:
                    head = f"{self.integer} {name} = {self.index(end - 1)}; {name} >= {a}; --{name}"
                self.block(depth, f"for ({head})", inside)
            case program.When(left, right, then, otherwise):
                self.block(depth, f"if ({self.index(left)} == {self.index(right)})", then)
                self.block(depth, "else", otherwise)
            case _:
                raise NotImplementedError(type(statement).__name__)
