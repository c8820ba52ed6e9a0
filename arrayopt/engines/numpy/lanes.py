"""The NumPy engine on small matrices side by side: see `arrayopt.fusion.lanes`.

Some matrices at a time are copied to an array of shape (R, C, matrices), all passes of a segment run on it, and what
has changed is copied back. Values per row are of shape (R, 1, matrices), per column (1, C, matrices), per matrix
(1, 1, matrices).
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from arrayopt.engines.threads import run
from arrayopt.fusion.graph import Node
from arrayopt.fusion.lanes import Lanes, Segment
from arrayopt.fusion.ops import OPS
from arrayopt.fusion.plan import Pass, Plan

__all__ = ["Matrices"]

Run = Callable[[int, dict[str, Any], dict[Node, Any]], dict[Node, Any]]
"""Pass k on arrays by name, with values that are known: the values of the elements."""


class Matrices:
    """One tensor that is worked through in segments.

    Parameters
    ----------
    plan : Plan
        The plan.
    split : Lanes
        The plan in segments.
    arrays : dict of str to array
        Parameter, gradient and slots.
    known : dict of Node to number
        Scalars of the step; values per tensor are added.
    extents : tuple of int
        Matrices, rows, columns, and matrices of a unit.
    real : dtype
        The dtype of arithmetic.
    """

    def __init__(
        self,
        plan: Plan,
        split: Lanes,
        arrays: dict[str, Any],
        known: dict[Node, Any],
        extents: tuple[int, int, int, int],
        real: Any,
    ) -> None:
        self.plan, self.split, self.known, self.real = plan, split, known, real
        self.count, self.rows, self.columns, self.group = extents
        self.units = -(-self.count // self.group)
        axes = {"p": plan.element, "g": plan.element} | plan.slots
        self.arrays = {name: x.reshape(self._shape(axes[name])) for name, x in arrays.items() if axes[name]}
        self.slots = {name: x for name, x in arrays.items() if not axes[name]}
        self.carried = {n: np.empty(self._shape(n.axes), real) for n in split.where.vectors}
        self.parts: dict[Node, Any] = {}

    def _shape(self, axes: str) -> tuple[int, int, int]:
        """The shape of values over some axes, with all matrices in the first."""
        return self.count, self.rows if "R" in axes else 1, self.columns if "C" in axes else 1

    def run(self, pass_: Run, threads: int) -> None:
        """All segments."""

        @np.errstate(all="ignore")
        def some(s: Segment, lo: int, hi: int) -> None:
            for u in range(lo, hi):
                self._unit(s, u, pass_)

        sums: list[Node] = []
        for s in self.split.segments:
            self._between(s.before, sums)
            sums = [x for k in s.passes for x in self.plan.passes[k].sums if not x.axes]
            self.parts = {x: np.empty(self.units) for x in sums}
            ends = [self.units * i // threads for i in range(threads + 1)]
            run([partial(some, s, lo, hi) for lo, hi in pairwise(ends)])
        self._between(self.split.after, sums)
        for name, n in self.plan.small.items():
            if not self.plan.slots[name]:
                self.slots[name][...] = self._value(n, self.known)

    def _between(self, nodes: tuple[Node, ...], sums: list[Node]) -> None:
        """Add partial sums up and compute values per tensor."""
        self.known |= {s: float(np.add.reduce(self.parts[s])) for s in sums}
        with np.errstate(all="ignore"):
            for n in nodes:
                made = OPS[n.op].numpy(*(self._value(a, self.known) for a in n.args))
                self.known[n] = made.item() if isinstance(made, np.ndarray | np.generic) else made

    def _unit(self, s: Segment, u: int, pass_: Run) -> None:
        """A segment over some matrices."""
        ab = slice(u * self.group, min(self.count, (u + 1) * self.group))
        env = {n: self._take(self.arrays[name][ab]) for name, n in s.reads.items()}
        env |= {n: self._take(self.carried[n][ab]) for n in s.carried}
        env |= self.known
        planes: dict[str, Any] = {}
        for part, k in zip(s.small, (*s.passes, None), strict=True):
            for n in part:
                env[n] = self._small(n, env)
            if k is not None:
                p = self.plan.passes[k]
                for name in {*p.loads, *p.stores}.difference(planes):
                    planes[name] = self._take(self.arrays[name][ab])
                self._sums(p, pass_(k, planes, env), env, u)
        for k in s.passes:
            for name in self.plan.passes[k].stores:
                self.arrays[name][ab] = planes[name].transpose(2, 0, 1)
        for name, n in s.writes.items():
            self.arrays[name][ab] = env[n].transpose(2, 0, 1)
        for n in set(self.carried).intersection(env).difference(s.carried):
            self.carried[n][ab] = env[n].transpose(2, 0, 1)

    def _take(self, x: Any) -> Any:
        """Some matrices, the first axis last, in the dtype of arithmetic and an array of its own."""
        return x.transpose(1, 2, 0).astype(self.real, order="C")

    def _value(self, n: Node, env: dict[Node, Any]) -> Any:
        """A constant, a slot that is one number, or what has been computed."""
        return n.data if n.op == "const" else self.slots[n.data] if n.op == "input" and n not in env else env[n]

    def _small(self, n: Node, env: dict[Node, Any]) -> Any:
        """A value per row, column or matrix."""
        args = [self._value(a, env) for a in n.args]
        return OPS[n.op].numpy(*args) if n.op != "sum" else args[0].sum(axis=_over(n.args[0], n), keepdims=True)

    def _sums(self, p: Pass, got: dict[Node, Any], env: dict[Node, Any], u: int) -> None:
        """The sums of a pass over some matrices."""
        for s in p.sums:
            if s.axes:
                env[s] = got[s.args[0]].sum(axis=_over(s.args[0], s), keepdims=True)
            else:
                self.parts[s][u] = got[s.args[0]].sum()


def _over(x: Node, n: Node) -> tuple[int, ...]:
    """Over which axes of x a sum goes."""
    return tuple(i for i, axis in enumerate("RC") if axis in x.axes and axis not in n.axes)
