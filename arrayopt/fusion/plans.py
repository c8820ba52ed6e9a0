"""`plan_for`: the plans of rules, one for all rules of a structure, and all ranks that it suits."""

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
    """A key for caches: rules with the same structure and code have equal keys."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.key = rule, (rule.structure, code_of(rule))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByStructure) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


_PLANS: WeakValueDictionary[tuple[Any, ...], Plan] = WeakValueDictionary()
"""All plans in use, by `Plan.key`."""

_LOCK = threading.Lock()

_CHANGES = (
    "the same arguments give something else at each call, and a fused step would repeat the"
    " first one; random numbers are `ao.random(h)`, and what changes from step to step is a field"
    " of the rule, a slot or `h.t`"
)
"""The error for a rule whose two traces differ, as with NumPy's random numbers."""


@lru_cache(maxsize=CACHED)
def _planned(
    key: _ByStructure, rank: int, dtype: str, view: Aspect, calls: bool, **options: bool
) -> Plan | str:
    """Return the plan of a structure; or the name of the field of `Aspect` that a trace needs.

    Equal plans are one object, for example those for different ranks if shape does not matter.
    """
    rule = key.rule
    try:
        made = plan(trace(rule, rank, dtype, view, **options), calls=calls)
        if not is_of_library(rule):
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
    """Return the plan of a rule for tensors of a rank and dtype. It is made once for each
    structure; see `trace` and `plan`.

    With `stats`, it is the plan of the reports. It writes nothing, and runs before the update,
    whose plan is the same with and without reports. So reports change no bit of an update, whatever
    a compiler does to either. `valued` matters only to rules with `value_optional`.

    If no sum is over rows or columns, shape does not matter, and the tensor is seen as one row of
    elements. Ranks for which a rule does the same share a plan. The `shape` matters only to rules
    that compare rows with columns, or either with a number. Without it, fewer rows than columns are
    assumed.
    """
    key, view = _ByStructure(rule), Aspect(flat=True)
    valued = valued or not rule.value_optional
    while True:
        made = _planned(
            key, rank, dtype, view, calls, clip=clip, stats=stats, valued=valued, lean=lean
        )
        if isinstance(made, Plan):
            return made
        view = view.more(made, shape)


def is_of_library(rule: Rule) -> bool:
    """Whether all code of a rule is this library's, whose tests cover it."""
    return rule.project is None and type(rule).__module__.startswith("arrayopt.")


def ways(rule: Rule) -> list[dict[str, bool]]:
    """The options of `plan_for` for all steps: updates and reports, with and without a value."""
    found = [{"stats": False}, {"stats": True}]
    if rule.value_optional:
        found += [one | {"valued": False} for one in found]
    return found


def totals_for(
    rule: Rule, shape: tuple[int, ...], dtype: str, *, valued: bool = True
) -> tuple[Total, ...]:
    """When the totals of a rule are computed: one after the other if it cannot be traced."""
    try:
        return plan_for(rule, len(shape), dtype, shape=shape, valued=valued).totals
    except WritesError:
        raise
    except Exception:  # a `TraceError`, or an error that the step itself will raise
        return _totals_of_ones(_ByStructure(rule), len(shape), valued or not rule.value_optional)


@lru_cache(maxsize=CACHED)
def _totals_of_ones(key: _ByStructure, rank: int, valued: bool) -> tuple[Total, ...]:
    """Return the totals that a rule asks for if it is run as written on a small tensor of ones."""
    heard = Heard({}, np.asarray)
    with suppress(Exception):  # the step itself will raise it
        update_of_ones(key.rule, rank, heard, valued=valued)
    return tuple(Total(1, j, how) for j, how in enumerate(heard.how))


@lru_cache(maxsize=CACHED)
def widened(plan: Plan) -> Plan:
    """The plan for engines that decode quantized slots before the step and encode them after."""
    if not plan.quantized:
        return plan
    stored, wide = plan.storage["p"], dict[str, str]()
    for name in plan.quantized:
        wide[name] = WORKING[stored] if plan.storage[name] == PAIR else real_dtype(stored)
    phases = tuple(map(widened, plan.phases))
    return replace(plan, storage=plan.storage | wide, phases=phases)
