"""Compiled Python functions for the scalars of a step, which are computed from hyper-parameters, t
and `clip`. Engines call them in each step; NumPy's engine also for values per tensor (`straight`).

Results equal those of `arrayopt.fusion.graph.evaluate`, bit for bit, but no graph is traversed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from arrayopt.fusion.graph import CACHED, CLIP, UPDATES, Node, evaluate, operands, reachable
from arrayopt.fusion.ops import OPS
from arrayopt.fusion.passes import SmallLoop
from arrayopt.fusion.plan import Plan

EACH_STEP = {UPDATES: "t", CLIP: "clip"}
"""The scalars that change in each step, with their names in the text."""

OF_NUMBERS = {"where": "{1} if {0} else {2}", "and": "{0} and {1}", "or": "{0} or {1}"}
"""The text of operations in Python, if their operands are numbers."""


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
        if node.data in EACH_STEP or not late.keys().isdisjoint(node.args):
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
    """Compile a function for a loop, which returns the nodes in `read`, and frees others after use.
    With `numbers`, all are numbers and conditions of Python.
    """
    outer = {node: None for node in operands(loop.nodes) if node.op != "const"}
    for node in loop.nodes:
        outer.pop(node, None)
    results = tuple(node for node in loop.nodes if node in read)
    text = _function("made", [*map(_name, outer)], loop.nodes, [*map(_name, results)], numbers)
    return Straight(tuple(outer), results, _compiled(text)["made"])


def _compiled(text: str) -> dict[str, Any]:
    """Compile a text, and return its functions by name."""
    made: dict[str, Any] = {"inf": np.inf, "nan": np.nan, "where": _where}
    made["item"] = lambda x: x.item() if isinstance(x, np.generic) else x
    made |= {f"np_{name}": op.numpy for name, op in OPS.items()}
    exec(compile(text, "<scalars>", "exec"), made)
    return made


def _where(condition: Any, yes: Any, no: Any) -> Any:
    """Choose between two values. A single condition needs no NumPy."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def _name(node: Node) -> str:
    """Return the name of a value in the text, or the text of a constant."""
    if node.op == "const":
        return f"({node.data!r})"
    own = f"x{node.id}"
    return EACH_STEP.get(node.data, own) if node.op == "host" else own


def _function(
    name: str,
    given: Sequence[str],
    nodes: Collection[Node],
    results: Sequence[str],
    numbers: bool = False,
) -> str:
    """The text of a function that computes nodes, of Python's `numbers` or else of arrays too."""
    lines, last, kept = [f"def {name}({', '.join(given)}):"], dict[Node, Node](), {*results, *given}
    call = "item(np_{}({}))" if numbers else "np_{}({})"
    for node in nodes:
        last |= dict.fromkeys(node.args, node)
    for node in nodes:
        if node.op != "host":
            args, form = list(map(_name, node.args)), numbers and OF_NUMBERS.get(node.op)
            form = form or OPS[node.op].python or call.format(node.op, ", ".join(args))
            lines.append(f"    {_name(node)} = {form.format(*args)}")
            done = {_name(x): None for x in node.args if last[x] is node and x.op != "const"}
            if not numbers and done.keys() - kept:  # memory of arrays is freed after use
                lines.append(f"    del {', '.join(x for x in done if x not in kept)}")
    return "\n".join([*lines, f"    return ({', '.join(results)}{',' * bool(results)})", ""])
