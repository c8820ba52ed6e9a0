"""SGD, plain, with momentum, or with Nesterov's."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import at_first, is_zero


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class SGD(Rule):
    r"""Stochastic gradient descent, optionally with momentum.

    .. math::

        g &\leftarrow g + w p, \qquad
        b \leftarrow g \text{ at } t = 1, \text{ then } \mu b + (1 - d)\, g \\
        p &\leftarrow p - \eta\, b, \qquad \text{or } p - \eta\, (g + \mu b) \text{ with Nesterov's momentum}

    Parameters
    ----------
    lr : number, schedule or sequence
        The learning rate η, in [0, inf); required.
    momentum : number, schedule or sequence, default 0
        μ, in [0, 1]. The number 0 means no momentum and keeps no state.
    dampening : number, schedule or sequence, default 0
        d, in [0, 1].
    nesterov : bool, default False
        Nesterov's momentum; needs `momentum`.
    weight_decay : number, schedule or sequence, default 0
        w, in [0, inf); added to the gradient (L2).
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong kind or outside its interval, or `nesterov` without momentum.

    Notes
    -----
    As in PyTorch, the first buffer is the gradient itself, whatever the dampening. Without momentum the formula still
    holds, while PyTorch ignores `dampening` then. MindSpore's ``Momentum`` is dampening = 0.

    References
    ----------
    Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.Optimizer(np.ones(2), ao.SGD(lr=0.1)).step(np.array([1.0, -1.0]))
    array([0.9, 1.1])
    """

    lr: Hyper = real("[0, inf)")
    momentum: Hyper = real("[0, 1]", 0.0, zero_is_off=True)
    dampening: Hyper = real("[0, 1]", 0.0)
    nesterov: bool = flag(False)
    weight_decay: Hyper = real("[0, inf)", 0.0)

    complex_ok: ClassVar[bool] = True

    def check(self) -> None:
        if self.nesterov and is_zero(self.momentum):
            raise ValueError("SGD: `nesterov` needs a momentum; got momentum=0.0")

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {} if is_zero(self.momentum) else {"buf": xp.zeros_like(p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        g = g + h.weight_decay * p
        new = at_first(h.t, 1.0, 1.0 - h.dampening) * g
        if is_zero(self.momentum):
            return p - h.lr * new, {}
        buf = h.momentum * s["buf"] + new
        return p - h.lr * (g + h.momentum * buf if self.nesterov else buf), {"buf": buf}
