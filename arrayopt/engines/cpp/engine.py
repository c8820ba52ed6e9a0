"""The C++ engine: a plan as fused loops that a C++ compiler compiles."""

from typing import Any

from arrayopt.engines.cpp.compiled import load
from arrayopt.engines.cpp.emit import emit
from arrayopt.engines.native.engine import Native
from arrayopt.engines.native.table import Table

__all__ = ["Cpp"]


class _Table(Table):
    """A table, and a library."""

    def compile(self, dtype: str, grad_dtype: str) -> Any:
        """See `Table.compile`."""
        from arrayopt.arrays import REAL, WORKING

        real = REAL.get(WORKING[dtype], WORKING[dtype])
        return load(emit(self.plan, dtype, grad_dtype, split=self.split), real)


class Cpp(Native):
    """See `Native`."""

    name = "cpp"
    batch = products = _Table
