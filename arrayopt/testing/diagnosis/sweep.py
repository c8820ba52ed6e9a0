"""A traced rule over all steps at once: only what goes from step to step is computed one step after the other.

Values are arrays of shape (sets, steps, tensors, *elements), or with ones there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW
from arrayopt.fusion.graph import PRODUCT, Node
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.trace import Trace
from arrayopt.testing.diagnosis.trajectory import Values

__all__ = ["Sweep", "rounded"]


def rounded(x: Values, dtype: str) -> Values:
    """Values rounded to float16, bfloat16 or float32, in float64."""
    if dtype == "bfloat16":
        bits = np.asarray(x, np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(dtype).astype(np.float64)


class Sweep:
    """A graph, and the order in which it is computed.

    Nodes that need each other, over the slots from step to step, are one unit, which is computed step after step.

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
        self._host = [n for n in nodes if n.on_host]
        nodes = [n for n in nodes if not n.on_host]
        self._new = {n: made.outputs[n.data] for n in nodes if n.op == "input" and n.data in made.slots}
        args = {n: {self._new[n]} if n in self._new else set(n.args) for n in nodes}
        needs = {n: 1 << i for i, n in enumerate(nodes)}  # of each node a bit for each that it needs
        before: dict[Node, int] = {}
        while needs != before:
            before = dict(needs)
            for n in nodes:
                for a in args[n]:
                    needs[n] |= needs.get(a, 0)
        units: dict[int, list[Node]] = {}  # those that need each other need the same
        for n in nodes:
            units.setdefault(needs[n], []).append(n)
        order = [units[found] for found in sorted(units, key=int.bit_count)]
        reads = [{a for n in unit for a in args[n]}.difference(unit) for unit in order]
        last = {n: i for i, found in enumerate(reads) for n in found}
        self._asked = {made.outputs["p"], *last}
        last.pop(made.outputs["p"], None)
        self._units = [(unit, reads[i], [n for n in reads[i] if last.get(n) == i]) for i, unit in enumerate(order)]

    def run(self, p: Values, g: Values, numbers: Mapping[str, Values], took: Values) -> Values:
        """The new parameters of all steps, from those before each; `took` says which steps have gradients."""
        given = {**self._given, **numbers, "p": p, "g": g}
        values: dict[Node, Values] = {}
        for n in self._host:  # what follows from numbers of each step alone
            if n.op == "const":
                values[n] = np.full((1,) * p.ndim, n.data)
            else:
                values[n] = given[n.data] if n.op == "host" else self._one(n, values)
        for unit, reads, done in self._units:
            if any(n in self._new for n in unit):
                outer = {n: values[n] for n in reads}
                values |= self._looped(unit, outer, took)
            else:
                values[unit[0]] = given[unit[0].data] if unit[0].op == "input" else self._one(unit[0], values)
            for n in done:
                del values[n]
        return values[self._made.outputs["p"]]

    def _looped(self, unit: Sequence[Node], outer: Mapping[Node, Values], took: Values) -> dict[Node, Values]:
        """Step after step."""
        now = {n: self._given[n.data] for n in unit if n in self._new}
        rows: dict[Node, list[Values]] = {n: [] for n in unit if n in self._asked}
        for s, took_now in enumerate(took):
            at = {n: x if x.shape[1] == 1 else x[:, s : s + 1] for n, x in outer.items()} | now
            for n in unit:
                if n not in now:
                    at[n] = self._one(n, at)
            for n, row in rows.items():
                row.append(at[n])
            for n in now:
                new, dtype = at[self._new[n]], self._state or self._made.storage[n.data]
                new = rounded(new, dtype) if dtype in NARROW else new
                now[n] = new if took_now.all() else np.where(took_now, new, now[n])
        return {n: _put_together(row) for n, row in rows.items()}

    def _one(self, n: Node, values: Mapping[Node, Values]) -> Values:
        """One operation."""
        if n.op == PRODUCT:
            a, b = (np.swapaxes(values[x], -1, -2) if t else values[x] for x, t in zip(n.args, n.data, strict=False))
            product: Values = np.matmul(a, b)
            return product
        if n.op in REDUCTIONS:
            element = self._made.element
            axes = tuple(3 + element.index(a) for a in n.args[0].axes if a not in n.axes)
            start = {"sum": 0.0, "max": -np.inf, "min": np.inf}[n.op]
            of = values[n.args[0]]
            reduce = REDUCTIONS[n.op].ufunc.reduce
            return np.asarray(reduce(of, axis=axes, keepdims=True, where=self._where, initial=start))
        return np.asarray(OPS[n.op].numpy(*(values[a] for a in n.args)))


def _put_together(row: Sequence[Values]) -> Values:
    """The values of one step after the other as one array."""
    shape = np.broadcast_shapes(*(x.shape for x in row))
    return np.concatenate([x if x.shape == shape else np.broadcast_to(x, shape) for x in row], axis=1)
