"""What prints programs in any language: lines, numbers that code computes, and places."""

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
    """A text, being written.

    Attributes
    ----------
    type : str
        What real numbers are called where the text is now.
    """

    language: ClassVar[str]
    """Whose texts of the table of operations are printed."""
    infinity: ClassVar[str] = "INFINITY"
    """What an infinite number is there."""
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
        """What an operation is, of values of these names."""
        mixed = n.dtype == "complex" or any(a.dtype == "complex" for a in n.args)
        return OPS[n.op].text(self.language, args, self.type, mixed=mixed)

    def start(self, reduction: Node) -> str:
        """What is kept of a reduction before its first value."""
        return str(REDUCTIONS[reduction.op].initial).replace("inf", self.infinity)

    def take(self, reduction: Node, kept: str, value: str) -> str:
        """The statement that takes a value into what is kept of a reduction."""
        return REDUCTIONS[reduction.op].take.format(kept, value)

    def text(self) -> str:
        """All of it."""
        return "\n".join(self.lines) + "\n"


class Printer(Lines):
    """Prints the program of a plan, for parameters and gradients that are stored in these dtypes.

    Attributes
    ----------
    real : str
        The dtype of arithmetic on real numbers.
    storage : dict of str to str
        The dtypes that arrays are stored in.
    """

    words: ClassVar[dict[str, str]] = {}
    """What operations on whole numbers are called, where that differs."""

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
    """What the position of an element is called."""

    def name(self, node: Node) -> str:
        """What a value is called where it is used."""
        if node.op == POSITION:
            return self.position
        if node.op == "const":
            return self.constant(node)
        truth = node.on_host and node.dtype == "bool"
        return f"({self.bare(node)} != 0)" if truth else self.bare(node)

    def constant(self, node: Node) -> str:
        """A constant."""
        raise NotImplementedError

    def bare(self, node: Node) -> str:
        """A value's name where it is defined; scalars keep numbers, also for truth values."""
        if node.on_host:
            return f"h{self.layout.scalars[node]}"
        return f"{node.data}_" if node.op == "input" else f"x{node.id}"

    def expression(self, n: Node, unrounded: Node | None = None) -> str:
        """What an operation is, of values by their own names; where a product is given that a sum
        or difference takes unrounded, they are rounded once.
        """
        if unrounded is None:
            return self.operation(n, [self.name(a) for a in n.args])
        left, right = n.args
        *factors, last = map(self.name, unrounded.args)
        first = factors[0] if len(factors) == 1 else f"({' * '.join(factors)})"
        other = self.name(right if unrounded is left else left)
        if n.op == "add":
            return f"fused({first}, {last}, {other})"
        if unrounded is left:
            return f"fused({first}, {last}, -{other})"
        return f"fused(-{first}, {last}, {other})"

    # ---- numbers and places ----------------------------------------------------------------------

    def column(self, name: str) -> str:
        """What the table has of the tensor."""
        return f"t[{name}]"

    def index(self, number: Index, within: int = 0) -> str:
        """A number; in parentheses where what it is within binds as strongly, or more."""
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
        """What lies in a place."""
        return f"{place.room}[{self.index(place.index)}]"

    def value(self, value: Node | str | Place) -> str:
        """A value, a variable, or what lies in a place."""
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
    """The product that each sum or difference of a loop takes unrounded, if it takes one.

    It is the first of two, or one that nothing needs rounded. A compiler left to itself takes the
    latter too, but not in all of the elements that are left after whole vectors.
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
