"""Tensors sorted by what they follow: one rule, with a decay, a learning rate or a switch of their own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.descent import Fit, Judged, changed, judge
from arrayopt.testing.diagnosis.fit import fit, snapped
from arrayopt.testing.diagnosis.hypothesis import Hypothesis
from arrayopt.testing.diagnosis.model import Model, Seen
from arrayopt.testing.diagnosis.trajectory import Trajectory

__all__ = ["Group", "grouped", "merged", "on"]

Group = tuple[list[str], Hypothesis, Mapping[str, Any]]

ENOUGH = 6  # of so many elements a number is found for each step


def grouped(
    made: Trajectory, taken: Sequence[str], h: Hypothesis, values: Mapping[str, Any], *, steps: bool
) -> tuple[list[Group], list[str]]:
    """The tensors of those that a rule is for, by what they follow; and all that follow nothing near it.

    A number for each step may make up for anything in one tensor: it counts where two have it.
    """
    groups: list[Group] = []
    rest, odd = list(made.names), set(made.names) - set(taken)
    settings: tuple[Hypothesis, Mapping[str, Any]] | None = (h, values)
    while settings is not None:
        able = [name for name in rest if name not in odd]
        same = on(made.only(able), *settings).agreeing if able else []
        shared = len(same) > 1 or all(_has(groups, name, settings[1][name]) for name, _ in settings[0].free)
        if same and shared:
            groups.append((same, *settings))
            rest = [name for name in rest if name not in same]
        else:
            odd |= set(same)
        settings = None
        for name in (name for name in rest if name not in odd):
            bases = [x[1:] for x in groups] or [(h, values)]
            settings = next(_alike(made.only([name]), bases, steps=steps), None)
            if settings is not None:
                break
            odd.add(name)
    return groups, rest


def _has(groups: Sequence[Group], name: str, x: Any) -> bool:
    """Whether one of them has these numbers."""
    return any(name in values and np.array_equal(values[name], x) for _, _, values in groups)


def merged(made: Trajectory, groups: Sequence[Group]) -> Judged | None:
    """All tensors as one, where their settings are the same but for one number that does not change."""
    if not groups:
        return None
    _, h, values = groups[0]
    if any(other != h for _, other, _ in groups[1:]):
        return None
    differ = {name for _, _, x in groups for name in values if np.any(x[name] != values[name])}
    if len(differ) != 1:
        return None
    name = differ.pop()
    if np.ndim(values[name]):
        return None
    own = np.zeros((1, len(made.names)))
    for names, _, x in groups:
        own[0, [made.names.index(tensor) for tensor in names]] = x[name]
    return on(made, replace(h, free=(*h.free, (name, "tensor"))), {**values, name: own})


def on(made: Trajectory, hypothesis: Hypothesis, values: Mapping[str, Any]) -> Judged:
    """A hypothesis with its numbers on other tensors."""
    return judge(changed(Fit(Model(hypothesis, Seen(made), {}), values, 0.0), {}))


def _alike(
    made: Trajectory, bases: Sequence[tuple[Hypothesis, Mapping[str, Any]]], *, steps: bool
) -> Iterator[tuple[Hypothesis, dict[str, Any]]]:
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
    others = (("adapt", False), ("grad_centralization", True))
    able = {f.name for f in fields(h.kind)} - {name for name, _ in h.switches}
    return [h, *(replace(h, switches=(*h.switches, x)) for x in others if x[0] in able)]


def _moving(made: Trajectory) -> int:
    """How many elements have a gradient in every step that has one."""
    count = 0
    for name in made.names:
        moves = np.full(made.params[0][name].shape, bool(made.took[:, made.names.index(name)].any()))
        for grads in made.grads:
            x = grads[name]
            moves &= True if x is None else x != 0
        count += int(moves.sum())
    return count


def _fitting(
    h: Hypothesis, seen: Seen, values: Mapping[str, Any], free: Sequence[str]
) -> Iterator[tuple[Hypothesis, dict[str, Any]]]:
    """A hypothesis with some numbers to be found and the others known, if it fits."""
    tried = replace(h, free=tuple(x for x in h.free if x[0] in free))  # the others are known, of each step
    model = Model(tried, seen, {k: x for k, x in values.items() if k not in free})
    if not set(free) <= set(model.names):
        return
    near = {k: x if np.shape(x) == model.shape(k) else float(np.mean(x)) for k, x in values.items()}
    found = fit(model, near)
    judged = judge(snapped(found) if free else found)
    if judged.passes:
        yield h, dict(judged.fit.values)
