"""What came of it: the rule that an optimizer follows, in words and as data."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arrayopt.rules.base import Rule
from arrayopt.testing.diagnosis import words
from arrayopt.testing.diagnosis.descent import Fit
from arrayopt.testing.diagnosis.fit import simplified
from arrayopt.testing.diagnosis.hypothesis import OFF, Hypothesis
from arrayopt.testing.diagnosis.search import Judged, judge
from arrayopt.testing.diagnosis.trajectory import Trajectory
from arrayopt.testing.equivalence import Difference
from arrayopt.testing.ulps import in_short

__all__ = ["Diagnosis", "made_of", "unseen"]


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Which rule an optimizer follows, or comes nearest to.

    Parameters
    ----------
    subject : str
        What was run.
    matches : bool
        Whether a rule was found that every element of every step follows, within 64 ULPs (4 in half precision). In
        each step the rule starts from the optimizer's own parameters.
    name : str
        The rule's name: that of the nearest, where none matches.
    rule : Rule or None
        The rule with the numbers found, to be used in an `Optimizer`. None where it needs a twist, where numbers are
        not the same for all steps and tensors, or where none matches.
    switches : dict of str to object
        The fields of the rule that are not as by default; of a number that is off by default, its value.
    hypers : dict of str to float
        The hyper-parameters as found; an array where they are not the same for all steps (steps, 1) or tensors
        (1, tensors).
    twist : str
        What it does otherwise than the rule, in words; empty where nothing.
    ulps : float
        The largest difference, in ULPs of the update.
    error : float
        The root mean square of the differences, as a share of the updates.
    first : Difference or None
        Where both part: the first step beyond the limit, and the tensor and element there that are furthest apart. None
        where the rule matches.
    unseen : tuple of str
        Hyper-parameters that could be others by a tenth, and all would be the same: these gradients do not show them.
    others : tuple of str
        What fits as well.
    remarks : tuple of str
        What is odd.
    parts : tuple of (tuple of str, Diagnosis)
        Where tensors follow different settings: the names of each kind, and what these follow.
    finite : bool
        Whether all parameters stay finite; what is not finite is not compared.
    agreeing : tuple of str
        The tensors that follow the rule in all steps.
    changes : tuple of str
        What is not as in the plain rule, in words.
    by_step : dict of str to list of float
        For each tensor, the largest difference after each step, in ULPs.
    """

    subject: str
    matches: bool
    name: str
    rule: Rule | None
    switches: Mapping[str, Any]
    hypers: Mapping[str, Any]
    twist: str
    ulps: float
    error: float
    first: Difference | None
    unseen: tuple[str, ...]
    others: tuple[str, ...]
    remarks: tuple[str, ...]
    by_step: Mapping[str, Sequence[float]]
    finite: bool = True
    agreeing: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    parts: tuple[tuple[tuple[str, ...], "Diagnosis"], ...] = ()

    @property
    def as_documented(self) -> bool:
        """Whether it follows a rule without a twist, and all values are finite."""
        return self.matches and not self.twist and self.finite

    @property
    def title(self) -> str:
        """The rule, with what is changed in it."""
        return f"{self.name}{': ' if self.changes else ''}{'; '.join(self.changes)}"

    def __str__(self) -> str:
        if self.parts:
            lines = [f"{self.subject} treats tensors differently."]
            for names, part in self.parts:
                lines += [f"{', '.join(names)}:", *(f"  {line}" for line in str(part).splitlines())]
            return "\n".join(lines)
        if self.matches:
            what = f"is {self.name}, but not as documented"
            if self.as_documented:
                options = ", with options that are not its defaults" if self.changes else ""
                what = f"follows {self.name} as documented{options}"
            lines = [f"{self.subject} {what}, to {in_short(self.ulps)} ULP{'s' * (self.ulps != 1)}."]
        else:
            lines = [f"{self.subject} follows no rule that is known here. The nearest is {self.name}."]
        lines += [f"  {'but' if change == self.twist else 'with'}: {change}" for change in self.changes]
        lines.append(f"  {words.numbers_in_words(self.hypers)}")
        if not self.matches:
            lines.append(f"  Its updates are off by {self.error:.2g} of their size. They part first: {self.first}.")
            if self.agreeing:
                lines.append(f"  These tensors agree: {', '.join(self.agreeing)}.")
        if self.matches and self.unseen:
            lines.append(f"  Not to be seen in these gradients: {', '.join(self.unseen)}.")
        lines += [f"  Note: {x}." for x in self.remarks]
        lines += [f"  This fits as well: {x}." for x in self.others[:4]]
        if len(self.others) > 4:
            lines.append(f"  So do {len(self.others) - 4} others.")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Everything as JSON; numbers that are not finite are strings."""
        return json.dumps(_plain(self._data()), indent=1, allow_nan=False) + "\n"

    def _data(self) -> dict[str, Any]:
        made = {k: getattr(self, k) for k in self.__dataclass_fields__ if k not in ("rule", "first", "parts")}
        made["rule"] = None if self.rule is None else repr(self.rule)
        made["first"] = None if self.first is None else asdict(self.first)
        made["as_documented"] = self.as_documented
        made["parts"] = [{"tensors": names, **part._data()} for names, part in self.parts]
        return made

    def to_html(self, path: Any) -> None:
        """Write a page that needs neither network nor script, with a plot of the differences by step."""
        from arrayopt.testing.diagnosis.page import page

        Path(path).write_text(page(self), encoding="utf-8")


def made_of(found: Sequence[Judged], trajectory: Trajectory, known: Mapping[str, Any]) -> Diagnosis:
    """The diagnosis of what a search has found."""
    best, names = found[0], trajectory.names
    if best.passes:
        simple = judge(simplified(best.fit))
        best = simple if simple.passes else best
    h, values = best.hypothesis, dict(best.fit.values)
    changes = words.changes(h, values, names)
    switches = {name: values.get(name) if x is None else None if x == OFF else x for name, x in h.switches}
    others = [_title(x.hypothesis, x.fit.values, names) for x in found[1:]] if found[0].passes else []
    said = words.remarks(values, known)
    if best.coarse:
        said.append("hyper-parameters are rounded to float32")
    if not best.passes and best.fit.cost < 1e-5:
        said.append("the difference is small: something may be computed in a lower precision")
    said += _lost(trajectory)
    return Diagnosis(
        subject=trajectory.subject,
        matches=best.passes,
        name=h.kind.__name__,
        rule=_rule(best),
        switches=switches,
        hypers=values,
        twist="" if h.twisted is None else changes[len(h.switches)],
        ulps=best.ulps,
        error=best.fit.cost,
        first=None if best.passes else _first(best),
        unseen=unseen(best) if best.passes else (),
        others=tuple(dict.fromkeys(others)),
        remarks=tuple(said),
        by_step={name: [float(row[name].max(initial=0.0)) for row in best.distances] for name in names},
        agreeing=tuple(name for name in names if not any(row[name].any() for row in best.beyond)),
        finite=all(bool(np.isfinite(x).all()) for p in trajectory.params for x in p.values()),
        changes=tuple(changes),
    )


def _title(h: Hypothesis, values: Mapping[str, Any], names: list[str]) -> str:
    changed = words.changes(h, values, names)
    return f"{h.kind.__name__}{': ' if changed else ''}{'; '.join(changed)} ({words.numbers_in_words(values)})"


def _rule(found: Judged) -> Rule | None:
    """The rule itself, where that is all."""
    values = found.fit.values
    if not found.passes or found.hypothesis.twist or any(np.ndim(x) for x in values.values()):
        return None
    try:
        return found.hypothesis.rule({k: float(x) for k, x in values.items()})
    except (TypeError, ValueError):  # a number outside its interval
        return None


def _first(found: Judged) -> Difference | None:
    """Where the optimizer leaves the rule."""
    made = found.fit.model.seen.trajectory
    predicted = _predicted(found.fit)
    for s, row in enumerate(found.distances):
        beyond = {
            name: np.where(found.beyond[s][name], x, 0.0) for name, x in row.items() if found.beyond[s][name].any()
        }
        if beyond:
            name = max(beyond, key=lambda n: float(beyond[n].max()))
            index = np.unravel_index(int(np.argmax(beyond[name])), beyond[name].shape)
            at = tuple(int(i) for i in index)
            expected, got = predicted[s][name][at], made.params[s + 1][name][at]
            return Difference(float(beyond[name].max()), name, at, s, float(expected), float(got))
    return None


def _predicted(found: Fit) -> list[dict[str, Any]]:
    made = found.model.seen.trajectory
    rows = found.model.predict({k: _set(x) for k, x in found.values.items()})[0]
    ends = np.cumsum([x.size for x in made.params[0].values()])[:-1]
    return [
        {n: x.reshape(made.params[0][n].shape) for n, x in zip(made.names, np.split(row, ends), strict=True)}
        for row in rows
    ]


def _set(x: Any) -> Any:
    return np.reshape(x, (1, *(np.shape(x) or (1, 1))))


def unseen(best: Judged) -> tuple[str, ...]:
    """The numbers that might as well be others."""
    found, made = best.fit, []
    for name, x in found.values.items():
        if name in found.model.names and not np.ndim(x):
            changed = Fit(found.model, {**found.values, name: _other(name, float(x))}, 0.0)
            if judge(changed).ulps <= 2.0 * best.ulps + 1.0:
                made.append(name)
    return tuple(made)


def _other(name: str, x: float) -> float:
    """A number off by a tenth, one near 1 by its distance from 1."""
    if name == "lookahead_steps":
        return x + 1.0
    if 0.5 < x < 1:
        return 1.0 - 0.9 * (1.0 - x)
    return 0.9 * x if x else 0.01


def _lost(made: Trajectory) -> list[str]:
    """What has become of values that are no numbers, and of parameters that stand still."""
    said = []
    for s, p in enumerate(made.params[1:]):
        odd = [name for name, x in p.items() if not np.isfinite(x).all() and np.isfinite(made.params[s][name]).all()]
        if odd:
            said.append(f"from step {s} on, {', '.join(odd)} holds values that are no finite numbers")
    still = all(np.array_equal(a[n], b[n]) for a, b in zip(made.params, made.params[1:], strict=False) for n in a)
    if still:
        return [*said[:2], "the parameters never move"]
    factor = _factor(made)
    idle = [] if factor is None else [f"gradients do nothing: each step multiplies the parameters by {factor:.6g}"]
    return [*said[:2], *idle]


def _factor(made: Trajectory) -> float | None:
    """What all parameters are multiplied by in each step, if that is all."""
    first: float | None = None
    for before, after in zip(made.params, made.params[1:], strict=False):
        pairs = [(np.ravel(before[n]), np.ravel(after[n])) for n in made.names]
        a, b = (np.concatenate(x) for x in zip(*pairs, strict=True))
        if not np.isfinite(b).all() or not np.any(a) or np.any(b[a == 0]):
            return None
        now = b[a != 0] / a[a != 0]
        first = float(now[0]) if first is None else first
        if not np.allclose(now, first, rtol=3e-6, atol=0.0):
            return None
    return first


def _plain(x: Any) -> Any:
    """A value that JSON has."""
    if isinstance(x, Mapping):
        return {str(k): _plain(y) for k, y in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(y) for y in x]
    if isinstance(x, np.ndarray):
        return _plain(x.tolist())
    if isinstance(x, np.generic):
        return _plain(x.item())
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
