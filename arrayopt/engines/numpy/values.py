"""The computation between passes, on values over fewer axes than the elements. `SmallValues` has
the known values' shapes and rules of precision; `stacks.py` extends it by passes.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.numpy.blocks import DIMS, dims, reduced
from arrayopt.fusion.graph import Node, operands
from arrayopt.fusion.layout import read_elsewhere
from arrayopt.fusion.ops import OPS
from arrayopt.fusion.passes import Between, Pass, SmallLoop
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.scalars import straight

Readers = dict[Node | Between | Pass, list[Node]]
"""Values over rows or columns, by their last reader."""

REAL = frozenset({float, bool, np.float64, np.ndarray})
"""The types of real numbers, conditions and arrays of them."""


@dataclass(frozen=True, eq=False, slots=True)
class Setup:
    """What all chunks of a batch have in common."""

    plan: Plan
    """The plan."""
    storage: tuple[tuple[str, str], ...]
    """Stored arrays, and their dtypes."""
    real: Any
    """The dtype of arithmetic."""
    chunk: int
    """The approximate number of elements of a block."""
    scratch: threading.local
    """The memory of each thread for spilled values."""


@dataclass(frozen=True, eq=False, slots=True)
class Values:
    """The arrays and known values of some tensors in a step."""

    arrays: dict[str, Any]
    """Stored arrays by name."""
    known: dict[Node, Any]
    """Values over fewer axes: scalars of the step, and results so far."""

    def __getitem__(self, node: Node) -> Any:
        if node.op == "const":
            return node.data
        return self.known[node] if node in self.known else self.arrays[node.data]

    def drop(self, nodes: Sequence[Node]) -> None:
        """Forget values."""
        for node in nodes:
            self.known.pop(node, None)


class SmallValues:
    """Values of some tensors of one shape, over fewer axes than their elements.

    Parameters
    ----------
    setup : Setup
        What all chunks of a batch have in common.
    extents : sequence of int
        The number of tensors, and the lengths of A, B, R and C.
    firsts : array of int64
        The position of each tensor's first element.
    """

    each: tuple[int, ...] = (-1, 1, 1, 1, 1)  # the shape of a value per tensor

    def __init__(self, setup: Setup, extents: Sequence[int], firsts: Ints) -> None:
        self.setup, self.extents, self.firsts = setup, tuple(extents), firsts
        self.most, self.threads = setup.chunk, 1  # threads of a pass
        self.last = last_readers(setup.plan.between, setup.plan.passes)

    def shape(self, axes: str) -> tuple[int, ...]:
        """Return the shape of values over some axes."""
        out = [self.extents[0], 1, 1, 1, 1]
        for axis, i in zip(axes, dims(axes), strict=True):
            out[i] = self.extents[DIMS[axis.upper()]]
        return tuple(out)

    def _between(self, between: Between, partials: dict[Node, Any], values: Values) -> None:
        """Compute and store the values between two passes."""
        for reduction in between.combine:
            values.known[reduction] = partials.pop(reduction)
        for loop in between.loops:
            if loop.axes or loop.reduces or not self._scalars(loop, values):
                for node in loop.nodes:
                    values.known[node] = self._computed(node, values)
                    values.drop(self.last.get(node, ()))
        for name, node in between.stores.items():
            values.arrays[name][()] = values[node]
        values.drop(self.last.get(between, ()))

    def _scalars(self, loop: SmallLoop, values: Values) -> bool:
        """Compute values per tensor by one function, and return whether that was possible."""
        read, one = read_elsewhere(self.setup.plan), self.extents[0] == 1
        outer, results, function = straight(loop, read, numbers=one)
        known, given = values.known, list[Any](map(values.known.get, outer))
        kinds = {*map(type, given)}
        if not kinds <= {float, bool}:
            given = [values[node] for node in outer]
            for i, x in enumerate(given):
                if isinstance(x, np.ndarray):
                    real = x.dtype.kind in "fb"
                    given[i] = (x.item() if one and x.size == 1 else _wide(x)) if real else None
            kinds = {*map(type, given)}
        if not kinds <= REAL:
            return False
        numbers = one and kinds <= {float, bool}
        if one and not numbers:
            function = straight(loop, read, numbers=False).function
        try:
            made = function(*given)
        except (ZeroDivisionError, OverflowError):
            return False
        if numbers:
            known.update(zip(results, made, strict=True))
            return True
        stored = set(map(id, given))
        for node, value in zip(results, made, strict=True):
            if isinstance(value, np.ndarray):
                # copied, because the array that it is, or is a view of, may be overwritten
                shares = value.base is not None or id(value) in stored
                known[node] = value.copy() if shares else value
            else:
                known[node] = value.item() if isinstance(value, np.generic) else value
        return True

    def _computed(self, node: Node, values: Values) -> Any:
        """Compute a value over fewer axes than the elements; those per tensor in float64."""
        args = [values[arg] for arg in node.args]
        if node.reduces:
            (made,) = args
            gone = "".join(axis for axis in node.args[0].axes if axis not in node.axes)
            for axis in dims(gone):
                made = reduced(node, made, axis)
        else:
            # With several tensors, values per tensor are arrays in float64. Those of one tensor are
            # too, so that bits do not depend on which tensors are processed together.
            fit = self._narrowed if node.axes else _wide
            made = OPS[node.op].numpy(*map(fit, args))
            if isinstance(made, np.ndarray) and (
                made.base is not None or any(made is x for x in args)
            ):
                made = made.copy()
        if node.axes:
            return made.astype(self.setup.real, copy=False) if node.kind == "real" else made
        return made if np.ndim(made) else made.item()

    def _narrowed(self, value: Any) -> Any:
        """Convert a float64 array to the dtype of arithmetic; return other values as they are."""
        double = isinstance(value, np.ndarray) and value.dtype == np.float64
        return np.asarray(value, self.setup.real) if double else value


@lru_cache(maxsize=64)
def small_inputs(plan: Plan) -> set[Node]:
    """Return the slots with a number per tensor that are read between passes."""
    return {x for x in operands(plan.between_nodes) if x.op == "input" and not x.axes}


@lru_cache(maxsize=64)
def last_readers(
    every: tuple[Between, ...], passes: tuple[Pass, ...], kept: frozenset[Node] = frozenset()
) -> Readers:
    """Return the values over rows or columns that are not `kept`, by last reader."""
    readers = dict[Node, Node | Between | Pass]()
    for between, pass_ in zip_longest(every, passes):
        for loop in between.loops:
            for node in loop.nodes:
                readers |= dict.fromkeys(node.args, node)
        readers |= dict.fromkeys(between.stores.values(), between)
        if pass_ is not None:
            readers |= dict.fromkeys(pass_.uses, pass_)
    found = dict[Node | Between | Pass, list[Node]]()
    for node, reader in readers.items():
        if node.axes and node not in kept:
            found.setdefault(reader, []).append(node)
    return found


def _wide(value: Any) -> Any:
    """Convert a value per tensor to double precision if it is an array."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fc":
        return value.astype(np.result_type(value, np.float64), copy=False)
    return value
