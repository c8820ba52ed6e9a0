"""Planning: from a trace to a plan. `arrayopt.fusion.plans` calls `plan`.

A pass reads and writes elements. Values over fewer axes (per row, per column, per tensor) are
computed between passes, from the reductions of earlier passes. Threads, blocks and ranks share the
elements of a pass, and synchronize between passes. A product of matrices is a pass of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
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
    `calls`, each operation is a call that reads and writes memory, and costs as much.

    Operands and results of products are stored: passes store the operands and read the results. The
    passes of each space are planned separately, and all are sorted by level.
    """
    element, copies = traced.element, dict[Node, Node]()
    elements, small, reports = dict[str, Node](), dict[str, Node](), dict[str, Node]()
    for name, node in traced.outputs.items():
        if name != "p" and not is_whole(traced.slots[name], element):
            small[name] = _copied(name, node, copies)
        elif node.op != "input" or node.data != name:  # else it stays as it is
            elements[name] = node
    for name, node in traced.reports.items():
        reports[name] = _copied("", node, copies)
    totals = {node.data.name: node for node in traced.totals}
    needed = reachable([*elements.values(), *small.values(), *reports.values(), *traced.totals])
    products = _Products(needed)
    if products.nodes and totals:
        raise TraceError("products of matrices and totals in one rule are not fused")
    passes, scratch = _passes(traced, elements, needed, products, calls=calls)
    passes = [pass_.guarded() for pass_ in passes]
    if products.nodes:
        passes, scratch = _with_memory(passes, scratch)
        _check_spaces(passes, element)
    whole = assembled(_frame(traced, scratch), tuple(passes), small, reports | totals)
    if not totals:
        return whole
    parts = phases(whole, traced.totals)
    return replace(whole, totals=ordered_totals(traced.totals), phases=parts)


class _Products:
    """The products of matrices in a plan: `made` has the scratch array of each product, and `taken`
    that of each operand that is no product.
    """

    def __init__(self, needed: Iterable[Node]) -> None:
        products = [node for node in needed if node.op == PRODUCT]
        self.nodes = sorted(products, key=attrgetter("level"))
        self.made, self.taken = dict[Node, str](), dict[Node, str]()
        for node in self.nodes:
            self.made[node] = f"product{len(self.made)}"
        for node in operands(self.nodes):
            if node not in self.made and node not in self.taken:
                self.taken[node] = f"operand{len(self.taken)}"

    def passes(self, element: str) -> Iterator[Pass]:
        """Yield the passes that are products."""
        arrays = self.made | self.taken
        for node in self.nodes:
            loads = {arrays[factor]: factor for factor in node.args}
            stores = {arrays[node]: node}
            yield Pass(loads, (node,), stores, (), node.axes, element, node.level - 1)


def _passes(
    traced: Trace,
    outputs: dict[str, Node],
    needed: Sequence[Node],
    products: _Products,
    *,
    calls: bool,
) -> tuple[list[Pass], dict[str, Node]]:
    """The passes over all spaces, and products, by level; and the values in scratch arrays."""
    element, found = traced.element, list[Pass]()
    narrow = frozenset(name for name, dtype in traced.storage.items() if STORED[dtype].rounds)
    narrow |= {"g"} if "p" in narrow else set()
    gradient = "complex" if traced.storage["p"].startswith("complex") else "real"
    scratch = {name: node for node, name in (products.made | products.taken).items()}
    multiplied = [node.axes for node in (*products.nodes, *operands(products.nodes))]
    for space in dict.fromkeys([element, *multiplied]):
        stored = dict[str, Node]()
        for name, node in outputs.items():
            if traced.slots.get(name, element) == space:
                stored[name] = node
        stored |= {name: node for node, name in products.taken.items() if node.axes == space}
        sums = [node for node in needed if node.reduces and node.args[0].axes == space]
        work = Work(space, stored, sums, narrow, products.made, calls=calls)
        placed = _placed(work, traced.totals)
        for level, pass_ in enumerate(placed.passes):
            if pass_.stores or pass_.sums:
                found.append(pass_.in_plan(element, level, gradient))
        scratch |= placed.scratch
    # of one level, products come after the passes that store their operands
    found += products.passes(element)
    return sorted(found, key=attrgetter("level", "multiplies")), scratch


def _frame(traced: Trace, scratch: dict[str, Node]) -> Plan:
    """Return a plan with slots and scratch arrays, and without passes."""
    stored = traced.storage["p"]
    wide = {"real": real_dtype(stored), "complex": WORKING[stored]}
    storage = traced.storage | {name: n.narrow or wide[n.kind] for name, n in scratch.items()}
    return Plan(traced.element, (), (), (), traced.slots, {}, {}, storage, scratch)


def _placed(work: Work, totals: Sequence[Node]) -> Placement:
    """The placement for a space. A sum that a total needs is made in a pass before it."""
    outputs, sums = work.outputs, work.sums
    placed = Placement(work, {node: node.args[0].level for node in sums})
    needs = dict[Node, set[Node]]()
    for end in (*outputs.values(), *operands(sums), *totals):
        needs[end] = set(reachable([end]))
    for alike in _grouped(sums):
        placed = placed.with_sums(alike, min(_last_chance(x, needs, work.count) for x in alike))
    placed = placed if work.products else placed.with_stores()
    # reports must not need memory of a tensor's size, and no scratch memory is kept across a total
    return placed.with_spills() if outputs and not totals else placed


def _copied(name: str, node: Node, copies: dict[Node, Node]) -> Node:
    """Return the new value of a small slot or report: a copy if it is another slot's old value."""
    if node.op != "input" or node.data == name:
        return node
    return copies.setdefault(
        node, Node("copy", (node,), node.axes, node.level, node.kind, None, COPIES + node.id)
    )


def _grouped(sums: Iterable[Node]) -> list[list[Node]]:
    """Group sums that need the same inputs: a pass that reads them for one has them for all."""
    groups: dict[Any, list[Node]] = {}
    for reduction in sums:
        inputs = frozenset(node for node in reachable(reduction.args) if node.op == "input")
        key = reduction.axes, reduction.args[0].level, inputs
        groups.setdefault(key, []).append(reduction)
    return list(groups.values())


def _last_chance(reduction: Node, needs: dict[Node, set[Node]], count: int) -> int:
    """Return the last of `count` passes that may make a sum: before the values that need it."""
    last = count - 1
    for node, needed in needs.items():
        if reduction in needed and node.level > reduction.args[0].level:
            last = min(last, node.level - 1)
    return last


def _with_memory(
    passes: Sequence[Pass], scratch: dict[str, Node]
) -> tuple[list[Pass], dict[str, Node]]:
    """Return passes, and values by scratch array, in which arrays of the same axes and kind are one
    if they are not needed at the same time.

    A pass works element by element, so it may store into memory that it loads for the last time. A
    product must not write memory that it reads.
    """
    last_reader = dict[str, int]()
    for number, pass_ in enumerate(passes):
        last_reader |= dict.fromkeys(pass_.loads, number)
    free: dict[tuple[str, str], list[str]] = {}
    memory = dict[str, str]()  # of each scratch array
    renamed = list[Pass]()
    for number, pass_ in enumerate(passes):
        over = [name for name in pass_.loads if name in scratch and last_reader[name] == number]
        new = [name for name in pass_.stores if name in scratch]
        # a product frees its operands only when its result has memory
        for name in [*new, *over] if pass_.multiplies else [*over, *new]:
            node = scratch[name]
            unused = free.setdefault((node.axes, node.narrow or node.kind), [])
            if name in memory:
                unused.append(memory[name])
            else:
                made = f"{SCRATCH}{len(set(memory.values()))}"
                memory[name] = unused.pop() if unused else made
        loads = {memory.get(name, name): node for name, node in pass_.loads.items()}
        stores = {memory.get(name, name): node for name, node in pass_.stores.items()}
        renamed.append(replace(pass_, loads=loads, stores=stores))
    return renamed, {memory[name]: node for name, node in scratch.items()}


def _check_spaces(passes: Sequence[Pass], element: str) -> None:
    """Raise TraceError for operations on products X Xᵀ that no engine has."""
    for pass_ in passes:
        if pass_.axes == element or pass_.multiplies:
            continue
        varying = [x for x in operands(pass_.nodes) if not is_whole(x.axes, element)]
        if pass_.sums or any(set(operand.axes) & set("RC") for operand in varying):
            raise not_fused(
                f"a value over {pass_.axes} that is summed up, or varies by row, is not fused"
            )
