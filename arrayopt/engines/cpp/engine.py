"""The C++ engine: a plan as fused loops that a C++ compiler compiles."""

from typing import Any

from arrayopt.engines.batch import Kind
from arrayopt.engines.cpp.compiled import load
from arrayopt.engines.cpp.emit import emit
from arrayopt.engines.native.engine import Native
from arrayopt.engines.native.table import Table

__all__ = ["Cpp"]


class _Table(Table):
    """A table, and a library."""

    def compile(self, kind: Kind) -> Any:
        """See `Table.compile`."""
        from arrayopt.arrays import REAL, WORKING

        real = REAL.get(WORKING[kind.dtype], WORKING[kind.dtype])
        return load(emit(kind.plan, kind.dtype, kind.grad_dtype, split=kind.split), real)


class Cpp(Native):
    """See `Native`."""

    name = "cpp"
    batch = _Table
