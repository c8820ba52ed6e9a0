"""Tracing: `trace` calls a rule with symbolic arrays, which record its operations as a graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW, WORKING, real_dtype
from arrayopt.codecs import SPLIT
from arrayopt.fusion.dims import RAISED, Aspect, RetraceError, TraceError, not_fused
from arrayopt.fusion.graph import CLIP, KEY, LETTERS, POSITION, TOTAL, UPDATES, Node, Summed
from arrayopt.fusion.namespace import NAMESPACE
from arrayopt.fusion.simplify import Graph
from arrayopt.fusion.symbol import Symbol, lift
from arrayopt.rules.base import Rule
from arrayopt.rules.draws import DRAWS
from arrayopt.rules.faults import in_words, line_of, own_fault
from arrayopt.rules.fields import hypers
from arrayopt.rules.names import VALUE, NameInRuleError, On, Values
from arrayopt.rules.returned import ODD, ReturnedError, WritesError, check_value
from arrayopt.rules.totals import TOTALS, of_total


@dataclass(frozen=True, slots=True)
class Trace:
    """What a rule computes for one tensor: new values to store, or reports."""

    outputs: dict[str, Node]
    """The new values of ``p`` and the slots; their old values in a trace of reports."""
    slots: dict[str, str]
    """The axes of each slot."""
    storage: dict[str, str]
    """The storage dtypes of the parameter and the slots."""
    reports: dict[str, Node]
    """Values per tensor for `Optimizer.stats`."""
    element: str
    """The axes of an element."""
    totals: tuple[Node, ...] = ()
    """The totals that the rule asks for, in order."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Makes the symbolic arguments of a rule, for a tensor with these dimensions."""

    graph: Graph
    dims: tuple[str, ...]

    def array(self, name: str, dims: tuple[str, ...], dtype: str) -> Symbol:
        """Return the symbol of a parameter, gradient or slot."""
        first = {label[:1] for label in dims}
        axes = "".join(letter for letter in LETTERS if letter in first)
        if self.graph.view.flat:
            axes = self.graph.element if dims == self.dims else ""
        kind = "complex" if dtype.startswith("complex") else "real"
        node = self.graph.make("input", axes=axes, kind=kind, data=name)
        made = Symbol(self.graph, node, dims, dtype)
        made.is_given = True
        return made

    def scalar(self, name: str) -> Symbol:
        """Return the symbol of a scalar of the step."""
        return Symbol(self.graph, self.graph.make("host", data=name), (), self.graph.real)


def _numbers_of(rule: Rule, inputs: _Inputs) -> tuple[dict[str, Any], Rule]:
    """A rule's hyper-parameters as symbols, and a copy of the rule whose `self.lr` is `h.lr`."""
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
    """A hyper-parameter that is known to be on: `self.momentum == 0` is false."""


@dataclass(frozen=True)
class _Draws:
    """Returns random numbers as a symbol like the parameter; see `arrayopt.rules.draws.Draws`."""

    p: Symbol
    stored: str

    def __call__(self, stream: int | str) -> Symbol:
        graph, real = self.p.graph, self.p.graph.real
        t, half = graph.make("host", data=UPDATES), graph.const(65536.0)
        position = graph.make(POSITION, axes=graph.element)
        keys = [graph.make("host", data=f"{KEY}{stream}:{i}") for i in range(4)]
        halves = graph.make("floor", graph.make("div", t, half)), graph.make("mod", t, half)
        return Symbol(graph, graph.make("uniform", position, *keys, *halves), self.p.dims, real)


class _Totals:
    """Returns totals as symbols, and remembers their nodes; see `arrayopt.rules.totals.Heard`."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.made = graph, list[Node]()

    def __call__(self, x: Any, how: str) -> Symbol:
        graph, node = self.graph, lift(self.graph, x)[0]
        node = graph.make("float", node) if node.kind == "bool" else node
        summed = Summed(of_total(len(self.made)), how)
        made = graph.make(TOTAL, _per_tensor(graph, node), axes="", kind="real", data=summed)
        self.made.append(made)
        return Symbol(graph, made, (), graph.real)


def _per_tensor(graph: Graph, node: Node) -> Node:
    """Return a value per tensor: the value of a tensor of rank 0 may be that of its one element."""
    return graph.make("sum", node, axes="") if node.axes else node


@contextmanager
def _clear_errors(rule: Rule, rank: int) -> Iterator[None]:
    """Add the rule's line to errors of a trace. An error that is not of tracing stays as it is."""
    RAISED.first = None
    try:
        yield
        if RAISED.first is not None:
            raise RAISED.first
    except (WritesError, TraceError) as error:
        kind = WritesError if isinstance(error, WritesError) else TraceError
        raise kind(f"{line_of(rule, error)}{error}") from error
    except NameInRuleError as error:
        raise NameInRuleError(f"{line_of(rule, error)}{error}") from error
    except (ReturnedError, RetraceError):
        raise
    except Exception as error:
        own, who, name = own_fault(rule, rank, error), type(rule).__name__, type(error).__name__
        if own is not None:
            raise own from own.__cause__
        said = f"{who} cannot be traced: {name}: {in_words(str(error))}".removesuffix(": ")
        raise not_fused(f"{line_of(rule, error)}{said}") from error
    finally:
        RAISED.first = None  # it holds all frames


def trace(
    rule: Rule,
    rank: int,
    dtype: str,
    view: Aspect = Aspect(),  # noqa: B008 - it does not change
    *,
    clip: bool = False,
    valued: bool = True,
    stats: bool = False,
    lean: bool = False,
) -> Trace:
    """Trace a rule's update of a tensor.

    Parameters
    ----------
    rule : Rule
        The rule. Of its hyper-parameters it matters only which are off.
    rank : int
        The tensor's number of dimensions.
    dtype : str
        The dtype that the tensor is stored in.
    view : Aspect
        What the trace knows of the tensor's shape.
    valued : bool
        Whether `h.value` is the step's value; else it is None.
    clip : bool
        Whether gradients are multiplied by the scalar `CLIP` first.
    stats : bool
        Whether to trace the reports, with norms, and not the update. Reports have a trace of their
        own, so they cannot change the update.
    lean : bool
        Whether registers are few: then norms use fewer; see `arrayopt.rules.words.PAIR`.

    Raises
    ------
    TraceError
        If the rule does something that cannot be traced. The message says what to write instead.
    RetraceError
        If the rule depends on more of the shape than the view has; see `Aspect`.
    ValueError
        If the rule does not return every slot, or changes a shape.
    """
    working = WORKING[dtype]
    tiny = float(np.finfo(real_dtype(dtype)).tiny)
    element = view.element(rank)
    rooted = any(slot in rule.squares for slot in rule.storage(rank, dtype))
    graph = Graph(
        element=element, view=view, tiny=tiny, lean=lean, ordinary=rule.branches, rooted=rooted
    )
    inputs = _Inputs(graph, view.dims(rank))
    param, grad = inputs.array("p", inputs.dims, working), inputs.array("g", inputs.dims, working)
    values, seen = _numbers_of(rule, inputs)
    with _clear_errors(rule, rank):
        fresh = seen.all_slots(NAMESPACE, param, dtype)
    slots, storage = _slots(rule, rank, dtype, inputs, fresh)
    totals = _Totals(graph)
    values |= {VALUE: inputs.scalar(VALUE) if valued else None, TOTALS: totals}
    hyper = Values(**values, t=inputs.scalar(UPDATES), **{DRAWS: _Draws(param, dtype)})
    grad = NAMESPACE.multiply(grad, inputs.scalar(CLIP)) if clip else grad
    now = dict(slots)
    if "master" in now:
        how = "joined" if storage["master"] == SPLIT else "current"
        now["master"] = getattr(NAMESPACE, f"{how}_{dtype}")(slots["master"], param)
    with _clear_errors(rule, rank):
        new_p, out = seen(NAMESPACE, param, grad, now.copy(), hyper)
    _check_values(rule, graph, {"the parameter": (param, new_p)})
    _check_values(rule, graph, {f"slot {x!r}": (old, out[x]) for x, old in slots.items()})
    reports = {}
    if stats:
        reports = {name: symbol for name, symbol in out.items() if name not in slots}
        reports |= seen.norms(NAMESPACE, now.get("master", param), grad, new_p)
    nodes = _reported(type(rule).__name__, graph, reports, one=not rank)
    if storage.get("master") == SPLIT:
        out["master"] = getattr(NAMESPACE, f"low_{dtype}")(out["master"], new_p)
    after = {"p": param, **slots} if stats else {"p": new_p} | {name: out[name] for name in slots}
    return Trace(
        {name: lift(graph, symbol)[0] for name, symbol in after.items()},
        {name: symbol.node.axes for name, symbol in slots.items()},
        storage,
        nodes,
        element,
        tuple(totals.made),
    )


def _slots(
    rule: Rule, rank: int, dtype: str, inputs: _Inputs, fresh: dict[str, Any]
) -> tuple[dict[str, Symbol], dict[str, str]]:
    """The symbols of a rule's slots, and the storage dtypes of the slots and the parameter."""
    narrow = rule.storage(rank, dtype)
    if any(symbol.dtype in NARROW or symbol.dtype not in WORKING for symbol in fresh.values()):
        raise TraceError("16-bit and bool slots are not fused; use engine='array_api'")
    if inputs.graph.view.flat and any(x.dims not in (inputs.dims, ()) for x in fresh.values()):
        raise RetraceError("flat")
    slots = {slot: inputs.array(slot, symbol.dims, symbol.dtype) for slot, symbol in fresh.items()}
    storage = {"p": dtype} | {name: narrow.get(name, x.dtype) for name, x in slots.items()}
    if "master" in slots and rule.master_weights == "split":
        storage["master"] = SPLIT
    return slots, storage


def _check_values(rule: Rule, graph: Graph, values: dict[str, tuple[Symbol, Any]]) -> None:
    """Raise an error if a returned value differs in shape or kind from the one that it replaces."""

    def form(symbol: Any) -> tuple[tuple[str, ...], str]:
        node, dims, _ = lift(graph, symbol)
        return dims, node.kind

    for what, (old, new) in values.items():
        check_value(type(rule).__name__, what, old, new, form)


def _reported(who: str, graph: Graph, reports: dict[str, Any], *, one: bool) -> dict[str, Node]:
    """The nodes of the reports, each a value per tensor. `one`: the tensor has rank 0."""
    nodes = {name: lift(graph, symbol)[0] for name, symbol in reports.items()}
    # a total comes from outside the pass that reports, so a report of it is a copy
    nodes |= {name: graph.make("copy", x) for name, x in nodes.items() if x.op == TOTAL}
    nodes = {name: _per_tensor(graph, x) for name, x in nodes.items()} if one else nodes
    odd = [name for name, node in nodes.items() if node.axes]
    if odd:
        raise TraceError(ODD.format(who, ", ".join(odd)))
    return nodes
