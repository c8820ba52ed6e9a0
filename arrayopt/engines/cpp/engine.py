"""The C++ engine: plans are printed by `emit.py` and compiled by `compiled.py`."""

from collections.abc import Callable, Iterable

from arrayopt.engines.base import Asked
from arrayopt.engines.batch import Kind
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.cpp.compiled import ahead, bound
from arrayopt.engines.cpp.compiler import compiler
from arrayopt.engines.cpp.emit import emit
from arrayopt.engines.native.engine import Native
from arrayopt.engines.native.table import RunStages, Table


class _Table(Table):
    """A table whose code is a library, compiled from C++."""

    def compile(self, kind: Kind) -> Callable[..., RunStages]:
        text = emit(kind.plan, kind.dtype, kind.grad_dtype, lanes=kind.lanes)
        return bound(text, self.about(kind))


class Cpp(Native):
    """See `Native`; `asked` is that of `compiler`."""

    name = "cpp"
    batch = _Table

    def __init__(self, *, asked: bool = False) -> None:
        super().__init__()
        self.compiler = compiler(asked=asked)

    def describe(self) -> str:
        return (
            f"{super().describe()}, compiled by {self.compiler.version or self.compiler.command[0]}"
        )

    def foresee(self, coming: Iterable[tuple[Bucket, Asked]]) -> None:
        texts: dict[str, str] = {}
        for bucket, asked in coming:
            for kind in self.kinds(bucket, asked):
                if not kind.plan.idle:
                    text = emit(kind.plan, kind.dtype, kind.grad_dtype, lanes=kind.lanes)
                    texts[text] = f"{type(bucket.rule).__name__} for {kind.dtype}"
        ahead(texts.items())
