"""The rules as plain NumPy loops: what one would write without a library."""

from collections.abc import Callable

import numpy as np

from benchmarks.contest import Contestant, Running
from benchmarks.ours import STATE
from benchmarks.problems import Problem

__all__ = ["contestants"]

Slots = dict[str, np.ndarray]


def contestants(rule: str, problem: Problem) -> list[Contestant]:
    """The loop of a rule."""
    size = 4.0 * problem.elements
    return [Contestant("NumPy loop", lambda: _running(rule, problem), held=size * (1 + STATE[rule]), extra=0.8 * size)]


def _running(rule: str, problem: Problem) -> Running:
    update, params, t = UPDATES[rule], problem.params(), 0
    slots = [_zeros(rule, p) for p in params]

    def step() -> None:
        nonlocal t
        t += 1
        for p, g, s in zip(params, problem.grads, slots, strict=True):
            update(p, g, s, t)

    return Running(step, lambda: params)


def _zeros(rule: str, p: np.ndarray) -> Slots:
    if rule in ("LARS", "SGD"):
        return {"buf": np.zeros_like(p)}
    if rule == "CAME" and p.ndim >= 2:
        rows, columns = p.sum(axis=-1), p.sum(axis=-2)
        factored = {"r": rows, "c": columns, "ir": rows, "ic": columns}
        return {"m": np.zeros_like(p)} | {name: np.zeros_like(x) for name, x in factored.items()}
    return {"m": np.zeros_like(p), "v": np.zeros_like(p)}


def _sgd(p: np.ndarray, g: np.ndarray, s: Slots, t: int, lr: float = 0.01, momentum: float = 0.9) -> None:
    s["buf"] *= momentum
    s["buf"] += g
    p -= lr * s["buf"]


def _lars(p: np.ndarray, g: np.ndarray, s: Slots, t: int, lr: float = 0.1, decay: float = 1e-4) -> None:
    a, b = np.linalg.norm(p), np.linalg.norm(g)
    ratio = 1e-3 * a / (b + decay * a) if a > 0 and b > 0 else 1.0
    s["buf"] *= 0.9
    s["buf"] += ratio * (g + decay * p)
    p -= lr * s["buf"]


def _averages(g: np.ndarray, s: Slots) -> None:
    s["m"] *= 0.9
    s["m"] += (1 - 0.9) * g
    s["v"] *= 0.999
    s["v"] += (1 - 0.999) * g * g


def _root(s: Slots, t: int, eps: float) -> np.ndarray:
    return np.sqrt(s["v"] / (1 - 0.999**t)) + eps


def _adamw(p: np.ndarray, g: np.ndarray, s: Slots, t: int, lr: float = 1e-3, decay: float = 0.01) -> None:
    _averages(g, s)
    p -= lr * (s["m"] / (1 - 0.9**t) / _root(s, t, 1e-8) + decay * p)


def _ratio(p: np.ndarray, u: np.ndarray) -> float:
    a, b = np.linalg.norm(p), np.linalg.norm(u)
    return a / b if a > 0 and b > 0 else 1.0


def _lamb(p: np.ndarray, g: np.ndarray, s: Slots, t: int, lr: float = 1e-3, decay: float = 0.01) -> None:
    _averages(g, s)
    u = s["m"] / (1 - 0.9**t) / _root(s, t, 1e-6) + decay * p
    p -= lr * _ratio(p, u) * u


def _lans(p: np.ndarray, g: np.ndarray, s: Slots, t: int, lr: float = 1e-3, decay: float = 0.01) -> None:
    g = g / np.linalg.norm(g)
    _averages(g, s)
    root = _root(s, t, 1e-6)
    u = s["m"] / (1 - 0.9**t) / root + decay * p
    w = g / root + decay * p
    p -= lr * (0.9 * _ratio(p, u) * u + (1 - 0.9) * _ratio(p, w) * w)


def _towards(average: np.ndarray, x: np.ndarray, beta: float) -> None:
    average *= beta
    average += (1 - beta) * x


def _over_root(x: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    rows = np.sqrt(rows / rows.mean(axis=-1, keepdims=True))
    return x / rows[..., None] / np.sqrt(columns)[..., None, :]


def _came(p: np.ndarray, g: np.ndarray, s: Slots, t: int, lr: float = 2e-4) -> None:
    square = g * g + 1e-30
    if p.ndim >= 2:
        _towards(s["r"], square.mean(axis=-1), 0.999)
        _towards(s["c"], square.mean(axis=-2), 0.999)
        u = _over_root(g, s["r"], s["c"])
    else:
        _towards(s["v"], square, 0.999)
        u = g / np.sqrt(s["v"])
    u /= max(1.0, np.linalg.norm(u) / u.size**0.5)
    _towards(s["m"], u, 0.9)
    d = s["m"]
    if p.ndim >= 2:
        doubt = (u - s["m"]) ** 2 + 1e-16
        _towards(s["ir"], doubt.mean(axis=-1), 0.9999)
        _towards(s["ic"], doubt.mean(axis=-2), 0.9999)
        d = _over_root(s["m"], s["ir"], s["ic"])
    p -= lr * d


UPDATES: dict[str, Callable[..., None]] = {
    "LAMB": _lamb,
    "LANS": _lans,
    "CAME": _came,
    "LARS": _lars,
    "AdamW": _adamw,
    "SGD": _sgd,
}
