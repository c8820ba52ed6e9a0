"""Engines: how an update is run. `select` is the one place where one is chosen."""

import sys
from collections.abc import Callable
from importlib.util import find_spec

from arrayopt.arrays import Array, dtype_name, library, place, size
from arrayopt.engines.base import Bucket, Engine, Judge, beside, bucketed
from arrayopt.fusion.trace import TraceError

__all__ = ["Bucket", "Engine", "Judge", "beside", "bucketed", "explain_bucket", "select"]


def _array_api() -> Engine:
    from arrayopt.engines.array_api import ArrayAPI

    return ArrayAPI()


def _numba() -> Engine:
    if find_spec("numba") is None:
        raise ValueError("it needs Numba, which is not installed; pip install 'arrayopt[cpu]'")
    from arrayopt.engines.numba import Numba

    return Numba()


def _numpy() -> Engine:
    from arrayopt.engines.numpy import NumPy

    return NumPy()


def _cupy() -> Engine:
    if "cupy" not in sys.modules and find_spec("cupy") is None:
        raise ValueError("it needs CuPy, which is not installed; pip install 'arrayopt[cuda12]' or 'arrayopt[cuda13]'")
    from arrayopt.engines.cupy import CuPy

    return CuPy()


ENGINES: dict[str, Callable[[], Engine]] = {
    "array_api": _array_api,
    "numpy": _numpy,
    "numba": _numba,
    "cupy": _cupy,
}
FUSED: dict[str, tuple[str, ...]] = {
    "numpy": ("numba", "numpy"),
    "cupy": ("cupy",),
    "torch": ("numba",),
    "torch on cuda": ("cupy",),
}
"""The fused engines for arrays, best first; PyTorch's are worked on where they lie, without copying."""


def select(name: str, bucket: Bucket) -> tuple[Engine, str]:
    """The engine for a bucket, and why it is that one.

    Parameters
    ----------
    name : str
        ``"auto"`` or the name of an engine.
    bucket : Bucket
        What it is to run over.

    Raises
    ------
    ValueError
        If there is no engine of that name, or it cannot serve these arrays or this rule, with the reason.
    """
    key = ("engine", name)
    if key not in bucket.kept:
        bucket.kept[key] = _select(name, bucket)
    chosen: tuple[Engine, str] = bucket.kept[key]
    return chosen


def _select(name: str, bucket: Bucket) -> tuple[Engine, str]:
    """See `select`."""
    arrays = _kind(bucket.tensors[0].array)
    if name != "auto":
        if name not in ENGINES:
            raise ValueError(
                f"Optimizer: `engine` must be 'auto' or one of {', '.join(map(repr, ENGINES))}; got {name!r}"
            )
        try:
            return _serving(name, arrays, bucket), "asked for"
        except ValueError as error:
            raise ValueError(f"Optimizer: engine {name!r} cannot run {type(bucket.rule).__name__}: {error}") from error
    reasons: list[str] = []
    for fused in FUSED.get(arrays, ()):
        try:
            return _serving(fused, arrays, bucket), "; ".join([f"the fastest for {arrays} arrays", *reasons])
        except ValueError as error:
            reasons.append(f"{fused}: {error}")
    return _array_api(), "; ".join(reasons) or f"the only engine for {arrays} arrays"


def _kind(x: Array) -> str:
    """An array's library, and for PyTorch the kind of device where that is not the CPU."""
    name, device = library(x), getattr(x, "device", None)
    kind = getattr(device, "type", "cpu")
    return f"{name} on {kind}" if name == "torch" and kind != "cpu" else name


def _serving(name: str, arrays: str, bucket: Bucket) -> Engine:
    """An engine, if it can run this bucket; ValueError with the reason otherwise."""
    if name != "array_api" and name not in FUSED.get(arrays, ()):
        raise ValueError(f"it takes {' and '.join(x for x, e in FUSED.items() if name in e)} arrays; got {arrays}")
    engine = ENGINES[name]()
    try:
        engine.check(bucket)
    except TraceError as error:
        raise ValueError(str(error)) from error
    return engine


def explain_bucket(bucket: Bucket, engine: str) -> str:
    """In some lines: the rules, the tensors, the engine and why it was chosen, and what it does."""
    chosen, why = select(engine, bucket)
    first, total = bucket.tensors[0].array, sum(size(tensor.array) for tensor in bucket.tensors)
    where = f"{library(first)} on {place(first)[1]}"
    return "\n".join(
        [
            *(repr(group.rule) for group in bucket.groups),
            f"  {len(bucket.tensors)} tensors, {total} parameters, {dtype_name(first)}, {where}",
            f"  engine {chosen.name} ({why}): {chosen.explain(bucket)}",
        ]
    )
