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

    H estimates the inverse of the Hessian from the last pairs :math:`s = x' - x` and :math:`y = g' - g`, by the
    two-loop recursion. A step is one evaluation, at the point p of the last step. If p satisfies the strong Wolfe
    conditions, it becomes x, and d is a new direction; otherwise another length a is tried on the same line.

    Parameters
    ----------
    lr : number, schedule or sequence, default 1
        The first length to try in each direction, in [0, inf). Without a line search, it is the length of each step,
        and the first step is multiplied by min(1, 1 / the sum of magnitudes of the gradient). With 0, parameters do not
        change.
    memory : int, default 10
        The number of stored pairs, from 1 to 100; with more than 20, `engine` must be ``"array_api"``. The computation
        between the passes grows with the square of this number.
    joint : bool, default True
        All tensors with a gradient are one vector: inner products are sums over all of them. With False each tensor is
        a separate problem; with `stacked`, each layer is, in both cases.
    line_search : {"strong_wolfe", None}
        How lengths are chosen in steps with a value. In other steps, and with None, the length is `lr`, as in
        ``torch.optim.LBFGS``.
    curvature : number, schedule or sequence, default 0.9
        The largest remaining part of the slope at an accepted point, in (0, 1).
    first_step : number, schedule or sequence, default 1
        The largest length of the first step, in the units of the unknowns, in (0, inf). The length is 2 abs(f) / ‖g‖ if
        that is less: the minimum of a parabola whose least value is zero. If the start is good, use a smaller one, so
        that the run does not leave the valley.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    The rule is for exact gradients, not for those of batches. The line search needs the value: ``opt.step(grads,
    value=f)``. `arrayopt.minimize` passes it, and stops when the problem has converged. Values and slopes that are not
    finite make the length shorter. If the set of tensors with a gradient changes, the memory is cleared, and the step
    is a first one.

    The slot ``x`` is the last accepted point; ``accepted`` counts these, and ``ended`` is 1 if no length decreases the
    value. The ring ``s`` has directions, ``lengths`` their lengths, and ``y`` changes of the gradient; the last
    direction is at index ``place``, the last change at ``latest``. A new pair replaces the oldest, unless its product
    is not positive. A step is two passes over memory: the first computes inner products with the newest pair and the
    gradient, the second the direction. Products of older pairs are stored in ``sy`` and ``yy``.

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
