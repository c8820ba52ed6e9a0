"""The reference engine: a rule as it is written, on whole arrays of any array-API library."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import (
    NARROW,
    Array,
    Ints,
    array_namespace,
    copied,
    detached,
    dtype_name,
    holder,
    is_array,
    is_captured,
    on_its_device,
    place,
    sharded_like,
    size,
    to_host,
    working_dtype,
)
from arrayopt.codecs import PAIR
from arrayopt.engines.abreast import Abreast, DrawnAbreast, abreast, of_layers
from arrayopt.engines.base import Asked, Engine, Partials, Report
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.layers import Layers, Split, layer_name, layers_with, split, unless
from arrayopt.engines.meeting import Meeting, numbers_of
from arrayopt.hyper import is_number
from arrayopt.rules.base import Rule
from arrayopt.rules.draws import DRAWS, Drawn
from arrayopt.rules.names import VALUE, Values
from arrayopt.rules.namespace import current, is_split, low_bits, rule_namespace
from arrayopt.rules.returned import ReturnedError, check_value, form_of
from arrayopt.rules.totals import PREFIX, TOTALS, Heard, of_total, totals_in, unforeseen
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
        p: Array, g: Array, slots: dict[str, Array], first: Any, own: dict[str, Any]
    ) -> tuple[Array, dict[str, Array], Report]:
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
        mapped: tuple[Array, dict[str, Array], Report] = jax.vmap(one)(p, g, slots, firsts, mine)
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


def _joined(
    done: list[Any], join: Callable[[list[Any]], Array]
) -> tuple[Array, dict[str, Array], Report]:
    """Parameters, slots and reports of some layers, from those of fewer."""
    params, slots, reports = zip(*done, strict=True)
    new = {name: join([own[name] for own in slots]) for name in slots[0]}
    report = {name: join([own[name] for own in reports]) for name in reports[0]}
    return join(list(params)), new, report


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
) -> tuple[Array, dict[str, Array], Report]:
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
    numbers, known = dict[str, Any](), dict[str, Any]()
    for name, x in {**hypers, "t": t}.items():
        if name.startswith(PREFIX):
            known[name] = x
        else:
            numbers[name] = _scalar(xp, x, scalar)
    h = Values(**numbers)
    heard = Heard(known, partial(_total, p, scalar, together))
    setattr(h, TOTALS, heard)
    drawn = Drawn(p, dtype_name(p), rule.seed, origin[0], t, origin[1])
    if together and getattr(hypers.get(VALUE), "ndim", 0) == 1:
        setattr(h, VALUE, Abreast(getattr(h, VALUE)))
    setattr(h, DRAWS, DrawnAbreast(drawn) if together else drawn)
    space = rule_namespace(abreast(xp) if together else xp)

    def telling(*args: Any) -> tuple[Array, dict[str, Array]]:
        new_p, out = rule(*args)
        return new_p, {**out, **heard.told} if heard.told else out

    run: Callable[..., Any] = partial(of_layers, telling) if together else telling
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


def _total(like: Array, dtype: Any, together: bool, total: Any) -> Any:
    """A total as the rule sees it: a 0-d array of the tensor's own library, or of all layers."""
    xp, device = place(like)
    if is_array(total) and array_namespace(total) is xp:
        total = xp.astype(total, dtype)
    else:
        where = {} if array_api_compat.is_jax_array(like) else {"device": device}
        total = total if getattr(total, "ndim", 0) else float(total)
        total = xp.asarray(total, dtype=dtype, **where)
    return Abreast(xp.broadcast_to(total, (like.shape[0],))) if together else total


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
        done = _Updates(bucket, asked)
        for *_, report in done.made:
            if totals_in(report):
                raise unforeseen(type(bucket.rule))
        return done.write

    def prepare_joint(
        self,
        bucket: Bucket,
        asked: Asked,
        meetings: Sequence[Meeting],
        reports: dict[str, Report],
    ) -> Iterator[list[Partials]]:
        """See `Engine.prepare_joint`: the step is computed anew whenever totals are known."""
        if is_captured(bucket.tensors[0].array):
            raise RuntimeError(
                f"Optimizer.launch: {type(bucket.rule).__name__} asks for totals, which the host"
                " adds up; a step of it cannot be captured in a CUDA graph"
            )
        done = _Updates(bucket, asked)
        for meeting in meetings:
            meeting.join()

        def steps(done: _Updates) -> Iterator[list[Partials]]:
            for meeting in meetings:
                for some in meeting.rounds:
                    done.tell(meeting, some)
                    while any(j not in meeting.known for j in some):
                        yield []
                    if meeting is meetings[0]:
                        done = _Updates(bucket, asked, meeting)
            reports.update(done.write())

        return steps(done)

    def explain(self, bucket: Bucket) -> str:
        """See `Engine.explain`."""
        return "whole arrays, one operation of the rule after the other; each makes a temporary"


class _Updates:
    """The updates of a bucket, which have been computed and not been written.

    Parameters
    ----------
    bucket, asked
        As for `Engine.prepare`.
    meeting : Meeting, optional
        What knows the totals.

    Attributes
    ----------
    made : list of tuple
        The tensors, each with its new array, its new slots, and its report.
    """

    def __init__(self, bucket: Bucket, asked: Asked, meeting: Meeting | None = None) -> None:
        self.bucket, self.asked = bucket, asked
        tensors, grads, groups, one = bucket.tensors, asked.grads, bucket.group_of, _whole
        self.several = bucket.rule.several
        self.left = [(asked.left or {}).get(tensor.layers) for tensor in tensors]
        if isinstance(bucket, Layers) and isinstance(grads, Split):
            tensors, groups, one = bucket.stacks.tensors, bucket.group_of_stacks, _stack
            self.left, grads, self.several = grads.left, grads.stacks, True
        # what measures gradients has none
        slots = bucket.rule.several or not isinstance(bucket, Layers)
        self.made: list[tuple[int, Tensor, Array, dict[str, Array], Report]] = []
        # infinity and NaN are data: they reach the parameter, and are no warning
        with np.errstate(all="ignore"):
            for k, (x, g, left) in enumerate(zip(tensors, grads, self.left, strict=True)):
                if g is not None and (left is None or not left.all()):
                    call, i = partial(one, x, x.slots if slots else {}), groups[k]
                    known = {} if meeting is None else self._totals(k, x, meeting)
                    made = _update(call, bucket.groups[i].rule, x, g, asked, i, known, left)
                    self.made.append((k, x, *made))

    @cached_property
    def numbers(self) -> list[Ints]:
        """What a meeting knows the tensors, or their layers, by."""
        return numbers_of(self.bucket, stacks=self.several)

    def _numbers(self, k: int) -> tuple[Ints, Any]:
        """What a meeting knows a tensor, or its layers, by; and which of them take part."""
        mask = self.left[k]
        return self.numbers[k], slice(None) if mask is None else ~np.asarray(mask)

    def _totals(self, k: int, tensor: Tensor, meeting: Meeting) -> dict[str, Any]:
        """The totals that are known, for a tensor or each of its layers."""
        if not size(tensor.array):
            return {}
        numbers, some = self._numbers(k)
        found: dict[str, Any] = {}
        for j in meeting.known:
            each = np.ones(len(numbers))
            each[some] = meeting.total(j, numbers[some])
            alone = len(numbers) == 1 or self.bucket.rule.blocks is not None
            found[of_total(j)] = float(each[0]) if alone else each
        return found

    def tell(self, meeting: Meeting, some: list[int]) -> None:
        """Tell the numbers of some totals."""
        for which in some:
            numbers, values = [np.zeros(0, np.int64)], [np.zeros(0)]
            for k, _, p, _, report in self.made:
                if size(p):
                    mine, here = self._numbers(k)
                    told = report.get(of_total(which), 0.0)
                    told = np.asarray(to_host(told) if is_array(told) else told, np.float64)
                    values.append(np.broadcast_to(told, len(mine))[here])
                    numbers.append(mine[here])
            meeting.tell(which, np.concatenate(numbers), np.concatenate(values))

    def write(self) -> dict[str, Report]:
        """Write the updates, and count them; what they report."""
        reports = {}
        for at, tensor, p, slots, told in self.made:
            report = {name: x for name, x in told.items() if not name.startswith(PREFIX)}
            if size(p):
                tensor.put(None, p)
                for name in slots:
                    tensor.put(name, slots[name])
            if self.several and report:
                mask = self.left[at]
                first = self.bucket.first_layer(at)
                for i in range(size(next(iter(report.values())))):
                    if mask is None or not mask[i]:
                        of_layer = {name: x[i, ...] for name, x in report.items()}
                        reports[layer_name(tensor.name, first + i)] = of_layer
            elif not self.several:
                reports[tensor.name] = report
        self.bucket.count(layers_with(self.asked.grads), self.asked.left)
        return reports


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


def _update(
    one: Callable[..., tuple[Array, dict[str, Array], Report]],
    rule: Rule,
    tensor: Tensor,
    g: Array,
    asked: Asked,
    i: int,
    totals: dict[str, Any],
    left: Any,
) -> tuple[Array, dict[str, Array], Report]:
    """One tensor's new parameter, slots and report, with the totals that are known; those of the
    layers that are `left` stay.
    """
    p, g, stats = detached(tensor.array), detached(g), asked.stats
    with on_its_device(p):
        if left is not None:  # LAPACK raises where it is given NaN
            g = unless(left, g, array_namespace(g).zeros_like(g))
        hypers = asked.hypers[i] if not totals else {**asked.hypers[i], **totals}
        new, slots, report = one(
            rule, p, g, tensor.updates + 1, hypers, clip=asked.clip, stats=stats
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
