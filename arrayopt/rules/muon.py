"""Muon, NorMuon and MuonH: momentum, made orthogonal by Newton-Schulz iterations."""

from dataclasses import dataclass
from functools import partial
from typing import Any, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, choice, flag, real, structural, whole
from arrayopt.rules.base import Rule
from arrayopt.rules.matrices import as_matrices, as_tensor, lying, newton_schulz, refused, scale_of, triples
from arrayopt.rules.words import cautious, clamp, ema, expected, nonzero, norm, number


@dataclass(frozen=True, kw_only=True, repr=False)
class _Muon(Rule):
    """What Muon and its kin have in common: everything but how the step is taken from the orthogonal matrix."""

    lr: Hyper = real("[0, inf)")
    momentum: Hyper = real("[0, 1)", 0.95)
    nesterov: bool = flag(True)
    bias_correction: bool = flag(False)
    ns_steps: int = structural(5, partial(whole, first=1, last=100))
    ns_coefficients: tuple[Any, ...] = structural((3.4445, -4.775, 2.0315), triples)
    ns_dtype: str | None = choice(None, "bfloat16")
    eps: Hyper = real("(0, inf)", 1e-7)
    eps_added: bool = flag(False)
    matrix: str = choice("flatten", "last")

    def refuses(self, xp: Any, p: Array) -> str:
        return refused(xp, p, self.ns_dtype)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {"m": xp.zeros_like(p)}

    def _orthogonal(self, xp: Any, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, Array]:
        """The average of gradients; and what is near to an orthogonal matrix, along the last two axes."""
        m = ema(s["m"], g, h.momentum)
        several = isinstance(self.ns_coefficients[0], tuple)
        coefficients = self.ns_coefficients if several else (self.ns_coefficients,) * self.ns_steps
        d = expected(m, g, h.momentum, h.t, nesterov=self.nesterov, bias_correction=self.bias_correction)
        d = as_matrices(xp, d, self.matrix)
        size = norm(xp, d, axis=(-2, -1), keepdims=True)
        size = size + h.eps if self.eps_added else clamp(xp, size, h.eps, None)
        return m, newton_schulz(xp, d, coefficients, size, self.ns_dtype)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Muon(_Muon):
    r"""Momentum, made orthogonal by Newton-Schulz iterations (Jordan et al. 2024).

    .. math::

        m &\leftarrow \mu\, m + (1-\mu)\, g, \qquad d = \mu\, m + (1-\mu)\, g \\
        X &\leftarrow d \,/ \max(\lVert d \rVert, \epsilon), \qquad
             X \leftarrow a X + (b A + c A^2)\, X, \quad A = X X^\top \quad \text{several times} \\
        p &\leftarrow p - \eta \lambda\, p - \eta\, k\, X

    Parameters
    ----------
    lr : number, schedule or sequence
        The learning rate η, in [0, inf).
    momentum : number, schedule or sequence, default 0.95
        Decay μ of the average of gradients, in [0, 1).
    nesterov : bool, default True
        Nesterov's momentum, as above. With False, d = m.
    bias_correction : bool, default False
        Divide m by 1 - μ^t; with ``nesterov`` by 1 - μ^(t+1), and g by 1 - μ^t (as optax does).
    weight_decay : number, schedule or sequence, default 0.1
        Decoupled weight decay λ, in [0, inf), scaled by the learning rate.
    ns_steps : int, default 5
        The number of iterations, in [1, 100].
    ns_coefficients : tuple of float, default (3.4445, -4.775, 2.0315)
        a, b and c, or a sequence of such triples, one for each iteration, which replaces `ns_steps`.
    ns_dtype : {None, "bfloat16"}
        The dtype of the iterations; None is the dtype of arithmetic. PyTorch and JAX have bfloat16, on engine
        ``"array_api"``, and so has engine ``"cupy"``.
    eps : number, schedule or sequence, default 1e-7
        The least norm that d is divided by, in (0, inf).
    eps_added : bool, default False
        Divide d by ‖d‖ + ε instead (optax).
    scale : {"original", "match_rms_adamw", "none", "last"}
        The factor k: √max(1, rows/columns); 0.2·√max(rows, columns), which makes steps as long as AdamW's (Liu et al.,
        arXiv:2502.16982); 1; or √max(1, rows/columns) of the tensor's last two axes, as in Jordan's code, which for a
        convolution kernel are height and width.
    matrix : {"flatten", "last"}
        How tensors of rank ≥ 3 are treated: as one matrix of the first axis against all others, as for convolutions; or
        as a batch of matrices along the last two axes.
    caution : bool, default False
        As in `AdamW`.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong kind or outside its interval; and for tensors of rank < 2, which need another rule.

    Notes
    -----
    The iteration does not converge: it quickly brings the singular values of d to between about 0.7 and 1.2.

    As in PyTorch, the momentum is an average; the first version had m ← μ m + g. In optax, the rows of a kernel are its
    inputs: its k is √max(1, columns/rows).

    References
    ----------
    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
    https://kellerjordan.github.io/posts/muon/.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.Optimizer(np.eye(2), ao.Muon(lr=0.1, weight_decay=0.0)).step(np.array([[3.0, 0.0], [0.0, -1.0]])).round(2)
    array([[0.92, 0.  ],
           [0.  , 1.11]])
    """

    weight_decay: Hyper = real("[0, inf)", 0.1)
    scale: str = choice("original", "match_rms_adamw", "none", "last")
    caution: bool = flag(False)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        own = super().slots(xp, p)
        return {**own, "k": number(xp, p) + lying(p)} if self._lies(p) else own

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        m, x = self._orthogonal(xp, g, s, h)
        own = {"k": s["k"]} if self._lies(p) else {}
        k = own.get("k", scale_of(x, "original" if self.scale == "last" else self.scale))
        step = cautious(xp, as_tensor(xp, k * x, p), g, self.caution)
        return p - h.lr * h.weight_decay * p - h.lr * step, {"m": m, **own}

    def _lies(self, p: Array) -> bool:
        """Whether k is that of other axes than those of the matrix."""
        return self.scale == "last" and self.matrix == "flatten" and p.ndim > 2


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class NorMuon(_Muon):
    r"""Muon with rows of about the same length: each is divided by the root of a running mean of its squares.

    .. math::

        X &\text{ as in Muon}, \qquad
        v_i \leftarrow \beta_2 v_i + (1-\beta_2)\, \frac{1}{k} \sum_j X_{ij}^2, \qquad
        Y_{ij} = \frac{X_{ij}}{\sqrt{v_i} + \epsilon_2} \\
        p &\leftarrow p - \eta \lambda\, p - \eta\, k\, \frac{\lVert X \rVert}{\lVert Y \rVert + \epsilon_2}\, Y

    Parameters
    ----------
    lr, momentum, nesterov, bias_correction, weight_decay, ns_steps, ns_coefficients, ns_dtype
        As in `Muon`, with the same defaults and ranges.
    eps, eps_added, scale, matrix
        As in `Muon`, with the same defaults and ranges.
    beta2 : number, schedule or sequence, default 0.95
        Decay β₂ of the mean of squares, in [0, 1).
    eps2 : number, schedule or sequence, default 1e-10
        Added to √v and to the norm that is divided by, in (0, inf).
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    The state ``v`` has one number for each row. There is no bias correction of v: the norm is that of X in any case.

    References
    ----------
    Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv:2510.05491, algorithm 1.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> opt = ao.Optimizer(np.eye(2), ao.NorMuon(lr=0.1, weight_decay=0.0))
    >>> opt.step(np.array([[3.0, 0], [0, -1.0]])).round(2) + 0.0
    array([[0.9, 0. ],
           [0. , 1.1]])
    """

    beta2: Hyper = real("[0, 1)", 0.95)
    weight_decay: Hyper = real("[0, inf)", 0.1)
    eps2: Hyper = real("(0, inf)", 1e-10)
    scale: str = choice("original", "match_rms_adamw", "none")

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        rows = xp.zeros_like(xp.sum(as_matrices(xp, p, self.matrix), axis=-1))
        return {"m": xp.zeros_like(p), "v": rows}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        m, x = self._orthogonal(xp, g, s, h)
        v = ema(s["v"], xp.mean(x * x, axis=-1), h.beta2)
        y = x / xp.expand_dims(xp.sqrt(v) + h.eps2, axis=-1)
        of_x, of_y = (norm(xp, z, axis=(-2, -1), keepdims=True) for z in (x, y))
        step = as_tensor(xp, scale_of(x, self.scale) * (of_x / (of_y + h.eps2)) * y, p)
        return p - h.lr * h.weight_decay * p - h.lr * step, {"m": m, "v": v}


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class MuonH(_Muon):
    r"""Muon on a sphere: the norm of each matrix is constant, without weight decay (Hyperball; Wen et al. 2026).

    .. math::

        X &\text{ as in Muon}, \qquad n(x) = x / \lVert x \rVert \\
        p &\leftarrow R\; n\big(p - \eta R\, n(X)\big)

    Parameters
    ----------
    eps, eps_added, matrix, grad_centralization
        As in `Muon`, with the same defaults and ranges.
    lr, momentum, nesterov, bias_correction, ns_steps, ns_coefficients, ns_dtype
        As in `Muon`, with the same defaults and ranges. The learning rate is relative to R.
    radius : number, schedule or sequence, optional
        R, in (0, inf). By default it is the norm of each matrix before its first step, stored in the slot ``radius``,
        so rounding errors do not add up.

    Notes
    -----
    Without `radius`, the first step of a matrix of zeros is p - ηX, and R is its norm from then on.

    References
    ----------
    Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball Optimization", arXiv:2606.16899.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> p = ao.Optimizer(np.eye(2), ao.MuonH(lr=0.1)).step(np.array([[3.0, 1.0], [0.0, -1.0]]))
    >>> round(float(np.linalg.norm(p) ** 2), 6)
    2.0
    """

    radius: Hyper | None = real("(0, inf)", None)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        one = {} if self.radius is not None else {"radius": xp.zeros_like(_sizes(xp, as_matrices(xp, p, self.matrix)))}
        return {"m": xp.zeros_like(p), **one}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        m, x = self._orthogonal(xp, g, s, h)
        q, of_x = as_matrices(xp, p, self.matrix), _sizes(xp, x)
        if self.radius is not None:
            radius, new = h.radius + 0.0 * of_x, {"m": m}
        else:
            radius = xp.where(s["radius"] > 0, s["radius"], _sizes(xp, q))
            new = {"m": m, "radius": radius}
        q = q - h.lr * _spread(xp, xp.where(radius > 0, radius / nonzero(xp, of_x), 1.0)) * x
        q = q * _spread(xp, xp.where(radius > 0, radius / nonzero(xp, _sizes(xp, q)), 1.0))
        return as_tensor(xp, q, p), new


def _sizes(xp: Any, x: Array) -> Array:
    """The norm of each matrix."""
    return norm(xp, x, axis=(-2, -1))


def _spread(xp: Any, x: Array) -> Array:
    """A number for each matrix, to be multiplied with its elements."""
    return xp.expand_dims(xp.expand_dims(x, axis=-1), axis=-1)
