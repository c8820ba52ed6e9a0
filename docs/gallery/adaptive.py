"""Published optimizers that adapt to second moments, each as a rule of one's own."""

from dataclasses import dataclass

import arrayopt as ao
from arrayopt.rules.words import debias, ema, rms

written = dataclass(frozen=True, kw_only=True, repr=False)


@written
class Moments(ao.Rule):
    """What the rules below have in common: the averages of gradients and of their squares."""

    lr: ao.Hyper = ao.real("[0, inf)", 1e-3)
    beta1: ao.Hyper = ao.real("[0, 1)", 0.9)
    beta2: ao.Hyper = ao.real("[0, 1)", 0.999)
    eps: ao.Hyper = ao.real("(0, inf)", 1e-8)
    squares = ("v",)

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p), "v": xp.zeros_like(p)}

    def averages(self, g, s, h):
        return ema(s["m"], g, h.beta1), ema(s["v"], g * g, h.beta2)


@written
class Yogi(Moments):
    """Adam whose second moment changes by as much as the gradient's square (Zaheer et al. 2018)."""

    eps: ao.Hyper = ao.real("(0, inf)", 1e-3)

    def update(self, xp, p, g, s, h):
        m = ema(s["m"], g, h.beta1)
        v = s["v"] - (1.0 - h.beta2) * xp.sign(s["v"] - g * g) * (g * g)
        u = debias(m, h.beta1, h.t) / (xp.sqrt(debias(v, h.beta2, h.t)) + h.eps)
        return p - h.lr * u, {"m": m, "v": v}


@written
class QHAdam(Moments):
    """Quasi-hyperbolic Adam: averages mixed with the gradient (Ma, Yarats 2019)."""

    beta1: ao.Hyper = ao.real("[0, 1)", 0.995)
    nu1: ao.Hyper = ao.real("[0, 1]", 0.7)
    nu2: ao.Hyper = ao.real("[0, 1]", 1.0)

    def update(self, xp, p, g, s, h):
        m, v = self.averages(g, s, h)
        along = h.nu1 * debias(m, h.beta1, h.t) + (1.0 - h.nu1) * g
        square = h.nu2 * debias(v, h.beta2, h.t) + (1.0 - h.nu2) * (g * g)
        return p - h.lr * along / (xp.sqrt(square) + h.eps), {"m": m, "v": v}


@written
class Grams(Moments):
    """Adam's step, as long as it is, in the direction of the gradient's sign (Cao et al. 2024)."""

    weight_decay: ao.Hyper = ao.real("[0, inf)", 0.0)

    def update(self, xp, p, g, s, h):
        m, v = self.averages(g, s, h)
        u = debias(m, h.beta1, h.t) / (xp.sqrt(debias(v, h.beta2, h.t)) + h.eps)
        return p - h.lr * (xp.abs(u) * xp.sign(g) + h.weight_decay * p), {"m": m, "v": v}


@written
class AdaBound(Moments):
    """Adam between bounds that close in on SGD's learning rate (Luo et al. 2019)."""

    final_lr: ao.Hyper = ao.real("(0, inf)", 0.1)
    gamma: ao.Hyper = ao.real("(0, inf)", 1e-3)

    def update(self, xp, p, g, s, h):
        m, v = self.averages(g, s, h)
        scale = debias(h.lr, h.beta1, h.t) / debias(1.0, h.beta2, h.t) ** 0.5
        step = scale / (xp.sqrt(v) + h.eps)
        low = h.final_lr * (1.0 - 1.0 / (h.gamma * h.t + 1.0))
        high = h.final_lr * (1.0 + 1.0 / (h.gamma * h.t))
        return p - xp.minimum(xp.maximum(step, low), high) * m, {"m": m, "v": v}


@written
class StableAdamW(Moments):
    """AdamW with Adafactor's clipping of steps (Wortsman et al. 2023)."""

    weight_decay: ao.Hyper = ao.real("[0, inf)", 0.01)

    def update(self, xp, p, g, s, h):
        m, v = self.averages(g, s, h)
        square = debias(v, h.beta2, h.t)
        lr = h.lr / xp.maximum(rms(xp, g / xp.sqrt(xp.maximum(square, h.eps**2))), 1.0)
        u = debias(m, h.beta1, h.t) / (xp.sqrt(square) + h.eps)
        return p * (1.0 - lr * h.weight_decay) - lr * u, {"m": m, "v": v}


@written
class LaProp(Moments):
    """Momentum of gradients that have been divided, not divided momentum (Ziyin et al. 2020)."""

    def update(self, xp, p, g, s, h):
        v = ema(s["v"], g * g, h.beta2)
        m = ema(s["m"], g / (xp.sqrt(debias(v, h.beta2, h.t)) + h.eps), h.beta1)
        return p - h.lr * debias(m, h.beta1, h.t), {"m": m, "v": v}


@written
class ADOPT(Moments):
    """Adam that converges with any β₂: it divides by the moment before (Taniguchi et al. 2024)."""

    beta2: ao.Hyper = ao.real("[0, 1)", 0.9999)
    eps: ao.Hyper = ao.real("(0, inf)", 1e-6)

    def update(self, xp, p, g, s, h):
        first, limit = h.t == 1, (h.t - 1) ** 0.25
        divided = g / xp.maximum(xp.sqrt(s["v"]), h.eps)
        divided = xp.minimum(xp.maximum(divided, -limit), limit)
        m = xp.where(first, s["m"], ema(s["m"], divided, h.beta1))
        v = xp.where(first, g * g, ema(s["v"], g * g, h.beta2))
        return p - h.lr * m, {"m": m, "v": v}


@written
class AdaMod(Moments):
    """Adam whose steps are not longer than their average (Ding et al. 2019)."""

    beta3: ao.Hyper = ao.real("[0, 1)", 0.999)

    def slots(self, xp, p):
        return {**super().slots(xp, p), "length": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        m, v = self.averages(g, s, h)
        scale = debias(h.lr, h.beta1, h.t) / debias(1.0, h.beta2, h.t) ** 0.5
        step = scale / (xp.sqrt(v) + h.eps)
        length = ema(s["length"], step, h.beta3)
        return p - xp.minimum(step, length) * m, {"m": m, "v": v, "length": length}
