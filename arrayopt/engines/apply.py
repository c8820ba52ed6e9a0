"""An update of a tensor as its rule is written: whole, or of all its layers or blocks."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import (
    Array,
    array_namespace,
    dtype_name,
    is_array,
    place,
    sharded_like,
    size,
)
from arrayopt.engines.apply_one import Done, apply_one
from arrayopt.engines.layers import split
from arrayopt.rules.base import Rule
from arrayopt.rules.names import VALUE
from arrayopt.rules.totals import PREFIX
from arrayopt.state.blocks import Cut

__all__ = ["apply"]


def apply(
    rule: Rule,
    p: Array,
    g: Array,
    slots: dict[str, Array],
    t: Any,
    hypers: dict[str, Any],
    *,
    name: str = "",
    first: int = 0,
    clip: Any = None,
    stats: bool = False,
    stacked: bool | None = None,
) -> Done:
    """One update of one tensor, pure: the new parameter and slots in their dtypes, and what is
    reported.

    Under a rule with `stacked`, or where it is asked for here, each layer is updated as if by
    itself, and what is reported is of each layer; `t` may have a number for each. All layers are
    updated at once where `arrayopt.engines.abreast` knows all that the rule does. Random numbers
    follow from the tensor's `name`, and from the position of its `first` element.

    Arithmetic is in at least float32; what is stored in another dtype is rounded once, at the end.

    Raises
    ------
    ValueError
        If the rule returns other slots, or other shapes, than it was given.
    """
    options: dict[str, Any] = {"name": name, "first": first, "stats": stats, "stacked": stacked}
    if not array_api_compat.is_jax_array(p):
        return _apply(rule, p, g, slots, t, hypers, clip=clip, **options)
    numbers = {**hypers, "t": t, "": clip}  # no field has that name
    arrays = {key: x for key, x in numbers.items() if is_array(x)}

    def made(p: Array, g: Array, slots: dict[str, Array], arrays: dict[str, Array]) -> Any:
        h = numbers | arrays
        return _apply(rule, p, g, slots, h.pop("t"), h, clip=h.pop(""), **options)

    updated: Done = sharded_like(lambda: (p, slots, None), made, p, g, slots, arrays)
    return updated


def _apply(
    rule: Rule,
    p: Array,
    g: Array,
    slots: dict[str, Array],
    t: Any,
    hypers: dict[str, Any],
    *,
    name: str,
    first: int,
    stacked: bool | None,
    **options: Any,
) -> Done:
    """`apply`, as the libraries' arrays are."""

    def one(p: Array, g: Array, slots: dict[str, Array], first: Any, own: dict[str, Any]) -> Done:
        now = {"t": t, **hypers, **own}  # no field is called t
        return apply_one(rule, p, g, slots, now.pop("t"), now, origin=(name, first), **options)

    if stacked is None and rule.blocks is not None:
        return _blocks(rule, p, g, slots, t, hypers, name=name, first=first, **options)
    if not (rule.stacked if stacked is None else stacked) or size(p) == 0:
        return one(p, g, slots, first, {})
    differ, count = getattr(t, "ndim", 0) == 1, p.shape[0]
    some = {key: x for key, x in hypers.items() if key.startswith(PREFIX) or key == VALUE}
    # the numbers that layers have of their own
    each = {key: x for key, x in some.items() if getattr(x, "ndim", 0) == 1}
    if array_api_compat.is_jax_array(p):
        import jax

        firsts = first + jax.numpy.arange(count) * (size(p) // count)
        mine = each | ({"t": jax.numpy.asarray(t)} if differ else {})
        mapped: Done = jax.vmap(one)(p, g, slots, firsts, mine)
        return mapped
    # whatever the rule does otherwise, it does of each layer by itself, and raises there
    with suppress(Exception):
        if differ:
            return _by_number(rule, p, g, slots, t, hypers, name=name, each=each, **options)
        origin = name, first
        return apply_one(rule, p, g, slots, t, hypers, origin=origin, **options, together=True)
    done = []
    for i, (q, h) in enumerate(zip(split(p), split(g), strict=True)):
        of_layer = {name: x[i, ...] for name, x in slots.items()}
        mine = {key: x[i, ...] for key, x in each.items()} | ({"t": int(t[i])} if differ else {})
        done.append(one(q, h, of_layer, first + i * size(q), mine))
    xp, device = place(p)

    def join(values: list[Any]) -> Array:
        """Arrays, or numbers of Python, as a switched-off trust ratio is."""
        return xp.stack(values) if is_array(values[0]) else xp.asarray(values, device=device)

    return _joined(done, join)


def _joined(done: list[Any], join: Callable[[list[Any]], Array]) -> Done:
    """Parameters, slots and reports of some layers, from those of fewer."""
    params, slots, reports = zip(*done, strict=True)
    return join(list(params)), _by_name(slots, join), _by_name(reports, join)


def _by_number(
    rule: Rule,
    param: Array,
    grad: Array,
    slots: dict[str, Array],
    updates: Any,
    hypers: dict[str, Any],
    *,
    name: str,
    each: dict[str, Any],
    **options: Any,
) -> Done:
    """One update of all layers: of those at once that have the same number of updates."""
    arrays = [param, grad, *slots.values()]
    (xp, device), numbers = place(param), np.array([int(number) for number in updates])
    order, done = np.argsort(numbers, kind="stable"), []
    for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        there, now = xp.asarray(rows, device=device), dict(hypers)
        for key, x in each.items():
            now[key] = x[rows] if isinstance(x, np.ndarray) else xp.take(x, there, axis=0)
        mine, of_mine, *rest = (xp.take(x, there, axis=0) for x in arrays)
        given = mine, of_mine, dict(zip(slots, rest, strict=True)), int(numbers[rows[0]]), now
        done.append(apply_one(rule, *given, origin=(name, None), **options, together=True))
    back = xp.asarray(np.argsort(order), device=device)
    return _joined(done, lambda parts: xp.take(xp.concat(parts), back, axis=0))


def _blocks(
    rule: Rule, p: Array, g: Array, slots: dict[str, Array], *args: Any, first: int, **options: Any
) -> Done:
    """`_apply`, to each block of a tensor: to each stack of equal ones."""
    cut, done = Cut(rule, p.shape, dtype_name(p)), []
    stacks = zip(cut.parameter(p), cut.parameter(g), cut.slots(slots), strict=True)
    for stretch, stack in zip(cut.stretches, stacks, strict=True):
        at = first + stretch.start * cut.row
        done.append(_apply(rule, *stack, *args, first=at, stacked=True, **options))
    params, news, reports = zip(*done, strict=True)
    concat = array_namespace(params[0]).concat
    return cut.joined(params), cut.joined_slots(news), _by_name(reports, concat)


def _by_name(several: Sequence[dict[str, Any]], join: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Return dicts of the same names as one, with the values of each name joined."""
    made = {}
    for name in several[0]:
        made[name] = join([one[name] for one in several])
    return made
