"""The base class of printers, which turn a plan's program into text: lines, integers, names of
values and places. `cplusplus.py` and `numba/emit.py` add the statements of a language.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

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
        mixed = n.dtype == "complex" or any(a.dtype == "complex" for a in n.args)
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

    # ---- values ----------------------------------------------------------------------------------

    position = "position"
    """The name of an element's position."""

    def name(self, node: Node) -> str:
        """Return the text of a value where it is used."""
        if node.op == POSITION:
            return self.position
        if node.op == "const":
            return self.constant(node)
        truth = node.on_host and node.dtype == "bool"
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
        *factors, last = map(self.name, unrounded.args)
        first = factors[0] if len(factors) == 1 else f"({' * '.join(factors)})"
        other = self.name(right if unrounded is left else left)
        if node.op == "add":
            return f"fused({first}, {last}, {other})"
        if unrounded is left:
            return f"fused({first}, {last}, -{other})"
        return f"fused(-{first}, {last}, {other})"

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
    """Return the product that each sum or difference of a loop takes unrounded, if any: the first
    of two, or one that nothing needs rounded. The compiler itself would fuse the latter in vectors,
    but not always in the elements that are left.
    """
    found, order = dict[Node, Node](), {n: i for i, n in enumerate(loop.nodes)}
    sums = [n for n in loop.nodes if n.op in ("add", "sub")]
    for node in sums:
        products = [x for x in node.args if x.op == "mul" and x in order]
        mixed = [x for x in products if x.args[0].dtype != x.args[1].dtype]
        if [x.dtype for x in products] == ["real", "real"]:
            found[node] = min(products, key=order.__getitem__)
        elif node.op == "add" and mixed and all(x.dtype == "complex" for x in node.args):
            found[node] = mixed[0]
    stored = [*loop.stores.values(), *(n for s, n in loop.sums.items() if s.op != "sum")]
    for product in loop.nodes:
        if product.op in ("mul", "over") and product.dtype == "real" and product not in stored:
            using = [n for n in loop.nodes if product in n.args and found.get(n) is not product]
            if all(n in sums and n not in found and n.args[0] is not n.args[1] for n in using):
                found |= dict.fromkeys(using, product)
    return found
