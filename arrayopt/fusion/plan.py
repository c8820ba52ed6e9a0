"""A plan: the passes over the elements of a tensor, and the computation between them. Planning
makes it from a trace. Engines run it, or lower it to a program.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from arrayopt.codecs import QUANTIZED, STORED
from arrayopt.fusion.dims import TraceError
from arrayopt.fusion.graph import TOTAL, Factors, Node, is_whole, operands, reachable
from arrayopt.fusion.passes import Between, Pass, in_loops
from arrayopt.state.quantized import scale_of


class Total(NamedTuple):
    """When a total of a plan is computed: before pass `level`, as the `turn`-th total there."""

    level: int
    turn: int
    how: str


def ordered_totals(nodes: Sequence[Node]) -> tuple[Total, ...]:
    """When each total is computed. A total that depends on another has a later turn."""
    found: dict[Node, Total] = {}
    for total in nodes:
        turn = 0
        for node in reachable(total.args):
            if node.op == TOTAL and node.level == total.level:
                turn = max(turn, found[node].turn + 1)
        found[total] = Total(total.level, turn, total.data.how)
    return tuple(found.values())


def in_rounds(several: Iterable[tuple[Total, ...]]) -> list[list[int]]:
    """Return the numbers of the totals that are computed together, round by round, for tensors of
    several plans.

    Raises
    ------
    ValueError
        If the plans compute totals in different orders.
    """
    plans = list(several)
    waiting, made = set(range(len(plans[0]))), list[list[int]]()
    while waiting:
        ready = set(waiting)
        for plan in plans:
            soonest = min(plan[j][:2] for j in waiting)
            ready &= {j for j in waiting if plan[j][:2] == soonest}
        if not ready:
            raise ValueError("total: tensors of all shapes must use totals in the same order")
        made.append(sorted(ready))
        waiting -= set(ready)
    return made


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Plan:
    """How one tensor is updated; or how its reports are computed, in a plan that writes nothing."""

    element: str
    """The axes of an element; ``"C"`` if the tensor's shape does not matter."""
    passes: tuple[Pass, ...]
    """The passes, in order."""
    between: tuple[Between, ...]
    """The computation before each pass, and after the last."""
    scalars: tuple[Node, ...]
    """The scalars of the step that the plan uses."""
    slots: dict[str, str]
    """The axes of each slot."""
    small: dict[str, Node]
    """The slots over fewer axes than the elements, with their values after the last pass."""
    reports: dict[str, Node]
    """The values per tensor to report."""
    storage: dict[str, str]
    """The storage dtypes of the parameter, the slots and scratch arrays."""
    spilled: dict[str, Node]
    """Scratch arrays: a pass stores a value in one, and a later pass of the same step loads it. The
    node is one of the values; all values of an array have the same axes and kind. Their dtype is
    that of arithmetic, or the one that they were rounded to; see `Node.narrow`.
    """
    totals: tuple[Total, ...] = ()
    phases: "tuple[Plan, ...]" = ()
    """The plans before, between and after totals; see `arrayopt.fusion.phases`."""

    @property
    def multiplies(self) -> bool:
        """Whether the plan has products of matrices."""
        return any(p.multiplies for p in self.passes)

    @property
    def quantized(self) -> tuple[str, ...]:
        """The slots that are stored as codes with scales; see `arrayopt.state.quantized`."""
        return tuple(name for name in self.slots if self.storage[name] in QUANTIZED)

    @property
    def narrow(self) -> str:
        """The 16-bit dtype that the plan rounds results to, or empty."""
        found = {""}
        for pass_ in self.passes:
            found |= {node.narrow for node in pass_.nodes}
        return max(found)

    def check_wide(self) -> None:
        """Raise TraceError if the plan has 16-bit arithmetic, which engines for CPUs lack."""
        if self.narrow:
            raise TraceError(
                f"arithmetic in {self.narrow} is not fused; engine='array_api' works if the array"
                " library supports it"
            )

    @property
    def draws(self) -> bool:
        """Whether the plan draws random numbers."""
        return any(p.draws for p in self.passes)

    @property
    def ends(self) -> list[Node]:
        """The values that the passes store, and their reductions."""
        found: list[Node] = []
        for pass_ in self.passes:
            found += [*pass_.stores.values(), *pass_.sums]
        return found

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for plans that do the same."""
        ends, graph = self.ends, []
        for node in reachable([*ends, *self.small.values(), *self.reports.values()]):
            args = tuple(operand.id for operand in node.args)
            graph.append((node.op, args, node.axes, node.id, repr(node.data)))
        outputs = list[tuple[str, int]]()
        for stores in (*(x.stores for x in self.passes), self.small, self.reports):
            outputs += [(name, node.id) for name, node in stores.items()]
        return (
            self.element,
            tuple(graph),
            tuple(outputs),
            tuple(self.slots.items()),
            tuple(self.storage.items()),
        )

    @property
    def between_nodes(self) -> list[Node]:
        """The values that are computed between the passes, in order."""
        return list(chain.from_iterable(between.nodes for between in self.between))

    @property
    def touched(self) -> tuple[str, ...]:
        """The parameter, slots and scales that the plan reads or writes."""
        names = {scale_of(name) for name in self.quantized}
        for pass_ in self.passes:
            names |= {*pass_.loads, *pass_.stores}
        scales = dict.fromkeys(map(scale_of, self.quantized), self.element)
        slots = {"p": self.element, **self.slots, **scales}
        return tuple(name for name, axes in slots.items() if name in names or axes != self.element)

    @property
    def written(self) -> tuple[str, ...]:
        """The parameter, slots and scales that the plan writes."""
        elements = list[str]()
        for pass_ in self.passes:
            elements += [name for name in pass_.stores if name not in self.spilled]
        scales = [scale_of(name) for name in self.quantized if name in elements]
        return (*elements, *scales, *self.between[-1].stores)

    @property
    def idle(self) -> bool:
        """Whether the plan does nothing, so that an update only counts."""
        return not (self.passes or any(self.between) or self.written)

    def bytes_per_parameter(self, grad_dtype: str | None = None) -> float:
        """The bytes that passes move per parameter; gradients have its dtype by default."""
        element_wise = [x for x in self.passes if x.axes == self.element and not x.multiplies]
        return sum(self.bytes_of(pass_, grad_dtype) for pass_ in element_wise)

    def bytes_of(self, pass_: Pass, grad_dtype: str | None = None) -> float:
        """Return the bytes that a pass reads and writes per element."""
        storage = {"g": grad_dtype or self.storage["p"], **self.storage}
        return sum(STORED[storage[name]].moved for name in (*pass_.loads, *pass_.written))

    def __str__(self) -> str:
        lines = [self.line(number) for number in range(len(self.passes))]
        scratch = f", with scratch memory for {' '.join(self.spilled)}" if self.spilled else ""
        each = f"{self.bytes_per_parameter():g} bytes per {self.storage['p']} parameter"
        return "\n".join([*lines, f"{each}{scratch}"])

    def line(self, number: int) -> str:
        """Return a line that says what a pass loads, stores and reduces."""
        pass_ = self.passes[number]
        if pass_.multiplies:
            return f"pass {number}: {self._product(pass_)}"
        over = {self.element[:-1]: "row", self.element.replace("R", ""): "column", "": "tensor"}
        made = []
        for reduction in pass_.sums:
            what = "" if reduction.op == "sum" else f"{reduction.op} "
            made.append(f"{what}per {over.get(reduction.axes, 'batch')}")
        stores, reduces = " ".join(pass_.stores) or "-", ", ".join(dict.fromkeys(made)) or "-"
        where = "" if pass_.axes == self.element else f" over {pass_.axes}"
        return (
            f"pass {number}: load {' '.join(pass_.loads)}; store {stores}; reduce {reduces};"
            f" {self.bytes_of(pass_):g} B{where}"
        )

    def _product(self, pass_: Pass) -> str:
        """Return the text for a product: its operands, axes and FLOPs."""
        node, names = pass_.nodes[0], list(pass_.loads)
        factors: Factors = node.data
        left = names[0] + "ᵀ" * factors.left_transposed
        right = names[-1] + "ᵀ" * factors.right_transposed
        how, count = (", symmetric", "") if factors.symmetric else ("", "2 ")
        how = f" in {node.narrow}{how}" if node.narrow else how
        stored = next(iter(pass_.stores))
        flops = " ".join(node.multiplied)
        return (
            f"product {left} {right} over {pass_.axes}{how}; store {stored}; {count}{flops} FLOPs"
        )


def assembled(
    frame: Plan, passes: tuple[Pass, ...], small: dict[str, Node], reports: dict[str, Node]
) -> Plan:
    """Return the plan `frame` with these passes, new values of small slots, and reports."""
    results = [*small.values(), *reports.values()]
    between = _between(results, small, passes, frame.element)
    computed, summed, stored = list[Node](), list[Node](), list[Node]()
    for pass_ in passes:
        computed += pass_.nodes
        summed += pass_.sums
        stored += pass_.stores.values()
    used = [*operands((*computed, *summed)), *stored]
    for each in between:
        used += operands(each.nodes)
    scalars = {x.id: x for x in (*used, *results) if x.on_host and x.op != "const"}
    return replace(
        frame,
        passes=passes,
        between=between,
        scalars=tuple(scalars.values()),
        small=small,
        reports=reports,
    )


def _between(
    results: Iterable[Node], small: dict[str, Node], passes: tuple[Pass, ...], element: str
) -> tuple[Between, ...]:
    """Return the computation between passes. Each value is computed as early as possible."""
    when = dict[Node, int]()  # the number of passes before each value
    of_nodes, of_sums, stored = list[Node](), list[Node](), list[Node]()
    for number, pass_ in enumerate(passes):
        when |= dict.fromkeys(pass_.sums, number + 1)
        of_nodes += operands(pass_.nodes)
        of_sums += operands(pass_.sums)
        stored += pass_.stores.values()
    ends = [x for x in (*of_nodes, *of_sums, *results, *stored) if not is_whole(x.axes, element)]
    parts: list[list[Node]] = [[] for _ in range(len(passes) + 1)]
    for node in reachable(ends, stop=list(when)):
        if node in when or node.on_host or is_whole(node.axes, element) or node.op == "complex":
            continue
        when[node] = max((when.get(operand, 0) for operand in node.args), default=0)
        if node.op != "input":
            parts[when[node]].append(node)
    made = [Between((), in_loops(parts[0], element))]
    for pass_, part in zip(passes, parts[1:], strict=True):
        made.append(Between(pass_.sums, in_loops(part, element)))
    stores = {name: x for name, x in small.items() if x.op != "input" or x.data != name}
    return (*made[:-1], replace(made[-1], stores=stores))
