"""A second implementation of all update rules, as float64 loops in plain Python, with which the package is compared.

A tensor is its shape and a flat list of numbers in C order. The code shares nothing with the package, and each line is
a line of the rule's definition. `h` holds the options under the package's names, such as `h.lr`.
"""

import math

from tests.support import witness_more, witness_soap
from tests.support.plain import cautious, clamp, corrected, corrections, ema, nonzero, norm, projected, rms, square

MOMENTS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01, "bias_correction": True}
TRUST = {"adapt": True, "min_norm": None, "max_norm": None, "min_ratio": None, "max_ratio": None}
BUFFER = {"weight_decay": 0.0}  # besides `lr`, which has no default
FACTORED = {"lr": None, "eps1": 1e-30, "eps_scale": 1e-3, "clip_threshold": 1.0, "weight_decay": 0.0}
CAME = {"beta1": 0.9, "beta2": 0.999, "beta3": 0.9999, "eps2": 1e-16, "decay_rate": None}
CONSTANT_LR = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
RELATIVE_LR = {"scale_parameter": True, "relative_step": True, "warmup_init": False}
AROUND = {"grad_centralization": False, "clip_value": None, "clip_tensor_norm": None, "clip_unit_ratio": None}
AROUND |= {"lookahead_steps": None, "lookahead_alpha": 0.5, "ema_decay": None, "project": None}
AROUND |= {"rounding": "nearest", "seed": 0}  # the witness rounds to nearest, for which the seed has no effect
MUON = {"momentum": 0.95, "nesterov": True, "bias_correction": False, "weight_decay": 0.1, "ns_steps": 5, "eps": 1e-7}
MUON |= {"ns_coefficients": (3.4445, -4.775, 2.0315), "scale": "original", "matrix": "flatten", "eps_added": False}
MUON |= {"caution": False}
ADAM = {"eps": 1e-8, "amsgrad": False, "nesterov": False, "eps_root": 0.0}
LARS = {"momentum": 0.9, "trust_coefficient": 1e-3, "eps": 0.0, "adapt": True, "decayed_norm": False}
LARS |= {"nesterov": False, "trust_clip": False, "clip_after_ratio": False, "lr_in_momentum": False}
LARS |= {"caution": False}
DEFAULTS = {
    "LAMB": MOMENTS | TRUST | {"grad_averaging": True, "eps_root": 0.0, "caution": False},
    "LANS": MOMENTS | TRUST | {"sequential": False},
    "CAME": FACTORED | CAME | CONSTANT_LR,
    "LARS": BUFFER | LARS,
    "AdamW": MOMENTS | ADAM | {"caution": False, "mars": None},
    "Adam": MOMENTS | ADAM | {"weight_decay": 0.0},
    "SGD": BUFFER | {"momentum": 0.0, "dampening": 0.0, "nesterov": False},
    "Muon": MUON,
    "MuonH": MUON | {"radius": None},
    "NorMuon": MUON | {"beta2": 0.95, "eps2": 1e-10},
    "Adafactor": FACTORED
    | {"beta1": None, "decay_rate": 0.8, "factored": True, "lr_in_momentum": False, "variant": "paper"}
    | RELATIVE_LR,
    "SOAP": witness_soap.DEFAULTS,
    **witness_more.DEFAULTS,
}


class Options:
    """The options of one step, with the rule's defaults for those that are missing."""

    def __init__(self, rule_name: str, given: dict) -> None:
        values = DEFAULTS[rule_name] | AROUND | given
        unknown = set(given) - set(DEFAULTS[rule_name]) - set(AROUND) - {"lr"}
        if unknown:
            raise TypeError(f"witness: {rule_name} has no option {sorted(unknown)}")
        self.__dict__.update(values)


def step(
    rule_name: str, options: dict, shape: tuple[int, ...], p: list, g: list, state: dict, t: int
) -> tuple[list, dict]:
    """Make one step on one tensor; return (new p, new state). `state` is {} at first; `t` is 1 in the first update."""
    h = Options(rule_name, options)
    s = state or zero_slots(rule_name, h, shape, p) | around_slots(h, p)
    if len(p) == 0:
        return p, s
    if h.grad_centralization and len(shape) >= 2:
        g = centralize(shape, g)
    if rule_name != "LANS" and not (rule_name == "LARS" and h.clip_after_ratio):
        g = clip(g, h.clip_value)
    if h.clip_tensor_norm is not None and norm(g) > h.clip_tensor_norm:
        g = [x * (h.clip_tensor_norm / norm(g)) for x in g]
    if h.clip_unit_ratio is not None:
        g = clip_units(shape, g, p, h.clip_unit_ratio)
    new_p, slots = RULES[rule_name](h, shape, p, g, s, t)
    if h.lookahead_steps is not None:
        slots["slow"] = s["slow"]
        if t % h.lookahead_steps == 0:
            new_p = slots["slow"] = [a + h.lookahead_alpha * (b - a) for a, b in zip(s["slow"], new_p, strict=True)]
    if rule_name not in witness_more.PROJECT_THEMSELVES:
        new_p = projected(h, new_p)
    if h.ema_decay is not None:
        slots["ema"] = ema(s["ema"], new_p, h.ema_decay)
    return new_p, slots


def step_of_layers(rule_name, options, shape, p, g, states, t):
    """As `step`, for each layer of a stacked tensor, with its own slots and its own t, which is None to skip it."""
    if len(p) == 0:
        return p, states
    new, count = [], shape[0]
    for i in range(count):
        q, own = part(p, i, count), states.get(i, {})
        if t[i] is not None:
            q, states[i] = step(rule_name, options, shape[1:], q, part(g, i, count), own, t[i])
        new += q
    return new, states


def part(x, i, count):
    """The i-th of `count` equal stretches of a list."""
    return x[i * len(x) // count : (i + 1) * len(x) // count]


def around_slots(h, p):
    """The slots that options add to any rule: copies of the parameter."""
    return {name: list(p) for name, on in (("slow", h.lookahead_steps), ("ema", h.ema_decay)) if on is not None}


def clip_units(shape, g, p, limit):
    """g, with the norm of each unit (index of the first axis) limited to `limit` times p's, or times 1e-3 if larger."""
    size = math.prod(shape[1:]) if len(shape) > 1 else len(g)
    out = []
    for i in range(0, len(g), size):
        most, g_norm = limit * max(norm(p[i : i + size]), 1e-3), norm(g[i : i + size])
        out += [x * (most / g_norm) if g_norm > most else x for x in g[i : i + size]]
    return out


def zero_slots(rule_name, h, shape, p):
    """The initial state of a tensor."""
    whole = math.prod(shape)
    if rule_name in witness_more.SLOTS:
        return witness_more.SLOTS[rule_name](h, p)
    if rule_name == "SOAP":
        return witness_soap.slots(h, shape)
    if rule_name in ("SGD", "LARS"):
        return {"buf": [0.0] * whole}
    if rule_name == "Muon":
        apart = h.scale == "last" and h.matrix == "flatten" and len(shape) > 2
        return {"m": [0.0] * whole} | ({"k": [lying(shape)]} if apart else {})
    if rule_name == "MuonH":
        return {"m": [0.0] * whole} | ({"radius": [0.0] * matrices(h, shape)[0]} if h.radius is None else {})
    if rule_name == "NorMuon":
        count, rows, _ = matrices(h, shape)
        return {"m": [0.0] * whole, "v": [0.0] * (count * rows)}
    if rule_name in ("LAMB", "LANS", "AdamW", "Adam"):
        slots = {"m": [0.0] * whole, "v": [0.0] * whole}
        if rule_name in ("AdamW", "Adam") and h.amsgrad:
            slots["v_max"] = [0.0] * whole
        if rule_name == "AdamW" and h.mars is not None:
            slots["previous"] = [0.0] * whole
        return slots
    slots = {} if h.beta1 is None else {"m": [0.0] * whole}
    if len(shape) < 2 or (rule_name == "Adafactor" and not h.factored):
        return slots | {"v": [0.0] * whole}
    rows, columns = math.prod(shape[:-1]), math.prod(shape[:-2] + shape[-1:])
    slots |= {"r": [0.0] * rows, "c": [0.0] * columns}
    if rule_name == "CAME":
        slots |= {"ir": [0.0] * rows, "ic": [0.0] * columns}
    return slots


def centralize(shape, g):
    """g - mean(g over all axes but the first)."""
    size = math.prod(shape[1:])
    means = [sum(g[i * size : (i + 1) * size]) / size for i in range(shape[0])]
    return [x - means[k // size] for k, x in enumerate(g)]


def clip(g, limit):
    """g with elements limited to [-limit, limit]; of a complex one, the magnitude is limited."""
    if limit is None:
        return g
    if any(isinstance(x, complex) for x in g):
        return [x * (limit / abs(x)) if abs(x) > limit else x for x in g]
    return [clamp(x, -limit, limit) for x in g]


def trust_ratio(h, p_norm, u_norm):
    """ratio(phi(|p|), |u|), or 1 with adapt=False."""
    if not h.adapt:
        return 1.0
    a, b = clamp(p_norm, h.min_norm, h.max_norm), u_norm
    return clamp(a / b if a > 0 and b > 0 else 1.0, h.min_ratio, h.max_ratio)


def lamb(h, shape, p, g, s, t):
    n = range(len(p))
    c1, c2 = corrections(h, t)
    m = [h.beta1 * s["m"][i] + (1 - h.beta1 if h.grad_averaging else 1) * g[i] for i in n]
    v = ema(s["v"], [square(x) for x in g], h.beta2)
    u = cautious(h, [(m[i] / c1) / (math.sqrt(v[i] / c2 + h.eps_root) + h.eps) for i in n], g)
    u = [u[i] + h.weight_decay * p[i] for i in n]
    r = trust_ratio(h, norm(p), norm(u))
    return [p[i] - h.lr * r * u[i] for i in n], {"m": m, "v": v}


def lans(h, shape, p, g, s, t):
    n = range(len(p))
    c1, c2 = corrections(h, t)
    g_norm = nonzero(norm(g))
    g = clip([x / g_norm for x in g], h.clip_value)
    m = ema(s["m"], g, h.beta1)
    v = ema(s["v"], [square(x) for x in g], h.beta2)
    d = [math.sqrt(v[i] / c2) + h.eps for i in n]
    u_m = [(m[i] / c1) / d[i] + h.weight_decay * p[i] for i in n]
    r_m = trust_ratio(h, norm(p), norm(u_m))
    p_mid = [p[i] - h.lr * h.beta1 * r_m * u_m[i] for i in n]
    p_decayed = p_mid if h.sequential else p
    u_g = [g[i] / d[i] + h.weight_decay * p_decayed[i] for i in n]
    r_g = trust_ratio(h, norm(p), norm(u_g))
    return [p_mid[i] - h.lr * (1 - h.beta1) * r_g * u_g[i] for i in n], {"m": m, "v": v}


def adamw(h, shape, p, g, s, t):
    n, given = range(len(p)), g
    g = corrected(h, g, s.get("previous"))
    c1, c2 = corrections(h, t)
    m = ema(s["m"], g, h.beta1)
    v = ema(s["v"], [square(x) for x in g], h.beta2)
    slots = {"m": m, "v": v}
    if h.amsgrad:
        v = slots["v_max"] = [max(v[i], s["v_max"][i]) for i in n]
    m_hat = [x / c1 for x in m]
    if h.nesterov:
        c1_next = corrections(h, t + 1)[0]
        m_hat = [h.beta1 * m[i] / c1_next + (1 - h.beta1) * g[i] / c1 for i in n]
    u = cautious(h, [m_hat[i] / (math.sqrt(v[i] / c2 + h.eps_root) + h.eps) for i in n], given)
    slots |= {} if h.mars is None else {"previous": list(given)}
    return [p[i] - h.lr * (u[i] + h.weight_decay * p[i]) for i in n], slots


def adam(h, shape, p, g, s, t):
    g = [g[i] + h.weight_decay * p[i] for i in range(len(p))]
    h.weight_decay, h.caution, h.mars = 0.0, False, None
    return adamw(h, shape, p, g, s, t)


def sgd(h, shape, p, g, s, t):
    n = range(len(p))
    g = [g[i] + h.weight_decay * p[i] for i in n]
    buf = g if t == 1 else [h.momentum * s["buf"][i] + (1 - h.dampening) * g[i] for i in n]
    d = [g[i] + h.momentum * buf[i] for i in n] if h.nesterov else buf
    return [p[i] - h.lr * d[i] for i in n], {"buf": buf}


def lars(h, shape, p, g, s, t):
    n = range(len(p))
    g_decayed = [g[i] + h.weight_decay * p[i] for i in n]
    p_norm, g_norm = norm(p), norm(g_decayed if h.decayed_norm else g)
    decay = 0.0 if h.decayed_norm else h.weight_decay * p_norm
    trust = 1.0
    if h.adapt and p_norm != 0 and g_norm != 0:
        trust = h.trust_coefficient * p_norm / (g_norm + decay + h.eps)
    if h.adapt and h.trust_clip:
        trust = min(trust / h.lr, 1.0) if h.lr else 1.0
    if h.clip_after_ratio:
        g = clip(g, h.clip_value)
        g_decayed = [g[i] + h.weight_decay * p[i] for i in n]
    inside, outside = (h.lr, 1.0) if h.lr_in_momentum else (1.0, h.lr)
    buf = [h.momentum * s["buf"][i] + inside * trust * g_decayed[i] for i in n]
    d = [inside * trust * g_decayed[i] + h.momentum * buf[i] for i in n] if h.nesterov else buf
    d = cautious(h, d, g)
    return [p[i] - outside * d[i] for i in n], {"buf": buf}


def row_means(shape, x):
    """mean(x, -1), of shape[:-1]."""
    columns = shape[-1]
    return [sum(x[k * columns : (k + 1) * columns]) / columns for k in range(len(x) // columns)]


def column_means(shape, x):
    """mean(x, -2), of shape[:-2] + shape[-1:]."""
    rows, columns = shape[-2:]
    return [
        sum(x[(b * rows + i) * columns + j] for i in range(rows)) / rows
        for b in range(len(x) // (rows * columns))
        for j in range(columns)
    ]


def over_factored_root(shape, x, r, c):
    """x (R / mean(R, -1))^-1/2 C^-1/2."""
    rows, columns = shape[-2:]
    out = []
    for b in range(len(x) // (rows * columns)):
        r_mean = nonzero(sum(r[b * rows : (b + 1) * rows]) / rows)
        for i in range(rows):
            for j in range(columns):
                r_root = math.sqrt(nonzero(r[b * rows + i] / r_mean))
                c_root = math.sqrt(nonzero(c[b * columns + j]))
                out.append(x[(b * rows + i) * columns + j] / r_root / c_root)
    return out


def factored_update(h, shape, g, s, beta2):
    """Steps 1 to 3 of CAME, which are Adafactor's: return u and the slots of the second moment."""
    q = [square(x) + h.eps1 for x in g]
    if "r" in s:
        r = ema(s["r"], row_means(shape, q), beta2)
        c = ema(s["c"], column_means(shape, q), beta2)
        u, slots = over_factored_root(shape, g, r, c), {"r": r, "c": c}
    else:
        v = ema(s["v"], q, beta2)
        u, slots = [g[i] / math.sqrt(nonzero(v[i])) for i in range(len(g))], {"v": v}
    if h.clip_threshold is not None:
        divisor = max(rms(u) / h.clip_threshold, 1.0)
        u = [x / divisor for x in u]
    return u, slots


def step_size(h, p, t):
    """lr_t of CAME and Adafactor."""
    lr = min(1e-6 * t if h.warmup_init else 1e-2, 1 / math.sqrt(t)) if h.relative_step else h.lr
    return lr * max(rms(p), h.eps_scale) if h.scale_parameter else lr


def came(h, shape, p, g, s, t):
    n = range(len(p))
    lr_t = step_size(h, p, t)
    beta2 = h.beta2 if h.decay_rate is None else 1 - t ** (-h.decay_rate)
    u, slots = factored_update(h, shape, g, s, beta2)
    m = slots["m"] = ema(s["m"], u, h.beta1)
    d = m
    if len(shape) >= 2:
        instability = [square(u[i] - m[i]) + h.eps2 for i in n]
        slots["ir"] = ema(s["ir"], row_means(shape, instability), h.beta3)
        slots["ic"] = ema(s["ic"], column_means(shape, instability), h.beta3)
        d = over_factored_root(shape, m, slots["ir"], slots["ic"])
    return [p[i] - lr_t * (d[i] + h.weight_decay * p[i]) for i in n], slots


def pytorchs_adafactor(h, shape, p, g, s, t):
    """The step of ``torch.optim.Adafactor``."""
    beta2, q = 1 - t ** (-h.decay_rate), [square(x) for x in g]
    if len(shape) >= 2:
        *batch, rows, columns = shape
        r, c = ema(s["r"], row_means(shape, q), beta2), ema(s["c"], column_means(shape, q), beta2)
        v, slots = [], {"r": r, "c": c}
        for b in range(math.prod(batch)):
            own = r[b * rows : (b + 1) * rows]
            mean = nonzero(max(sum(own) / rows, h.eps1))
            v += [x / mean * c[b * columns + j] for x in own for j in range(columns)]
    else:
        v = ema(s["v"], q, beta2)
        slots = {"v": v}
    u = [g[i] / math.sqrt(nonzero(max(v[i], h.eps1**2))) for i in range(len(g))]
    length = min(h.lr, 1 / math.sqrt(t)) * max(rms(p), h.eps_scale) / max(rms(u) / h.clip_threshold, 1.0)
    return [p[i] * (1 - h.lr * h.weight_decay) - length * u[i] for i in range(len(p))], slots


def adafactor(h, shape, p, g, s, t):
    if h.variant == "pytorch":
        return pytorchs_adafactor(h, shape, p, g, s, t)
    n = range(len(p))
    lr_t = step_size(h, p, t)
    u, slots = factored_update(h, shape, g, s, 1 - t ** (-h.decay_rate))
    inside, outside = (lr_t, 1.0) if h.lr_in_momentum else (1.0, lr_t)
    u = [inside * x for x in u]
    if h.beta1 is not None:
        u = slots["m"] = ema(s["m"], u, h.beta1)
    return [p[i] - outside * (u[i] + h.weight_decay * p[i]) for i in n], slots


def matrices(h, shape):
    """The number of a tensor's matrices, of their rows and of their columns."""
    if h.matrix == "flatten":
        return 1, shape[0], math.prod(shape[1:])
    return math.prod(shape[:-2]), *shape[-2:]


def product(a, b):
    """The product of two matrices, as lists of rows."""
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def turned(x):
    """The transpose."""
    return [list(column) for column in zip(*x, strict=True)]


def newton_schulz(h, x):
    """An approximation of the orthogonal matrix nearest to x, by Newton-Schulz iterations."""
    length = norm([v for row in x for v in row])
    length = length + h.eps if h.eps_added else max(length, h.eps)
    x = [[v / length for v in row] for row in x]
    tall = len(x) > len(x[0])
    x = turned(x) if tall else x
    several = isinstance(h.ns_coefficients[0], tuple)
    for a, b, c in h.ns_coefficients if several else [h.ns_coefficients] * h.ns_steps:
        gram = product(x, turned(x))
        square_ = product(gram, gram)
        n = range(len(gram))
        polynomial = [[b * gram[i][j] + c * square_[i][j] for j in n] for i in n]
        moved = product(polynomial, x)
        x = [[a * v + w for v, w in zip(*rows, strict=True)] for rows in zip(x, moved, strict=True)]
    return turned(x) if tall else x


def orthogonal(h, shape, g, s, t):
    """The new momentum, and the nearly orthogonal matrices, each a list of rows."""
    m = d = ema(s["m"], g, h.momentum)
    if h.bias_correction:
        now, later = 1 - h.momentum**t, 1 - h.momentum ** (t + 1)
        d = ema([x / later for x in m], [x / now for x in g], h.momentum) if h.nesterov else [x / now for x in m]
    elif h.nesterov:
        d = ema(m, g, h.momentum)
    count, rows, columns = matrices(h, shape)
    every = [d[r * columns : (r + 1) * columns] for r in range(count * rows)]
    return m, [newton_schulz(h, every[b * rows : (b + 1) * rows]) for b in range(count)]


def lying(shape):
    """Jordan's factor from the lengths of the last two axes."""
    return math.sqrt(max(1, shape[-2] / shape[-1])) if shape[-1] else 1.0


def orthogonal_step(h, p, every, shape=(), g=None):
    """The new parameter after a step along matrices."""
    rows, columns = len(every[0]), len(every[0][0])
    k = {"original": math.sqrt(max(1, rows / columns)), "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns))}
    k |= {"last": lying(shape) if shape else 1.0}
    step = [h.lr * k.get(h.scale, 1.0) * v for x in every for row in x for v in row]
    step = step if g is None else cautious(h, step, g)
    return [p[i] - h.lr * h.weight_decay * p[i] - step[i] for i in range(len(p))]


def muon(h, shape, p, g, s, t):
    m, every = orthogonal(h, shape, g, s, t)
    return orthogonal_step(h, p, every, shape, g), {"m": m} | {k: s[k] for k in s if k == "k"}


def normuon(h, shape, p, g, s, t):
    m, every = orthogonal(h, shape, g, s, t)
    v = ema(s["v"], [sum(y * y for y in row) / len(row) for x in every for row in x], h.beta2)
    out = []
    for b, x in enumerate(every):
        n = len(x)
        y = [[z / (math.sqrt(v[b * n + r]) + h.eps2) for z in row] for r, row in enumerate(x)]
        scale = norm([z for row in x for z in row]) / (norm([z for row in y for z in row]) + h.eps2)
        out.append([[z * scale for z in row] for row in y])
    return orthogonal_step(h, p, out), {"m": m, "v": v}


def muonh(h, shape, p, g, s, t):
    m, every = orthogonal(h, shape, g, s, t)
    size, out, kept = len(p) // len(every), [], []
    for b, x in enumerate(every):
        q, step = p[b * size : (b + 1) * size], [v for row in x for v in row]
        radius = h.radius if h.radius is not None else s["radius"][b] or norm(q)
        kept.append(radius)
        far = radius / nonzero(norm(step)) if radius else 1.0
        q = [a - h.lr * far * b for a, b in zip(q, step, strict=True)]
        back = radius / nonzero(norm(q)) if radius else 1.0
        out += [back * v for v in q]
    return out, {"m": m} | ({"radius": kept} if h.radius is None else {})


RULES = {"LAMB": lamb, "LANS": lans, "CAME": came, "LARS": lars}
RULES |= {"AdamW": adamw, "Adam": adam, "SGD": sgd, "Adafactor": adafactor}
RULES |= {"Muon": muon, "NorMuon": normuon, "MuonH": muonh, "SOAP": witness_soap.soap, **witness_more.RULES}
