"""An update of a tensor as its rule is written: whole, or of all its layers or blocks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, array_namespace, dtype_name, is_array, place, sharded_like, size
from arrayopt.engines.apply_one import Done, apply_one
from arrayopt.engines.layers import split
from arrayopt.rules.base import Rule
from arrayopt.rules.names import VALUE
from arrayopt.rules.totals import PREFIX
from arrayopt.state.blocks import Cut


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
    updated at once where `arrayopt.engines.layerwise` knows all that the rule does. Random numbers
    follow from the tensor's `name`, and from the position of its `first` element.

    Arithmetic is in at least float32; what is stored in another dtype is rounded once, at the end.

    Raises
    ------
    ValueError
        If the rule returns other slots, or other shapes, than it was given.
    """
    update = _Update(rule, name, t, hypers, clip, stats)
    if not array_api_compat.is_jax_array(p):
        return update.of_tensor(p, g, slots, first, stacked)
    numbers = {**hypers, "t": t, "": clip}  # no field has that name
    arrays = {key: x for key, x in numbers.items() if is_array(x)}

    def made(p: Array, g: Array, slots: dict[str, Array], arrays: dict[str, Array]) -> Any:
        h = numbers | arrays
        own = replace(update, t=h.pop("t"), clip=h.pop(""), hypers=h)
        return own.of_tensor(p, g, slots, first, stacked)

    updated: Done = sharded_like(lambda: (p, slots, None), made, p, g, slots, arrays)
    return updated


@dataclass(frozen=True, slots=True)
class _Update:
    """What an update is, apart from arrays; see `apply`."""

    rule: Rule
    name: str
    t: Any
    hypers: dict[str, Any]
    clip: Any
    stats: bool

    def of_tensor(
        self, p: Array, g: Array, slots: dict[str, Array], first: int, stacked: bool | None
    ) -> Done:
        """One update of a tensor: of it as it is, of its blocks, or of its layers."""
        if stacked is None and self.rule.blocks is not None:
            return self._of_blocks(p, g, slots, first)
        if not (self.rule.stacked if stacked is None else stacked) or size(p) == 0:
            return self._of_one(p, g, slots, first)
        if array_api_compat.is_jax_array(p):
            import jax

            firsts = first + jax.numpy.arange(p.shape[0]) * (size(p) // p.shape[0])
            own = self._of_layers | ({"t": jax.numpy.asarray(self.t)} if self._differs else {})
            mapped: Done = jax.vmap(self._of_one)(p, g, slots, firsts, own)
            return mapped
        if p.shape[0] == 1:  # of a block as long as no other beside it
            return self._one_by_one(p, g, slots, first)
        # whatever the rule does otherwise, it does of each layer by itself, and raises there
        with suppress(Exception):
            if self._differs:
                return self._by_number(p, g, slots)
            return self._of_one(p, g, slots, first, together=True)
        return self._one_by_one(p, g, slots, first)

    @property
    def _differs(self) -> bool:
        """Whether layers have numbers of updates of their own."""
        return bool(getattr(self.t, "ndim", 0) == 1)

    @property
    def _of_layers(self) -> dict[str, Any]:
        """The numbers that layers have of their own."""
        some = {key: x for key, x in self.hypers.items() if key.startswith(PREFIX) or key == VALUE}
        return {key: x for key, x in some.items() if getattr(x, "ndim", 0) == 1}

    def _of_one(
        self,
        param: Array,
        grad: Array,
        slots: dict[str, Array],
        first: Any,
        own: Mapping[str, Any] = MappingProxyType({}),
        *,
        together: bool = False,
    ) -> Done:
        """One update of a tensor or layer with numbers of its own; or of layers `together`."""
        now = {"t": self.t, **self.hypers, **own}  # no field is called t
        about: dict[str, Any] = {
            "origin": (self.name, first),
            "clip": self.clip,
            "stats": self.stats,
        }
        t = now.pop("t")
        return apply_one(self.rule, param, grad, slots, t, now, together=together, **about)

    def _one_by_one(self, param: Array, grad: Array, slots: dict[str, Array], first: int) -> Done:
        """One update of each layer."""
        done, each = [], self._of_layers
        for i, (q, h) in enumerate(zip(split(param), split(grad), strict=True)):
            of_layer = {name: x[i, ...] for name, x in slots.items()}
            own = {key: x[i, ...] for key, x in each.items()}
            own |= {"t": int(self.t[i])} if self._differs else {}
            done.append(self._of_one(q, h, of_layer, first + i * size(q), own))
        xp, device = place(param)

        def join(values: list[Any]) -> Array:
            """Arrays, or numbers of Python, as a switched-off trust ratio is."""
            return xp.stack(values) if is_array(values[0]) else xp.asarray(values, device=device)

        return _joined(done, join)

    def _by_number(self, param: Array, grad: Array, slots: dict[str, Array]) -> Done:
        """One update of all layers: of those at once that have the same number of updates."""
        (xp, device), numbers = place(param), np.array([int(number) for number in self.t])
        order, done = np.argsort(numbers, kind="stable"), []
        for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            there = xp.asarray(rows, device=device)
            own: dict[str, Any] = {"t": int(numbers[rows[0]])}
            for key, x in self._of_layers.items():
                own[key] = x[rows] if isinstance(x, np.ndarray) else xp.take(x, there, axis=0)
            every = [xp.take(x, there, axis=0) for x in (param, grad, *slots.values())]
            of_layers = dict(zip(slots, every[2:], strict=True))
            done.append(self._of_one(every[0], every[1], of_layers, None, own, together=True))
        back = xp.asarray(np.argsort(order), device=device)
        return _joined(done, lambda parts: xp.take(xp.concat(parts), back, axis=0))

    def _of_blocks(self, p: Array, g: Array, slots: dict[str, Array], first: int) -> Done:
        """One update of each stack of equal blocks."""
        cut, done = Cut(self.rule, p.shape, dtype_name(p)), []
        stacks = zip(cut.parameter(p), cut.parameter(g), cut.slots(slots), strict=True)
        for stretch, stack in zip(cut.stretches, stacks, strict=True):
            done.append(self.of_tensor(*stack, first + stretch.start * cut.row, True))
        params, news, reports = zip(*done, strict=True)
        concat = array_namespace(params[0]).concat
        return cut.joined(params), cut.joined_slots(news), _by_name(reports, concat)


def _joined(done: list[Any], join: Callable[[list[Any]], Array]) -> Done:
    """Parameters, slots and reports of some layers, from those of fewer."""
    params, slots, reports = zip(*done, strict=True)
    return join(list(params)), _by_name(slots, join), _by_name(reports, join)


def _by_name(several: Sequence[dict[str, Any]], join: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Return dicts of the same names as one, with the values of each name joined."""
    made = {}
    for name in several[0]:
        made[name] = join([one[name] for one in several])
    return made
