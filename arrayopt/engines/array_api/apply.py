"""Apply a rule's `update`, as written, to one tensor, or to each of its layers or blocks. `apply`
takes and returns arrays, and writes nothing. `array_api` and `functional.update` call it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import (
    Array,
    Ints,
    array_namespace,
    dtype_name,
    is_array,
    place,
    sharded_like,
    size,
)
from arrayopt.engines.array_api.apply_one import Done, Update, apply_one
from arrayopt.engines.layers import split
from arrayopt.state.blocks import Cut


def apply(
    update: Update,
    p: Array,
    g: Array,
    slots: dict[str, Array],
    *,
    first: int = 0,
    stacked: bool | None = None,
) -> Done:
    """Return the new parameter, slots (each in its dtype) and report of one update of a tensor.

    If the rule, or the argument, is `stacked`, each layer is updated like a tensor of its own, and
    has its own report; `t` may be an array with a number for each. All layers are updated at once
    if `layerwise.py` supports all operations of the rule. Random numbers depend on the tensor's
    name and on the position of its `first` element.

    Arithmetic is in at least float32; results are rounded once, to the dtype that stores them.

    Raises
    ------
    ValueError
        If the rule returns other slots or shapes than those passed to it.
    """
    if not array_api_compat.is_jax_array(p):
        return _of_tensor(update, p, g, slots, first, stacked)
    numbers = {**update.hypers, "t": update.t, "": update.clip}  # no field has that name
    arrays = {key: x for key, x in numbers.items() if is_array(x)}

    def made(p: Array, g: Array, slots: dict[str, Array], arrays: dict[str, Array]) -> Any:
        h = numbers | arrays
        own = replace(update, t=h.pop("t"), clip=h.pop(""), hypers=h)
        return _of_tensor(own, p, g, slots, first, stacked)

    updated: Done = sharded_like(lambda: (p, slots, None), made, p, g, slots, arrays)
    return updated


def _of_tensor(
    update: Update, p: Array, g: Array, slots: dict[str, Array], first: int, stacked: bool | None
) -> Done:
    """Update a tensor: as a whole, by its blocks, or by its layers."""
    rule = update.rule
    if stacked is None and rule.blocks is not None:
        return _of_blocks(update, p, g, slots, first)
    if not (rule.stacked if stacked is None else stacked) or size(p) == 0:
        return apply_one(update, p, g, slots, first)
    firsts = first + np.arange(p.shape[0]) * (size(p) // p.shape[0])
    return _of_layers(update, p, g, slots, firsts)


def _of_layers(
    update: Update, param: Array, grad: Array, slots: dict[str, Array], firsts: Ints
) -> Done:
    """Update the layers of a stacked tensor, at once if possible; `firsts` are the positions of
    their first elements.
    """
    if size(param) == 0:
        return param, slots, {}
    if array_api_compat.is_jax_array(param):
        return _of_layers_in_jax(update, param, grad, slots, firsts)
    if param.shape[0] > 1:  # else a block, for example, that has no neighbour of its length
        # an operation that is not supported for all layers at once runs, or raises, for each layer
        with suppress(Exception):
            if update.differs:
                return _by_number(update, param, grad, slots)
            follow_each_other = bool((np.diff(firsts) == size(param) // param.shape[0]).all())
            first = int(firsts[0]) if follow_each_other else None
            return apply_one(update, param, grad, slots, first, together=True)
    return _one_by_one(update, param, grad, slots, firsts)


def _of_layers_in_jax(
    update: Update, p: Array, g: Array, slots: dict[str, Array], firsts: Ints
) -> Done:
    """Update all layers at once, by `jax.vmap`."""
    import jax

    def of_layer(p: Array, g: Array, slots: dict[str, Array], first: Any, own: Any) -> Done:
        return apply_one(update.of_layer(own), p, g, slots, first)

    own = update.of_layers | ({"t": jax.numpy.asarray(update.t)} if update.differs else {})
    mapped: Done = jax.vmap(of_layer)(p, g, slots, jax.numpy.asarray(firsts), own)
    return mapped


def _one_by_one(
    update: Update, param: Array, grad: Array, slots: dict[str, Array], firsts: Ints
) -> Done:
    """Update the layers one after the other."""
    done, each = list[Done](), update.of_layers
    for i, (p, g) in enumerate(zip(split(param), split(grad), strict=True)):
        of_layer = {name: x[i, ...] for name, x in slots.items()}
        own = {key: x[i, ...] for key, x in each.items()}
        own |= {"t": int(update.t[i])} if update.differs else {}
        done.append(apply_one(update.of_layer(own), p, g, of_layer, int(firsts[i])))
    xp, device = place(param)

    def join(values: list[Any]) -> Array:
        """Stack arrays, or Python numbers, such as a trust ratio that is switched off."""
        return xp.stack(values) if is_array(values[0]) else xp.asarray(values, device=device)

    return _joined(done, join)


def _by_number(update: Update, param: Array, grad: Array, slots: dict[str, Array]) -> Done:
    """Update all layers, at once those with the same update count."""
    (xp, device), numbers = place(param), np.array([int(number) for number in update.t])
    order, done = np.argsort(numbers, kind="stable"), []
    for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        on_device = xp.asarray(rows, device=device)
        own: dict[str, Any] = {"t": int(numbers[rows[0]])}
        for key, x in update.of_layers.items():
            own[key] = x[rows] if isinstance(x, np.ndarray) else xp.take(x, on_device, axis=0)
        every = [xp.take(x, on_device, axis=0) for x in (param, grad, *slots.values())]
        of_layers = dict(zip(slots, every[2:], strict=True))
        now = update.of_layer(own)
        done.append(apply_one(now, every[0], every[1], of_layers, None, together=True))
    back = xp.asarray(np.argsort(order), device=device)
    return _joined(done, lambda parts: xp.take(xp.concat(parts), back, axis=0))


def _of_blocks(update: Update, p: Array, g: Array, slots: dict[str, Array], first: int) -> Done:
    """Update all blocks, those of one length at once."""
    cut = Cut(update.rule, p.shape, dtype_name(p))
    concat = array_namespace(p).concat
    stacks = list(zip(cut.parameter(p), cut.parameter(g), cut.slots(slots), strict=True))
    done = dict[int, Done]()  # by the place of a stack
    for alike in cut.alike:
        firsts = np.concatenate([cut.firsts_of(i) for i in alike]) + first
        if len(alike) == 1:
            done[alike[0]] = _of_layers(update, *stacks[alike[0]], firsts)
            continue
        params, grads, own = zip(*(stacks[i] for i in alike), strict=True)
        joined = concat(params), concat(grads), _by_name(own, concat)
        made = _of_layers(update, *joined, firsts)
        end = 0
        for i in alike:
            begin, end = end, end + cut.stretches[i].count
            done[i] = _sliced(made, begin, end)
    params, news, reports = zip(*(done[i] for i in range(len(stacks))), strict=True)
    return cut.joined(params), cut.joined_slots(news), _by_name(reports, concat)


def _sliced(done: Done, begin: int, end: int) -> Done:
    """Return the parameters, slots and reports of the layers from `begin` to `end`."""
    p, slots, report = done
    own_slots = {name: x[begin:end, ...] for name, x in slots.items()}
    own_report = {name: x[begin:end, ...] for name, x in report.items()}
    return p[begin:end, ...], own_slots, own_report


def _joined(done: list[Any], join: Callable[[list[Any]], Array]) -> Done:
    """Join the parameters, slots and reports of several groups of layers."""
    params, slots, reports = zip(*done, strict=True)
    return join(list(params)), _by_name(slots, join), _by_name(reports, join)


def _by_name(several: Sequence[dict[str, Any]], join: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Join the values of each name in several dicts, which have the same names."""
    made = {}
    for name in several[0]:
        made[name] = join([one[name] for one in several])
    return made
