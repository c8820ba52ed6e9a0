"""Helpers of tests of errors: optimizers, and rows of a call, its exception, and the words of the message."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import arrayopt as ao


def ones(*shape):
    return np.ones(shape)


def params():
    return {"w": ones(2, 3), "b": ones(3)}


def optimizer(rule=None, made=None, **options):
    return ao.Optimizer(params() if made is None else made, rule or ao.LAMB(), **options)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Signs(ao.Rule):
    """A rule that does not support complex parameters."""

    lr: ao.Hyper = ao.real("[0, inf)", 1.0)

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        return p - h.lr * xp.sign(g), {}


def raises(call, exception, *words):
    """Assert that the call raises exactly this class of exception, not a subclass, with all words."""
    with pytest.raises(exception) as caught:
        call()
    assert type(caught.value) is exception
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


def row(name, call, exception, *words):
    """A row for `pytest.mark.parametrize`, with its name as identifier."""
    return pytest.param(call, exception, words, id=name)


# each field's interval, from the definition of the rules; values just outside, and some inside
INTERVALS = {
    "lr": ("[0, inf)", [-1e-300, -1.0], [0, 1e300]),
    "beta1": ("[0, 1)", [-1e-9, 1.0, 1, 2], [0, 0.5, math.nextafter(1, 0)]),
    "beta2": ("[0, 1)", [-1e-9, 1.0, 1, 2], [0, 0.5, math.nextafter(1, 0)]),
    "beta3": ("[0, 1)", [-1e-9, 1.0, 1, 2], [0, 0.5, math.nextafter(1, 0)]),
    "eps": ("(0, inf)", [0, 0.0, -1e-8], [1e-300, 1]),
    "eps1": ("[0, inf)", [-1e-30], [0, 1]),
    "eps_root": ("[0, inf)", [-1e-30], [0, 1]),
    "eps2": ("[0, inf)", [-1e-30], [0, 1]),
    "eps_scale": ("[0, inf)", [-1e-30], [0, 1]),
    "weight_decay": ("[0, inf)", [-1e-9], [0, 1.5]),
    "clip_value": ("(0, inf)", [0, -1], [1e-9, None]),
    "min_norm": ("[0, inf)", [-1], [0, None]),
    "max_norm": ("[0, inf)", [-1], [0, None]),
    "min_ratio": ("[0, inf)", [-1], [0, None]),
    "max_ratio": ("[0, inf)", [-1], [0, None]),
    "clip_threshold": ("(0, inf)", [0, -1], [1e-9, None]),
    "decay_rate": ("[0, 1]", [-0.1, 1.1], [0, 1]),
    "momentum": ("[0, 1)", [-0.1, 1.0], [0, 0.9]),
    "dampening": ("[0, 1]", [-0.1, 1.1], [0, 1]),
    "trust_coefficient": ("(0, inf)", [0, -1e-3], [1e-9, 1]),
    "clip_tensor_norm": ("(0, inf)", [0, -1], [1e-9, None]),
    "clip_unit_ratio": ("(0, inf)", [0, -1], [1e-9, None]),
    "lookahead_steps": ("(0, inf)", [0, -1], [1, 5, None]),
    "lookahead_alpha": ("(0, 1]", [0, -0.5, 1.1], [0.5, 1]),
    "ema_decay": ("[0, 1)", [-1e-9, 1.0], [0, 0.999, None]),
    "alpha": ("[0, 1)", [-0.1, 1.0], [0, 0.5]),
    "initial_scale": ("[0, inf)", [-1e-9], [0, 1]),
    "momentum_decay": ("[0, inf)", [-1e-9], [0, 1]),
    "threshold": ("[0, inf)", [-1], [0, 5]),
    "alpha_warmup": ("(0, inf)", [0, -1], [0.5, 100, None]),
    "beta3_warmup": ("(0, inf)", [0, -1], [0.5, 100, None]),
    "warmup_steps": ("[0, inf)", [-1], [0, 100]),
    "r": ("[0, inf)", [-1e-9], [0, 1]),
    "weight_lr_power": ("[0, inf)", [-1e-9], [0, 2]),
    "shampoo_beta": ("[0, 1)", [-0.1, 1.0], [0, 0.5, None]),
    "mars": ("[0, inf)", [-1e-9], [0, 1, None]),
    "gamma": ("(0, inf)", [0, -1], [1e-9, 1]),
    "clip_update": ("(0, inf)", [0, -1], [1e-9, 1]),
    "radius": ("(0, inf)", [0, -1.0], [1e-300, 1, None]),
}
OPTIONS = {
    "master_weights": "'auto', True, False or 'split'",
    "rounding": "'nearest' or 'stochastic'",
    "state_dtype": "None, 'float16', 'bfloat16' or 'int8'",
}
STRUCTURAL = ("project", "seed", "blocks", "precondition_frequency", "max_precondition_dim", "matrix", "variant")
"""Fields that are neither numbers nor switches."""

OPEN_END = {("SGD", "momentum"): ("[0, 1]", [-0.1, 1.1], [0, 0.9, 1]), ("LARS", "eps"): ("[0, inf)", [-1e-9], [0, 1])}
OPEN_END |= {("AdEMAMix", "alpha"): ("[0, inf)", [-1e-9], [0, 5])}
OPEN_END |= {("ScheduleFreeAdamW", "beta1"): ("(0, 1)", [0, 1.0], [1e-9, math.nextafter(1, 0)])}
REQUIRED = {
    "SGD": {"lr": 0.1},
    "LARS": {"lr": 0.1},
    "FISTA": {"lr": 0.1},
    "CAME": {"lr": 0.1},
    "Adafactor": {"lr": 0.1, "relative_step": False},
}
RULES = ["LAMB", "LANS", "CAME", "LARS", "AdamW", "Adam", "SGD", "Adafactor"]
RULES += [
    "Lion",
    "RMSprop",
    "NAdam",
    "RAdam",
    "Adan",
    "AdEMAMix",
    "ScheduleFreeAdamW",
    "AdamH",
    "FISTA",
    "AdaBelief",
    "Sophia",
    "SOAP",
]


def fields(rule, *, switches):
    """The names of a rule's numbers, or of its switches."""
    made = getattr(ao, rule)(**REQUIRED.get(rule, {}))
    plain = [f.name for f in dataclasses.fields(made) if f.name not in (*OPTIONS, *STRUCTURAL)]
    return [name for name in plain if isinstance(getattr(made, name), bool) == switches]


def build(rule, **options):
    return getattr(ao, rule)(**REQUIRED.get(rule, {}) | options)


NUMBERS = [(rule, field) for rule in RULES for field in fields(rule, switches=False)]
each_number = pytest.mark.parametrize(("rule", "field"), NUMBERS, ids=[f"{rule} {field}" for rule, field in NUMBERS])
A, B, C = ones(2), ones(2), ones(2)


def state_of(opt):
    """Every byte that a step could change."""

    def exact(x):
        host = x.detach() if isinstance(x, torch.Tensor) else x
        return str(x.dtype), tuple(x.shape), np.asarray(host).tobytes(), id(x)

    tensors = [(name, s["t"], {k: exact(x) for k, x in s.items() if k != "t"}) for name, s in opt.state.items()]
    arrays = [exact(t.array) for g in opt.groups for t in g.tensors]
    return opt.step_count, arrays, tensors, opt.rule, [(g.rule, g.overridden, g.names) for g in opt.groups]


def fails_without_a_trace(opt, call, exception, *words):
    """As `raises`, and assert that the optimizer does not change by a byte, however often it is tried."""
    before = state_of(opt)
    for _ in range(2):
        raises(call, exception, *words)
        assert state_of(opt) == before


def out_of_range(s):
    return 0.1 if s == 0 else -0.1
