"""What can be diagnosed: functions, and the optimizers of PyTorch, optax and this package, as one kind of thing.

Nothing of the user's is written: optimizers, and the parameters that they own, are copied.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arrayopt.arrays import Array, detached, dtype_name, is_array, like
from arrayopt.hyper import is_number
from arrayopt.optimizer import Optimizer
from arrayopt.params.given import named_params
from arrayopt.params.trees import rebuild
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis import probe
from arrayopt.testing.diagnosis.keeping import keeps_nothing

__all__ = ["Subject", "as_subject"]

Step = Callable[[Mapping[str, Array], Mapping[str, Array | None]], Mapping[str, Array]]


@dataclass(frozen=True, eq=False)
class Subject:
    """Something that makes steps.

    Attributes
    ----------
    step : callable
        Takes parameters and gradients by name, and gives the new parameters.
    known : dict of str to (float or array)
        Numbers that it tells, by our names; where tensors have different ones, of shape (1, tensors).
    again : bool
        Whether another subject of the same begins anew.
    """

    name: str
    params: Mapping[str, Array]
    step: Step
    known: Mapping[str, Any]
    again: bool = True


def as_subject(step: Any, params: Any, who: str) -> Subject:
    """Whatever can be diagnosed as a `Subject`.

    Raises
    ------
    TypeError, ValueError
        If it cannot, saying why.
    """
    if isinstance(step, Rule):
        step, params = Optimizer(_given(params, who), step, engine="array_api"), None
    if isinstance(step, Optimizer):
        _check_owner(who, "an Optimizer", params, used=bool(step.step_count), how=f"has made {step.step_count} steps")
        return _ours(step, who)
    if any(c.__module__.partition(".")[0] == "torch" and c.__name__ == "Optimizer" for c in type(step).__mro__):
        used = any(state for state in step.state.values())
        _check_owner(who, "an optimizer of PyTorch", params, used=used, how="has made steps")
        return _torch(step)
    if not isinstance(step, type) and callable(getattr(step, "init", None)) and callable(getattr(step, "update", None)):
        return _optax(step, params, who)
    if callable(step) and not isinstance(step, type):
        return _function(step, params, who)
    method = "; give its method `step`, bound to it" if callable(getattr(step, "step", None)) else ""
    raise TypeError(
        f"{who}: `step` must be a function step(params, grads) -> params, a torch.optim.Optimizer, an optax"
        f" transformation, or an arrayopt Optimizer or Rule; got {step!r}{method}"
    )


def _given(params: Any, who: str) -> Any:
    """Copies of what the user gave, or chosen parameters."""
    if params is None:
        return probe.parameters()
    named_params(params, who, functional=True)
    return rebuild(params, lambda x: like(x, detached(x)) if is_array(x) else x)


def _check_owner(who: str, what: str, params: Any, *, used: bool, how: str) -> None:
    """Raise ValueError where an optimizer that owns its parameters is given others, or has been used."""
    if params is not None:
        raise ValueError(f"{who}: {what} has its own parameters; leave `params` out")
    if used:
        raise ValueError(f"{who}: {what} must be fresh; it {how}")


def _filled(tree: Any, values: Mapping[str, Any]) -> Any:
    """A tree with other leaves, in their order."""
    rest = iter(values.values())
    return rebuild(tree, lambda x: None if x is None else next(rest))


def _function(step: Callable[..., Any], params: Any, who: str) -> Subject:
    tree = _given(params, who)
    name = getattr(step, "__qualname__", type(step).__name__).replace(".<locals>", "")

    def one(now: Mapping[str, Array], grads: Mapping[str, Array | None]) -> Mapping[str, Array]:
        here, there = _filled(tree, now), _filled(tree, grads)
        new = step(here, there)
        made = dict(named_params(here if new is None else new, f"{who}: what {name} returned", functional=True))
        if set(made) != set(now):
            raise ValueError(f"{who}: {name} must return the parameters, {list(now)}; got {list(made)}")
        made = {key: made[key] for key in now}
        for key, x in made.items():
            if tuple(x.shape) != tuple(now[key].shape):
                raise ValueError(f"{who}: {name} must keep shapes; {key!r} was {now[key].shape}, is {x.shape}")
            if dtype_name(x) != dtype_name(now[key]):
                dtypes = f"{dtype_name(now[key])}, is {dtype_name(x)}"
                raise ValueError(f"{who}: {name} must keep dtypes; {key!r} was {dtypes}")
        return {key: like(x, detached(x)) for key, x in made.items()}

    return Subject(name, dict(named_params(tree, who, functional=True)), one, {}, again=keeps_nothing(step))


def _ours(opt: Optimizer, who: str) -> Subject:
    mine = copy.deepcopy(opt)
    rules = {name: group.rule for group in mine.groups for name in group.names}
    tensors = dict(named_params(mine.params, who))
    rows = [{k: v for k in hypers(type(r)) if is_number(v := getattr(r, k))} for r in map(rules.__getitem__, tensors)]

    def one(now: Mapping[str, Array], grads: Mapping[str, Array | None]) -> Mapping[str, Array]:
        return dict(named_params(mine.step(_filled(mine.params, grads)), who))

    return Subject(type(mine.rule).__name__, tensors, one, _agreed(rows))


def _agreed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the numbers of each tensor those that all have; as an array where they are not the same."""
    shared = [key for key in rows[0] if all(key in row for row in rows)]
    made: dict[str, Any] = {}
    for key in shared:
        values = np.array([[float(row[key]) for row in rows]])
        made[key] = values if np.ptp(values) else float(values[0, 0])
    return made


def _torch(opt: Any) -> Subject:
    mine = copy.deepcopy(opt)
    tensors: dict[str, Array] = {}
    rows = []
    for group in mine.param_groups:
        names = group.get("param_names") or range(len(tensors), len(tensors) + len(group["params"]))
        for name, x in zip(names, group["params"], strict=True):
            tensors[str(name)] = x
            rows.append(_numbers(group))

    def one(now: Mapping[str, Array], grads: Mapping[str, Array | None]) -> Mapping[str, Array]:
        for name, x in tensors.items():
            x.grad = grads[name]
        mine.step()
        return tensors

    return Subject(type(mine).__name__, tensors, one, _agreed(rows))


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """The hyper-parameters of a group that have a plain counterpart here."""
    made: dict[str, float] = {}
    for key, x in group.items():
        if key == "betas" and isinstance(x, tuple | list):
            made |= {f"beta{i}": float(b) for i, b in enumerate(x, 1)}
        elif key in ("lr", "eps", "weight_decay", "momentum", "dampening"):
            value = x.item() if is_array(x) and x.ndim == 0 else x
            if is_number(value) and math.isfinite(value):
                made[key] = float(value)
    return made


def _optax(transformation: Any, params: Any, who: str) -> Subject:
    import jax

    given = {k: jax.numpy.asarray(x) for k, x in probe.parameters().items()} if params is None else params
    tree = _given(given, who)
    held: dict[str, Any] = {}

    def one(now: Mapping[str, Array], grads: Mapping[str, Array | None]) -> Mapping[str, Array]:
        here = _filled(tree, now)
        if not held:
            held["state"] = transformation.init(here)
        there = _filled(tree, {k: jax.numpy.zeros_like(now[k]) if g is None else g for k, g in grads.items()})
        updates, held["state"] = transformation.update(there, held["state"], here)
        new = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), here, updates)
        made = dict(named_params(new, who, functional=True))
        return {key: made[key] for key in now}  # JAX sorts keys

    update = getattr(transformation.update, "__qualname__", "")
    name = update.partition(".")[0] if update and not update.startswith("chain") else "the optax transformation"
    return Subject(name, dict(named_params(tree, who, functional=True)), one, {})
