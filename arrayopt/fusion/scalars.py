"""Compiled Python functions for the scalars of a step, which are computed from hyper-parameters, t
and `clip`. Engines call them in each step; NumPy's engine also for values per tensor (`straight`).

Results equal those of `arrayopt.fusion.graph.evaluate`, bit for bit, but no graph is traversed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from arrayopt.fusion.graph import CACHED, CLIP, UPDATES, Node, evaluate, operands, reachable
from arrayopt.fusion.ops import OPS
from arrayopt.fusion.plan import Plan

EACH_STEP = {UPDATES: "t", CLIP: "clip"}
"""The scalars that change in each step, with their names in the text."""


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
    late: set[Node] = set()  # depends on t or clip
    for n in found:
        if n.data in EACH_STEP if n.op == "host" else any(a in late for a in n.args):
            late.add(n)
    leaves = [n for n in found if n.op == "host" and n not in late]
    early = [n for n in found if n.op not in ("host", "const") and n not in late]
    read = {*plan.scalars, *operands(late)}
    read_later = [n for n in early if n in read]
    passed = [f"x{n.id}" for n in [*leaves, *read_later]]
    text = _function("constants", [f"x{n.id}" for n in leaves], early, ["True", *passed])
    names = {n: EACH_STEP.get(n.data, f"x{n.id}") for n in found if n.op == "host"}
    given = [*EACH_STEP.values(), "ready", *passed]
    text += _function(
        "scalars",
        given,
        [n for n in found if n in late],
        [_name(n, names) for n in plan.scalars],
        names,
    )
    made = _compiled(text)
    return ScalarCode(
        tuple(n.data for n in leaves), plan.scalars, text, made["constants"], made["scalars"]
    )


class Straight(NamedTuple):
    """A compiled function that computes values from values, as numbers or arrays."""

    outer: tuple[Node, ...]
    """The arguments."""
    results: tuple[Node, ...]
    """The results."""
    function: Callable[..., tuple[Any, ...]]
    """The function. With Python's numbers it may raise ZeroDivisionError."""


@lru_cache(maxsize=CACHED)
def straight(nodes: tuple[Node, ...], read: frozenset[Node]) -> Straight:
    """Compile a function for `nodes`. It returns those in `read`, and frees others after use."""
    inner, last = set(nodes), dict[Node, Node]()
    outer = tuple(dict.fromkeys(a for a in operands(nodes) if a not in inner and a.op != "const"))
    for n in nodes:
        last |= dict.fromkeys(n.args, n)
    freed: dict[Node, list[str]] = {}
    for n in inner.intersection(last).difference(read):
        freed.setdefault(last[n], []).append(f"x{n.id}")
    results = tuple(n for n in nodes if n in read)
    names = [f"x{n.id}" for n in results]
    text = _function("made", [f"x{n.id}" for n in outer], list(nodes), names, freed=freed)
    return Straight(outer, results, _compiled(text)["made"])


def _compiled(text: str) -> dict[str, Any]:
    """Compile a text, and return its functions by name."""
    made: dict[str, Any] = {"inf": np.inf, "nan": np.nan, "where": _where}
    made |= {f"np_{name}": op.numpy for name, op in OPS.items()}
    exec(compile(text, "<scalars>", "exec"), made)
    return made


def _where(condition: Any, yes: Any, no: Any) -> Any:
    """Choose between two values. A single condition needs no NumPy."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def _name(n: Node, names: Mapping[Node, str]) -> str:
    """Return the name of a value in the text, or the text of a constant."""
    return f"({n.data!r})" if n.op == "const" else names.get(n, f"x{n.id}")


def _function(
    name: str,
    given: list[str],
    nodes: list[Node],
    results: list[str],
    names: Mapping[Node, str] | None = None,
    freed: Mapping[Node, list[str]] | None = None,
) -> str:
    """The text of a function that computes nodes. `freed`: the names to delete after a node."""
    lines = [f"def {name}({', '.join(given)}):"]
    for node in nodes:
        if node.op != "host":
            args = [_name(operand, names or {}) for operand in node.args]
            form = (
                OPS[node.op].python
                or f"np_{node.op}({', '.join(f'{{{number}}}' for number in range(len(args)))})"
            )
            lines.append(f"    x{node.id} = {form.format(*args)}")
            if freed and node in freed:
                lines.append(f"    del {', '.join(freed[node])}")
    return "\n".join([*lines, f"    return ({', '.join(results)}{',' * bool(results)})", ""])
