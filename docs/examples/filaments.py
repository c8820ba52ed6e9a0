"""Sharpen a microscope's picture of thin filaments, whose brightness is not negative, in four ways.

A camera counts photons: in each pixel their number is Poisson's, with the mean b + (k * f), where f is the brightness
that is sought, k the known blur and b the known background. So f is sought as the minimum of the deviance

    L(f) = Σ (m - counts · log m),    m = b + k * f,    f ≥ 0

by an Adam in plain array code, by the rule `ao.Adam`, by `ao.minimize`, and by the algorithm of Richardson and Lucy,
which is made for this. The gradient is written by hand in array API: the same lines run on NumPy, PyTorch and, with
``--backend cupy``, on a GPU.

    python docs/examples/filaments.py --output filaments.png
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

BLUR = 2.5  # standard deviation of k, in pixels
GROUND = 0.1  # b
PHOTONS = 100  # for a brightness of 1
STEPS = 300
LR = 0.1  # of Adam: of 0.01, 0.03, 0.1 and 0.3 that with the least error


class Exposure(NamedTuple):
    """What is known: counts in units of brightness, and the blur's transfer function."""

    counts: Array
    transfer: Array


class Found:
    """What one of the ways has found: the last brightness, and L over the seconds on the way."""

    def __init__(self, deviance: Callable[[Array], float]) -> None:
        self._deviance, self._began = deviance, time.perf_counter()
        self.picture: Array = None
        self.seconds: list[float] = []
        self.deviance: list[float] = []

    def __call__(self, f: Array) -> None:
        """Take what was found after a step; the time that this takes is not counted."""
        before = self.seconds[-1] if self.seconds else 0.0
        self.seconds.append(before + time.perf_counter() - self._began)
        self.deviance.append(self._deviance(f))
        self.picture = f
        self._began = time.perf_counter()


def blur(xp: Any, f: Array, transfer: Array) -> Array:
    """Return the circular convolution of f with the kernel whose transform is `transfer`."""
    return xp.fft.irfftn(transfer * xp.fft.rfftn(f, axes=(0, 1)), s=f.shape, axes=(0, 1))


def deviance_of(xp: Any, exposure: Exposure) -> Callable[[Array], tuple[Array, Array]]:
    """Return the function to minimize, which returns L and its gradient."""
    counts, transfer = exposure

    def deviance(f: Array) -> tuple[Array, Array]:
        expected = GROUND + xp.maximum(blur(xp, f, transfer), xp.zeros_like(f))
        value = xp.sum(expected - counts * xp.log(expected))
        return value, blur(xp, 1 - counts / expected, transfer)

    return deviance


def adam_by_hand(xp: Any, exposure: Exposure, f: Array, seen: Found) -> None:
    """An Adam in plain array code, as one often writes it."""
    deviance, m, v = deviance_of(xp, exposure), xp.zeros_like(f), xp.zeros_like(f)
    for step in range(1, STEPS + 1):
        _, g = deviance(f)
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        lr = LR * 0.5 * (1 + np.cos(np.pi * (step - 1) / STEPS))
        f = f - lr * (m / (1 - 0.9**step)) / (xp.sqrt(v / (1 - 0.999**step)) + 1e-8)
        f = xp.maximum(f, xp.zeros_like(f))
        seen(f)


def adam(xp: Any, exposure: Exposure, f: Array, seen: Found) -> None:
    """The rule."""
    deviance = deviance_of(xp, exposure)
    rule = ao.Adam(lr=ao.schedules.Cosine(LR, STEPS), project=ao.projections.nonnegative)
    opt = ao.Optimizer(xp.asarray(f, copy=True), rule)
    for _ in range(STEPS):
        opt.step(deviance(opt.params)[1])
        seen(opt.params)


def minimize(xp: Any, exposure: Exposure, f: Array, seen: Found) -> None:
    """`ao.minimize`, which takes SPG where there is a projection."""
    ao.minimize(
        deviance_of(xp, exposure),
        f,
        project=ao.projections.nonnegative,
        tol=0,
        max_steps=STEPS,
        callback=lambda result: seen(result.params),
    )


def richardson_lucy(xp: Any, exposure: Exposure, f: Array, seen: Found) -> None:
    """Richardson's and Lucy's steps; they need neither a rate nor a projection."""
    counts, transfer = exposure
    f = f + 0.01
    for _ in range(STEPS):
        f = f * blur(xp, counts / (GROUND + xp.maximum(blur(xp, f, transfer), xp.zeros_like(f))), transfer)
        seen(f)


WAYS = {"Adam by hand": adam_by_hand, "ao.Adam": adam, "ao.minimize": minimize, "Richardson-Lucy": richardson_lucy}


def filaments(side: int, seed: int = 0) -> np.ndarray:
    """Return a picture of lines that wander about."""
    rng, picture = np.random.default_rng(seed), np.zeros((side, side))
    for _ in range(14):
        place, angle, bend = rng.uniform(0.1 * side, 0.9 * side, 2), rng.uniform(0, 2 * np.pi), 0.0
        for _ in range(900):
            bend = 0.97 * bend + 0.01 * rng.standard_normal()
            angle += 0.1 * bend
            place = place + 0.35 * np.array([np.cos(angle), np.sin(angle)])
            if place.min() < 4 or place.max() > side - 5:
                break
            (row, column), (down, right) = place.astype(int), place % 1
            picture[row : row + 2, column : column + 2] += np.outer([1 - down, down], [1 - right, right])
    return picture


def expose(field: np.ndarray, seed: int = 0) -> Exposure:
    """Return what the camera counts."""
    omega2 = np.fft.fftfreq(len(field))[:, None] ** 2 + np.fft.rfftfreq(len(field))[None, :] ** 2
    transfer = np.exp(-2.0 * (np.pi * BLUR) ** 2 * omega2)
    expected = GROUND + np.maximum(blur(np, field, transfer), 0)
    return Exposure(np.random.default_rng(seed).poisson(PHOTONS * expected) / PHOTONS, transfer)


def error(picture: np.ndarray, truth: np.ndarray) -> float:
    """Return how far a picture is from the truth, relative to that."""
    return float(np.linalg.norm(picture - truth) / np.linalg.norm(truth))


def run(backend: str = "numpy", side: int = 256) -> tuple[np.ndarray, np.ndarray, dict[str, Found]]:
    """Return the truth, the counts, and what each way has found."""
    xp = importlib.import_module(f"array_api_compat.{backend}")
    truth = filaments(side)
    exposure = expose(truth)
    there = Exposure(*map(xp.asarray, exposure))
    deviance, least = deviance_of(xp, there), float(deviance_of(np, exposure)(truth)[0])
    start = xp.asarray(np.maximum(exposure.counts - GROUND, 0))
    found = {}
    for name, way in WAYS.items():
        found[name] = Found(lambda f: float(deviance(f)[0]) - least)
        way(xp, there, start, found[name])
        picture = found[name].picture
        found[name].picture = picture.get() if backend == "cupy" else np.asarray(picture)
    return truth, exposure.counts - GROUND, found


def draw(truth: np.ndarray, recorded: np.ndarray, found: dict[str, Found], path: Path) -> None:
    """Write a picture: parts of what was found, and the deviance over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.6, 4.6), dpi=100, layout="constrained")
    grid = figure.add_gridspec(2, 5)
    part = (slice(len(truth) // 4, len(truth) * 3 // 4),) * 2
    pictures = {"truth": truth, "recorded": recorded} | {name: x.picture for name, x in found.items()}
    for i, (name, picture) in enumerate(pictures.items()):
        axis = figure.add_subplot(grid[i // 3, i % 3])
        axis.set_title(name if i == 0 else f"{name}, error {error(picture, truth):.2f}", fontsize=10)
        axis.imshow(np.sqrt(np.maximum(picture[part], 0)), cmap="inferno", vmin=0, vmax=1.5)
        axis.set_axis_off()
    axis = figure.add_subplot(grid[:, 3:])
    for name, x in found.items():
        axis.plot(x.seconds, x.deviance, label=f"{name}, {x.seconds[-1]:.1f} s")
    axis.axhline(0, color="#607D8B", linewidth=1, linestyle=":")
    axis.set_yscale("symlog", linthresh=10)
    axis.set_xlabel("seconds")
    axis.set_ylabel("L above that of the truth")
    axis.legend(fontsize=9)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Sharpen a picture of filaments in four ways.")
    parser.add_argument("--backend", choices=("numpy", "cupy", "torch"), default="numpy")
    parser.add_argument("--output", type=Path, default=Path("filaments.png"), help="picture (default: %(default)s)")
    given = parser.parse_args(arguments)
    truth, recorded, found = run(given.backend)
    for name, x in found.items():
        print(f"{name:16} {x.seconds[-1]:5.2f} s, L {x.deviance[-1]:7.3f}, error {error(x.picture, truth):.3f}")
    draw(truth, recorded, found, given.output)
    print(f"picture: {given.output}")


if __name__ == "__main__":
    main()
