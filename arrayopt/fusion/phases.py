"""Division of a plan with totals into phases, between which totals are computed. Each phase is a
plan, with a batch of its own. `arrayopt.fusion.planning` calls `phases`.

If a later phase needs a value per tensor, the value is a scalar of the step there, as totals are.
Values per row or column that a later phase needs are slots that exist only during the step.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from arrayopt.arrays import real_dtype
from arrayopt.fusion.dims import not_fused
from arrayopt.fusion.graph import COPIES, POSITION, TOTAL, Node, is_whole, operands, reachable
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.plan import Plan, assembled, ordered_totals

KEPT, GIVEN = ":kept", (":kept", ":total")
"""The prefix of scalars that an earlier phase computed; and the prefixes of these and of totals."""

VECTOR = "kept"
"""The prefix of slots that hold values per row or column for a later phase."""


def phases(whole: Plan, totals: Sequence[Node]) -> tuple[Plan, ...]:
    """Return the phases of a plan.

    The reports of a phase include the numbers that the next totals combine, and values per tensor
    that later phases need.

    In the plan `whole`, totals are operations.

    Raises
    ------
    TraceError
        If a later phase needs a reduction of booleans per row or column.
    """
    every = reachable([*whole.ends, *whole.small.values(), *whole.reports.values()])
    passes, first = _divided(whole, totals, every)
    made, wanted = list[Plan](), set[str]()  # what later phases need, by name
    copies = count(max(COPIES, *(node.id + 1 for node in every)))
    for phase in reversed(range(len(passes))):
        now = _nodes_in(every, first, phase, whole.element)
        slots, reports = dict[str, Node](), dict[str, Node]()
        if not made:  # the last phase
            slots |= whole.small
            reports |= {name: x for name, x in whole.reports.items() if x.op != TOTAL}
        reports |= {total.data.name: total.args[0] for total in totals if first[total] == phase + 1}
        for node in every:
            name = _later_name(node)
            if first[node] == phase and name in wanted:
                (slots if node.axes else reports)[name] = node
        slots = {name: now[node] for name, node in slots.items()}
        for name, node in reports.items():
            reports[name] = here = now[node]
            if here.op == "input":
                form = here.axes, here.level, here.kind
                reports[name] = Node("copy", (here,), *form, None, next(copies))
        own = tuple(_pass_in(pass_, now) for pass_ in passes[phase])
        plan = _with_vectors(assembled(whole, own, slots, reports))
        wanted |= {node.data for node in reachable(plan.scalars) if node.op == "host"}
        wanted |= set(plan.slots)
        made.append(plan)
    return tuple(reversed(made))


def _divided(
    whole: Plan, totals: Sequence[Node], every: Sequence[Node]
) -> tuple[list[list[Pass]], dict[Node, int]]:
    """The passes of each phase; and the phase that computes each value, or -1 if all phases do."""
    times = [time[:2] for time in ordered_totals(totals)]
    rounds = sorted({*times})
    passes: list[list[Pass]] = [[] for _ in range(len(rounds) + 1)]
    first = {total: rounds.index(time) + 1 for total, time in zip(totals, times, strict=True)}
    for pass_ in whole.passes:
        phase = bisect_right([level for level, _ in rounds], pass_.level)
        passes[phase].append(pass_)
        first |= dict.fromkeys(pass_.sums, phase)
    for node in every:
        if node not in first:
            small = [first[a] for a in node.args if not is_whole(a.axes, whole.element)]
            first[node] = max(small, default=-1)
    return passes, first


def _nodes_in(
    every: Sequence[Node], first: dict[Node, int], phase: int, element: str
) -> dict[Node, Node]:
    """The node of each value in a phase. Results of earlier phases are inputs or scalars there."""
    now: dict[Node, Node] = {}
    for node in every:
        here = tuple(map(now.__getitem__, node.args))
        known = node.op == TOTAL and first[node] <= phase
        earlier = not is_whole(node.axes, element) and 0 <= first[node] < phase
        # booleans per row are computed again, from numbers
        if known or (earlier and (node.kind == "real" or node.reduces or not node.axes)):
            name = node.data.name if known else _later_name(node)
            op = "input" if node.axes else "host"
            if node.axes and node.kind != "real":
                raise not_fused("it uses a total after a reduction of booleans per row")
            now[node] = Node(op, (), node.axes, 0, node.kind, name, node.id)
        elif here == node.args or node.op == POSITION:
            now[node] = node
        else:
            now[node] = replace(node, args=here)
    return now


def _later_name(node: Node) -> str:
    """Return the name of a value that later phases need."""
    return f"{VECTOR if node.axes else KEPT}{node.id}"


def _pass_in(one: Pass, now: dict[Node, Node]) -> Pass:
    """Return a pass with the nodes that values have in a phase."""
    loads = {name: now.get(n, n) for name, n in one.loads.items()}
    stores = {name: now[n] for name, n in one.stores.items()}
    nodes, sums = (tuple(map(now.__getitem__, nodes)) for nodes in (one.nodes, one.sums))
    made = replace(one, loads=loads, nodes=nodes, stores=stores, sums=sums)
    return made.guarded() if one.guards else made


def _with_vectors(plan: Plan) -> Plan:
    """A phase with slots for values per row or column that it has from, or for, other phases."""
    used = [*operands(plan.between_nodes), *plan.small.values()]
    for pass_ in plan.passes:
        used += pass_.uses
    own = {n.data: n.axes for n in used if n.op == "input" and is_vector(n.data)}
    own |= {name: n.axes for name, n in plan.small.items() if is_vector(name)}
    storage = plan.storage | dict.fromkeys(own, real_dtype(plan.storage["p"]))
    return replace(plan, slots=plan.slots | own, storage=storage)


def is_vector(name: str) -> bool:
    """Whether a slot holds a value per row or column that passes from phase to phase."""
    return name.startswith(VECTOR) and name.removeprefix(VECTOR).isdigit()
