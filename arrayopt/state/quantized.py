"""Slots in 8 bits: a code for each element, and a scale for each block of neighbours.

A block is 32 elements that follow each other in C order. The last block of a tensor, or of a layer of
a stacked tensor, may be shorter. Its scale is its largest magnitude, rounded to bfloat16, which has
the range of float32. An element x is stored as the whole number nearest to ``x * (top / scale)``,
where `top` is 127, or 255 where no number is negative; half-way cases go to even. It is read as
``code * (scale * (1 / top))``. All quotients and products are rounded to float32, so every engine
makes the same codes of the same numbers.

Zero stays zero. Blocks whose scale is below 2**-119 are zeros. If a block holds infinity or NaN, its
scale is not finite, and all of the block is read as NaN: what is not a number never becomes one.
"""

from typing import Any

import numpy as np

from arrayopt.arrays import Array, array_namespace, dtype_name, dtype_of, size
from arrayopt.codecs import BLOCK, QUANTIZED, SCALE
from arrayopt.rules.base import Rule

__all__ = ["TINY", "dequantized", "narrowed", "quantized", "scale_of", "scale_shapes", "scales"]

TINY = 2.0**-119
"""Scales below this count as zero: the reciprocals of others are finite."""


def scale_of(slot: str) -> str:
    """The slot that holds the scales of a slot."""
    return SCALE + slot


def scales(rule: Rule, rank: int) -> list[str]:
    """The slots of scales of a tensor of some rank under a rule."""
    return [scale_of(slot) for slot, dtype in rule.storage(rank).items() if dtype in QUANTIZED]


def scale_shapes(rule: Rule, shapes: dict[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the slots of scales of a tensor of some rank, from those of its slots."""
    own = [slot for slot, dtype in rule.storage(rank).items() if dtype in QUANTIZED]
    return {scale_of(slot): _scale_shape(shapes[slot], 0) for slot in own}


def narrowed(slots: dict[str, Array]) -> list[str]:
    """The slots that are stored as codes."""
    return [slot for slot, x in slots.items() if scale_of(slot) in slots and dtype_name(x) in QUANTIZED]


def _scale_shape(shape: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """The shape of the scales of a slot, of which each index of the first `layers` axes has blocks of its own."""
    count = int(np.prod(shape[layers:], dtype=np.int64))
    return (*shape[:layers], -(-count // BLOCK))


def _in_blocks(xp: Any, x: Array, shape: tuple[int, ...]) -> Array:
    """An array as blocks: the axes of its scales, whose shape is given, and one of the block's elements."""
    flat = xp.reshape(x, (*shape[:-1], size(x) // max(int(np.prod(shape[:-1])), 1)))
    missing = shape[-1] * BLOCK - flat.shape[-1]
    if missing:
        room = xp.zeros((*shape[:-1], missing), dtype=flat.dtype, device=_device(flat))
        flat = xp.concat([flat, room], axis=-1)
    return xp.reshape(flat, (*shape, BLOCK))


def _device(x: Array) -> Any:
    """Where an array made beside x must be; None where that follows from x."""
    import array_api_compat

    return None if array_api_compat.is_jax_array(x) else array_api_compat.device(x)


def _as_it_was(xp: Any, blocks: Array, like: Array) -> Array:
    """Blocks as an array of the shape that they were made of."""
    lead = blocks.shape[:-2]
    count = size(like) // max(int(np.prod(lead)), 1)
    flat = xp.reshape(blocks, (*lead, blocks.shape[-2] * BLOCK))
    return xp.reshape(flat[..., :count], like.shape)


def quantized(x: Array, dtype: str, layers: int = 0) -> tuple[Array, Array]:
    """Codes and scales of an array.

    Parameters
    ----------
    x : array
        Real numbers.
    dtype : {"int8", "uint8"}
        What the codes are stored in.
    layers : int
        How many of the first axes have blocks of their own for each index.
    """
    xp = array_namespace(x)
    shape = _scale_shape(tuple(x.shape), layers)
    codes_dtype, scale_dtype = getattr(xp, dtype), dtype_of(xp, "bfloat16")
    if size(x) == 0:
        return xp.astype(x, codes_dtype), xp.zeros(shape, dtype=scale_dtype, device=_device(x))
    top = float(QUANTIZED[dtype].top)
    blocks = _in_blocks(xp, xp.astype(x, xp.float32), shape)
    largest = xp.max(xp.abs(blocks), axis=-1)
    scale = xp.astype(xp.astype(largest, scale_dtype), xp.float32)
    scale = xp.where(scale < TINY, xp.zeros_like(scale), scale)
    kept = xp.isfinite(scale) & (scale > 0)
    factor = xp.where(kept, top / xp.where(kept, scale, xp.ones_like(scale)), xp.zeros_like(scale))
    finite = xp.where(kept[..., None], blocks, xp.zeros_like(blocks))
    rounded = xp.round(finite * factor[..., None])
    rounded = xp.clip(rounded, -top if dtype == "int8" else 0.0, top)
    return _as_it_was(xp, xp.astype(rounded, codes_dtype), x), xp.astype(scale, scale_dtype)


def dequantized(codes: Array, scale: Array, real: Any = None) -> Array:
    """The numbers that codes and scales stand for, in float32 or the dtype `real`."""
    xp = array_namespace(codes)
    if size(codes) == 0:
        return xp.astype(codes, real or xp.float32)
    top = float(QUANTIZED[dtype_name(codes)].top)
    blocks = _in_blocks(xp, xp.astype(codes, xp.float32), tuple(scale.shape))
    step = xp.astype(scale, xp.float32) * float(np.float32(1 / top))
    step = xp.where(xp.isfinite(step), step, xp.full_like(step, float("nan")))
    made = _as_it_was(xp, blocks * step[..., None], codes)
    return made if real is None else xp.astype(made, real, copy=False)
