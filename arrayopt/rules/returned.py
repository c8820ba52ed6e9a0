"""Checks of what the functions of a rule return, with the same messages for all callers, before anything is written."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from arrayopt.arrays import Array, array_namespace, dtype_name, is_array, library
from arrayopt.hyper import is_number
from arrayopt.rules.names import NameInRuleError, check_slots
from arrayopt.rules.names import ReturnedError as ReturnedError
from arrayopt.rules.rings import Ring, expanded

_WORDS = {"bool": "bools", "integer": "integers", "real": "real numbers", "complex": "complex numbers"}
"""Kinds of dtypes. A value may be stored in a slot of a later kind, except bools."""


ODD = "{}.update: {} must be among the names that `slots` returns or, as a statistic, be one number per tensor"
"""The message about a rule whose update returns values that are neither slots nor numbers."""


class Slots(dict[str, Any]):
    """The `s` of a rule's update: its slots by name."""

    def __missing__(self, name: Any) -> Any:
        has = f"it has {', '.join(self)}" if self else "it has none"
        raise NameInRuleError(f"the rule has no slot {name!r}; {has}; a rule's method `slots` makes them")


class WritesError(ReturnedError):
    """A rule writes to an input: a parameter, a gradient or a slot."""


class Given:
    """The base of traced arrays, which know whether they are inputs of the rule, and must not be written.

    `is_given` is whether the array is an input, not whether its values are equal to those of one.
    """

    is_given = False

    def written(self, value: Any) -> Any:
        """Raise WritesError for `x += value` if x is an input; else the statement is ``x = x + value``."""
        if self.is_given:
            raise WritesError("a rule must not write to its inputs; write p = p + u instead of p += u")
        return NotImplemented

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = written
    __imatmul__ = __iand__ = __ior__ = __ixor__ = written


def returned_slots(who: str, p: Array, found: Any, rings: Iterable[str] = ()) -> dict[str, Array]:
    """What `slots` returned for a parameter, once it is a dict of its library's arrays, by names that slots have.

    Rings are replaced by their members.
    """
    if not isinstance(found, Mapping):
        raise ReturnedError(
            f"{who}.slots must return a dict of arrays, such as {{'m': xp.zeros_like(p)}}, or an empty one;"
            f" got {_said(found)}"
        )
    check_slots(who, found)
    for name, x in found.items():
        if isinstance(x, Ring) != (name in rings):
            raise ReturnedError(
                f"{who}.slots must return a ring, made by `arrayopt.ring`, under each name in the rule's `rings`, and"
                f" nowhere else; `rings` is {tuple(rings)!r}, and {name!r} is {_said(x)}"
            )
    whole, found = found, expanded(found)
    if len(found) != sum(len(x) if isinstance(x, Ring) else 1 for x in whole.values()):
        raise ReturnedError(
            f"{who}.slots: a slot and the member of a ring have the same name; rename one of {', '.join(whole)}"
        )
    for name, x in found.items():
        if type(x) is not type(p) and not is_array(x):  # `is_array` takes longer
            raise ReturnedError(
                f"{who}.slots must return arrays; {name!r} is {_said(x)}: for a slot with one number, use"
                " xp.sum(xp.zeros_like(p))"
            )
        if type(x) is not type(p) and array_namespace(x) is not array_namespace(p):
            raise TypeError(f"{who}.slots must return arrays that `xp` made; {name!r} is of {library(x)}")
    return dict(found)


def returned_update(who: str, found: Any, slots: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Check that `update` returned a parameter and a dict with these slots; replace rings by their members."""
    if not (isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[1], Mapping)):
        raise ReturnedError(
            f"{who}.update must return the new parameter and a dict of the new slots, as in return p, {{'m': m}};"
            f" got {_said(found)}"
        )
    p, new = found
    lacking = [name for name in slots if name not in new]
    if lacking:
        raise ReturnedError(f"{who}.update must return every slot; missing {', '.join(lacking)}")
    strange = [name for name in new if not isinstance(name, str)]
    if strange:
        raise ReturnedError(f"{who}.update must return a dict whose keys are strings; got {strange[0]!r}")
    for name, x in new.items():
        ring = slots.get(name)
        lengths = [len(y) if isinstance(y, Ring) else None for y in (x, ring)]
        if lengths[0] != lengths[1]:
            raise ReturnedError(
                f"{who}.update must return each ring unchanged, or a `put` of it; {name!r} is {_said(x)}"
            )
    return p, expanded(new)


def check_value(who: str, what: str, old: Array, new: Any, form: Callable[[Any], tuple[Any, str]]) -> None:
    """Raise if a value that `update` returned cannot replace an old one. `form` is a function like `form_of`."""
    number = type(new) is not type(old) and is_number(new)
    if not (number or type(new) is type(old) or is_array(new)):
        raise ReturnedError(f"{who}.update must return arrays; {what} is {_said(new)}")
    (shape, dtype), (now, new_dtype) = form(old), form(np.asarray(new) if number and form is form_of else new)
    if not (number or type(new) is type(old)) and array_namespace(new) is not array_namespace(old):
        raise ReturnedError(f"{who}.update must return arrays that `xp` made; {what} is of {library(new)}")
    if now != shape:
        how = f"{what} was {shape}, is {now}" if form is form_of else f"that of {what} changes"
        raise ValueError(f"{who}.update must keep shapes; {how}")
    was, kind, order = _kind(dtype), _kind(new_dtype), list(_WORDS)
    rounded = kind == "integer" and what == "the parameter"
    if (was == "bool") != (kind == "bool") or order.index(kind) > order.index(was) or rounded:
        raise ReturnedError(f"{who}.update must return {_WORDS[was]} as {what}; got {_WORDS[kind]}")


def form_of(x: Array) -> tuple[tuple[int, ...], str]:
    """The shape of an array and the name of its dtype."""
    return tuple(x.shape), dtype_name(x)


def _kind(dtype: str) -> str:
    """The kind of a dtype, also of traced ones."""
    if dtype == "bool" or dtype.startswith("complex"):
        return dtype[:7]
    return "integer" if "int" in dtype else "real"


def _said(x: Any) -> str:
    """Describe an object in few words."""
    if isinstance(x, dict):
        return "a dict"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {', '.join(map(_said, x[:4])) or 'nothing'}"
    if x is None or is_number(x) or isinstance(x, bool | str):
        return f"{x!r:.40}"
    if isinstance(x, Ring):
        return f"a ring of {len(x)}"
    return "an array" if is_array(x) else f"a {type(x).__name__}"
