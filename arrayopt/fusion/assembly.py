"""Putting a plan together from its passes: what is computed between them, and its scalars."""

from collections.abc import Iterable
from dataclasses import replace

from arrayopt.fusion.graph import Node, is_whole, operands, reachable
from arrayopt.fusion.passes import Between, Pass, loops
from arrayopt.fusion.plan import Plan

__all__ = ["assembled"]


def assembled(
    frame: Plan, passes: tuple[Pass, ...], small: dict[str, Node], reports: dict[str, Node]
) -> Plan:
    """The plan of some passes, and of what slots and reports are to hold after them; all else is as
    in another plan.
    """
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
    scalars = {n.id: n for n in (*used, *results) if n.on_host and n.op != "const"}
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
    """Values over fewer axes than the elements, each before the first pass that is possible."""
    wanted, when = list[Node](), dict[Node, int]()
    for number, pass_ in enumerate(passes):
        wanted += operands(pass_.nodes)
        when |= dict.fromkeys(pass_.sums, number + 1)
    for pass_ in passes:
        wanted += [s.args[0] for s in pass_.sums]
    wanted += results
    for pass_ in passes:
        wanted += pass_.stores.values()
    parts: list[list[Node]] = [[] for _ in range(len(passes) + 1)]
    for node in reachable([n for n in wanted if not is_whole(n.axes, element)], stop=list(when)):
        if node in when or node.on_host or is_whole(node.axes, element) or node.op == "complex":
            continue
        when[node] = max((when.get(a, 0) for a in node.args), default=0)
        if node.op != "input":
            parts[when[node]].append(node)
    made = []
    for combine, part in zip([(), *(p.sums for p in passes)], parts, strict=True):
        made.append(Between(combine, loops(part, element)))
    stores = {name: n for name, n in small.items() if not (n.op == "input" and n.data == name)}
    return (*made[:-1], replace(made[-1], stores=stores))
