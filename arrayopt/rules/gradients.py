"""Rules that do not change parameters: they measure or accumulate gradients, with the same engines as other rules."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import choose, norm


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class GradientNorms(Rule):
    """Reports ``grad_norm``, the Euclidean norm of the gradient. It is finite if all elements are finite."""

    complex_ok: ClassVar[bool] = True

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        return p, {}

    def norms(self, xp: Any, p: Array, g: Array, new_p: Array) -> dict[str, Array]:
        return {"grad_norm": norm(xp, g, all_sizes=True)}


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Accumulate(Rule):
    """Adds `factor` times the gradient to the slot ``sum``, which the first update overwrites."""

    factor: Hyper = real("(0, inf)")

    complex_ok: ClassVar[bool] = True

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {"sum": xp.zeros_like(p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        before = choose(h.t == 1, -0.0, s["sum"])
        return p, {"sum": before + h.factor * g}  # compilers use one fma here and in `MeanNorms`


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class MeanNorms(Rule):
    """Reports ``grad_norm``, the norm of the value that `Accumulate` would store in ``sum``; does not change ``sum``.

    With `first`, the gradient would be the first one of the sum.
    """

    factor: Hyper = real("(0, inf)")
    first: bool = flag(default=False)

    complex_ok: ClassVar[bool] = True

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {"sum": xp.zeros_like(p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        added = h.factor * g
        mean = added if self.first else s["sum"] + added
        return p, {"sum": s["sum"], "grad_norm": norm(xp, mean, all_sizes=True)}

    def norms(self, xp: Any, p: Array, g: Array, new_p: Array) -> dict[str, Array]:
        return {}
