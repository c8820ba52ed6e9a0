"""Compiled C++: from this process, from the cache, or from the compiler."""

import ctypes
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any

from arrayopt.engines.base import CompilationError
from arrayopt.engines.compiling import compiling
from arrayopt.engines.cpp.compiler import Compiler, compiler, end_all, library
from arrayopt.engines.native.kept import kept_in, read, turn, write
from arrayopt.engines.threads import process_count

__all__ = ["ahead", "bound"]

_loaded: dict[tuple[str, str], Any] = {}
_lock = threading.Lock()


def bound(text: str, what: str) -> Callable[..., Callable[[int, int, int, int], Any]]:
    """The function `run` of a source, as `arrayopt.engines.native.table.Code.bind` has it.

    Parameters
    ----------
    text : str
        The source.
    what : str
        What it is of, for a line that says that it is being compiled.

    Raises
    ------
    CompilationError
        If there is no compiler, or it fails.
    """
    with compiling([what], kept_in()):
        return partial(_bind, _function(compiler(), text))


def ahead(texts: Iterable[tuple[str, str]]) -> None:
    """Compile several sources at once, as many as there are processors; whatever fails is left to `bound`."""
    try:
        found = compiler()
    except CompilationError:
        return
    left = [(text, what) for text, what in texts if (found.identity, text) not in _loaded]
    workers = min(process_count(), len(left))
    if workers < 2:
        return
    with compiling([what for _, what in left], kept_in()), ThreadPoolExecutor(workers, "arrayopt") as pool:
        tasks = [pool.submit(_function, found, text) for text, _ in left]
        try:
            for task in tasks:
                with suppress(CompilationError):
                    task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


def _function(found: Compiler, text: str) -> Any:
    """The function of a source. Only one process at a time compiles it, and the others read what that has kept."""
    key = found.identity, text
    if key in _loaded:
        return _loaded[key]
    identity = f"{found.identity}\n{text}"
    name = f"cpp-{sha256(identity.encode()).hexdigest()[:32]}.so"
    code = read(name, identity)
    if code is None:
        with turn(name, wait=True):
            code = read(name, identity)
            if code is None:
                code = found.compile(text)
                write(name, identity, code)
    call = library(code).run
    call.argtypes = [*[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 5]
    call.restype = None
    with _lock:
        return _loaded.setdefault(key, call)


def _bind(call: Any, *arrays: Any) -> Callable[[int, int, int, int], Any]:
    """A function of compiled code with its arrays, the last of which are the rows."""
    made = partial(call, *(x.ctypes.data for x in arrays), len(arrays[-1]))
    made.arrays = arrays  # type: ignore[attr-defined]  # which live as long as the function
    return made
