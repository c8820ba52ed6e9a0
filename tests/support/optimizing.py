"""Helpers of tests of the Optimizer: rules and their fields, small arrays, and updates in plain Python."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import torch

import arrayopt as ao
from tests.support import witness
from tests.support.tolerances import TOLERANCES

HALF = ao.SGD(lr=0.5)  # with small integers for p and g, p - g/2 is exact in every dtype
EXACT = TOLERANCES["float64"].relative


class Layer(NamedTuple):
    weight: object
    bias: object


def ones(shape=(2,), value=1.0):
    return np.full(shape, float(value))


def by_witness(rule, options, p, grads, counts=None):
    """A NumPy array after updates in plain Python (none for None); `options` is a dict, or one for each step."""
    flat, state, t = [float(x) for x in np.ravel(p)], {}, 0
    for s, g in enumerate(grads):
        if g is None:
            continue
        t += 1
        now = options if isinstance(options, dict) else options[s]
        flat, state = witness.step(rule, now, np.shape(p), flat, [float(x) for x in np.ravel(g)], state, t)
    if counts is not None:
        counts.append(t)
    return np.reshape(flat, np.shape(p))


def drawn(shape, *seeds):
    """Normally distributed float64 values: an array, or one for each seed if there are several."""
    made = [np.random.default_rng(seed).standard_normal(shape) for seed in seeds]
    return made[0] if len(made) == 1 else made


# for each field another value, and what must change with it
OTHER = {
    "lr": 0.02, "beta1": 0.5, "beta2": 0.6, "beta3": 0.7, "eps": 0.1, "eps1": 0.01, "eps2": 0.02, "eps_scale": 3.0,
    "weight_decay": 0.3, "clip_value": 0.2, "min_norm": 9.0, "max_norm": 0.1, "min_ratio": 7.0, "max_ratio": 0.1,
    "clip_threshold": 0.1, "decay_rate": 0.4, "momentum": 0.3, "dampening": 0.25, "trust_coefficient": 0.4,
    "bias_correction": False, "adapt": False, "amsgrad": True, "sequential": True, "nesterov": True,
    "decayed_norm": True, "grad_centralization": True, "clip_tensor_norm": 0.5, "clip_unit_ratio": 0.01,
    "lookahead_steps": 2, "eps_root": 0.3, "grad_averaging": False, "trust_clip": True, "clip_after_ratio": True,
    "alpha": 0.3, "initial_scale": 2.0, "momentum_decay": 1.0, "threshold": 4.1, "alpha_warmup": 3.0, "radius": 0.5,
    "beta3_warmup": 3.0, "warmup_steps": 4.0, "r": 2.0, "weight_lr_power": 0.5, "decoupled": True, "no_prox": True,
    "eps_in_sqrt": True, "centered": True, "degenerated_to_sgd": False, "restart": True,
    "weak_differences": True, "factored": False, "eps_added": True, "caution": True, "mars": 0.5, "gamma": 0.2,
    "clip_update": 0.3,
}  # fmt: skip
ELSEWHERE = {"lookahead_alpha", "ema_decay", "master_weights", "state_dtype"}  # tests/rules/test_precision.py
ELSEWHERE |= {"project"}  # tests/test_projections.py
ELSEWHERE |= {"stacked", "blocks"}  # tests/engines/test_stacked.py, tests/engines/test_blocks.py
ELSEWHERE |= {"lr_in_momentum"}  # tests/doors/test_optax_same.py
ELSEWHERE |= {"rounding", "seed"}  # tests/rules/test_rounding.py, tests/rules/test_draws.py
BASE = {
    "LAMB": {"lr": 0.1},
    "LANS": {"lr": 0.5, "weight_decay": 0.5},
    "CAME": {"lr": 0.1, "scale_parameter": True, "beta3": 0.9, "eps2": 0.1},
    "LARS": {"lr": 0.1, "trust_coefficient": 0.1, "weight_decay": 0.1},
    "AdamW": {"lr": 0.1, "beta2": 0.1},
    "Adam": {"lr": 0.1, "beta2": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adafactor": {"lr": 0.1, "relative_step": False},
    "Lion": {"lr": 0.1, "decoupled": False, "weight_decay": 0.5, "beta1": 0.8},
    "RMSprop": {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1},
    "NAdam": {"lr": 0.1, "beta2": 0.1, "weight_decay": 0.1},
    "RAdam": {"lr": 0.1, "beta2": 0.1, "weight_decay": 0.1},
    "Adan": {"lr": 0.1, "weight_decay": 0.5},
    "AdEMAMix": {"lr": 0.1, "beta2": 0.1, "beta3": 0.9, "decoupled": False},
    "ScheduleFreeAdamW": {"lr": 0.1},
    "AdamH": {"lr": 0.1},
    "AdaBelief": {"lr": 0.1, "beta2": 0.1, "weight_decay": 0.1, "decoupled": False},
    "Sophia": {"lr": 0.1, "gamma": 0.5, "eps": 0.5, "weight_decay": 0.1},
    "FISTA": {"lr": 0.1, "restart": False},
}
NOT_SEEN = {  # alone
    ("LANS", "clip_tensor_norm"),  # it divides the gradient by its norm
    ("LARS", "clip_after_ratio"),  # without a limit to clip to
    ("RAdam", "threshold"),  # in so few steps; as `eps` and `beta2`
    ("RAdam", "beta2"),
    ("RAdam", "eps"),
    ("RAdam", "eps_root"),
    ("NAdam", "caution"),  # with a decay that is in the gradient: tests/support/cases.py has it with one that is not
    ("Sophia", "gamma"),  # without a Hessian: tests/rules/test_oracles.py
    ("RMSprop", "eps_in_sqrt"),  # in so few steps; tests/rules/test_goldens.py has these
    ("RMSprop", "bias_correction"),
    ("AdEMAMix", "beta3_warmup"),
    ("AdEMAMix", "decoupled"),
    ("ScheduleFreeAdamW", "weight_lr_power"),
    ("AdamH", "bias_correction"),
    ("FISTA", "restart"),
    ("Adafactor", "variant"),  # where nothing is tiny: tests/doors/test_torch_names.py
}
FIELDS = [
    (rule, {f.name: OTHER[f.name]})
    for rule, base in BASE.items()
    for f in dataclasses.fields(getattr(ao, rule))
    if f.name in OTHER and (rule, f.name) not in NOT_SEEN
]
FIELDS += [
    (rule, change)
    for rule in ("CAME", "Adafactor")
    for change in ({"scale_parameter": False}, {"relative_step": True, "lr": None},
                   {"warmup_init": True, "relative_step": True, "lr": None})
]  # fmt: skip
P, GRADS = drawn((4, 3), 1), drawn((4, 3), 2, 3, 4)
CONSTANTS = {
    "NumPy scalar": np.float64,
    "NumPy 0-d": np.asarray,
    "PyTorch 0-d": lambda x: torch.tensor(x, dtype=torch.float64),
    "JAX 0-d": jnp.asarray,
}


def norm(x):
    return math.sqrt(sum(float(abs(e)) ** 2 for e in np.ravel(x)))


def more(opt, array=np.asarray, s=2):
    dtype = str(opt.params["w"].dtype).rsplit(".", 1)[-1]
    g = GRADS[s % 3].astype(dtype)
    return opt.step({"w": array(g), "b": None if s == 1 else array(g[0])})


def values(opt):
    """Everything on which a step depends, as NumPy arrays and numbers."""
    arrays = {name: (s["t"], {k: np.asarray(x) for k, x in s.items() if k != "t"}) for name, s in opt.state.items()}
    return opt.step_count, {name: np.asarray(x) for name, x in opt.params.items()}, arrays
