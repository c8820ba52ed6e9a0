"""Compiled Python functions for the scalars of a step, which are computed from hyper-parameters, t
and `clip`. Engines call them in each step; NumPy's engine also for values per tensor (`straight`).

Results equal those of `arrayopt.fusion.graph.evaluate`, bit for bit, but no graph is traversed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from arrayopt.fusion.graph import CACHED, CLIP, UPDATES, Node, evaluate, operands, reachable
from arrayopt.fusion.ops import OPS
from arrayopt.fusion.passes import SmallLoop
from arrayopt.fusion.plan import Plan

EACH_STEP = {UPDATES: "t", CLIP: "clip"}
"""The scalars that change in each step, with their names in the text."""

OF_NUMBERS = {
    "where": "{1} if {0} else {2}",
    "and": "{0} and {1}",
    "or": "{0} or {1}",
    "not": "not {0}",
}
"""The text of operations in Python, if their operands are no arrays."""


@dataclass(frozen=True, eq=False, slots=True)
class ScalarCode:
    """The code for the scalars of a plan: floats, or float64 arrays with a number per tensor."""

    names: tuple[str, ...]
    """The hyper-parameters and extents (``count:RC``: rows times columns) that the plan uses."""
    nodes: tuple[Node, ...]
    """The plan's scalars."""
    source: str
    """The text of both functions."""
    _constants: Callable[..., tuple[Any, ...]]
    _scalars: Callable[..., tuple[Any, ...]]

    def constants(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Compute all that depends on hyper-parameters and extents alone. `scalars` takes the
        result, until one of these changes. They are `given` by name; names that are not in `names`
        are ignored.
        """
        leaves = [given[name] for name in self.names]
        with np.errstate(all="ignore"):
            try:
                return self._constants(*leaves)
            except ZeroDivisionError:  # raised for Python's floats; `scalars` uses NumPy's division
                return (None, *leaves)

    def scalars(self, t: Any, clip: Any, constants: tuple[Any, ...]) -> tuple[Any, ...]:
        """Compute the plan's scalars, in order, for update `t` and the gradient factor `clip`."""
        with np.errstate(all="ignore"):
            if constants[0] is not None:
                try:
                    return self._scalars(t, clip, *constants)
                except ZeroDivisionError:
                    pass
            leaves = constants[1 : len(self.names) + 1]
        given = dict(zip(self.names, leaves, strict=True)) | {UPDATES: t, CLIP: clip}
        values = evaluate(self.nodes, given)
        return tuple(values[node] for node in self.nodes)


@lru_cache(maxsize=CACHED)
def scalar_code(plan: Plan) -> ScalarCode:
    """Return the compiled code for the scalars of a plan, which is made once."""
    found = reachable(plan.scalars)
    leaves, early, late = list[Node](), list[Node](), dict[Node, None]()
    for node in found:
        changes = (
            node.data in EACH_STEP if node.op == "host" else not late.keys().isdisjoint(node.args)
        )
        if changes:
            late[node] = None
        elif node.op == "host":
            leaves.append(node)
        elif node.op != "const":
            early.append(node)
    read = {*plan.scalars, *operands(late)}
    given = list(map(_name, leaves))
    passed = [*given, *(_name(node) for node in early if node in read)]
    text = _function("constants", given, early, ["True", *passed])
    given = [*EACH_STEP.values(), "ready", *passed]
    text += _function("scalars", given, late, list(map(_name, plan.scalars)))
    made, names = _compiled(text), tuple(node.data for node in leaves)
    return ScalarCode(names, plan.scalars, text, made["constants"], made["scalars"])


class Straight(NamedTuple):
    """A compiled function that computes values from values."""

    outer: tuple[Node, ...]
    """The arguments."""
    results: tuple[Node, ...]
    """The results."""
    function: Callable[..., tuple[Any, ...]]
    """The function. With Python's numbers it may raise ZeroDivisionError."""


@lru_cache(maxsize=CACHED)
def straight(loop: SmallLoop, read: frozenset[Node], *, numbers: bool) -> Straight:
    """Compile a function for the nodes of a loop. It returns those in `read`.

    With `numbers`, it takes and returns numbers and conditions of Python; else also arrays, which
    it frees after use.
    """
    nodes = loop.nodes
    outer, last = dict[Node, None](), dict[Node, Node]()
    for node in nodes:
        last |= dict.fromkeys(node.args, node)
        outer |= dict.fromkeys(operand for operand in node.args if operand.op != "const")
    for node in nodes:
        outer.pop(node, None)
    results = tuple(node for node in nodes if node in read)
    freed: dict[Node, list[str]] = {}
    for node in nodes:
        if node in last and node not in read and not numbers:
            freed.setdefault(last[node], []).append(_name(node))
    names = list(map(_name, outer)), nodes, list(map(_name, results))
    function = _compiled(_function("made", *names, freed, numbers=numbers))["made"]
    return Straight(tuple(outer), results, function)


def _compiled(text: str) -> dict[str, Any]:
    """Compile a text, and return its functions by name."""
    made: dict[str, Any] = {"inf": np.inf, "nan": np.nan, "where": _where, "item": _item}
    made |= {f"np_{name}": op.numpy for name, op in OPS.items()}
    exec(compile(text, "<scalars>", "exec"), made)
    return made


def _where(condition: Any, yes: Any, no: Any) -> Any:
    """Choose between two values. A single condition needs no NumPy."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def _item(value: Any) -> Any:
    """Return a number of Python for one of NumPy."""
    return value.item() if isinstance(value, np.generic) else value


def _name(node: Node) -> str:
    """Return the name of a value in the text, or the text of a constant."""
    if node.op == "const":
        return f"({node.data!r})"
    own = f"x{node.id}"
    return EACH_STEP.get(node.data, own) if node.op == "host" else own


def _function(
    name: str,
    given: Sequence[str],
    nodes: Iterable[Node],
    results: Sequence[str],
    freed: Mapping[Node, Sequence[str]] = MappingProxyType({}),
    *,
    numbers: bool = False,
) -> str:
    """The text of a function that computes nodes. `freed`: the names to delete after a node.
    With `numbers`, all are numbers of Python.
    """
    lines = [f"def {name}({', '.join(given)}):"]
    for node in nodes:
        if node.op != "host":
            form, args = OPS[node.op].python, list(map(_name, node.args))
            form = OF_NUMBERS.get(node.op, form) if numbers else form
            value = form.format(*args) if form else f"np_{node.op}({', '.join(args)})"
            value = f"item({value})" if numbers and not form else value
            lines.append(f"    {_name(node)} = {value}")
            if node in freed:
                lines.append(f"    del {', '.join(freed[node])}")
    return "\n".join([*lines, f"    return ({', '.join(results)}{',' * bool(results)})", ""])
