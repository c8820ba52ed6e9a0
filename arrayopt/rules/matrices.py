"""Functions for rules of matrices: tensors as matrices, and the Newton-Schulz iteration."""

import math
from typing import Any

import array_api_compat

from arrayopt.arrays import Array, dtype_of
from arrayopt.hyper import is_number

Triple = tuple[float, float, float]


def as_matrices(xp: Any, x: Array, matrix: str) -> Array:
    """Reshape x to matrices along its last two axes; with ``"flatten"`` to one matrix, of all axes but the first."""
    if matrix != "flatten" or x.ndim <= 2:
        return x
    empty = any(type(n) is int and n == 0 for n in x.shape)  # lengths of traced arrays are not ints
    return xp.reshape(x, (x.shape[0], math.prod(x.shape[1:]) if empty else -1))


def as_tensor(xp: Any, x: Array, p: Array) -> Array:
    """Reshape a result of `as_matrices` to the shape of p."""
    return x if x.ndim == p.ndim else xp.reshape(x, p.shape)


def newton_schulz(xp: Any, x: Array, coefficients: tuple[Triple, ...], size: Array, dtype: str | None = None) -> Array:
    """Bring the singular values of each matrix near to one. First x is divided by `size`, its approximate norm.

    With A = XXᵀ, X ← aX + (bA + cA²)X for each triple (Jordan et al. 2024). A has the size of the smaller side. The
    iteration is in `dtype` if it is given.
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
    """The factor for the step of an orthogonal matrix, which depends on its numbers of rows and columns."""
    rows, columns = x.shape[-2:]
    if scale == "match_rms_adamw":
        return 0.2 * max(rows, columns) ** 0.5
    return (rows / columns) ** 0.5 if scale == "original" and rows > columns else 1.0


def lying(p: Array) -> float:
    """√max(1, rows/columns) of the last two axes of a tensor; 1 if it is traced and has no lengths."""
    rows, columns = p.shape[-2:]
    return max(1.0, rows / columns) ** 0.5 if type(columns) is int and columns else 1.0


def refused(xp: Any, p: Array, dtype: str | None) -> str:
    """The reason for which a rule of matrices cannot update a tensor; empty if it can. `dtype` is its `ns_dtype`."""
    if p.ndim < 2:
        return "is not a matrix"
    # CuPy has no name for bfloat16, and engine "cupy" needs none
    if dtype is not None and not hasattr(xp, dtype) and not array_api_compat.is_cupy_namespace(xp):
        return f"is of a library that has no {dtype}; leave out `ns_dtype`"
    return ""


def triples(where: str, value: Any) -> tuple[Any, ...]:
    """Check a value of three numbers, or of a sequence of such triples, and return it as tuples."""
    several = isinstance(value, tuple | list) and value and all(isinstance(x, tuple | list) for x in value)
    for triple in value if several else [value]:
        if not isinstance(triple, tuple | list) or not all(is_number(x) for x in triple):
            raise TypeError(f"{where} must be three numbers, or a sequence of such triples; got {value!r}")
        if len(triple) != 3 or not all(math.isfinite(x) for x in triple):
            raise ValueError(f"{where} must be three finite numbers, or a sequence of such triples; got {value!r}")
    made = tuple(tuple(map(float, triple)) for triple in (value if several else [value]))
    return made if several else made[0]
