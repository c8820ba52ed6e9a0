"""The plans of rules: one for all rules of a structure, and for all ranks that it suits."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from arrayopt.arrays import WORKING, real_dtype
from arrayopt.codecs import PAIR
from arrayopt.fusion.dims import Aspect, RetraceError, not_fused
from arrayopt.fusion.graph import CACHED
from arrayopt.fusion.plan import Plan, Total
from arrayopt.fusion.planning import plan
from arrayopt.fusion.trace import trace
from arrayopt.rules.base import Rule
from arrayopt.rules.code import code_of
from arrayopt.rules.ones import update_of_ones
from arrayopt.rules.returned import WritesError
from arrayopt.rules.totals import Heard


class _ByStructure:
    """A rule that equals every rule of its structure and code."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.key = rule, (rule.structure, code_of(rule))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByStructure) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


_PLANS: WeakValueDictionary[tuple[Any, ...], Plan] = WeakValueDictionary()
"""Each plan that somebody has, by what it does."""

_LOCK = threading.Lock()

_CHANGES = (
    "the same arguments give something else at each call, and a fused step would repeat the"
    " first one; random numbers are `ao.random(h)`, and what changes from step to step is a field"
    " of the rule, a slot or `h.t`"
)
"""What is said of a rule of which two traces differ, as with random numbers of NumPy."""


@lru_cache(maxsize=CACHED)
def _made(
    key: _ByStructure, rank: int, dtype: str, view: Aspect, calls: bool, **options: bool
) -> Plan | str:
    """The plan of a structure of rule; or what a trace must know more of the shape.

    It is one plan for all that do the same, as for ranks where shape does not matter.
    """
    rule = key.rule
    try:
        made = plan(trace(rule, rank, dtype, view, **options), calls=calls)
        if rule.project is not None or not type(rule).__module__.startswith("arrayopt."):
            again = plan(trace(rule, rank, dtype, view, **options), calls=calls)
            if again.key != made.key:
                raise not_fused(_CHANGES)
    except RetraceError as error:
        return str(error)
    with _LOCK:
        return _PLANS.setdefault(made.key, made)


def plan_for(
    rule: Rule,
    rank: int,
    dtype: str,
    *,
    shape: Sequence[int] = (),
    clip: bool = False,
    stats: bool = False,
    valued: bool = True,
    lean: bool = False,
    calls: bool = False,
) -> Plan:
    """The plan of a rule for tensors of a rank and dtype, made once for each structure of rule; see
    `trace` and `plan`.

    With `stats` it is the plan of what a step reports. It writes nothing, and is run before the
    update, whose plan is the same with and without reports. So watching changes no bit of what is
    watched, whatever a compiler makes of either. Whether a step is `valued` matters to rules with
    `value_optional` alone.

    Where no sum is over rows or columns, shape does not matter and the tensor is seen as one row of
    elements. Ranks for which a rule does the same share a plan. The `shape` is looked at by rules
    alone that compare rows with columns, or either with a number; where it is not given there are
    fewer rows.
    """
    key, view = _ByStructure(rule), Aspect(flat=True)
    valued = valued or not rule.value_optional
    while True:
        made = _made(
            key, rank, dtype, view, calls, clip=clip, stats=stats, valued=valued, lean=lean
        )
        if isinstance(made, Plan):
            return made
        view = view.more(made, shape)


def ways(rule: Rule) -> list[dict[str, bool]]:
    """The options of `plan_for` for steps of a rule: update and report, with a value or without."""
    found = [{"stats": False}, {"stats": True}]
    if rule.value_optional:
        found += [one | {"valued": False} for one in found]
    return found


def totals_for(
    rule: Rule, shape: tuple[int, ...], dtype: str, *, valued: bool = True
) -> tuple[Total, ...]:
    """When tensors meet for the totals of a rule; one after the other if it cannot be traced."""
    try:
        return plan_for(rule, len(shape), dtype, shape=shape, valued=valued).totals
    except WritesError:
        raise
    except Exception:  # as a `TraceError` is; what else there is the step will raise
        return _counted(_ByStructure(rule), len(shape), valued or not rule.value_optional)


@lru_cache(maxsize=CACHED)
def _counted(key: _ByStructure, rank: int, valued: bool) -> tuple[Total, ...]:
    """The totals that a rule asks for of a small tensor of ones, as it is written."""
    heard = Heard({}, np.asarray)
    with suppress(Exception):  # which the step itself will raise
        update_of_ones(key.rule, rank, heard, valued=valued)
    return tuple(Total(1, j, how) for j, how in enumerate(heard.how))


@lru_cache(maxsize=CACHED)
def widened(plan: Plan) -> Plan:
    """The plan for slots of codes that are widened before the step and encoded after it."""
    if not plan.quantized:
        return plan
    stored, wide = plan.storage["p"], dict[str, str]()
    for name in plan.quantized:
        wide[name] = WORKING[stored] if plan.storage[name] == PAIR else real_dtype(stored)
    phases = tuple(map(widened, plan.phases))
    return replace(plan, storage=plan.storage | wide, phases=phases)
