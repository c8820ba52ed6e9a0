"""The reference engine: a rule as it is written, on whole arrays of any array-API library."""

from collections.abc import Callable
from functools import partial
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import (
    NARROW,
    Array,
    array_namespace,
    copied,
    detached,
    dtype_name,
    holder,
    is_array,
    on_its_device,
    place,
    sharded_like,
    size,
    working_dtype,
)
from arrayopt.codecs import PAIR
from arrayopt.engines.abreast import Abreast, DrawnAbreast, abreast, of_layers
from arrayopt.engines.base import Asked, Engine, Report
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.layers import Layers, Split, layer_name, layers_with, split, unless
from arrayopt.hyper import is_number
from arrayopt.rules.base import Rule
from arrayopt.rules.draws import DRAWS, Drawn
from arrayopt.rules.names import VALUE, Values
from arrayopt.rules.namespace import current, is_split, low_bits, rule_namespace
from arrayopt.rules.returned import ReturnedError, check_value, form_of
from arrayopt.state.blocks import Cut
from arrayopt.state.quantized import dequantized, narrowed, quantized, scale_of
from arrayopt.state.tensors import Tensor

__all__ = ["ArrayAPI", "apply"]


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
) -> tuple[Array, dict[str, Array], Report]:
    """One update of one tensor, pure: the new parameter and slots in their dtypes, and what is
    reported.

    Under a rule with `stacked`, or where it is asked for here, each layer is updated as if by
    itself, and what is
    reported is of each layer; `t` may have a number for each. All layers are updated at once where
    `arrayopt.engines.abreast` knows all that the rule does. Random numbers follow from the tensor's
    `name`, and from
    the position of its `first` element.

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

    updated: tuple[Array, dict[str, Array], Report] = sharded_like(
        lambda: (p, slots, None), made, p, g, slots, arrays
    )
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
) -> tuple[Array, dict[str, Array], Report]:
    """`apply`, as the libraries' arrays are."""

    def one(
        p: Array, g: Array, slots: dict[str, Array], first: Any, t: Any = t, value: Any = None
    ) -> tuple[Array, dict[str, Array], Report]:
        mine = hypers if value is None else {**hypers, VALUE: value}
        return apply_one(rule, p, g, slots, t, mine, origin=(name, first), **options)

    if stacked is None and rule.blocks is not None:
        return _blocks(rule, p, g, slots, t, hypers, name=name, first=first, **options)
    if not (rule.stacked if stacked is None else stacked) or size(p) == 0:
        return one(p, g, slots, first)
    differ = getattr(t, "ndim", 0) == 1
    values = hypers.get(VALUE)
    values = values if getattr(values, "ndim", 0) == 1 else None
    if array_api_compat.is_jax_array(p):
        import jax

        firsts = first + jax.numpy.arange(p.shape[0]) * (size(p) // p.shape[0])
        own = {} if not differ else {"t": jax.numpy.asarray(t)}
        own |= {} if values is None else {VALUE: values}

        def layer(p: Array, g: Array, slots: dict[str, Array], first: Any, own: Any) -> Any:
            return one(p, g, slots, first, **own)

        mapped: tuple[Array, dict[str, Array], Report] = jax.vmap(layer)(p, g, slots, firsts, own)
        return mapped
    if not differ:
        try:
            # whatever the rule does otherwise, it does of each layer by itself, and raises there
            return apply_one(
                rule, p, g, slots, t, hypers, origin=(name, first), **options, together=True
            )
        except Exception:
            pass
    done = []
    for i, (q, h) in enumerate(zip(split(p), split(g), strict=True)):
        of_layer = {name: x[i, ...] for name, x in slots.items()}
        own = {} if values is None else {VALUE: values[i, ...]}
        done.append(one(q, h, of_layer, first + i * size(q), int(t[i]) if differ else t, **own))
    ps, news, reports = zip(*done, strict=True)
    stack = array_namespace(p).stack
    return (
        stack(ps),
        {name: stack([x[name] for x in news]) for name in slots},
        {name: _stacked(p, [x[name] for x in reports]) for name in reports[0]},
    )


def _blocks(
    rule: Rule, p: Array, g: Array, slots: dict[str, Array], *args: Any, first: int, **options: Any
) -> tuple[Array, dict[str, Array], Report]:
    """`_apply`, to each block of a tensor: to each stack of equal ones."""
    cut, done = Cut(rule, p.shape, dtype_name(p)), []
    stacks = zip(cut.parameter(p), cut.parameter(g), cut.slots(slots), strict=True)
    for stretch, stack in zip(cut.stretches, stacks, strict=True):
        at = first + stretch.start * cut.row
        done.append(_apply(rule, *stack, *args, first=at, stacked=True, **options))
    params, news, reports = zip(*done, strict=True)
    concat = array_namespace(params[0]).concat
    report = {name: concat([own[name] for own in reports]) for name in reports[0]}
    return cut.joined(params), cut.joined_slots(news), report


def _stacked(p: Array, values: list[Any]) -> Array:
    """What is reported of each layer: arrays, or numbers of Python, as a switched-off trust ratio
    is.
    """
    xp, device = place(p)
    return xp.stack(values) if is_array(values[0]) else xp.asarray(values, device=device)


def apply_one(
    rule: Rule,
    p: Array,
    g: Array,
    slots: dict[str, Array],
    t: Any,
    hypers: dict[str, Any],
    *,
    origin: tuple[str, Any],
    clip: Any = None,
    stats: bool = False,
    together: bool = False,
) -> tuple[Array, dict[str, Array], Report]:
    """As `apply`, of a tensor that is not stacked, or of one layer; or all layers `together`. See
    `Tensor.origin`.
    """
    if size(p) == 0:
        return p, slots, {}
    xp = array_namespace(p)
    work, scalar = working_dtype(xp, p), working_dtype(xp, p, real=True)
    h = Values(**{name: _scalar(xp, x, scalar) for name, x in {**hypers, "t": t}.items()})
    drawn = Drawn(p, dtype_name(p), rule.seed, origin[0], t, origin[1])
    if together and getattr(hypers.get(VALUE), "ndim", 0) == 1:
        setattr(h, VALUE, Abreast(getattr(h, VALUE)))
    setattr(h, DRAWS, DrawnAbreast(drawn) if together else drawn)
    space = rule_namespace(abreast(xp) if together else xp)
    run: Callable[..., Any] = partial(of_layers, rule) if together else rule
    norms: Callable[..., Any] = partial(of_layers, rule.norms) if together else rule.norms
    wide_p, wide_g = xp.astype(p, work, copy=False), xp.astype(g, work, copy=False)
    if clip is not None:
        wide_g = wide_g * _scalar(xp, clip, scalar)
    codes = narrowed(slots)
    stored, slots = (
        slots,
        {name: x for name, x in slots.items() if name not in map(scale_of, codes)},
    )
    wide = {
        name: xp.astype(x, scalar) if dtype_name(x) in NARROW else x for name, x in slots.items()
    }
    for name in codes:
        dtype = work if dtype_name(slots[name]) == PAIR else scalar
        wide[name] = dequantized(slots[name], stored[scale_of(name)], dtype)
    with np.errstate(all="ignore"):  # infinity and NaN are data, and no warning
        if "master" in wide:
            wide["master"] = current(p, wide["master"])
        new_p, out = run(space, wide_p, wide_g, wide, h)
    who = type(rule).__name__
    for what, old, new in [
        ("the parameter", p, new_p),
        *((f"slot {name!r}", wide[name], out[name]) for name in slots),
    ]:
        check_value(who, what, old, new, form_of)
    held = {None, *map(holder, (p, g, *stored.values()))}

    def kept(new: Array, wide_old: Array, old: Array) -> Array:
        """What the rule returned in the dtype of what it takes the place of: a copy where something
        else has it.
        """
        if new is wide_old:
            return old
        if is_number(new):
            return xp.full_like(old, new)
        made = xp.astype(new, old.dtype, copy=False)
        made = copied(made) if holder(made) in held else made
        held.add(holder(made))
        return made

    new_slots: dict[str, Array] = {}
    for name, old in stored.items():
        if name in codes:
            new_slots |= _quantized(name, out[name], wide[name], stored)
        elif name == "master" and is_split(old):
            new_slots[name] = kept(low_bits(p, new_p, out[name]), None, old)
        elif name in slots:
            new_slots[name] = kept(out[name], wide[name], old)
    report = {name: x for name, x in out.items() if name not in slots}
    values = p.shape[0] if together else 1
    many = [
        name
        for name, x in report.items()
        if not is_number(x) and not (is_array(x) and size(x) == values)
    ]
    if many:
        raise ReturnedError(
            f"{who}.update: only values per tensor can be reported; got {', '.join(many)}"
        )
    if stats:
        report |= norms(space, wide.get("master", wide_p), wide_g, new_p)
    return kept(new_p, wide_p, p), new_slots, report


def _quantized(name: str, new: Any, wide_old: Array, stored: dict[str, Array]) -> dict[str, Array]:
    """What the rule returned of a slot that is stored as codes, with its scales."""
    codes, scale = stored[name], stored[scale_of(name)]
    if new is wide_old:
        return {name: codes, scale_of(name): scale}
    if is_number(new):
        new = array_namespace(codes).full_like(wide_old, new)
    made = quantized(new, dtype_name(codes), scale.ndim - 1)
    return {name: made[0], scale_of(name): made[1]}


def _scalar(xp: Any, x: Any, dtype: Any) -> Any:
    """A hyper-parameter as the rule sees it: a number, or a 0-d array of the tensor's library."""
    if not is_array(x):
        return x
    return xp.astype(x, dtype) if array_namespace(x) is xp else float(x)


class ArrayAPI(Engine):
    """Whole arrays, one operation after the other: slow, obvious, and what all else is compared
    with.
    """

    name = "array_api"

    def check(self, bucket: Bucket) -> None:
        """Any bucket is for this engine."""

    def prepare(self, bucket: Bucket, asked: Asked) -> Callable[[], dict[str, Report]]:
        """Compute the whole step without writing; the returned function writes it. See
        `Engine.prepare`.
        """
        tensors, grads, groups, one = bucket.tensors, asked.grads, bucket.group_of, _whole
        several = bucket.rule.several
        if isinstance(bucket, Layers):
            several = isinstance(grads, Split)
            one = _stack if several else _layer
        if isinstance(bucket, Layers) and isinstance(grads, Split):
            tensors, grads = bucket.stacks.tensors, grads.stacks
            groups = bucket.group_of_stacks
        took = layers_with(asked.grads)
        # what measures gradients has none
        slots = bucket.rule.several or not isinstance(bucket, Layers)
        done = []
        # infinity and NaN are data: they reach the parameter, and are no warning
        with np.errstate(all="ignore"):
            for k, (x, g, i) in enumerate(zip(tensors, grads, groups, strict=True)):
                if g is not None:
                    call = partial(one, x, x.slots if slots else {})
                    done.append((k, x, *_update(call, bucket.groups[i].rule, x, g, asked, i)))

        def launch() -> dict[str, Report]:
            reports = {}
            for k, tensor, p, slots, report in done:
                if size(p):
                    tensor.put(None, p)
                    for name in slots:
                        tensor.put(name, slots[name])
                if several and report:
                    mask = (asked.left or {}).get(tensor.layers)
                    first = bucket.first_layer(k)
                    for i in range(size(next(iter(report.values())))):
                        if mask is None or not mask[i]:
                            of_layer = {name: x[i, ...] for name, x in report.items()}
                            reports[layer_name(tensor.name, first + i)] = of_layer
                elif not several:
                    reports[tensor.name] = report
            bucket.count(took, asked.left)
            return reports

        return launch

    def explain(self, bucket: Bucket) -> str:
        """See `Engine.explain`."""
        return "whole arrays, one operation of the rule after the other; each makes a temporary"


def _whole(
    tensor: Tensor, slots: dict[str, Array], *args: Any, **options: Any
) -> tuple[Array, dict[str, Array], Report]:
    """`apply` to a tensor."""
    rule, p, g, *others = args
    name, first = tensor.origin
    return apply(rule, p, g, slots, *others, **options, name=name, first=first)


def _stack(
    tensor: Tensor, slots: dict[str, Array], *args: Any, **options: Any
) -> tuple[Array, dict[str, Array], Report]:
    """`apply` to the layers of a tensor."""
    return _whole(tensor, slots, *args, **options, stacked=True)


def _layer(
    tensor: Tensor, slots: dict[str, Array], *args: Any, **options: Any
) -> tuple[Array, dict[str, Array], Report]:
    """`apply_one` to a layer."""
    rule, p, g, *others = args
    return apply_one(rule, p, g, slots, *others, **options, origin=tensor.origin)


def _update(
    one: Callable[..., tuple[Array, dict[str, Array], Report]],
    rule: Rule,
    tensor: Tensor,
    g: Array,
    asked: Asked,
    i: int,
) -> tuple[Array, dict[str, Array], Report]:
    """One tensor's new parameter, slots and report."""
    p, g, stats, left = (
        detached(tensor.array),
        detached(g),
        asked.stats,
        (asked.left or {}).get(tensor.layers),
    )
    with on_its_device(p):
        new, slots, report = one(
            rule, p, g, tensor.updates + 1, asked.hypers[i], clip=asked.clip, stats=stats
        )
        if stats:  # what a slot held is about to be overwritten
            xp = array_namespace(p)
            report = {
                name: xp.astype(x, x.dtype, copy=True) if is_array(x) else x
                for name, x in report.items()
            }
        if left is not None:
            new = unless(left, new, p)
            slots = {name: unless(left, x, tensor.slots[name]) for name, x in slots.items()}
    return tensor.array if new is p else new, slots, report  # the same object is not written
