"""What a rule makes of a trajectory's gradients, for many sets of hyper-parameters at once.

Each step starts from the parameters that the optimizer really had, so that one step's difference is not the next one's.
The rule's traced graph is evaluated in float64, with an axis for the sets and one for the tensors before those of the
elements.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW, array_namespace
from arrayopt.fusion.dims import NotFlat, NotFolded, NotMeasured, NotOriented
from arrayopt.fusion.graph import PRODUCT, UPDATES, Node, reachable
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.trace import Trace, TraceError, trace
from arrayopt.rules.base import Rule
from arrayopt.testing.diagnosis.trajectory import Trajectory, Values

__all__ = ["Simulation", "Sweep", "rounded"]


def rounded(x: Values, dtype: str) -> Values:
    """Values rounded to float16, bfloat16 or float32, in float64."""
    if dtype == "bfloat16":
        bits = np.asarray(x, np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(dtype).astype(np.float64)


class Sweep:
    """A graph, and the order in which it is computed: what needs no slots at once, what new slots need step by step.

    Parameters
    ----------
    made : Trace
        The graph.
    nodes : list of Node
        All that is computed, arguments first.
    given : dict of str to array
        The slots before the first step, and the numbers of elements, of shape (1, 1, tensors, *elements).
    mask : array of bool, optional
        The elements that count, of the same shape.
    state : str
        What slots are stored in, if not in what the rule says.
    """

    def __init__(
        self, made: Trace, nodes: Sequence[Node], given: Mapping[str, Values], mask: Values | None, state: str
    ) -> None:
        self._made, self._given, self._state = made, given, state
        self._where: Any = True if mask is None else mask
        slots = {n: made.outputs[n.data] for n in nodes if n.op == "input" and n.data in made.slots}
        late: set[Node] = set()  # all that slots go into
        for n in nodes:
            if n in slots or not late.isdisjoint(n.args):
                late.add(n)
        needed = late & {*reachable(slots.values())}  # of these, what new slots are computed from
        self._new = slots
        self._before = [n for n in nodes if n not in late]
        self._during = [n for n in nodes if n in needed and n not in slots]
        self._after = [n for n in nodes if n in late and n not in needed and n not in slots]
        self._kept = {a for n in self._after for a in n.args} | {made.outputs["p"]}
        self._kept &= {*slots, *self._during}

    def run(self, p: Values, g: Values, numbers: Mapping[str, Values], took: Values) -> Values:
        """The new parameters of all steps, from those before each; `took` says which steps have gradients."""
        given = {**self._given, **numbers, "p": p, "g": g}
        values: dict[Node, Values] = {}
        for n in self._before:
            if n.op == "const":
                values[n] = np.full((1,) * p.ndim, n.data)
            else:
                values[n] = given[n.data] if n.op in ("host", "input") else self._one(n, values)
        values |= self._looped(values, took)
        for n in self._after:
            values[n] = self._one(n, values)
        return values[self._made.outputs["p"]]

    def _looped(self, outer: Mapping[Node, Values], took: Values) -> dict[Node, Values]:
        """What new slots need, step after step."""
        now = {n: self._given[n.data] for n in self._new}
        read = {a for n in self._during for a in n.args} | {*self._new.values()}
        read &= set(outer)
        rows: dict[Node, list[Values]] = {n: [] for n in self._kept}
        for s, took_now in enumerate(took):
            at = {n: outer[n] if outer[n].shape[1] == 1 else outer[n][:, s : s + 1] for n in read} | now
            for n in self._during:
                at[n] = self._one(n, at)
            for n, row in rows.items():
                row.append(at[n])
            for n in now:
                new, dtype = at[self._new[n]], self._state or self._made.storage[n.data]
                new = rounded(new, dtype) if dtype in NARROW else new
                now[n] = new if took_now.all() else np.where(took_now, new, now[n])
        for row in rows.values():
            if row[0].shape != row[-1].shape:  # the slot before the first step is the same for all sets
                row[:] = np.broadcast_arrays(*row)
        return {n: np.concatenate(row, axis=1) for n, row in rows.items()}

    def _one(self, n: Node, values: Mapping[Node, Values]) -> Values:
        """One operation."""
        args = [values[a] for a in n.args]
        if n.op == PRODUCT:
            args = [np.swapaxes(x, -1, -2) if t else x for x, t in zip(args, n.data, strict=False)]
            product: Values = np.matmul(*args)
            return product
        if n.op in REDUCTIONS:
            axes = tuple(3 + i for i, a in enumerate(self._made.element) if a in n.args[0].axes and a not in n.axes)
            start = {"sum": 0.0, "max": -np.inf, "min": np.inf}[n.op]
            reduce = REDUCTIONS[n.op].ufunc.reduce
            return np.asarray(reduce(args[0], axis=axes, keepdims=True, where=self._where, initial=start))
        return np.asarray(OPS[n.op].numpy(*args))


AT_ONCE = 2**15  # so many elements are evaluated at once
_TRACES: dict[Any, Trace] = {}  # what rules were traced as


class Simulation:
    """A rule on the gradients of a trajectory.

    Of the rule's numbers only matters which are None or zero. `state` is what slots are stored in, if not in what the
    rule says.
    """

    def __init__(self, rule: Rule, trajectory: Trajectory, state: str = "") -> None:
        self.rule, self.trajectory, self.state = rule, trajectory, state
        narrow = {x for x in trajectory.dtypes.values() if x in NARROW}
        self.dtype = narrow.pop() if len(narrow) == 1 else "float64"
        self.blocks = list(self._blocks())

    def run(self, hypers: Mapping[str, Any]) -> list[Values]:
        """The parameters after each step: for each tensor an array of shape (sets, steps, elements).

        Numbers broadcast to (sets, steps, tensors). ``t`` is the number of updates, and gradients are multiplied by
        ``grad_factor``.
        """
        steps, names = self.trajectory.steps, self.trajectory.names
        sets = max(len(x) for x in hypers.values())
        numbers = {k: np.broadcast_to(x, (1 if k == "t" else sets, steps, len(names))) for k, x in hypers.items()}
        found: list[Values] = [np.empty(0)] * len(names)
        with np.errstate(all="ignore"):
            for at, sweep, p, gradients in self.blocks:
                ones = (1,) * (p.ndim - 3)
                took = self.trajectory.took[:, at].reshape(steps, len(at), *ones)
                laid = {k: x[:, :, at].reshape(-1, steps, len(at), *ones) for k, x in numbers.items()}
                laid[UPDATES] = laid.pop("t")
                made = np.empty((sets, *p.shape[1:]))
                few = max(1, AT_ONCE // p.size)
                for i in range(0, sets, few):
                    own = {k: x if k == UPDATES else x[i : i + few] for k, x in laid.items()}
                    g = gradients * own.pop("grad_factor", 1.0)
                    made[i : i + few] = np.where(took, sweep.run(p, g, own, took), p)
                for k, i in enumerate(at):
                    size = self.trajectory.params[0][names[i]].size
                    found[i] = made[:, :, k].reshape(sets, steps, -1)[:, :, :size]
        return found

    def _blocks(self) -> Iterator[tuple[list[int], Sweep, Values, Values]]:
        """The tensors, sorted by the graph that they need; where that sees no rows or columns, all in one block.

        Of each block: which tensors, what computes them, and their parameters before each step and gradients, of shape
        (1, steps, tensors, *elements). Shorter tensors are filled up with zeros.
        """
        together: dict[Any, tuple[list[int], Trace, list[Node]]] = {}
        for i, name in enumerate(self.trajectory.names):
            made = _traced(self.rule, self.trajectory.params[0][name].shape, self.dtype)
            nodes = reachable(made.outputs.values())
            place = {n: k for k, n in enumerate(nodes)}
            key = tuple((n.op, *map(place.__getitem__, n.args), n.axes, repr(n.data)) for n in nodes)
            together.setdefault((key, None if made.element == "C" else i), ([], made, nodes))[0].append(i)
        for index, made, nodes in together.values():
            yield (index, *self._laid(index, made, nodes))

    def _laid(self, index: list[int], made: Trace, nodes: list[Node]) -> tuple[Sweep, Values, Values]:
        """What computes some tensors, their parameters and their gradients."""
        names, before = [self.trajectory.names[i] for i in index], self.trajectory.params[:-1]
        starts = [before[0][name] for name in names]
        sizes = [dict(zip(made.element, _seen_shape(made.element, x.shape), strict=True)) for x in starts]
        longest = max(x.size for x in starts)

        def lay(arrays: list[Any], axes: str = made.element) -> Values:
            """An array of each tensor, as the graph sees it: with ones for axes that it has not."""
            rows = []
            for x, size in zip(arrays, sizes, strict=True):
                row = np.reshape(x, [size[a] if a in axes else 1 for a in made.element])
                rows.append(np.pad(row, (0, longest - row.size)) if made.element == axes == "C" else row)
            return np.stack(rows)

        fresh = [self.rule.all_slots(array_namespace(x), x, self.dtype) for x in starts]
        given = {}
        for slot, axes in made.slots.items():
            given[slot] = lay([x[slot] for x in fresh], str(axes))[None, None]
        for n in nodes:
            if n.op == "host" and n.data.startswith("count:"):
                counted = n.data.removeprefix("count:")
                count = np.ones(len(names))
                for a in counted:
                    count *= [size[a] for size in sizes]
                given[n.data] = np.reshape(count, (1, 1, len(names), *(1,) * len(made.element)))
        filled = len({x.size for x in starts}) > 1
        mask = lay([np.ones(x.shape) for x in starts]).astype(bool)[None, None] if filled else None
        none = dict(zip(names, map(np.zeros_like, starts), strict=True))
        params, gradients = [], []
        for row, grads in zip(before, self.trajectory.grads, strict=True):
            now = {**none, **{name: x for name, x in grads.items() if x is not None}}
            params.append(lay([row[name] for name in names]))
            gradients.append(lay([now[name] for name in names]))
        return Sweep(made, nodes, given, mask, self.state), np.stack(params)[None], np.stack(gradients)[None]


def _seen_shape(element: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape as a graph sees it."""
    if element == "C":
        return (prod(shape),)
    if element == "RC":
        return shape[0], prod(shape[1:])
    return (shape[0], prod(shape[1:-2]), *shape[-2:]) if len(shape) > 4 else shape


def _traced(rule: Rule, shape: tuple[int, ...], dtype: str) -> Trace:
    """A rule's graph for tensors of a shape, each traced once; flat where it sees no rows or columns."""
    ways: list[dict[str, Any]] = [{"flat": True}, {}]
    if rule.refuses(np, np.zeros(1)) and len(shape) > 1:  # one for matrices asks which way these lie
        ways = [{"tall": _sign(*shape[-2:])}, {"tall": _sign(shape[0], prod(shape[1:])), "folded": True}]
    rank = max(len(shape), 1)
    key = (rule.structure, rank, dtype, repr(ways))
    for way in ways if key not in _TRACES else ():
        try:
            made = trace(rule, rank, dtype, lean=True, **way)
        except (NotFlat, NotFolded, NotMeasured, NotOriented, TraceError):
            continue
        if _is_simple(made):
            _TRACES[key] = made
        break
    if key not in _TRACES:
        raise TraceError(f"{type(rule).__name__} cannot be simulated on tensors of shape {shape}")
    return _TRACES[key]


def _sign(rows: int, columns: int) -> int:
    return (rows > columns) - (rows < columns)


def _is_simple(made: Trace) -> bool:
    """Whether values over r or c, which products bring, meet no values along one axis alone, and are not reduced."""
    for n in reachable(made.outputs.values()):
        square = [bool(set("rc") & set(a.axes)) for a in n.args]
        single = any(a.axes and not x for a, x in zip(n.args, square, strict=True))
        if any(square) and n.op != PRODUCT and (single or n.op in REDUCTIONS):
            return False
    return True
