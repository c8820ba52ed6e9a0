"""Muon: momentum, made orthogonal by Newton-Schulz iterations."""

from dataclasses import dataclass
from typing import Any, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, choice, flag, real, structural
from arrayopt.rules.base import Rule
from arrayopt.rules.matrices import as_matrices, newton_schulz, refused, scale_of, triples, whole_number
from arrayopt.rules.words import debias, ema

__all__ = ["Muon"]


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Muon(Rule):
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
        a, b and c. Or a sequence of such triples, one for each iteration; their number counts then, and not `ns_steps`.
    ns_dtype : {None, "bfloat16"}
        The dtype of the iterations; None is the dtype of arithmetic. The array library must have it: PyTorch and JAX
        do. The update then runs as it is written, on engine ``"array_api"``.
    eps : number, schedule or sequence, default 1e-7
        The least norm that d is divided by, in (0, inf).
    scale : {"original", "match_rms_adamw", "none"}
        The factor k: √max(1, rows/columns); 0.2·√max(rows, columns), which makes steps as long as AdamW's (Liu et al.,
        arXiv:2502.16982); or 1.
    matrix : {"flatten", "last"}
        How tensors of rank ≥ 3 are seen: as one matrix of the first axis against all others, as for convolutions; or as
        a batch of matrices along the last two axes.
    grad_centralization : bool, default False
        See `Rule`, for this and the other options of every rule.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong kind or outside its interval; and for tensors of rank < 2, which need another rule, in
        a group of their own.

    Notes
    -----
    The iteration does not converge: it brings the singular values of d to between about 0.7 and 1.2, and that quickly.
    The result is near to the orthogonal factor of d, and not equal to it.

    As in PyTorch, the momentum is an average; the first version had m ← μ m + g. optax adds eps to the norm, and has
    kernels the other way round: its k is √max(1, columns/rows).

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

    lr: Hyper = real("[0, inf)")
    momentum: Hyper = real("[0, 1)", 0.95)
    nesterov: bool = flag(True)
    bias_correction: bool = flag(False)
    weight_decay: Hyper = real("[0, inf)", 0.1)
    ns_steps: int = structural(5, whole_number)
    ns_coefficients: tuple[Any, ...] = structural((3.4445, -4.775, 2.0315), triples)
    ns_dtype: str | None = choice(None, "bfloat16")
    eps: Hyper = real("(0, inf)", 1e-7)
    scale: str = choice("original", "match_rms_adamw", "none")
    matrix: str = choice("flatten", "last")

    def refuses(self, xp: Any, p: Array) -> str:
        return refused(xp, p, self.ns_dtype)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {"m": xp.zeros_like(p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        m = ema(s["m"], g, h.momentum)
        x = as_matrices(xp, self._direction(m, g, h), self.matrix)
        if isinstance(self.ns_coefficients[0], tuple):
            coefficients = self.ns_coefficients
        else:
            coefficients = (self.ns_coefficients,) * self.ns_steps
        x = newton_schulz(xp, x, coefficients, h.eps, self.ns_dtype)
        step = xp.reshape(scale_of(x, self.scale) * x, p.shape)
        return p - h.lr * h.weight_decay * p - h.lr * step, {"m": m}

    def _direction(self, m: Array, g: Array, h: Any) -> Array:
        """What is made orthogonal: the average of gradients, or what it would be if the gradient stayed."""
        if not self.bias_correction:
            return ema(m, g, h.momentum) if self.nesterov else m
        if not self.nesterov:
            return debias(m, h.momentum, h.t)
        return ema(debias(m, h.momentum, h.t + 1), debias(g, h.momentum, h.t), h.momentum)
