"""How values are named, read and written in emitted Numba text."""

import math

from arrayopt.codecs import STORED
from arrayopt.engines.native.columns import columns
from arrayopt.engines.written import Written
from arrayopt.fusion.graph import POSITION, Node
from arrayopt.fusion.layout import GEOMETRY, Layout
from arrayopt.fusion.plan import Plan

__all__ = ["REST", "UNITS", "Text"]

UNITS, REST = "row, lo, hi, thread", "table, scalars, values, work, part"
"""What a pass takes: whose and which units, and where everything lies."""


class Text(Written):
    """The text of a module, being written."""

    language = "numba"
    infinity = "np.inf"

    def __init__(self, plan: Plan, dtype: str, grad_dtype: str, where: Layout) -> None:
        super().__init__(plan, dtype, grad_dtype, where, GEOMETRY)
        self.columns = columns(plan, where)
        self.seen: dict[Node, None] | None = None
        self.position = "(start + i)"

    def name(self, node: Node) -> str:
        """What a value is called in the text."""
        if node.op == "const":
            if node.dtype == "bool":
                return repr(node.data)
            return f"W({node.data!r})" if math.isfinite(node.data) else f"W(float('{node.data}'))"
        if node.op == POSITION:
            return self.position
        if node.on_host:
            return (
                f"h{self.scalar[node]}" if node.dtype != "bool" else f"(h{self.scalar[node]} != 0)"
            )
        return f"{node.data}_" if node.op == "input" else f"x{node.id}"

    def bare(self, n: Node) -> str:
        """By what name a loop takes a value; a truth value comes as the float that it lies as."""
        return self.name(n).strip("()").split(" ")[0]

    def typed(self, n: Node, text: str, cast: str = "W") -> str:
        """What is read of a value that lies somewhere as a float, in the value's own type."""
        return f"{text} != 0" if n.dtype == "bool" else f"{cast}({text})" if cast else text

    def load(self, kind: str, stored: str) -> str:
        """What is stored in a dtype, in the dtype of arithmetic."""
        codec = STORED[kind]
        text = codec.numba_load.format(stored)
        if codec.working.startswith("complex"):
            working = "complex64" if self.real == "float32" else "complex128"
            return text if codec.working == working else f"np.{working}({text})"
        return text if codec.working == self.real else f"W({text})"

    def store(self, kind: str, value: str) -> str:
        """A value as it is stored in a dtype."""
        return STORED[kind].numba_store.format(value)

    def array(self, indent: int, name: str, size: str, address: str | None = None) -> None:
        """Make a stored array from its address."""
        kind = STORED[self.storage[name]].numba or self.storage[name]
        where = f"table[row, AT_{name}]" if address is None else address
        self.put(indent, f"at_{name} = nb.carray(pointer({where}), ({size},), np.{kind})")

    def at(self, node: Node, index: str) -> str:
        """Where a value over fewer axes lies; between passes, where loops begin at 0, as a view,
        which is noted.
        """
        if node.op == "input":
            return f"at_{node.data}[{index}]"
        if self.seen is None:
            return f"work[table[row, VEC{self.vector[node]}] + {index}]"
        self.seen[node] = None
        return f"w{self.vector[node]}[{index}]"

    def value(self, n: Node) -> str:
        """A value over fewer axes, read where the indices of its axes are known."""
        place = self.where.place(n)
        if place == "tensor":
            return f"values[row, {self.tensor[n]}]"
        return self.name(n) if place in ("const", "scalar") else self.at(n, self.index(n.axes))
