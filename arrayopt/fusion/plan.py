"""Planning: from a trace to passes over the elements, with what little is computed between them.

Pass k reads and writes elements; before it stands prologue k, which computes what varies over fewer axes (per row, per
column, per tensor) from the sums of the passes before. Threads, blocks and ranks share a pass out by elements, and
meet at the prologues.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from arrayopt.arrays import ITEMSIZE, NARROW
from arrayopt.fusion.graph import Node, reachable
from arrayopt.fusion.trace import NotFlat, Trace, TraceError, trace
from arrayopt.rules.base import Rule

__all__ = ["Pass", "Plan", "plan", "plan_for"]


@dataclass(frozen=True, eq=False, slots=True)
class Pass:
    """One pass over the elements.

    Attributes
    ----------
    loads : dict of str to Node
        What is read: parameter, gradient and slots by name, and the node that the value read is.
    nodes : tuple of Node
        What is computed per element, in order; loads, scalars and smaller values left out.
    stores : dict of str to Node
        What is written.
    sums : tuple of Node
        What is summed up.
    """

    loads: dict[str, Node]
    nodes: tuple[Node, ...]
    stores: dict[str, Node]
    sums: tuple[Node, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What it takes to update one tensor.

    Attributes
    ----------
    element : str
        The axes of an element; ``"C"`` where the tensor's shape does not matter.
    passes : tuple of Pass
        The passes, in order.
    prologues : tuple of tuple of Node
        What is computed before each pass, and after the last, in order.
    scalars : tuple of Node
        Scalars of the step that passes and prologues use.
    slots : dict of str to str
        Slots and their axes.
    small : dict of str to Node
        Slots that vary over fewer axes than the elements, with what they are to hold after the last prologue.
    reports : dict of str to Node
        Values per tensor to be reported.
    storage : dict of str to str
        The dtypes that the parameter and the slots are stored in.
    """

    element: str
    passes: tuple[Pass, ...]
    prologues: tuple[tuple[Node, ...], ...]
    scalars: tuple[Node, ...]
    slots: dict[str, str]
    small: dict[str, Node]
    reports: dict[str, Node]
    storage: dict[str, str]

    @property
    def key(self) -> tuple[Any, ...]:
        """What two plans have in common that do the same."""
        nodes = reachable([x for p in self.passes for x in (*p.stores.values(), *p.sums)] + [*self.small.values()])
        graph = tuple((n.op, tuple(a.id for a in n.args), n.axes, n.id, repr(n.data)) for n in nodes)
        outputs = [(name, n.id) for p in self.passes for name, n in p.stores.items()]
        outputs += [(name, n.id) for name, n in [*self.small.items(), *self.reports.items()]]
        return self.element, graph, tuple(outputs), tuple(self.slots.items()), tuple(self.storage.items())

    @property
    def touched(self) -> tuple[str, ...]:
        """The stored arrays, other than gradients, that are read or written at all."""
        names = {name for p in self.passes for name in (*p.loads, *p.stores)}
        return tuple(
            name for name, axes in {"p": self.element, **self.slots}.items() if name in names or axes != self.element
        )

    def bytes_per_parameter(self, grad_dtype: str | None = None) -> int:
        """Bytes read and written per parameter; gradients are in the parameter's dtype where no other is given."""
        return sum(self._bytes(p, grad_dtype or self.storage["p"]) for p in self.passes)

    def _bytes(self, p: Pass, grad_dtype: str) -> int:
        """Bytes of each element that a pass reads and writes."""
        return sum(ITEMSIZE[{"g": grad_dtype, **self.storage}[name]] for name in (*p.loads, *p.stores))

    def __str__(self) -> str:
        lines = []
        for k, p in enumerate(self.passes):
            over = {"": "tensor", self.element[:-1]: "row", self.element.replace("R", ""): "column"}
            sums = [f"per {over.get(s.axes, 'batch')}" if s.axes else "per tensor" for s in p.sums]
            stores, reduces = " ".join(p.stores) or "-", ", ".join(sums) or "-"
            lines.append(
                f"pass {k}: load {' '.join(p.loads)}; store {stores}; reduce {reduces};"
                f" {self._bytes(p, self.storage['p'])} B"
            )
        return "\n".join([*lines, f"{self.bytes_per_parameter()} bytes per {self.storage['p']} parameter"])


def plan(traced: Trace) -> Plan:
    """Plan the passes of a trace.

    Each value is computed in the first pass that it can be computed in, a sum possibly later, where a pass reads its
    terms anyway. A slot is stored as soon as no later pass needs what it held before; a later pass reads it back, or
    computes again from what was stored.
    """
    element = traced.element
    whole = {n: x for n, x in traced.outputs.items() if n == "p" or traced.slots[n] == element}
    small = {n: _own(n, x) for n, x in traced.outputs.items() if n not in whole}
    outputs = {n: x for n, x in whole.items() if not (x.op == "input" and x.data == n)}  # the others stay as they are
    # what is rounded when it is stored is not what was computed, and no later pass may read it instead
    rounded = {n: _copy(x) for n, x in outputs.items() if traced.storage[n] in NARROW}
    outputs |= rounded
    roots = [*outputs.values(), *small.values(), *traced.reports.values()]
    sums = [n for n in reachable(roots) if n.op == "sum" and n.args[0].axes == element]
    count = 1 + max([0, *(x.level for x in outputs.values()), *(s.args[0].level for s in sums)])
    stored_in = {name: x.level for name, x in outputs.items()}
    summed_in = {s: s.args[0].level for s in sums}

    def passes() -> list[Pass]:
        return [_pass(k, element, outputs, stored_in, summed_in) for k in range(count)]

    def settle() -> list[Pass]:
        """Put stores off until no later pass reads the old value."""
        made = passes()
        while late := {
            name: k
            for k, p in enumerate(made)
            for name, node in p.loads.items()
            if node.op == "input" and name in stored_in and stored_in[name] < k
        }:
            stored_in.update(late)
            made = passes()
        return made

    made = settle()
    for s in sums:  # lazily: in the pass that reads least more for it
        first, last = s.args[0].level, _last_chance(s, outputs, sums, count)
        best = min(
            range(first, last + 1), key=lambda k: (_extra(made, s, k, summed_in, element, outputs, stored_in), k)
        )
        if best != summed_in[s]:
            summed_in[s] = best
            made = settle()
    copies = {x: x.args[0] for x in rounded.values()}
    made = [
        replace(
            p,
            nodes=tuple(n for n in p.nodes if n not in copies),
            stores={name: copies.get(x, x) for name, x in p.stores.items()},
        )
        for p in made
    ]
    kept = [k for k, p in enumerate(made) if p.stores or p.sums]
    renumber = {k: i for i, k in enumerate(kept)}
    ready = {s: renumber[k] + 1 for s, k in summed_in.items()}
    prologues = _prologues([*small.values(), *traced.reports.values()], [made[k] for k in kept], ready, element)
    used = [n for p in made for x in p.nodes for n in x.args] + [n for x in sums for n in x.args]
    used += [x for p in made for x in p.stores.values()] + [n for part in prologues for x in part for n in x.args]
    used += [*small.values(), *traced.reports.values()]
    scalars = {n.id: n for n in used if n.on_host and n.op != "const"}
    return Plan(
        element,
        tuple(made[k] for k in kept),
        prologues,
        tuple(scalars.values()),
        traced.slots,
        small,
        traced.reports,
        traced.storage,
    )


def _own(name: str, n: Node) -> Node:
    """What a small slot is to hold: a copy where it is what another slot held, for that is written too."""
    return _copy(n) if n.op == "input" and n.data != name else n


def _copy(n: Node) -> Node:
    """The same value as another node."""
    return Node("copy", (n,), n.axes, n.level, n.dtype, None, -1 - n.id)


def _pass(
    k: int, element: str, outputs: dict[str, Node], stored_in: dict[str, int], summed_in: dict[Node, int]
) -> Pass:
    """What pass k reads, computes, writes and sums, given which pass each store and each sum is in."""
    stores = {name: node for name, node in outputs.items() if stored_in[name] == k}
    sums = tuple(s for s, where in summed_in.items() if where == k)
    held = {node: name for name, node in outputs.items() if stored_in[name] < k and node.axes == element}
    found = reachable([*stores.values(), *(s.args[0] for s in sums)], stop=[*held, *summed_in])
    elements = [n for n in found if n.axes == element and not n.on_host and n.op != "sum"]
    # smaller values that an element needs come from a prologue; what they are made of is not read here
    wanted = _per_element([*stores.values(), *(s.args[0] for s in sums)], set(held), element)
    elements = [n for n in elements if n in wanted]
    loads = {held[n]: n for n in elements if n in held} | {n.data: n for n in elements if n.op == "input"}
    order = ["p", "g"]
    ranked = sorted(loads, key=lambda name: order.index(name) if name in order else len(order))
    nodes = tuple(n for n in elements if n not in held and n.op != "input")
    return Pass({name: loads[name] for name in ranked}, nodes, stores, sums)


def _per_element(roots: list[Node], held: set[Node], element: str) -> set[Node]:
    """Element values that the roots are computed from, going through element values only."""
    seen: set[Node] = set()
    stack = [r for r in roots if r.axes == element]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in held:
            stack += [a for a in node.args if a.axes == element and not a.on_host and a.op != "sum"]
    return seen


def _last_chance(s: Node, outputs: dict[str, Node], sums: list[Node], count: int) -> int:
    """The last pass that a sum may be made in: the one before what depends on it."""
    last = count - 1
    for sink in [*outputs.values(), *(t.args[0] for t in sums if t is not s)]:
        if sink.level > s.args[0].level and s in reachable([sink]):
            last = min(last, sink.level - 1)
    return last


def _extra(made: list[Pass], s: Node, k: int, summed_in: dict[Node, int], *rest: Any) -> int:
    """How many more values pass k reads with the sum in it than without."""
    element, outputs, stored_in = rest
    others = {t: where for t, where in summed_in.items() if t is not s}
    without = _pass(k, element, outputs, stored_in, others)
    return len(_pass(k, element, outputs, stored_in, {**others, s: k}).loads) - len(without.loads)


def _prologues(
    roots: list[Node], passes: list[Pass], ready: dict[Node, int], element: str
) -> tuple[tuple[Node, ...], ...]:
    """Values over fewer axes than the elements, each in the first prologue that it can be computed in."""
    wanted = [a for p in passes for n in p.nodes for a in n.args] + [s.args[0] for p in passes for s in p.sums]
    wanted += [*roots, *(x for p in passes for x in p.stores.values())]
    parts: list[list[Node]] = [[] for _ in range(len(passes) + 1)]
    when: dict[Node, int] = dict(ready)
    for node in reachable([n for n in wanted if n.axes != element], stop=list(ready)):
        if node in ready or node.on_host or node.axes == element:
            continue
        when[node] = max((when.get(a, 0) for a in node.args), default=0)
        if node.op != "input":
            parts[when[node]].append(node)
    return tuple(tuple(part) for part in parts)


@cache
def _cached(key: "_ByStructure", rank: int, dtype: str, clip: bool, stats: bool) -> Plan:
    """The plan of a structure of rule: flat where that will do."""
    try:
        return plan(trace(key.rule, rank, dtype, flat=True, clip=clip, stats=stats))
    except NotFlat:
        return plan(trace(key.rule, rank, dtype, clip=clip, stats=stats))


@dataclass(frozen=True, slots=True)
class _ByStructure:
    """A rule that equals every rule of its structure."""

    rule: Rule

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByStructure) and self.rule.structure == other.rule.structure

    def __hash__(self) -> int:
        return hash(self.rule.structure)


@cache
def _merged(key: "_ByStructure", rank: int, dtype: str, clip: bool, stats: bool) -> Plan:
    """The plan, or, where shape does not matter, that of a lower rank that does the same."""
    made = _cached(key, rank, dtype, clip, stats)
    for lower in range(rank if made.element == "C" else 0):
        try:
            other = _cached(key, lower, dtype, clip, stats)
        except TraceError:  # not every rule is defined for every rank
            continue
        if other.element == made.element and other.key == made.key:
            return other
    return made


def plan_for(rule: Rule, rank: int, dtype: str, *, clip: bool = False, stats: bool = False) -> Plan:
    """The plan of a rule for tensors of a rank and dtype, made once for each structure of rule; see `trace`.

    Where no sum is over rows or columns, shape does not matter and the tensor is seen as one row of elements. Ranks for
    which a rule does the same share a plan.
    """
    return _merged(_ByStructure(rule), rank, dtype, clip, stats)
