"""What a text that runs a plan is made of in any language: its lines, and what a tensor's row of
the table holds.
"""

from collections.abc import Sequence
from typing import ClassVar

from arrayopt.arrays import REAL, WORKING
from arrayopt.fusion.graph import Node
from arrayopt.fusion.layout import Layout
from arrayopt.fusion.lowering import INDEX
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.plan import Plan
from arrayopt.state.quantized import scale_of

__all__ = ["INDEX", "Lines", "Written"]


class Lines:
    """A text, being written.

    Attributes
    ----------
    language : str
        Whose texts of the table of operations are printed.
    infinity : str
        What an infinite number is there.
    type : str
        What real numbers are called where the text is now.
    """

    language: ClassVar[str]
    infinity: ClassVar[str] = "INFINITY"
    type = "W"

    def __init__(self) -> None:
        self.lines: list[str] = []

    def put(self, indent: int, *lines: str) -> None:
        """Add lines."""
        self.lines += ["    " * indent + line if line else "" for line in lines]

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


class Written(Lines):
    """A text that runs a plan.

    Attributes
    ----------
    real : str
        The dtype of arithmetic on real numbers.
    storage : dict of str to str
        The dtypes that arrays are stored in.
    columns : list of str
        The names of a table's columns: `head`, addresses of arrays, offsets of vectors and of
        partial sums.
    scalar, tensor, vector, partial : dict of Node to int
        The number of each scalar of the step, value per tensor, vector and reduction over elements.
    """

    def __init__(
        self, plan: Plan, dtype: str, grad_dtype: str, where: Layout, head: Sequence[str]
    ) -> None:
        super().__init__()
        self.plan, self.where = plan, where
        self.real = REAL.get(WORKING[dtype], WORKING[dtype])
        self.storage = {"p": dtype, "g": grad_dtype}
        self.storage |= {name: plan.storage[name] for name in plan.slots}
        self.storage |= {scale_of(name): "bfloat16" for name in plan.quantized}
        self.storage |= {name: plan.storage[name] for name in plan.spilled}
        self.columns = [*(f"IN_{x}" for x in head), *(f"AT_{n}" for n in self.storage)]
        self.columns += [f"VEC{i}" for i in range(len(where.vectors))]
        self.columns += [f"PART{i}" for i in range(len(where.partials))]
        self.scalar, self.tensor = where.scalars, where.tensor
        self.vector = {n: i for i, n in enumerate(where.vectors)}
        self.partial = {n: i for i, n in enumerate(where.partials)}

    def name(self, n: Node) -> str:
        """What a value is called in the text."""
        raise NotImplementedError

    def expression(self, n: Node) -> str:
        """What an operation is, of values by their own names."""
        return self.operation(n, [self.name(a) for a in n.args])

    def index(self, axes: str) -> str:
        """The position of a value over some axes, as it lies in memory."""
        out = ""
        for x in axes:
            out = f"({out}) * {x} + {INDEX[x]}" if out else INDEX[x]
        return out or "0"
