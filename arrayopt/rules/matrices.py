"""Words for rules of matrices: how a tensor is seen as one, and the Newton-Schulz iteration."""

import math
from typing import Any

import array_api_compat

from arrayopt.arrays import Array, dtype_of
from arrayopt.hyper import is_number

Triple = tuple[float, float, float]


def as_matrices(xp: Any, x: Array, matrix: str) -> Array:
    """x as matrices along its last two axes: with ``"flatten"`` its first axis against all others, one matrix."""
    if matrix != "flatten" or x.ndim <= 2:
        return x
    empty = any(type(n) is int and n == 0 for n in x.shape)  # a length of a traced array is no number
    return xp.reshape(x, (x.shape[0], math.prod(x.shape[1:]) if empty else -1))


def as_tensor(xp: Any, x: Array, p: Array) -> Array:
    """What `as_matrices` has made of a tensor of the shape of p, or what follows from it, as that tensor again."""
    return x if x.ndim == p.ndim else xp.reshape(x, p.shape)


def newton_schulz(xp: Any, x: Array, coefficients: tuple[Triple, ...], size: Array, dtype: str | None = None) -> Array:
    """Each matrix with its singular values brought near to one; at first they are divided by `size`, about the norm.

    With A = XXᵀ, X ← aX + (bA + cA²)X for each triple (Jordan et al. 2024). A is of the smaller side. The steps are in
    a `dtype` of the library's, where one is given.
    """
    x = x / size
    wide = x.dtype
    x = x if dtype is None else xp.astype(x, dtype_of(xp, dtype))
    tall = x.shape[-2] > x.shape[-1]
    x = xp.matrix_transpose(x) if tall else x
    for a, b, c in coefficients:
        gram = xp.matmul(x, xp.matrix_transpose(x))
        x = a * x + xp.matmul(b * gram + c * xp.matmul(gram, gram), x)
    x = xp.matrix_transpose(x) if tall else x
    return x if dtype is None else xp.astype(x, wide)


def scale_of(x: Array, scale: str) -> Any:
    """What the step of an orthogonal matrix is multiplied by, for its number of rows and columns."""
    rows, columns = x.shape[-2:]
    if scale == "match_rms_adamw":
        return 0.2 * max(rows, columns) ** 0.5
    return (rows / columns) ** 0.5 if scale == "original" and rows > columns else 1.0


def lying(p: Array) -> float:
    """√max(1, rows/columns) of the last two axes of a tensor; 1 where it is traced, and lengths are no numbers."""
    rows, columns = p.shape[-2:]
    return max(1.0, rows / columns) ** 0.5 if type(columns) is int and columns else 1.0


def refused(xp: Any, p: Array, dtype: str | None) -> str:
    """Why a rule of matrices with steps in some dtype cannot update a tensor; empty where it can."""
    if p.ndim < 2:
        return "is not a matrix"
    # CuPy has no name for bfloat16, and engine "cupy" needs none
    if dtype is not None and not hasattr(xp, dtype) and not array_api_compat.is_cupy_namespace(xp):
        return f"is of a library that has no {dtype}; leave out `ns_dtype`"
    return ""


def triples(where: str, value: Any) -> tuple[Any, ...]:
    """Three numbers, or a sequence of such triples."""
    several = isinstance(value, tuple | list) and value and all(isinstance(x, tuple | list) for x in value)
    for triple in value if several else [value]:
        if not isinstance(triple, tuple | list) or not all(is_number(x) for x in triple):
            raise TypeError(f"{where} must be three numbers, or a sequence of such triples; got {value!r}")
        if len(triple) != 3 or not all(math.isfinite(x) for x in triple):
            raise ValueError(f"{where} must be three finite numbers, or a sequence of such triples; got {value!r}")
    made = tuple(tuple(map(float, triple)) for triple in (value if several else [value]))
    return made if several else made[0]
