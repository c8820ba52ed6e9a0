"""Golden trajectories that `tests/goldens/record.py` has made, continuing `golden_cases.py`."""

import math
from dataclasses import replace

import arrayopt as ao
from arrayopt.schedules import Warmup
from tests.support.golden import Golden, LeftOut


def late_eps(s, beta2=0.999):
    """Our eps, added before the correction by c2, that equals optax's RAdam with 1e-8, which adds it afterwards."""
    return 1e-8 * math.sqrt(-math.expm1((s + 1) * math.log(beta2)))


def alpha_warm(s):
    return 2.0 * min((s + 1) / 4, 1.0)


CENTERED = {"centered": True, "momentum": 0.9, "nesterov": True, "initial_scale": 1.0}
TF = {"alpha": 0.9, "eps": 1e-10, "eps_in_sqrt": True, "initial_scale": 1.0}
WARM = {"warmup_steps": 4, "r": 1.0, "weight_lr_power": 1.5, "weight_decay": 0.1}
LATE_FREE = ao.ScheduleFreeAdamW(lr=Warmup(0.01, 4), weight_decay=0.1)
SOAP = ao.SOAP(lr=0.01, beta1=0.9, beta2=0.8, precondition_frequency=2, weight_decay=0.1)

GOLDENS = {
    "timm_lion/default": Golden(ao.Lion(lr=0.01, weight_decay=0.1)),
    "optax_lion/default": Golden(ao.Lion(lr=0.01, weight_decay=1e-3)),
    "po_lion/l2": Golden(ao.Lion(lr=0.01, beta1=0.8, beta2=0.95, weight_decay=0.1, decoupled=False)),
    "optax_rmsprop/default": Golden(ao.RMSprop(lr=0.01, alpha=0.9, eps_in_sqrt=True)),
    "optax_rmsprop/centered": Golden(ao.RMSprop(lr=0.01, alpha=0.9, eps_in_sqrt=True, **CENTERED)),
    "optax_rmsprop/corrected": Golden(ao.RMSprop(lr=0.01, alpha=0.9, bias_correction=True, momentum=0.5)),
    "timm_rmsproptf/default": Golden(ao.RMSprop(lr=1e-3, momentum=0.9, **TF)),
    "timm_rmsproptf/decoupled": Golden(
        ao.RMSprop(lr=1e-3, centered=True, decoupled=True, weight_decay=0.1, **(TF | {"alpha": 0.8}))
    ),
    "optax_radam/default": Golden(ao.RAdam(lr=0.01, eps=late_eps)),
    "optax_radam/nesterov": Golden(ao.RAdam(lr=0.01, beta2=0.98, nesterov=True, eps=lambda s: late_eps(s, 0.98))),
    "po_radam/standing": Golden(
        ao.RAdam(lr=0.01, beta2=0.98, weight_decay=0.1, decoupled=True, degenerated_to_sgd=False)
    ),
    "timm_adan/default": Golden(ao.Adan(lr=0.01, weight_decay=0.1)),
    "timm_adan/no_prox": Golden(ao.Adan(lr=0.01, weight_decay=0.1, no_prox=True)),
    "optax_adan/default": Golden(
        ao.Adan(lr=0.01, weight_decay=0.1, no_prox=True, eps_root=1e-8, weak_differences=True)
    ),
    "po_adan/default": Golden(ao.Adan(lr=0.01, beta1=0.9, beta2=0.8, beta3=0.95, weight_decay=0.1)),
    "optax_ademamix/default": Golden(ao.AdEMAMix(lr=0.01, weight_decay=0.1)),
    "optax_ademamix/warmup": Golden(ao.AdEMAMix(lr=0.01, alpha=alpha_warm, eps_root=1e-4)),
    "po_ademamix/warmup": Golden(
        ao.AdEMAMix(lr=0.01, beta2=0.99, beta3=0.999, alpha_warmup=8, beta3_warmup=8, weight_decay=0.1)
    ),
    "schedulefree_adamw/default": Golden(ao.ScheduleFreeAdamW(lr=0.01)),
    "schedulefree_adamw/warmup": Golden(ao.ScheduleFreeAdamW(lr=0.01, beta1=0.8, beta2=0.99, **WARM)),
    "po_schedulefree/default": Golden(ao.ScheduleFreeAdamW(lr=0.01, warmup_steps=4, weight_decay=0.1)),
    "optax_schedulefree/default": Golden(ao.ScheduleFreeAdamW(lr=0.01, weight_decay=0.1)),
    # pytorch_optimizer's QR was asked for float64, but for the last one
    "po_soap/default": Golden(ao.SOAP(lr=0.01)),
    "po_soap/often": Golden(replace(SOAP, shampoo_beta=0.7)),
    "po_soap/one_side": Golden(replace(SOAP, max_precondition_dim=4, bias_correction=False)),
    "po_soap/float32_qr": Golden(SOAP),
}

LEFT_OUT = {
    "po_soap/float32_qr": LeftOut(
        ("dense.weight", "zeros.weight", "lategrad.weight", "tiny.weight"),
        "pytorch_optimizer casts to float32 for QR: its bases, and so its steps, are right to seven digits",
    ),
    "po_schedulefree/default": LeftOut(
        ("tiny.weight",),
        "pytorch_optimizer adds 1e-15 under the root, besides eps: that is 3e-8 of the root of a zero v",
    ),
    "optax_schedulefree/warmup": LeftOut(
        None,
        "in optax's warm-up, z moves by the learning rate of step t - 1, and weights are made of that of step t",
        Golden(LATE_FREE),
    ),
}
