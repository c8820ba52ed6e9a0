"""Rules that treat all tensors as one vector of unknowns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from arrayopt.arrays import Array
from arrayopt.hyper import flag
from arrayopt.rules.base import Rule
from arrayopt.rules.totals import total
from arrayopt.rules.words import number

COMPANY = ("company", "together")
"""Slots about the tensors that form one unknown: how many had a gradient in the last step, and the number of steps
since the first of them had one."""


@dataclass(frozen=True, kw_only=True, repr=False)
class OneUnknown(Rule):
    """A rule whose sums are over all tensors of a step, unless each tensor is a separate problem."""

    joint: bool = flag(True)

    alike: ClassVar[tuple[str, ...]] = ()
    """The fields that must be equal in all groups, in steps with a value."""

    def over(self, h: Any, x: Any, how: str = "sum") -> Any:
        """The sum, or the maximum, over all tensors of the unknown; `x` is this tensor's number."""
        return total(h, x, how) if self.joint else x

    def each_over(self, h: Any, numbers: Sequence[Any]) -> list[Any]:
        """`over` for each of several numbers."""
        return [self.over(h, x) for x in numbers]

    def company(self, xp: Any, p: Array) -> dict[str, Array]:
        """The initial slots for `begins`."""
        return {name: number(xp, p) for name in COMPANY} if self.joint else {}

    def begins(self, s: dict[str, Any], h: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Return whether this is the first step of exactly these tensors together, whether it is a later one, and the
        new slots of `company`.
        """
        if not self.joint:
            return h.t == 1, h.t > 1, {}
        company, latest = total(h, 1.0), total(h, s["together"], "max")
        same = (company == s["company"]) & (latest == -total(h, -s["together"], "max"))
        return ~same, same, {"company": company, "together": latest + 1.0}


def check_alike(settings: Iterable[tuple[Rule, dict[str, Any]]]) -> None:
    """Raise ValueError if tensors of one unknown have different numbers for their common line search, in a step with a
    value. `settings` has rules and their hyper-parameters at the step.
    """
    first: dict[type[Rule], dict[str, Any]] = {}
    for rule, numbers in settings:
        if not isinstance(rule, OneUnknown) or not rule.joint:
            continue
        numbers_before = first.setdefault(type(rule), numbers)
        for name in rule.alike:
            one, other = numbers_before[name], numbers[name]
            if isinstance(one, float) and isinstance(other, float) and one != other:
                raise ValueError(
                    f"{type(rule).__name__}: in a step with a value, all tensors form one problem, so their groups"
                    f" must have the same `{name}`; got {one} and {other}; with joint=False, each tensor is a separate"
                    " problem"
                )
