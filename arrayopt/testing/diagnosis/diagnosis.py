"""What came of it: the rule that an optimizer follows, in words and as data."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from arrayopt.rules.base import Rule
from arrayopt.testing.diagnosis import words
from arrayopt.testing.diagnosis.fit import LOWER, MADE_UP, simplified
from arrayopt.testing.diagnosis.hypothesis import OFF
from arrayopt.testing.diagnosis.model import Fit, Seen, one_set
from arrayopt.testing.diagnosis.trajectory import Trajectory
from arrayopt.testing.equivalence import Difference
from arrayopt.testing.ulps import in_short, plain

__all__ = ["NOT_SEARCHED", "Diagnosis", "diagnosis_of", "no_rule"]

NOT_SEARCHED = "known, not searched"


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The rule that an optimizer follows, or the nearest one.

    Parameters
    ----------
    subject : str
        What was run.
    explained : bool
        Whether every element of every step follows the rule, with at most one twist, within 64 ULPs (8 in float32, 4 in
        half precision). In each step the rule starts from the optimizer's own parameters. Values that are not finite
        follow no rule. See also `as_documented`.
    name : str
        The rule's name; the nearest one's, if no rule explains the steps; empty if none is near.
    rule : Rule or None
        The rule with the numbers found. None if it needs a twist, if numbers differ between steps or tensors, or if no
        rule explains the steps.
    switches, hypers : dict of str to object
        The fields of the rule that differ from the defaults, and all hyper-parameters as found: an array if they differ
        between steps (steps, 1) or tensors (1, tensors).
    twist : str
        The difference from the rule, in words; empty if there is none.
    ulps, error : float
        The largest difference, in ULPs of the update, infinity if a value is not finite; and the root mean square of
        the finite differences, relative to the updates.
    first : Difference or None
        The first step beyond the limit, and the tensor and element with the largest difference in it.
    unseen : tuple of str
        Hyper-parameters that could differ by a tenth without a difference for these gradients.
    made_up : tuple of (str, str)
        Pairs of hyper-parameters of which each can compensate for the other.
    others, remarks, changes : tuple of str
        Other rules that fit, remarks, and the changes to the plain rule.
    by_step : dict of str to list of float
        For each tensor, the largest difference after each step, in ULPs.
    finite : bool
        Whether all parameters stay finite.
    reason : str
        Why there was no search; otherwise empty.
    complete : bool
        Whether the search ended before its time limit.
    agreeing : tuple of str
        The tensors that follow the rule in all steps.
    parts : tuple of (tuple of str, Diagnosis)
        If tensors follow different settings: the names of each group, and what they follow.
    """

    subject: str
    explained: bool
    name: str = ""
    rule: Rule | None = None
    switches: Mapping[str, Any] = field(default_factory=dict)
    hypers: Mapping[str, Any] = field(default_factory=dict)
    twist: str = ""
    ulps: float = math.inf
    error: float = math.inf
    first: Difference | None = None
    unseen: tuple[str, ...] = ()
    made_up: tuple[tuple[str, str], ...] = ()
    others: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    by_step: Mapping[str, Sequence[float]] = field(default_factory=dict)
    finite: bool = True
    reason: str = ""
    complete: bool = True
    agreeing: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    parts: tuple[tuple[tuple[str, ...], "Diagnosis"], ...] = ()

    @property
    def as_documented(self) -> bool:
        """Whether it follows a rule in all tensors, and without a twist."""
        return self.explained and not self.twist

    @property
    def is_coarse(self) -> bool:
        """Whether it is so near a rule that what is left may be the rounding of a lower precision."""
        return self.finite and not self.explained and self.error < LOWER

    def __str__(self) -> str:
        if self.parts:
            lines = [f"{self.subject} treats tensors differently."]
            for names, part in self.parts:
                lines += [f"{', '.join(names)}:", *(f"  {line}" for line in str(part).splitlines())]
        else:
            lines = [f"{self.subject} {self._verdict()}", *(f"  {line}" for line in self._about() if self.name)]
        if not self.complete:
            lines.append("  Note: the time was over before all was tried.")
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.reason.endswith(NOT_SEARCHED):
            return f"may follow what is not searched: {self.reason}."
        if self.is_coarse:
            return f"is {self.name} to {self.error:.2g} of its updates: something may be computed in a lower precision."
        if not self.explained:
            nearest = f" The nearest is {self.name}." if self.name else ""
            return f"follows no rule{f': {self.reason}' if self.reason else ' that is known here'}.{nearest}"
        what = f"is {self.name}, but not as documented"
        if self.as_documented:
            options = ", with options that are not its defaults" if self.changes else ""
            what = f"follows {self.name} as documented{options}"
        return f"{what}, to {in_short(self.ulps)} ULP{'s' * (self.ulps != 1)}."

    def _about(self) -> list[str]:
        """What is said of the rule, line by line."""
        lines = [f"{'but' if change == self.twist else 'with'}: {change}" for change in self.changes]
        lines.append(words.numbers_in_words(self.hypers))
        if not self.explained:
            updates = "finite updates" if not self.finite else "updates"
            lines.append(f"Its {updates} are off by {self.error:.2g} of their size. They part first: {self.first}.")
            if self.agreeing:
                lines.append(f"These tensors agree: {', '.join(self.agreeing)}.")
        if self.unseen:
            lines.append(f"Not to be seen in these gradients: {', '.join(self.unseen)}.")
        lines += [f"Of {a} and {b} only {MADE_UP[a, b][1]} shows: both could be others." for a, b in self.made_up]
        lines += [f"Note: {x}." for x in self.remarks]
        lines += [f"This fits as well: {x}." for x in self.others[:4]]
        if len(self.others) > 4:
            lines.append(f"So do {len(self.others) - 4} others.")
        return lines

    def to_json(self) -> str:
        """Everything as JSON; numbers that are not finite are strings."""
        return json.dumps(plain(self._data()), indent=1, allow_nan=False) + "\n"

    def _data(self) -> dict[str, Any]:
        own = {
            "rule": None if self.rule is None else repr(self.rule),
            "first": None if self.first is None else asdict(self.first),
            "as_documented": self.as_documented,
            "parts": [{"tensors": names, **part._data()} for names, part in self.parts],
        }
        return vars(self) | own

    def to_html(self, path: Any) -> None:
        """Write a page that needs neither network nor script, with a plot of the differences by step."""
        from arrayopt.testing.diagnosis.page import page

        Path(path).write_text(page(self), encoding="utf-8")


def diagnosis_of(fits: Sequence[Fit], trajectory: Trajectory, known: Mapping[str, Any], reason: str = "") -> Diagnosis:
    """The diagnosis of what a search has found, and why it ended before it was over."""
    best, names = fits[0], trajectory.names
    if best.passes:
        simple = simplified(best)
        best = simple if simple.passes else best
    h, values, seen, follows = best.hypothesis, dict(best.values), best.model.seen, best.passes
    changes = words.changes(h, values, names)
    equals = []
    for x in fits[1:] if follows else ():
        changed = "; ".join(words.changes(x.hypothesis, x.values, names))
        numbers = words.numbers_in_words(x.values)
        equals.append(f"{x.hypothesis.kind.__name__}{': ' if changed else ''}{changed} ({numbers})")
    lost, remarks = words.lost(seen), words.remarks(values, known)
    distances, beyond, in_float32 = best.judged
    remarks += ["hyper-parameters are rounded to float32"] if in_float32 else []
    remarks += [*lost[1:2], *words.motion(seen)]
    if lost:  # values that become no numbers are too far off
        remarks += [f"what is finite follows this, to {in_short(best.ulps)} ULPs"] if follows else []
        odd = ~np.isfinite(seen.got)
        odd[1:] &= np.isfinite(seen.start[1:])
        distances, beyond = np.where(odd, np.inf, distances), beyond | odd
        follows = follows and not odd.any()
    first = None
    if not follows:
        pair = best.model.predict(one_set(best.values))[0], seen.got
        first = seen.first_difference(distances, beyond, pair)
    return Diagnosis(
        subject=trajectory.subject,
        explained=follows,
        name=h.kind.__name__,
        rule=_rule(best) if follows else None,
        switches={name: values.get(name) if x is None else None if x == OFF else x for name, x in h.switches},
        hypers=values,
        twist=changes[len(h.switches)] if h.twist else "",
        ulps=float(distances.max(initial=0.0)),
        error=best.cost,
        first=first,
        unseen=words.unseen(best) if follows else (),
        made_up=words.made_up(best, known) if follows else (),
        others=tuple(dict.fromkeys(equals)) if follows else (),
        remarks=tuple(remarks),
        by_step={name: distances[:, part].max(axis=1, initial=0.0).tolist() for name, part in seen.parts.items()},
        agreeing=tuple(name for name, part in seen.parts.items() if not beyond[:, part].any()),
        finite=not lost,
        reason=lost[0] if lost else reason,
        changes=tuple(changes),
    )


def no_rule(trajectory: Trajectory, reason: str) -> Diagnosis:
    """The diagnosis of what comes near no rule, for some reason."""
    return Diagnosis(trajectory.subject, explained=False, reason=reason, finite=not words.lost(Seen(trajectory)))


def _rule(found: Fit) -> Rule | None:
    """The rule itself, where that is all."""
    if found.hypothesis.twist or any(np.ndim(x) for x in found.values.values()):
        return None
    try:
        return found.hypothesis.rule({k: float(x) for k, x in found.values.items()})
    except (TypeError, ValueError):  # a number outside its interval
        return None
