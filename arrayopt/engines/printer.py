"""The base class of printers, which turn a plan's program into text: lines, integers, names of
values and places. `cplusplus.py` and `numba/emit.py` add the statements of a language.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from arrayopt.arrays import real_dtype
from arrayopt.fusion.bulk import Elements
from arrayopt.fusion.graph import POSITION, Node
from arrayopt.fusion.index import Index, Place
from arrayopt.fusion.layout import Layout
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import Statement
from arrayopt.state.quantized import scale_of

STRENGTH = {"+": 1, "-": 1, "*": 2, "//": 2, "%": 2}


class Lines:
    """A text, line by line.

    Attributes
    ----------
    type : str
        The name of the type of real numbers in the current part of the text.
    """

    language: ClassVar[str]
    """The column of `OPS` with the texts of operations."""
    infinity: ClassVar[str] = "INFINITY"
    """The text of infinity."""
    type = "W"

    def __init__(self) -> None:
        self.lines: list[str] = []

    def put(self, indent: int, *lines: str) -> None:
        """Add lines."""
        self.lines += ["    " * indent + line if line else "" for line in lines]

    def put_text(self, text: str) -> None:
        """Add the lines of a text."""
        self.lines += text.splitlines()

    def operation(self, n: Node, args: Sequence[str]) -> str:
        """Return the text of an operation; `args` are the names of its operands."""
        mixed = n.kind == "complex" or any(a.kind == "complex" for a in n.args)
        return OPS[n.op].text(self.language, args, self.type, mixed=mixed)

    def start(self, reduction: Node) -> str:
        """Return the initial value of a reduction."""
        return str(REDUCTIONS[reduction.op].initial).replace("inf", self.infinity)

    def take(self, reduction: Node, kept: str, value: str) -> str:
        """Return the statement that adds a value to the partial result `kept` of a reduction."""
        return REDUCTIONS[reduction.op].take.format(kept, value)

    def text(self) -> str:
        """Return the whole text."""
        return "\n".join(self.lines) + "\n"


class Printer(Lines):
    """Prints a plan's program, for parameters and gradients of these dtypes.

    Attributes
    ----------
    real : str
        The dtype of arithmetic on real numbers.
    storage : dict of str to str
        The dtypes in which arrays are stored.
    """

    words: ClassVar[dict[str, str]] = {}
    """The names of operations on integers, if they differ from Python's."""

    def __init__(
        self, plan: Plan, dtype: str, grad_dtype: str, layout: Layout, columns: Sequence[str]
    ) -> None:
        super().__init__()
        self.plan, self.layout, self.columns = plan, layout, columns
        self.real = real_dtype(dtype)
        self.storage = {"p": dtype, "g": grad_dtype}
        self.storage |= {name: plan.storage[name] for name in plan.slots}
        self.storage |= {scale_of(name): "bfloat16" for name in plan.quantized}
        self.storage |= {name: plan.storage[name] for name in plan.spilled}

    @property
    def lanes(self) -> int:
        """The number of partial results of each total of a loop: the numbers in 64 bytes.

        Element i goes to lane i % lanes. In the end, the second half of the lanes is taken into the
        first, until one is left. So bits depend on no compiler, nor on a processor's vectors.
        """
        return 64 // np.dtype(self.real).itemsize

    # ---- values ----------------------------------------------------------------------------------

    position = "position"
    """The name of an element's position."""

    def name(self, node: Node) -> str:
        """Return the text of a value where it is used."""
        if node.op == POSITION:
            return self.position
        if node.op == "const":
            return self.constant(node)
        truth = node.on_host and node.kind == "bool"
        return f"({self.bare(node)} != 0)" if truth else self.bare(node)

    def constant(self, node: Node) -> str:
        """Return the text of a constant."""
        raise NotImplementedError

    def bare(self, node: Node) -> str:
        """Return the name of a value where it is defined; scalars are numbers, also conditions."""
        if node.on_host:
            return f"h{self.layout.scalars[node]}"
        return f"{node.data}_" if node.op == "input" else f"x{node.id}"

    def expression(self, node: Node, unrounded: Node | None = None) -> str:
        """Return the text of an operation on named values; of a sum or difference with an
        unrounded product among its operands, that of a fused operation.
        """
        if unrounded is None:
            return self.operation(node, [self.name(a) for a in node.args])
        left, right = node.args
        other, sign = self.name(right if unrounded is left else left), ""
        if node.op == "sub":
            other, sign = (f"-{other}", "") if unrounded is left else (other, "-")
        return self.fused(unrounded, other, sign)

    def fused(self, product: Node, other: str, sign: str = "") -> str:
        """Return the text of a product, with a sign, plus another value, rounded once."""
        return f"fused({sign}{self.factors(product)}, {other})"

    def factors(self, product: Node) -> str:
        """Return the text of two factors."""
        *factors, last = map(self.name, product.args)
        return f"{' * '.join(factors)}, {last}"

    # ---- numbers and places ----------------------------------------------------------------------

    def column(self, name: str) -> str:
        """Return the text of a column of the tensor's row of the table."""
        return f"t[{name}]"

    def index(self, number: Index, within: int = 0) -> str:
        """Return the text of an integer; in parentheses if the operator around it needs them."""
        if number.op == "column":
            name, *after = number.args
            return self.column(" + ".join([name, *map(self.index, after)]))
        if number.op == "entry":
            return f"{number.args[0]}[{self.index(number.args[1])}]"
        if number.op in ("name", "number"):
            return str(number.args[0])
        word = self.words.get(number.op, number.op)
        if number.op not in STRENGTH:
            return f"{word}({', '.join(map(self.index, number.args))})"
        left, right = number.args
        strength = STRENGTH[number.op]
        text = f"{self.index(left, strength - 1)} {word} {self.index(right, strength)}"
        return f"({text})" if strength <= within else text

    def place(self, place: Place) -> str:
        """Return the text of an element in memory."""
        return f"{place.room}[{self.index(place.index)}]"

    def value(self, value: Node | str | Place) -> str:
        """Return the text of a value, a variable, or an element in memory."""
        if isinstance(value, Place):
            return self.place(value)
        return value if isinstance(value, str) else self.name(value)

    # ---- statements ------------------------------------------------------------------------------

    def statements(self, depth: int, body: Iterable[Statement]) -> None:
        """Print statements."""
        for statement in body:
            self.statement(depth, statement)

    def statement(self, depth: int, statement: Statement) -> None:
        """Print a statement."""
        raise NotImplementedError


def unrounded_products(loop: Elements) -> dict[Node, Node]:
    """Return the product that each sum, difference and reduction of a loop adds unrounded: the
    first of its terms that the loop computes as a product.

    No compiler chooses, so bits of an element depend neither on it nor on where the element lies.
    """
    found, order = dict[Node, Node](), {n: i for i, n in enumerate(loop.nodes)}
    terms = {n: n.args for n in loop.nodes if n.op in ("add", "sub")}
    terms |= {s: (n,) for s, n in loop.sums.items() if s.op == "sum"}
    for node, added in terms.items():
        products = [x for x in added if x in order and _is_real_multiple(x)]
        alike = {node.kind} == {x.kind for x in added}
        if products and alike and len({*added}) == len(added):  # x - x is zero
            found[node] = min(products, key=order.__getitem__)
    return found


def rounded_nodes(loop: Elements, unrounded: dict[Node, Node]) -> list[Node]:
    """Return what a loop computes, without products that are only ever added unrounded."""
    used = {*loop.stores.values(), *loop.guards.values()}
    terms = {n: n.args for n in loop.nodes} | {s: (n,) for s, n in loop.sums.items()}
    for node, added in terms.items():
        used |= {*added} - {unrounded.get(node)}
    return [n for n in loop.nodes if n in used]


def _is_real_multiple(node: Node) -> bool:
    """Whether a node is a product with a real number."""
    return node.op in ("mul", "over") and "real" in {a.kind for a in node.args}
