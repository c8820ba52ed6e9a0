"""Words for rules that work in a rotated basis: eigenvectors of averages of g gᵀ, and how they are followed."""

from importlib.util import find_spec
from typing import Any

import numpy as np

from arrayopt.arrays import Array, dtype_name

SEEN = 100.0
"""A number counts as zero up to so many times the dtype's eps times the largest beside it."""

LARGE = 256
"""Matrices of so many rows are large."""


def first_basis(xp: Any, a: Array) -> Array:
    """The eigenvectors of each symmetric matrix along the last two axes, as columns, by falling eigenvalues.

    Those of eigenvalues that count as zero are noise, and are chosen anew: see `_basis`.
    """
    values, q = xp.linalg.eigh(xp.where(xp.isfinite(a), a, 0.0))
    values, q = xp.flip(values, axis=-1), xp.flip(q, axis=-1)
    q = _basis(xp, _where(xp, _seen(xp, values), q))
    return q + 0.0 * xp.sum(a, axis=(-2, -1), keepdims=True)  # NaN where a is not finite


def next_basis(xp: Any, a: Array, q: Array) -> tuple[Array, Array]:
    """A step of power iteration from a basis q (arXiv:2409.11321, algorithm 4); and the order of its columns in q.

    Columns come in the order of falling qᵀ a q, as in the authors' code; those for which a q depends on the columns
    before them come last, and are chosen anew: see `_basis`.
    """
    s = xp.matmul(a, q)
    size = xp.sum(q * s, axis=-2)
    order = xp.argsort(xp.where(_seen(xp, size), size, 0.0), axis=-1, descending=True, stable=True)
    s = _taken(xp, s, order)
    if _is_large(s) and np.isfinite(size).all():
        return _large_basis(s, order)
    q, r = xp.linalg.qr(s)
    seen = _seen(xp, xp.abs(xp.linalg.diagonal(r)))
    if isinstance(s, np.ndarray) and seen.all():  # what is below would make the same again
        return _signed(xp, q), order
    last = xp.argsort(xp.where(seen, 0.0, 1.0 + 0.0 * size), axis=-1, stable=True)
    s = _taken(xp, _where(xp, seen, s), last)
    return _basis(xp, s), xp.take_along_axis(order, last, axis=-1)


def _seen(xp: Any, x: Array) -> Array:
    """Which values are not zero beside the largest of their matrix, but for roundings."""
    eps = float(np.finfo(dtype_name(x)).eps)
    return x > SEEN * eps * xp.max(x, axis=-1, keepdims=True)


def _where(xp: Any, columns: Array, x: Array) -> Array:
    """Matrices with zeros in all columns but these."""
    return xp.where(xp.expand_dims(columns, axis=-2), x, 0.0)


def _taken(xp: Any, x: Array, order: Array) -> Array:
    """The columns of matrices in some order."""
    return xp.take_along_axis(x, xp.expand_dims(order, axis=-2), axis=-1)


def _basis(xp: Any, x: Array) -> Array:
    """The columns of each matrix made orthonormal, one after the other; the last ones may be zero.

    In Householder's QR a column of zeros takes no reflection. So what comes in its place are the reflections of the
    others, of a unit vector: the same in every library, whatever the signs of the others. Signs are chosen such that
    Σ qᵢ/i is not negative for each column q.
    """
    return _signed(xp, _reflected(*_reflections(x, _leading(x, 0.0))) if _is_large(x) else xp.linalg.qr(x)[0])


def _signed(xp: Any, q: Array) -> Array:
    """The columns of q with the signs that `_basis` has."""
    rows = xp.cumulative_sum(xp.ones_like(xp.sum(q, axis=-1, keepdims=True)), axis=-2)
    total = xp.sum(q / rows, axis=-2, keepdims=True)
    return q * xp.where(total < 0, -1.0, xp.ones_like(total))


def _is_large(s: Array) -> bool:
    """Whether SciPy's LAPACK works on a matrix: NumPy's `qr` computes in double precision, and makes all of r."""
    return isinstance(s, np.ndarray) and s.ndim == 2 and len(s) >= LARGE and find_spec("scipy") is not None


def _large_basis(s: Array, order: Array) -> tuple[Array, Array]:
    """The end of `next_basis`, in the dtype of s; what is chosen anew costs nothing but its columns of q."""
    count = _leading(s, SEEN * float(np.finfo(s.dtype).eps))
    packed, tau = _reflections(s, count)
    seen = _seen(np, np.abs(np.diagonal(packed)))
    if not seen.all():
        last = np.argsort(~seen, stable=True)
        order, count = order[last], int(seen.sum())
        packed, tau = _reflections(s[:, last[:count]], count)
    return np.ascontiguousarray(_signed(np, _reflected(packed, tau))), order


def _leading(x: Array, least: float) -> int:
    """How many columns are left, without the last ones whose norms are at most `least` times that of the first.

    A column's norm bounds its entry on the diagonal of r; and r has that of the first column.
    """
    scaled = x / (max(x.max(), -x.min()) or 1.0)
    norms = np.sqrt(np.einsum("ij,ij->j", scaled, scaled))
    return 1 + int(np.flatnonzero(norms > least * norms[0]).max(initial=0))


def _reflections(x: Array, count: int) -> tuple[Array, Array]:
    """Householder's QR of the first columns, as LAPACK packs it in a square matrix; and the reflections' scales."""
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
    """The first two results of a function of LAPACK, with as much room for its work as it likes."""
    room = int(function(*args, lwork=-1)[-2][0])
    return function(*args, lwork=room, **how)[:2]  # type: ignore[no-any-return]
