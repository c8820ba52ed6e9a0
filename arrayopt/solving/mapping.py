"""The gradient mapping, whose largest element `minimize` reports as `grad_norm` if there is a projection."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, real
from arrayopt.rules.names import Values
from arrayopt.rules.one_unknown import OneUnknown
from arrayopt.rules.words import LARGEST, clamp, nonzero, real_name

ROUNDED = 64
"""If `tol` is below this many times the rounding error of the largest parameter, p - project(p - g) is too inexact."""


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class GradientMapping(OneUnknown):
    """A rule whose "new parameters" are (p - project(p - t g)) / t (Nesterov 2018, section 2.2.4).

    t is 1, unless `tol` is within the rounding error of p - g. Then t g has the size of p times the fourth root of the
    machine epsilon. For a convex set, the norm decreases with t, unless no bound is that near.
    """

    tol: Hyper = real("[0, inf)")

    complex_ok: ClassVar[bool] = True

    @property
    def projects_itself(self) -> bool:
        return True

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {}

    def update(
        self, xp: Any, p: Array, g: Array, s: dict[str, Any], h: Any
    ) -> tuple[Array, dict[str, Any]]:
        size, most = (self.over(h, xp.max(xp.abs(x)), "max") for x in (p, g))
        name = real_name(p)
        eps = float(np.finfo(name).eps)
        far = clamp(xp, eps**0.25 * size / nonzero(xp, most), 1.0, LARGEST[name])
        t = xp.where(ROUNDED * eps * size > h.tol, far, 1.0)
        new = p - t * g
        if self.project is not None:
            new = self.project(xp, new, Values(**{**vars(h), "lr": t}))
        return (p - new) / t, {}
