"""Runs of one process and of many ranks on the same problem, and their contents, which must be equal bit for bit."""

import gc
from dataclasses import dataclass

import numpy as np

import arrayopt as ao

SHAPES = {
    "words": (3000, 64),
    "bias": (64,),
    "scalar": (),
    "empty": (0, 7),
    "square": (128, 128),
    "wide": (9, 20001),
    "kernels": (16, 8, 3, 3),  # small matrices, which engines process side by side
    "heads": (7, 40, 300),
    "long": (100_001,),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Slots(ao.Rule):
    """A rule with slots of other shapes than the parameter: larger, smaller, scalar, and empty."""

    lr: ao.Hyper = ao.real("[0, inf)", 1e-2)

    def slots(self, xp, p):
        zero = xp.zeros_like(p)
        few = {"few": xp.zeros((2,), dtype=p.dtype), "none": xp.zeros((0, 3), dtype=p.dtype)}
        return {"history": xp.stack([zero, zero, zero]), **few, "one": xp.sum(zero)}

    def update(self, xp, p, g, s, h):
        history = xp.concat([s["history"][1:, ...], xp.expand_dims(g, axis=0)])
        new = {"history": history, "few": 0.5 * s["few"] + xp.sum(g), "one": s["one"] + xp.max(g), "none": s["none"]}
        return p - h.lr * xp.sum(history, axis=0), new


OTHER_SLOTS = {"SOAP": ao.SOAP(lr=0.01, precondition_frequency=2, max_precondition_dim=70), "of one's own": Slots()}
"""Rules whose tensors ranks do not divide, and whose slots have other shapes than the parameters."""


def parameters(shapes=SHAPES, dtype=np.float32, seed=0):
    """Random parameters."""
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape), np.float32).astype(dtype) for name, shape in shapes.items()}


def gradients(step, shapes=SHAPES, dtype=np.float32, seed=1, without=(), bad=()):
    """Random gradients of a step: None for tensors in `without`, with an infinite element in those in `bad`."""
    rng = np.random.default_rng([seed, step])
    made = {name: np.asarray(0.01 * rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}
    for name in bad:
        made[name].reshape(-1)[-3] = np.inf
    return {name: None if name in without else x.astype(dtype) for name, x in made.items()}


def train(params, rule, every, comm=None, **options):
    """An optimizer after some steps."""
    opt = ao.Optimizer(params, rule, comm=comm, **options)
    for grads in every:
        opt.step(grads)
    return opt


def contents(opt):
    """All numbers of an optimizer, as bytes; all ranks must call it."""
    saved = opt.state_dict()
    held = {name: np.asarray(x).tobytes() for name, x in opt.params.items()}
    for name, about in saved["tensors"].items():
        held |= {(name, slot): np.asarray(x).tobytes() for slot, x in about["slots"].items()}
        held[name, "t"] = about["t"]
    held["step"], held["extra"] = saved["step"], saved["extra"]
    return held


def differing(one, many):
    """The keys at which two results of `contents` differ."""
    return [key for key in one if one[key] != many.get(key)] + [key for key in many if key not in one]


def kinds(opt):
    """The numbers of tensors of which this rank has all, a part, and nothing."""
    held = [tensor.kind for tensor in opt._parameters.all]
    return {kind: held.count(kind) for kind in ("whole", "cut", "none")}


def left_by(f):
    """The types of this package of which f leaves objects in reference cycles."""
    gc.freeze()  # existing objects are many, and need no search
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        f()
        gc.collect()
        return {type(x).__name__ for x in gc.garbage if type(x).__module__.startswith("arrayopt")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
