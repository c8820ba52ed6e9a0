"""Modes of a process or thread that must change no bit: rows of `powers.py`, and of the tests of doors."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Mode = Callable[[], contextlib.AbstractContextManager[Any]]


class _Functions(TorchFunctionMode):
    """Intercepts each function of PyTorch, and changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Intercepts each operation of PyTorch, and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _traced(frame: Any, event: str, arg: Any) -> Any:
    """A trace function, as debuggers and coverage tools set one."""
    return _traced


@contextlib.contextmanager
def _set(put: Callable[[Any], Any], value: Any, back: Any) -> Iterator[None]:
    """A section in which `put(value)` is in force; `put(back)` ends it."""
    put(value)
    try:
        yield
    finally:
        put(back)


def _of_jax(name: str, value: Any) -> Mode:
    """The mode in which a setting of JAX has a value."""
    import jax

    return lambda: _set(lambda x: jax.config.update(name, x), value, getattr(jax.config, name))


@contextlib.contextmanager
def entered(modes: Iterable[Mode]) -> Iterator[None]:
    """A section in which all of these modes are in force."""
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        yield


MODES: dict[str, Mode] = {
    "np.errstate": lambda: np.errstate(all="raise"),
    "settrace": lambda: _set(sys.settrace, _traced, sys.gettrace()),
    "no garbage collection": lambda: _set(lambda on: gc.enable() if on else gc.disable(), False, True),
    "flush_denormal": lambda: _set(torch.set_flush_denormal, True, False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default_dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "default_device": lambda: torch.device("meta"),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "function mode": _Functions,
    "dispatch mode": _Operations,
}
"""Modes for every engine, and for `arrayopt.torch`."""

OF_JAX: dict[str, Mode] = {
    "np.errstate": MODES["np.errstate"],
    "debug_nans": _of_jax("jax_debug_nans", True),
    "debug_infs": _of_jax("jax_debug_infs", True),
    "strict dtypes": _of_jax("jax_numpy_dtype_promotion", "strict"),
    "strict ranks": _of_jax("jax_numpy_rank_promotion", "raise"),
    "check_tracer_leaks": _of_jax("jax_check_tracer_leaks", True),
}
"""Modes for `arrayopt.optax`."""
