"""The plans of rules, each made once for all rules of a structure, and shared by all ranks that it suits."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

from arrayopt.fusion.graph import KEPT
from arrayopt.fusion.plan import Plan, plan
from arrayopt.fusion.trace import NotFlat, NotFolded, NotMeasured, NotOriented, trace
from arrayopt.rules.base import Rule

__all__ = ["plan_for"]


@dataclass(frozen=True, slots=True)
class _ByStructure:
    """A rule that equals every rule of its structure."""

    rule: Rule

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByStructure) and self.rule.structure == other.rule.structure

    def __hash__(self) -> int:
        return hash(self.rule.structure)


_Options = tuple[tuple[str, Any], ...]
"""What `trace` is asked for."""

_PLANS: WeakValueDictionary[tuple[Any, ...], Plan] = WeakValueDictionary()
"""Each plan that somebody has, by what it does."""

_LOCK = threading.Lock()


def _made(rule: Rule, rank: int, dtype: str, options: _Options, **view: Any) -> Plan:
    """The plan of a rule, seen in some way; one for all that do the same, as for ranks where shape does not matter."""
    made = plan(trace(rule, rank, dtype, **view, **dict(options)))
    with _LOCK:
        return _PLANS.setdefault(made.key, made)


@lru_cache(maxsize=KEPT)
def _cached(key: _ByStructure, rank: int, dtype: str, options: _Options) -> Plan | bool:
    """The plan of a structure of rule: flat where that will do.

    Where it depends on what there is more of, rows or columns: whether a tensor is seen as its first axis and all
    others.
    """
    views: tuple[dict[str, Any], ...] = ({"flat": True}, {})
    for view in views:
        try:
            return _made(key.rule, rank, dtype, options, **view)
        except NotFlat:
            pass
        except NotFolded:
            break
        except (NotMeasured, NotOriented):
            return False
    try:
        return _made(key.rule, rank, dtype, options, folded=True)
    except (NotMeasured, NotOriented):
        return True


@lru_cache(maxsize=KEPT)
def _oriented(key: _ByStructure, rank: int, dtype: str, options: _Options, folded: bool, tall: int) -> Plan:
    """The plan for matrices of which the sign of rows - columns is known."""
    return _made(key.rule, rank, dtype, options, folded=folded, tall=tall)


@lru_cache(maxsize=KEPT)
def _measured(
    key: _ByStructure, rank: int, dtype: str, options: _Options, folded: bool, sides: tuple[int, int]
) -> Plan:
    """The plan for matrices of so many rows and columns."""
    tall = (sides[0] > sides[1]) - (sides[0] < sides[1])
    return _made(key.rule, rank, dtype, options, folded=folded, tall=tall, sides=sides)


def plan_for(
    rule: Rule,
    rank: int,
    dtype: str,
    *,
    shape: Sequence[int] = (),
    clip: bool = False,
    stats: bool = False,
    lean: bool = False,
) -> Plan:
    """The plan of a rule for tensors of a rank and dtype, made once for each structure of rule; see `trace`.

    With `stats` it is the plan of what a step reports. It writes nothing, and is run before the update, whose plan is
    the same with and without reports. So watching changes no bit of what is watched, whatever a compiler makes of
    either.

    Where no sum is over rows or columns, shape does not matter and the tensor is seen as one row of elements. Ranks for
    which a rule does the same share a plan. The `shape` is looked at by rules alone that compare rows with columns, or
    either with a number; where it is not given there are fewer rows.
    """
    key, options = _ByStructure(rule), (("clip", clip), ("stats", stats), ("lean", lean))
    made = _cached(key, rank, dtype, options)
    if isinstance(made, Plan):
        return made
    rows, columns = (shape[0], math.prod(shape[1:])) if made and shape else tuple(shape[-2:]) or (0, 1)
    try:
        return _oriented(key, rank, dtype, options, made, (rows > columns) - (rows < columns))
    except NotMeasured:
        return _measured(key, rank, dtype, options, made, (rows, columns))
