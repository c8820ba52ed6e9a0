"""The Numba engine: a plan as fused loops that Numba compiles."""

from collections.abc import Callable
from functools import partial

from numba.core.errors import NumbaError

from arrayopt.arrays import dtype_name
from arrayopt.engines.base import CompilationError, NoRemedyError
from arrayopt.engines.batch import Kind
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.native.engine import Native
from arrayopt.engines.native.table import RunStages, Table
from arrayopt.engines.numba.compiled import converts_float16, load, ready
from arrayopt.engines.numba.emit import emit


class _Table(Table):
    """A table, and a module of Numba."""

    def compile(self, kind: Kind) -> Callable[..., RunStages]:
        text = emit(kind.plan, kind.dtype, kind.grad_dtype, lanes=kind.lanes)
        module = load(text, self.about(kind))
        try:
            ready(module)
        except NumbaError as error:
            raise CompilationError(
                f"engine 'numba' cannot compile {self.about(kind)}: {error}"
            ) from error
        return partial(partial, module.run)


class Numba(Native):
    """See `Native`."""

    name = "numba"
    batch = _Table

    def check(self, bucket: Bucket) -> None:
        super().check(bucket)
        if dtype_name(bucket.tensors[0].array) == "float16" and not converts_float16():
            raise NoRemedyError("float16 needs a processor with F16C instructions")
