"""Functions for rules in a rotated basis: eigenvectors of averages of g gᵀ, and their updates."""

from importlib.util import find_spec
from typing import Any

import numpy as np

from arrayopt.arrays import Array, dtype_name

SEEN = 100.0
"""A number counts as zero if it is at most this many times the dtype's eps times the largest one of its matrix."""

LARGE = 256
"""Matrices with at least this many rows are large; see `_is_large`."""


def first_basis(xp: Any, a: Array) -> Array:
    """The eigenvectors of each symmetric matrix along the last two axes, as columns, by decreasing eigenvalues.

    Those of eigenvalues that count as zero are noise, and are replaced: see `_basis`.
    """
    values, q = xp.linalg.eigh(xp.where(xp.isfinite(a), a, 0.0))
    values, q = xp.flip(values, axis=-1), xp.flip(q, axis=-1)
    q = _basis(xp, _where(xp, _seen(xp, values), q))
    return q + 0.0 * xp.sum(a, axis=(-2, -1), keepdims=True)  # NaN where a is not finite


def next_basis(xp: Any, a: Array, q: Array) -> tuple[Array, Array]:
    """A step of power iteration from a basis q (arXiv:2409.11321, algorithm 4), and the order of its columns in q.

    Columns are in the order of decreasing qᵀ a q, as in the authors' code. Columns of a q that depend linearly on
    earlier ones are last, and are replaced: see `_basis`.
    """
    s = xp.matmul(a, q)
    size = xp.sum(q * s, axis=-2)
    order = xp.argsort(xp.where(_seen(xp, size), size, 0.0), axis=-1, descending=True, stable=True)
    s = _taken(xp, s, order)
    if _is_large(s) and np.isfinite(size).all():
        return _large_basis(s, order)
    q, r = xp.linalg.qr(s)
    seen = _seen(xp, xp.abs(xp.linalg.diagonal(r)))
    if isinstance(s, np.ndarray) and seen.all():  # the lines below would change nothing
        return _signed(xp, q), order
    last = xp.argsort(xp.where(seen, 0.0, 1.0 + 0.0 * size), axis=-1, stable=True)
    s = _taken(xp, _where(xp, seen, s), last)
    return _basis(xp, s), xp.take_along_axis(order, last, axis=-1)


def _seen(xp: Any, x: Array) -> Array:
    """Which values do not count as zero, compared with the largest one of their matrix."""
    eps = float(np.finfo(dtype_name(x)).eps)
    return x > SEEN * eps * xp.max(x, axis=-1, keepdims=True)


def _where(xp: Any, columns: Array, x: Array) -> Array:
    """Set all other columns of matrices to zero."""
    return xp.where(xp.expand_dims(columns, axis=-2), x, 0.0)


def _taken(xp: Any, x: Array, order: Array) -> Array:
    """Reorder the columns of matrices."""
    return xp.take_along_axis(x, xp.expand_dims(order, axis=-2), axis=-1)


def _basis(xp: Any, x: Array) -> Array:
    """Orthonormalize the columns of each matrix, one after the other; the last ones may be zero.

    In Householder's QR a column of zeros takes no reflection. So it is replaced by a unit vector after the reflections
    of the others, which is the same in every library, whatever the signs of the others. Signs are chosen such that
    Σ qᵢ/i is not negative for each column q.
    """
    return _signed(xp, _reflected(*_reflections(x, _leading(x, 0.0))) if _is_large(x) else xp.linalg.qr(x)[0])


def _signed(xp: Any, q: Array) -> Array:
    """Give the columns of q the signs of `_basis`."""
    rows = xp.cumulative_sum(xp.ones_like(xp.sum(q, axis=-1, keepdims=True)), axis=-2)
    total = xp.sum(q / rows, axis=-2, keepdims=True)
    return q * xp.where(total < 0, -1.0, xp.ones_like(total))


def _is_large(s: Array) -> bool:
    """Whether to use SciPy's LAPACK: NumPy's `qr` computes in double precision, and returns all of r."""
    return isinstance(s, np.ndarray) and s.ndim == 2 and len(s) >= LARGE and find_spec("scipy") is not None


def _large_basis(s: Array, order: Array) -> tuple[Array, Array]:
    """The end of `next_basis` for large matrices, in the dtype of s; replaced columns cost only their part of q."""
    count = _leading(s, SEEN * float(np.finfo(s.dtype).eps))
    packed, tau = _reflections(s, count)
    seen = _seen(np, np.abs(np.diagonal(packed)))
    if not seen.all():
        last = np.argsort(~seen, stable=True)
        order, count = order[last], int(seen.sum())
        packed, tau = _reflections(s[:, last[:count]], count)
    return np.ascontiguousarray(_signed(np, _reflected(packed, tau))), order


def _leading(x: Array, least: float) -> int:
    """The number of columns without the last ones whose norms are at most `least` times that of the first.

    A column's norm bounds its entry on the diagonal of r; and r has that of the first column.
    """
    scaled = x / (max(x.max(), -x.min()) or 1.0)
    norms = np.sqrt(np.einsum("ij,ij->j", scaled, scaled))
    return 1 + int(np.flatnonzero(norms > least * norms[0]).max(initial=0))


def _reflections(x: Array, count: int) -> tuple[Array, Array]:
    """Householder's QR of the first columns, packed in a square matrix as by LAPACK, and the scales of reflections."""
    from scipy.linalg import get_lapack_funcs

    geqrf = get_lapack_funcs("geqrf", (x,))
    packed = np.zeros((len(x), len(x)), x.dtype, order="F")
    packed[:, :count], tau = _work(geqrf, x[:, :count])
    return packed, tau


def _reflected(packed: Array, tau: Array) -> Array:
    """The orthonormal matrix of reflections."""
    from scipy.linalg import get_lapack_funcs

    orgqr = get_lapack_funcs("orgqr", (packed,))
    return _work(orgqr, packed, tau, overwrite_a=True)[0]


def _work(function: Any, *args: Array, **how: Any) -> tuple[Any, Any]:
    """The first two results of a LAPACK function, called with the work space that it asks for."""
    room = int(function(*args, lwork=-1)[-2][0])
    return function(*args, lwork=room, **how)[:2]  # type: ignore[no-any-return]
