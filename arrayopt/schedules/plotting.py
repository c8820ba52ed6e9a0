"""`plot`: draws schedules with Matplotlib."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from arrayopt.hyper import whole


def plot(
    schedules: Callable[[int], float] | Mapping[str, Callable[[int], float]],
    steps: int,
    *,
    ax: Any = None,
    path: str | os.PathLike[str] | None = None,
) -> Any:
    """Draw the values of schedules at the steps ``0, ..., steps - 1``.

    Parameters
    ----------
    schedules : schedule or dict of str to schedule
        The schedule to draw, or a dict of several by label. Any function of the step works.
    steps : int
        The number of steps, at least 1.
    ax : matplotlib.axes.Axes, optional
        The axes to draw on; by default those of a new figure.
    path : path-like, optional
        Where to save the figure as a PNG.

    Returns
    -------
    matplotlib.axes.Axes
        The axes with the drawing.

    Raises
    ------
    ImportError
        If Matplotlib is missing.
    TypeError, ValueError
        If an argument is not as described above.

    Examples
    --------
    >>> from arrayopt.schedules import Cosine, Warmup, plot
    >>> ax = plot({"warm-up": Warmup(0.1, 20), "cosine": Cosine(0.1, 100)}, steps=100)
    >>> ax.get_xlabel()
    'step'
    """
    labelled = schedules if isinstance(schedules, Mapping) else {str(schedules): schedules}
    for label, schedule in labelled.items():
        if not callable(schedule):
            raise TypeError(f"plot: {label!r} must be a schedule or another function of the step; got {schedule!r}")
    steps = whole("plot: `steps`", steps, first=1)
    if ax is None:
        ax = _new_axes()
    for label, schedule in labelled.items():
        ax.plot(range(steps), [float(schedule(s)) for s in range(steps)], label=label)
    ax.set_xlabel("step")
    ax.set_ylabel("value")
    if labelled:
        ax.legend()
    if path is not None:
        ax.figure.savefig(path, format="png")
    return ax


def _new_axes() -> Any:
    """The axes of a new pyplot figure. Raise ImportError if Matplotlib is missing."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plot: needs Matplotlib; pip install 'arrayopt[demo]'") from error
    return pyplot.subplots(layout="constrained")[1]
