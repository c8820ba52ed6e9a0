"""What a rule makes of a trajectory's gradients, for many sets of hyper-parameters at once.

Each step starts from the parameters that the optimizer really had, so that one step's difference is not the next one's.
The rule's traced graph is evaluated in float64, with an axis for the sets and one for the tensors before those of the
elements.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW, array_namespace
from arrayopt.fusion.dims import NotFlat, NotFolded, NotMeasured, NotOriented
from arrayopt.fusion.graph import PRODUCT, UPDATES, Node, reachable
from arrayopt.fusion.ops import REDUCTIONS
from arrayopt.fusion.trace import Trace, TraceError, trace
from arrayopt.rules.base import Rule
from arrayopt.testing.diagnosis.sweep import Sweep
from arrayopt.testing.diagnosis.trajectory import Trajectory, Values

__all__ = ["Simulation"]

AT_ONCE = 2**16
"""So many elements are evaluated at once."""

_TRACES: dict[Any, Trace] = {}
"""What rules were traced as."""


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
            key = tuple((n.op, tuple(place[a] for a in n.args), n.axes, repr(n.data)) for n in nodes)
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
        slots = {slot: lay([x[slot] for x in fresh], str(axes))[None, None] for slot, axes in made.slots.items()}
        counts = {}
        for n in nodes:
            if n.op == "host" and n.data.startswith("count:"):
                count = [float(prod(size[a] for a in n.data.removeprefix("count:"))) for size in sizes]
                counts[n.data] = np.reshape(count, (1, 1, len(names), *(1,) * len(made.element)))
        filled = len({x.size for x in starts}) > 1
        mask = lay([np.ones(x.shape) for x in starts]).astype(bool)[None, None] if filled else None
        p = np.stack([lay([row[name] for name in names]) for row in before])[None]
        grads = [
            [np.zeros(x.shape) if row[n] is None else row[n] for n, x in zip(names, starts, strict=True)]
            for row in self.trajectory.grads
        ]
        g = np.stack([lay(row) for row in grads])[None]
        return Sweep(made, nodes, {**slots, **counts}, mask, self.state), p, g


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
