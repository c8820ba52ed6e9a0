"""Optimizers in plain NumPy with one mistake each, or none: what `diagnose` has to tell apart.

They share no code with the package. Each is a function of its hyper-parameters that gives ``step(params, grads)``.
"""

import numpy as np


def adam(lr=0.003, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.0, fault=""):
    """Adam with decoupled decay (AdamW), and what can be wrong with it."""
    m, v, total, last, t = {}, {}, {}, {}, [0]
    half = np.float16 if fault == "state in float16" else None

    def step(params, grads):
        t[0] += 1
        new = {}
        for i, (k, p) in enumerate(params.items()):
            g = grads[k]
            eta = lr * min(1.0, (t[0] - 1) / 5) if fault == "schedule late" else lr
            if fault == "not zeroed":
                g = total[k] = total.get(k, 0.0) + g
            if fault == "not unscaled":
                g = 1024.0 * g
            if fault == "uphill":
                g = -g
            if fault == "sign":
                g = np.sign(g)
            if fault == "late":
                g, last[k] = last.get(k, 0.0 * g), g
            if fault == "clipped by value":
                g = np.clip(g, -0.7, 0.7)
            if fault == "clipped by norm":
                g = g * min(1.0, 0.7 / np.linalg.norm(g))
            if fault == "clipped by the global norm":
                g = g * min(1.0, 0.7 / np.sqrt(sum(np.sum(x**2) for x in grads.values())))
            if fault == "coupled":
                g = g + decay * p
            b1, b2 = (beta2, beta1) if fault == "betas swapped" else (beta1, beta2)
            now = {"t + 1": t[0] + 1, "t - 1": max(t[0] - 1, 1), "1 - beta": 1}.get(fault, t[0])
            if fault == "t per tensor":
                now = (t[0] - 1) * len(params) + i + 1
            m[k] = b1 * m.get(k, g if "begin" in fault else 0.0) + (1 - b1) * g
            v[k] = b2 * v.get(k, g * g if fault == "both begin" else 0.0) + (1 - b2) * g * g
            c1, c2 = 1 - b1**now, 1 - b2**now
            if fault in ("no bias correction", "both begin", "m begins"):
                c1 = 1.0
            if fault in ("no bias correction", "both begin", "no second correction"):
                c2 = 1.0
            if fault == "no root":
                u = m[k] / c1 / (v[k] / c2 + eps)
            elif fault == "eps in root":
                u = m[k] / c1 / np.sqrt(v[k] / c2 + eps)
            elif fault == "eps falling":
                u = m[k] / c1 / (np.sqrt(v[k] / c2) + eps * np.sqrt(c2))
            elif fault == "eps early":
                u = m[k] / c1 / ((np.sqrt(v[k]) + eps) / np.sqrt(c2))
            else:
                u = m[k] / c1 / (np.sqrt(v[k] / c2) + eps)
            if half:
                m[k], v[k] = (np.asarray(x).astype(half).astype(float) for x in (m[k], v[k]))
            if fault == "decay without lr":
                new[k] = p - lr * u - decay * p
            elif fault == "coupled":
                new[k] = p - lr * u
            else:
                new[k] = p - eta * (u + (-decay if fault == "decay uphill" else decay) * p)
        return new

    return step


def lamb(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-6, decay=0.05, fault=""):
    """LAMB, and what can be wrong with its ratio."""
    m, v, t = {}, {}, [0]

    def step(params, grads):
        t[0] += 1
        updates = {}
        whole = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
        clip = min(1.0, 1.0 / whole) ** 2 if fault == "clipped twice" else 1.0
        for k, p in params.items():
            g = grads[k] + decay * p if fault == "coupled" else clip * grads[k]
            m[k] = beta1 * m.get(k, 0.0) + (1 - beta1) * g
            v[k] = beta2 * v.get(k, 0.0) + (1 - beta2) * g * g
            c1 = 1.0 if fault == "no first correction" else 1 - beta1 ** t[0]
            c2 = 1.0 if fault == "no second correction" else 1 - beta2 ** t[0]
            a = m[k] / c1 / (np.sqrt(v[k] / c2) + eps)
            if fault == "eps in root":
                a = m[k] / c1 / np.sqrt(v[k] / c2 + eps)
            updates[k] = a, a if fault == "coupled" else a + decay * p
        a_all, b_all = (
            np.sqrt(sum(np.sum(x**2) for x in xs)) for xs in (params.values(), [u for _, u in updates.values()])
        )
        new = {}
        for k, p in params.items():
            a, u = updates[k]
            seen = a if fault in ("decay forgotten in the ratio", "decay beside the ratio") else u
            x, y = (a_all, b_all) if fault == "norms over all tensors" else (np.linalg.norm(p), np.linalg.norm(seen))
            if fault == "means in place of norms":
                x, y = np.mean(np.abs(p)), np.mean(np.abs(u))
            r = x / y if x > 0 and y > 0 else 1.0
            if fault == "ratio clamped":
                r = min(r, 0.6)
            if fault == "ratio upside down":
                r = 1.0 / r
            if fault == "ratio left out":
                r = 1.0
            new[k] = p - lr * (r * a + decay * p) if fault == "decay beside the ratio" else p - lr * r * u
        return new

    return step


def sgd(lr=0.1, momentum=0.9, dampening=0.0, decay=0.01, nesterov=False, fault=""):
    """SGD with momentum."""
    buf = {}

    def step(params, grads):
        new = {}
        for k, p in params.items():
            g = grads[k] + (0.0 if fault == "decoupled" else decay) * p
            if k in buf or fault == "first step dampened":
                buf[k] = momentum * buf.get(k, 0.0) + (1 - dampening) * g
            else:
                buf[k] = g
            new[k] = p - lr * (g + momentum * buf[k] if nesterov else buf[k])
            if fault == "decoupled":
                new[k] = new[k] - lr * decay * p
        return new

    return step


def lars(lr=0.1, momentum=0.9, decay=0.01, trust=1e-3, fault=""):
    """LARS."""
    buf = {}

    def step(params, grads):
        new = {}
        for k, p in params.items():
            a, b = np.linalg.norm(p), np.linalg.norm(grads[k])
            below = b if fault == "decay forgotten in the ratio" else b + decay * a
            ratio = trust * a / below if a > 0 and b > 0 else 1.0
            buf[k] = momentum * buf.get(k, 0.0) + ratio * (grads[k] + decay * p)
            new[k] = p - lr * buf[k]
        return new

    return step
