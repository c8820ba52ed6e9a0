"""The Numba engine: a plan as fused loops that Numba compiles."""

from collections.abc import Iterable
from types import ModuleType

from numba.core.errors import NumbaError

from arrayopt.arrays import dtype_name
from arrayopt.engines.base import Asked, NoRemedyError
from arrayopt.engines.batch import Kind
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.native.engine import Native
from arrayopt.engines.native.table import Table
from arrayopt.engines.numba.ahead import ahead
from arrayopt.engines.numba.compiled import converts_float16, load, ready
from arrayopt.engines.numba.emit import emit

__all__ = ["Numba"]


class _Table(Table):
    """A table, and a module of Numba."""

    def compile(self, kind: Kind) -> ModuleType:
        """See `Table.compile`."""
        rule = self.bucket.rule
        module = load(emit(kind.plan, kind.dtype, kind.grad_dtype, split=kind.split), _about(rule, kind.dtype))
        try:
            ready(module)
        except NumbaError as error:
            raise ValueError(f"engine 'numba' cannot compile {type(rule).__name__}; use another: {error}") from error
        return module


class Numba(Native):
    """See `Native`."""

    name = "numba"
    batch = _Table

    def foresee(self, coming: Iterable[tuple[Bucket, Asked]]) -> None:
        """See `Fused.foresee`."""
        texts: dict[tuple[str, str], None] = {}
        for bucket, asked in coming:
            for kind in self.kinds(bucket, asked):
                if not kind.plan.idle:
                    text = emit(kind.plan, kind.dtype, kind.grad_dtype, split=kind.split)
                    texts[text, _about(bucket.rule, kind.dtype)] = None
        ahead(list(texts))

    def check(self, bucket: Bucket) -> None:
        """See `Engine.check`."""
        super().check(bucket)
        if dtype_name(bucket.tensors[0].array) == "float16" and not converts_float16():
            raise NoRemedyError("it needs a processor that converts float16 (F16C)")


def _about(rule: object, dtype: str) -> str:
    """What a text is of, for a line that says that it is being compiled."""
    return f"{type(rule).__name__} for {dtype}"
