"""A second implementation of the rules of docs/gallery, as NumPy formulas that share no code with them."""

import math

import numpy as np


def average(old, new, beta, t):
    """An exponential moving average that began at zero, and its value with bias correction."""
    made = beta * old + (1 - beta) * new
    return made, made / (1 - beta**t)


def yogi(h, p, g, s, t):
    m, m_hat = average(s.get("m", 0.0), g, h["beta1"], t)
    v = np.asarray(s.get("v", np.zeros_like(g)))
    grows = np.where(v < g**2, 1.0, np.where(v > g**2, -1.0, 0.0))
    v = v + (1 - h["beta2"]) * grows * g**2
    return p - h["lr"] * m_hat / (np.sqrt(v / (1 - h["beta2"] ** t)) + h["eps"]), {"m": m, "v": v}


def qhadam(h, p, g, s, t):
    m, m_hat = average(s.get("m", 0.0), g, h["beta1"], t)
    v, v_hat = average(s.get("v", 0.0), g**2, h["beta2"], t)
    top = (1 - h["nu1"]) * g + h["nu1"] * m_hat
    return p - h["lr"] * top / (np.sqrt((1 - h["nu2"]) * g**2 + h["nu2"] * v_hat) + h["eps"]), {"m": m, "v": v}


def grams(h, p, g, s, t):
    m, m_hat = average(s.get("m", 0.0), g, h["beta1"], t)
    v, v_hat = average(s.get("v", 0.0), g**2, h["beta2"], t)
    u = np.copysign(m_hat / (np.sqrt(v_hat) + h["eps"]), g)
    return (1 - h["lr"] * h["weight_decay"]) * p - h["lr"] * u, {"m": m, "v": v}


def lengths(h, v, t):
    return h["lr"] * math.sqrt(1 - h["beta2"] ** t) / (1 - h["beta1"] ** t) / (np.sqrt(v) + h["eps"])


def adabound(h, p, g, s, t):
    m, _ = average(s.get("m", 0.0), g, h["beta1"], t)
    v, _ = average(s.get("v", 0.0), g**2, h["beta2"], t)
    low, high = (1 - 1 / (h["gamma"] * t + 1)), (1 + 1 / (h["gamma"] * t))
    return p - np.clip(lengths(h, v, t), h["final_lr"] * low, h["final_lr"] * high) * m, {"m": m, "v": v}


def stableadamw(h, p, g, s, t):
    m, m_hat = average(s.get("m", 0.0), g, h["beta1"], t)
    v, v_hat = average(s.get("v", 0.0), g**2, h["beta2"], t)
    size = math.sqrt(np.mean(g**2 / np.maximum(v_hat, h["eps"] ** 2)))
    lr = h["lr"] / max(1.0, size)
    return p - lr * h["weight_decay"] * p - lr * m_hat / (np.sqrt(v_hat) + h["eps"]), {"m": m, "v": v}


def laprop(h, p, g, s, t):
    v, v_hat = average(s.get("v", 0.0), g**2, h["beta2"], t)
    m, m_hat = average(s.get("m", 0.0), g / (np.sqrt(v_hat) + h["eps"]), h["beta1"], t)
    return p - h["lr"] * m_hat, {"m": m, "v": v}


def adopt(h, p, g, s, t):
    if t == 1:
        return p, {"m": 0.0 * g, "v": g**2}
    limit = (t - 1) ** 0.25
    u = np.clip(g / np.maximum(np.sqrt(s["v"]), h["eps"]), -limit, limit)
    m = h["beta1"] * s["m"] + (1 - h["beta1"]) * u
    return p - h["lr"] * m, {"m": m, "v": h["beta2"] * s["v"] + (1 - h["beta2"]) * g**2}


def adamod(h, p, g, s, t):
    m, _ = average(s.get("m", 0.0), g, h["beta1"], t)
    v, _ = average(s.get("v", 0.0), g**2, h["beta2"], t)
    step = lengths(h, v, t)
    mean, _ = average(s.get("length", 0.0), step, h["beta3"], t)
    return p - np.minimum(step, mean) * m, {"m": m, "v": v, "length": mean}


def signum(h, p, g, s, t):
    m = h["momentum"] * s.get("m", 0.0) + (1 - h["momentum"]) * g
    return p - h["lr"] * (m > 0) + h["lr"] * (m < 0) - h["lr"] * h["weight_decay"] * p, {"m": m}


def sgdw(h, p, g, s, t):
    buf = g + h["momentum"] * s.get("buf", 0.0)
    return p - h["lr"] * buf - h["lr"] * h["weight_decay"] * p, {"buf": buf}


def novograd(h, p, g, s, t):
    square = float(np.vdot(g, g))
    v = square if t == 1 else h["beta2"] * s["v"] + (1 - h["beta2"]) * square
    m = h["beta1"] * s.get("m", 0.0) + (g / (math.sqrt(v) + h["eps"]) + h["weight_decay"] * p)
    return p - h["lr"] * m, {"m": m, "v": v}


def fromage(h, p, g, s, t):
    p_norm, g_norm = math.sqrt(np.vdot(p, p)), math.sqrt(np.vdot(g, g))
    step = g * p_norm / g_norm if p_norm and g_norm else g
    return (p - h["lr"] * step) / math.sqrt(1 + h["lr"] ** 2), {}


WITNESSES = {"Yogi": yogi, "QHAdam": qhadam, "Grams": grams, "AdaBound": adabound, "StableAdamW": stableadamw}
WITNESSES |= {"LaProp": laprop, "ADOPT": adopt, "AdaMod": adamod, "Signum": signum, "SGDW": sgdw}
WITNESSES |= {"NovoGrad": novograd, "Fromage": fromage}
