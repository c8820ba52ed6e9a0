"""The picture of a run: for each rule and problem, bars of time as multiples of ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.ours import REFERENCE
from benchmarks.results import Sheet
from benchmarks.tables import CONTEST, MORE, in_short

__all__ = ["Bar", "draw", "draw_all", "draw_short"]

# Okabe and Ito's colours, which remain apart for colour-blind eyes.
COLOURS = {"arrayopt": "#0072B2", "torch": "#D55E00", "timm": "#E69F00", "pytorch_optimizer": "#CC79A7"}
COLOURS |= {"came-pytorch": "#F0A87A", "schedulefree": "#F0A87A", "optax": "#009E73", "NumPy": "#8C8C8C"}
INK = "#777777"
"""Of text and lines: it has about the same contrast to a white page and to a dark one, which show through."""

STYLE: Any = {
    "font.size": 8.5,
    "savefig.transparent": True,
    "text.color": INK,
    "axes.labelcolor": INK,
    "ytick.color": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": INK,
    "xtick.color": INK,
}


@dataclass(frozen=True)
class Bar:
    """A line of a table of a contest."""

    rule: str
    problem: str
    name: str
    ms: float
    ratio: float


def draw_all(sheets: Sequence[Sheet], folder: Path) -> None:
    """Draw what the tables of the page have."""
    contests = [sheet for sheet in sheets if sheet.columns == CONTEST]
    more = [sheet for sheet in contests if sheet.title.startswith(MORE)]
    draw([bar for sheet in contests if sheet not in more for bar in _bars_of(sheet)], folder / "benchmarks.png")
    draw([bar for sheet in more for bar in _bars_of(sheet)], folder / "benchmarks-more.png")
    draw_short(in_short(sheets), folder / "benchmarks-short.png")


def _bars_of(sheet: Sheet) -> list[Bar]:
    """The bars of a contest."""
    made = []
    for rule, contestant, ms, ratio, *_ in sheet.lines:
        name = contestant.partition(", ")[0]
        made.append(Bar(rule, sheet.title, name, float(ms.replace(",", "")), float(ratio)))
    return made


def draw(bars: Sequence[Bar], path: Path) -> None:
    """Draw a contest to `path`, whose suffix says in which format; nothing if there was none."""
    rules, problems = (list(dict.fromkeys(getattr(bar, key) for bar in bars)) for key in ("rule", "problem"))
    if not rules:
        return
    names = {rule: list(dict.fromkeys(bar.name for bar in bars if bar.rule == rule)) for rule in rules}
    heights = [len(names[rule]) + 1.2 for rule in rules]
    longest = 1.6 * max(bar.ratio for bar in bars)
    shortest = min([0.7, *(0.9 * bar.ratio for bar in bars)])
    wide = max(2.9 * len(problems), 5.0)
    pad = 56 if max(map(len, rules)) < 9 else 160
    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(1.8 + wide, 0.9 + 0.19 * sum(heights)), dpi=150, layout="constrained")
        grid = made.subplots(
            len(rules), len(problems), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for rule, line in zip(rules, grid, strict=True):
            for problem, axes in zip(problems, line, strict=True):
                _bars(axes, bars, rule, problem, names[rule])
                axes.set_xlim(shortest, longest)
            line[0].set_yticks(range(len(names[rule])), names[rule])
            line[0].set_ylabel(rule, rotation=0, ha="left", va="center", weight="bold", fontsize=11, labelpad=pad)
        for problem, axes in zip(problems, grid[0], strict=True):
            axes.set_title(problem, pad=10)
        made.supxlabel(f"time of a step ÷ that of {REFERENCE}, log scale: shorter is faster", fontsize=9)
        made.savefig(path)


def draw_short(sheet: Sheet, path: Path) -> None:
    """Draw the results in short: for each, the time of the fastest other optimizer as a multiple of ours."""
    if not sheet.lines:
        return
    ratios = [float(line[-1]) for line in sheet.lines]
    with matplotlib.rc_context(STYLE | {"font.size": 10}):
        made = Figure(figsize=(5.8, 0.9 + 0.36 * len(ratios)), dpi=150, layout="constrained")
        axes = made.subplots()
        _scale(axes, len(ratios))
        for i, ((_, _, other, *_), ratio) in enumerate(zip(sheet.lines, ratios, strict=True)):
            name = other.partition(", ")[0]
            axes.barh(i, ratio - 1.0, left=1.0, height=0.6, color=COLOURS.get(name.split()[0], "#8C8C8C"))
            text, end = f"{ratio:.2f}× {name}", (max(ratio, 1.0), i)
            axes.annotate(text, end, (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(ratios)), [f"{rule}, {shapes}" for rule, shapes, *_ in sheet.lines])
        axes.set_xlim(min(0.5, *(0.85 * x for x in ratios)), 14.0 * max(ratios))
        made.supxlabel("its time ÷ ours: right of the line, ours is faster", fontsize=10)
        made.savefig(path)


def _bars(axes: Axes, bars: Sequence[Bar], rule: str, problem: str, names: list[str]) -> None:
    """One panel, from top to bottom in the order of the names."""
    _scale(axes, len(names))
    for i, name in enumerate(names):
        bar = next((x for x in bars if (x.rule, x.problem, x.name) == (rule, problem, name)), None)
        if bar is None:
            axes.annotate("not measured", (1.0, i), (4, 0), textcoords="offset points", va="center", alpha=0.8)
            continue
        colour = COLOURS.get(name.split()[0], "#8C8C8C")
        axes.barh(i, bar.ratio - 1.0, left=1.0, height=0.72, color=colour, alpha=1.0 if "foreach" not in name else 0.7)
        if bar.ratio == 1.0:
            axes.plot([1.0], [i], "o", color=colour, markersize=4)
        text = f"{bar.ratio:.{2 if bar.ratio < 1.995 else 1 if bar.ratio < 9.95 else 0}f}×"
        if name == REFERENCE:
            text = f"{bar.ms:.{0 if bar.ms >= 9.95 else 1}f} ms"
        axes.annotate(text, (max(bar.ratio, 1.0), i), (4, 0), textcoords="offset points", va="center")


def _scale(axes: Axes, count: int) -> None:
    """A logarithmic scale of ratios, with room for so many bars."""
    axes.set_xscale("log")
    axes.set_yticks([])
    axes.set_ylim(count - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", color=INK, alpha=0.25, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.axvline(1.0, color=INK, linewidth=0.8, zorder=0)
