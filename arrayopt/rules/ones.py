"""An update of a small tensor of ones, as a rule is written: what it asks for, and whether it can run at all."""

from typing import Any

import numpy as np

from arrayopt.rules.draws import DRAWS, Drawn
from arrayopt.rules.fields import hypers
from arrayopt.rules.names import VALUE, Values
from arrayopt.rules.namespace import rule_namespace
from arrayopt.rules.totals import TOTALS, Heard

__all__ = ["update_of_ones"]


def update_of_ones(rule: Any, rank: int, heard: Heard, *, valued: bool = True) -> None:
    """Run a rule's first update of ones, of length 2 along each axis, on NumPy; raise what the rule raises.

    Parameters
    ----------
    rule : Rule
        The rule; its numbers are 0.5 where they are not None.
    rank : int
        The number of axes.
    heard : Heard
        What it tells its totals.
    valued : bool
        Whether the step has a value.
    """
    kind: Any = type(rule)
    ones, numbers = np.ones((2,) * rank), hypers(kind)
    values = {name: None if getattr(rule, name) is None else 0.5 for name in numbers}
    given = {VALUE: 1.0 if valued else None, DRAWS: Drawn(ones, "float64", 0, "", 1), TOTALS: heard}
    with np.errstate(all="ignore"):
        slots = rule.all_slots(np, ones, "float64")
        rule(rule_namespace(np), ones, ones, slots, Values(**values, t=1, **given))
