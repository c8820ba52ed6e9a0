"""The Numba engine: a plan as fused loops that Numba compiles."""

from arrayopt.arrays import dtype_name
from arrayopt.engines.base import NoRemedyError
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.native.engine import Native
from arrayopt.engines.native.table import Table
from arrayopt.engines.numba.ahead import helped
from arrayopt.engines.numba.compiled import Module, converts_float16
from arrayopt.engines.numba.emit import emit

__all__ = ["Numba"]


class _Table(Table):
    """A table, and a module of Numba."""

    emit = staticmethod(emit)
    makes = Module


class Numba(Native):
    """See `Native`."""

    name = "numba"
    batch = products = _Table
    helped = staticmethod(helped)

    def check(self, bucket: Bucket) -> None:
        """See `Engine.check`."""
        super().check(bucket)
        if dtype_name(bucket.tensors[0].array) == "float16" and not converts_float16():
            raise NoRemedyError("it needs a processor that converts float16 (F16C)")
