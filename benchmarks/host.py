"""The host's part of a step of the `cupy` engine, timed on a machine without a GPU or a driver.

``python benchmarks/host.py`` prints a table. Arrays, their attributes and their addresses are CuPy's,
in host memory. Devices, streams and kernels do nothing: their own time on the host comes on top.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cupy
import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # in place of this folder

import arrayopt as ao
from benchmarks.problems import LARGE, Shape

__all__ = ["calls", "hostless", "main"]


class _Device:
    """The only device."""

    id = 0
    attributes = {"MultiProcessorCount": 132, "L2CacheSize": 50 << 20}  # an H100's  # noqa: RUF012

    def __init__(self, device: int | None = None) -> None:
        pass

    def __enter__(self) -> "_Device":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Event:
    """What has happened already."""

    done = True

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Any) -> None:
        """Nothing waits."""


class _Kernel:
    """A kernel that does nothing."""

    def __init__(self, **_: Any) -> None:
        pass

    def get_function(self, name: str) -> Any:
        """Itself."""
        return lambda grid, block, args: None


_DEVICE = _Device()
_CAPTURED = list[bool]()  # of one thing, while the stream is captured
_STREAM = SimpleNamespace(is_capturing=lambda: bool(_CAPTURED), ptr=0)


def _alloc(size: int) -> Any:
    room = np.zeros(size + 512, np.uint8)
    start = room.ctypes.data + -room.ctypes.data % 512
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(start, size, room, 0), 0)


def _set(self: Any, *_: Any, **__: Any) -> None:
    """Nothing is copied."""


def _made(shape: Any, dtype: Any = float, **_: Any) -> Any:
    return cupy.ndarray(shape, dtype)  # zeros, as they come


def _asarray(x: Any, dtype: Any = None, **_: Any) -> Any:
    if isinstance(x, cupy.ndarray):
        return x
    x = np.asarray(x, dtype)
    return cupy.ndarray(x.shape, x.dtype)


@contextmanager
def hostless() -> Iterator[None]:
    """Have CuPy allocate in host memory, and launch nothing."""
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(_alloc)
    names = {"zeros": _made, "asarray": _asarray, "RawModule": _Kernel}
    names["zeros_like"] = lambda x, dtype=None, **_: cupy.ndarray(x.shape, x.dtype if dtype is None else dtype)
    below = {"Device": _Device, "Event": _Event, "get_current_stream": lambda device=-1: _STREAM}
    below["alloc_pinned_memory"] = bytearray
    own = {"set": _set, "__setitem__": _set, "device": property(lambda self: _DEVICE)}
    try:
        with (
            patch.multiple(cupy, **names),
            patch.multiple(cupy.cuda, **below),
            patch.multiple(cupy.ndarray, create=True, **own),
        ):
            yield
    finally:
        cupy.cuda.set_allocator(before)


# ---- what is timed --------------------------------------------------------------------------------------------------

TINY: tuple[Shape, ...] = ((64,),) * 400
MANY: tuple[Shape, ...] = ((64,),) * 10_000


def _steps(rule: ao.Rule, shapes: tuple[Shape, ...], absent: float, sets: int, **options: Any) -> Iterator[Any]:
    """An optimizer that has made some steps, and gradients for more of them."""
    params = {f"p{i}": cupy.zeros(shape, np.float32) for i, shape in enumerate(shapes)}
    opt = ao.Optimizer(params, rule, engine="cupy", **options)
    grads = [{name: cupy.zeros(p.shape, np.float32) for name, p in params.items()} for _ in range(sets)]
    r = np.random.default_rng(0)
    for i in range(10):
        opt.step(grads[i % sets])
    i = 0
    while True:
        i += 1
        given = grads[i % sets]
        if absent:
            given = {name: None if r.random() < absent else g for name, g in given.items()}
        yield partial(opt.step, given)


def _replays(rule: ao.Rule, shapes: tuple[Shape, ...]) -> Iterator[Any]:
    """What the host does before each replay of a captured step: `Optimizer.advance`. The graph's launch is CUDA's."""
    params = {f"p{i}": cupy.zeros(shape, np.float32) for i, shape in enumerate(shapes)}
    opt = ao.Optimizer(params, rule, engine="cupy")
    grads = {name: cupy.zeros(p.shape, np.float32) for name, p in params.items()}
    opt.step(grads)
    opt.advance()
    _CAPTURED.append(True)
    opt.launch(grads)
    _CAPTURED.clear()
    while True:
        yield opt.advance


def calls(tensors: int) -> int:
    """How many functions a step of LAMB calls, as Python's profiler counts them."""
    count = 0

    def profile(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with hostless():
        step = next(_steps(ao.LAMB(lr=0.1), TINY[:tensors], 0.0, 1))
        sys.setprofile(profile)
        try:
            step()
        finally:
            sys.setprofile(None)
    return count


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main(rounds: int = 400) -> None:
    """Print the table."""
    large, lamb = LARGE[0].shapes, ao.LAMB(lr=0.1)
    scheduled = ao.LAMB(lr=lambda step: 0.1 / (1 + step))
    judged = {"clip_norm": 1.0, "loss_scale": ao.LossScale()}
    replays = [("LAMB", lamb), ("LAMB, a schedule", scheduled)]
    rows: list[tuple[str, Any]] = [
        *((f"400 tensors, {name}, a captured step: `advance`", (rule, TINY)) for name, rule in replays),
        ("400 tensors, LAMB", (lamb, TINY, 0.0, 1)),
        ("400 tensors, LAMB, a schedule", (scheduled, TINY, 0.0, 1)),
        ("400 tensors, LAMB, other gradient arrays in each step", (lamb, TINY, 0.0, 2)),
        ("400 tensors, AdamW", (ao.AdamW(lr=0.1), TINY, 0.0, 1)),
        ("400 tensors, LAMB, `clip_norm` and a loss scale", partial(_steps, lamb, TINY, 0.0, 1, **judged)),
        ("10,000 tensors, LAMB, a captured step: `advance`", (lamb, MANY)),
        ("10,000 tensors, LAMB", (lamb, MANY, 0.0, 1)),
        ("10,000 tensors, LAMB, `clip_norm` and a loss scale", partial(_steps, lamb, MANY, 0.0, 1, **judged)),
        ("10,000 tensors, LAMB, other gradient arrays in each step", (lamb, MANY, 0.0, 2)),
        ("BERT-large, LAMB", (lamb, large, 0.0, 1)),
        *((f"BERT-large, LAMB, another {x:.0%} of gradients absent", (lamb, large, x, 1)) for x in (0.02, 0.3, 0.7)),
    ]
    _say("| step | lowest | median |\n|---|---|---|")
    for name, what in rows:
        with hostless():
            made = what if callable(what) else partial(_replays if len(what) == 2 else _steps, *what)
            times, steps = [], made()
            for _ in range(rounds):
                step = next(steps)
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
        _say(f"| {name} | {1e6 * min(times):.0f} µs | {1e6 * statistics.median(times):.0f} µs |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["calls"]:
        _say(" ".join(str(calls(int(x))) for x in sys.argv[2:]))
    else:
        main()
