"""The symbols that a rule is given when it is traced."""

from copy import copy
from dataclasses import dataclass, fields
from typing import Any

from arrayopt.fusion.dims import View
from arrayopt.fusion.graph import KEY, LETTERS, POSITION, TOTAL, UPDATES, Node, Summed
from arrayopt.fusion.simplify import Graph
from arrayopt.fusion.symbol import Symbol, lift
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.rules.names import On
from arrayopt.rules.totals import of_total

__all__ = ["Inputs", "SymbolicDraws", "SymbolicTotals", "dims_of", "numbers_of", "one_of"]


def dims_of(rank: int, element: str, view: View) -> tuple[str, ...]:
    """What the dimensions of a tensor are; see `Symbol`."""
    if view.flat:
        return tuple(str(number) for number in range(rank))
    if view.folded and rank > 2:
        return ("R", *(f"C{number}" for number in range(rank - 1)))
    if rank > 4:
        return ("A", *(f"B{number}" for number in range(rank - 3)), "R", "C")
    return tuple(element)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Makes the symbols that a rule is given for a tensor of some dimensions."""

    graph: Graph
    dims: tuple[str, ...]

    def array(self, name: str, dims: tuple[str, ...], dtype: str) -> Symbol:
        """A parameter, gradient or slot."""
        first = {label[:1] for label in dims}
        axes = "".join(letter for letter in LETTERS if letter in first)
        if self.graph.view.flat:
            axes = self.graph.element if dims == self.dims else ""
        kind = "complex" if dtype.startswith("complex") else "real"
        node = self.graph.make("input", axes=axes, dtype=kind, data=name)
        made = Symbol(self.graph, node, dims, dtype)
        made.is_given = True
        return made

    def scalar(self, name: str) -> Symbol:
        """A scalar of the step."""
        return Symbol(self.graph, self.graph.make("host", data=name), (), self.graph.real)


def numbers_of(rule: Rule, inputs: Inputs) -> tuple[dict[str, Any], Rule]:
    """The numbers of a rule as scalars of the step; and the rule, whose `self.lr` is `h.lr`."""
    values, off, seen = dict[str, Any](), rule.structure[-1], copy(rule)
    zero_is_off = {field.name for field in fields(rule) if field.metadata.get("zero_is_off")}
    for name in hypers(type(rule)):
        scalar = None if getattr(rule, name) is None else inputs.scalar(name)
        values[name] = own = scalar
        if scalar is not None and name in zero_is_off:
            own = _On(inputs.graph, scalar.node, (), inputs.graph.real)
        if name not in off:
            seen.__dict__[name] = own
    seen.__dict__["_not_floats"] = {}
    return values, seen


class _On(On, Symbol):
    """A number of which is known that it is on: `self.momentum == 0`."""


@dataclass(frozen=True)
class SymbolicDraws:
    """Random numbers as symbols of the parameter's dimensions; see `arrayopt.rules.draws.Draws`."""

    p: Symbol
    stored: str

    def __call__(self, stream: int | str) -> Symbol:
        graph, real = self.p.graph, self.p.graph.real
        t, half = graph.make("host", data=UPDATES), graph.const(65536.0)
        position = graph.make(POSITION, axes=graph.element)
        keys = [graph.make("host", data=f"{KEY}{stream}:{i}") for i in range(4)]
        halves = graph.make("floor", graph.make("div", t, half)), graph.make("mod", t, half)
        return Symbol(graph, graph.make("uniform", position, *keys, *halves), self.p.dims, real)


class SymbolicTotals:
    """Totals as symbols; see `arrayopt.rules.totals.Heard`."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.made = graph, list[Node]()

    def __call__(self, x: Any, how: str) -> Symbol:
        graph, node = self.graph, lift(self.graph, x)[0]
        node = graph.make("float", node) if node.dtype == "bool" else node
        summed = Summed(of_total(len(self.made)), how)
        made = graph.make(TOTAL, one_of(graph, node), axes="", dtype="real", data=summed)
        self.made.append(made)
        return Symbol(graph, made, (), graph.real)


def one_of(graph: Graph, node: Node) -> Node:
    """The value of a tensor, which may be seen as an element where the rank is 0."""
    return graph.make("sum", node, axes="") if node.axes else node
