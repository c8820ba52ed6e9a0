"""What a rule does, tried out on small tensors of ones."""

from collections.abc import Hashable
from itertools import product
from typing import Any

import numpy as np

from arrayopt.rules.base import Rule
from arrayopt.rules.draws import DRAWS, Drawn
from arrayopt.rules.fields import hypers
from arrayopt.rules.names import NO_VALUE, Values
from arrayopt.rules.namespace import rule_namespace
from arrayopt.rules.totals import TOTALS, Heard

__all__ = ["reads_value", "run_on_ones"]

_READ: dict[Hashable, bool] = {}
"""What `reads_value` has found, by the structure of rules."""


def run_on_ones(rule: Rule, rank: int, given: dict[str, Any], t: int = 1) -> None:
    """Run an update of a small tensor of ones, as it is written, with numbers of 0.5, and `given` in `h`."""
    ones = np.ones((2,) * rank)
    values = {name: None if getattr(rule, name) is None else 0.5 for name in hypers(type(rule))}
    h = Values(**values, t=t, **{DRAWS: Drawn(ones, "float64", 0, "", 1)}, **given)
    with np.errstate(all="ignore"):
        rule(rule_namespace(np), ones, ones, rule.all_slots(np, ones, "float64"), h)


def reads_value(rule: Rule) -> bool:
    """Whether updates read `h.value`; True, too, where it cannot be told."""
    if rule.value_optional:
        return True
    if rule.structure not in _READ:
        updates = {1}
        if rule.branches:
            updates |= {2, next((t for t in range(2, 1000) if rule.as_written(t)), 2)}
        runs, wants = False, False
        for rank, t in product(range(5), updates):
            try:
                run_on_ones(rule, rank, {TOTALS: Heard({}, np.asarray)}, t)
                runs = True
            except Exception as error:  # of a rank that the rule refuses
                wants |= str(error) == NO_VALUE
        _READ[rule.structure] = wants or not runs
    return _READ[rule.structure]
