"""The functions that optax has too: they take its arguments, as the installed version has them, and compute the same."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from arrayopt import rules
from arrayopt.foreign import OPTAX
from arrayopt.optax.functions import Call, function
from arrayopt.optax.transformation import Form, Leaf, View, masked, spread, transform
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.rules.words import bias_correction

__all__ = ["SAME", "their_function"]

_MASKS: dict[str, dict[str, Any]] = {
    "mask": {"weight_decay": 0.0},
    "weight_decay_mask": {"weight_decay": 0.0},
    "trust_ratio_mask": {"adapt": False},
}
"""Arguments that are masks, and what is changed where they are False."""

_STORED = {"mu_dtype": "m", "accumulator_dtype": "buf", "dtype_momentum": "m"}
"""Arguments that are the dtype of a slot."""


@dataclass
class Given:
    """A call, said by a rule: what a `Form` is made of."""

    rule: Rule
    masks: list[tuple[str, Any, Mapping[str, Any]]]
    stored: dict[str, Any]
    rest: dict[str, Any]
    """Arguments that are no fields."""
    common: dict[str, Any]
    """Fields of all rules, which optax does not have."""

    def form(self) -> Form:
        return Form(self.rule, masked(self.rule, self.masks), stored=self.stored)


@dataclass
class Same:
    """How a function of optax is said by a rule.

    Arguments are fields by `names`, by `OPTAX`, or have the field's name. `always` are fields that optax's formula asks
    for, `rest` the arguments that `form` reads by itself. An argument that is none of these must be as in optax's own
    default. `instead` are values for None.
    """

    rule: type[Rule]
    names: Mapping[str, str] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    instead: Mapping[str, Any] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=lambda: _STORED)
    rest: tuple[str, ...] = ()
    form: Callable[[Given], Form] = Given.form

    def field_of(self, name: str) -> str | None:
        """The field that an argument is."""
        known = self.names.get(name, OPTAX.get(name, name))
        return known if known in {f.name for f in fields(self.rule)} and name not in self.rest else None


def their_function(who: str, same: Same) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """The function that is called as that of optax."""
    theirs = getattr(optax, who, None) or getattr(optax.contrib, who)
    parameters = list(inspect.signature(theirs).parameters.values())
    known = {p.name: known for p in parameters if (known := same.field_of(p.name)) is not None}
    more = [f.name for f in fields(same.rule) if f.name not in {*known.values(), *same.always}]
    numbers = {p.name for p in parameters if known.get(p.name) in hypers(same.rule) or p.name in _ADAM}
    call = Call(
        who,
        parameters,
        numbers | {name for name in more if name in hypers(same.rule)},
        partial(_built, who, same, {p.name: p.default for p in parameters}),
        more,
        {known[name]: name for name in known},
    )
    return function(
        call,
        f"``optax.{'' if hasattr(optax, who) else 'contrib.'}{who}``: its arguments and its formula, computed by"
        f" `{same.rule.__name__}`.\n\nFields of the rule that optax has no argument for may be given besides, by name.",
    )


def _built(
    who: str, same: Same, defaults: Mapping[str, Any], values: dict[str, Any]
) -> optax.GradientTransformationExtraArgs:
    """The transformation of a call."""
    options, rest, masks, stored = dict(same.always), {}, [], {}
    renamed = {}
    for name, value in values.items():
        known = same.field_of(name)
        if name in _MASKS:
            masks.append((name, value, _MASKS[name]))
        elif name in same.stored:
            stored |= {} if value is None else {same.stored[name]: _dtype(f"{who}: `{name}`", value)}
        elif name in same.rest:
            rest[name] = value
        elif known is not None:
            options[known] = same.instead.get(name) if value is None else value
            renamed[known] = name
        elif value is not defaults[name] and value != defaults[name]:
            raise ValueError(f"{who}: `{name}` must be {defaults[name]!r} here; got {value!r}. Use optax's own {who}")
    if same.rule in _TRACED and (isinstance(options["momentum"], int | float) and options["momentum"] == 0):
        options["nesterov"] = False
    common = {f.name: options[f.name] for f in fields(Rule) if f.name in options}
    try:
        return transform(same.form(Given(same.rule(**options), masks, stored, rest, common)))
    except (TypeError, ValueError) as error:
        words = str(error).replace(f"{same.rule.__name__}:", f"{who}:")
        for known, name in renamed.items():
            words = words.replace(f"`{known}`", f"`{name}`")
        raise type(error)(words) from None


def _dtype(where: str, value: Any) -> Any:
    """The dtype of a slot."""
    dtype = jax.dtypes.canonicalize_dtype(value)
    if dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        raise ValueError(f"{where} must be float16, bfloat16, float32 or float64; got {value!r}")
    return dtype


def _radam(given: Given) -> Form:
    """eps is added after the correction by c₂; the rule adds it before."""
    beta2 = given.rule.beta2  # type: ignore[attr-defined]

    def before(eps: Any, power: float) -> Any:
        def at(step: Any) -> Any:
            value, beta = (x(step) if callable(x) else x for x in (eps, beta2))
            return value * bias_correction(beta, step + 1) ** power

        return at if callable(eps) or not isinstance(eps, float) or eps else eps

    rule: Any = given.rule
    given.rule = replace(rule, eps=before(rule.eps, 0.5), eps_root=before(rule.eps_root, 1.0))
    return given.form()


def _adafactor(given: Given) -> Form:
    """The two largest axes are factored, if both are long enough."""
    each, smallest = masked(given.rule, given.masks), given.rest["min_dim_size_to_factor"]

    def leaves(params: Any) -> list[Leaf]:
        made, unfactored = [], dict[int, Rule]()
        for (rule, _), p in zip(each(params), jax.tree.leaves(params), strict=True):
            order = [int(axis) for axis in np.argsort(p.shape)]
            if given.rest["factored"] and len(order) > 1 and p.shape[order[-2]] >= smallest:
                axes = (*(axis for axis in range(p.ndim) if axis not in order[-2:]), *order[-2:])
                made.append((rule, View(axes, tuple(p.shape[axis] for axis in axes))))
            else:
                made.append((unfactored.setdefault(id(rule), replace(rule, factored=False)), None))
        return made

    return Form(given.rule, leaves, stored=given.stored)


_ADAM = {
    "adam_learning_rate": "lr",
    "adam_b1": "beta1",
    "adam_b2": "beta2",
    "adam_eps_root": "eps_root",
    "adam_weight_decay": "weight_decay",
}
"""Arguments of muon for what is no matrix, and fields of AdamW."""

_NAMED = {
    "standard": (3.4445, -4.775, 2.0315),
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Coefficients that optax has names for (Ahn et al., arXiv:2504.05295)."""


def _muon(given: Given) -> Form:
    """Kernels have their inputs along the first axis; what is no matrix is under AdamW."""
    rule: Any = given.rule
    rest, coefficients, rms = given.rest, given.rest["ns_coeffs"], given.rest.get("consistent_rms")
    shared = {"lr": rule.lr, "eps": rule.eps, "nesterov": rule.nesterov, **given.common}
    adam = rules.AdamW(**shared | {known: rest[x] for x, known in _ADAM.items() if rest.get(x) is not None})
    if isinstance(coefficients, str) and coefficients not in _NAMED:
        raise ValueError(f"Muon: `ns_coeffs` must be numbers, or one of {', '.join(_NAMED)}; got {coefficients!r}")
    coefficients = _NAMED[coefficients] if isinstance(coefficients, str) else np.asarray(coefficients).tolist()
    rule = replace(rule, ns_coefficients=coefficients)
    if rms is not None:  # the factor is 0.2 in the rule
        decay = _times(rule.weight_decay, 0.2 / rms)
        rule = replace(rule, scale="match_rms_adamw", lr=_times(rule.lr, rms / 0.2), weight_decay=decay)
    each, numbers = masked(rule, given.masks), rest.get("muon_weight_dimension_numbers")

    def leaves(params: Any) -> list[Leaf]:
        arrays = jax.tree.leaves(params)
        axes = [(0, 1) if p.ndim == 2 else None for p in arrays]
        if numbers is not None:
            said = numbers(params) if callable(numbers) else numbers
            axes = spread("muon: `muon_weight_dimension_numbers`", said, params, lambda x: x is None or _is_numbers(x))
        seen = zip(each(params), arrays, axes, strict=True)
        return [(adam, None) if of is None else (own, _as_matrices(p.shape, *of)) for (own, _), p, of in seen]

    return Form(rule, leaves, also=(adam,), stored=given.stored)


def _is_numbers(x: Any) -> bool:
    """Whether x is optax's `MuonDimensionNumbers`."""
    return hasattr(x, "reduction_axis")


def _times(x: Any, factor: Any) -> Any:
    """A number or a schedule, times a factor."""
    return (lambda step: x(step) * factor) if callable(x) else x * factor


def _as_matrices(shape: tuple[int, ...], inputs: Any, outputs: Any) -> View:
    """How a tensor is seen as matrices of outputs and inputs; its other axes are a batch."""
    n = len(shape)
    inputs, outputs = (tuple(axis % n for axis in ([x] if isinstance(x, int) else x)) for x in (inputs, outputs))
    batch = tuple(axis for axis in range(n) if axis not in (*inputs, *outputs))
    sizes = [int(np.prod([shape[axis] for axis in axes], dtype=int)) for axes in (batch, outputs, inputs)]
    return View((*batch, *outputs, *inputs), tuple(sizes if batch else sizes[1:]))


_TRACED = (rules.SGD, rules.RMSprop, rules.LARS)
"""Rules whose momentum optax leaves out, Nesterov's too, where there is none."""

SAME = {
    "adafactor": Same(
        rules.Adafactor,
        names={
            "multiply_by_parameter_scale": "scale_parameter",
            "clipping_threshold": "clip_threshold",
            "momentum": "beta1",
            "weight_decay_rate": "weight_decay",
            "eps": "eps1",
        },
        always={"relative_step": False, "warmup_init": False, "eps_scale": 1e-3, "lr_in_momentum": True},
        instead={"learning_rate": 1.0, "weight_decay_rate": 0.0},
        rest=("min_dim_size_to_factor", "factored"),
        form=_adafactor,
    ),
    "adam": Same(rules.Adam),
    "adamw": Same(rules.AdamW),
    "adan": Same(rules.Adan, always={"weak_differences": True, "no_prox": True}),
    "ademamix": Same(rules.AdEMAMix, stored={}),
    "lamb": Same(rules.LAMB),
    "lars": Same(rules.LARS, always={"decayed_norm": True, "lr_in_momentum": True, "trust_clip": False}),
    "lion": Same(rules.Lion, always={"decoupled": True}),
    "muon": Same(
        rules.Muon,
        names={"beta": "momentum"},
        always={"bias_correction": True, "eps_added": True, "matrix": "last", "scale": "original"},
        rest=("ns_coeffs", "muon_weight_dimension_numbers", "consistent_rms", *_ADAM),
        form=_muon,
    ),
    "nadam": Same(rules.Adam),
    "radam": Same(rules.RAdam, form=_radam),
    "rmsprop": Same(
        rules.RMSprop, names={"decay": "alpha"}, always={"lr_in_momentum": True}, instead={"momentum": 0.0}
    ),
    "sgd": Same(rules.SGD, instead={"momentum": 0.0}),
}
"""The functions that optax has too, by name."""
