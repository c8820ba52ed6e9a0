"""A diagnosis as one HTML page: the verdict, the numbers, and a plot of the differences by step.

The page needs no network and no script.
"""

import math
from html import escape
from typing import Any

from arrayopt.testing.diagnosis import words
from arrayopt.testing.page import document, table
from arrayopt.testing.ulps import in_short

__all__ = ["page"]

STYLE = """
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #333; }"""
COLOURS = ("#08519c", "#a33b00", "#238b45", "#6a51a3", "#525252", "#99000d")
WIDTH, HEIGHT, LEFT, BELOW = 720.0, 300.0, 64.0, 44.0


def page(found: Any) -> str:
    """The whole page of a `Diagnosis`, as text to be written in UTF-8."""
    title, heading = f"arrayopt diagnose: {found.subject}", f"What does {found.subject} compute?"
    return document(title, heading, _body(found), STYLE)


def _body(found: Any) -> str:
    """One diagnosis, or one after the other."""
    if found.parts:
        return "\n".join(f"<h2>{escape(', '.join(names))}</h2>\n{_body(part)}" for names, part in found.parts)
    first, *rest = str(found).splitlines()
    verdict = f'<p class="verdict{"" if found.as_documented else " bad"}">{escape(first)}</p>'
    if not found.name:
        return verdict
    numbers = words.numbers_in_words(found.hypers)  # which the table has
    lines = "\n".join(f"<p>{escape(line.strip())}</p>" for line in rest if line.strip() != numbers)
    unseen = dict.fromkeys(found.unseen, "not to be seen in these gradients")
    rows = [[name, words.number(x), unseen.get(name, "")] for name, x in found.hypers.items()]
    return f"""{verdict}
{lines}
{table("list", ("hyper-parameter", "found", ""), rows)}
<h2>Differences by step, in ULPs of the update</h2>
{_plot(found)}"""


def _plot(found: Any) -> str:
    """A line for each tensor: the largest difference after each step, on a logarithmic scale."""
    finite = [x for row in found.by_step.values() for x in row if math.isfinite(x)]
    top = max(3, math.ceil(math.log10(max([1.0, *finite])) + 0.2))
    steps = max(len(row) for row in found.by_step.values())

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - 150.0) * (step / max(steps - 1, 1))

    def y(ulps: float) -> float:
        high = top if not math.isfinite(ulps) else math.log10(max(ulps, 0.1))
        return (HEIGHT - BELOW) * (1.0 - (high + 1.0) / (top + 1.0)) + 12.0

    lines = []
    for power in range(-1, top + 1, max(1, (top + 1) // 8)):
        at = y(10.0**power)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - 150}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        label = "≤ 0.1" if power == -1 else in_short(10.0**power)
        lines.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for step in range(0, steps, max(1, steps // 12)):
        at = x(step)
        lines.append(f'<text x="{at:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{step}</text>')
    lines.append(f'<text x="{(WIDTH - 86) / 2:.1f}" y="{HEIGHT - 0.5}" text-anchor="middle">step</text>')
    for i, (name, row) in enumerate(found.by_step.items()):
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join(f"{x(s):.1f},{y(value):.1f}" for s, value in enumerate(row))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        for s, value in enumerate(row):
            said = f"<title>{escape(name)}, step {s}: {in_short(value)}</title>"
            lines.append(f'<circle cx="{x(s):.1f}" cy="{y(value):.1f}" r="2.6" fill="{colour}">{said}</circle>')
        if i < 14:
            lines.append(f'<text x="{WIDTH - 136}" y="{24 + 18 * i}" style="fill:{colour}">{escape(name)}</text>')
    said = "Largest difference of each tensor after each step"
    body = "\n".join(lines)
    return f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{said}">\n{body}\n</svg>'
