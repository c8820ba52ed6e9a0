"""Fit a peak with background to each of a thousand noisy spectra, side by side, in three ways.

Each spectrum has 60 counts. The model is a Gaussian on a constant; the unknowns are its height, centre, width and the
background. The gradient is written by hand in array API: the same lines run on NumPy, PyTorch and, with ``--backend
cupy``, on a GPU.

    python docs/examples/peaks.py --output peaks.png
"""

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import arrayopt as ao

Array = Any

CHANNELS = 60
STEPS = 200  # of Adam: the fewest, with the best of three learning rates, that fit all spectra
LR = 0.1


class Fit(NamedTuple):
    """What one of the ways has found: the unknowns and the misfit of each spectrum, and how long it took."""

    params: np.ndarray
    misfit: np.ndarray
    seconds: float


def model(xp: Any, params: Array) -> tuple[Array, list[Array]]:
    """Return the counts that are expected, and their derivatives.

    The unknowns are height / 100, centre, the logarithm of the width, and background / 10: a step of 0.1 means about
    as much in each, and none can make the width negative.
    """
    t = xp.asarray(np.linspace(-1.0, 1.0, CHANNELS), device=params.device)
    height, centre, width, ground = (params[:, i : i + 1] for i in range(4))
    u = (t - centre) * xp.exp(-width)
    shape = 100 * xp.exp(-(u**2) / 2)
    slopes = [shape, height * shape * u * xp.exp(-width), height * shape * u**2, 10 * xp.ones_like(shape)]
    return 10 * ground + height * shape, slopes


def misfit_of(xp: Any, counts: Array) -> Callable[[Array], tuple[Array, Array]]:
    """Return the function to minimize: each spectrum's mean of squares by their variance, and gradients."""
    weight = 1 / xp.where(counts > 1, counts, 1.0) / CHANNELS

    def misfit(params: Array) -> tuple[Array, Array]:
        expected, slopes = model(xp, params)
        wrong = expected - counts
        grads = xp.stack([xp.sum(wrong * weight * slope, axis=1) for slope in slopes], axis=1)
        return 0.5 * xp.sum(wrong**2 * weight, axis=1), grads

    return misfit


def spectra(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the unknowns of some spectra, and noisy counts."""
    rng = np.random.default_rng(seed)
    low, high = [0.3, -0.5, np.log(0.08), 0.5], [1.0, 0.5, np.log(0.3), 2.0]
    truth = rng.uniform(low, high, (count, 4))
    return truth, rng.poisson(model(np, truth)[0]).astype(float)


def guess(counts: np.ndarray) -> np.ndarray:
    """Return where to begin: at the largest count, above the median."""
    t = np.linspace(-1.0, 1.0, CHANNELS)
    ground = np.median(counts, axis=1)
    width = np.full(len(counts), np.log(0.15))
    return np.stack([(counts.max(axis=1) - ground) / 100, t[counts.argmax(axis=1)], width, ground / 10], axis=1)


def adam_by_hand(xp: Any, misfit: Callable[[Array], tuple[Array, Array]], x: Array) -> Array:
    """Return what an Adam in plain array code finds, as one often writes it."""
    m, v = xp.zeros_like(x), xp.zeros_like(x)
    for step in range(1, STEPS + 1):
        _, g = misfit(x)
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        lr = LR * (1 - step / STEPS)
        x = x - lr * (m / (1 - 0.9**step)) / (xp.sqrt(v / (1 - 0.999**step)) + 1e-8)
    return x


def adam(xp: Any, misfit: Callable[[Array], tuple[Array, Array]], x: Array) -> Array:
    """Return what the rule finds."""
    opt = ao.Optimizer(xp.asarray(x, copy=True), ao.Adam(lr=lambda step: LR * (1 - (step + 1) / STEPS)))
    for _ in range(STEPS):
        opt.step(misfit(opt.params)[1])
    return opt.params


def minimize(xp: Any, misfit: Callable[[Array], tuple[Array, Array]], x: Array) -> Array:
    """Return what `ao.minimize` finds."""
    return ao.minimize(misfit, x, stacked=True, max_steps=100).params


WAYS = {"Adam by hand": adam_by_hand, "ao.Adam": adam, "ao.minimize": minimize}


def run(backend: str = "numpy", count: int = 1000) -> tuple[np.ndarray, dict[str, Fit]]:
    """Fit in all ways; return the counts, and what each way has found."""
    xp = importlib.import_module(f"array_api_compat.{backend}")
    _, counts = spectra(count)
    misfit, start = misfit_of(xp, xp.asarray(counts)), xp.asarray(guess(counts))
    found = {}
    for name, way in WAYS.items():
        began = time.perf_counter()
        params = way(xp, misfit, start)
        value = misfit(params)[0]
        host = [x.get() if backend == "cupy" else np.asarray(x) for x in (params, value)]
        found[name] = Fit(*host, time.perf_counter() - began)
    return counts, found


def excess(found: dict[str, Fit]) -> dict[str, np.ndarray]:
    """Return for each way how far each misfit is above the least that one of them has found."""
    least = np.min([fit.misfit for fit in found.values()], axis=0)
    return {name: fit.misfit - least for name, fit in found.items()}


def draw(counts: np.ndarray, found: dict[str, Fit], path: Path) -> None:
    """Write a picture: some spectra with their fits, and how far each way is from the least misfit."""
    from matplotlib.figure import Figure

    t = np.linspace(-1.0, 1.0, CHANNELS)
    fits = model(np, found["ao.minimize"].params)[0]
    figure = Figure(figsize=(10.4, 4.2), dpi=100, layout="constrained")
    grid = figure.add_gridspec(2, 5)
    for i in range(6):
        axis = figure.add_subplot(grid[i // 3, i % 3])
        axis.plot(t, counts[i], ".", color="#607D8B", markersize=3)
        axis.plot(t, fits[i], color="#D84315", linewidth=1.5)
        axis.tick_params(labelsize=7)
    axis = figure.add_subplot(grid[:, 3:])
    for name, above in excess(found).items():
        style = ":" if name == "ao.Adam" else "-"  # it lies on that by hand
        axis.plot(np.sort(np.maximum(above, 1e-16)), np.linspace(0, 1, len(above)), style, label=name)
    axis.set_xscale("log")
    axis.set_xlabel("misfit above the least")
    axis.set_ylabel("share of the spectra")
    axis.legend(fontsize=9)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fit a thousand peaks side by side.")
    parser.add_argument("--backend", choices=("numpy", "cupy", "torch"), default="numpy")
    parser.add_argument("--count", type=int, default=1000, help="spectra (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("peaks.png"), help="picture (default: %(default)s)")
    given = parser.parse_args(arguments)
    counts, found = run(given.backend, given.count)
    for name, above in excess(found).items():
        good = (above < 1e-6).mean()
        print(f"{name:12} {found[name].seconds:6.2f} s, {good:6.1%} of the spectra within 1e-6 of the least misfit")
    draw(counts, found, given.output)
    print(f"picture: {given.output}")


if __name__ == "__main__":
    main()
