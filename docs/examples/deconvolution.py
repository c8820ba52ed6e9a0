"""Recover a photograph from a blurred, noisy and cropped exposure, by gradient descent with an arrayopt rule.

What the camera recorded is ``d = window(k * f) + noise``: the field f blurred by a known Gaussian k, seen through a
window, so that light from outside it has leaked in. The field is sought on a grid with a margin around the window, as
the minimum of

    L(f) = ½ Σ_window (k * f - d)²  +  weight · Σ √(|∇f|² + ε²)

the second term being total variation, smoothed so that it has a gradient everywhere. Both gradients are written by
hand, in array API and its FFT: the same lines run on NumPy, PyTorch and, with ``--backend cupy``, on a GPU.

    python docs/examples/deconvolution.py --output deconvolution.png

The classical answer is printed beside it: a Wiener filter, for a field whose spectrum falls as 1/ω². On this picture,
of smooth petals with edges, total variation is 1.2 dB better, 0.8 dB away from the border, of which the filter cannot
know. On one that is fine texture (``run(name="china.jpg")``) neither recovers much, and the two are within 0.4 dB.
"""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import arrayopt as ao

Array = Any

BLUR = 2.0  # standard deviation of k, in pixels
NOISE = 0.005  # standard deviation, where black is 0 and white is 1
MARGIN = 8  # pixels around the window: four times BLUR
WEIGHT = 1e-4  # of total variation
SMOOTHING = 0.03  # ε: what differs by much less between neighbours is a slope, by more an edge
# WEIGHT and SMOOTHING were chosen on scikit-learn's other photograph, china.jpg, not on the one that is recovered here.


class Exposure(NamedTuple):
    """What is known: the record on the large grid, where it was recorded (1 or 0), and the blur's transfer function."""

    recorded: Array
    window: Array
    transfer: Array


def loss_and_grad(xp: Any, f: Array, exposure: Exposure) -> tuple[Array, Array]:
    """Return L(f) and its gradient."""
    residual = exposure.window * (blur(xp, f, exposure.transfer) - exposure.recorded)
    right, down = xp.roll(f, -1, axis=1) - f, xp.roll(f, -1, axis=0) - f
    slope = xp.sqrt(right * right + down * down + SMOOTHING**2)
    loss = 0.5 * xp.sum(residual * residual) + WEIGHT * xp.sum(slope)
    # The blur's adjoint has the conjugate transfer function; a forward difference's is minus the backward difference.
    right, down = right / slope, down / slope
    divergence = right - xp.roll(right, 1, axis=1) + down - xp.roll(down, 1, axis=0)
    return loss, blur(xp, residual, xp.conj(exposure.transfer)) - WEIGHT * divergence


def blur(xp: Any, f: Array, transfer: Array) -> Array:
    """Return the circular convolution of f with the kernel whose transform is `transfer`."""
    return xp.fft.irfftn(transfer * xp.fft.rfftn(f, axes=(0, 1)), s=f.shape, axes=(0, 1))


def recover(xp: Any, exposure: Exposure, steps: int) -> Array:
    """Minimise L from the recorded picture on."""
    f = xp.asarray(exposure.recorded, copy=True)
    # Pixels are all of one kind and one scale: Adam's step is about `lr` in units of brightness, and ends at zero.
    opt = ao.Optimizer(f, ao.Adam(lr=ao.schedules.Cosine(0.03, steps)))
    for _ in range(steps):
        _, grad = loss_and_grad(xp, f, exposure)
        f = opt.step(grad)
    return f


def wiener(recorded: np.ndarray, level: float) -> np.ndarray:
    """Return the best linear estimate for a field with spectrum 1/ω² and white noise of the given level."""
    height, width = recorded.shape
    mirrored = np.pad(recorded, ((0, height), (0, width)), mode="symmetric")  # so that opposite borders meet
    transfer = transfer_of(mirrored.shape)
    omega2 = np.fft.fftfreq(2 * height)[:, None] ** 2 + np.fft.rfftfreq(2 * width)[None, :] ** 2
    inverse = transfer / (transfer**2 + level * omega2)
    return np.fft.irfft2(inverse * np.fft.rfft2(mirrored), s=mirrored.shape)[:height, :width]


def photograph(name: str, size: int) -> np.ndarray:
    """Return a square of one of scikit-learn's two photographs, in grey from 0 to 1."""
    from sklearn.datasets import load_sample_image

    grey = load_sample_image(name) @ np.asarray([0.299, 0.587, 0.114]) / 255.0
    row, column = {"flower.jpg": (220, 307), "china.jpg": (240, 210)}[name]  # the middle of what it shows
    top, left = row - size // 2, column - size // 2
    return grey[top : top + size, left : left + size].astype(np.float32)


def expose(field: np.ndarray, seed: int = 0) -> tuple[np.ndarray, Exposure]:
    """Return the part of a field that a camera sees, and its exposure; the field's border only leaks in."""
    rng = np.random.default_rng(seed)
    seen = field[MARGIN:-MARGIN, MARGIN:-MARGIN]
    blurred = blur(np, field, transfer_of(field.shape))[MARGIN:-MARGIN, MARGIN:-MARGIN]
    noisy = blurred + NOISE * rng.standard_normal(seen.shape)
    # Outside the window nothing is known; the mirrored picture is there to start from.
    recorded = np.pad(noisy, MARGIN, mode="symmetric").astype(np.float32)
    window = np.pad(np.ones_like(seen), MARGIN)
    return seen, Exposure(recorded, window, transfer_of(recorded.shape))


def transfer_of(shape: tuple[int, ...]) -> np.ndarray:
    """Return the Gaussian's Fourier transform on the grid of ``rfftn``."""
    omega2 = np.fft.fftfreq(shape[0])[:, None] ** 2 + np.fft.rfftfreq(shape[1])[None, :] ** 2
    return np.exp(-2.0 * (np.pi * BLUR) ** 2 * omega2).astype(np.float32)


def psnr(image: np.ndarray, truth: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio in dB, white being 1."""
    return float(-10.0 * np.log10(np.mean((image - truth) ** 2)))


def run(
    backend: str = "numpy", *, size: int = 256, steps: int = 400, name: str = "flower.jpg"
) -> dict[str, np.ndarray]:
    """Expose a photograph and recover it in both ways; return the pictures by title, the truth first."""
    xp = importlib.import_module(f"array_api_compat.{backend}")
    truth, exposure = expose(photograph(name, size + 2 * MARGIN))
    inside = (slice(MARGIN, -MARGIN), slice(MARGIN, -MARGIN))
    recovered = recover(xp, Exposure(*(xp.asarray(part) for part in exposure)), steps)
    recovered = recovered.get() if backend == "cupy" else np.asarray(recovered)
    # The filter is given its best noise level, found with the help of the truth: better than one could do.
    filtered = [wiener(exposure.recorded[inside], level) for level in np.geomspace(1e-3, 1e3, 25)]
    return {
        "truth": truth,
        "recorded": exposure.recorded[inside],
        "Wiener filter": max(filtered, key=lambda image: psnr(image, truth)),
        "total variation, arrayopt": recovered[inside],
    }


def draw(images: dict[str, np.ndarray], path: Path) -> None:
    """Write the pictures side by side, and below each a part of it enlarged."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    truth = next(iter(images.values()))
    part = truth.shape[0] // 4
    top, left = truth.shape[0] * 9 // 16, truth.shape[1] * 7 // 16
    figure = Figure(figsize=(10.4, 5.6), dpi=100, layout="constrained")
    axes = figure.subplots(2, len(images))
    for (title, image), (whole, enlarged) in zip(images.items(), axes.T, strict=True):
        quality = "" if image is truth else f"\n{psnr(image, truth):.2f} dB"
        whole.set_title(title + quality, fontsize=11)
        whole.imshow(image, cmap="gray", vmin=0, vmax=1)
        whole.add_patch(Rectangle((left - 0.5, top - 0.5), part, part, fill=False, edgecolor="#FFC107", linewidth=1.5))
        detail = image[top : top + part, left : left + part]
        enlarged.imshow(detail, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        for axis in (whole, enlarged):
            axis.set_axis_off()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Recover a blurred, noisy photograph with an arrayopt rule.")
    parser.add_argument("--backend", choices=("numpy", "cupy", "torch"), default="numpy")
    parser.add_argument("--size", type=int, default=256, help="pixels across (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="updates (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("deconvolution.png"), help="picture (default: %(default)s)")
    given = parser.parse_args(arguments)
    if not 32 <= given.size <= 384:
        parser.error(f"argument --size: must be from 32 to 384, what the photograph has; got {given.size}")
    images = run(given.backend, size=given.size, steps=given.steps)
    truth = images["truth"]
    for title, image in list(images.items())[1:]:
        print(f"{title:26} PSNR {psnr(image, truth):5.2f} dB")
    draw(images, given.output)
    print(f"picture: {given.output}")


if __name__ == "__main__":
    main()
