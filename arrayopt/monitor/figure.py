"""The figure of a monitor: heat maps of layers by steps. Imports Matplotlib."""

import math
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np

Series = Mapping[str, tuple[list[int], list[float]]]

LABELS = {
    "trust_ratio": "trust ratio",
    "param_norm": "parameter norm ‖p‖",
    "grad_norm": "gradient norm ‖g‖",
    "update_norm": "update norm ‖Δp‖",
    "update_ratio": "update to parameter ‖Δp‖ / ‖p‖",
    "lr": "learning rate",
}
MAP, ROW, FRAME, NAME = 4.2, 0.19, 0.9, 0.065
"""In inches: the width of a map, the height of a row, the space above and below a map, the width of a letter."""
NAMES = 60
"""The most rows of full height. If there are more, they are thinner, and only some have names."""
ABREAST = 3  # the most maps side by side
MISSING = "#d9d9d9"
BOUNDARY = 10.0
"""Colours are logarithmic if the ratio of the largest to the smallest value is above this."""


def heat_maps(quantities: Mapping[str, Series]) -> Any:
    """Return a figure with a heat map of each quantity. Rows are tensors, from the top; missing values are grey."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Monitor.plot: needs Matplotlib; pip install 'arrayopt[demo]'") from error

    class Shown(Figure):
        """A figure that notebooks show without pyplot."""

        def _repr_png_(self) -> bytes:
            written = BytesIO()
            self.savefig(written, format="png")
            return written.getvalue()

    names = list(dict.fromkeys(name for series in quantities.values() for name in series))
    across = min(ABREAST, len(quantities))
    down = math.ceil(len(quantities) / across)
    width = across * MAP + NAME * max(map(len, names))
    height = down * (min(max(4, len(names)), NAMES) * ROW + FRAME)
    figure = Shown(figsize=(width, height), dpi=130, layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharey=True).ravel()
    for axis, (quantity, series) in zip(axes, quantities.items(), strict=False):
        _draw(axis, quantity, series, names)
    for axis in axes[len(quantities) :]:
        axis.remove()
    every = math.ceil(len(names) / NAMES)
    axes[0].set_yticks(np.arange(0, len(names), every) + 0.5, names[::every])
    axes[0].set_ylim(len(names), 0)
    return figure


def _draw(axis: Any, quantity: str, series: Series, names: list[str]) -> None:
    """Draw the heat map of one quantity."""
    steps = sorted({step for xs, _ in series.values() for step in xs})
    values = np.full((len(names), len(steps)), np.nan)
    column = {step: i for i, step in enumerate(steps)}
    for name, (xs, ys) in series.items():
        values[names.index(name), [column[x] for x in xs]] = ys
    shown = np.ma.masked_invalid(values)
    mesh = axis.pcolormesh(_edges(steps), np.arange(len(names) + 1), shown, cmap="viridis", norm=_norm(shown))
    axis.set_facecolor(MISSING)
    axis.set_title(LABELS.get(quantity, quantity), loc="left", fontsize=10, weight="bold")
    axis.set_xlabel("step", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.tick_params(axis="y", length=0, labelsize=7)
    axis.figure.colorbar(mesh, ax=axis, pad=0.02, fraction=0.06, aspect=40).ax.tick_params(labelsize=7)


def _edges(steps: list[int]) -> Any:
    """The edges of the columns of steps, halfway between neighbouring steps."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middle = (np.array(steps[1:]) + np.array(steps[:-1])) / 2
    return np.concatenate([[steps[0] - (middle[0] - steps[0])], middle, [steps[-1] + (steps[-1] - middle[-1])]])


def _norm(values: Any) -> Any:
    """The normalization of colours: logarithmic if no value is negative and the positive ones are far apart."""
    from matplotlib.colors import LogNorm, Normalize

    present = values.compressed()
    positive = present[present > 0]
    if present.size and present.min() >= 0 and positive.size and positive.max() > BOUNDARY * positive.min():
        return LogNorm(positive.min(), positive.max())
    if not present.size:
        return Normalize(0.0, 1.0)
    low, high = float(present.min()), float(present.max())
    margin = 0.5 * abs(low) or 0.5
    return Normalize(low, high) if not math.isclose(low, high, rel_tol=1e-6) else Normalize(low - margin, high + margin)
