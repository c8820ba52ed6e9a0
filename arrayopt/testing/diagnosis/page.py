"""A diagnosis as one HTML page: the verdict, the numbers, and a plot of the differences by step."""

import math
from html import escape
from typing import Any

from arrayopt.testing.diagnosis import words
from arrayopt.testing.report import document, table
from arrayopt.testing.ulps import in_short

__all__ = ["page"]

COLOURS = ("#08519c", "#a33b00", "#238b45", "#6a51a3", "#525252", "#99000d")
LEFT, RIGHT, TOP, BOTTOM = 64.0, 570.0, 12.0, 268.0  # of the plot's frame, in 720 by 300


def page(found: Any) -> str:
    """The whole page of a `Diagnosis`, as text to be written in UTF-8."""
    return document(f"arrayopt diagnose: {found.subject}", f"What does {found.subject} compute?", _body(found))


def _body(found: Any) -> str:
    """One diagnosis, or one after the other."""
    if found.parts:
        return "\n".join(f"<h2>{escape(', '.join(names))}</h2>\n{_body(part)}" for names, part in found.parts)
    first, *rest = str(found).splitlines()
    made = [f'<p class="verdict{"" if found.as_documented else " bad"}">{escape(first)}</p>']
    if found.name:
        numbers = words.numbers_in_words(found.hypers)  # which the table has
        made += [f"<p>{escape(line.strip())}</p>" for line in rest if line.strip() != numbers]
        unseen = dict.fromkeys(found.unseen, "not to be seen in these gradients")
        rows = [[name, words.number(x), unseen.get(name, "")] for name, x in found.hypers.items()]
        made.append(table("list", ("hyper-parameter", "found", ""), rows))
        made += ["<h2>Differences by step, in ULPs of the update</h2>", *_plot(found.by_step)]
    return "\n".join(made)


def _plot(by_step: Any) -> list[str]:
    """A line for each tensor: the largest difference after each step, on a logarithmic scale."""
    steps = max(map(len, by_step.values()))
    finite = [x for row in by_step.values() for x in row if math.isfinite(x)]
    top = max(3, math.ceil(math.log10(max([1.0, *finite])) + 0.2))  # the powers of ten go from -1 to this

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
