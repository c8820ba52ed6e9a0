"""The output of the demo: a progress bar, a table and a figure.

This module imports rich and matplotlib, so it is imported only when the demo runs.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from arrayopt.demo.digits import BATCHES, Digits, Run, compare, one_thread, steps_of, time_step
from arrayopt.libraries import Library

# The colours of Okabe and Ito, which colour-blind people can tell apart.
RULE_COLOURS = {"LAMB": "#0072B2", "LANS": "#E69F00", "CAME": "#009E73", "AdamW": "#D55E00", "SGD": "#7F7F7F"}
RULE_COLOURS["Muon"] = "#CC79A7"
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
    epochs: int,
    seeds: Sequence[int],
    output: Path,
    *,
    dtype: str = "float32",
) -> list[list[Run]]:
    """Train with each rule, batch size and seed, print and draw the results, and return the runs by rule."""
    console = Console(highlight=False)
    plain = console.options.ascii_only
    console.print(
        f"{len(data.train_x)} training and {len(data.test_x)} test images of digits; {epochs} epochs with batches of"
        f" {', '.join(map(str, BATCHES))}; {backend.name}, {dtype}, seeds {', '.join(map(str, seeds))}",
        soft_wrap=True,
    )
    planned = [(batch, seed) for batch in BATCHES for seed in seeds]
    total = sum(steps_of(data, batch, epochs) for batch, _ in planned)
    stopped = Event()

    def train(rule: str) -> list[Run]:
        counted, runs = itertools.count(1), []

        def count(rule: str, _: int) -> None:
            if stopped.is_set():
                raise CancelledError
            on_step(rule, next(counted))

        for batch, seed in planned:
            steps = steps_of(data, batch, epochs)
            given: dict[str, Any] = {"data": data, "backend": backend, "dtype": dtype, "on_step": count}
            runs += compare([rule], steps=steps, batch=batch, seed=seed, **given)
        return runs

    # NumPy computes in one thread while the other is in Python. Other libraries have their own threads, or a GPU.
    workers = 2 if backend.name == "numpy" else 1
    with one_thread(backend), progress(console, rules, total) as on_step, ThreadPoolExecutor(workers) as pool:
        try:
            found = list(pool.map(train, rules))
        finally:
            stopped.set()
        times = [time_step(rule, data, backend, dtype=dtype) for rule in rules]  # nothing else runs now
    console.print(table(found, times, plain=plain))
    engines = {run.engine for runs in found for run in runs}
    for engine in sorted(engines):
        console.print(engine, soft_wrap=True, markup=False)
    console.print(
        f"Accuracies are means over the seeds; one test image is {1 / len(data.test_x):.2%}. Each rule has its own"
        " learning rate for each batch, chosen on validation images. One small network: it shows what a large batch"
        " costs, and does not rank the rules elsewhere.",
        soft_wrap=True,
    )
    figure(found, output)
    console.print(f"figure: {output}", soft_wrap=True, markup=False)
    return found


@contextmanager
def progress(console: Console, rules: Sequence[str], steps: int) -> Iterator[Callable[[str, int], object]]:
    """Show the progress of each rule. Yield a function to call with a rule and the number of its finished steps.

    On a terminal there is a bar for each rule; in a file or a pipe, a line for each finished rule.
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


def table(found: Sequence[Sequence[Run]], times: Sequence[float], *, plain: bool = False) -> Table:
    """Return a table with a row for each rule and its seconds per step. With `plain`, it uses ASCII only."""
    made = Table(header_style="bold", title="test accuracy after the same number of epochs", title_justify="left")
    made.add_column("rule")
    for batch in BATCHES:
        made.add_column(f"batch {batch}", justify="right")
    for heading in ("state, B/param", "us/step" if plain else "µs/step"):
        made.add_column(heading, justify="right")
    best = {batch: max(accuracy(runs, batch) for runs in found) for batch in BATCHES}
    for runs, seconds in zip(found, times, strict=True):
        cells = []
        for batch in BATCHES:
            mean = accuracy(runs, batch)
            cells.append(f"[bold]{mean:.1%}[/bold]" if mean == best[batch] else f"{mean:.1%}")
        made.add_row(runs[0].rule, *cells, f"{runs[0].state_bytes:.1f}", f"{1e6 * seconds:,.0f}")
    return made


def accuracy(runs: Sequence[Run], batch: int) -> float:
    """The mean accuracy over the seeds, for a batch size."""
    return float(np.mean([run.accuracy for run in runs if run.batch == batch]))


def figure(found: Sequence[Sequence[Run]], path: Path) -> None:
    """Draw accuracy, loss and trust ratios, and save the figure to `path`, whose suffix determines the format."""
    largest = [[run for run in runs if run.batch == BATCHES[-1]] for runs in found]
    adaptive = [runs[0] for runs in largest if runs[0].trust_ratios]
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        panels = 2 + len(adaptive)
        made = Figure(figsize=(6.0, 2.5 * panels), dpi=150, layout=layout)  # one column, to be read on phones
        axes = made.subplots(panels)
        _accuracies(axes[0], found)
        _losses(axes[1], largest)
        for axis, run in zip(axes[2:], adaptive, strict=True):
            axis.sharey(axes[2])
            _trust_ratios(axis, run)
        made.savefig(path)


def _accuracies(axis: Axes, found: Sequence[Sequence[Run]]) -> None:
    axis.set_title("Test accuracy by batch, same epochs")
    axis.set_xlabel("batch")
    axis.set_xscale("log")
    axis.set_xticks(BATCHES, [f"{batch:,}" for batch in BATCHES])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    curves = {}
    for runs in found:
        means = [accuracy(runs, batch) for batch in BATCHES]
        colour = RULE_COLOURS[runs[0].rule]
        axis.plot(BATCHES, means, color=colour, marker="o", markersize=3.5)
        curves[f"{runs[0].rule}  {means[-1]:.1%}"] = (means[-1], colour)
    _label_ends(axis, curves)


def _losses(axis: Axes, largest: Sequence[Sequence[Run]]) -> None:
    axis.set_title(f"Training loss, batch {BATCHES[-1]:,}")
    axis.set_yscale("log")
    axis.set_ylabel("cross-entropy")
    axis.set_xlabel("step")
    curves = {}
    for runs in largest:
        means = np.mean([run.losses for run in runs], axis=0)
        axis.plot(np.arange(1, len(means) + 1), means, color=RULE_COLOURS[runs[0].rule])
        curves[runs[0].rule] = (float(means[-1]), RULE_COLOURS[runs[0].rule])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label_ends(axis, curves)


def _trust_ratios(axis: Axes, run: Run) -> None:
    axis.set_title(f"{run.rule}: trust ratio of each weight, batch {run.batch:,}")
    axis.set_ylim(bottom=0.0)
    axis.set_ylabel("‖p‖ / ‖u‖")
    axis.set_xlabel("step")
    curves = {}
    for (tensor, (steps, ratios)), colour in zip(run.trust_ratios.items(), LAYER_COLOURS, strict=True):
        axis.plot(np.asarray(steps) + 1, ratios, color=colour)
        curves[tensor.removesuffix(".weight")] = (ratios[-1], colour)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label_ends(axis, curves)


def _label_ends(axis: Axes, curves: dict[str, tuple[float, str]]) -> None:
    """Write the name of each curve at its right end, moved up or down if two names would overlap."""
    axis.margins(x=0.0)
    names = sorted(curves, key=lambda name: curves[name][0])
    axis.autoscale_view()
    ends = axis.transData.transform([(0.0, curves[name][0]) for name in names])
    wanted = np.clip(axis.transAxes.inverted().transform(ends)[:, 1], 0.0, 1.0)
    for name, end, height in zip(names, wanted, _spread(wanted, gap=0.11), strict=True):
        look: Any = {"color": curves[name][1], "transform": axis.transAxes}
        axis.plot([1.0, 1.03], [end, height], linewidth=0.8, clip_on=False, scalex=False, scaley=False, **look)
        axis.text(1.04, height, name, va="center", weight="bold", **look)


def _spread(wanted: Any, gap: float) -> list[float]:
    """Move sorted heights apart until no two are closer than `gap`. Overlapping ones are spaced around their mean."""
    clusters: list[list[float]] = []
    for height in wanted:
        clusters.append([height])
        while len(clusters) > 1 and _bottom(clusters[-1], gap) < _bottom(clusters[-2], gap) + len(clusters[-2]) * gap:
            last = clusters.pop()
            clusters[-1] += last
    return [_bottom(cluster, gap) + i * gap for cluster in clusters for i in range(len(cluster))]


def _bottom(cluster: list[float], gap: float) -> float:
    """The height of a cluster's lowest label. The cluster stays within the axes if it fits."""
    span = (len(cluster) - 1) * gap
    return max(0.0, min(1.0 - span, sum(cluster) / len(cluster) - span / 2))
