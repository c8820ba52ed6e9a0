"""Who takes part in the benchmark on a GPU, and the streams and arrays that they have: see `benchmarks.gpu`."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

import arrayopt as ao
from benchmarks import apex_form, ours
from benchmarks.problems import Problem

__all__ = ["RULES", "Step", "captured", "copying", "eager", "on", "peers", "pytorch"]

RULES = ours.RULES | {
    f"{name} int8": replace(ours.RULES[name], state_dtype="int8") for name in ("AdamW", "LAMB", "CAME")
}  # type: ignore[call-arg]

Step = Callable[[], object]


@contextmanager
def on(stream: Any) -> Iterator[None]:
    """On a stream of CuPy's, and PyTorch too where it is."""
    with stream:
        if not (find_spec("torch") and pytorch().cuda.is_available()):
            yield
            return
        with pytorch().cuda.stream(pytorch().cuda.ExternalStream(stream.ptr)):
            yield


def pytorch() -> Any:
    """PyTorch, imported where it takes part."""
    import torch

    return torch


def _arrays(case: Problem, dtype: str, scale: float, seed: int) -> list[Any]:
    """CuPy arrays of a case; PyTorch tensors where CuPy has no such dtype."""
    import cupy

    numbers = np.random.default_rng(seed).standard_normal(100_003, np.float32) * np.float32(scale)
    source = cupy.asarray(np.resize(numbers, max(map(math.prod, case.shapes))))
    made = [source[: math.prod(shape)].reshape(shape).copy() for shape in case.shapes]
    return made if dtype == "float32" else [pytorch().from_dlpack(x).to(getattr(pytorch(), dtype)) for x in made]


def copying(case: Problem) -> tuple[Step, float]:
    """A copy within the device's memory, of the size of the parameters; and how many bytes it reads and writes."""
    import cupy

    source, target = (cupy.zeros(max(1 << 16, case.elements), cupy.float32) for _ in range(2))
    return lambda: target.__setitem__(..., source), 2.0 * source.nbytes


def eager(rule: str, case: Problem, dtype: str) -> Step:
    """This library, a step at a time."""
    params, grads = _arrays(case, dtype, 3e-2, 1), _arrays(case, dtype, 1e-2, 2)
    opt = ao.Optimizer(params, RULES[rule], engine="cupy")
    return lambda: opt.step(grads)


def captured(rule: str, case: Problem, dtype: str, stream: Any, *, alone: bool = False) -> Step:
    """This library, as a CUDA graph; alone: without what the host does for a step."""
    params, grads = _arrays(case, dtype, 3e-2, 1), _arrays(case, dtype, 1e-2, 2)
    opt = ao.Optimizer(params, RULES[rule], engine="cupy")
    opt.step(grads)
    opt.advance()
    stream.synchronize()
    stream.begin_capture()
    opt.launch(grads)
    graph = stream.end_capture()
    graph.launch(stream)

    def step() -> None:
        if not alone:
            opt.advance()
        graph.launch(stream)

    return step


def _peer(make: Callable[[list[Any]], Any], case: Problem, dtype: str) -> Step:
    """An optimizer of PyTorch's kind, over tensors of its own."""
    kind = getattr(pytorch(), dtype)
    tensors, grads = (
        [pytorch().as_tensor(x, device="cuda").to(kind).clone() for x in _arrays(case, "float32", scale, 1)]
        for scale in (3e-2, 1e-2)
    )
    for p, g in zip(tensors, grads, strict=True):
        p.requires_grad_().grad = g
    return make(tensors).step  # type: ignore[no-any-return]


ADAMW = {"lr": 1e-3, "weight_decay": 0.01}


def peers(rule: str, case: Problem, dtype: str) -> dict[str, Callable[[], Step]]:
    """Who else takes part: PyTorch's AdamW for every rule, as the yardstick; apex for its own, and in its form."""

    def adamw(**how: bool) -> Callable[[], Step]:
        return lambda: _peer(lambda p: pytorch().optim.AdamW(p, **ADAMW, **how), case, dtype)

    def apex(name: str) -> Callable[[], Step]:
        def make() -> Step:
            import apex.optimizers

            return _peer(lambda p: getattr(apex.optimizers, name)(p, **ADAMW), case, dtype)

        return make

    def form(make: Callable[..., Step], **more: float) -> Callable[[], Step]:
        known = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "decay": 0.01} | more
        return lambda: make(_arrays(case, dtype, 3e-2, 1), _arrays(case, dtype, 1e-2, 2), **known)

    made = {"torch fused AdamW": adamw(fused=True), "torch foreach AdamW": adamw(foreach=True)}
    if rule == "AdamW" and dtype == "float32":
        made["apex's form in CuPy"] = form(apex_form.adamw, eps=1e-8)
    if rule == "LAMB" and dtype == "float32":
        made["apex's form in CuPy"] = form(apex_form.lamb, eps=1e-6, most=1.0)
    if name := {"AdamW": "FusedAdam", "LAMB": "FusedLAMB"}.get(rule):
        made[f"apex {name}"] = apex(name)
    return made
