"""`load_optax`: loads the state of an optax transformation into an `Optimizer`."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from arrayopt.arrays import dtype_name, is_array, like, to_host
from arrayopt.codecs import QUANTIZED
from arrayopt.exchange.given import put_fields
from arrayopt.foreign_names import OPTAX
from arrayopt.optimizer import Optimizer
from arrayopt.params.trees import flatten
from arrayopt.rules import LAMB, LARS, SGD, Adam, AdamW, Lion, Muon, RAdam, RMSprop, Rule
from arrayopt.state.convert import converted
from arrayopt.state.tensors import Tensor

_ADAM = {"ScaleByAdamState": {"mu": "m", "nu": "v"}}
_TRACE = {"TraceState": {"trace": "buf"}}
_READ: dict[type[Rule], dict[str, dict[str, str]]] = {
    **dict.fromkeys((AdamW, Adam, LAMB, RAdam), _ADAM),
    **dict.fromkeys((SGD, LARS), _TRACE),
    Lion: {"ScaleByLionState": {"mu": "m"}},
    Muon: {"MuonState": {"mu": "m"}},
    RMSprop: {
        **{kind: {"nu": "v"} for kind in ("ScaleByRmsState", "ScaleByRmsWithCountState")},
        **{kind: {"nu": "v", "mu": "m"} for kind in ("ScaleByRStdDevState", "ScaleByRStdDevWithCountState")},
    },
}
"""For each rule, the classes of optax's states for it, with the slot of each field."""

_FIELDS = {"mu", "nu", "trace", "slots"}
"""Fields that hold slots: a state with one of them is an optimizer's."""

_NARROW = {"float16", "bfloat16", *QUANTIZED}
"""Dtypes whose slots cannot be copied to other dtypes, because they may contain square roots or codes."""


def load_optax(opt: Optimizer, state: Any) -> None:
    """Load the state of an optax transformation, such as ``adamw``, ``adam``, ``lamb``, ``sgd`` or ``lion``.

    Parameters
    ----------
    opt : Optimizer
        An optimizer for the same parameters, in any library, with the rule of the transformation: `AdamW`, `Adam`,
        `LAMB`, `RAdam`, `SGD`, `LARS`, `Lion`, `RMSprop` without momentum, or `Muon`, with any `state_dtype`; any rule
        for a state of `arrayopt.optax`.
    state : optax state
        The state from ``transformation.init`` or ``update``. It must contain one state with slots, optax's for that
        rule or one of `arrayopt.optax`. Its ``count``, and the ``hyperparams`` of ``optax.inject_hyperparams``, are
        loaded too.

    Raises
    ------
    TypeError
        If `opt` is not an Optimizer, or the state has no slots or is for another rule.
    ValueError
        If the state does not match, with a list of every mismatch, or if the factor in a ``trace`` is unknown. Nothing
        is changed.

    Notes
    -----
    optax has hyper-parameters in its functions, not in its state, so those of the rule stay, unless they are injected.
    `step_count` becomes the number of updates. The state of optax's ``amsgrad``, which uses the maximum of corrected
    moments, raises an error. ``adamax`` and ``yogi`` have the same state as ``adam``, and cannot be distinguished.

    A ``trace`` must come before the learning rate, as in ``optax.sgd``, so it must be the first of its chain. For your
    own chain, pass the state from the trace on. The trace of ``optax.lars`` contains the learning rate, and is divided
    by that of the rule, which must be the same number and not a schedule. With ``lr_in_momentum=True``, it is not
    divided. States of `arrayopt.optax.lars`, `rmsprop` and `adafactor` need rules with ``lr_in_momentum=True``.

    Examples
    --------
    >>> import jax.numpy as jnp, optax, arrayopt as ao
    >>> params = {"w": jnp.ones(3)}
    >>> theirs = optax.adamw(0.1)
    >>> _, state = theirs.update({"w": jnp.ones(3)}, theirs.init(params), params)
    >>> opt = ao.Optimizer(params, ao.AdamW(lr=0.1))
    >>> ao.load_optax(opt, state)
    >>> opt.step_count, opt.state["w"]["t"]
    (1, 1)
    """
    if not isinstance(opt, Optimizer):
        raise TypeError(f"load_optax: `opt` must be an Optimizer; got {type(opt).__name__}")
    with opt._team.warned("load_optax"):
        saved = _translated(opt, state)
    opt._restore(saved, "load_optax")


def _translated(opt: Optimizer, state: Any) -> dict[str, Any]:
    """The state dict to load into the optimizer, made from a state of optax."""
    parts = list(_parts(state))
    found = _with_slots(state, parts)
    _check_nothing_else(state, found)
    counts = [int(part.count) for part in [found, *parts] if "count" in part._fields]
    saved, count = opt.state_dict(), counts[0] if counts else 1
    is_own = "slots" in found._fields
    if is_own:
        _check_ours(opt, found, {slot for about in saved["tensors"].values() for slot in about["slots"]})
    trees = found.slots if is_own else _trees(opt, found)
    _put_hypers(saved, parts)
    divisors = _divisors(opt, saved, state, parts, found) if "trace" in found._fields and not is_own else {}
    given = {slot: dict(flatten(tree)) for slot, tree in trees.items()}
    wrong = list[str]()
    for group in opt.groups:
        for tensor in group.tensors:
            own = {slot: arrays[tensor.name] for slot, arrays in given.items() if arrays.get(tensor.name) is not None}
            about = saved["tensors"][tensor.name]
            wrong += _put_slots(tensor, group.rule, about, own, divisors.get(tensor.name), is_own=is_own)
            about["t"] = count
    extra = [name for each in given.values() for name in each if name not in saved["tensors"]]
    wrong += [f"unexpected {name!r}" for name in dict.fromkeys(extra)]
    if wrong:
        raise ValueError(f"load_optax: the state does not match params: {'; '.join(wrong)}")
    saved["step"] = count
    return saved


def _with_slots(state: Any, parts: list[Any]) -> Any:
    """The one part of a state that has slots. Raise TypeError if there is none, or several."""
    found = []
    for part in parts:
        if any(name == "slots" or flatten(getattr(part, name)) for name in _FIELDS & {*part._fields}):
            found.append(part)
    if len(found) != 1:
        got = f"{len(found)}: {', '.join(type(x).__name__ for x in found)}" if found else _described(state, parts)
        if any("inner_states" in part._fields for part in parts):
            got += "; of optax.multi_transform load each of its `inner_states` into an optimizer over those parameters"
        raise TypeError(f"load_optax: `state` must be an optax state that has `mu`, `nu` or `trace` once; got {got}")
    return found[0]


def _check_nothing_else(state: Any, found: Any) -> None:
    """Raise ValueError if a state has arrays, other than zeros, that are not in the part with slots."""
    known = {id(array) for _, array in flatten(found)}
    more = [name for name, x in flatten(state) if is_array(x) and x.ndim and id(x) not in known and to_host(x).any()]
    if more:
        raise ValueError(
            f"load_optax: the state also has {', '.join(more)}, which would be lost; pass the optimizer's part of the"
            " state, such as `inner_opt_state`"
        )


def _put_slots(
    tensor: Tensor, rule: Rule, about: dict[str, Any], given: dict[str, Any], divisor: float | None, *, is_own: bool
) -> list[str]:
    """Put a tensor's slots, as far as they are given, into its entry of a state dict. Return what is wrong."""
    wide = rule if is_own else dataclasses.replace(rule, state_dtype=None)
    slots = converted(tensor.array, about["slots"], rule, wide)
    own = [slot for slot in slots if is_own or slot not in ("master", "slow", "ema")]
    lacking = [slot for slot in own if slot not in given]
    if lacking:
        return [f"missing {', '.join(lacking)} of {tensor.name!r}"]
    wrong = list[str]()
    for slot in own:
        here, new, what = slots[slot], given[slot], f"{slot} of {tensor.name!r}"
        dtypes = {dtype_name(here), dtype_name(new)}
        if tuple(new.shape) != tuple(here.shape):
            wrong.append(f"shape {tuple(new.shape)} of {what}, expected {tuple(here.shape)}")
        elif is_own and len(dtypes) > 1 and dtypes & _NARROW:
            wrong.append(f"{dtype_name(new)} of {what}, expected {dtype_name(here)} (set `state_dtype`)")
        else:
            values = to_host(new).astype(to_host(here).dtype)
            slots[slot] = like(here, values if divisor is None else values / divisor)
    about["slots"] = converted(tensor.array, slots, wide, rule)
    return wrong


def _described(state: Any, parts: list[Any]) -> str:
    """The name of a state without slots in errors: the classes of the states in it."""
    return ", ".join(type(x).__name__ for x in parts) or type(state).__name__


def _trees(opt: Optimizer, states: Any) -> dict[str, Any]:
    """The slots in a state of optax, as trees. Raise an error if a rule of `opt` cannot use this state."""
    kind = type(states).__name__
    if kind == "ScaleByAmsgradState":
        raise ValueError(
            "load_optax: optax's amsgrad uses the maximum of bias-corrected moments, which no rule here does"
        )
    for rule in {type(group.rule): None for group in opt.groups}:
        if kind not in _READ.get(rule, {}):
            known = " or ".join(_READ.get(rule, ())) or "none of optax's"
            of = [other.__name__ for other, states in _READ.items() if kind in states]
            also = f", which is that of {', '.join(of)}" if of else ""
            raise TypeError(f"load_optax: the state for {rule.__name__} is {known}; got {kind}{also}")
    return {slot: getattr(states, name) for name, slot in _READ[type(opt.groups[0].rule)][kind].items()}


def _divisors(opt: Optimizer, saved: dict[str, Any], state: Any, parts: list[Any], states: Any) -> dict[str, float]:
    """The divisor of each tensor's trace; empty for SGD. Raise ValueError if the state does not determine it.

    A trace contains the factor -lr if the learning rate comes before the trace in the chain, as in optax.lars.
    """
    chain = [type(x).__name__ for x in _chain_of(state, states)]
    rules = {type(group.rule) for group in opt.groups}
    if rules == {SGD}:
        if chain[:1] != ["TraceState"] or len(chain) == 1:
            raise ValueError(
                "load_optax: the state must show whether the learning rate is applied before or after `trace`; if"
                " after, as in optax.sgd, pass the part of the chain that starts at the trace; got a chain of"
                f" {', '.join(chain) or 'TraceState'}"
            )
        return {}
    if rules != {LARS} or len(chain) != 4 or [chain[1], chain[3]] != ["MaskedState", "TraceState"]:
        raise ValueError(
            "load_optax: the trace for LARS must be that of optax.lars alone, whose chain is MaskedState, MaskedState,"
            f" EmptyState, TraceState; got a chain of {', '.join(chain) or 'TraceState'}"
        )
    inside = {bool(getattr(group.rule, "lr_in_momentum", False)) for group in opt.groups}
    if inside == {True}:
        return dict.fromkeys(saved["tensors"], -1.0)
    if len(inside) > 1:
        raise ValueError("load_optax: `lr_in_momentum` must be the same in all groups, as in optax.lars")
    if chain[2] != "EmptyState":
        raise ValueError(
            "load_optax: the trace of optax.lars contains the learning rate, which was a schedule, so the factors of"
            " past gradients are unknown"
        )
    if any("learning_rate" in part.hyperparams for part in parts if "hyperparams" in part._fields):
        raise ValueError(
            "load_optax: the trace of optax.lars contains the learning rate, which was injected and may have changed;"
            " if it never changed, set that lr on the rule, and pass the state's inner_state"
        )
    numbers = [group["hypers"]["lr"] for group in saved["groups"]]
    lr = numbers[0]
    if not isinstance(lr, int | float) or lr == 0 or any(x != lr for x in numbers):
        had = "; ".join(f"{x!r} in group {group.label!r}" for group, x in zip(opt.groups, numbers, strict=True))
        raise ValueError(
            "load_optax: the trace of optax.lars contains the learning rate and is divided by it: `lr` must be that"
            f" number in all groups, and not 0; got {had}"
        )
    return {name: -float(lr) for name in saved["tensors"]}


def _chain_of(state: Any, part: Any) -> list[Any]:
    """The states of the chain that contains `part`, in order; empty if no chain does."""
    inner = _children(state)
    if any(x is part for x in inner) and not hasattr(state, "_fields"):
        return inner
    return next((found for x in inner if (found := _chain_of(x, part))), [])


def _check_ours(opt: Optimizer, state: Any, slots: set[str]) -> None:
    """Raise an error if a state of `arrayopt.optax` is for another rule, or has slots that the optimizer lacks."""
    rules = {type(group.rule) for group in opt.groups}
    if rules != {getattr(state, "rule", type(opt.rule))}:
        names = ", ".join(sorted(rule.__name__ for rule in rules))
        raise TypeError(f"load_optax: the state is a {type(state).__name__}, but the optimizer's rule is {names}")
    more = [slot for slot in state.slots if slot not in slots]
    if more:
        raise ValueError(f"load_optax: the state has {', '.join(more)}, which the optimizer's rule does not have")


def _parts(state: Any) -> Iterator[Any]:
    """All namedtuples in a state, from the outside in."""
    if hasattr(state, "_fields"):
        yield state
    for x in _children(state):
        yield from _parts(x)


def _children(state: Any) -> list[Any]:
    """The values of a dict, or the items of a tuple or list; empty for anything else."""
    if isinstance(state, dict):
        return list(state.values())
    return list(state) if isinstance(state, tuple | list) else []


def _put_hypers(saved: dict[str, Any], parts: list[Any]) -> None:
    """Copy the hyper-parameters of ``optax.inject_hyperparams`` into a state dict, except where it has schedules."""
    injected = {k: x for part in parts if "hyperparams" in part._fields for k, x in part.hyperparams.items()}
    for rule in (saved["rule"], *saved["groups"]):
        names = {**OPTAX, "decay": "alpha" if "alpha" in rule["hypers"] else "momentum"}
        fields = {names.get(name, name): float(x) for name, x in injected.items()}
        kept = rule["hypers"].keys() - set(rule.get("own", ()))
        put_fields(rule, {name: x for name, x in fields.items() if name in kept})
