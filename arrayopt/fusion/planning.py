"""Planning: from a trace to passes over the elements, with what little is computed between them.

A pass reads and writes elements. Between passes stands what varies over fewer axes (per row, per
column, per tensor): it is computed from the sums of the passes before. Threads, blocks and ranks
share a pass out by elements, and meet between the passes. A product of matrices stands among the
passes: it reads what one has stored, and stores.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from arrayopt.arrays import REAL, WORKING
from arrayopt.codecs import STORED
from arrayopt.fusion.dims import WAY_OUT, TraceError
from arrayopt.fusion.graph import PRODUCT, SCRATCH, Node, is_whole, operands, reachable
from arrayopt.fusion.passes import Between, Pass, loops
from arrayopt.fusion.phases import meetings, phases
from arrayopt.fusion.placement import Placement
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.trace import Trace
from arrayopt.fusion.work import Work
from arrayopt.rules.totals import of_total

__all__ = ["plan"]

COPIES = 1 << 30
"""The first id of copies of small slots. Ids are parts of names; no graph has so many nodes."""


def plan(traced: Trace, *, calls: bool = False) -> Plan:
    """Plan the passes of a trace.

    Each value is computed in the first pass that it can be computed in, a sum possibly later, where
    a pass reads its terms anyway. A slot is stored as soon as no later pass needs what it held
    before. What a later pass needs of an earlier one it computes again from what is stored, or
    reads from scratch memory, where the earlier one has spilled it: whichever moves fewer bytes,
    and if it is all the same, the former. With `calls` each operation is a call that reads and
    writes memory, too, and costs as much; and all stores are made, whatever guards them.

    What a product multiplies is stored, and so is what it makes: outputs and inputs of the passes,
    which are planned for each space of elements by itself, and put in order by their levels.
    """
    element = traced.element
    whole = dict[str, Node]()
    for name, x in traced.outputs.items():
        if name == "p" or is_whole(traced.slots[name], element):
            whole[name] = x
    copies: dict[Node, Node] = {}
    small = {n: _own(n, x, copies) for n, x in traced.outputs.items() if n not in whole}
    reports = {n: _own("", x, copies) for n, x in traced.reports.items()}
    totals = {of_total(j): x for j, x in enumerate(traced.totals)}
    # the others stay as they are
    outputs = {n: x for n, x in whole.items() if not (x.op == "input" and x.data == n)}
    roots = [*outputs.values(), *small.values(), *reports.values(), *totals.values()]
    products = sorted((n for n in reachable(roots) if n.op == PRODUCT), key=lambda n: n.level)
    made = {n: f"product{i}" for i, n in enumerate(products)}
    multiplied = dict.fromkeys(a for a in operands(products) if a not in made)
    given = {a: f"operand{i}" for i, a in enumerate(multiplied)}
    multiplied_axes = [x.axes for x in (*products, *operands(products))]
    spaces = list(dict.fromkeys([element, *multiplied_axes]))
    narrow = frozenset(name for name, dtype in traced.storage.items() if STORED[dtype].rounds)
    narrow |= {"g"} if "p" in narrow else set()
    sums = {n for n in reachable(roots) if n.reduces and is_whole(n.args[0].axes, element)}
    order: list[tuple[int, Pass]] = []
    scratch = {name: n for n, name in (made | given).items()}
    gradient = "complex" if traced.storage["p"].startswith("complex") else "real"
    for space in spaces:
        here = [name for name in outputs if traced.slots.get(name, element) == space]
        stored = {name: outputs[name] for name in here}
        stored |= {name: n for n, name in given.items() if n.axes == space}
        own = [n for n in reachable(roots) if n in sums and n.args[0].axes == space]
        placed = _placed(Work(space, stored, own, narrow, made, calls=calls), traced.totals)
        for k, p in enumerate(placed.passes):
            if p.stores or p.sums:
                order.append((k, p.within(element, gradient)))
        scratch |= placed.scratch
    for n in products:
        loads = {made.get(a) or given[a]: a for a in n.args}
        order.append((n.level - 1, Pass(loads, (n,), {made[n]: n}, (), n.axes, element)))
    if products and totals:
        raise TraceError("products of matrices and totals in one rule are not fused")
    # products after what is of a lower level than they are
    order.sort(key=lambda x: (x[0], x[1].multiplies))
    passes = tuple(p if calls else p.guarded() for _, p in order)
    extents = {name: n.axes for name, n in scratch.items()}
    if products:
        room = _shared(passes, {name: (n.axes, n.narrow or n.dtype) for name, n in scratch.items()})
        passes = tuple(_renamed(p, room) for p in passes)
        scratch = {room[name]: n for name, n in scratch.items()}
        extents = {name: n.axes for name, n in scratch.items()}
        _check_spaces(passes, element)
    working = WORKING[traced.storage["p"]]
    wide = {"real": REAL.get(working, working), "complex": working}
    storage = traced.storage | {name: n.narrow or wide[n.dtype] for name, n in scratch.items()}
    spilled = {name: n.dtype for name, n in scratch.items()}

    def put_together(
        passes: tuple[Pass, ...], small: dict[str, Node], reports: dict[str, Node]
    ) -> Plan:
        """The plan of some passes, and of what is to be known after them."""
        results = [*small.values(), *reports.values()]
        ready: dict[Node, int] = {}
        for number, pass_ in enumerate(passes):
            ready |= dict.fromkeys(pass_.sums, number + 1)
        between = _between(results, small, passes, ready, element)
        computed, summed, stored = list[Node](), list[Node](), list[Node]()
        for pass_ in passes:
            computed += pass_.nodes
            summed += pass_.sums
            stored += pass_.stores.values()
        used = [*operands((*computed, *summed)), *stored]
        for each in between:
            used += operands(each.nodes)
        used += results
        scalars = {n.id: n for n in used if n.on_host and n.op != "const"}
        rest = traced.slots, small, reports, storage, spilled, extents
        return Plan(element, passes, between, tuple(scalars.values()), *rest)

    complete = put_together(passes, small, reports | totals)
    if not totals:
        return complete
    levels = [k for k, p in order]
    parts = phases(complete, traced.totals, levels, put_together)
    return replace(complete, totals=meetings(traced.totals), phases=parts)


def _placed(work: Work, totals: Sequence[Node]) -> Placement:
    """The passes over the elements of a space; a sum that a total needs is made before it."""
    outputs, sums = work.outputs, work.sums
    placed = Placement(work, {s: s.args[0].level for s in sums}, {})
    ends = [*outputs.values(), *(s.args[0] for s in sums), *totals]
    sinks = [(n, frozenset(reachable([n]))) for n in ends]
    for alike in _alike(sums):
        placed = placed.with_sums(alike, min(_last_chance(s, sinks, work.count) for s in alike))
    placed = placed if work.products else placed.with_stores()
    # to watch takes no memory of a tensor's size; where all tensors meet, none keeps scratch memory
    return placed.with_spills() if outputs and not totals else placed


def _own(name: str, node: Node, copies: dict[Node, Node]) -> Node:
    """What a small slot or a report is to hold: a copy where it is another slot's old value."""
    if node.op != "input" or node.data == name:
        return node
    return copies.setdefault(
        node, Node("copy", (node,), node.axes, node.level, node.dtype, None, COPIES + node.id)
    )


def _alike(sums: Iterable[Node]) -> list[list[Node]]:
    """The sums in groups of equal inputs: a pass that reads these for one has them for all."""
    groups: dict[Any, list[Node]] = {}
    for s in sums:
        inputs = frozenset(n for n in reachable(s.args) if n.op == "input")
        groups.setdefault((s.axes, s.args[0].level, inputs), []).append(s)
    return list(groups.values())


def _last_chance(s: Node, sinks: Iterable[tuple[Node, frozenset[Node]]], count: int) -> int:
    """The last pass that a sum may be made in; each sink comes with all that it needs."""
    made = s.args[0].level
    before = [n.level - 1 for n, needed in sinks if n.level > made and s in needed]
    return min(before, default=count - 1)


def _between(
    roots: list[Node],
    small: dict[str, Node],
    passes: tuple[Pass, ...],
    ready: dict[Node, int],
    element: str,
) -> tuple[Between, ...]:
    """Values over fewer axes than the elements, each before the first pass that is possible."""
    wanted: list[Node] = []
    for each in passes:
        wanted += operands(each.nodes)
    for each in passes:
        wanted += [s.args[0] for s in each.sums]
    wanted += roots
    for each in passes:
        wanted += each.stores.values()
    parts: list[list[Node]] = [[] for _ in range(len(passes) + 1)]
    when: dict[Node, int] = dict(ready)
    for node in reachable([n for n in wanted if not is_whole(n.axes, element)], stop=list(ready)):
        if node in ready or node.on_host or is_whole(node.axes, element) or node.op == "complex":
            continue
        when[node] = max((when.get(a, 0) for a in node.args), default=0)
        if node.op != "input":
            parts[when[node]].append(node)
    sums = [(), *(p.sums for p in passes)]
    stores = {name: n for name, n in small.items() if not (n.op == "input" and n.data == name)}
    made = []
    for combine, part in zip(sums, parts, strict=True):
        made.append(Between(combine, loops(part, element)))
    return (*made[:-1], Between(made[-1].combine, made[-1].after, stores))


def _shared(passes: Sequence[Pass], kinds: dict[str, tuple[str, str]]) -> dict[str, str]:
    """For each scratch array, of some axes and kind, the name of the memory that holds it while it
    is needed.

    A pass works element by element: what it stores may lie where something lay that it is the last
    to load. A product may not write what it reads.
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
                room = free.setdefault(kinds[name], [])
                made[name] = room.pop() if room else f"{SCRATCH}{len(set(made.values()))}"
        for name in over if pass_.multiplies else []:
            free.setdefault(kinds[name], []).append(made[name])
    return made


def _renamed(p: Pass, names: dict[str, str]) -> Pass:
    """A pass with other names for its arrays."""
    loads = {names.get(name, name): n for name, n in p.loads.items()}
    stores = {names.get(name, name): n for name, n in p.stores.items()}
    return replace(p, loads=loads, stores=stores)


def _check_spaces(passes: Sequence[Pass], element: str) -> None:
    """Raise TraceError for what no engine does with a product of a matrix and its transpose."""
    for pass_ in passes:
        if pass_.axes == element or pass_.multiplies:
            continue
        used = operands(pass_.nodes)
        varying = [operand for operand in used if not is_whole(operand.axes, element)]
        if pass_.sums or any(set(operand.axes) & set("RC") for operand in varying):
            what = f"a value over {pass_.axes} that is summed up, or varies by row,"
            raise TraceError(f"{what} is not fused{WAY_OUT}")
