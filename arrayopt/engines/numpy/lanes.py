"""The NumPy engine on small matrices side by side: see `arrayopt.fusion.lanes`.

Some matrices at a time are copied to an array of shape (R, C, matrices), all passes of a segment run on it, and what
has changed is copied back. Values per row are of shape (R, 1, matrices), per column (1, C, matrices), per matrix
(1, 1, matrices).
"""

import functools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from arrayopt.engines.threads import run
from arrayopt.fusion.graph import POSITION, Node
from arrayopt.fusion.lanes import Lanes, Segment
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.stages import Between, staged

__all__ = ["Matrices", "positions"]

Run = Callable[[int, dict[str, Any], dict[Node, Any], Callable[[Node, Any], Any]], dict[Node, Any]]
"""Pass k on arrays by name, with values that are known: what a function makes of the values of each reduction."""


def positions(cuts: Sequence[slice], steps: Sequence[int], first: Any) -> Any:
    """The positions of a block's elements: for each axis which indices it has, and how far these are apart."""
    at = (np.arange(cut.start, cut.stop) * step for cut, step in zip(cuts, steps, strict=True))
    made: Any = functools.reduce(operator.add, np.ix_(*at)) + first
    return made


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
    first : int
        The position of the first element.
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
        first: int,
        real: Any,
    ) -> None:
        self.plan, self.form, self.split, self.known, self.real = plan, staged(plan), split, known, real
        self.count, self.rows, self.columns, self.group = extents
        self.first = first
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

        for s in self.split.segments:
            self._between(s.before)
            self.parts = {x: np.empty(self.units) for k in s.passes for x in self.form.passes[k].reducing("tensor")}
            ends = [self.units * i // threads for i in range(threads + 1)]
            run([partial(some, s, lo, hi) for lo, hi in pairwise(ends)])
        self._between(self.split.after)

    def _between(self, b: Between) -> None:
        """Put partial results together, compute values per tensor, and store them."""
        self.known |= {r: float(REDUCTIONS[r.op].ufunc.reduce(self.parts[r])) for r in b.combine}
        with np.errstate(all="ignore"):
            for n in b.nodes:
                made = OPS[n.op].numpy(*(self._value(a, self.known) for a in n.args))
                self.known[n] = made.item() if isinstance(made, np.ndarray | np.generic) else made
        for name, n in b.stores.items():
            self.slots[name][...] = self._value(n, self.known)

    def _unit(self, s: Segment, u: int, pass_: Run) -> None:
        """A segment over some matrices."""
        ab = slice(u * self.group, min(self.count, (u + 1) * self.group))
        env = {n: self._take(self.arrays[name][ab]) for name, n in s.reads.items()}
        env |= {n: self._take(self.carried[n][ab]) for n in s.carried}
        env |= self.known
        planes: dict[str, Any] = {}
        for b, k in zip(s.small, (*s.passes, None), strict=True):
            for n in b.nodes:
                env[n] = self._small(n, env)
            if k is not None:
                p = self.form.passes[k]
                cuts, each = (slice(0, self.rows), slice(0, self.columns), ab), self.rows * self.columns
                env |= {n: positions(cuts, (self.columns, 1, each), self.first) for n in p.using(POSITION)}
                for name in set(p.arrays).difference(planes):
                    planes[name] = self._take(self.arrays[name][ab])
                for r, x in pass_(k, planes, env, _partial).items():
                    if r.axes:
                        env[r] = x
                    else:
                        self.parts[r][u] = x
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
        return _reduced(n, args[0]) if n.reduces else OPS[n.op].numpy(*args)


def _partial(r: Node, x: Any) -> Any:
    """A reduction of elements side by side; if it is of the whole tensor, this unit's part."""
    return _reduced(r, x) if r.axes else REDUCTIONS[r.op].ufunc.reduce(x, axis=None)


def _reduced(n: Node, x: Any) -> Any:
    """A reduction of values side by side."""
    return REDUCTIONS[n.op].ufunc.reduce(x, axis=_over(n.args[0], n), keepdims=True)


def _over(x: Node, n: Node) -> tuple[int, ...]:
    """Over which axes of x a reduction goes."""
    return tuple(i for i, axis in enumerate("RC") if axis in x.axes and axis not in n.axes)
