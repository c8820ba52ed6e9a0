"""A traced rule over all steps at once: only what goes from step to step is computed one step after the other.

Values are arrays of shape (sets, steps, tensors, *elements), or with ones there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
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


@dataclass(frozen=True, eq=False)
class _Loop:
    """Slots whose new values depend on each other's old ones.

    Attributes
    ----------
    old, new : dict of str to Node
        Their old and their new values, by name.
    nodes : list of Node
        What is computed of the old ones on the way to the new ones.
    """

    old: Mapping[str, Node]
    new: Mapping[str, Node]
    nodes: Sequence[Node]

    @property
    def reads(self) -> set[Node]:
        """What must be there before."""
        asked = {*self.new.values(), *(a for n in self.nodes for a in n.args)}
        return asked - {*self.old.values(), *self.nodes}


class Sweep:
    """A graph, and the order in which it is computed.

    Parameters
    ----------
    made : Trace
        The graph.
    nodes : list of Node
        All that is computed of arrays, arguments first.
    """

    def __init__(self, made: Trace, nodes: Sequence[Node]) -> None:
        self._made = made
        old = {n.data: n for n in nodes if n.op == "input" and n.data in made.slots}
        loops = _loops(nodes, old, made.outputs)
        unit: dict[Node, Node | _Loop] = {n: n for n in nodes}
        for loop in loops:
            unit |= dict.fromkeys([*loop.old.values(), *loop.nodes], loop)
        reads = {x: x.reads if isinstance(x, _Loop) else set(x.args) for x in unit.values()}
        asked = {x: {unit[a] for a in found if a in unit} for x, found in reads.items()}
        self._order = list(TopologicalSorter(asked).static_order())
        last = {n: i for i, x in enumerate(self._order) for n in reads[x]}
        last.pop(made.outputs["p"], None)
        self._done: list[list[Node]] = [[] for _ in self._order]
        for n, i in last.items():
            self._done[i].append(n)
        self._asked = {made.outputs["p"], *(n for found in reads.values() for n in found)}

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

        Parameters
        ----------
        p, g : array
            Parameters before each step, and gradients.
        slots : dict of str to array
            Before the first step, of shape (1, 1, tensors, *elements).
        known : dict of Node to array
            What follows from numbers.
        took : array of bool, shape (steps, tensors, *ones)
            Whether a step has a gradient of a tensor.
        mask : array of bool, optional
            The elements that count, of shape (1, 1, tensors, *elements).
        state : str
            What slots are stored in, if not in what the rule says.
        """
        values, given = dict(known), {"p": p, "g": g}
        for x, done in zip(self._order, self._done, strict=True):
            if isinstance(x, _Loop):
                values |= self._looped(x, values, slots, took, mask, state)
            elif x.op == "input":
                values[x] = given[x.data]
            else:
                values[x] = self._one(x, values, mask)
            for n in done:
                del values[n]
        return values[self._made.outputs["p"]]

    def _looped(
        self,
        loop: _Loop,
        values: Mapping[Node, Values],
        slots: Mapping[str, Values],
        took: Values,
        mask: Values | None,
        state: str,
    ) -> dict[Node, Values]:
        """Step after step."""
        outer = {n: values[n] for n in loop.reads}
        rows: dict[Node, list[Values]] = {n: [] for n in (*loop.old.values(), *loop.nodes) if n in self._asked}
        now = {name: slots[name] for name in loop.old}
        for s, took_now in enumerate(took):
            at = {n: x if x.shape[1] == 1 else x[:, s : s + 1] for n, x in outer.items()}
            at |= {n: now[name] for name, n in loop.old.items()}
            for n in loop.nodes:
                at[n] = self._one(n, at, mask)
            for n, row in rows.items():
                row.append(at[n])
            for name, n in loop.new.items():
                dtype = state or self._made.storage[name]
                new = rounded(at[n], dtype) if dtype in NARROW else at[n]
                now[name] = new if took_now.all() else np.where(took_now, new, now[name])
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


def _loops(nodes: Sequence[Node], old: Mapping[str, Node], new: Mapping[str, Node]) -> list[_Loop]:
    """The slots, sorted into loops."""
    leads: dict[Node, set[Node]] = {n: set() for n in old.values()}  # of each old value, what depends on it
    for first, found in leads.items():
        found.add(first)
        for n in nodes:
            if any(a in found for a in n.args):
                found.add(n)
    reach = {name: {name} for name in old}  # of each slot those that depend on it in one step, or in several
    for _ in old:
        for name in old:
            reach[name] |= {b for a in reach[name] for b in old if new[b] in leads[old[a]]}
    made: list[_Loop] = []
    done: set[str] = set()
    for name in old:
        if name in done:
            continue
        group = {a for a in reach[name] if name in reach[a]}
        done |= group
        ahead: set[Node] = set().union(*(leads[old[a]] for a in group))
        back: set[Node] = {new[a] for a in group}
        for n in reversed(nodes):
            if n in back:
                back |= set(n.args)
        inside = [n for n in nodes if n in ahead and n in back and n.op != "input"]
        made.append(_Loop({a: old[a] for a in group}, {a: new[a] for a in group}, inside))
    return made


def _put_together(row: Sequence[Values]) -> Values:
    """The values of one step after the other as one array."""
    shape = np.broadcast_shapes(*(x.shape for x in row))
    return np.concatenate([x if x.shape == shape else np.broadcast_to(x, shape) for x in row], axis=1)
