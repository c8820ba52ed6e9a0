"""Planning: from a trace to a plan. `arrayopt.fusion.plans` calls `plan`.

A pass reads and writes elements. Values over fewer axes (per row, per column, per tensor) are
computed between passes, from the reductions of earlier passes. Threads, blocks and ranks share the
elements of a pass, and synchronize between passes. A product of matrices is a pass of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from arrayopt.arrays import WORKING, real_dtype
from arrayopt.codecs import STORED
from arrayopt.fusion.dims import TraceError, not_fused
from arrayopt.fusion.graph import COPIES, PRODUCT, SCRATCH, Node, is_whole, operands, reachable
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.phases import phases
from arrayopt.fusion.placement import Placement
from arrayopt.fusion.plan import Plan, assembled, ordered_totals
from arrayopt.fusion.trace import Trace
from arrayopt.fusion.work import Work


def plan(traced: Trace, *, calls: bool = False) -> Plan:
    """Plan the passes of a trace.

    Each value is computed in the first pass that can compute it. A sum may be made in a later pass
    that reads its terms anyway. A slot is stored as soon as no later pass needs its old value. If a
    pass needs a value of an earlier pass, it computes the value again from stored arrays, or the
    earlier pass spills it: whichever moves fewer bytes, and the former if both move the same. With
    `calls`, each operation is a call that reads and writes memory, and costs as much; and guarded
    stores are always made.

    Operands and results of products are stored: passes store the operands and read the results. The
    passes of each space are planned separately, and all are sorted by level.
    """
    element = traced.element
    elements = dict[str, Node]()
    for name, x in traced.outputs.items():
        if name == "p" or is_whole(traced.slots[name], element):
            elements[name] = x
    copies: dict[Node, Node] = {}
    small = {n: _copied(n, x, copies) for n, x in traced.outputs.items() if n not in elements}
    reports = {n: _copied("", x, copies) for n, x in traced.reports.items()}
    totals = {x.data.name: x for x in traced.totals}
    # slots that the rule returns unchanged are not written
    outputs = {n: x for n, x in elements.items() if not (x.op == "input" and x.data == n)}
    needed = reachable([*outputs.values(), *small.values(), *reports.values(), *totals.values()])
    products = _Products(needed)
    if products.nodes and totals:
        raise TraceError("products of matrices and totals in one rule are not fused")
    order, scratch = _ordered(traced, outputs, needed, products, calls=calls)
    passes = tuple(p if calls else p.guarded() for _, p in order)
    if products.nodes:
        kinds = {name: (n.axes, n.narrow or n.dtype) for name, n in scratch.items()}
        memory = _memory_of(passes, kinds)
        passes = tuple(_renamed(p, memory) for p in passes)
        scratch = {memory[name]: n for name, n in scratch.items()}
        _check_spaces(passes, element)
    frame = _frame(traced, scratch)
    whole = assembled(frame, passes, small, reports | totals)
    if not totals:
        return whole
    parts = phases(whole, traced.totals, [level for level, _ in order])
    return replace(whole, totals=ordered_totals(traced.totals), phases=parts)


class _Products:
    """The products of matrices in a plan: `made` has the scratch array of each product, and `taken`
    that of each operand that is no product.
    """

    def __init__(self, needed: Iterable[Node]) -> None:
        self.nodes = sorted((n for n in needed if n.op == PRODUCT), key=lambda n: n.level)
        self.made = {n: f"product{i}" for i, n in enumerate(self.nodes)}
        taken = dict.fromkeys(a for a in operands(self.nodes) if a not in self.made)
        self.taken = {a: f"operand{i}" for i, a in enumerate(taken)}

    def passes(self, element: str) -> Iterator[tuple[int, Pass]]:
        """Yield the passes that are products, with their levels."""
        for n in self.nodes:
            loads = {self.made.get(a) or self.taken[a]: a for a in n.args}
            yield n.level - 1, Pass(loads, (n,), {self.made[n]: n}, (), n.axes, element)


def _ordered(
    traced: Trace,
    outputs: dict[str, Node],
    needed: Sequence[Node],
    products: _Products,
    *,
    calls: bool,
) -> tuple[list[tuple[int, Pass]], dict[str, Node]]:
    """The passes over all spaces, and products, by level; and the values in scratch arrays."""
    element, order = traced.element, list[tuple[int, Pass]]()
    narrow = frozenset(name for name, dtype in traced.storage.items() if STORED[dtype].rounds)
    narrow |= {"g"} if "p" in narrow else set()
    gradient = "complex" if traced.storage["p"].startswith("complex") else "real"
    scratch = {name: n for n, name in (products.made | products.taken).items()}
    multiplied = [x.axes for x in (*products.nodes, *operands(products.nodes))]
    for space in dict.fromkeys([element, *multiplied]):
        stored = {n: x for n, x in outputs.items() if traced.slots.get(n, element) == space}
        stored |= {name: n for n, name in products.taken.items() if n.axes == space}
        sums = [n for n in needed if n.reduces and n.args[0].axes == space]
        work = Work(space, stored, sums, narrow, products.made, calls=calls)
        placed = _placed(work, traced.totals)
        for level, pass_ in enumerate(placed.passes):
            if pass_.stores or pass_.sums:
                order.append((level, pass_.in_plan(element, gradient)))
        scratch |= placed.scratch
    # of one level, products come after the passes that store their operands
    order += products.passes(element)
    return sorted(order, key=lambda x: (x[0], x[1].multiplies)), scratch


def _frame(traced: Trace, scratch: dict[str, Node]) -> Plan:
    """Return a plan with slots and scratch arrays, and without passes."""
    stored = traced.storage["p"]
    wide = {"real": real_dtype(stored), "complex": WORKING[stored]}
    storage = traced.storage | {name: n.narrow or wide[n.dtype] for name, n in scratch.items()}
    return Plan(traced.element, (), (), (), traced.slots, {}, {}, storage, scratch)


def _placed(work: Work, totals: Sequence[Node]) -> Placement:
    """The placement for a space. A sum that a total needs is made in a pass before it."""
    outputs, sums = work.outputs, work.sums
    placed = Placement(work, {s: s.args[0].level for s in sums})
    ends = [*outputs.values(), *(s.args[0] for s in sums), *totals]
    sinks = [(n, frozenset(reachable([n]))) for n in ends]
    for alike in _grouped(sums):
        placed = placed.with_sums(alike, min(_last_chance(s, sinks, work.count) for s in alike))
    placed = placed if work.products else placed.with_stores()
    # reports must not need memory of a tensor's size, and no scratch memory is kept across a total
    return placed.with_spills() if outputs and not totals else placed


def _copied(name: str, node: Node, copies: dict[Node, Node]) -> Node:
    """Return the new value of a small slot or report: a copy if it is another slot's old value."""
    if node.op != "input" or node.data == name:
        return node
    return copies.setdefault(
        node, Node("copy", (node,), node.axes, node.level, node.dtype, None, COPIES + node.id)
    )


def _grouped(sums: Iterable[Node]) -> list[list[Node]]:
    """Group sums that need the same inputs: a pass that reads them for one has them for all."""
    groups: dict[Any, list[Node]] = {}
    for s in sums:
        inputs = frozenset(n for n in reachable(s.args) if n.op == "input")
        groups.setdefault((s.axes, s.args[0].level, inputs), []).append(s)
    return list(groups.values())


def _last_chance(s: Node, sinks: Iterable[tuple[Node, frozenset[Node]]], count: int) -> int:
    """The last pass that may make a sum. Each of `sinks` is a value with all that it needs."""
    made = s.args[0].level
    before = [n.level - 1 for n, needed in sinks if n.level > made and s in needed]
    return min(before, default=count - 1)


def _memory_of(passes: Sequence[Pass], kinds: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Return for each scratch array the name of the memory that holds it: arrays of the same axes
    and kind share memory if they are not needed at the same time.

    A pass works element by element, so it may store into memory that it loads for the last time. A
    product must not write memory that it reads.
    """
    last = dict[str, int]()
    for number, pass_ in enumerate(passes):
        last |= dict.fromkeys(pass_.loads, number)
    free: dict[tuple[str, str], list[str]] = {}
    made: dict[str, str] = {}
    for number, pass_ in enumerate(passes):
        over = [name for name in pass_.loads if name in kinds and last[name] == number]
        for name in [] if pass_.multiplies else over:
            free.setdefault(kinds[name], []).append(made[name])
        for name in pass_.stores:
            if name in kinds:
                unused = free.setdefault(kinds[name], [])
                made[name] = unused.pop() if unused else f"{SCRATCH}{len(set(made.values()))}"
        for name in over if pass_.multiplies else []:
            free.setdefault(kinds[name], []).append(made[name])
    return made


def _renamed(p: Pass, names: dict[str, str]) -> Pass:
    """Return a pass with its arrays renamed."""
    loads = {names.get(name, name): n for name, n in p.loads.items()}
    stores = {names.get(name, name): n for name, n in p.stores.items()}
    return replace(p, loads=loads, stores=stores)


def _check_spaces(passes: Sequence[Pass], element: str) -> None:
    """Raise TraceError for operations on products X Xᵀ that no engine has."""
    for pass_ in passes:
        if pass_.axes == element or pass_.multiplies:
            continue
        used = operands(pass_.nodes)
        varying = [operand for operand in used if not is_whole(operand.axes, element)]
        if pass_.sums or any(set(operand.axes) & set("RC") for operand in varying):
            raise not_fused(
                f"a value over {pass_.axes} that is summed up, or varies by row, is not fused"
            )
