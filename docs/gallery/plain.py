"""Published optimizers with norms, signs and momentum, each as a rule of one's own."""

from dataclasses import dataclass

import arrayopt as ao
from arrayopt.rules.words import ema, nonzero, norm

written = dataclass(frozen=True, kw_only=True, repr=False)


@written
class Signum(ao.Rule):
    """Steps by the sign of the momentum (Bernstein et al. 2018)."""

    lr: ao.Hyper = ao.real("[0, inf)", 1e-3)
    momentum: ao.Hyper = ao.real("[0, 1)", 0.9)
    weight_decay: ao.Hyper = ao.real("[0, inf)", 0.0)

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        m = ema(s["m"], g, h.momentum)
        return p - h.lr * (xp.sign(m) + h.weight_decay * p), {"m": m}


@written
class SGDW(ao.Rule):
    """SGD with decoupled weight decay (Loshchilov, Hutter 2019)."""

    lr: ao.Hyper = ao.real("[0, inf)", 1e-2)
    momentum: ao.Hyper = ao.real("[0, 1)", 0.9)
    weight_decay: ao.Hyper = ao.real("[0, inf)", 0.01)

    def slots(self, xp, p):
        return {"buf": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        buf = h.momentum * s["buf"] + g
        return (1.0 - h.lr * h.weight_decay) * p - h.lr * buf, {"buf": buf}


@written
class NovoGrad(ao.Rule):
    """Gradients divided by a second moment of the whole tensor (Ginsburg et al. 2019)."""

    lr: ao.Hyper = ao.real("[0, inf)", 1e-2)
    beta1: ao.Hyper = ao.real("[0, 1)", 0.95)
    beta2: ao.Hyper = ao.real("[0, 1)", 0.98)
    eps: ao.Hyper = ao.real("(0, inf)", 1e-8)
    weight_decay: ao.Hyper = ao.real("[0, inf)", 0.0)

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p), "v": xp.sum(xp.zeros_like(p))}

    def update(self, xp, p, g, s, h):
        square = xp.sum(g * g)
        v = xp.where(h.t == 1, square, ema(s["v"], square, h.beta2))
        m = h.beta1 * s["m"] + g / (xp.sqrt(v) + h.eps) + h.weight_decay * p
        return p - h.lr * m, {"m": m, "v": v}


@written
class Fromage(ao.Rule):
    """Steps as long as the tensor, times the learning rate (Bernstein et al. 2020)."""

    lr: ao.Hyper = ao.real("[0, inf)", 1e-2)

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        size, length = norm(xp, p), norm(xp, g)
        ratio = xp.where((size > 0) & (length > 0), size / nonzero(xp, length), 1.0)
        return (p - h.lr * ratio * g) / (1.0 + h.lr**2) ** 0.5, {}
