"""The C++ engine: a plan as fused loops that a C++ compiler compiles."""

from arrayopt.engines.cpp.compiled import Library, helped
from arrayopt.engines.cpp.compiler import compiler
from arrayopt.engines.cpp.emit import emit
from arrayopt.engines.native.engine import Native
from arrayopt.engines.native.table import Table

__all__ = ["Cpp"]


class _Table(Table):
    """A table, and a library."""

    emit = staticmethod(emit)
    makes = Library


class Cpp(Native):
    """See `Native`.

    Parameters
    ----------
    asked : bool, default False
        See `compiler`.

    Raises
    ------
    ValueError
        If no compiler works.
    """

    name = "cpp"
    batch = products = _Table
    helped = staticmethod(helped)

    def __init__(self, *, asked: bool = False) -> None:
        compiler(asked=asked)
