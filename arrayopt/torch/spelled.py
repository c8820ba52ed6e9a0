"""Classes with the name of one of PyTorch's optimizers take PyTorch's arguments: their order, names and defaults."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from arrayopt.rules import LAMB, LANS, LARS, SGD, Adafactor, Adam, AdamW, Muon, NAdam, RAdam, RMSprop, Rule

HOW = ("capturable", "differentiable", "foreach", "fused")
"""PyTorch's arguments about the implementation. Groups keep them, but they have no effect here."""

DIFFERENTIABLE = "steps are not differentiable; use arrayopt.update, which is"


@dataclass(frozen=True)
class Name:
    """PyTorch's name for a field: `here` converts its values to ours, and `there` converts them back."""

    field: str
    here: Callable[[Any], Any] = lambda x: x
    there: Callable[[Any], Any] = lambda x: x


DECOUPLED = "decoupled_weight_decay"
_DECOUPLED = {DECOUPLED: Name("decoupled"), "decoupled_decay": Name("decoupled")}


def _at_most_1(clips: Any) -> float | None:
    """The largest trust ratio: 1 if the flag is set, else no limit."""
    return 1.0 if clips else None


def _always(adapts: Any) -> bool:
    """True. Whether tensors without weight decay are adapted can only be set for each group."""
    if not adapts:
        raise ValueError(
            'param_groups: for always_adapt=False, put tensors without decay into a group with "adapt": False'
        )
    return True


_TRUST = {
    "trust_clip": Name("max_ratio", _at_most_1, lambda x: x is not None),
    "always_adapt": Name("adapt", _always),
    "use_nvlamb": Name("adapt", _always),
}
"""The names of timm and apex."""
_NAMES: Mapping[type[Rule], Mapping[str, Name]] = {
    LAMB: _TRUST,
    LANS: _TRUST,
    LARS: {"trust_coeff": Name("trust_coefficient"), "always_adapt": Name("adapt", _always)},
    NAdam: _DECOUPLED,
    RAdam: _DECOUPLED,
    RMSprop: {"decoupled_decay": Name("decoupled")},
    Adafactor: {"d": Name("clip_threshold"), "beta2_decay": Name("decay_rate", lambda x: -x, lambda x: -x)},
    Muon: {"adjust_lr_fn": Name("scale", lambda x: "original" if x is None else x)},
}

_ADAM = ("betas", "eps", "weight_decay", "amsgrad")
_PLACES: Mapping[type[Rule], tuple[str, ...]] = {
    SGD: ("momentum", "dampening", "weight_decay", "nesterov"),
    Adam: _ADAM,
    AdamW: _ADAM,
    RMSprop: (
        *("alpha", "eps", "weight_decay", "momentum", "centered"),
        *("capturable", "foreach", "maximize", "differentiable"),
    ),
    NAdam: ("betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay"),
    RAdam: ("betas", "eps", "weight_decay", "decoupled_weight_decay"),
    Adafactor: ("beta2_decay", "eps", "d", "weight_decay"),
    Muon: ("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
}
"""The positional arguments of each class, after parameters and the learning rate."""

_PAPER = {"beta1", "relative_step", "scale_parameter", "variant", "warmup_init"}
"""Fields that only the published form of Adafactor has. To pass one of them selects that form."""

_DEFAULTS: Mapping[type[Rule], Mapping[str, Any]] = {
    SGD: {"lr": 1e-3},
    Adam: {DECOUPLED: False},
    Muon: {"lr": 1e-3},
    Adafactor: {"variant": "pytorch", "lr": 1e-2, "relative_step": False, "eps1": None},
}
"""Defaults that differ from the rule's, and those of arguments that are not fields of the rule."""


def more_of(rule: type[Rule]) -> tuple[str, ...]:
    """Keys of groups that are not fields of the rule: Adam's switch that makes it AdamW."""
    return (DECOUPLED,) if rule is Adam else ()


def spelled(rule: type[Rule], name: str) -> Name | None:
    """The field that a name of PyTorch, timm or apex stands for, if the name differs from ours."""
    return _NAMES.get(rule, {}).get(name)


def otherwise(rule: type[Rule], name: str) -> Any:
    """The default of a field, or of another key of groups."""
    return False if name == DECOUPLED else rule.__dataclass_fields__[name].default


def otherwise_all(rule: type[Rule], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """PyTorch's defaults where they differ from the rule's, unless `given` selects a form that PyTorch lacks."""
    return {} if rule is Adafactor and given.keys() & _PAPER else _DEFAULTS.get(rule, {})


def places(rule: type[Rule]) -> tuple[str, ...]:
    """The positional arguments of a rule's class, after parameters and the learning rate."""
    return _PLACES.get(rule, ())


def placed(who: str, rule: type[Rule], values: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Positional arguments, after parameters and the learning rate, by PyTorch's names.

    Raise TypeError if there are too many, or one is also passed by name.
    """
    names = _PLACES.get(rule, ())
    if len(values) > len(names):
        takes = ", ".join(("parameters", "lr", *names))
        raise TypeError(f"{who}: by position, pass only {takes}; pass the rest by name, such as betas=(0.9, 0.999)")
    found = dict(zip(names, values, strict=False))
    twice = sorted(found.keys() & named.keys())
    if twice:
        raise TypeError(f"{who}: `{twice[0]}` is passed twice, by position and by name")
    return found


def as_pytorch(rule: type[Rule], fields: dict[str, Any]) -> Rule:
    """The rule of a group as PyTorch means it: no dampening without momentum; AdamW for Adam with decoupled decay."""
    if fields.pop(DECOUPLED, False):
        rule = AdamW
    if rule is SGD and type(fields["momentum"]) in (int, float) and fields["momentum"] == 0:
        fields["dampening"] = 0.0
    return rule(**fields)
