"""The functional form: state in, state out; nothing is written, and everything can be traced or differentiated."""

from typing import Any

import numpy as np

from arrayopt.arrays import dtype_name
from arrayopt.engines.array_api import apply
from arrayopt.groups import Groups, assign, new_slots, override
from arrayopt.params import match_grads, named_params
from arrayopt.rules.base import Rule
from arrayopt.trees import rebuild

__all__ = ["init", "update"]


def init(rule: Rule, params: Any, *, groups: Groups | None = None) -> dict[str, Any]:
    """The state of a rule before the first step, as a plain tree.

    Parameters
    ----------
    rule : Rule
        The update rule.
    params : array, or dict, list, tuple or namedtuple of them
        The parameters.
    groups : mapping of pattern to overrides, optional
        As for `Optimizer`; give the same to `update`.

    Returns
    -------
    dict
        ``{"step": 0, "tensors": {name: {"t": 0, slot: array, ...}}}``: steps made, and for each tensor its own number
        of updates and its slots, in at least float32.

    Raises
    ------
    TypeError, ValueError
        As for `Optimizer`.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.init(ao.SGD(lr=0.1, momentum=0.9), {"w": np.ones(2)})
    {'step': 0, 'tensors': {'w': {'t': 0, 'buf': array([0., 0.])}}}
    """
    _check_rule("init", rule)
    named = named_params(params, "init")
    rules = _rules(rule, groups, named)
    return {"step": 0, "tensors": {name: {"t": 0, **new_slots(rules[name], name, p)} for name, p in named}}


def update(
    rule: Rule, params: Any, grads: Any, state: dict[str, Any], *, groups: Groups | None = None
) -> tuple[Any, dict[str, Any]]:
    """One step, as a pure function.

    Parameters
    ----------
    rule : Rule
        The update rule; its schedules see ``state["step"]``.
    params : tree of arrays
        The parameters.
    grads : tree of arrays and None
        Gradients, in the structure of params or by tensor name. A tensor whose gradient is None is left as it is.
    state : dict
        As `init` or the last `update` returned it.
    groups : mapping of pattern to overrides, optional
        As for `Optimizer`.

    Returns
    -------
    params, state
        New ones, in the same structure and dtypes.

    Raises
    ------
    TypeError, ValueError
        As for `Optimizer.step`.

    Notes
    -----
    Works under ``jax.jit``, ``jax.grad`` and ``jax.lax.scan``, with PyTorch's autograd, and on every array-API library.
    A traced step cannot raise: a sequence that runs out gives NaN, and schedule values are not checked.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> rule, params = ao.SGD(lr=0.1), {"w": np.ones(2)}
    >>> params, state = ao.update(rule, params, {"w": np.ones(2)}, rule.init(params))
    >>> params, state["step"]
    ({'w': array([0.9, 0.9])}, 1)
    """
    _check_rule("update", rule)
    if not isinstance(state, dict) or not {"step", "tensors"} <= set(state):
        raise TypeError(f"update: `state` must be what init or update returned; got {type(state).__name__}")
    named = named_params(params, "update")
    matched = match_grads("update", named, grads, devices=False)
    if set(state["tensors"]) != {name for name, _ in named}:
        raise ValueError(f"update: state holds {sorted(state['tensors'])}, params {sorted(name for name, _ in named)}")
    rules = _rules(rule, groups, named)
    hypers = {id(r): r.at(state["step"]) for r in rules.values()}
    tensors = dict(state["tensors"])
    new: list[Any] = []
    for name, p in named:
        g = matched[name]
        if g is None:
            new.append(p)
            continue
        r, old = rules[name], tensors[name]
        t = old["t"] + 1
        slots = {slot: x for slot, x in old.items() if slot != "t"}
        expected = list(r.all_slots(np, np.zeros((1,) * p.ndim), dtype_name(p)))
        if set(slots) != set(expected):
            raise ValueError(f"update: the state of {name!r} must hold {expected} for this rule; got {list(slots)}")
        q, slots, _ = apply(r, p, g, slots, t, hypers[id(r)])
        new.append(q)
        tensors[name] = {"t": t, **slots}
    leaves = iter(new)
    return rebuild(params, lambda leaf: leaf if leaf is None else next(leaves)), {
        "step": state["step"] + 1,
        "tensors": tensors,
    }


def _check_rule(who: str, rule: Any) -> None:
    """Raise TypeError for what is no rule."""
    if not isinstance(rule, Rule):
        raise TypeError(f"{who}: `rule` must be a Rule such as LAMB(lr=1e-3); got {rule!r}")


def _rules(rule: Rule, groups: Groups | None, named: list[tuple[str, Any]]) -> dict[str, Rule]:
    """Each tensor's rule, by name."""
    return {
        name: grouped
        for label, overrides, names in assign(rule, groups, named)
        for grouped in [override(rule, overrides, f"group {label!r}")]
        for name in names
    }
