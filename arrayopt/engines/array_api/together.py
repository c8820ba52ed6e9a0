"""Updates as written of several tensors whose rules use totals, for any library to trace. Updates
run again whenever more totals are known. `functional.update` calls `together`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, array_namespace, dtype_name, is_array
from arrayopt.engines.array_api.apply_one import Done
from arrayopt.engines.layers import unless
from arrayopt.engines.meeting import as_many
from arrayopt.fusion.plan import Total, in_rounds
from arrayopt.fusion.plans import totals_for
from arrayopt.rules.base import Rule
from arrayopt.rules.namespace import rule_namespace
from arrayopt.rules.totals import PREFIX, of_total, totals_in, unforeseen


class Work(NamedTuple):
    """The update of a tensor."""

    rule: Rule
    p: Array
    run: Callable[[dict[str, Any]], Done]
    """Computes the update, given the totals that are known."""
    left: Any = None
    """Array of bool, optional: the layers that are skipped."""

    @property
    def layers(self) -> int:
        """The number of layers, if the tensor is stacked; else 0."""
        return int(self.p.shape[0]) if self.rule.stacked else 0

    def contributions(self, x: Any) -> list[Any]:
        """Return the tensor's contributions to a total, in order; each block has its own."""
        if self.rule.blocks is None or not is_array(x):
            return [x]
        return [x[i, ...] for i in range(x.shape[0])]


def together(work: dict[str, Work], *, valued: bool) -> dict[str, Done]:
    """Compute all updates; those with totals run again whenever more totals are known."""
    done = {name: one.run({}) for name, one in work.items()}
    classes: dict[type[Rule], list[str]] = {}
    for name, (_, _, report) in done.items():
        if totals_in(report):
            classes.setdefault(type(work[name].rule), []).append(name)
    for rule, names in classes.items():
        plans = set[tuple[Total, ...]]()
        for name in names:
            one = work[name]
            shape = tuple(one.p.shape)[1 if one.rule.stacked else 0 :]
            plans.add(totals_for(one.rule, shape, dtype_name(one.p), valued=valued))
        as_many(rule, plans)
        if {len(x) for x in plans} != {len(totals_in(done[names[0]][2]))}:
            raise unforeseen(rule)
        how = [x.how for x in next(iter(plans))]
        known: dict[str, dict[str, Any]] = {name: {} for name in names}
        for some in in_rounds(plans):
            for which in some:
                total = dict[int, Any]()
                for name in names:
                    at = work[name].layers
                    for x in work[name].contributions(done[name][2][of_total(which)]):
                        added = _contribution(work[name], x, how[which])
                        if at in total:
                            added = _combined(how[which], total[at], added)
                        total[at] = added
                for name in names:
                    known[name][of_total(which)] = total[work[name].layers]
            done |= {name: work[name].run(known[name]) for name in names}
    reported = {}
    for name, (p, slots, report) in done.items():
        shown = {key: x for key, x in report.items() if not key.startswith(PREFIX)}
        reported[name] = p, slots, shown
    return reported


def _contribution(work: Work, number: Any, how: str) -> Any:
    """Return a contribution in double precision; that of layers that are left out has no effect."""
    if not is_array(number):
        return number
    xp = array_namespace(number)
    wide = xp.float64
    if array_api_compat.is_jax_array(number):
        import jax

        wide = jax.dtypes.canonicalize_dtype(np.float64)
    number = xp.astype(number, wide)
    nothing = xp.zeros_like(number) if how == "sum" else xp.full_like(number, -float("inf"))
    return number if work.left is None else unless(work.left, nothing, number)


def _combined(how: str, one: Any, other: Any) -> Any:
    """Return the sum of two numbers, or the larger one."""
    arrays = [number for number in (one, other) if is_array(number)]
    if len({array_namespace(number) for number in arrays}) > 1:
        one, other, arrays = float(one), float(other), []
    if how == "sum":
        return one + other
    return (
        rule_namespace(array_namespace(*arrays)).maximum(one, other) if arrays else max(one, other)
    )
