"""Slots in 8 bits: a code for each element, and a scale for each block of neighbours.

A block is 32 elements that follow each other in C order. The last block of a tensor, or of a layer of
a stacked tensor, may be shorter. Its scale is its largest magnitude, rounded to bfloat16, which has
the range of float32. An element x is stored as the whole number nearest to ``x * (top / scale)``,
where `top` is 127, or 255 where no number is negative; half-way cases go to even. Where no number
is negative, a number that is not zero has at least the code 1: these are roots that others are divided
by, and a root of zero would make a huge step. (Products of at most 2**-100 count as zero.) It is read as
``code * (scale * (1 / top))``. All quotients and products are rounded to float32, so every engine
makes the same codes of the same numbers.

Zero stays zero. Blocks whose scale is below 2**-119 are zeros. If a block holds infinity or NaN, its
scale is not finite, and all of the block is read as NaN: what is not a number never becomes one.

The parts of a complex number are numbers of their own, with one scale. Their codes share an integer
of 16 bits, so that a slot has the parameter's shape.
"""

from typing import Any

import numpy as np

from arrayopt.arrays import Array, array_namespace, dtype_name, dtype_of, size
from arrayopt.codecs import BLOCK, PAIR, QUANTIZED, SCALE
from arrayopt.rules.base import Rule

LEAST = 2.0**-100
"""Products of a root and ``top / scale`` that are larger have a code of at least 1."""

TINY = 2.0**-119
"""Scales below this count as zero: the reciprocals of others are finite."""


def scale_of(slot: str) -> str:
    """The slot that holds the scales of a slot."""
    return SCALE + slot


def scales(rule: Rule, rank: int) -> list[str]:
    """The slots of scales of a tensor of some rank under a rule."""
    return [scale_of(slot) for slot, dtype in rule.storage(rank).items() if dtype in QUANTIZED]


def narrowed(slots: dict[str, Array]) -> list[str]:
    """The slots that are stored as codes."""
    return [slot for slot, x in slots.items() if scale_of(slot) in slots and dtype_name(x) in QUANTIZED]


def scale_shape(shape: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """The shape of the scales of a slot, of which each index of the first `layers` axes has blocks of its own."""
    count = int(np.prod(shape[layers:], dtype=np.int64))
    return (*shape[:layers], -(-count // BLOCK))


def _in_blocks(xp: Any, x: Array, shape: tuple[int, ...], block: int) -> Array:
    """An array as blocks: the axes of its scales, whose shape is given, and one of the block's numbers."""
    flat = xp.reshape(x, (*shape[:-1], size(x) // max(int(np.prod(shape[:-1])), 1)))
    missing = shape[-1] * block - flat.shape[-1]
    if missing:
        room = xp.zeros((*shape[:-1], missing), dtype=flat.dtype, device=_device(flat))
        flat = xp.concat([flat, room], axis=-1)
    return xp.reshape(flat, (*shape, block))


def _device(x: Array) -> Any:
    """Where an array made beside x must be; None where that follows from x."""
    import array_api_compat

    return None if array_api_compat.is_jax_array(x) else array_api_compat.device(x)


def _as_it_was(xp: Any, blocks: Array, like: Array) -> Array:
    """Blocks as an array of the shape that they were made of."""
    lead = blocks.shape[:-2]
    count = size(like) // max(int(np.prod(lead)), 1)
    flat = xp.reshape(blocks, (*lead, blocks.shape[-2] * blocks.shape[-1]))
    return xp.reshape(flat[..., :count], like.shape)


def quantized(x: Array, dtype: str, layers: int = 0) -> tuple[Array, Array]:
    """Codes, stored in int8, uint8 or for complex numbers in int16 (`PAIR`), and scales of an array.

    Each index of the first `layers` axes has blocks of its own.
    """
    xp = array_namespace(x)
    shape = scale_shape(tuple(x.shape), layers)
    codes_dtype, scale_dtype = getattr(xp, dtype), dtype_of(xp, "bfloat16")
    if size(x) == 0:
        codes = xp.zeros(tuple(x.shape), dtype=codes_dtype, device=_device(x))
        return codes, xp.zeros(shape, dtype=scale_dtype, device=_device(x))
    top, pairs = float(QUANTIZED[dtype].top), dtype == PAIR
    if pairs:
        x = xp.stack([xp.real(x), xp.imag(x)], axis=-1)
    blocks = _in_blocks(xp, xp.astype(x, xp.float32), shape, BLOCK * (1 + pairs))
    largest = xp.max(xp.abs(blocks), axis=-1)
    scale = xp.astype(xp.astype(largest, scale_dtype), xp.float32)
    scale = xp.where(scale < TINY, xp.zeros_like(scale), scale)
    kept = xp.isfinite(scale) & (scale > 0)
    tops = xp.full_like(scale, top)  # PyTorch makes of a number over an array the reciprocal times it
    factor = xp.where(kept, tops / xp.where(kept, scale, xp.ones_like(scale)), xp.zeros_like(scale))
    finite = xp.where(kept[..., None], blocks, xp.zeros_like(blocks))
    rounded = finite * factor[..., None]
    if dtype == "uint8":
        rounded = xp.where((rounded > LEAST) & (rounded < 1.0), xp.ones_like(rounded), rounded)
    rounded = xp.round(rounded)
    rounded = _as_it_was(xp, xp.clip(rounded, 0.0 if dtype == "uint8" else -top, top), x)
    if pairs:
        low, high = rounded[..., 0], rounded[..., 1]
        rounded = 256.0 * high + xp.where(low < 0, low + 256.0, low)
    return xp.astype(rounded, codes_dtype), xp.astype(scale, scale_dtype)


def dequantized(codes: Array, scale: Array, wide: Any = None) -> Array:
    """The numbers that codes and scales stand for, in single precision or the dtype `wide`."""
    xp, pairs = array_namespace(codes), dtype_name(codes) == PAIR
    wide = wide or (xp.complex64 if pairs else xp.float32)
    if size(codes) == 0:
        return xp.astype(codes, wide)
    top, numbers = float(QUANTIZED[dtype_name(codes)].top), xp.astype(codes, xp.float32)
    if pairs:
        high = xp.floor(numbers / 256.0)
        low = numbers - 256.0 * high
        numbers = xp.stack([xp.where(low > 127.0, low - 256.0, low), high], axis=-1)
    blocks = _in_blocks(xp, numbers, tuple(scale.shape), BLOCK * (1 + pairs))
    step = xp.astype(scale, xp.float32) * float(np.float32(1 / top))
    with np.errstate(invalid="ignore"):
        step = xp.where(xp.isfinite(step), step, xp.abs(step - step))  # no NaN is made where none is
    made = _as_it_was(xp, blocks * step[..., None], numbers)
    if pairs:
        made = xp.astype(made[..., 0], wide) + 1j * xp.astype(made[..., 1], wide)
    return xp.astype(made, wide, copy=False)
