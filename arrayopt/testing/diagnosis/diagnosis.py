"""The result of `diagnose`: the rule that an optimizer follows, as text, data and an HTML page."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from arrayopt.rules.base import Rule
from arrayopt.testing.diagnosis.fit import LOWER, MADE_UP
from arrayopt.testing.equivalence import Difference
from arrayopt.testing.report import document, table
from arrayopt.testing.ulps import in_short, plain

NOT_SEARCHED = "known, not searched"
COLOURS = ("#08519c", "#a33b00", "#238b45", "#6a51a3", "#525252", "#99000d")
LEFT, RIGHT, TOP, BOTTOM = 64.0, 570.0, 12.0, 268.0  # the frame of the plot, which is 720 wide and 300 high


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The rule that an optimizer follows, or the nearest one.

    Parameters
    ----------
    subject : str
        The name of the optimizer or function.
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
        Hyper-parameters that could change by a tenth without a visible difference for these gradients.
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
        """Whether all tensors follow a rule, without a twist."""
        return self.explained and not self.twist

    @property
    def is_coarse(self) -> bool:
        """Whether the difference from the rule is so small that it may be rounding in a lower precision.

        False if a number was fitted for each step, because such numbers can hide other differences.
        """
        fitted = any(np.ndim(x) and len(x) > 1 for x in self.hypers.values())
        return self.finite and not self.explained and self.error < LOWER and not fitted

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
            if self.finite and self.error < LOWER:
                nearest = f" It is near {self.name}, to {self.error:.2g} of its updates, with a number for each step."
            return f"follows no rule{f': {self.reason}' if self.reason else ' that is known here'}.{nearest}"
        what = f"is {self.name}, but not as documented"
        if self.as_documented:
            options = ", with options that are not its defaults" if self.changes else ""
            what = f"follows {self.name} as documented{options}"
        return f"{what}, to {in_short(self.ulps)} ULP{'s' * (self.ulps != 1)}."

    def _about(self) -> list[str]:
        """The lines about the rule that follow the first line."""
        lines = [f"{'but' if change == self.twist else 'with'}: {change}" for change in self.changes]
        lines.append(numbers_in_words(self.hypers))
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
        """Return all fields as JSON. Numbers that are not finite become strings."""
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
        """Write an HTML page with a plot of the differences by step. It needs neither network nor scripts."""
        Path(path).write_text(page(self), encoding="utf-8")


def number(x: Any) -> str:
    """Format a number, or several in brackets, with six digits."""
    if np.ndim(x):
        return "[" + ", ".join(f"{float(y):.6g}" for y in np.ravel(x)) + "]"
    return f"{float(x):.6g}"


def numbers_in_words(values: Mapping[str, Any]) -> str:
    """Format numbers as ``name=value``, separated by commas."""
    return ", ".join(f"{name}={number(x)}" for name, x in values.items())


# ---- the page --------------------------------------------------------------------------------------------------------


def page(found: Diagnosis) -> str:
    """Return a `Diagnosis` as an HTML page, to be written in UTF-8."""
    return document(f"arrayopt diagnose: {found.subject}", f"What does {found.subject} compute?", _body(found))


def _body(found: Diagnosis) -> str:
    """The body of the page: the diagnosis, or its parts one after the other."""
    if found.parts:
        return "\n".join(f"<h2>{escape(', '.join(names))}</h2>\n{_body(part)}" for names, part in found.parts)
    first, *rest = str(found).splitlines()
    made = [f'<p class="verdict{"" if found.as_documented else " bad"}">{escape(first)}</p>']
    if found.name:
        numbers = numbers_in_words(found.hypers)  # left out of the text, because the table has them
        made += [f"<p>{escape(line.strip())}</p>" for line in rest if line.strip() != numbers]
        unseen = dict.fromkeys(found.unseen, "not to be seen in these gradients")
        rows = [[name, number(x), unseen.get(name, "")] for name, x in found.hypers.items()]
        made.append(table("list", ("hyper-parameter", "found", ""), rows))
        made += ["<h2>Differences by step, in ULPs of the update</h2>", *_plot(found.by_step)]
    return "\n".join(made)


def _plot(by_step: Any) -> list[str]:
    """Draw a line for each tensor, as SVG: the largest difference after each step, on a logarithmic scale."""
    steps = max(map(len, by_step.values()))
    finite = [x for row in by_step.values() for x in row if math.isfinite(x)]
    top = max(3, math.ceil(math.log10(max([1.0, *finite])) + 0.2))  # the axis shows powers of ten from -1 to this

    def x(step: int) -> float:
        return LEFT + (RIGHT - LEFT) * step / max(steps - 1, 1)

    def y(power: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (power + 1) / (top + 1)

    lines = ['<svg viewBox="0 0 720 300" role="img" aria-label="Largest difference of each tensor after each step">']
    for power in range(-1, top + 1, max(1, (top + 1) // 8)):
        lines.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y(power):.1f}" y2="{y(power):.1f}" stroke="#ddd"/>')
        label = in_short(10.0**power) if power >= 0 else "≤ 0.1"
        lines.append(f'<text x="{LEFT - 8}" y="{y(power) + 4:.1f}" text-anchor="end">{label}</text>')
    for step in range(0, steps, max(1, steps // 12)):
        lines.append(f'<text x="{x(step):.1f}" y="{BOTTOM + 16}" text-anchor="middle">{step}</text>')
    lines.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 31}" text-anchor="middle">step</text>')
    for i, (name, row) in enumerate(by_step.items()):
        colour, places = COLOURS[i % len(COLOURS)], []
        for step, value in enumerate(row):
            place = f"{x(step):.1f}", f"{y(math.log10(max(value, 0.1)) if math.isfinite(value) else top):.1f}"
            said = f"<title>{escape(name)}, step {step}: {in_short(value)}</title>"
            lines.append(f'<circle cx="{place[0]}" cy="{place[1]}" r="2.6" fill="{colour}">{said}</circle>')
            places.append(",".join(place))
        lines.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        if i < 14:
            lines.append(f'<text x="{RIGHT + 14}" y="{24 + 18 * i}" style="fill:{colour}">{escape(name)}</text>')
    return [*lines, "</svg>"]
