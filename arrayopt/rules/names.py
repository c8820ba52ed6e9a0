"""The names that a rule may give to its fields, which users read and set on the optimizer, and to its slots."""

import dataclasses
import inspect
import re
from collections.abc import Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any

from arrayopt.codecs import SCALE
from arrayopt.foreign import alias, close_to

VALUE = "value"
"""The name of a step's value in `h`: `h.value`."""

AROUND = ("master", "slow", "ema")
"""Slots that all rules may have: copies of the parameter in the dtype of arithmetic."""

RESERVED = frozenset(
    {"t", VALUE, "arrays", "params", "order_params", "groups", "rule", "engine", "accumulate", "skip_nonfinite"}
)
RESERVED |= {
    "step",
    "advance",
    "launch",
    "give",
    "wait",
    "step_count",
    "clip_norm",
    "loss_scale",
    "skipped_layers",
    "before_step",
    "after_step",
}
RESERVED |= {
    "state",
    "stats",
    "nonfinite",
    "averaged",
    "now",
    "add_group",
    "explain",
    "state_dict",
    "load_state_dict",
    "save",
    "load",
}
RESERVED |= {"label", "names", "overridden", "tensors", "checked", "replace_rule"}
"""Names that fields must not have: those of `h.t`, `h.value` and `h.arrays`, of keys of group dicts, and of attributes
of Optimizer and Group."""

_SLOT = re.compile(r"(?!at_)[A-Za-z][A-Za-z0-9_]*")
_TAKEN = re.compile(rf"{'|'.join(AROUND)}|p|g|t|step|accumulated|spill\d+|kept\d+|project_.*|{SCALE}.*")


NO_VALUE = (
    "the rule needs `h.value`, the value of the function, but the step got none; pass it, as in"
    " opt.step(grads, value=loss), or step(closure) in PyTorch"
)


class ReturnedError(TypeError, ValueError):
    """A rule returned something that engines cannot use."""


class NameInRuleError(ReturnedError, AttributeError, KeyError):
    """A rule reads a hyper-parameter or a slot that it does not have."""

    __str__ = Exception.__str__


class Numbers(dict[str, Any]):
    """The hyper-parameters of a step by name, with the step's value if it has one."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(NO_VALUE) if name == VALUE else KeyError(name)


class On:
    """A number of a field with `zero_is_off` that is on: it is truthy and not equal to 0, whatever its value is."""

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> Any:
        return False if isinstance(other, int | float) and other == 0 else super().__eq__(other)

    def __ne__(self, other: object) -> Any:
        return True if isinstance(other, int | float) and other == 0 else super().__ne__(other)

    def __hash__(self) -> int:
        return super().__hash__()


class OnFloat(On, float):
    """A float that is on, even if a schedule makes it 0 in some steps."""


class Values(SimpleNamespace):
    """The `h` of a rule's update: its hyper-parameters in this step, and `t`."""

    def __getattr__(self, name: str) -> Any:  # called only for missing attributes
        if name.startswith("__"):
            raise AttributeError(name)
        if name == VALUE:
            raise ValueError(NO_VALUE)
        own = [x for x in vars(self) if x[0] != "_" and x != VALUE]
        meant = alias(own, name) or close_to(own, name)
        here = f"; did you mean h.{meant}?" if meant else f" (for switches and options, use self.{name})"
        raise NameInRuleError(f"`h` has no hyper-parameter {name!r}; it has {', '.join(own)}{here}")


def _declared(cls: type) -> list[str]:
    """The names of the fields that a class itself declares, also if it is not a dataclass."""
    typed = [name for name, kind in inspect.get_annotations(cls).items() if "ClassVar" not in str(kind)]
    return [*typed, *(name for name, x in vars(cls).items() if isinstance(x, dataclasses.Field) and name not in typed)]


def check_fields(cls: type, base: Any) -> None:
    """Raise TypeError if a subclass of `base` declares a field with a reserved name, or replaces their check."""
    if "__post_init__" in vars(cls):
        raise TypeError(f"{cls.__name__}: a rule must not define __post_init__; check its fields in `check(self)`")
    own = {f.name for f in dataclasses.fields(base)}
    for name in _declared(cls):
        if name in RESERVED or name.startswith("_") or (hasattr(base, name) and name not in own):
            what = "begins with an underscore" if name.startswith("_") else "means something else already"
            raise TypeError(f"{cls.__name__}: a field must not be called {name!r}, which {what}; choose another name")


@cache
def check_class(cls: type, base: type) -> None:
    """Raise TypeError if a subclass of `base` declares fields, or has an __init__, but is not a dataclass."""
    for name in ("evaluated_from", "rings", "squares", "wide"):
        if isinstance(getattr(cls, name), str):
            raise TypeError(f"{cls.__name__}: `{name}` must be a tuple of names of slots; got {getattr(cls, name)!r}")
    for part in cls.__mro__:
        if not issubclass(part, base) or "__dataclass_fields__" in vars(part):
            continue
        above = "must be a dataclass; write @dataclass(frozen=True, kw_only=True) above the class"
        if names := ", ".join(_declared(part)):
            raise TypeError(f"{part.__name__}: a rule with fields ({names}) {above}")
        if "__init__" in vars(part):
            fields = "and fields such as `lr: Hyper = real('[0, inf)', 0.1)` in place of __init__"
            raise TypeError(f"{part.__name__}: a rule {above}, {fields}")


def check_slots(who: str, names: Iterable[Any]) -> None:
    """Raise ValueError for slots with an invalid or reserved name."""
    for name in names:
        if not isinstance(name, str) or not _SLOT.fullmatch(name):
            raise ValueError(
                f"{who}: a slot's name must be a letter of A to Z, then letters, digits and underscores, and not start"
                f" with 'at_'; got {name!r}"
            )
        if _TAKEN.fullmatch(name):
            raise ValueError(f"{who}: a slot must not be called {name!r}, a reserved name; choose another name")
