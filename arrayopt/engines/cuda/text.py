"""What emitted CUDA is made of: the headers in ``kernels/``, and how values are named, read and
written.
"""

import math
from collections.abc import Callable, Sequence

from arrayopt.codecs import STORED
from arrayopt.engines.cuda.stages import OUTPUTS, SMALL_COLUMNS, SMALL_MATRIX, SUMS, stages
from arrayopt.engines.written import Lines, Written
from arrayopt.fusion.graph import KEY, POSITION, Node, reachable
from arrayopt.fusion.layout import GEOMETRY, layout
from arrayopt.fusion.ops import REDUCTIONS
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.phases import GIVEN
from arrayopt.fusion.plan import Plan

__all__ = ["COLUMNS", "WINDOW", "CudaText", "CudaWords", "given", "keys"]

COLUMNS = (*GEOMETRY, "ALIGNED", "GROUP", "COUNT")
"""What a tensor's row of the table begins with; addresses and offsets follow."""

WINDOW = ("A_FROM", "R_FROM", "C_FROM", "A_END", "R_END", "C_END", "STRIDE", "MATRIX", "BEFORE")
"""What it ends with where matrices are cut: see ``Tile`` in ``matrix.cuh``."""


class CudaWords(Lines):
    """The words of a CUDA source: numbers, and operations on values that have names."""

    language, type = "cuda", "double"

    def kind(self, n: Node) -> str:
        """The C++ type of a value."""
        return {"bool": "bool", "complex": "Complex", "real": self.type}[n.dtype]

    def number(self, value: float) -> str:
        """A constant."""
        if math.isfinite(value):
            return f"({self.type}){value!r}"
        bits = (
            "0x7ff8000000000000"
            if math.isnan(value)
            else "0x7ff0000000000000"
            if value > 0
            else "0xfff0000000000000"
        )
        return f"({self.type})__longlong_as_double({bits}ll)"

    def constant(self, n: Node) -> str:
        """A constant of either kind."""
        return str(n.data).lower() if n.dtype == "bool" else self.number(n.data)

    def straight(self, nodes: Sequence[Node], given: Callable[[str], str]) -> dict[Node, str]:
        """Define what some scalars are computed from, by the scalars that are given; the names of
        all.
        """
        known: dict[Node, str] = {}
        for node in reachable(nodes):
            if node.op == "const":
                known[node] = self.constant(node)
                continue
            known[node] = f"s{node.id}"
            text = (
                given(node.data)
                if node.op == "host"
                else self.operation(node, [known[a] for a in node.args])
            )
            self.put(1, f"const {self.kind(node)} s{node.id} = {text};")
        return known


AHEAD = 32 << 10
"""Bytes that a multiprocessor is to wait for at once. See "Bytes in flight" in ``docs/cuda.md``."""

WIDE = 10
"""With more words of 32 bits to load, to store and to sum up than that for each element, a pass
needs more than 80 registers; with twice as many to load and to store, more than 128.
"""


def keys(plan: Plan) -> list[str]:
    """The halves of keys of random numbers, in the order of the table's last columns; the first
    position is before.
    """
    return [n.data for n in reachable(plan.scalars) if n.op == "host" and n.data.startswith(KEY)]


def given(plan: Plan) -> list[str]:
    """What a phase takes from the host's place in a step: totals, and values of earlier phases.

    The table says where each is, in columns that follow those of the keys.
    """
    names = [n.data for n in reachable(plan.scalars) if n.op == "host"]
    return [name for name in names if name.startswith(GIVEN)]


class CudaText(CudaWords, Written):
    """The text of a CUDA source, being written.

    Attributes
    ----------
    windows : bool
        Whether it is of matrices that the user has cut.
    """

    def __init__(self, plan: Plan, dtype: str, grad_dtype: str, *, windows: bool = False) -> None:
        super().__init__(plan, dtype, grad_dtype, layout(plan), COLUMNS)
        self.type = "W"  # of real numbers, where the text is now
        self.keys = keys(plan)
        self.columns += (
            ["ORIGIN", *(f"KEY{i}" for i in range(len(self.keys)))] if plan.draws else []
        )
        self.given = given(plan)
        self.columns += [f"GIVEN{i}" for i in range(len(self.given))]
        self.columns += WINDOW if windows else ()
        self.windows = windows

    def constants(self, hypers: int) -> None:
        """The sizes that the headers and the rest of the text share."""
        self.put(0, f"typedef {STORED[self.real].cuda} W;  // the dtype of arithmetic", "")
        self.put(
            0, f"enum {{ {', '.join(self.columns)}, kColumns }};  // what the table has of a tensor"
        )
        values = {"kHypers": hypers, "kScalars": len(self.scalar), "kValues": len(self.tensor)}
        self.blocks = self._resident()
        values["kBlocks"] = self.blocks
        values["kStages"] = len(stages(self.plan))
        if self.plan.element != "C":
            most = max((len(p.reducing("column")) for p in self.plan.passes), default=0)
            # 0: tensors are whole
            values["kWindow"] = self.columns.index(WINDOW[0]) if self.windows else 0
            values |= {"kSmallMatrix": SMALL_MATRIX, "kSmallColumns": SMALL_COLUMNS}
            values |= {
                "kColumnRoom": max(1, most) * 256 * SMALL_COLUMNS,
                "kOutputs": OUTPUTS,
                "kResults": SUMS,
            }
        self.put(0, *(f"constexpr int {name} = {x};" for name, x in values.items()), "")

    def _resident(self) -> int:
        """How many blocks a multiprocessor has: three leave a thread 80 registers, two 128, and
        none is to spill.
        """
        if self.plan.multiplies:  # many passes in one kernel, and products take the time
            return 1
        passes, words = self.plan.passes, 2 if self.real == "float64" else 1
        held = []
        for p in passes:
            moved = [*p.loads.values(), *p.stores.values()]
            held.append(words * sum(2 if n.dtype == "complex" else 1 for n in moved))
        if max(held, default=0) >= 2 * WIDE:
            return 1
        most = max((x + len(p.reductions) for x, p in zip(held, passes, strict=True)), default=0)
        most += 5 * (STORED[self.storage["p"]].itemsize == 2)  # for rounding
        most += 3 * len(self.plan.quantized)  # for scales
        return 3 if self.plan.element == "C" and self.real == "float32" and most <= WIDE else 2

    def ahead(self, p: Pass) -> int:
        """How many vectors of each array a thread reads before it uses the first, so that enough
        bytes are awaited.
        """
        each = self.blocks * 256 * sum(4 * STORED[self.storage[name]].itemsize for name in p.loads)
        if self.plan.multiplies:  # many passes share the registers, and products take the time
            return 1
        if self.plan.element != "C":
            return min(8, -(-AHEAD // each)) if each else 1
        return next((n for n in (1, 2) if n * each >= AHEAD), 4)  # a piece is of four

    # ---- values ----------------------------------------------------------------------------------

    def name(self, node: Node) -> str:
        """What a value is called in the text."""
        if node.op == "const":
            return self.constant(node)
        if node.op == POSITION:
            return f"({'of_row.' if self.windows else ''}origin + i + j)"
        if node.on_host:
            return f"h{self.scalar[node]}"
        return f"{node.data}_" if node.op == "input" else f"x{node.id}"

    def declare(self, n: Node, text: str) -> str:
        """The definition of a value from what it is."""
        return f"const {self.kind(n)} {self.name(n)} = {text};"

    def typed(self, n: Node, text: str) -> str:
        """What is read of a value that lies somewhere as a real number, in the value's own type."""
        return f"{text} != 0" if n.dtype == "bool" else f"({self.type}){text}"

    def stored(self, name: str) -> str:
        """The C++ type of an element of a stored array."""
        return STORED[self.storage[name]].cuda

    def value(self, node: Node) -> str:
        """A value over fewer axes than the elements, read where its axes' indices are known."""
        place = self.where.place(node)
        if place == "vector":
            return self.typed(
                node, f"step.work[t[VEC{self.vector[node]}] + {self.index(node.axes)}]"
            )
        if place == "stored":
            return self.typed(node, f"widen(at_{node.data}[{self.index(node.axes)}])")
        if self.type == "double":
            return self.typed(
                node,
                f"scalar[{self.scalar[node]}]"
                if place == "scalar"
                else f"value[{self.tensor[node]}]",
            )
        at = f"{self.scalar[node]}" if place == "scalar" else f"kScalars + {self.tensor[node]}"
        return self.typed(node, f"working[{at}]")

    def fold(self, indent: int, name: str, reductions: Sequence[Node]) -> None:
        """Say how values of some reductions, by number, become one; see ``sums.cuh``."""
        kinds = [REDUCTIONS[r.op].cuda for r in reductions]
        if len(set(kinds)) <= 1:
            self.put(indent, f"typedef {kinds[0] if kinds else 'Sum'} {name};")
            return
        self.put(indent, f"struct {name} {{")
        choice = (
            "".join(f"k == {j} ? {kind}::{{0}} : " for j, kind in enumerate(kinds[:-1]))
            + f"{kinds[-1]}::{{0}}"
        )
        for head, call in (
            ("start(int k, {0} a)", "start(k, a)"),
            ("fold(int k, {0} a, {0} b)", "fold(k, a, b)"),
        ):
            text = f"{{0}} {head} {{{{ return {choice.format(call)}; }}}}"
            inline = "static __device__ __forceinline__"
            self.put(indent + 1, f"{inline} {text.format(self.type)}")
        self.put(indent, "};")

    def pointer(self, name: str) -> str:
        """The definition of where a stored array lies."""
        kind = self.stored(name)
        return f"{kind}* const at_{name} = global(reinterpret_cast<{kind}*>(t[AT_{name}]));"

    def open(self, name: str, more: str = "") -> None:
        """Begin the function of a stage, which may take more: where the tensor's own values lie."""
        self.put(0, f"__device__ __forceinline__ void {name}(const Step& given{more}) {{")
        self.put(1, "const int tensor = now().tensor, piece = now().piece;")
        self.put(1, "const Step step = located(given);")
        self.put(1, "const long long* const t = step.table + (long long)tensor * kColumns;")
        self.put(1, "const double* const scalar = step.scalars + (long long)tensor * kScalars;")
        self.put(1, "double* const value = step.values + (long long)tensor * kValues;")
        self.put(1, "W* const working = step.working + (long long)tensor * (kScalars + kValues);")
        self.put(1, "const long long A = t[IN_A], B = t[IN_B], R = t[IN_R], C = t[IN_C];")
        self.put(1, "(void)scalar, (void)value, (void)working, (void)A, (void)B, (void)R, (void)C;")
