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

    `nodes` are all that is computed of arrays, arguments first.
    """

    def __init__(self, made: Trace, nodes: Sequence[Node]) -> None:
        self._made = made
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

    def run(
        self,
        p: Values,
        g: Values,
        slots: Mapping[str, Values],
        known: Mapping[Node, Values],
        took: Values,
        mask: Values | None,
        state: str,
    ) -> Values:
        """The new parameters of all steps.

        `p` and `g` are parameters before each step and gradients; `slots`, of one step, are those before the first;
        `known` follows from numbers. `took` says whether a step has a gradient of a tensor, and `mask` which elements
        count. `state` is what slots are stored in, if not in what the rule says.
        """
        values, given = dict(known), {"p": p, "g": g}
        for unit, reads, done in self._units:
            if any(n in self._new for n in unit):
                outer = {n: values[n] for n in reads}
                values |= self._looped(unit, outer, slots, took, mask, state)
            else:
                values[unit[0]] = given[unit[0].data] if unit[0].op == "input" else self._one(unit[0], values, mask)
            for n in done:
                del values[n]
        return values[self._made.outputs["p"]]

    def _looped(
        self,
        unit: Sequence[Node],
        outer: Mapping[Node, Values],
        slots: Mapping[str, Values],
        took: Values,
        mask: Values | None,
        state: str,
    ) -> dict[Node, Values]:
        """Step after step."""
        now = {n: slots[n.data] for n in unit if n in self._new}
        rows: dict[Node, list[Values]] = {n: [] for n in unit if n in self._asked}
        for s, took_now in enumerate(took):
            at = {n: x if x.shape[1] == 1 else x[:, s : s + 1] for n, x in outer.items()} | now
            for n in unit:
                if n not in now:
                    at[n] = self._one(n, at, mask)
            for n, row in rows.items():
                row.append(at[n])
            for n in now:
                new, dtype = at[self._new[n]], state or self._made.storage[n.data]
                new = rounded(new, dtype) if dtype in NARROW else new
                now[n] = new if took_now.all() else np.where(took_now, new, now[n])
        return {n: _put_together(row) for n, row in rows.items()}

    def _one(self, n: Node, values: Mapping[Node, Values], mask: Values | None) -> Values:
        """One operation."""
        if n.op == PRODUCT:
            a, b = (np.swapaxes(values[x], -1, -2) if t else values[x] for x, t in zip(n.args, n.data, strict=False))
            product: Values = np.matmul(a, b)
            return product
        if n.op in REDUCTIONS:
            element = self._made.element
            axes = tuple(3 + element.index(a) for a in n.args[0].axes if a not in n.axes)
            where: Any = True if mask is None else mask
            start = {"sum": 0.0, "max": -np.inf, "min": np.inf}[n.op]
            of = values[n.args[0]]
            return np.asarray(REDUCTIONS[n.op].ufunc.reduce(of, axis=axes, keepdims=True, where=where, initial=start))
        return np.asarray(OPS[n.op].numpy(*(values[a] for a in n.args)))


def _put_together(row: Sequence[Values]) -> Values:
    """The values of one step after the other as one array."""
    shape = np.broadcast_shapes(*(x.shape for x in row))
    return np.concatenate([x if x.shape == shape else np.broadcast_to(x, shape) for x in row], axis=1)
