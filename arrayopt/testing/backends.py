"""Backends: pairs of an array library and an engine that supports its arrays, named ``library:engine``."""

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
"""The name of the functional form compiled by JAX, used in place of an engine."""


@dataclass(frozen=True)
class Backend:
    """An array library and an engine that updates its arrays.

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
        """The name, such as ``"numpy:numba"``."""
        return f"{self.library.name}:{self.engine}"

    @property
    def xp(self) -> Any:
        """The library's array-API namespace."""
        return self.library.xp

    def array(self, values: Any, dtype: str = "float32") -> Array:
        """Return an array of the library with these values and this dtype."""
        return self.library.array(values, dtype)

    def numpy(self, x: Array) -> Any:
        """Return an array of the library as a NumPy array of float64 or complex128."""
        return to_numpy(x)


def backend_names() -> list[str]:
    """Return the names of all backends, installed or not.

    Returns
    -------
    list of str
        ``["numpy:array_api", "numpy:numpy", ...]``. The first is the reference of ``arrayopt verify``.
    """
    return [f"{library}:{engine}" for library in LIBRARIES for engine in _engines(library)]


def choose(names: Iterable[str] | None = None) -> list[Backend]:
    """Import libraries, and return the backends with these names.

    Parameters
    ----------
    names : iterable of str, optional
        Names ``library:engine``. The name of a library or an engine alone stands for all of its backends. By default
        all backends that are installed.

    Raises
    ------
    ValueError
        If there is no backend of a name.
    UnavailableError
        If a named library cannot be used, with the reason.
    """
    wanted, every = [] if names is None else listed("compare: `engines`", names), backend_names()
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
    """The functional form with the methods `step` and `state` of an optimizer. It writes to no array.

    `compiled` compiles the update function, as `jax.jit` does.
    """

    def __init__(self, rule: Rule, params: Any, groups: Any, compiled: Callable[[Any], Any] = lambda f: f) -> None:
        self.params, self._state = params, init(rule, params, groups=groups)
        self._update = compiled(partial(update, rule, groups=groups))

    @property
    def state(self) -> Mapping[str, Any]:
        """The state of each tensor, by name."""
        found: Mapping[str, Any] = self._state["tensors"]
        return found

    def step(self, grads: Mapping[str, Array | None], **options: Any) -> Any:
        """Make a step with these options of `arrayopt.update`, and return the parameters."""
        self.params, self._state = self._update(self.params, grads, self._state, **options)
        return self.params


def start(backend: Backend, rule: Rule, params: Any, options: Mapping[str, Any]) -> Optimizer | Functional:
    """Return an optimizer of these parameters on a backend. Raise what `Optimizer` raises if the rule cannot run."""
    if backend.engine != JIT:
        return Optimizer(params, rule, engine=backend.engine, **options)
    from jax import jit

    if set(options) - {"groups"}:
        raise ValueError("the functional form takes no other options than groups")
    return Functional(rule, dict(flatten(params)), options.get("groups"), jit)


def _engines(library: str) -> tuple[str, ...]:
    """The engines of a library, and ``"jit"`` for JAX."""
    return engines_for(library) + ((JIT,) if library == "jax" else ())
