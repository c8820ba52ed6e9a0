"""`Problem`: the function that is minimized, with its point as a dict of arrays, and its results checked."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from arrayopt.arrays import (
    Array,
    copied,
    detached,
    dtype_name,
    is_array,
    kind,
    library,
    place,
    size,
    to_host,
    working_dtype,
    writable,
)
from arrayopt.hyper import is_number
from arrayopt.params.given import named_params
from arrayopt.params.grads import match_grads
from arrayopt.params.kinds import refusal
from arrayopt.params.trees import leaves, rebuild, template
from arrayopt.rules import Rule
from arrayopt.rules.lbfgs import LBFGS, MOST_FUSED
from arrayopt.solving.ranks import One

Point = dict[str, Array]
"""The arrays of a point, or their gradients, by name."""

WORTH_COMPILING = 1 << 16
"""For fewer unknowns L-BFGS is not compiled, because compilation takes seconds."""


class Problem:
    """A function `f` of a tree of arrays, and its start.

    With `stacked`, the first axis of all arrays counts problems. With `joint`, several arrays of one dtype are
    concatenated to one vector for rules. `ranks` evaluate the function.

    Attributes
    ----------
    named : list of (str, array)
        The leaves of the tree, with their names.
    arrays : dict of str to array
        Copies of the start, in the form for rules.
    count : int or None
        The number of problems with `stacked`, else None.
    xp, real : namespace and dtype
        The library of values and their dtype.
    plain : bool
        Whether the value is a scalar of NumPy.
    """

    def __init__(
        self, f: Callable[[Any], Any], params: Any, *, stacked: bool, joint: bool, ranks: One
    ) -> None:
        if not callable(f):
            raise TypeError(
                f"minimize: `f` must be a function f(params) -> (value, grads); got {f!r:.60}"
            )
        self._f, self._tree, self.named = f, params, named_params(params, "minimize")
        self.ranks = ranks
        first = self.named[0][1]
        self.xp, self._device = place(first)
        self.real = working_dtype(self.xp, first, real=True)
        self.count: int | None = None
        if stacked:
            self.count = self._counted()
        # by name, since CuPy's devices cannot be hashed
        if len({(library(x), str(place(x)[1])) for _, x in self.named}) > 1:
            listed = ", ".join(f"{name!r} {_said(x)} on {place(x)[1]}" for name, x in self.named)
            raise ValueError(f"minimize: params must be of one library and device; got {listed}")
        dtypes = {dtype_name(x) for _, x in self.named}
        self._joined = joint and len(self.named) > 1 and len(dtypes) == 1
        self.arrays = self.given([copied(detached(x)) for _, x in self.named])
        self.plain = self.count is None and library(first) == "numpy"
        self._template = template(params)
        self._forms = [(x.dtype, x.shape) for _, x in self.named]

    def _counted(self) -> int:
        """The number of problems; ValueError if arrays have different numbers."""
        counts = {name: tuple(x.shape)[:1] for name, x in self.named}
        if len(set(counts.values())) != 1 or () in counts.values():
            listed = ", ".join(f"{name!r} {tuple(x.shape)}" for name, x in self.named)
            raise ValueError(
                "minimize: with `stacked`, the first axis of all params must have one length, the number of problems;"
                f" got {listed}"
            )
        return int(self.named[0][1].shape[0])

    def _end_to_end(self, leaves: list[Array]) -> Array:
        """Concatenate the elements of several arrays, for each problem."""
        lead = () if self.count is None else (self.count,)
        shapes = [(*lead, math.prod(x.shape[len(lead) :])) for x in leaves]
        flat = [self.xp.reshape(x, shape) for x, shape in zip(leaves, shapes, strict=True)]
        return self.xp.concat(flat, axis=-1)

    def tree(self, point: Point) -> Any:
        """Convert a point to a tree with the structure of the start."""
        arrays = list(point.values())
        if self._joined:
            packed, arrays, start = arrays[0], [], 0
            lead = 0 if self.count is None else 1
            for _, x in self.named:
                shape = tuple(x.shape)
                end = start + math.prod(shape[lead:])
                arrays.append(self.xp.reshape(packed[..., start:end], shape))
                start = end
        leaves = iter(arrays)
        return rebuild(self._tree, lambda leaf: leaf if leaf is None else next(leaves))

    def __call__(self, point: Point, *, apart: bool = False) -> tuple[Array, Point]:
        """Evaluate; return the value (0-d, or one per problem) and gradients by the names of arrays.

        `f` may write to its point, and may return the same gradient arrays each time. Pass
        ``apart=True`` for copies of both, if they are used after the next call.
        """
        point = fresh(point) if apart else point
        value, grads = self.ranks.evaluated(lambda: self._evaluated(point))
        found = dict(zip(point, grads, strict=True))
        value = value[()] if self.plain else value
        return value, fresh(found) if apart else found

    def _evaluated(self, point: Point) -> tuple[Array, list[Array]]:
        """Evaluate the function of this rank, and check what it returns."""
        found = self._f(self.tree(point))
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(
                f"minimize: `f` must return a value and gradients, as in return value, grads; got {_said(found)}"
            )
        return self._value(found[0]), list(self.given(self._matched(found[1])).values())

    def _matched(self, found: Any) -> list[Array]:
        """Check gradients, and return them in the order of the leaves."""
        grads = leaves(self._template, found) or []
        forms = [(x.dtype, x.shape) if type(x) is np.ndarray else None for x in grads]
        if forms == self._forms:
            return grads
        matched = match_grads("minimize: the result of `f`", self.named, found)
        missing = [name for name, g in matched.items() if g is None]
        if missing:
            raise ValueError(f"minimize: `f` must return a gradient of {missing[0]!r}; got None")
        return [detached(g) for g in matched.values()]

    def given(self, leaves: list[Array]) -> Point:
        """Convert arrays like the leaves of the tree to the form for rules."""
        if self._joined:
            return {"params": self._end_to_end(leaves)}
        return {name: leaf for (name, _), leaf in zip(self.named, leaves, strict=True)}

    def _way_out(self, shape: tuple[int, ...]) -> str:
        """Advice for a value of the wrong shape."""
        if self.count is not None:
            return "; sum over all axes but the first"
        if len(shape) == 1 and all(tuple(x.shape)[:1] == shape for _, x in self.named):
            return "; return its sum, or pass stacked=True if each is the value of a problem of its own"
        return "; return its sum"

    def _value(self, value: Any) -> Array:
        """Check the returned value, and convert it to an array of the parameters' library."""
        if self.plain and is_number(value):
            return self.real(value)
        shape = () if self.count is None else (self.count,)
        wanted = (
            "one real number" if self.count is None else f"an array of {self.count} real numbers"
        )
        if is_number(value):
            value = self.xp.asarray(float(value), dtype=self.real, device=self._device)
        elif not is_array(value) or kind(value) == "complex" or dtype_name(value) == "bool":
            raise TypeError(f"minimize: `f` must return {wanted} as the value; got {_said(value)}")
        elif why := refusal(value, functional=True):
            raise TypeError(f"minimize: the value that `f` returned is {why}")
        if tuple(value.shape) != shape:
            raise ValueError(
                f"minimize: `f` must return {wanted} as the value; got {_said(value)}"
                f"{self._way_out(tuple(value.shape))}"
            )
        value = detached(value)
        if place(value) != (self.xp, self._device):
            return self.xp.asarray(to_host(value), dtype=self.real, device=self._device)
        return self.xp.astype(value, self.real)


def fresh(point: Point) -> Point:
    """Copy arrays that can be written; return others as they are."""
    return {name: copied(x) if writable(x) else x for name, x in point.items()}


def _said(x: Any) -> str:
    """Describe an object in few words."""
    if is_array(x):
        return f"a {library(x)} array of shape {tuple(x.shape)} and dtype {dtype_name(x)}"
    several = f" of {len(x)}" if isinstance(x, tuple | list) else ""
    return "None" if x is None else f"a {type(x).__name__}{several}"


def engine_for(rule: Rule, problem: Problem) -> str:
    """The engine for ``"auto"``; it depends on the size of one problem."""
    first = next(iter(problem.arrays.values()))
    owner = library(first)
    if owner == "cupy" or "cuda" in str(place(first)[1]):
        return "auto"
    if not isinstance(rule, LBFGS):
        return "auto"
    unknowns = sum(size(x) for x in problem.arrays.values()) // max(problem.count or 1, 1)
    small = unknowns < WORTH_COMPILING
    if rule.memory > MOST_FUSED or (small and owner != "numpy"):
        return "array_api"
    return "numpy" if small else "auto"
