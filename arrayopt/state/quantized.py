"""Slots in 8 bits: a code for each element, and a scale for each block of 32 elements.

A block consists of 32 consecutive elements in C order. The last block of a tensor, or of a layer of
a stacked tensor, may be shorter. Its scale is its largest magnitude, rounded to bfloat16, which has
the range of float32. An element x is stored as the integer nearest to ``x * (top / scale)``, half-way
cases to even. `top` is 127, or 255 for slots without negative numbers. In these, the code of a number
that is not zero is at least 1: they are roots that the update divides by, and a root of zero would
make a huge step. (Products of at most 2**-100 count as zero.) A code is read as
``code * (scale * (1 / top))``. All quotients and products are rounded to float32, so every engine
computes the same codes from the same numbers.

Zero stays zero. Blocks whose scale is below 2**-119 are stored as zeros. If a block contains infinity or
NaN, its scale is not finite, and the whole block is read as NaN: NaN never becomes a number.

The real and imaginary part of a complex number have one code each, with a common scale. Both codes
are stored in one integer of 16 bits, so that the slot has the parameter's shape.
"""

from typing import Any

import numpy as np

from arrayopt.arrays import Array, array_namespace, as_array, dtype_name, dtype_of, size
from arrayopt.codecs import BLOCK, PAIR, QUANTIZED, SCALE
from arrayopt.rules.base import Rule

LEAST = 2.0**-100
"""If the product of a root and ``top / scale`` is larger than this, its code is at least 1."""

TINY = 2.0**-119
"""Scales below this count as zero, so that the reciprocals of all others are finite."""


def scale_of(slot: str) -> str:
    """The name of the slot that holds the scales of a slot."""
    return SCALE + slot


def scales(rule: Rule, rank: int) -> list[str]:
    """The names of all slots of scales that a rule has for tensors with `rank` dimensions."""
    return [scale_of(slot) for slot, dtype in rule.storage(rank).items() if dtype in QUANTIZED]


def narrowed(slots: dict[str, Array]) -> list[str]:
    """The names of the slots that are stored as codes."""
    return [slot for slot, x in slots.items() if scale_of(slot) in slots and dtype_name(x) in QUANTIZED]


def scale_shape(shape: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """The shape of the scales of a slot. Each index of the first `layers` axes has its own blocks."""
    count = int(np.prod(shape[layers:], dtype=np.int64))
    return (*shape[:layers], -(-count // BLOCK))


def _in_blocks(xp: Any, x: Array, shape: tuple[int, ...], block: int) -> Array:
    """Reshape an array to blocks: the axes of its scales, whose shape is given, and one axis within the block."""
    flat = xp.reshape(x, (*shape[:-1], size(x) // max(int(np.prod(shape[:-1])), 1)))
    missing = shape[-1] * block - flat.shape[-1]
    if missing:
        room = xp.zeros((*shape[:-1], missing), dtype=flat.dtype, device=_device(flat))
        flat = xp.concat([flat, room], axis=-1)
    return xp.reshape(flat, (*shape, block))


def _device(x: Array) -> Any:
    """The device for new arrays that are used with x; None for JAX, which chooses it."""
    import array_api_compat

    return None if array_api_compat.is_jax_array(x) else array_api_compat.device(x)


def _as_it_was(xp: Any, blocks: Array, like: Array) -> Array:
    """Reshape blocks to the shape of the array that they were made from."""
    lead = blocks.shape[:-2]
    count = size(like) // max(int(np.prod(lead)), 1)
    flat = xp.reshape(blocks, (*lead, blocks.shape[-2] * blocks.shape[-1]))
    return xp.reshape(flat[..., :count], like.shape)


def quantized(x: Array, dtype: str, layers: int = 0) -> tuple[Array, Array]:
    """Quantize an array. Return codes, in int8, uint8 or for complex numbers int16 (`PAIR`), and scales.

    Each index of the first `layers` axes has its own blocks.
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
    tops = xp.full_like(scale, top)  # PyTorch computes number / array as number times the reciprocal
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
    return as_array(xp.astype(rounded, codes_dtype)), xp.astype(scale, scale_dtype)


def dequantized(codes: Array, scale: Array, wide: Any = None) -> Array:
    """Convert codes and scales to numbers, in single precision or the dtype `wide`."""
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
        step = xp.where(xp.isfinite(step), step, xp.abs(step - step))  # NaN if it is not finite
    made = _as_it_was(xp, blocks * step[..., None], numbers)
    if pairs:
        made = xp.astype(made[..., 0], wide) + 1j * xp.astype(made[..., 1], wide)
    return xp.astype(made, wide, copy=False)
