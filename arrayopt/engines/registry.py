"""The table of engines, and the choice of one for a bucket. A new engine is a folder and a row. The
step, `explain` and ranks call `select`.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from arrayopt.arrays import Array, library
from arrayopt.engines.base import (
    Asked,
    CompilationError,
    Engine,
    MakeStep,
    NoRemedyError,
    Report,
    Stops,
)
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.compiling import LOG
from arrayopt.engines.layers import Layers, taking_part
from arrayopt.fusion.dims import TraceError
from arrayopt.rules.returned import ReturnedError


class NotFusedWarning(UserWarning):
    """No fused engine runs a rule, for a reason that can be changed.

    An `Optimizer` with ``engine="auto"`` issues it once for each reason. The step is then slower
    and takes more memory. The message has the reason and the remedy. ``engine="array_api"`` runs
    the same without the warning.
    """


@dataclass(frozen=True)
class EngineRow:
    """An engine: its class, its requirements, and the arrays that it supports."""

    path: tuple[str, str]
    """The module and the class."""
    takes: tuple[str, ...] = ()
    """The kinds of arrays that it runs fused; an engine without any supports all."""
    needs: str = ""
    """The package that it needs besides NumPy."""
    install: str = ""
    """The name of the package, and how to install it."""
    emits: str = ""
    """The module with the function `emit`, which writes the engine's code, if there is one."""
    looks: bool = False
    """Whether the class itself checks its requirements, such as a compiler, and raises ValueError;
    it takes `asked`, whether the user named the engine.
    """
    auto: bool = True
    """Whether ``engine="auto"`` may choose it."""

    def open(self, *, asked: bool = False) -> Engine:
        """Create the engine; `asked` if the user named it. ValueError if it cannot run here."""
        if self.needs and not _installed(self.needs):
            raise ValueError(f"it needs {self.install}")
        try:
            engine = getattr(import_module(self.path[0]), self.path[1])
            made: Engine = engine(asked=asked) if self.looks else engine()
        except ImportError as error:  # for example, if versions of packages do not fit
            raise ValueError(f"{self.needs or self.path[0]} cannot be imported: {error}") from error
        return made

    @property
    def lean(self) -> bool:
        """Whether the engine's code has few registers; see `arrayopt.fusion.trace.trace`."""
        return bool(getattr(import_module(self.emits), "LEAN", False))

    def emitter(self) -> Callable[..., str]:
        """Return the function that writes the engine's code; it needs no package and no device."""
        emit: Callable[..., str] = import_module(self.emits).emit
        return emit


def _installed(package: str) -> bool:
    """Whether a package can be imported."""
    try:
        return find_spec(package) is not None
    except ValueError:  # it is imported already, and has no `__spec__`
        return True


ENGINES: dict[str, EngineRow] = {
    "array_api": EngineRow(("arrayopt.engines.array_api.engine", "ArrayAPI")),
    "numpy": EngineRow(("arrayopt.engines.numpy.engine", "NumPy"), ("numpy",)),
    "numba": EngineRow(
        ("arrayopt.engines.numba.engine", "Numba"),
        ("numpy", "torch"),
        "numba",
        "Numba, which is not installed; pip install 'arrayopt[cpu]'",
        "arrayopt.engines.numba.emit",
    ),
    "cpp": EngineRow(
        ("arrayopt.engines.cpp.engine", "Cpp"),
        ("numpy", "torch"),
        emits="arrayopt.engines.cpp.emit",
        looks=True,
    ),
    "cupy": EngineRow(
        ("arrayopt.engines.cuda.engine", "CuPy"),
        ("cupy", "torch on cuda"),
        "cupy",
        "CuPy, which is not installed; pip install 'arrayopt[cuda12]' or 'arrayopt[cuda13]'",
        "arrayopt.engines.cuda.emit",
    ),
}
"""The engines, best last. PyTorch's tensors are used in place."""


FUSED: dict[str, tuple[str, ...]] = {}
for _name, _row in reversed(ENGINES.items()):
    for _arrays in _row.takes:
        FUSED[_arrays] = (*FUSED.get(_arrays, ()), _name)
"""The fused engines for each kind of arrays, best first."""


def select(name: str, bucket: Bucket) -> tuple[Engine, str]:
    """Return the engine for a bucket, by name or for ``"auto"``, and the reason for the choice.

    ValueError, with the reason, if there is no such engine, or if it cannot run the bucket.
    """
    last = bucket.engine
    if last is None or last[0] != name or last[1].name in bucket.refused:
        bucket.batches.clear()
        found = _select(name, bucket)
        if bucket.kind == "none" and not found[0].counts:  # a device counts by itself
            found = _Counting(), "other ranks have these tensors"
        last = bucket.engine = name, *found
    return last[1:]


def instead(name: str, bucket: Bucket, error: CompilationError) -> Engine:
    """Return the engine that replaces one that could not compile code for a bucket.

    The same CompilationError, if the user named that engine, or if ranks share the tensors.
    """
    if name != "auto" or bucket.kind == "cut":
        raise error
    failed, _ = select(name, bucket)
    bucket.refused[failed.name] = str(error)
    chosen, _ = select(name, bucket)
    LOG.warning("arrayopt: engine %r serves instead of %r: %s", chosen.name, failed.name, error)
    return chosen


def _select(name: str, bucket: Bucket) -> tuple[Engine, str]:
    """See `select`; this always chooses again."""
    arrays = _kind(bucket.tensors[0].array)
    if name != "auto":
        if name not in ENGINES:
            meant = "; for CUDA, use 'cupy'" if name.lower() in ("cuda", "gpu") else ""
            raise ValueError(
                f"Optimizer: `engine` must be 'auto' or one of {', '.join(map(repr, ENGINES))}; got"
                f" {name!r}{meant}"
            )
        try:
            return _serving(name, arrays, bucket, asked=True), "asked for"
        except ReturnedError:
            raise
        except ValueError as error:
            raise ValueError(
                f"Optimizer: engine {name!r} cannot run {type(bucket.rule).__name__}: {error}"
            ) from error
    reasons: dict[str, list[str]] = {}
    remedies = True
    for fused in FUSED.get(arrays, ()):
        if not ENGINES[fused].auto:
            continue
        try:
            chosen = _serving(fused, arrays, bucket)
            return chosen, "; ".join([f"the fastest for {arrays} arrays", *_shown(reasons)])
        except ReturnedError:
            raise
        except ValueError as error:
            reasons.setdefault(str(error), []).append(fused)
            remedies &= not isinstance(error, NoRemedyError)
    bucket.remedy = "; ".join(_shown(reasons)) if remedies else ""
    why = "; ".join(_shown(reasons)) or f"the only engine for {arrays} arrays"
    return ENGINES["array_api"].open(), why


def _shown(reasons: dict[str, list[str]]) -> list[str]:
    """Return each reason, with the engines that have it."""
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


class _Counting(Engine):
    """Counts the updates of tensors that other ranks update, and does nothing else."""

    name = "none"

    def check(self, bucket: Bucket) -> None:
        """Accept any bucket."""

    def prepare(self, bucket: Bucket, asked: Asked, meetings: Sequence[Any] = ()) -> MakeStep:
        """See `Engine.prepare`; other ranks pass numbers to meetings."""
        took = np.flatnonzero(taking_part(asked.grads))

        def run(reports: dict[str, Report]) -> Stops:
            bucket.count(took)
            yield from ()

        return run

    def explain(self, bucket: Bucket) -> str:
        return "their parameters come from there after each step"


def advise(buckets: Sequence[Bucket], warned: set[str]) -> None:
    """Warn if a user can enable a fused engine for a bucket; `warned` has the earlier warnings."""
    for bucket in buckets:
        if bucket.remedy and bucket.remedy not in warned and bucket.kind != "none":
            names = [tensor.name for tensor in bucket.whole.tensors]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warnings.warn(
                f"Optimizer: {type(bucket.rule).__name__} of {names[0]!r}{more} is not fused, and"
                " runs one operation at a time; engine='array_api' silences this warning."
                f" {bucket.remedy}",
                NotFusedWarning,
                stacklevel=_calls(),
            )
            warned.add(bucket.remedy)


def _calls() -> int:
    """Return the number of frames from here to the user's own line, for a warning."""
    frame, calls = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "arrayopt":
        frame, calls = frame.f_back, calls + 1
    return calls


def _kind(x: Array) -> str:
    """Return an array's library, and for PyTorch the device, unless that is the CPU."""
    name, device = library(x), getattr(x, "device", None)
    kind = getattr(device, "type", "cpu")
    return f"{name} on {kind}" if name == "torch" and kind != "cpu" else name


def _serving(name: str, arrays: str, bucket: Bucket, *, asked: bool = False) -> Engine:
    """Return an engine if it can run this bucket; else raise ValueError with the reason."""
    row = ENGINES[name]
    if name in bucket.refused:
        raise ValueError(bucket.refused[name])
    if row.takes and name not in FUSED.get(arrays, ()):
        raise ValueError(f"it supports arrays of {' and '.join(row.takes)}; got {arrays}")
    if row.takes and bucket.rule.several and not isinstance(bucket, Layers):
        what = "stacked tensors" if bucket.rule.stacked else "tensors with blocks"
        raise ValueError(f"it supports {what} only if they are writable in place")
    engine = row.open(asked=asked)
    try:
        engine.check(bucket)
    except TraceError as error:
        raise ValueError(str(error)) from error
    return engine
