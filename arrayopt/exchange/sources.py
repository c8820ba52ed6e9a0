"""The options and arrays of PyTorch's optimizers and similar ones, and the fields and slots that they become."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from arrayopt.rules import LAMB, SGD, Adafactor, Adam, AdamW, Muon, NAdam, RAdam, RMSprop, Rule


@dataclass(frozen=True)
class Source:
    """How to read the state of an optimizer of PyTorch.

    Attributes
    ----------
    fields : callable
        Takes a group; returns the rule's fields.
    slots : dict
        For each slot, the names of its array in the state, in PyTorch and bitsandbytes.
    fixed : dict
        Options that must have this value, because the rule cannot do anything else.
    count : callable
        Takes a group and a tensor's state; returns the number of updates (for SGD, only whether there was one).
    of : str
        The names of the optimizers, for errors.
    core : tuple of str
        Slots that each tensor has after its first update, with any options.
    """

    fields: Callable[[Mapping[str, Any]], dict[str, Any]]
    slots: dict[str, tuple[str, ...]]
    fixed: dict[str, Any]
    count: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    of: str
    core: tuple[str, ...] = ("m", "v")


def _adam(group: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that Adam, AdamW and LAMB have in common."""
    beta1, beta2 = group["betas"]
    numbers = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
    return {**{k: float(x) for k, x in numbers.items()}, "weight_decay": float(group["weight_decay"])}


def _adamw(group: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Adam and AdamW. Only PyTorch has `amsgrad`, and only apex has `bias_correction`."""
    switches = {"amsgrad": False, "bias_correction": True}
    return {**_adam(group), **{name: bool(group.get(name, x)) for name, x in switches.items()}}


def _lamb(group: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of timm's and apex's LAMB, which use no trust ratio without decay, unless timm's `always_adapt` is set."""
    return {
        **_adam(group),
        "bias_correction": bool(group["bias_correction"]),
        "grad_averaging": bool(group["grad_averaging"]),
        "adapt": group["weight_decay"] != 0 or bool(group.get("always_adapt")),
        "max_ratio": 1.0 if group.get("trust_clip") else None,
    }


def _sgd(group: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SGD. PyTorch ignores `dampening` without momentum."""
    fields = {k: float(group[k]) for k in ("lr", "momentum", "dampening", "weight_decay")}
    return {**fields, "dampening": fields["dampening"] * (fields["momentum"] != 0), "nesterov": bool(group["nesterov"])}


def _rmsprop(group: Mapping[str, Any]) -> dict[str, Any]:
    fields = {k: float(group[k]) for k in ("lr", "alpha", "eps", "weight_decay", "momentum")}
    return {**fields, "centered": bool(group["centered"])}


def _decoupled(group: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of RAdam, which NAdam has too."""
    return {**_adam(group), "decoupled": bool(group["decoupled_weight_decay"])}


def _adafactor(group: Mapping[str, Any]) -> dict[str, Any]:
    eps1, eps_scale = group["eps"]
    numbers = {"lr": group["lr"], "decay_rate": -group["beta2_decay"], "eps_scale": eps_scale}
    numbers |= {"clip_threshold": group["d"], "weight_decay": group["weight_decay"]}
    switches = {"variant": "pytorch", "relative_step": False, "scale_parameter": True}
    return {**{k: float(x) for k, x in numbers.items()}, "eps1": None if eps1 is None else float(eps1), **switches}


def _muon(group: Mapping[str, Any]) -> dict[str, Any]:
    fields = {k: float(group[k]) for k in ("lr", "weight_decay", "momentum", "eps")}
    fields |= {"nesterov": bool(group["nesterov"]), "bias_correction": False, "ns_steps": group["ns_steps"]}
    return {**fields, "ns_coefficients": list(group["ns_coefficients"]), "scale": group["adjust_lr_fn"] or "original"}


def _nadam(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**_decoupled(group), "momentum_decay": float(group["momentum_decay"])}


_MOMENTS: dict[str, tuple[str, ...]] = {"m": ("exp_avg", "state1"), "v": ("exp_avg_sq", "state2")}
_ADAMW = Source(
    fields=_adamw,
    slots={**_MOMENTS, "v_max": ("max_exp_avg_sq",)},
    fixed={"decoupled_weight_decay": True},
    count=lambda group, state: state.get("step", group.get("step", 0) if state else 0),  # apex has one count per group
    of="PyTorch's or bitsandbytes' AdamW, or apex's FusedAdam",
)
SOURCES: dict[type[Rule], Source] = {
    AdamW: _ADAMW,
    Adam: replace(
        _ADAMW, fixed={"decoupled_weight_decay": False}, of="PyTorch's or bitsandbytes' Adam, or apex's FusedAdam"
    ),
    SGD: Source(
        fields=_sgd,
        slots={"buf": ("momentum_buffer", "state1")},
        fixed={},
        count=lambda group, state: bool({"momentum_buffer", "state1"} & state.keys()),
        of="PyTorch's or bitsandbytes' SGD, or apex's FusedSGD",
        core=(),
    ),
    RMSprop: Source(
        fields=_rmsprop,
        slots={"v": ("square_avg",), "m": ("grad_avg",), "buf": ("momentum_buffer",)},
        fixed={},
        count=_ADAMW.count,
        of="PyTorch's RMSprop",
        core=("v",),
    ),
    NAdam: replace(
        _ADAMW, fields=_nadam, slots={**_MOMENTS, "mu_product": ("mu_product",)}, fixed={}, of="PyTorch's NAdam"
    ),
    RAdam: replace(_ADAMW, fields=_decoupled, slots=_MOMENTS, fixed={}, of="PyTorch's RAdam"),
    Adafactor: Source(
        fields=_adafactor,
        slots={"r": ("row_var",), "c": ("col_var",), "v": ("variance",)},
        fixed={},
        count=_ADAMW.count,
        of="PyTorch's Adafactor",
        core=(),
    ),
    Muon: Source(
        fields=_muon,
        slots={"m": ("momentum_buffer",)},
        fixed={},
        count=lambda group, state: "momentum_buffer" in state,
        of="PyTorch's Muon",
        core=(),
    ),
    LAMB: Source(
        fields=_lamb,
        slots=_MOMENTS,
        fixed={"caution": False, "decoupled_decay": False},
        count=lambda group, state: group.get("step", 0),
        of="timm's Lamb, or apex's FusedLAMB",
    ),
}
KNOWN = {
    "amsgrad",
    "nesterov",
    "bias_correction",
    "grad_averaging",
    "always_adapt",
    "trust_clip",
    "corrected_weight_decay",
    "centered",
    "decoupled_weight_decay",
    "maximize",
}
KNOWN |= {"foreach", "fused", "capturable", "differentiable"}  # these do not change results
"""Switches that are translated or compared, or that change no result. Others raise an error if they are on."""
