"""What is updated: the shapes of models, with gradients and first parameters for them."""

import math
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

__all__ = ["LARGE", "PROBLEMS", "Problem", "equal"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """Tensors of float32 to be updated.

    Attributes
    ----------
    name : str
        What it is called on the command line.
    title : str
        What it is called in tables.
    shapes : tuple of tuple of int
        A shape for each tensor.
    """

    name: str
    title: str
    shapes: tuple[Shape, ...]

    @property
    def elements(self) -> int:
        """Parameters in all."""
        return sum(map(math.prod, self.shapes))

    @cached_property
    def grads(self) -> list[np.ndarray]:
        """Gradients: the same in every step, shared by all contestants, and each at a multiple of 64 bytes."""
        sizes = [math.prod(shape) for shape in self.shapes]
        starts = np.cumsum([0, *(-(-n // 16) * 16 for n in sizes)])
        room = np.empty(starts[-1] + 16, np.float32)
        room = room[-room.ctypes.data % 64 // 4 :]
        _fill(room, scale=1e-2, seed=1)
        return [room[i : i + n].reshape(shape) for i, n, shape in zip(starts, sizes, self.shapes, strict=False)]

    def params(self) -> list[np.ndarray]:
        """Parameters to begin with, new ones each time."""
        made = [np.empty(shape, np.float32) for shape in self.shapes]
        for i, p in enumerate(made):
            _fill(p.reshape(-1), scale=3e-2, seed=2 + i % 97)
        return made


@cache
def _normal(seed: int) -> np.ndarray:
    """Normal numbers."""
    return np.random.default_rng(seed).standard_normal(100_003, np.float32)


def _fill(x: np.ndarray, scale: float, seed: int) -> None:
    """Fill a vector with normal numbers, which repeat after a hundred thousand."""
    numbers = _normal(seed)[: x.size] * np.float32(scale)
    for i in range(0, x.size, numbers.size):
        x[i : i + numbers.size] = numbers[: x.size - i]


def equal(count: int, shape: Shape) -> Problem:
    """So many tensors of one shape."""
    size = math.prod(shape)
    return Problem(f"{count}x{size}", f"{count:,} tensors of {size:,}", (shape,) * count)


def _bert() -> tuple[Shape, ...]:
    """BERT-base, with a vocabulary of 30,522."""
    embeddings = [(30522, 768), (512, 768), (2, 768), (768,), (768,)]
    return (*embeddings, *_encoder(12), (768, 768), (768,))


def _encoder(layers: int, d: int = 768) -> tuple[Shape, ...]:
    """Encoder layers of BERT, of a hidden size; the inner size is four times as much."""
    inner, vector = 4 * d, (d,)
    attention = [(d, d), vector] * 4 + [vector, vector]
    layer = (*attention, (inner, d), (inner,), (d, inner), vector, vector, vector)
    return layer * layers


def _bert_large() -> tuple[Shape, ...]:
    """BERT-large, with a vocabulary of 30,522."""
    embeddings = [(30522, 1024), (512, 1024), (2, 1024), (1024,), (1024,)]
    return (*embeddings, *_encoder(24, 1024), (1024, 1024), (1024,))


def _llama() -> tuple[Shape, ...]:
    """Llama-7B: hidden size 4,096, inner size 11,008, 32 layers, a vocabulary of 32,000."""
    d, inner = 4096, 11008
    layer = [(d, d)] * 4 + [(inner, d), (inner, d), (d, inner), (d,), (d,)]
    return ((32000, d), *layer * 32, (d,), (32000, d))


def _resnet50(stages: int) -> tuple[Shape, ...]:
    """ResNet-50 up to a stage, and its 1,000 classes: convolutions, each with a batch norm, and a dense layer."""
    convolutions = [(64, 3, 7, 7)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3))[:stages]:
        for block in range(blocks):
            convolutions += [(width, before, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, before, 1, 1))
            before = 4 * width
    normed = [shape for conv in convolutions for shape in (conv, conv[:1], conv[:1])]
    return (*normed, (1000, before), (1000,))


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem("bert-base", "BERT-base", _bert()),
        Problem("resnet-50", "ResNet-50", _resnet50(4)),
        equal(10_000, (64,)),
        equal(2_000, (64,)),
        Problem("resnet-3-stages", "3 stages of ResNet-50", _resnet50(3)),
        Problem("bert-2-layers", "2 layers of BERT-base", _encoder(2)),
    )
}

LARGE = (Problem("bert-large", "BERT-large", _bert_large()), Problem("llama-7b", "Llama-7B", _llama()))
"""Models that are only counted with."""
