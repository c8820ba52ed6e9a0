"""The picture of a run: for each rule and problem, bars of time as multiples of ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.ours import REFERENCE
from benchmarks.results import Row, find

__all__ = ["draw", "draw_short"]

# Okabe and Ito's colours, which remain apart for colour-blind eyes.
COLOURS = {"arrayopt": "#0072B2", "torch": "#D55E00", "timm": "#E69F00", "pytorch_optimizer": "#CC79A7"}
COLOURS |= {"came-pytorch": "#F0A87A", "schedulefree": "#F0A87A", "optax": "#009E73", "NumPy": "#8C8C8C"}
STYLE: Any = {
    "font.size": 8.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#666666",
    "xtick.color": "#666666",
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a contest to `path`, whose suffix says in which format; nothing if there was none."""
    rules, problems = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("rule", "problem"))
    if not rules:
        return
    names = {rule: list(dict.fromkeys(row.name for row in rows if row.rule == rule)) for rule in rules}
    heights = [len(names[rule]) + 1.2 for rule in rules]
    longest = 1.6 * max(row.ratio for row in rows)
    shortest = min([0.7, *(0.9 * row.ratio for row in rows)])
    wide = max(2.9 * len(problems), 5.0)
    pad = 56 if max(map(len, rules)) < 9 else 160
    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(1.8 + wide, 0.9 + 0.19 * sum(heights)), dpi=150, layout="constrained")
        grid = made.subplots(
            len(rules), len(problems), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for rule, line in zip(rules, grid, strict=True):
            for problem, axes in zip(problems, line, strict=True):
                _bars(axes, rows, rule, problem, names[rule])
                axes.set_xlim(shortest, longest)
            line[0].set_yticks(range(len(names[rule])), names[rule])
            line[0].set_ylabel(rule, rotation=0, ha="left", va="center", weight="bold", fontsize=11, labelpad=pad)
        for problem, axes in zip(problems, grid[0], strict=True):
            axes.set_title(problem, pad=10)
        made.supxlabel(f"time of a step ÷ that of {REFERENCE}, log scale: shorter is faster", fontsize=9)
        made.savefig(path)


def draw_short(rows: Sequence[Row], path: Path) -> None:
    """Draw the results that matter: for each, the time of the fastest other optimizer as a multiple of ours."""
    if not rows:
        return
    with matplotlib.rc_context(STYLE | {"font.size": 10}):
        made = Figure(figsize=(7.2, 0.9 + 0.42 * len(rows)), dpi=150, layout="constrained")
        axes = made.subplots()
        _scale(axes, len(rows))
        for i, row in enumerate(rows):
            colour = COLOURS.get(row.name.split()[0], "#8C8C8C")
            axes.barh(i, row.ratio - 1.0, left=1.0, height=0.6, color=colour)
            axes.annotate(
                f"{row.ratio:.2f}× {row.name}",
                (max(row.ratio, 1.0), i),
                (5, 0),
                textcoords="offset points",
                va="center",
            )
        axes.set_yticks(range(len(rows)), [f"{row.rule}, {row.problem}" for row in rows])
        axes.set_xlim(min(0.5, *(0.85 * row.ratio for row in rows)), 3.5 * max(row.ratio for row in rows))
        made.supxlabel("its time ÷ ours, log scale: right of the line, ours is faster", fontsize=10)
        made.savefig(path)


def _bars(axes: Axes, rows: Sequence[Row], rule: str, problem: str, names: list[str]) -> None:
    """One panel, from top to bottom in the order of the names."""
    _scale(axes, len(names))
    for i, name in enumerate(names):
        row = find(rows, rule, problem, name)
        if row is None:
            axes.annotate("not measured", (1.0, i), (4, 0), textcoords="offset points", va="center", color="#999999")
            continue
        colour = COLOURS.get(name.split()[0], "#8C8C8C")
        axes.barh(i, row.ratio - 1.0, left=1.0, height=0.72, color=colour, alpha=1.0 if "foreach" not in name else 0.7)
        if row.ratio == 1.0:
            axes.plot([1.0], [i], "o", color=colour, markersize=4)
        text = f"{row.ratio:.{2 if row.ratio < 1.995 else 1 if row.ratio < 9.95 else 0}f}×"
        if name == REFERENCE:
            text = f"{row.ms:.{0 if row.ms >= 9.95 else 1}f} ms"
        axes.annotate(text, (max(row.ratio, 1.0), i), (4, 0), textcoords="offset points", va="center")


def _scale(axes: Axes, count: int) -> None:
    """A logarithmic scale of ratios, with room for so many bars."""
    axes.set_xscale("log")
    axes.set_yticks([])
    axes.set_ylim(count - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.axvline(1.0, color="#666666", linewidth=0.8, zorder=0)
