"""The state of optax's transformations, translated to that of an `Optimizer`."""

from collections.abc import Iterator
from typing import Any

from arrayopt.arrays import like, to_host
from arrayopt.exchange.given import put_fields
from arrayopt.foreign import OPTAX
from arrayopt.optimizer import Optimizer
from arrayopt.params.trees import flatten

__all__ = ["load_optax"]

_FOUND = {"mu": "m", "nu": "v", "trace": "buf"}
"""Slots, by the names of fields in optax's states."""

_HYPERS = {**OPTAX, "decay": "momentum"}
"""Fields whose name is another in optax."""


def load_optax(opt: Optimizer, state: Any) -> None:
    """Go on from the state of an optax transformation: ``adamw``, ``adam``, ``lamb``, ``sgd``, ``lion`` and their like.

    Parameters
    ----------
    opt : Optimizer
        Over the same parameters, of any library, under the rule that the transformation is; its slots must all be among
        ``m`` (optax's ``mu``), ``v`` (``nu``) and ``buf`` (``trace``).
    state : optax state
        What ``transformation.init`` or ``update`` returned. In it are looked for: one state with ``mu`` and ``nu``, or
        with ``trace``, or one of `arrayopt.optax`, which every slot is taken of; its ``count``; and the ``hyperparams``
        of ``optax.inject_hyperparams``.

    Raises
    ------
    TypeError
        If `opt` is no Optimizer, there is nothing of that kind in the state, or it is of another rule.
    ValueError
        If it does not fit, listing every mismatch. Nothing has been changed then.

    Notes
    -----
    optax keeps hyper-parameters in its functions and not in its state: those of the rule stay, unless injected.
    `step_count` becomes the number of updates. optax's ``amsgrad`` takes the maximum of corrected moments, which no
    field here does; its state is refused.

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
    """The state dict that the optimizer is to have."""
    parts = list(_parts(state))
    held = [x for x in parts if any(name in x._fields for name in (*_FOUND, "slots"))]
    if len(held) != 1:
        what = f"{len(held)}: {', '.join(type(x).__name__ for x in held)}" if held else type(state).__name__
        raise TypeError(f"load_optax: needs an optax state with one of `mu` and `nu`, or `trace`; got {what}")
    if "nu_max" in held[0]._fields:
        raise ValueError("load_optax: optax's amsgrad takes the maximum of corrected moments; no field here does")
    counts = [int(x.count) for x in [*held, *parts] if "count" in x._fields]
    count = counts[0] if counts else 1
    ours = "slots" in held[0]._fields
    trees = held[0].slots if ours else {s: getattr(held[0], n) for n, s in _FOUND.items() if n in held[0]._fields}
    theirs = {slot: dict(flatten(tree)) for slot, tree in trees.items()}
    saved, wrong = opt.state_dict(), list[str]()
    if ours:
        _check_ours(opt, held[0], {slot for about in saved["tensors"].values() for slot in about["slots"]})
    for name, about in saved["tensors"].items():
        own = [slot for slot in about["slots"] if ours or slot not in ("master", "slow", "ema")]
        lacking = [slot for slot in own if theirs.get(slot, {}).get(name) is None]
        if lacking:
            wrong.append(f"{', '.join(lacking)} of {name!r}")
            continue
        for slot in own:
            mine, x = about["slots"][slot], theirs[slot][name]
            if tuple(x.shape) != tuple(mine.shape):
                wrong.append(f"shape {tuple(mine.shape)} of {slot} of {name!r}, which is {tuple(x.shape)}")
            else:
                about["slots"][slot] = like(mine, to_host(x).astype(to_host(mine).dtype))
        about["t"] = count
    extra = [name for each in theirs.values() for name in each if name not in saved["tensors"]]
    if wrong or extra:
        also = f"; there are others, {', '.join(map(repr, dict.fromkeys(extra)))}" if extra else ""
        raise ValueError(f"load_optax: the state lacks {'; '.join(wrong) or 'nothing'}{also}")
    saved["step"] = count
    _put_hypers(saved, parts)
    return saved


def _check_ours(opt: Optimizer, state: Any, slots: set[str]) -> None:
    """Raise where a state of `arrayopt.optax` is of another rule, or has slots that the optimizer does not."""
    rules = {type(group.rule) for group in opt.groups}
    if rules != {getattr(state, "rule", type(opt.rule))}:
        names = ", ".join(sorted(rule.__name__ for rule in rules))
        raise TypeError(f"load_optax: the state is a {type(state).__name__}, and the optimizer's rule is {names}")
    more = [slot for slot in state.slots if slot not in slots]
    if more:
        raise ValueError(f"load_optax: the state has {', '.join(more)}, which the optimizer's rule does not have")


def _parts(state: Any) -> Iterator[Any]:
    """The namedtuples in a state, the outer ones first."""
    if hasattr(state, "_fields"):
        yield state
    for x in state.values() if isinstance(state, dict) else state if isinstance(state, tuple | list) else ():
        yield from _parts(x)


def _put_hypers(saved: dict[str, Any], parts: list[Any]) -> None:
    """Take over what was injected, except where there is a schedule here."""
    injected = {k: x for part in parts if "hyperparams" in part._fields for k, x in part.hyperparams.items()}
    fields = {_HYPERS.get(name, name): float(x) for name, x in injected.items()}
    for rule in (saved["rule"], *saved["groups"]):
        kept = rule["hypers"].keys() - set(rule.get("own", ()))
        put_fields(rule, {name: x for name, x in fields.items() if name in kept})
