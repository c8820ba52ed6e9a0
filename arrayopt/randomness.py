"""Counter-based random numbers by Threefry2x32-20, and conversions of 16-bit floats that use integers.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). It needs only sums, shifts and xors
of 32 bits, so it gives the same bits in all libraries and languages. The key is made of a seed, a stream and a tensor's
name; the counter is the element's position and the number of the update. Words are signed 32-bit integers, which wrap.
"""

from functools import lru_cache
from hashlib import blake2s
from typing import Any

import numpy as np

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
"""The number of bits by which each round rotates; the sequence repeats after eight rounds."""

ROUNDS = 20

PARITY = 0x1BD11BDA
"""The third word of a key is the xor of the other two and this."""

BITS = 24
"""The number of bits of a random number, which float32 holds exactly."""


BLOCK = 1 << 14
"""The number of random numbers that NumPy computes at a time, so that they stay in cache."""


def signed(word: int) -> int:
    """A word of 32 bits as a signed integer."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


@lru_cache(maxsize=1 << 14)
def key(seed: int, stream: int | str, name: str) -> tuple[int, int]:
    """The key of a tensor's numbers, two words: the BLAKE2s checksum of seed, stream and name, little-endian."""
    made = blake2s(f"{seed}:{stream}:{name}".encode(), digest_size=8).digest()
    return signed(int.from_bytes(made[:4], "little")), signed(int.from_bytes(made[4:], "little"))


def halves(words: tuple[int, int]) -> tuple[int, int, int, int]:
    """Split two words into four numbers below 2¹⁶, which float32 holds exactly; the upper half of each first."""
    a, b = words
    return a >> 16 & 0xFFFF, a & 0xFFFF, b >> 16 & 0xFFFF, b & 0xFFFF


def threefry(x: Any, y: Any, k0: Any, k1: Any) -> Any:
    """The first word of Threefry2x32-20 for the counter (x, y), two arrays of int32, which may be overwritten.

    The key consists of signed integers, or of arrays of int32.
    """
    keys = k0, k1, k0 ^ k1 ^ PARITY
    x += k0
    y += k1
    for i in range(ROUNDS):
        turn = ROTATIONS[i % len(ROTATIONS)]
        x += y
        low = y >> (32 - turn)
        low &= (1 << turn) - 1  # right shifts of signed integers copy the sign bit
        y <<= turn
        y |= low
        y ^= x
        if i % 4 == 3:
            n = i // 4 + 1
            x += keys[n % 3]
            y += keys[(n + 1) % 3]
            y += n
    return x


def uniform(xp: Any, word: Any, real: Any) -> Any:
    """A number in [0, 1) from the upper bits of a word."""
    return xp.astype((word >> (32 - BITS)) & ((1 << BITS) - 1), real) * 2.0**-BITS


def round_bfloat16(xp: Any, x: Any, u: Any) -> Any:
    """Round x, in float32, to a neighbour in bfloat16: away from zero if u in [0, 1) is below the remainder."""
    bits = x.view(xp.int32)
    bits = (bits + xp.astype(xp.asarray(u * 65536.0), xp.int32)) & -65536
    return xp.where(xp.isfinite(x), bits.view(xp.float32), x)


def round_float16(xp: Any, x: Any, u: Any) -> Any:
    """Round x, in float32, to a neighbour in float16: away from zero if u in [0, 1) is below the remainder."""
    bits, size = x.view(xp.int32), xp.abs(x)
    steps = size * 2.0**24  # numbers of float16 below 2⁻¹⁴ are spaced by 2⁻²⁴
    whole = xp.floor(steps)
    whole = whole + xp.astype(xp.asarray(u < steps - whole), xp.float32)
    small = (whole * 2.0**-24).view(xp.int32) | (bits & -(1 << 31))
    large = (bits + xp.astype(xp.asarray(u * 8192.0), xp.int32)) & -8192
    return xp.where(xp.isfinite(x), xp.where(size < 2.0**-14, small, large).view(xp.float32), x)


def current_bfloat16(xp: Any, master: Any, p: Any) -> Any:
    """The master of a parameter in bfloat16, both in float32; the parameter itself in elements that users have set.

    These differ from the rounded master. Numbers that round to p are at most half a unit of its last place away, 2¹⁵ in
    bits of float32; of two neighbours at the same distance, rounding takes the even one.
    """
    bits = p.view(xp.int32)
    apart = xp.abs(master.view(xp.int32) - bits) + (bits >> 16 & 1)
    near = (apart <= 1 << 15) & (apart >= 0)  # -p is 2³¹ away from p, which is negative in int32
    return xp.where(near & (master == master), master, p)  # the distance of a NaN from 0 may wrap


def current_float16(xp: Any, master: Any, p: Any) -> Any:
    """As `current_bfloat16`, for float16. It rounds by integers, because compilers may remove casts to 16 bits."""
    bits, size = master.view(xp.int32), xp.abs(master)
    large = ((bits + 0xFFF + (bits >> 13 & 1)) & -8192).view(xp.float32)
    large = xp.where(size < 65520.0, large, master * xp.inf)
    small = xp.round(master * 2.0**24) * 2.0**-24  # numbers below 2⁻¹⁴ are spaced by 2⁻²⁴
    return xp.where(xp.where(size < 2.0**-14, small, large) == p, master, p)


def joined_bfloat16(xp: Any, low: Any, p: Any) -> Any:
    """The master, in float32, of a parameter in bfloat16, from the parameter and 8 low bits; see `low_bfloat16`.

    The master of zero is zero.
    """
    bits = p.view(xp.int32) + xp.astype(low, xp.int32) * 256
    return xp.where(xp.isfinite(p) & (p != 0.0), bits.view(xp.float32), p)


def low_bfloat16(xp: Any, master: Any, p: Any) -> Any:
    """The 8 low bits of a master, in ±127, whose parameter is p rounded to bfloat16.

    As bits of float32, master and parameter differ by at most 2¹⁵. The difference is rounded to a multiple of 2⁸.
    """
    bits = p.view(xp.int32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & -65536
    low = xp.clip((master.view(xp.int32) - bits + 128) >> 8, -127, 127)
    return xp.where(xp.isfinite(bits.view(xp.float32)), xp.astype(xp.asarray(low), xp.float32), 0.0)


def joined_float16(xp: Any, low: Any, p: Any) -> Any:
    """As `joined_bfloat16`, for float16. If the low bits are zero, the master is p, even if p is -0.0."""
    large = (p.view(xp.int32) + xp.astype(low, xp.int32) * 32).view(xp.float32)
    joined = xp.where(xp.abs(p) <= 2.0**-14, p + low * 2.0**-32, large)
    return xp.where(xp.isfinite(p) & (low != 0.0), joined, p)


def low_float16(xp: Any, master: Any, p: Any) -> Any:
    """As `low_bfloat16`, for float16: bits differ by at most 2¹², and numbers below 2⁻¹⁴ are spaced by 2⁻²⁴."""
    bits, size = p.view(xp.int32), xp.abs(p)
    bits = (bits + 0xFFF + (bits >> 13 & 1)) & -8192
    rounded = xp.where(size < 2.0**-14, xp.round(p * 2.0**24) * 2.0**-24, bits.view(xp.float32))
    far = xp.clip((master.view(xp.int32) - bits + 16) >> 5, -127, 127)
    near = xp.clip(xp.round((master - rounded) * 2.0**32), -127.0, 127.0)
    low = xp.where(xp.abs(rounded) <= 2.0**-14, near, xp.astype(xp.asarray(far), xp.float32))
    return xp.where(size < 65520.0, low, 0.0)


def position_uniform(position: Any, a: Any, b: Any, c: Any, d: Any, t1: Any, t0: Any, out: Any = None) -> Any:
    """`uniform` for NumPy: from positions, the halves of a key, and the halves of the number of the update."""
    k0, k1, t = _joined(a, b), _joined(c, d), _joined(t1, t0)
    position = np.asarray(position, np.int64)
    if position.size and position.max() >> 32:
        k0 = k0 + (position >> 32).astype(np.int32)
    x, y = np.array(position.astype(np.int32)), np.empty(position.shape, np.int32)
    y[...] = t
    if k0.ndim or k1.ndim:
        threefry(x, y, k0, k1)
    else:
        for i in range(0, x.size, BLOCK):
            threefry(x.reshape(-1)[i : i + BLOCK], y.reshape(-1)[i : i + BLOCK], k0, k1)
    made = uniform(np, x, np.float64 if out is None else out.dtype)
    if out is not None:
        np.copyto(out, made)
    return made


def _joined(high: Any, low: Any) -> Any:
    """Join the halves of a word."""
    return np.asarray(np.asarray(high, np.int64) << 16 | np.asarray(low, np.int64)).astype(np.int32)
