"""L-BFGS: steps by what the last gradients have told of the curvature."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import numpy as np

from arrayopt.arrays import Array
from arrayopt.hyper import choice, structural, whole
from arrayopt.rules.line_search import MOST, Searching, Turn
from arrayopt.rules.pairs import RINGS, Direction, begun, direction, forgotten, newest, remembered
from arrayopt.rules.words import dot, real_name

__all__ = ["LBFGS", "MOST_FUSED"]

MOST_FUSED = 20
"""With more pairs, what is computed between the passes is too much to compile."""


def _memory(where: str, value: Any) -> int:
    return whole(where, value, first=1, last=100)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class LBFGS(Searching):
    r"""Quasi-Newton steps from the last gradients (Liu and Nocedal 1989), with a line search.

    .. math::

        d = -H g, \qquad p \leftarrow x + a d

    H estimates the inverse of the Hessian from the last pairs :math:`s = x' - x` and
    :math:`y = g' - g`, by the two-loop recursion. One step is one evaluation: of the point p that
    the last step has given. Where it satisfies the strong Wolfe conditions it becomes x, and a new
    direction begins; else another length a is tried on the same line.

    Parameters
    ----------
    lr : number, schedule or sequence, default 1
        The length that is tried first in each direction, in [0, inf). Without a line search, that of each step; the
        first one is times min(1, 1 / the sum of magnitudes of the gradient). With 0, a step changes no parameter.
    memory : int, default 10
        How many pairs are kept, from 1 to 100; with more than 20, `engine` must be ``"array_api"``. The work between
        the passes grows with the square: with 30 pairs it takes some 20 ms.
    joint : bool, default True
        All tensors that take part in a step under this class of rule are one unknown: inner products are sums over all
        of them. With False each tensor is a problem of its own; with `stacked`, each layer is in either case.
    line_search : {"strong_wolfe", None}
        How lengths are found in steps that are given the value. Others take `lr` as it is, and with None all do; this
        rule is ``torch.optim.LBFGS`` then.
    curvature : number, schedule or sequence, default 0.9
        The part of the slope that may be left where a length is taken, in (0, 1).
    first_step : number, schedule or sequence, default 1
        How far the very first step goes at most, in the units of the unknowns, in (0, inf). It goes 2 abs(f) / ‖g‖ if
        that is less: a parabola falls by all of f there. Make it smaller where the start is good, and the step would
        lead into another valley.
    grad_centralization : bool, default False
        See `Rule`, for this and the other options of every rule.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong kind or outside its interval.

    Notes
    -----
    The rule is for whole functions, and not for gradients of batches. A line search takes the
    value: ``opt.step(grads, value=f)``. `arrayopt.minimize` does so, and looks when to end.
    Values and slopes that are not finite make the length shorter. Where other tensors take part
    than in the last step, the memory is forgotten, and the step is a first one.

    The slot ``x`` is the last point taken; ``accepted`` counts these, and ``ended`` is 1 where no
    length makes the value less. The ring ``s`` holds directions, ``lengths`` how far each was
    followed, and ``y`` changes of the gradient; the last direction is at ``place``, the last change
    at ``latest``. Where a length is taken, a pair is added, in the place of the oldest, unless its
    product is not positive. A step is two passes over the memory: the first makes all inner
    products with the newest pair and the gradient, the second the direction. Products of older
    pairs are kept, in the rings of numbers ``sy`` and ``yy``.

    References
    ----------
    Liu, Nocedal, "On the limited memory BFGS method for large scale optimization", Mathematical
    Programming 45, 1989; on coefficients, as Chen, Wang, Zhou, "Large-scale L-BFGS using
    MapReduce", NIPS 2014. The line search: Moré, Thuente, "Line search algorithms with guaranteed
    sufficient decrease", ACM Trans. Math. Software 20, 1994.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> x = np.array([3.0, 4.0])
    >>> opt = ao.Optimizer(x, ao.LBFGS(), engine="numpy")
    >>> for _ in range(8):
    ...     x = opt.step(x * [1.0, 9.0], value=(x * x * [0.5, 4.5]).sum())
    >>> bool(abs(x).max() < 1e-6)
    True
    """

    memory: int = structural(10, _memory)
    line_search: str | None = choice("strong_wolfe", None)

    rings: ClassVar[tuple[str, ...]] = RINGS
    wide: ClassVar[tuple[str, ...]] = (*Searching.wide, "place", "latest", "lengths", "sy", "yy")

    @property
    def value_optional(self) -> bool:
        return self.line_search is not None

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        memory = begun(xp, p, self.memory)
        if self.line_search is not None:
            own = super().slots(xp, p)
            del own["d"]  # it is in the memory
            return {**own, **memory}
        return {"grad": xp.zeros_like(p), **memory, **self.company(xp, p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Any], h: Any) -> tuple[Array, dict[str, Any]]:
        if self.memory > MOST_FUSED and hasattr(g, "lean"):
            raise TypeError(f"LBFGS: a memory of more than {MOST_FUSED} pairs is not fused: engine='array_api' runs it")
        if self.line_search is None or h.value is None:
            return self._along(xp, p, g, s, h)
        new, slots = super().update(xp, p, g, {**s, "d": newest(xp, s)}, h)
        # those of a new direction begin at 0; so does `since`, where it goes along the gradient
        slots = forgotten(xp, slots["since"] == 0, slots)
        begins = slots["trials"] == 0
        return new, remembered(xp, s, slots, begins, slots.pop("d"), slots["length"])

    def _along(self, xp: Any, p: Array, g: Array, s: dict[str, Any], h: Any) -> tuple[Array, dict[str, Any]]:
        """A step of length `lr`, as PyTorch's rule."""
        first, later, company = self.begins(s, h)
        square, size = self.over(h, dot(xp, g, g)), self.over(h, xp.sum(xp.abs(g)))
        found = self._direction(xp, s, g, square, h, later=later, stored=later, least=(1e-10, 0.0))
        far = h.lr * xp.where(first, 1.0 / xp.maximum(size, 1.0), 1.0)
        slots = {**s, "grad": g, **found.slots, **company}
        if self.line_search is not None:
            # a search that was begun has ended
            accepted = xp.where(later, s["accepted"] + 1.0, s["accepted"])
            slots |= {"trials": float(MOST), "accepted": accepted, "ended": 0.0}
        return p - far * found.array, remembered(xp, s, slots, True, -found.array, far)

    def _direction(
        self, xp: Any, s: dict[str, Any], g: Array, square: Array, h: Any, *, later: Any, **options: Any
    ) -> Direction:
        """The direction, of what is remembered of steps that these tensors have made together."""
        if self.joint:
            s = forgotten(xp, ~later, s)
        return direction(xp, s, g, square, over=partial(self.each_over, h), **options)

    def turn(
        self,
        xp: Any,
        g: Array,
        s: dict[str, Any],
        h: Any,
        *,
        square: Array,
        later: Any,
        taken: Array,
        since: Array,
    ) -> Turn:
        # as Fortran's
        least = (0.0, float(np.finfo(real_name(g)).eps))
        found = self._direction(xp, s, g, square, h, later=later, stored=taken & later, least=least)
        falls = (found.slope > 0) & (found.slope < np.inf)
        return Turn(
            d=-xp.where(falls, found.array, g),
            slope=-xp.where(falls, found.slope, square),
            step=h.lr * xp.where(found.known & falls, 1.0, self.length(xp, h, h.value, square)),
            since=xp.where(falls, since, 0.0),
            slots=found.slots,
        )
