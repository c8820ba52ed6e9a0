"""Products of matrices between the launches of a step: which calls of cuBLAS they take."""

from collections.abc import Iterator

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.cuda.cublas import Call, strided
from arrayopt.fusion.layout import GEOMETRY, extent
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.products import multiplied

__all__ = ["calls_of", "scratch_starts"]


def scratch_starts(plan: Plan, geo: Ints) -> dict[str, tuple[Ints, int]]:
    """Where the scratch arrays of each tensor begin in one for all, in elements, and how many elements that has.

    Tensors of equal shape follow each other, so that what is done with their matrices is one call.
    """
    order = np.lexsort(geo[:, [GEOMETRY.index(x) for x in "ABRC"]].T)
    found = {}
    for name in plan.spilled:
        sizes = -(-extent(plan.extents[name], geo)[order] // 4) * 4
        starts = np.empty_like(sizes)
        starts[order] = np.cumsum(sizes) - sizes
        found[name] = starts, int(sizes.sum())
    return found


def calls_of(plan: Plan, dtype: str, geo: Ints, at: dict[str, Ints], rows: Ints) -> list[list[Call]]:
    """For each pass of a plan the calls that make it: none, where it is a kernel's. One more has what follows: none.

    Parameters
    ----------
    plan : Plan
        The plan.
    dtype : str
        The dtype of arithmetic.
    geo : array of int64
        `GEOMETRY` of each tensor.
    at : dict of str to array of int64
        The addresses of each tensor's scratch arrays.
    rows : array of int64
        The tensors that take part, all with elements.
    """
    shapes, which = np.unique(geo[rows][:, [GEOMETRY.index(x) for x in "ABRC"]], axis=0, return_inverse=True)
    alike = [rows[which.ravel() == i] for i in range(len(shapes))]
    made: list[list[Call]] = []
    for p in plan.passes:
        calls = []
        for shape, members in zip(shapes.tolist() if p.multiplies else [], alike, strict=False):
            sides = dict(zip("ABRC", shape, strict=True))
            (n,), names = p.nodes, [*p.loads, *p.stores]
            length = multiplied(n)[-1]
            extents = tuple(sides[x.upper()] for x in (*n.axes[-2:], length))
            operands = [(names[0], n.args[0].axes), (names[-2], n.args[1].axes), (names[-1], n.axes)]
            places = [_each(at[name][members], sides, axes, np.dtype(dtype).itemsize) for name, axes in operands]
            for first, distances, count in _runs(np.stack(places, axis=1)):
                lie = zip(first, [d // np.dtype(dtype).itemsize for d in distances], strict=True)
                calls.append(strided(dtype, n.data[:2], extents, list(lie), count))
        made.append(calls)
    return [*made, []]


def _each(addresses: Ints, sides: dict[str, int], axes: str, size: int) -> Ints:
    """The addresses of all matrices of some tensors, in order."""
    count, apart = sides["A"] * sides["B"], sides[axes[-2].upper()] * sides[axes[-1].upper()] * size
    return (addresses[:, None] + np.arange(count) * apart).ravel()


def _runs(places: Ints) -> Iterator[tuple[list[int], list[int], int]]:
    """Rows of addresses in stretches at equal distances: the first of each, the distances, and how many they are."""
    steps = np.diff(places, axis=0)
    changes = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
    first = 0
    while first < len(places):
        after = changes[np.searchsorted(changes, first, "right") :]
        last = int(after[0]) if len(after) else len(places) - 1
        distances = steps[first] if last > first else np.zeros(places.shape[1], np.int64)
        yield places[first].tolist(), distances.tolist(), last - first + 1
        first = last + 1
