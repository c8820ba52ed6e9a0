"""A second implementation of the random numbers, in plain Python, and runs of a rule that stores what it draws."""

from dataclasses import dataclass
from hashlib import blake2s

import numpy as np
import pytest

import arrayopt as ao

__all__ = ["EXPECTED", "SHAPES", "WORD", "Draws", "T", "block", "check", "drawn", "numbers"]

WORD = 0xFFFFFFFF


def block(x, y, k0, k1):
    """Both words of Threefry2x32-20, written from the paper with Python's integers."""
    ks = k0, k1, k0 ^ k1 ^ 0x1BD11BDA
    x, y = x + ks[0] & WORD, y + ks[1] & WORD
    for d in range(20):
        r = (13, 15, 26, 6, 17, 29, 16, 24)[d % 8]
        x = x + y & WORD
        y = (y << r | y >> 32 - r) & WORD ^ x
        if d % 4 == 3:
            j = d // 4 + 1
            x, y = x + ks[j % 3] & WORD, y + ks[(j + 1) % 3] + j & WORD
    return x, y


def number(seed, stream, name, position, t):
    """One random number, as the documentation defines it."""
    made = blake2s(f"{seed}:{stream}:{name}".encode(), digest_size=8).digest()
    k0, k1 = (int.from_bytes(made[i : i + 4], "little") for i in (0, 4))
    return (block(position & WORD, t & WORD, k0 + (position >> 32) & WORD, k1)[0] >> 8) / 2**24


def numbers(seed, stream, name, shape, t, first=0):
    n = int(np.prod(shape))
    return np.array([number(seed, stream, name, first + i, t) for i in range(n)]).reshape(shape)


@dataclass(frozen=True, kw_only=True, repr=False)
class Draws(ao.Rule):
    """Stores random numbers in slots. `rows` adds a loop over rows, and `products` products of matrices."""

    rows: bool = ao.flag(False)
    products: bool = ao.flag(False)

    def slots(self, xp, p):
        return {"u": xp.zeros_like(p), "v": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        u, v = ao.random(h), ao.random(h, 3)
        q = p - (u - 0.5)
        if self.rows and p.ndim > 1:
            q = q - 0.25 * xp.mean(u * v, axis=-1, keepdims=True)
        if self.products and p.ndim > 1:
            x = g + ao.random(h, 9)
            q = q + (x @ x.mT) @ x
        return q, {"u": u, "v": v}


SHAPES = {"a": (3,), "few": (5, 7), "same": (5, 7), "none": (), "wide": (20, 30), "kernels": (70, 2, 3)}
T = 3
EXPECTED = {
    (name, slot): numbers(11, stream, name, shape, T)
    for name, shape in SHAPES.items()
    for slot, stream in (("u", 0), ("v", 3))
}

LIBRARIES = {  # functions from NumPy to the library, and back
    "numpy": (np.asarray, np.asarray),
    "array_api_strict": (lambda x: pytest.importorskip("array_api_strict").asarray(x), np.asarray),
    "torch": (lambda x: pytest.importorskip("torch").from_numpy(np.array(x)), np.asarray),
    "jax": (lambda x: pytest.importorskip("jax").numpy.asarray(x), np.asarray),
    "cupy": (lambda x: standin_module().asarray(x), lambda x: x.get()),
}


def standin_module():
    import cupy

    return cupy


def drawn(library, engine, rule, shapes=None, dtype="float32", steps=T):
    """An optimizer under the rule, after some steps."""
    made = LIBRARIES[library][0]
    shapes = SHAPES if shapes is None else shapes
    opt = ao.Optimizer({name: made(np.ones(shape, dtype)) for name, shape in shapes.items()}, rule, engine=engine)
    for _ in range(steps):
        opt.step({name: made(np.ones(shape, dtype)) for name, shape in shapes.items()})
    return opt


def check(opt, library="numpy", expected=None):
    back = LIBRARIES[library][1]
    for (name, slot), x in (EXPECTED if expected is None else expected).items():
        np.testing.assert_array_equal(np.asarray(back(opt.state[name][slot]), "f8"), x, err_msg=f"{name} {slot}")
