"""`random`: random numbers for rules, their interface to engines, and stochastic rounding, which uses them."""

from dataclasses import dataclass
from typing import Any, Protocol

import array_api_compat

from arrayopt.arrays import NARROW, Array, beside, place, size, working_dtype
from arrayopt.hyper import whole
from arrayopt.randomness import key, signed, threefry, uniform

DRAWS = "_draws"
"""The name in `h` of the engine's source of random numbers; fields cannot have this name."""

ROUNDING = "rounding"
"""The stream for stochastic rounding; streams of rules are integers."""


class Draws(Protocol):
    """An engine's source of random numbers."""

    @property
    def stored(self) -> str:
        """The dtype in which the parameter is stored."""

    def __call__(self, stream: int | str) -> Array:
        """The numbers of a stream in this update."""


def random(h: Any, stream: int = 0) -> Array:
    """Return random numbers, uniform in [0, 1), one for each element of the parameter.

    A number depends only on the rule's `seed`, the tensor's name, the element's position, the tensor's update count and
    the stream. So it has the same bits in each library and engine, for any number of threads and ranks, and in a
    resumed run. It has 24 bits, and comes from Threefry2x32-20 (Salmon et al., SC 2011).

    Parameters
    ----------
    h : namespace
        The `h` of `update`, or of a projection.
    stream : int, default 0
        The stream. Different streams are independent. Two calls with the same stream return the same numbers.

    Returns
    -------
    array
        A real array with the shape of the parameter, in the dtype of arithmetic.

    Raises
    ------
    TypeError, ValueError
        If `h` is of another type, or `stream` is not an integer of at least 0.

    Examples
    --------
    Inside `update`, noise of mean 0 and variance 1::

        noise = (ao.random(h) - 0.5) * 12**0.5
    """
    draws = vars(h).get(DRAWS) if hasattr(h, "__dict__") else None
    if draws is None:
        raise TypeError(f"random: `h` must be the `h` of a rule's update or of a projection; got {h!r}")
    made: Array = draws(whole("random: `stream`", stream))
    return made


def rounded(xp: Any, p: Array, h: Any) -> Array:
    """Round a new parameter stochastically to the dtype in which it is stored; wide ones are returned as they are."""
    draws = vars(h)[DRAWS]
    return getattr(xp, f"round_{draws.stored}")(p, draws(ROUNDING)) if draws.stored in NARROW else p


@dataclass(frozen=True)
class Drawn:
    """Random numbers for an array of any library."""

    like: Array
    """The parameter, in the dtype of arithmetic."""
    stored: str
    """The dtype in which it is stored."""
    seed: int
    """The seed of the rule."""
    name: str
    """The name of the tensor."""
    t: Any
    """The number of the update, which may be traced, as may `first`."""
    first: Any = 0
    """The position of its first element, if it is a layer of a tensor."""

    def __call__(self, stream: int | str) -> Array:
        xp = place(self.like)[0]
        k0, k1 = key(self.seed, stream, self.name)
        low, high = self._positions(xp)
        t = signed(self.t) if isinstance(self.t, int) else xp.astype(self.t, xp.int32)
        return uniform(
            xp, threefry(low, xp.zeros_like(low) + t, k0 + high, k1), working_dtype(xp, self.like, real=True)
        )

    def _positions(self, xp: Any) -> tuple[Array, Any]:
        """The positions of the elements: their lower words, and their upper words, or the number 0 if these are 0."""
        n, shape, whole = size(self.like), tuple(self.like.shape), isinstance(self.first, int)
        where = beside(self.like)
        if not whole or n + self.first <= 1 << 31:
            first = self.first if whole else xp.astype(self.first, xp.int32)
            return xp.reshape(xp.arange(n, dtype=xp.int32, **where) + first, shape), 0
        if array_api_compat.is_jax_array(self.like):
            raise ValueError("random: with JAX, a tensor may have up to 2**31 elements")
        wide = xp.reshape(xp.arange(n, dtype=xp.int64, **where) + self.first, shape)
        low = (wide & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)  # as a signed integer of 32 bits
        return xp.astype(low, xp.int32), xp.astype(wide >> 32, xp.int32)
