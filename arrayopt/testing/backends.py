"""Backends: array libraries with the engines that take their arrays, each named ``library:engine``."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from arrayopt.arrays import Array
from arrayopt.functional import init, update
from arrayopt.hyper import listed
from arrayopt.libraries import LIBRARIES, Library, UnavailableError, engines_for, open_library, to_numpy
from arrayopt.optimizer import Optimizer
from arrayopt.params.trees import flatten
from arrayopt.rules.base import Rule

JIT = "jit"
"""Beside the engines: the functional form, compiled by JAX."""


@dataclass(frozen=True)
class Backend:
    """An array library, and an engine that updates its arrays.

    Parameters
    ----------
    library : Library
        The array library.
    engine : str
        An engine of `Optimizer`, or ``"jit"``: `arrayopt.update` under ``jax.jit``.
    """

    library: Library
    engine: str

    @property
    def name(self) -> str:
        """Such as ``"numpy:numba"``."""
        return f"{self.library.name}:{self.engine}"

    @property
    def xp(self) -> Any:
        """The library's array-API namespace."""
        return self.library.xp

    def array(self, values: Any, dtype: str = "float32") -> Array:
        """Return an array of the library, of these values and this dtype."""
        return self.library.array(values, dtype)

    def numpy(self, x: Array) -> Any:
        """The values of an array of the library, as a float64 or complex128 NumPy array."""
        return to_numpy(x)


def backend_names() -> list[str]:
    """The names of all backends, installed or not.

    Returns
    -------
    list of str
        ``["numpy:array_api", "numpy:numpy", ...]``; the first is the reference of ``arrayopt verify``.
    """
    return [f"{library}:{engine}" for library in LIBRARIES for engine in _engines(library)]


def choose(names: Iterable[str] | None = None) -> list[Backend]:
    """The backends of some names, imported.

    Parameters
    ----------
    names : iterable of str, optional
        ``library:engine``; a library or an engine alone stands for all backends that have it. By default all that are
        installed.

    Raises
    ------
    ValueError
        For a name that there is not.
    UnavailableError
        If a named library cannot be used, with the reason.
    """
    wanted, every = [] if names is None else listed("choose: backends", names), backend_names()
    named = set(every if names is None else ())
    for name in wanted:
        some = [x for x in every if name == x or name in x.split(":")]
        if not some:
            raise ValueError(f"there is no backend {name!r}; there are {', '.join(every)}, or parts of these")
        named |= set(some)
    chosen = []
    for library in LIBRARIES:
        engines = [engine for engine in _engines(library) if f"{library}:{engine}" in named]
        try:
            opened = open_library(library) if engines else None
        except UnavailableError:
            if any(name.partition(":")[0] == library for name in wanted):
                raise
            continue
        chosen += [Backend(opened, engine) for engine in engines if opened is not None]
    return chosen


class Functional:
    """The functional form with the `step` and the `state` of an optimizer; `compiled` is `jax.jit` or the like.

    It writes to no array.
    """

    def __init__(self, rule: Rule, params: Any, groups: Any, compiled: Callable[[Any], Any] = lambda f: f) -> None:
        self.params, self._state = params, init(rule, params, groups=groups)
        self._update = compiled(partial(update, rule, groups=groups))

    @property
    def state(self) -> Mapping[str, Any]:
        """The state of each tensor by its name."""
        found: Mapping[str, Any] = self._state["tensors"]
        return found

    def step(self, grads: Mapping[str, Array | None], **options: Any) -> Any:
        """Take a step with some options of `arrayopt.update`, and return the parameters."""
        self.params, self._state = self._update(self.params, grads, self._state, **options)
        return self.params


def start(backend: Backend, rule: Rule, params: Any, options: Mapping[str, Any]) -> Optimizer | Functional:
    """A rule on parameters of a backend, ready to step; raises what `Optimizer` raises where it cannot run."""
    if backend.engine != JIT:
        return Optimizer(params, rule, engine=backend.engine, **options)
    from jax import jit

    if set(options) - {"groups"}:
        raise ValueError("the functional form takes no other options than groups")
    return Functional(rule, dict(flatten(params)), options.get("groups"), jit)


def _engines(library: str) -> tuple[str, ...]:
    """All ways to update a library's arrays."""
    return engines_for(library) + ((JIT,) if library == "jax" else ())
