"""Find a complex field from the intensity of its Fourier transform, where it is known to be in a triangle.

A detector far behind an object counts photons: the squared modulus of the Fourier transform of the field u behind it.
The phases are lost. What is known instead is the support, where u is not zero. So u is sought as the minimum of

    L(u) = ½ Σ (|F u| - √counts)²,    u = 0 outside the support

which has many local minima. So there are eight random starts, side by side, and that with the least L is taken. This is
done in three ways. The gradient is written by hand in array API: the same lines run on NumPy, PyTorch and, with
``--backend cupy``, on a GPU.

    python docs/examples/phase.py --output phase.png
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
Function = Callable[[Array], tuple[Array, Array]]

STARTS = 8
STEPS = 600
LR = 0.05  # of Adam: the best of 0.02, 0.05 and 0.1
PHOTONS = 2000  # in each element of the detector, in the mean


class Found(NamedTuple):
    """What one of the ways has found: the field, L of each start, and how long it took."""

    field: np.ndarray
    misfit: np.ndarray
    seconds: float


def misfit_of(xp: Any, modulus: Array) -> Function:
    """Return the function to minimize: L of each start, and gradients."""

    def misfit(u: Array) -> tuple[Array, Array]:
        there = xp.fft.fftn(u, axes=(1, 2), norm="ortho")
        found = xp.sqrt(xp.real(there) ** 2 + xp.imag(there) ** 2 + 1e-12)
        wrong = found - modulus
        grad = xp.fft.ifftn(there * (wrong / found), axes=(1, 2), norm="ortho")
        return 0.5 * xp.sum(wrong**2, axis=(1, 2)), grad

    return misfit


def adam_by_hand(xp: Any, misfit: Function, u: Array, inside: Array) -> Array:
    """Return what an Adam in plain array code finds, as one often writes it."""
    m, v = xp.zeros_like(u), xp.zeros_like(xp.real(u))
    for step in range(1, STEPS + 1):
        _, g = misfit(u)
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * xp.abs(g) ** 2
        lr = LR * 0.5 * (1 + np.cos(np.pi * (step - 1) / STEPS))
        u = inside * (u - lr * (m / (1 - 0.9**step)) / (xp.sqrt(v / (1 - 0.999**step)) + 1e-8))
    return u


def adam(xp: Any, misfit: Function, u: Array, inside: Array) -> Array:
    """Return what the rule finds."""
    rule = ao.Adam(lr=ao.schedules.Cosine(LR, STEPS), project=ao.projections.support(inside))
    opt = ao.Optimizer(xp.asarray(u, copy=True), rule)
    for _ in range(STEPS):
        opt.step(misfit(opt.params)[1])
    return opt.params


def minimize(xp: Any, misfit: Function, u: Array, inside: Array) -> Array:
    """Return what `ao.minimize` finds."""
    support = ao.projections.support(inside)
    return ao.minimize(misfit, u, project=support, stacked=True, max_steps=STEPS, tol=1e-4).params


WAYS = {"Adam by hand": adam_by_hand, "ao.Adam": adam, "ao.minimize": minimize}


def scene(side: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return a field in the middle of a grid twice as large, and where it is not zero."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[-1 : 1 : side * 1j, -1 : 1 : side * 1j]
    inside = (np.abs(y) < 0.8) & (np.abs(x) < 0.53 * (y + 0.9))
    size = 0.6 + 0.4 * np.cos(7 * x + 3 * y**2)
    for centre in rng.uniform(-0.6, 0.6, (12, 2)):
        size -= 0.3 * np.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / 0.01)
    angle = 2 * np.exp(-((x - 0.1) ** 2 + (y - 0.2) ** 2) / 0.15) - 1.5 * np.exp(
        -((x + 0.3) ** 2 + (y - 0.4) ** 2) / 0.05
    )
    field = inside * np.clip(size, 0.05, None) * np.exp(1j * angle)
    return np.pad(field, side // 2), np.pad(inside, side // 2)


def record(field: np.ndarray, seed: int = 1) -> np.ndarray:
    """Return the roots of photon counts, in units of the field."""
    intensity = np.abs(np.fft.fft2(field, norm="ortho")) ** 2
    dose = PHOTONS / intensity.mean()
    return np.sqrt(np.random.default_rng(seed).poisson(intensity * dose) / dose)


def aligned(field: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return a field with the phase of the whole, which no intensity can tell, as in the truth."""
    product = np.vdot(field, truth)
    return field * product / abs(product)


def error(field: np.ndarray, truth: np.ndarray) -> float:
    """Return how far a field is from the truth, relative to that."""
    return float(np.linalg.norm(aligned(field, truth) - truth) / np.linalg.norm(truth))


def run(backend: str = "numpy", side: int = 64, starts: int = STARTS) -> tuple[np.ndarray, dict[str, Found]]:
    """Recover a field in all ways; return the truth, and what each way has found."""
    xp = importlib.import_module(f"array_api_compat.{backend}")
    truth, inside = scene(side)
    misfit = misfit_of(xp, xp.asarray(record(truth)))
    rng = np.random.default_rng(2)
    parts = rng.standard_normal((2, starts, *truth.shape))
    start = xp.asarray(0.3 * inside * (parts[0] + 1j * parts[1]))
    found = {}
    for name, way in WAYS.items():
        began = time.perf_counter()
        u = way(xp, misfit, start, xp.asarray(inside))
        fields, values = (x.get() if backend == "cupy" else np.asarray(x) for x in (u, misfit(u)[0]))
        found[name] = Found(fields[values.argmin()], values, time.perf_counter() - began)
    return truth, found


def draw(truth: np.ndarray, found: dict[str, Found], path: Path) -> None:
    """Write a picture: moduli above, phases below, and what each start has come to."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.6, 4.6), dpi=100, layout="constrained")
    grid = figure.add_gridspec(2, 6)
    side = len(truth) // 2
    middle = (slice(side // 2, side // 2 + side),) * 2
    fields = {"truth": truth} | {name: aligned(x.field, truth) for name, x in found.items()}
    for i, (name, field) in enumerate(fields.items()):
        above, below = (figure.add_subplot(grid[row, i]) for row in range(2))
        wrong = f"\nerror {error(field, truth):.2f}" if i else "\n"
        above.set_title(name + wrong, fontsize=10)
        above.imshow(np.abs(field[middle]), cmap="gray", vmin=0, vmax=1)
        angle = np.where(truth[middle] != 0, np.angle(field[middle]), np.nan)
        below.imshow(angle, cmap="twilight", vmin=-np.pi, vmax=np.pi)
        for axis in (above, below):
            axis.set_axis_off()
    axis = figure.add_subplot(grid[:, 4:])
    for name, x in found.items():
        style = "o:" if name == "ao.Adam" else "o-"  # it lies on that by hand
        axis.plot(np.sort(x.misfit), style, markersize=4, label=name)
    axis.set_yscale("log")
    axis.set_xlabel("start, the best first")
    axis.set_ylabel("L at the end")
    axis.legend(fontsize=9)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Find a field from the intensity of its Fourier transform.")
    parser.add_argument("--backend", choices=("numpy", "cupy", "torch"), default="numpy")
    parser.add_argument("--output", type=Path, default=Path("phase.png"), help="picture (default: %(default)s)")
    given = parser.parse_args(arguments)
    truth, found = run(given.backend)
    for name, x in found.items():
        print(f"{name:12} {x.seconds:5.1f} s, least L {x.misfit.min():.3f}, error {error(x.field, truth):.3f}")
    draw(truth, found, given.output)
    print(f"picture: {given.output}")


if __name__ == "__main__":
    main()
