"""Apply a rule's `update`, as written, to one tensor, or to all its layers at once. In come the
arrays and an `Update`; out come a new parameter, new slots and a report. `apply.py` calls it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from arrayopt.arrays import (
    Array,
    array_namespace,
    beside,
    copied,
    dtype_name,
    holder,
    is_array,
    size,
    working_dtype,
)
from arrayopt.codecs import PAIR, is_rounded
from arrayopt.engines.array_api.layerwise import Layerwise, LayerwiseDraws, layerwise, over_layers
from arrayopt.engines.base import Report
from arrayopt.hyper import is_number
from arrayopt.rules.base import Rule
from arrayopt.rules.draws import DRAWS, Drawn
from arrayopt.rules.names import VALUE, Values
from arrayopt.rules.namespace import current, is_split, low_bits, rule_namespace
from arrayopt.rules.returned import ODD, ReturnedError, check_value, form_of
from arrayopt.rules.totals import PREFIX, TOTALS, Heard
from arrayopt.state.quantized import dequantized, narrowed, quantized, scale_of

Done = tuple[Array, dict[str, Array], Report]
"""The new parameter, the new slots, and the report of an update."""


@dataclass(frozen=True, slots=True)
class Update:
    """The arguments of one tensor's update, apart from arrays."""

    rule: Rule
    name: str
    """The tensor's name, from which random numbers are derived."""
    t: Any
    """The number of this update; for a stacked tensor perhaps an array with that of each layer."""
    hypers: dict[str, Any]
    """The values of hyper-parameters, and of totals that are known."""
    clip: Any = None
    """The factor by which the gradient is multiplied first."""
    stats: bool = False
    """Whether to report norms."""

    @property
    def differs(self) -> bool:
        """Whether `t` has a number for each layer."""
        return bool(getattr(self.t, "ndim", 0) == 1)

    @property
    def of_layers(self) -> dict[str, Any]:
        """The values that differ between layers: arrays with one number for each."""
        some = {key: x for key, x in self.hypers.items() if key.startswith(PREFIX) or key == VALUE}
        return {key: x for key, x in some.items() if getattr(x, "ndim", 0) == 1}

    def of_layer(self, own: dict[str, Any]) -> "Update":
        """Return the update of one layer; `own` has its values, perhaps ``t`` among them."""
        now = {"t": self.t, **self.hypers, **own}  # no field is called t
        return replace(self, t=now.pop("t"), hypers=now)


def apply_one(
    update: Update,
    p: Array,
    g: Array,
    slots: dict[str, Array],
    first: Any,
    *,
    together: bool = False,
) -> Done:
    """As `apply`, for a tensor that is not stacked, for one layer, or for all layers `together`."""
    rule, t, hypers = update.rule, update.t, update.hypers
    if size(p) == 0:
        return p, slots, {}
    xp, who = array_namespace(p), type(rule).__name__
    work, scalar = working_dtype(xp, p), working_dtype(xp, p, real=True)
    totals = {name: x for name, x in hypers.items() if name.startswith(PREFIX)}
    numbers = {name: x for name, x in {**hypers, "t": t}.items() if name not in totals}
    values = Values(**{name: _scalar(xp, x, scalar) for name, x in numbers.items()})
    heard = Heard(totals, partial(_total, p, scalar, together))
    setattr(values, TOTALS, heard)
    drawn = Drawn(p, dtype_name(p), rule.seed, update.name, t, first)
    if together and getattr(hypers.get(VALUE), "ndim", 0) == 1:
        setattr(values, VALUE, Layerwise(getattr(values, VALUE)))
    setattr(values, DRAWS, LayerwiseDraws(drawn) if together else drawn)
    space = rule_namespace(layerwise(xp) if together else xp)

    def with_totals(*args: Any) -> tuple[Array, dict[str, Array]]:
        new_p, out = rule(*args)
        return new_p, {**out, **heard.told} if heard.told else out

    run: Callable[..., Any] = partial(over_layers, with_totals) if together else with_totals
    norms: Callable[..., Any] = partial(over_layers, rule.norms) if together else rule.norms
    wide_p, wide_g = xp.astype(p, work, copy=False), xp.astype(g, work, copy=False)
    if update.clip is not None:
        wide_g = wide_g * _scalar(xp, update.clip, scalar)
    store = _Store(p, g, slots)
    with np.errstate(all="ignore"):  # infinity and NaN are data: no warning
        new_p, out = run(space, wide_p, wide_g, store.wide, values)
    check_value(who, "the parameter", p, new_p, form_of)
    for name, wide in store.wide.items():
        check_value(who, f"slot {name!r}", wide, out[name], form_of)
    new_slots = store.new_slots(new_p, out)
    report = {name: x for name, x in out.items() if name not in store.wide}
    report = _one_each(who, report, (p.shape[0],) if together else ())
    if update.stats:
        report |= norms(space, store.wide.get("master", wide_p), wide_g, new_p)
    return store.stored(new_p, wide_p, p), new_slots, report


class _Store:
    """Converts slots to the dtype of arithmetic (`wide`), and a rule's results to those stored."""

    def __init__(self, p: Array, g: Array, slots: dict[str, Array]) -> None:
        xp = array_namespace(p)
        work, scalar = working_dtype(xp, p), working_dtype(xp, p, real=True)
        self._p, self._stored, self._codes = p, slots, narrowed(slots)
        self._held = {None, *map(holder, (p, g, *slots.values()))}
        scales = set(map(scale_of, self._codes))
        self.wide: dict[str, Array] = {}
        for name, stored in slots.items():
            if name in self._codes:
                dtype = work if dtype_name(stored) == PAIR else scalar
                self.wide[name] = dequantized(stored, slots[scale_of(name)], dtype)
            elif name not in scales:
                narrow = is_rounded(dtype_name(stored))
                self.wide[name] = xp.astype(stored, scalar) if narrow else stored
        if "master" in self.wide:
            with np.errstate(all="ignore"):
                self.wide["master"] = current(p, self.wide["master"])

    def new_slots(self, new_p: Array, out: dict[str, Any]) -> dict[str, Array]:
        """Return the new slots, in their stored form, from the results of the rule."""
        made: dict[str, Array] = {}
        for name, wide in self.wide.items():
            old = self._stored[name]
            if name in self._codes:
                made |= self._quantized(name, out[name])
            elif name == "master" and is_split(old):
                made[name] = self.stored(low_bits(self._p, new_p, out[name]), None, old)
            else:
                made[name] = self.stored(out[name], wide, old)
        return {name: made[name] for name in self._stored}

    def _quantized(self, name: str, new: Any) -> dict[str, Array]:
        """Encode the rule's result for a slot of codes; return the codes and their scales."""
        codes, scale = self._stored[name], self._stored[scale_of(name)]
        if new is self.wide[name]:
            return {name: codes, scale_of(name): scale}
        if is_number(new):
            new = array_namespace(codes).full_like(self.wide[name], new)
        made = quantized(new, dtype_name(codes), scale.ndim - 1)
        return {name: made[0], scale_of(name): made[1]}

    def stored(self, new: Any, wide_old: Array | None, old: Array) -> Array:
        """Return a result in the dtype of `old`, copied if it shares memory with another array."""
        if new is wide_old:
            return old
        if is_number(new) or isinstance(new, np.generic):
            return array_namespace(old).full_like(old, new)
        made = array_namespace(old).astype(new, old.dtype, copy=False)
        made = copied(made) if holder(made) in self._held else made
        self._held.add(holder(made))
        return made


def _one_each(who: str, report: Report, shape: tuple[int, ...]) -> Report:
    """Return a report with one value per tensor or layer; raise ReturnedError if it has others."""
    made, many = dict(report), []
    for name, x in report.items():
        if is_array(x) and size(x) == math.prod(shape):
            made[name] = array_namespace(x).reshape(x, shape)
        elif not is_number(x):
            many.append(name)
    if many:
        raise ReturnedError(ODD.format(who, ", ".join(many)))
    return made


def _total(like: Array, dtype: Any, together: bool, total: Any) -> Any:
    """Return a total as the rule sees it: a 0-d array of the library, or one of all layers."""
    xp = array_namespace(like)
    if is_array(total) and array_namespace(total) is xp:
        total = xp.astype(total, dtype)
    else:
        total = total if getattr(total, "ndim", 0) else float(total)
        total = xp.asarray(total, dtype=dtype, **beside(like))
    return Layerwise(xp.broadcast_to(total, (like.shape[0],))) if together else total


def _scalar(xp: Any, x: Any, dtype: Any) -> Any:
    """Return a hyper-parameter as the rule sees it: a number, or a 0-d array of the library."""
    if not is_array(x):
        return x
    return xp.astype(x, dtype) if array_namespace(x) is xp else float(x)
