"""Whether a rule writes what it is given: its update is run on copies, and they are looked at afterwards."""

from collections.abc import Mapping
from typing import Any

from arrayopt.arrays import WORKING, Array, array_namespace, detached, dtype_name, size, working_dtype
from arrayopt.engines.apply import apply
from arrayopt.libraries import to_numpy
from arrayopt.rules.base import Rule

__all__ = ["assert_pure"]


def assert_pure(
    rules: Mapping[str, Rule],
    state: Mapping[str, Any],
    arrays: Mapping[str, Array],
    grads: Mapping[str, Array | None],
) -> None:
    """Raise AssertionError where a rule's update would write the parameter, the gradient or a slot of a tensor.

    Rules, parameters and the next step's gradients are by tensor name, and the state is as `arrayopt.update` takes it.
    Nothing of them is changed.
    """
    for name, rule in rules.items():
        p, g = arrays[name], grads[name]
        if g is None or not size(p):
            continue
        old = dict(state["tensors"][name])
        t = old.pop("t") + 1
        given = {"p": _wide(p), "g": _wide(g), **{slot: _wide(x) for slot, x in old.items()}}
        before = {key: to_numpy(x).tobytes() for key, x in given.items()}
        slots = {slot: given[slot] for slot in old}
        apply(rule, given["p"], given["g"], slots, t, rule.at(state["step"]))
        changed = {key for key, x in given.items() if to_numpy(x).tobytes() != before[key]}
        written = [f"`{'p' if key == 'master' else key}`" for key in given if key in changed]
        if written:
            raise AssertionError(
                f"{type(rule).__name__}.update must not write to its inputs; it writes to"
                f" {', '.join(written)} of {name!r}: make a new array, as in m = 0.9 * m instead of m *= 0.9"
            )


def _wide(x: Array) -> Array:
    """A copy in the dtype of arithmetic, which a rule gets as it is."""
    xp = array_namespace(x)
    dtype = working_dtype(xp, x) if dtype_name(x) in WORKING else x.dtype
    return xp.astype(detached(x), dtype, copy=True)
