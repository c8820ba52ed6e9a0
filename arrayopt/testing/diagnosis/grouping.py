"""Tensors sorted by what they follow: one rule, with a decay, a learning rate or a switch of their own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.fit import fit, snapped
from arrayopt.testing.diagnosis.hypothesis import Hypothesis
from arrayopt.testing.diagnosis.model import Fit, Model, Seen
from arrayopt.testing.diagnosis.trajectory import Trajectory

__all__ = ["Group", "grouped", "merged", "on"]

Setting = tuple[Hypothesis, Mapping[str, Any]]
Group = tuple[list[str], Hypothesis, Mapping[str, Any]]

ENOUGH = 6  # of so many elements a number is found for each step


def grouped(
    made: Trajectory, taken: Sequence[str], h: Hypothesis, values: Mapping[str, Any], *, steps: bool
) -> tuple[list[Group], list[str]]:
    """The tensors of those that a rule is for, by what they follow; and all that follow nothing near it.

    A number for each step may make up for anything in one tensor: it counts where two have it.
    """
    groups: list[Group] = []
    able, odd = [name for name in made.names if name in taken], set(made.names) - set(taken)
    settings: Iterator[Setting] = iter([(h, values)])
    while able:
        setting = next(settings, None)
        if setting is not None:
            same = on(made.only(able), *setting).agreeing
            free = [name for name, _ in setting[0].free]
            if same and (len(same) > 1 or all(_has(groups, name, setting[1][name]) for name in free)):
                groups.append((same, *setting))
            else:
                odd |= set(same)
            able = [name for name in able if name not in same]
        else:
            odd.add(able.pop(0))
        if able:  # what the next of them may follow
            bases = [(h, x) for _, h, x in groups] or [(h, values)]
            settings = _alike(made.only(able[:1]), bases, steps=steps)
    return groups, [name for name in made.names if name in odd]


def _has(groups: Sequence[Group], name: str, x: Any) -> bool:
    """Whether one of them has these numbers."""
    return any(name in values and np.array_equal(values[name], x) for _, _, values in groups)


def merged(made: Trajectory, groups: Sequence[Group]) -> Fit | None:
    """All tensors as one, where their settings are the same but for one number that does not change."""
    if not groups or any(h != groups[0][1] for _, h, _ in groups):
        return None
    _, h, values = groups[0]
    differ = [name for name in values if any(np.any(x[name] != values[name]) for _, _, x in groups)]
    if len(differ) != 1 or np.ndim(values[differ[0]]):
        return None
    own = np.zeros((1, len(made.names)))
    for names, _, x in groups:
        own[0, [made.names.index(tensor) for tensor in names]] = x[differ[0]]
    return on(made, replace(h, free=(*h.free, (differ[0], "tensor"))), {**values, differ[0]: own})


def on(made: Trajectory, hypothesis: Hypothesis, values: Mapping[str, Any]) -> Fit:
    """A hypothesis with its numbers on other tensors."""
    return Model(hypothesis, Seen(made), {}).at(values)[0]


def _alike(made: Trajectory, bases: Sequence[Setting], *, steps: bool) -> Iterator[Setting]:
    """What else one tensor may follow: the same rule, with another decay or learning rate, or without its ratio.

    With `steps` these may also change from step to step, where enough elements tell so.
    """
    seen = Seen(made)
    for h, values in bases:
        for way in _ways(h)[1:]:
            yield from _fitting(way, seen, values, ())
    h, values = bases[0]
    for axis in ("", "step") if steps and _moving(made) >= ENOUGH else ("",):
        for free in (("weight_decay",), ("lr",), ("lr", "weight_decay")):
            for way in _ways(h):
                kept = tuple(x for x in h.free if x[0] not in free)
                varied = replace(way, free=(*kept, *((name, axis) for name in free if axis)))
                if "weight_decay" in free:
                    bare = replace(varied, free=tuple(x for x in varied.free if x[0] != "weight_decay"))
                    yield from _fitting(bare, seen, {**values, "weight_decay": 0.0}, free[:-1])
                yield from _fitting(varied, seen, values, free)


def _ways(h: Hypothesis) -> list[Hypothesis]:
    """A hypothesis, and the same without its ratio, or with gradients that are centralized."""
    able = {f.name for f in fields(h.kind)} - {name for name, _ in h.switches}
    others = [x for x in (("adapt", False), ("grad_centralization", True)) if x[0] in able]
    return [h, *(replace(h, switches=(*h.switches, x)) for x in others)]


def _moving(made: Trajectory) -> int:
    """How many elements of one tensor have a gradient in every step that has one."""
    (name,) = made.names
    rows = [grads[name] != 0 for grads in made.grads if grads[name] is not None]
    return int(np.all(rows, axis=0).sum()) if rows else 0


def _fitting(h: Hypothesis, seen: Seen, values: Mapping[str, Any], free: Sequence[str]) -> Iterator[Setting]:
    """A hypothesis with some numbers to be found and the others known, if it fits."""
    tried = replace(h, free=tuple(x for x in h.free if x[0] in free))  # the others are known, of each step
    model = Model(tried, seen, {k: x for k, x in values.items() if k not in free})
    if set(free) <= set(model.names):
        found = fit(model, {k: x if np.shape(x) == model.shape(k) else float(np.mean(x)) for k, x in values.items()})
        found = snapped(found) if free else found
        if found.passes:
            yield h, dict(found.values)
