"""Formulas of the witness, continued: Lion, RMSprop, NAdam, RAdam, Adan, AdEMAMix, ScheduleFreeAdamW, AdamH, FISTA,
AdaBelief, Sophia.

As in `tests.support.witness`, whose `step` calls them: flat lists in, new lists and slots out. A slot of one number is
a list of one.
"""

import math

from tests.support.plain import cautious, corrected, corrections, ema, nonzero, norm, projected, square

ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
RMSPROP = {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
RMSPROP |= {"centered": False, "eps_in_sqrt": False, "bias_correction": False, "initial_scale": 0.0, "decoupled": False}
RMSPROP |= {"lr_in_momentum": False}
RADAM = {"lr": 1e-3, "decoupled": False, "threshold": 5.0, "degenerated_to_sgd": True, "nesterov": False}
RADAM |= {"eps_root": 0.0}
ADAN = {"lr": 1e-3, "beta1": 0.98, "beta2": 0.92, "beta3": 0.99, "eps": 1e-8, "weight_decay": 0.0, "no_prox": False}
ADAN |= {"eps_root": 0.0, "weak_differences": False, "caution": False}
MIX = {"lr": 1e-3, "beta3": 0.9999, "alpha": 5.0, "alpha_warmup": None, "beta3_warmup": None, "decoupled": True}
FREE = {"lr": 2.5e-3, "warmup_steps": 0.0, "r": 0.0, "weight_lr_power": 2.0}
DEFAULTS = {
    "Lion": {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "decoupled": True}
    | {"caution": False, "mars": None},
    "RMSprop": RMSPROP,
    "NAdam": ADAM | {"lr": 2e-3, "momentum_decay": 4e-3, "decoupled": False, "caution": False},
    "RAdam": ADAM | RADAM,
    "Adan": ADAN,
    "AdEMAMix": ADAM | MIX | {"eps_root": 0.0},
    "ScheduleFreeAdamW": ADAM | FREE,
    "AdamH": ADAM | {"lr": 1e-2, "radius": None},
    "FISTA": {"restart": True},
    "AdaBelief": ADAM | {"lr": 1e-3, "eps": 1e-16, "eps_root": 1e-16, "decoupled": True, "nesterov": False},
    "Sophia": ADAM | {"lr": 1e-3, "beta1": 0.965, "gamma": 0.01, "clip_update": 1.0, "weight_decay": 1e-4},
}
SLOTS = {
    "Lion": lambda h, p: zeros(p, "m", *["previous"] * (h.mars is not None)),
    "AdaBelief": lambda h, p: zeros(p, "m", "v"),
    "Sophia": lambda h, p: zeros(p, "m", "hess"),
    "RMSprop": lambda h, p: zeros(p, "v", *["m"] * h.centered, *["buf"] * bool(h.momentum)),
    "NAdam": lambda h, p: zeros(p, "m", "v") | {"mu_product": [1.0]},
    "RAdam": lambda h, p: zeros(p, "m", "v"),
    "Adan": lambda h, p: zeros(p, "m", "d", "v", "previous"),
    "AdEMAMix": lambda h, p: zeros(p, "m", "m_slow", "v"),
    "ScheduleFreeAdamW": lambda h, p: zeros(p, "v") | {"z": list(p), "lr_max": [0.0], "points": [0.0]},
    "FISTA": lambda h, p: {"x": list(p), "theta": [1.0]},
    "AdamH": lambda h, p: zeros(p, "m", "v") | ({"radius": [0.0]} if h.radius is None else {}),
}
PROJECT_THEMSELVES = ("ScheduleFreeAdamW", "FISTA")


def zeros(p, *names):
    """Slots of zeros, with a value for each element."""
    return {name: [0.0] * len(p) for name in names}


def squares(x):
    return [square(e) for e in x]


def with_l2(h, p, g):
    """The gradient, plus the weight decay if that is not decoupled."""
    return g if h.decoupled else [b + h.weight_decay * a for a, b in zip(p, g, strict=True)]


def moved(h, p, u):
    """p - lr (u + weight_decay p), or p - lr u if the decay is in the gradient."""
    decay = h.weight_decay if h.decoupled else 0.0
    return [a - h.lr * (b + decay * a) for a, b in zip(p, u, strict=True)]


def lion(h, shape, p, g, s, t):
    g = with_l2(h, p, g)
    c = corrected(h, g, s.get("previous"))
    u = [x / nonzero(abs(x)) for x in ema(s["m"], c, h.beta1)]
    slots = {"m": ema(s["m"], c, h.beta2)} | ({} if h.mars is None else {"previous": list(g)})
    return moved(h, p, cautious(h, u, g)), slots


def rmsprop(h, shape, p, g, s, t):
    g = with_l2(h, p, g)
    n, c = range(len(p)), 1 - h.alpha**t if h.bias_correction else 1.0
    v = slots_v = ema(s["v"] if t > 1 else [h.initial_scale] * len(p), squares(g), h.alpha)
    slots = {"v": slots_v}
    v = [x / c for x in v]
    if h.centered:
        slots["m"] = ema(s["m"], g, h.alpha)
        v = [max(v[i] - square(slots["m"][i] / c), 0.0) for i in n]
    d = [math.sqrt(x + h.eps) if h.eps_in_sqrt else math.sqrt(x) + h.eps for x in v]
    u, decay = [g[i] / d[i] for i in n], h.weight_decay * h.decoupled
    if h.lr_in_momentum:
        u, decay = [h.lr * x for x in u], h.lr * decay
    if h.momentum:
        buf = slots["buf"] = [h.momentum * s["buf"][i] + u[i] for i in n]
        u = [u[i] + h.momentum * buf[i] for i in n] if h.nesterov else buf
    outside = 1.0 if h.lr_in_momentum else h.lr
    return [p[i] - outside * (u[i] + decay * p[i]) for i in n], slots


def nadam(h, shape, p, g, s, t):
    g = with_l2(h, p, g)
    m, v = ema(s["m"], g, h.beta1), ema(s["v"], squares(g), h.beta2)
    mu, mu_next = (h.beta1 * (1 - 0.5 * 0.96 ** (k * h.momentum_decay)) for k in (t, t + 1))
    product = s["mu_product"][0] * mu
    c2 = corrections(h, t)[1]
    m_hat = [mu_next * a / (1 - product * mu_next) + (1 - mu) * b / (1 - product) for a, b in zip(m, g, strict=True)]
    u = [a / (math.sqrt(c / c2) + h.eps) for a, c in zip(cautious(h, m_hat, g), v, strict=True)]
    return moved(h, p, u), {"m": m, "v": v, "mu_product": [product]}


def radam(h, shape, p, g, s, t):
    g = with_l2(h, p, g)
    m, v = ema(s["m"], g, h.beta1), ema(s["v"], squares(g), h.beta2)
    c1, c2 = corrections(h, t)
    m_hat = [x / c1 for x in m]
    if h.nesterov:
        c1_next = corrections(h, t + 1)[0]
        m_hat = [h.beta1 * a / c1_next + (1 - h.beta1) * b / c1 for a, b in zip(m, g, strict=True)]
    most = 2 / (1 - h.beta2) - 1
    rho = most - 2 * t * h.beta2**t / c2
    if rho > max(h.threshold, 4):
        r = math.sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho))
        u = [r * a * math.sqrt(c2) / (math.sqrt(b + h.eps_root) + h.eps) for a, b in zip(m_hat, v, strict=True)]
    else:
        u = m_hat
        if not h.degenerated_to_sgd:
            return p, {"m": m, "v": v}
    return moved(h, p, u), {"m": m, "v": v}


def adan(h, shape, p, g, s, t):
    n = range(len(p))
    delta = [g[i] - s["previous"][i] if t > 1 else 0.0 for i in n]
    m, d = ema(s["m"], g, h.beta1), ema(s["d"], delta, h.beta2)
    share = 1 - h.beta2 if h.weak_differences else h.beta2
    v = ema(s["v"], [square(g[i] + share * delta[i]) for i in n], h.beta3)
    c1, c2, c3 = (1 - beta**t for beta in (h.beta1, h.beta2, h.beta3))
    along = cautious(h, m, g)
    u = [(along[i] / c1 + share * d[i] / c2) / (math.sqrt(v[i] / c3 + h.eps_root) + h.eps) for i in n]
    decay = h.lr * h.weight_decay
    new = [p[i] * (1 - decay) - h.lr * u[i] if h.no_prox else (p[i] - h.lr * u[i]) / (1 + decay) for i in n]
    return new, {"m": m, "d": d, "v": v, "previous": list(g)}


def ademamix(h, shape, p, g, s, t):
    g = with_l2(h, p, g)
    alpha, beta3 = h.alpha, h.beta3
    if h.alpha_warmup is not None:
        alpha *= min(t / h.alpha_warmup, 1.0)
    if h.beta3_warmup is not None and t < h.beta3_warmup:  # half-lives grow linearly
        first, last = (math.log(0.5) / math.log(b) if b else 0.0 for b in (h.beta1, h.beta3))
        now = first + (last - first) * t / h.beta3_warmup
        beta3 = 0.5 ** (1 / now) if now else 0.0
    m, v, slow = ema(s["m"], g, h.beta1), ema(s["v"], squares(g), h.beta2), ema(s["m_slow"], g, beta3)
    c1, c2 = corrections(h, t)
    u = [(a / c1 + alpha * b) / (math.sqrt(c / c2 + h.eps_root) + h.eps) for a, b, c in zip(m, slow, v, strict=True)]
    return moved(h, p, u), {"m": m, "m_slow": slow, "v": v}


def schedule_free_adamw(h, shape, p, g, s, t):
    """The step of ScheduleFreeAdamW with the average x, computed as (p - (1 - beta1) z) / beta1."""
    n = range(len(p))
    v = ema(s["v"], squares(g), h.beta2)
    c2 = corrections(h, t)[1]
    lr = h.lr * (min(t / h.warmup_steps, 1.0) if h.warmup_steps else 1.0)
    lr_max = max(lr, s["lr_max"][0])
    weight, before = t**h.r * lr_max**h.weight_lr_power, 0.0
    if s["lr_max"][0] or h.weight_lr_power == 0:
        before = s["points"][0] * (t - 1) ** h.r * s["lr_max"][0] ** h.weight_lr_power
    c = weight / (before + weight) if before + weight else 0.0
    x = [(p[i] - (1 - h.beta1) * s["z"][i]) / h.beta1 for i in n]
    z = [s["z"][i] - lr * (g[i] / (math.sqrt(v[i] / c2) + h.eps) + h.weight_decay * p[i]) for i in n]
    z = projected(h, z)
    x = [(1 - c) * x[i] + c * z[i] for i in n]
    new = [(1 - h.beta1) * z[i] + h.beta1 * x[i] for i in n]
    return new, {"z": z, "v": v, "lr_max": [lr_max], "points": [1 / c if c else 0.0]}


def adamh(h, shape, p, g, s, t):
    m, v = ema(s["m"], g, h.beta1), ema(s["v"], squares(g), h.beta2)
    c1, c2 = corrections(h, t)
    u = [(a / c1) / (math.sqrt(b / c2) + h.eps) for a, b in zip(m, v, strict=True)]
    radius = h.radius if h.radius is not None else norm(p) if t == 1 else s["radius"][0]
    slots = {"m": m, "v": v} | ({"radius": [radius]} if h.radius is None else {})
    if not (radius and h.lr and norm(u)):
        return [a - h.lr * b for a, b in zip(p, u, strict=True)], slots
    c = h.lr * radius / nonzero(norm(u))
    q = [a - c * b for a, b in zip(p, u, strict=True)]
    return [radius * x / nonzero(norm(q)) for x in q], slots


def fista(h, shape, p, g, s, t):
    n = range(len(p))
    old, theta = s["x"], s["theta"][0]
    x = projected(h, [p[i] - h.lr * g[i] for i in n])
    if h.restart and sum(((p[i] - x[i]) * complex(x[i] - old[i]).conjugate()).real for i in n) > 0:
        theta = 1.0
    later = (1 + math.sqrt(1 + 4 * theta * theta)) / 2
    return [x[i] + (theta - 1) / later * (x[i] - old[i]) for i in n], {"x": x, "theta": [later]}


def adabelief(h, shape, p, g, s, t):
    g = with_l2(h, p, g)
    m = ema(s["m"], g, h.beta1)
    v = [x + h.eps_root for x in ema(s["v"], squares([a - b for a, b in zip(g, m, strict=True)]), h.beta2)]
    c1, c2 = corrections(h, t)
    m_hat = [x / c1 for x in m]
    if h.nesterov:
        c1_next = corrections(h, t + 1)[0]
        m_hat = [h.beta1 * a / c1_next + (1 - h.beta1) * b / c1 for a, b in zip(m, g, strict=True)]
    return moved(h, p, [a / (math.sqrt(b / c2) + h.eps) for a, b in zip(m_hat, v, strict=True)]), {"m": m, "v": v}


def sophia(h, shape, p, g, s, t):
    m, c1 = ema(s["m"], g, h.beta1), 1 - h.beta1**t if h.bias_correction else 1.0
    u = [(a / c1) / max(h.gamma * b, h.eps) for a, b in zip(m, s["hess"], strict=True)]
    u = [min(max(x, -h.clip_update), h.clip_update) for x in u]
    new = [a - h.lr * (b + h.weight_decay * a) for a, b in zip(p, u, strict=True)]
    return new, {"m": m, "hess": s["hess"]}


RULES = {"AdaBelief": adabelief, "Sophia": sophia}
RULES |= {"Lion": lion, "RMSprop": rmsprop, "NAdam": nadam, "RAdam": radam, "Adan": adan, "AdEMAMix": ademamix}
RULES |= {"ScheduleFreeAdamW": schedule_free_adamw, "AdamH": adamh, "FISTA": fista}
