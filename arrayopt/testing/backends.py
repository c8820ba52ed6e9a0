"""Backends: array libraries with the engines that take their arrays, each named ``library:engine``."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from arrayopt.arrays import Array
from arrayopt.functional import init, update
from arrayopt.hyper import listed
from arrayopt.libraries import LIBRARIES, Library, UnavailableError, engines_for, open_library, to_numpy
from arrayopt.optimizer import Optimizer
from arrayopt.params.trees import flatten
from arrayopt.rules.base import Rule

__all__ = ["Backend", "Stepper", "backend_names", "choose", "start"]

JIT = "jit"
"""Beside the engines: the functional form, compiled by JAX."""


@dataclass(frozen=True)
class Stepper:
    """A run, ready to step."""

    step: Callable[[Mapping[str, Array | None]], Any]  # takes gradients by tensor name, and returns the parameters
    slots: Callable[[str], Any]  # the state of a tensor by its name, in which slots may be replaced


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
        """See `Library.array`."""
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


def start(backend: Backend, rule: Rule, params: Any, options: Mapping[str, Any]) -> Stepper:
    """A rule on parameters of a backend, ready to step; raises what `Optimizer` raises where it cannot run."""
    if backend.engine != JIT:
        opt = Optimizer(params, rule, engine=backend.engine, **options)
        return Stepper(opt.step, opt.state.__getitem__)
    from jax import jit

    groups = options.get("groups")
    if set(options) - {"groups"}:
        raise ValueError("the functional form takes no other options than groups")
    held = {"params": dict(flatten(params)), "state": init(rule, dict(flatten(params)), groups=groups)}
    compiled: Any = jit(lambda params, grads, state: update(rule, params, grads, state, groups=groups))

    def step(grads: Mapping[str, Array | None]) -> Any:
        held["params"], held["state"] = compiled(held["params"], dict(grads), held["state"])
        return held["params"]

    return Stepper(step, lambda name: held["state"]["tensors"][name])


def _engines(library: str) -> tuple[str, ...]:
    """All ways to update a library's arrays."""
    return engines_for(library) + ((JIT,) if library == "jax" else ())
