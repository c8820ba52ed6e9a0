"""`Subject`: one interface to functions and to the optimizers of PyTorch, optax and this package.

Optimizers and their parameters are copied, so that the user's own do not change.
"""

import copy
import dis
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np

from arrayopt.arrays import Array, detached, dtype_name, is_array, like
from arrayopt.exchange.given import below
from arrayopt.foreign import counted, got
from arrayopt.hyper import is_number
from arrayopt.optimizer import Optimizer
from arrayopt.params.given import named_params
from arrayopt.params.trees import rebuild
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis.trajectory import parameters

Step = Callable[[Mapping[str, Array], Mapping[str, Array | None]], Mapping[str, Array]]


@dataclass(frozen=True, eq=False)
class Subject:
    """An optimizer to diagnose."""

    name: str
    params: Mapping[str, Array]
    step: Step  # takes parameters and gradients by name, and returns the new parameters
    known: Mapping[str, Any]  # the hyper-parameters that it states; arrays (1, tensors) if tensors differ
    repeatable: bool = True  # whether another subject of the same optimizer starts from the same state


def as_subject(step: Any, params: Any, who: str) -> Subject:
    """Return the `Subject` of an optimizer, rule or function. Raise TypeError or ValueError for anything else."""
    if isinstance(step, Rule):
        step, params = Optimizer(_given(params, who), step, engine="array_api"), None
    if isinstance(step, Optimizer):
        _check_owner(who, "an Optimizer", params, step.step_count and f"has made {counted(step.step_count, 'step')}")
        return _ours(step, who)
    if any(c.__module__.partition(".")[0] == "torch" and c.__name__ == "Optimizer" for c in type(step).__mro__):
        used = any(step.state.values()) if below(step) is step else below(step).step_count  # ours has state at once
        _check_owner(who, "an optimizer of PyTorch", params, used and "has made steps")
        return _torch(step)
    if not isinstance(step, type) and callable(getattr(step, "init", None)) and callable(getattr(step, "update", None)):
        return _optax(step, params, who)
    if callable(step) and not isinstance(step, type):
        return _function(step, params, who)
    has_method = not isinstance(step, type) and callable(getattr(step, "step", None))
    method = "; pass its method `step`, bound to it" if has_method else ""
    raise TypeError(
        f"{who}: `step` must be a function step(params, grads) -> params, a torch.optim.Optimizer, an optax"
        f" transformation, or an arrayopt Optimizer or Rule; got {got(step)}{method}"
    )


def _given(params: Any, who: str) -> Any:
    """Return a copy of the user's parameters, or default parameters for None."""
    if params is None:
        return parameters()
    named_params(params, who, functional=True)
    return rebuild(params, lambda x: like(x, detached(x)) if is_array(x) else x)


def _check_owner(who: str, what: str, params: Any, used: Any) -> None:
    """Raise ValueError if an optimizer that owns its parameters is given others, or has made steps."""
    if params is not None:
        raise ValueError(f"{who}: {what} has its own parameters; leave `params` out")
    if used:
        raise ValueError(f"{who}: {what} must be fresh; it {used}")


def _filled(tree: Any, values: Mapping[str, Any]) -> Any:
    """Return a tree with its leaves replaced by values, in order."""
    rest = iter(values.values())
    return rebuild(tree, lambda x: None if x is None else next(rest))


def _function(
    step: Callable[..., Any], params: Any, who: str, absent: Callable[[Array], Any] = lambda x: None
) -> Subject:
    """Return the subject of a function. `absent` returns what the function gets in place of a missing gradient."""
    tree = _given(params, who)
    name = getattr(step, "__qualname__", type(step).__name__).replace(".<locals>", "")

    def one(now: Mapping[str, Array], grads: Mapping[str, Array | None]) -> Mapping[str, Array]:
        here = _filled(tree, now)
        new = step(here, _filled(tree, {k: absent(now[k]) if g is None else g for k, g in grads.items()}))
        made = dict(named_params(here if new is None else new, f"{who}: what {name} returned", functional=True))
        if set(made) != set(now):
            raise ValueError(f"{who}: {name} must return the parameters, {list(now)}; got {list(made)}")
        for what, of in (("shapes", lambda x: tuple(x.shape)), ("dtypes", dtype_name)):
            for key, x in now.items():
                if of(made[key]) != of(x):
                    raise ValueError(f"{who}: {name} must keep {what}; {key!r} was {of(x)}, is {of(made[key])}")
        return {key: like(made[key], detached(made[key])) for key in now}

    return Subject(name, dict(named_params(tree, who, functional=True)), one, {}, repeatable=is_stateless(step))


def _ours(opt: Optimizer, who: str) -> Subject:
    copied = copy.deepcopy(opt)
    tensors, rows = dict(named_params(copied.params, who)), dict[str, Mapping[str, Any]]()
    for group in copied.groups:
        own = {name: getattr(group.rule, name) for name in hypers(type(group.rule))}
        rows |= dict.fromkeys(group.names, own)

    def one(now: Mapping[str, Array], grads: Mapping[str, Array | None]) -> Mapping[str, Array]:
        return dict(named_params(copied.step(_filled(copied.params, grads)), who))

    return Subject(type(copied.rule).__name__, tensors, one, _agreed([rows[name] for name in tensors]))


def _torch(opt: Any) -> Subject:
    copied = object.__new__(type(opt))  # `copy.deepcopy(opt)` would drop the attributes of subclasses
    copied.__dict__ |= copy.deepcopy(vars(opt), {id(opt): copied})
    tensors: dict[str, Array] = {}
    rows = []
    for group in copied.param_groups:
        own = {name: group[name] for name in ("lr", "eps", "weight_decay", "momentum", "dampening") if name in group}
        betas = group.get("betas")
        own |= {f"beta{i}": x for i, x in enumerate(betas, 1)} if isinstance(betas, tuple | list) else {}
        names = group.get("param_names") or range(len(tensors), len(tensors) + len(group["params"]))
        tensors |= dict(zip(map(str, names), group["params"], strict=True))
        rows += [own] * len(group["params"])

    def one(now: Mapping[str, Array], grads: Mapping[str, Array | None]) -> Mapping[str, Array]:
        for name, x in tensors.items():
            x.grad = grads[name]
        copied.step()
        return tensors

    return Subject(type(copied).__name__, tensors, one, _agreed(rows))


def _agreed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The hyper-parameters that are numbers for all tensors: floats, or arrays (1, tensors) if tensors differ."""
    made: dict[str, Any] = {}
    for key in rows[0]:
        own: list[Any] = [row.get(key) for row in rows]
        own = [x.item() if is_array(x) and x.ndim == 0 else x for x in own]
        if all(is_number(x) and math.isfinite(x) for x in own):
            values = np.array([own], float)
            made[key] = values if np.ptp(values) else float(values[0, 0])
    return made


def _optax(transformation: Any, params: Any, who: str) -> Subject:
    import jax

    given = {k: jax.numpy.asarray(x) for k, x in parameters().items()} if params is None else params
    kept: dict[str, Any] = {}

    def step(params: Any, grads: Any) -> Any:
        if not kept:
            kept["state"] = transformation.init(params)
        updates, kept["state"] = transformation.update(grads, kept["state"], params)
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)

    update = getattr(transformation.update, "__qualname__", "")
    known = update and not update.startswith("chain")
    step.__qualname__ = update.partition(".")[0] if known else "the optax transformation"
    return replace(_function(step, given, who, jax.numpy.zeros_like), repeatable=True)


LIBRARIES = frozenset({"numpy", "scipy", "torch", "jax", "cupy", *sys.stdlib_module_names})  # assumed stateless
VALUES = (bool, int, float, complex, str, bytes, NoneType, np.generic, np.dtype, np.ufunc)
RANDOM = (np.random.Generator, np.random.RandomState, random.Random)  # their state is not that of an optimizer
WRITES = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR"}  # instructions that change something outside of the function


def is_stateless(x: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Whether calls of a function change no state, as far as its code, its closure and its globals show."""
    if isinstance(x, tuple | frozenset):
        return all(is_stateless(y, seen) for y in x)
    if isinstance(x, BuiltinFunctionType):
        return isinstance(x.__self__, NoneType | ModuleType | RANDOM)
    if isinstance(x, ModuleType | type | FunctionType):
        module = x.__name__ if isinstance(x, ModuleType) else x.__module__  # None if the code was run by exec
        if module and module != "__main__" and module.partition(".")[0] in LIBRARIES:
            return True
    if not isinstance(x, FunctionType) or x in seen:
        return isinstance(x, (FunctionType, *VALUES, *RANDOM))
    codes, used = [x.__code__], set[str]()
    for code in codes:  # and the code of nested functions, which the loop appends
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        used |= set(code.co_names)
        for line in dis.get_instructions(code):
            if line.opname in WRITES or (line.opname == "STORE_DEREF" and line.argval in x.__code__.co_freevars):
                return False
    found = [x.__globals__[name] for name in used if name in x.__globals__]
    found += [cell.cell_contents for cell in x.__closure__ or ()]
    found += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    return all(is_stateless(y, seen | {x}) for y in found)
