"""The calls of cuBLAS between launches, and a layout of scratch memory that makes them few.
`Table` allocates by `scratch_starts`; `Launcher` gets the calls from `calls_of`."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.codecs import CODECS
from arrayopt.engines.cuda.cublas import Call, StridedProducts, strided_call
from arrayopt.fusion.layout import extent
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.plan import Plan


def scratch_starts(plan: Plan, geo: Any) -> dict[str, tuple[Ints, int]]:
    """Where the part of each tensor begins in each scratch array, and the size of that array.

    Parts begin at multiples of 16 bytes. Tensors of equal shape are consecutive, so that one call
    computes their products.
    """
    order = np.lexsort([geo[x] for x in "ABRC"])
    found = {}
    for name, value in plan.spilled.items():
        sizes = -(-extent(value.axes, geo)[order] // 8) * 8
        starts = np.empty_like(sizes)
        starts[order] = np.cumsum(sizes) - sizes
        found[name] = starts, int(sizes.sum())
    return found


def calls_of(plan: Plan, dtype: str, geo: Any, at: dict[str, Ints], rows: Ints) -> list[list[Call]]:
    """The calls for each pass of a plan: none if a kernel runs it; then an empty list for its end.

    `at` has the addresses of scratch arrays. The tensors in `rows` take part; none is empty.
    """
    if not plan.multiplies:
        return [[] for _ in (*plan.passes, None)]
    sides = np.stack([geo[x][rows] for x in "ABRC"], axis=1)
    shapes, which = np.unique(sides, axis=0, return_inverse=True)
    alike = []
    for i, shape in enumerate(shapes.tolist()):
        alike.append((dict(zip("ABRC", shape, strict=True)), rows[which.ravel() == i]))
    made: list[list[Call]] = []
    for p in plan.passes:
        kind = plan.storage[next(iter(p.stores))] if p.multiplies else dtype
        found: list[StridedProducts] = []
        for extents, members in alike if p.multiplies else ():
            found += _strided(p, extents, members, at, kind)
        made.append([strided_call(kind, x) for x in found])
    return [*made, []]


def _strided(
    p: Pass, sides: dict[str, int], members: Ints, at: dict[str, Ints], dtype: str
) -> Iterator[StridedProducts]:
    """Yield the products of a pass over tensors of one shape, in groups at equal distances."""
    (node,), names, size = p.nodes, [*p.loads, *p.stores], CODECS[dtype].itemsize
    transposed = node.data.left_transposed, node.data.right_transposed
    rows, columns, length = (sides[x.upper()] for x in (*node.axes[-2:], node.multiplied[-1]))
    places = list[Ints]()
    for name, matrix in zip((names[0], names[-2], names[-1]), (*node.args, node), strict=True):
        places.append(_each(at[name][members], sides, matrix.axes, size))
    for first, distances, count in _runs(np.stack(places, axis=1)):
        yield StridedProducts(transposed, (rows, columns, length), first, distances, count)


def _each(addresses: Ints, sides: dict[str, int], axes: str, size: int) -> Ints:
    """The addresses of all matrices of these tensors, in order."""
    count, far = sides["A"] * sides["B"], sides[axes[-2].upper()] * sides[axes[-1].upper()] * size
    return (addresses[:, None] + np.arange(count) * far).ravel()


def _runs(places: Ints) -> Iterator[tuple[Any, Any, int]]:
    """Divide rows into runs at equal distances; yield the first row, the distances, the length."""
    steps = np.diff(places, axis=0)
    changes = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
    first = 0
    while first < len(places):
        after = changes[np.searchsorted(changes, first, "right") :]
        last = int(after[0]) if len(after) else len(places) - 1
        distances = steps[first] if last > first else np.zeros(places.shape[1], np.int64)
        yield tuple(places[first].tolist()), tuple(distances.tolist()), last - first + 1
        first = last + 1
