"""The demo as one sees it: a progress bar, a table and a figure.

Imports rich and matplotlib; nothing else of `arrayopt` imports this module before the demo is asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from arrayopt.demo.digits import Digits, Run, compare
from arrayopt.libraries import Library

__all__ = ["figure", "progress", "show", "table"]

# Okabe and Ito's colours, which remain apart for colour-blind eyes.
RULE_COLOURS = {"LAMB": "#0072B2", "LANS": "#E69F00", "CAME": "#009E73", "AdamW": "#D55E00", "SGD": "#7F7F7F"}
RULE_COLOURS["Muon"] = "#CC79A7"
ROUNDING = 1e-7  # a float32 cross-entropy below this is rounding; LANS, whose step never fades, gets there
LAYER_COLOURS = ("#440154", "#31688E", "#35B779", "#B8A800")
STYLE: Any = {
    "font.size": 9.0,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.5,
}


def show(
    rules: Sequence[str],
    data: Digits,
    backend: Library,
    steps: int,
    batch: int,
    seed: int,
    output: Path,
    *,
    dtype: str = "float32",
) -> list[Run]:
    """Run the comparison (see `arrayopt.demo.digits.compare`) before the user's eyes, and draw it to `output`."""
    console = Console(highlight=False)
    plain = console.options.ascii_only
    console.print(
        f"{len(data.train_x)} training and {len(data.test_x)} test images; "
        f"{steps} steps of {batch} images, {backend.name}, {dtype}, seed {seed}"
    )
    run: Any = {"data": data, "backend": backend, "steps": steps, "batch": batch, "seed": seed, "dtype": dtype}
    with progress(console, rules, steps) as on_step:
        runs = compare(rules, **run, on_step=on_step)
    console.print(table(runs, plain=plain))
    console.print(
        f"This is no ranking: one test image is {1 / len(data.test_x):.2%}, and another seed gives another order."
        " Learning rate and weight decay were chosen by validation accuracy. A large weight decay keeps the training"
        " loss up.",
        soft_wrap=True,
    )
    figure(runs, output)
    console.print(f"figure: {output}", soft_wrap=True, markup=False)
    return runs


@contextmanager
def progress(console: Console, rules: Sequence[str], steps: int) -> Iterator[Callable[[str, int], object]]:
    """Show how far each rule has come, as a function to call with the rule and its finished steps.

    On a terminal there is a bar for each rule; in a file or a pipe, a line for each rule that is done.
    """
    if not console.is_terminal:
        yield lambda rule, step: console.print(f"{rule}: {steps} steps done") if step == steps else None
        return
    columns = (TextColumn("{task.description:>6}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks = {rule: bars.add_task(rule, total=steps, start=False) for rule in rules}

        def advance(rule: str, step: int) -> None:
            if step == 1:
                bars.start_task(tasks[rule])
            bars.update(tasks[rule], completed=step)

        yield advance


def table(runs: Sequence[Run], *, plain: bool = False) -> Table:
    """One line for each rule, in the order given; with `plain`, ASCII only."""
    made = Table(header_style="bold")
    made.add_column("rule")
    update = "us/update" if plain else "µs/update"
    for heading in ("peak lr", "decay", "test accuracy", "train loss", "seconds", update):
        made.add_column(heading, justify="right")
    best = max(run.accuracies[-1] for run in runs)
    for run in runs:
        accuracy = f"{run.accuracies[-1]:.2%}"
        made.add_row(
            run.rule,
            f"{run.lr:g}",
            f"{run.weight_decay:g}",
            f"[bold]{accuracy}[/bold]" if run.accuracies[-1] == best else accuracy,
            f"{run.final_loss:.1e}" if run.final_loss >= ROUNDING else f"< {ROUNDING:.0e}",
            f"{run.seconds:.2f}",
            f"{1e6 * run.step_seconds:,.0f}",
        )
    return made


def figure(runs: Sequence[Run], path: Path) -> None:
    """Draw loss, accuracy and trust ratios, and write them to `path`, whose suffix says in which format."""
    adaptive = [run for run in runs if run.trust_ratios]
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        made = Figure(figsize=(10.0, 7.2 if adaptive else 3.8), dpi=150, layout=layout)
        rows = made.subfigures(2 if adaptive else 1, 1, squeeze=False)[:, 0]
        left, right = rows[0].subplots(1, 2)
        _losses(left, runs)
        _accuracies(right, runs)
        if adaptive:
            axes = rows[1].subplots(1, len(adaptive), sharey=True, squeeze=False)[0]
            for axis, run in zip(axes, adaptive, strict=True):
                _trust_ratios(axis, run)
            axes[0].set_ylabel("‖p‖ / ‖u‖")
        made.savefig(path)


def _losses(axis: Axes, runs: Sequence[Run]) -> None:
    axis.set_title("Training loss")
    axis.set_yscale("log")
    axis.set_ylabel("cross-entropy of the batch")
    axis.set_xlabel("step")
    curves = {}
    for run in runs:
        smooth = np.maximum(_running_mean(run.losses), ROUNDING)
        axis.plot(np.arange(1, len(smooth) + 1), smooth, color=RULE_COLOURS[run.rule])
        curves[run.rule] = (smooth[-1], RULE_COLOURS[run.rule])
    _label_ends(axis, curves)


def _accuracies(axis: Axes, runs: Sequence[Run]) -> None:
    axis.set_title("Test accuracy")
    axis.set_xlabel("step")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    curves = {}
    for run in runs:
        axis.plot(run.evaluated, run.accuracies, color=RULE_COLOURS[run.rule])
        curves[f"{run.rule}  {run.accuracies[-1]:.1%}"] = (run.accuracies[-1], RULE_COLOURS[run.rule])
    axis.set_ylim(max(0.0, min(0.9, *(run.accuracies[-1] - 0.02 for run in runs))), 1.0)
    _label_ends(axis, curves)


def _trust_ratios(axis: Axes, run: Run) -> None:
    axis.set_title(f"{run.rule}: trust ratio by weight, decay λ = {run.weight_decay:g}")
    axis.set_yscale("log")
    axis.set_xlabel("step")
    curves = {}
    for (tensor, ratios), colour in zip(run.trust_ratios.items(), LAYER_COLOURS, strict=True):
        axis.plot(run.evaluated, ratios, color=colour)
        curves[tensor.removesuffix(".weight")] = (ratios[-1], colour)
    if run.weight_decay:  # where the gradient is spent, u is λp alone and the ratio 1/λ
        axis.axhline(1.0 / run.weight_decay, color="#666666", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        axis.annotate(
            "1/λ",
            (0.02, 1.0 / run.weight_decay),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            color="#666666",
            fontsize=8,
        )
    _label_ends(axis, curves)


def _label_ends(axis: Axes, curves: dict[str, tuple[float, str]]) -> None:
    """Write each curve's name at its right end, moved up or down where two would touch."""
    axis.margins(x=0.0)
    names = sorted(curves, key=lambda name: curves[name][0])
    axis.autoscale_view()
    ends = axis.transData.transform([(0.0, curves[name][0]) for name in names])
    wanted = np.clip(axis.transAxes.inverted().transform(ends)[:, 1], 0.0, 1.0)
    for name, end, height in zip(names, wanted, _spread(wanted, gap=0.075), strict=True):
        look: Any = {"color": curves[name][1], "transform": axis.transAxes}
        axis.plot([1.0, 1.03], [end, height], linewidth=0.8, clip_on=False, scalex=False, scaley=False, **look)
        axis.text(1.04, height, name, va="center", weight="bold", **look)


def _spread(wanted: Any, gap: float) -> list[float]:
    """Move sorted heights apart until no two are closer than `gap`; those that touch are spaced about their mean."""
    clusters: list[list[float]] = []
    for height in wanted:
        clusters.append([height])
        while len(clusters) > 1 and _bottom(clusters[-1], gap) < _bottom(clusters[-2], gap) + len(clusters[-2]) * gap:
            last = clusters.pop()
            clusters[-1] += last
    return [_bottom(cluster, gap) + i * gap for cluster in clusters for i in range(len(cluster))]


def _bottom(cluster: list[float], gap: float) -> float:
    """Height of the lowest of a cluster's labels, kept within the axes where the cluster fits."""
    span = (len(cluster) - 1) * gap
    return max(0.0, min(1.0 - span, sum(cluster) / len(cluster) - span / 2))


def _running_mean(values: Sequence[float], width: int = 5) -> np.ndarray:
    """Mean of each value and up to `width - 1` before it: batches differ, and their noise would hide the curves."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))
