"""Rules whose slots share an array with the parameter or another slot, at the start or after an update."""

import random

from tests.support.tracing import made

__all__ = ["ALIASES", "drawn_rule"]


def _zeros(*names):
    """A `slots` function that returns one array of zeros under all names."""

    def slots(xp, p):
        z = xp.zeros_like(p)
        return dict.fromkeys(names, z)

    return slots


def _start(*names):
    """A `slots` function that returns the parameter itself under all names."""
    return lambda xp, p: dict.fromkeys(names, p)


def _one_for_all(xp, p, g, s, h):
    m = 0.9 * s["a"] + g
    return p - h.lr * (m + s["c"]), {"a": m, "b": m, "c": s["a"]}


def _new_parameter(xp, p, g, s, h):
    q = p - h.lr * (g + 0.1 * s["a"] - 0.1 * s["b"])
    return q, {"a": q, "b": p}


def _numbers(xp, p):
    total = xp.sum(p)
    return {"m": total, "n": total}


def _rows(xp, p):
    rows = xp.sum(p, axis=-1)
    return {"r": rows, "q": rows}


ALIASES = {
    "the parameter": (_start("x0"), lambda xp, p, g, s, h: (p - h.lr * (g + p - s["x0"]), {"x0": s["x0"]})),
    "one array twice": (
        _zeros("a", "b"),
        lambda xp, p, g, s, h: (p - h.lr * (s["a"] + s["b"]), {"a": s["a"] + 1.0, "b": s["b"] + 10.0}),
    ),
    "a broadcast": (
        lambda xp, p: {"a": xp.broadcast_to(xp.sum(xp.zeros_like(p)), p.shape)},
        lambda xp, p, g, s, h: (p - h.lr * s["a"], {"a": s["a"] + g}),
    ),
    "a view": (
        lambda xp, p: {"a": xp.reshape(p, p.shape)},
        lambda xp, p, g, s, h: (p - h.lr * s["a"], {"a": xp.reshape(p, p.shape)}),
    ),
    "slots exchanged": (
        lambda xp, p: {"a": p + 1.0, "b": 2.0 * p},
        lambda xp, p, g, s, h: (p - h.lr * g * s["a"], {"a": s["b"], "b": s["a"]}),
    ),
    "all in a circle": (
        lambda xp, p: {"a": p + 1.0, "b": 2.0 * p, "c": p - 1.0},
        lambda xp, p, g, s, h: (s["a"], {"a": s["b"], "b": s["c"], "c": p}),
    ),
    "the gradient": (_zeros("a"), lambda xp, p, g, s, h: (p - h.lr * (g - s["a"]), {"a": g})),
    "the old parameter": (_zeros("a"), lambda xp, p, g, s, h: (p - h.lr * (g - s["a"]), {"a": p})),
    "the gradient as the parameter": (_zeros("a"), lambda xp, p, g, s, h: (g, {"a": p})),
    "one array for all": (_zeros("a", "b", "c"), _one_for_all),
    "the new parameter": (_start("a", "b"), _new_parameter),
    "an exchange between passes": (
        _start("a", "b"),
        lambda xp, p, g, s, h: (
            p - h.lr * g / (1.0 + xp.sum(s["a"] * s["a"])),
            {"a": s["b"], "b": s["a"] * xp.tanh(xp.sum(s["b"] * g))},
        ),
    ),
    "two values under one name": (  # pass 1 reads the new `a` of pass 0, and the old `a` is summed
        lambda xp, p: {"a": 2.0 * p, "b": p, "n": xp.sum(p)},
        lambda xp, p, g, s, h: (
            p - h.lr * p * xp.tanh(s["n"]),
            {"a": p, "b": g + 0.1 * p / (1.0 + xp.sqrt(xp.sum(g * g))), "n": 0.01 * xp.sum(s["a"])},
        ),
    ),
    "numbers": (
        _numbers,
        lambda xp, p, g, s, h: (p - h.lr * xp.tanh(s["m"]) * g, {"m": s["n"], "n": s["m"] + xp.sum(g)}),
    ),
    "hyper-parameters": (_numbers, lambda xp, p, g, s, h: (p - h.lr * g / s["m"], {"m": h.t + h.lr, "n": h.lr})),
    "rows exchanged": (_rows, lambda xp, p, g, s, h: (p - h.lr * g, {"r": s["q"], "q": s["r"]})),
    "rows": (_rows, lambda xp, p, g, s, h: (p - h.lr * g, {"r": s["q"], "q": s["r"] + xp.sum(g, axis=-1)})),
}
"""Rules by description: the functions `slots` and `update`."""


def drawn_rule(seed):
    """A random rule with up to four slots like the parameter and two numbers, which exchange or share values."""
    r = random.Random(seed)
    names = "abcd"[: r.randint(1, 4)]
    numbers = [name for name in "xy" if r.random() < 0.4]
    values = ["p", "g", *names]
    begins = {name: r.choice(["parameter", "zeros", "ones", "double"]) for name in names}
    ends = {
        name: (r.choice(["as it is"] * 3 + ["both", "new", "sum", "scaled"]), r.choices(values, k=3)) for name in names
    }
    totals = {name: r.choice([*numbers, *values, "step size"]) for name in numbers}
    step, along, pair = r.choice(["as it is", "step", "step", "scaled"]), r.choice(values), r.choices(values, k=2)

    def slots(xp, p):
        kinds = {"parameter": p, "zeros": xp.zeros_like(p), "ones": xp.zeros_like(p) + 1.0, "double": 2.0 * p}
        made = {name: kinds[kind] for name, kind in begins.items()}
        return made | {name: xp.sum(p) if name == "x" else xp.sum(kinds["zeros"]) for name in numbers}

    def update(xp, p, g, s, h):
        v = {"p": p, "g": g, **s}
        both, size = 0.5 * v[pair[0]] + v[pair[1]], xp.tanh(0.01 * sum((s[name] for name in numbers), 0.0 * xp.sum(g)))
        new = {
            "as it is": v[along],
            "step": p - h.lr * (1.0 + size) * v[along],
            "scaled": p - h.lr * v[along] / (1.0 + xp.sqrt(xp.sum(both * both))),
        }[step]

        def end(how, of):
            a, b, c = (v[name] for name in of)
            return {
                "as it is": a,
                "both": both,
                "new": new,
                "sum": 0.5 * a + 0.25 * b,
                "scaled": 0.5 * a + 0.1 * b / (1.0 + xp.sqrt(xp.sum(c * c))),
            }[how]

        out = {name: end(*about) for name, about in ends.items()}
        for name, of in totals.items():
            out[name] = h.lr * h.t if of == "step size" else s[of] if of in numbers else 0.01 * xp.sum(v[of])
        return new, out

    return made(update, slots)
