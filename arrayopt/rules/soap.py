"""SOAP: Adam in the basis of Shampoo's eigenvectors."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, choice, flag, real, structural, whole
from arrayopt.rules.base import Rule
from arrayopt.rules.bases import first_basis, next_basis
from arrayopt.rules.matrices import as_matrices, as_tensor
from arrayopt.rules.words import bias_correction, branch, ema, on_scalar, sqrt


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class SOAP(Rule):
    r"""Adam in the basis of Shampoo's eigenvectors, which are updated every few steps (Vyas et al. 2024).

    .. math::

        m &\leftarrow \beta_1 m + (1-\beta_1)\, g, \qquad
        v \leftarrow \beta_2 v + (1-\beta_2)\, (Q_L^\top g\, Q_R)^2 \\
        p &\leftarrow p - \eta\, \frac{\sqrt{c_2}}{c_1}\,
             Q_L \frac{Q_L^\top m\, Q_R}{\sqrt{v} + \epsilon}\, Q_R^\top, \qquad
        p \leftarrow p - \eta \lambda\, p, \qquad c_i = 1 - \beta_i^{t-1} \\
        L &\leftarrow \beta L + (1-\beta)\, g g^\top, \qquad R \leftarrow \beta R + (1-\beta)\, g^\top g \\
        Q_L &\leftarrow \operatorname{qr}(L\, Q_L), \qquad
        Q_R \leftarrow \operatorname{qr}(R\, Q_R) \qquad \text{every } f\text{-th time}

    Parameters
    ----------
    lr : number, schedule or sequence, default 3e-3
        The learning rate η, in [0, inf).
    beta1, beta2 : number, schedule or sequence, default 0.95, 0.95
        Decay of the first and second moment, in [0, 1).
    shampoo_beta : number, schedule or sequence, optional
        Decay β of L and R, in [0, 1). By default it is `beta2`.
    eps : number, schedule or sequence, default 1e-8
        Added to the root of the second moment, in (0, inf).
    weight_decay : number, schedule or sequence, default 0.01
        Decoupled weight decay λ, in [0, inf), scaled by the learning rate, and applied to the parameter after the step.
    bias_correction : bool, default True
        Correct the moments by c₁ and c₂. With False, these are 1.
    precondition_frequency : int, default 10
        The number f of steps from one change of Q_L and Q_R to the next, from 1.
    max_precondition_dim : int, default 10000
        The longest side of a matrix that has a basis, from 1. For a longer side, Q is the identity, and no L or R is
        stored.
    matrix : {"flatten", "last"}
        How tensors of rank ≥ 3 are treated: as one matrix of the first axis against all others, as for convolutions; or
        as a batch of matrices along the last two axes.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong kind or outside its interval; and for tensors of a library without ``linalg.eigh`` and
        ``linalg.qr``.

    Notes
    -----
    The first update of a tensor (t = 1) does not change the parameter: L and R start with its gradient, and Q_L and Q_R
    are their eigenvectors. Adam's moments start at t = 2, also for tensors of rank < 2, which have no basis.

    The columns of Q are sorted by decreasing eigenvalue at first, later by decreasing qᵀLq, and v with them. Their
    signs are such that Σ qᵢ/i ≥ 0. Directions without a gradient so far do not depend on rounding errors, so libraries
    agree; if eigenvalues are equal, the basis depends on the library.

    In directions in which all gradients are zero, such as all but one if the rows of a matrix are equal, both moments
    are rounding errors, and so is their quotient, unless `eps` is larger. Steps there depend on the engine and the
    library. Use a larger `eps`, such as 1e-4, or a `max_precondition_dim` below that side.

    The array's library runs the first update of a tensor, and those that change the basis. CPU engines fuse the others.

    References
    ----------
    Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv:2409.11321, algorithms 3 and 4.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> opt = ao.Optimizer(np.eye(2), ao.SOAP(lr=0.1, weight_decay=0.0), engine="numpy")
    >>> opt.step(np.array([[3.0, 1.0], [1.0, -1.0]]))  # Q_L and Q_R are known now
    array([[1., 0.],
           [0., 1.]])
    >>> opt.step(np.array([[3.0, 1.0], [1.0, -1.0]])).round(2)
    array([[ 0.91, -0.04],
           [-0.04,  1.09]])
    """

    lr: Hyper = real("[0, inf)", 3e-3)
    beta1: Hyper = real("[0, 1)", 0.95)
    beta2: Hyper = real("[0, 1)", 0.95)
    shampoo_beta: Hyper | None = real("[0, 1)", None)
    eps: Hyper = real("(0, inf)", 1e-8)
    weight_decay: Hyper = real("[0, inf)", 0.01)
    bias_correction: bool = flag(True)
    precondition_frequency: int = structural(10, partial(whole, first=1))
    max_precondition_dim: int = structural(10000, partial(whole, first=1))
    matrix: str = choice("flatten", "last")

    squares: ClassVar[tuple[str, ...]] = ("v",)
    wide: ClassVar[tuple[str, ...]] = ("l", "r", "ql", "qr")

    def refuses(self, xp: Any, p: Array) -> str:
        lacking = [x for x in ("eigh", "qr") if not hasattr(getattr(xp, "linalg", None), x)]
        if p.ndim < 2 or not lacking:
            return ""
        return f"is of a library that has no linalg.{lacking[0]}"

    def storage(self, rank: int, dtype: str = "float64") -> dict[str, str]:
        """The slots of a tensor that `state_dtype` narrows, each with the dtype that it is stored in.

        In a basis, 8 bits are too few for `m`: its error is as large in all directions, and is divided by roots of v,
        which are small in some.
        """
        found = super().storage(rank, dtype)
        return {slot: stored for slot, stored in found.items() if rank < 2 or (slot, stored) != ("m", "int8")}

    def as_written(self, t: int) -> bool:
        return t == 1 or (t - 1) % self.precondition_frequency == 0

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        found = {"m": xp.zeros_like(p), "v": xp.zeros_like(p)}
        for side, x in self._sides(xp, as_matrices(xp, p, self.matrix)).items():
            rows = xp.zeros_like(xp.sum(x, axis=-1))
            found[side] = xp.expand_dims(rows, axis=-1) * xp.expand_dims(rows, axis=-2)
            found[f"q{side}"] = xp.zeros_like(found[side])
        return found

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        new_p, new = branch(h.t == 1, lambda: (p, self._begun(xp, g, s, h)), lambda: self._stepped(xp, p, g, s, h))
        return new_p, new

    def _sides(self, xp: Any, x: Array) -> dict[str, Array]:
        """For each side of a matrix that gets a basis the matrix, lying so that this side is that of its rows."""
        if x.ndim < 2:
            return {}
        both = {"l": x, "r": xp.matrix_transpose(x)}
        return {side: y for side, y in both.items() if y.shape[-2] <= self.max_precondition_dim}

    def _grams(self, xp: Any, g: Array, s: dict[str, Array], h: Any) -> dict[str, Array]:
        """L and R, one step on."""
        beta = h.beta2 if h.shampoo_beta is None else h.shampoo_beta
        sides = self._sides(xp, as_matrices(xp, g, self.matrix))
        return {side: ema(s[side], xp.matmul(x, xp.matrix_transpose(x)), beta) for side, x in sides.items()}

    def _begun(self, xp: Any, g: Array, s: dict[str, Array], h: Any) -> dict[str, Array]:
        """The state after the first update."""
        grams = self._grams(xp, g, s, h)
        return {**s, **grams, **{f"q{side}": first_basis(xp, x) for side, x in grams.items()}}

    def _stepped(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        """All later updates."""
        k = h.t - 1
        m = ema(s["m"], g, h.beta1)
        turned_m, turned_g = (self._turned(xp, x, s) for x in (m, g))
        v = ema(as_matrices(xp, s["v"], self.matrix), turned_g * turned_g, h.beta2)
        u = self._turned(xp, turned_m / (sqrt(xp, v) + h.eps), s, back=True)
        scale = h.lr
        if self.bias_correction:
            scale = scale * on_scalar("sqrt", bias_correction(h.beta2, k)) / bias_correction(h.beta1, k)
        moved = p - scale * as_tensor(xp, u, p)
        new = {"m": m, "v": v, **self._grams(xp, g, s, h), **{x: s[x] for x in s if x[0] == "q"}}
        if "ql" in new or "qr" in new:
            new = branch(k % self.precondition_frequency == 0, lambda: _refreshed(xp, new), lambda: new)
        return moved - h.lr * h.weight_decay * moved, {**new, "v": as_tensor(xp, new["v"], p)}

    def _turned(self, xp: Any, x: Array, s: dict[str, Array], *, back: bool = False) -> Array:
        """x as matrices in the basis of the eigenvectors; or `back` from there."""
        x = as_matrices(xp, x, self.matrix)
        if "ql" in s:
            x = xp.matmul(s["ql"] if back else xp.matrix_transpose(s["ql"]), x)
        if "qr" in s:
            x = xp.matmul(x, xp.matrix_transpose(s["qr"]) if back else s["qr"])
        return x


def _refreshed(xp: Any, s: dict[str, Array]) -> dict[str, Array]:
    """The state with a step of power iteration of each basis; the second moment goes with its columns."""
    new = dict(s)
    for side, axis in (("l", -2), ("r", -1)):
        if side in s:
            new[f"q{side}"], order = next_basis(xp, s[side], s[f"q{side}"])
            order = xp.expand_dims(order, axis=-3 - axis)
            new["v"] = xp.take_along_axis(new["v"], order, axis=axis)
    return new
