"""Test updates of a small tensor of ones, as the rule is written: what it reads, and whether it runs at all."""

from collections.abc import Hashable
from itertools import product
from typing import Any

import numpy as np

from arrayopt.rules.code import code_of
from arrayopt.rules.draws import DRAWS, Drawn
from arrayopt.rules.fields import hypers
from arrayopt.rules.names import NO_VALUE, VALUE, Values
from arrayopt.rules.namespace import rule_namespace
from arrayopt.rules.totals import TOTALS, Heard

_READ: dict[Hashable, bool] = {}
"""The results of `reads_value`, by the structure and code of rules."""


def update_of_ones(rule: Any, rank: int, heard: Heard, *, valued: bool | None = True, t: int = 1) -> None:
    """Run a rule's t-th update on NumPy, of ones of length 2 along each axis. Errors of the rule are raised.

    The rule's numbers are 0.5 unless None, and `heard` returns totals. `valued` is whether the step has a value; with
    None, reading it raises an error.
    """
    kind: Any = type(rule)
    ones, numbers = np.ones((2,) * rank), hypers(kind)
    values = {name: None if getattr(rule, name) is None else 0.5 for name in numbers}
    given = {DRAWS: Drawn(ones, "float64", 0, "", 1), TOTALS: heard}
    given |= {} if valued is None else {VALUE: 1.0 if valued else None}
    with np.errstate(all="ignore"):
        slots = rule.all_slots(np, ones, "float64")
        for x in (ones, *slots.values()):
            if isinstance(x, np.ndarray):
                x.flags.writeable = False  # `unwritten` tells users of a rule that writes to its inputs
        rule(rule_namespace(np), ones, ones, slots, Values(**values, t=t, **given))


def reads_value(rule: Any) -> bool:
    """Whether updates read `h.value`; also True if that is unknown."""
    if rule.value_optional:
        return True
    key = rule.structure, code_of(rule)
    if key not in _READ:
        updates = {1}
        if rule.branches:
            updates |= {2, next((t for t in range(2, 1000) if rule.as_written(t)), 2)}
        runs, wants = False, False
        for rank, t in product(range(5), updates):
            try:
                update_of_ones(rule, rank, Heard({}, np.asarray), valued=None, t=t)
                runs = True
            except Exception as error:  # the rule may refuse this rank
                wants |= str(error) == NO_VALUE
        _READ[key] = wants or not runs
    return _READ[key]
