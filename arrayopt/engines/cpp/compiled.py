"""Compiled C++: from this process, from the cache, or from the compiler."""

import ctypes
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np

from arrayopt.engines.base import CompilationError
from arrayopt.engines.compiling import LOG, compiling
from arrayopt.engines.cpp.compiler import Compiler, compiler
from arrayopt.engines.cpp.process import end_all, library
from arrayopt.engines.native.cache import kept_in, read, turn, write
from arrayopt.engines.threads import process_count

_loaded: dict[tuple[str, str], Any] = {}


def bound(text: str, what: str) -> Callable[..., Callable[[int, int, int, int], Any]]:
    """The function `run` of a source, as `arrayopt.engines.native.table.Table.compile` has it.

    `what` it is of is said in a line while it is being compiled.

    Raises
    ------
    CompilationError
        If there is no compiler, or it fails.
    """
    found = compiler()
    call = _loaded.get((found.identity, text))
    if call is None:
        with compiling([what], kept_in()):
            call = _function(found, text)
    return partial(_bind, call)


def ahead(texts: Iterable[tuple[str, str]]) -> None:
    """Compile several sources in parallel; failures are left to `bound`."""
    try:
        found = compiler()
    except CompilationError:
        return
    left = [(text, what) for text, what in texts if (found.identity, text) not in _loaded]
    workers = min(process_count(), len(left))
    if workers < 2:
        return
    with (
        compiling([what for _, what in left], kept_in()),
        ThreadPoolExecutor(workers, "arrayopt") as pool,
    ):
        tasks = [pool.submit(_function, found, text, wait=False) for text, _ in left]
        try:
            wait(tasks)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(task.done() for task in tasks):
                end_all()
                time.sleep(0.02)  # another may just be starting
            raise


def _function(found: Compiler, text: str, *, wait: bool = True) -> Any:
    """The function of a source. Only one process at a time compiles it, and the others read what
    that has kept.

    Where another process is about it, this one waits or, without `wait`, leaves it for later and
    returns None.
    """
    key = found.identity, text
    if key in _loaded:
        return _loaded[key]
    name, identity = _name(found, text)
    call = _kept(name, identity)
    if call is None:
        with turn(name, wait=wait) as mine:
            if not mine:
                return None
            call = _kept(name, identity)
            if call is None:
                code = found.compile(text)
                call = library(code).run
                write(name, identity, code)
    call.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4]
    call.restype = None
    return _loaded.setdefault(key, call)


def _name(found: Compiler, text: str) -> tuple[str, str]:
    """The file that a library is kept in, and all that it depends on."""
    identity = f"{found.identity}\n{text}"
    return f"cpp-{sha256(identity.encode()).hexdigest()[:32]}.so", identity


def _kept(name: str, identity: str) -> Any:
    """The function of a library that was kept; None where there is none that this system loads."""
    code = read(name, identity)
    try:
        return None if code is None else library(code).run
    except CompilationError as error:
        # it is as we wrote it; still, what cannot be used must not be missed
        LOG.warning("arrayopt: what was kept as %s is compiled again: %s", name, error)
        return None


def _bind(call: Any, *arrays: Any) -> Callable[[int, int, int, int], Any]:
    """A function of compiled code with its arrays, the last of which are the rows."""
    block = np.array([*(x.ctypes.data for x in arrays), len(arrays[-1])], np.int64)
    made = partial(call, ctypes.c_void_p(block.ctypes.data))
    made.arrays = block, arrays  # type: ignore[attr-defined]  # which live as long as the function
    return made
