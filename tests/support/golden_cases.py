"""The rule and options that reproduce each golden trajectory; files and tensors that are left out, and why."""

import math
import re
from dataclasses import replace

import numpy as np

import arrayopt as ao
from arrayopt.schedules import Join, Polynomial, Warmup
from tests.support import golden_more
from tests.support.golden import Golden, LeftOut

MUON = ao.Muon(lr=0.01, bias_correction=True, eps=1e-30)
TRIPLES = ((4.0848, -6.8946, 2.927), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037))

# ---- groups ----------------------------------------------------------------------------------------------------------

REST = "the tensors of no other group"
NO_DECAY = {re.compile("beta|gamma"): {"weight_decay": 0.0}}  # MindSpore, if no groups are passed
DENSE = [(("dense.weight", "dense.bias"), {"lr": 0.05, "weight_decay": 0.02}), (REST, {})]
ONE_DIMENSIONAL = {lambda name, p: p.ndim < 2: {"adapt": False, "weight_decay": 0.0}}  # pytorch_optimizer's LARS
NO_ADAPT = {re.compile("(gamma|beta|bias)$"): {"adapt": False}}  # MXNet's LARS
MULTIPLIED = {  # MXNet's lr_mult and wd_mult, times lr=0.02 and wd=0.05
    "dense.weight": {"lr": 0.02 * 0.5},
    "bn.gamma": {"lr": 0.02 * 0.0, "weight_decay": 0.05 * 2.0},
    re.compile(r"^(bn\.beta|dense\.bias)$"): {"weight_decay": 0.05 * 0.0},
}
# TensorFlow's names have / where ours have a dot, which makes no difference to these patterns
EXCLUDED = {re.compile("bias|gamma|beta|LayerNorm"): {"weight_decay": 0.0}}

# MindSpore's Ascend kernel centralizes gradients only where shape[1] is a multiple of 16: of the three tensors in a
# group that asks for it, conv16.weight alone
SEED_EXAMPLE = [
    (("conv.weight", "batched.weight"), {"weight_decay": 0.01}),
    (("conv16.weight",), {"weight_decay": 0.01, "grad_centralization": True}),
    (REST, {"lr": Polynomial(0.1, 0.01, 4, 0.5)}),
]
MIXED = [
    (("dense.weight", "dense.bias", "huge.weight"), {"lr": 0.005}),
    (("conv.weight", "batched.weight"), {"weight_decay": lambda s: 0.1 - 0.01 * s}),
    (("conv16.weight",), {"weight_decay": lambda s: 0.1 - 0.01 * s, "grad_centralization": True}),
    (("bn.gamma", "bn.beta"), {"weight_decay": 0.0}),
    (REST, {}),
]
WD_ONLY = [(("bn.gamma", "bn.beta", "dense.bias"), {"weight_decay": 0.0}), (REST, {})]

# ---- schedules -------------------------------------------------------------------------------------------------------

RISING = [0.01 * (s + 1) for s in range(10)]
RISING_SLOWLY = [0.001 * (s + 1) for s in range(10)]


def poly_scheduler(s):
    """MXNet's PolyScheduler(max_update=8, base_lr=0.1, pwr=2, warmup_steps=3), which counts steps from 1."""
    return Join([Warmup(0.1, 3), Polynomial(0.1, 0.0, 8 - 3, 2)], boundaries=[3])(s + 1)


def early_eps(s):
    """Our eps that equals MindSpore's Adam with 1e-8, which is added to √v before the correction by c2."""
    return 1e-8 / math.sqrt(-math.expm1((s + 1) * math.log(0.999)))


# ---- rules of several files ------------------------------------------------------------------------------------------


def came_ms(**options):
    return ao.CAME(**{"lr": 0.01, "decay_rate": 0.8, "beta3": 0.99, **options})


def tf_lamb(**options):
    return ao.LAMB(bias_correction=False, **options)


def unfused(rule):
    """MXNet's LANS by `step`, which applies its two parts one after the other, while `fused_step` adds them up."""
    return replace(rule, sequential=True)


LANS_DEFAULT = ao.LANS(lr=0.01, weight_decay=0.01)
LANS_NOWD = ao.LANS(lr=0.1, weight_decay=0.0, beta1=0.8, beta2=0.95, eps=1e-8)
LANS_BOUNDS = ao.LANS(lr=0.02, weight_decay=0.1, min_norm=0.5, max_norm=2.0)
LANS_CLIP = ao.LANS(lr=0.02, weight_decay=0.01, clip_value=0.2)
LANS_SCHED = ao.LANS(lr=poly_scheduler, weight_decay=0.01)
LANS_MULTS = ao.LANS(lr=0.02, weight_decay=0.05)
LANS_HALF = ao.LANS(lr=0.05, weight_decay=0.02)
MX_LAMB = ao.LAMB(lr=0.01, weight_decay=0.01)
MX_LAMB_BOUNDS = ao.LAMB(lr=0.05, weight_decay=0.1, bias_correction=False, min_norm=0.2, max_norm=1.5)
MX_LARS = ao.LARS(lr=0.1, momentum=0.9, weight_decay=0.01, eps=1e-8)
MX_LARS_NOMOM = ao.LARS(lr=0.1, momentum=0.0, weight_decay=0.1, trust_coefficient=0.01, eps=1e-6)
MS_ADAMW = ao.AdamW(lr=0.01, weight_decay=0.01, bias_correction=False, eps=1e-6)
MS_ADAM = ao.Adam(lr=0.01, weight_decay=0.01, eps=early_eps)
MS_SGD = ao.SGD(lr=0.05, momentum=0.9, weight_decay=0.01)
CAME_OPTIONS = ao.CAME(
    lr=0.01, beta1=0.8, beta2=0.95, beta3=0.98, clip_threshold=0.5, eps1=1e-20, eps2=1e-10, weight_decay=0.1
)

# ---- the files -------------------------------------------------------------------------------------------------------

GOLDENS = {
    "torch_adamw/default_f64": Golden(ao.AdamW(lr=0.01)),
    "torch_sgd/mom_f64": Golden(ao.SGD(lr=0.01, momentum=0.9, weight_decay=0.01)),
    "torch_sgd/nesterov_f64": Golden(ao.SGD(lr=0.01, momentum=0.9, nesterov=True)),
    "torch_sgd/momentum_one_f64": Golden(ao.SGD(lr=0.01, momentum=1.0)),
    "torch_adafactor/default_f64": Golden(ao.Adafactor(lr=0.01, relative_step=False)),
    "optax_adamw/default": Golden(ao.AdamW(lr=0.01, weight_decay=1e-4)),
    "optax_adamw/nesterov": Golden(ao.AdamW(lr=0.01, nesterov=True, eps_root=1e-4)),
    "optax_adam/nesterov": Golden(ao.Adam(lr=0.01, nesterov=True)),
    "optax_lamb/default": Golden(ao.LAMB(lr=0.01, weight_decay=0.01)),
    "optax_lamb/eps_root": Golden(ao.LAMB(lr=0.01, weight_decay=0.01, eps_root=1e-3)),
    "optax_lars/default": Golden(ao.LARS(lr=0.1, weight_decay=0.01, decayed_norm=True)),
    "optax_lars/nesterov": Golden(ao.LARS(lr=0.1, weight_decay=0.01, decayed_norm=True, nesterov=True)),
    # optax averages with bias correction, adds eps to the norm (here 1e-30), and was given transposes
    "optax_muon/default": Golden(MUON),
    "optax_muon/no_nesterov": Golden(replace(MUON, momentum=0.9, nesterov=False, weight_decay=0.0)),
    "optax_muon/consistent_rms": Golden(replace(MUON, lr=0.02, scale="match_rms_adamw")),
    "optax_muon/triples": Golden(replace(MUON, weight_decay=0.0, ns_coefficients=TRIPLES)),
    # pytorch_optimizer's iteration was asked for float64
    "po_normuon/default": Golden(ao.NorMuon(lr=0.01)),
    "po_normuon/no_nesterov": Golden(
        ao.NorMuon(lr=0.02, momentum=0.9, nesterov=False, beta2=0.8, weight_decay=0.0, scale="match_rms_adamw")
    ),
    # optax computes its decay 1 - t^-0.8 in float32, whatever the parameters are in
    "optax_adafactor/default": Golden(ao.Adafactor(lr=0.01, relative_step=False), tolerance="float32"),
    "timm_lamb/default_f64": Golden(ao.LAMB(lr=0.01, weight_decay=0.01)),
    "timm_lamb/nowd_f64": Golden(ao.LAMB(lr=0.01, weight_decay=0.01)),  # gives no decay, so it is timm's default
    "timm_lamb/no_averaging_f64": Golden(ao.LAMB(lr=0.01, weight_decay=0.01, grad_averaging=False)),
    "timm_lars/default_f64": Golden(ao.LARS(lr=0.1, momentum=0.0, weight_decay=0.01, eps=1e-8)),
    "timm_lars/nesterov_clip_f64": Golden(
        ao.LARS(lr=0.002, momentum=0.9, weight_decay=0.01, eps=1e-8, nesterov=True, trust_clip=True)
    ),
    "po_came/default_f64": Golden(ao.CAME(lr=0.002)),
    "po_adafactor/default_f64": Golden(ao.Adafactor(lr=0.01, relative_step=False, scale_parameter=False)),
    "po_lars/default_f64": Golden(ao.LARS(lr=0.1, weight_decay=0.01), ONE_DIMENSIONAL),
    "came_torch/default": Golden(ao.CAME(lr=0.002)),
    "came_torch/default_f64": Golden(ao.CAME(lr=0.002)),
    "came_torch/opts": Golden(CAME_OPTIONS),
    "came_torch/opts_f64": Golden(CAME_OPTIONS),
    "came_torch/noclip_lrs": Golden(ao.CAME(lr=RISING_SLOWLY, beta1=0.5, beta2=0.9, beta3=0.99, clip_threshold=None)),
    "came_ms/default": Golden(came_ms()),
    "came_ms/wd": Golden(came_ms(weight_decay=0.1)),
    "came_ms/scale_parameter": Golden(came_ms(weight_decay=0.05, scale_parameter=True)),
    "came_ms/lr_list": Golden(came_ms(lr=RISING)),
    "came_ms/hyper": Golden(
        came_ms(
            lr=0.02, decay_rate=0.5, beta1=0.8, beta3=0.9, clip_threshold=0.5, eps1=1e-20, eps_scale=0.01, eps2=1e-10
        )
    ),
    "came_ms/float16": Golden(came_ms(eps1=1e-6, eps2=1e-6, master_weights=False)),
    "came_ms/compression_v120": Golden(came_ms()),
    "ms_lamb_ascend/default": Golden(ao.LAMB(lr=0.01, weight_decay=0.0), NO_DECAY),
    "ms_lamb_ascend/hyper": Golden(ao.LAMB(lr=0.01, weight_decay=0.01, beta1=0.8, beta2=0.95, eps=1e-3), NO_DECAY),
    "ms_lamb_ascend/lr_list": Golden(ao.LAMB(lr=RISING, weight_decay=0.01), NO_DECAY),
    "ms_lamb_ascend/lr_poly": Golden(ao.LAMB(lr=Polynomial(0.1, 0.01, 4, 0.5), weight_decay=0.0), NO_DECAY),
    "ms_lamb_ascend/wd_cell": Golden(ao.LAMB(lr=0.02, weight_decay=lambda s: 0.01 + 0.02 * s), NO_DECAY),
    "ms_lamb_ascend/wd_namefilter": Golden(ao.LAMB(lr=0.02, weight_decay=0.1), NO_DECAY),
    "ms_lamb_ascend/groups_wd_only": Golden(ao.LAMB(lr=0.02, weight_decay=0.1), WD_ONLY),
    "ms_lamb_ascend/groups_seed_example": Golden(ao.LAMB(lr=0.1, weight_decay=0.0), SEED_EXAMPLE),
    "ms_lamb_ascend/groups_mixed": Golden(
        ao.LAMB(lr=np.linspace(0.1, 0.01, 10, dtype=np.float32), weight_decay=0.05), MIXED
    ),
    "ms_adamweightdecay/default": Golden(MS_ADAMW, NO_DECAY),
    "ms_adamweightdecay/groups": Golden(MS_ADAMW, DENSE),
    "ms_adam/default": Golden(MS_ADAM, NO_DECAY),
    "ms_adam/groups": Golden(MS_ADAM, DENSE),
    "ms_adam/amsgrad": Golden(ao.Adam(lr=0.01, amsgrad=True, eps=early_eps)),
    "ms_momentum/default": Golden(MS_SGD, NO_DECAY),
    "ms_momentum/groups": Golden(MS_SGD, DENSE),
    "ms_sgd/default": Golden(MS_SGD, NO_DECAY),
    "ms_sgd/groups": Golden(MS_SGD, DENSE),
    "ms_sgd/nesterov": Golden(ao.SGD(lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True), NO_DECAY),
    "ms_adafactor/default": Golden(ao.Adafactor(beta1=0.9, lr_in_momentum=True)),
    "tf_lamb/default": Golden(tf_lamb(lr=0.01, weight_decay=0.01)),
    "tf_lamb/exclude": Golden(tf_lamb(lr=0.02, weight_decay=0.1), EXCLUDED),
    "tf_lamb/lrs": Golden(tf_lamb(lr=RISING_SLOWLY, weight_decay=0.01)),
    "tf_lamb/nodecay": Golden(tf_lamb(lr=0.01, weight_decay=0.0, beta1=0.8, beta2=0.99, eps=1e-8)),
    "mx_lans/fused_default": Golden(LANS_DEFAULT),
    "mx_lans/fused_agg1": Golden(LANS_DEFAULT),  # tensors one by one and not in bundles: no difference
    "mx_lans/fused_nowd": Golden(LANS_NOWD),
    "mx_lans/fused_bounds": Golden(LANS_BOUNDS),
    "mx_lans/fused_clip_rescale": Golden(LANS_CLIP, loss_scale=64.0),
    "mx_lans/fused_sched": Golden(LANS_SCHED),
    "mx_lans/fused_mults_skip": Golden(LANS_MULTS, MULTIPLIED),
    "mx_lans/fused_fp16_mp": Golden(LANS_HALF),
    "mx_lans/fused_fp16_mp_big": Golden(LANS_HALF),
    "mx_lans/step_default": Golden(unfused(LANS_DEFAULT)),
    "mx_lans/step_nowd": Golden(unfused(LANS_NOWD)),
    "mx_lans/step_bounds": Golden(unfused(LANS_BOUNDS)),
    "mx_lans/step_clip_rescale": Golden(unfused(LANS_CLIP), loss_scale=64.0),
    "mx_lans/step_sched": Golden(unfused(LANS_SCHED)),
    "mx_lans/step_mults_skip": Golden(unfused(LANS_MULTS), MULTIPLIED),
    "mx_lans/step_fp16_mp": Golden(unfused(LANS_HALF)),
    "mx_lamb/fused_default": Golden(MX_LAMB),
    "mx_lamb/fused_nobias_bounds": Golden(MX_LAMB_BOUNDS),
    "mx_lamb/step_default": Golden(MX_LAMB),
    "mx_lamb/step_nobias_bounds": Golden(MX_LAMB_BOUNDS),
    "mx_lars/fused_default": Golden(MX_LARS, NO_ADAPT),
    "mx_lars/fused_nomom": Golden(MX_LARS_NOMOM, NO_ADAPT),
    "mx_lars/step_default": Golden(MX_LARS, NO_ADAPT),
    "mx_lars/step_nomom": Golden(MX_LARS_NOMOM, NO_ADAPT),
    **golden_more.GOLDENS,
}

# ---- what is left out ------------------------------------------------------------------------------------------------

SILENT = ("zerograd.weight", "lategrad.weight")  # their gradients are zero, in all steps and in the first three
NAN = LeftOut(SILENT, "MXNet divides by the norm of a zero gradient, and has NaN from the first step on")

LEFT_OUT = {
    "mx_lans/fused_default": NAN,
    "mx_lans/fused_nowd": NAN,
    "mx_lans/step_default": NAN,
    "mx_lans/step_nowd": NAN,
    "po_lars/default_f64": LeftOut(
        SILENT, "where ‖g‖ = 0, pytorch_optimizer takes λ = c·‖p‖ / (wd·‖p‖); here λ is 1 then"
    ),
    "torch_adafactor/default_f64": LeftOut(
        ("tiny.weight", "tinygrad.weight"),
        "PyTorch adds no eps to g²; it keeps mean(R) above 2^-52 and the variance above 2^-104",
    ),
    "optax_adafactor/default": LeftOut(
        ("conv.weight", "conv16.weight"), "optax factors the two largest axes; here it is always the last two"
    ),
    **golden_more.LEFT_OUT,
    "po_lamb/default_f64": LeftOut(
        None,
        "pytorch_optimizer decays p by 1 - lr·wd before the update, which then knows no decay; has c1 but not c2;"
        " and takes r = min(‖p‖, 10) / (‖u‖ + 1e-6)",
        Golden(ao.LAMB(lr=0.01, weight_decay=0.01, max_norm=10.0)),
    ),
    "came_ms/beta1_zero": LeftOut(
        None,
        "MindFormers takes beta1=0 for no m at all, which then stays 0: only the decay moves p",
        Golden(came_ms(beta1=0.0, weight_decay=0.1)),
    ),
    "came_ms/relative_step": LeftOut(
        None,
        "MindFormers' relative step is 0: p never moves",
        Golden(came_ms(lr=None, relative_step=True, weight_decay=0.1)),
    ),
    "ms_momentum/nesterov_is_ignored_on_cpu": LeftOut(
        None,
        "MindSpore's Momentum on CPU takes use_nesterov=True and does not do it",
        Golden(ao.SGD(lr=0.05, momentum=0.8, nesterov=True)),
    ),
}

ELSEWHERE = {
    "ms_schedules/schedules": "tests/schedules/test_schedules.py",
    "published/results": "tests/support/recorded.py",
}

# What a file holds besides: the slots that moments are compared with, what else is compared, and why the rest is not
SLOTS = {"m": "m", "v": "v", "mean": "m", "var": "v"}
OTHERS = ["x", "w32", "global_step_after", "lr_after", "lr_used"]
NOT_COMPARED = {
    "g_after": "MXNet's `step` writes into the gradients; here they stay as they are",
}
