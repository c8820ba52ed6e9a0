"""The functions that optax has too. They take the arguments of the installed version of optax."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import numpy as np
import optax

from arrayopt import rules
from arrayopt.foreign_names import OPTAX
from arrayopt.optax.form import Form, Leaf, View
from arrayopt.optax.functions import function
from arrayopt.optax.hessian import estimating
from arrayopt.optax.transformation import masked, spread, transform
from arrayopt.params.groups import field_parameters
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.rules.words import bias_correction

_MASKS: dict[str, dict[str, Any]] = {
    "mask": {"weight_decay": 0.0},
    "weight_decay_mask": {"weight_decay": 0.0},
    "trust_ratio_mask": {"adapt": False},
}
"""Arguments that are masks, with the fields that change for parameters whose mask is False."""

_STORED = {"mu_dtype": "m", "accumulator_dtype": "buf", "dtype_momentum": "m"}
"""Arguments that set the dtype of a slot, and the slot."""

_ADAM = {f"adam_{name}": OPTAX.get(name, name) for name in ("learning_rate", "b1", "b2", "eps_root", "weight_decay")}
"""Arguments of muon for parameters that are not matrices, and the fields of AdamW that they set."""


@dataclass
class Same:
    """How a rule computes a function of optax.

    An argument sets the field that `names` or `OPTAX` has for it, or the field of the same name. `always` are fields
    with the value that optax's formula needs, and `instead` the values that replace None. `form` takes the rule, the
    masks, the dtypes of slots, and the arguments in `rest`, and returns the `Form`. `around` takes the transformation
    and the arguments that it names, and returns another transformation. Any other argument must have optax's default.
    """

    rule: type[Rule]
    names: Mapping[str, str] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    instead: Mapping[str, Any] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=lambda: _STORED)
    rest: tuple[str, ...] = ()
    form: Callable[..., Form] = lambda rule, masks, stored: Form(rule, masked(rule, masks), stored=stored)
    around: Callable[..., optax.GradientTransformationExtraArgs] | None = None


def same_function(who: str, same: Same) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """The function with the name and the signature of optax's function `who`."""
    original = getattr(optax, who, None) or getattr(optax.contrib, who)
    parameters = list(inspect.signature(original).parameters.values())
    every, numeric = [f.name for f in fields(same.rule)], hypers(same.rule)
    outer = [] if same.around is None else list(inspect.signature(same.around).parameters)[1:]
    apart = (*same.rest, *outer)
    known = {p.name: same.names.get(p.name, OPTAX.get(p.name, p.name)) for p in parameters if p.name not in apart}
    known = {name: own for name, own in known.items() if own in every}
    more = [x for x in field_parameters(same.rule) if x.name not in {*known, *known.values(), *same.always, *apart}]
    numbers = {
        *(name for name, own in known.items() if own in numeric),
        *(x.name for x in more if x.name in numeric),
        *_ADAM,
    }
    numbers |= {p.name for p in parameters if p.name in outer and isinstance(p.default, int | float)}

    def build(values: dict[str, Any]) -> optax.GradientTransformationExtraArgs:
        options, rest, masks, stored = dict(same.always), dict[str, Any](), [], dict[str, Any]()
        around = {name: values.pop(name) for name in outer}
        for p in parameters:
            if p.name in around:
                continue
            value = values.pop(p.name)
            if p.name in _MASKS:
                masks.append((p.name, value, _MASKS[p.name]))
            elif p.name in same.stored:
                stored |= {} if value is None else {same.stored[p.name]: _dtype(f"{who}: `{p.name}`", value)}
            elif p.name in same.rest:
                rest[p.name] = value
            elif p.name in known:
                options[known[p.name]] = same.instead.get(p.name) if value is None else value
            elif value is not p.default and value != p.default:
                raise ValueError(f"{who}: `{p.name}` must be {p.default!r} here; got {value!r}. Use optax's own {who}")
        momentum = options.get("momentum")
        if isinstance(momentum, int | float) and momentum == 0 and same.rule is not rules.Muon:
            options["nesterov"] = False
        try:
            made = transform(same.form(same.rule(**options, **values), masks, stored, **rest))
        except (TypeError, ValueError) as error:
            words = str(error).replace(f"{same.rule.__name__}:", f"{who}:")
            for name, own in known.items():
                words = words.replace(f"`{own}`", f"`{name}`")
            raise type(error)(words) from None
        return made if same.around is None else same.around(made, **around)

    doc = (
        f"``optax.{'' if hasattr(optax, who) else 'contrib.'}{who}``: its arguments and its formula, computed by"
        f" `{same.rule.__name__}`.\n\nOther fields of the rule, for which optax has no argument, can be passed by name."
    )
    return function(who, doc, parameters, numbers, build, more, {own: name for name, own in known.items()})


def _dtype(where: str, value: Any) -> Any:
    """The dtype of a slot, from an argument named `where`. Raise ValueError if it is not a floating-point one."""
    dtype = jax.dtypes.canonicalize_dtype(value)
    if dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        raise ValueError(f"{where} must be float16, bfloat16, float32 or float64; got {value!r}")
    return dtype


def _times(x: Any, factor: Callable[[Any], Any]) -> Any:
    """The schedule ``x * factor``, for a number or schedule x and a function of the step `factor`."""
    return lambda step: (x(step) if callable(x) else x) * factor(step)


def _radam(rule: Any, masks: Any, stored: Any) -> Form:
    """RAdam. optax adds eps after the bias correction; the rule adds it before, so eps and eps_root are scaled here."""

    def root(step: Any) -> Any:
        beta2 = rule.beta2(step) if callable(rule.beta2) else rule.beta2
        return bias_correction(beta2, step + 1) ** 0.5

    eps_root = _times(rule.eps_root, lambda step: root(step) ** 2) if "eps_root" not in rule.structure[2] else 0.0
    late = replace(rule, eps=_times(rule.eps, root), eps_root=eps_root)
    return Form(late, masked(late, masks), stored=stored)


def _adafactor(rule: Any, masks: Any, stored: Any, min_dim_size_to_factor: int, factored: bool) -> Form:
    """Adafactor. optax factors the two longest axes, if both have at least `min_dim_size_to_factor` elements."""
    each = masked(rule, masks)

    def leaves(params: Any) -> list[Leaf]:
        made, whole = list[Leaf](), dict[int, Any]()
        own: Any
        for (own, _), p in zip(each(params), jax.tree.leaves(params), strict=True):
            order = [int(axis) for axis in np.argsort(p.shape)]
            if factored and p.ndim > 1 and p.shape[order[-2]] >= min_dim_size_to_factor:
                axes = (*sorted(order[:-2]), *order[-2:])
                made.append((own, View(axes, tuple(p.shape[axis] for axis in axes))))
            else:
                made.append((whole.setdefault(id(own), replace(own, factored=False)), None))
        return made

    return Form(rule, leaves, stored=stored)


def _muon(rule: Any, masks: Any, stored: Any, ns_coeffs: Any, **rest: Any) -> Form:
    """Muon. In optax, inputs are along a kernel's first axis, and parameters that are not matrices are under AdamW."""
    shared = {f.name: getattr(rule, f.name) for f in fields(Rule)}
    shared |= {"lr": rule.lr, "eps": rule.eps, "nesterov": rule.nesterov}
    adam = rules.AdamW(**shared | {_ADAM[name]: x for name, x in rest.items() if name in _ADAM and x is not None})
    if isinstance(ns_coeffs, str):  # the name of a set of coefficients in optax
        known = optax.contrib.muon(0.0, ns_coeffs=ns_coeffs).init(np.zeros((1, 1), "float32"))
        ns_coeffs = optax.tree_utils.tree_get(known, "ns_coeffs")
    rule = replace(rule, ns_coefficients=np.asarray(ns_coeffs).tolist())
    rms, numbers = rest.get("consistent_rms"), rest.get("muon_weight_dimension_numbers")
    if rms is not None:  # the rule's factor is always 0.2
        lr, decay = _times(rule.lr, lambda _: rms / 0.2), _times(rule.weight_decay, lambda _: 0.2 / rms)
        rule = replace(rule, scale="match_rms_adamw", lr=lr, weight_decay=decay)
    each = masked(rule, masks)

    def leaves(params: Any) -> list[Leaf]:
        arrays = jax.tree.leaves(params)
        axes = [(0, 1) if p.ndim == 2 else None for p in arrays]
        if numbers is not None:
            tree = numbers(params) if callable(numbers) else numbers
            is_leaf = lambda x: x is None or hasattr(x, "reduction_axis")  # noqa: E731
            axes = spread("muon: `muon_weight_dimension_numbers`", tree, params, is_leaf)
        made = list[Leaf]()
        for (own, _), p, of in zip(each(params), arrays, axes, strict=True):
            made.append((adam, None) if of is None else (own, _as_matrices(p.shape, *of)))
        return made

    return Form(rule, leaves, also=(adam,), stored=stored)


def _prodigy(rule: Any, masks: Any, stored: Any, betas: Any) -> Form:
    """Prodigy, whose two betas are one argument in optax."""
    beta1, beta2 = betas
    rule = replace(rule, beta1=beta1, beta2=beta2)
    return Form(rule, masked(rule, masks), stored=stored)


def _as_matrices(shape: tuple[int, ...], inputs: Any, outputs: Any) -> View:
    """The view of a tensor as matrices, with outputs as rows and inputs as columns; other axes are a batch."""
    n = len(shape)
    inputs, outputs = (tuple(axis % n for axis in ([x] if isinstance(x, int) else x)) for x in (inputs, outputs))
    batch = tuple(axis for axis in range(n) if axis not in (*inputs, *outputs))
    sizes = [int(np.prod([shape[axis] for axis in axes], dtype=int)) for axes in (batch, outputs, inputs)]
    return View((*batch, *outputs, *inputs), tuple(sizes if batch else sizes[1:]))


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
    "adabelief": Same(rules.AdaBelief),
    "adam": Same(rules.Adam),
    "adamw": Same(rules.AdamW),
    "adan": Same(rules.Adan, always={"weak_differences": True, "no_prox": True}),
    "ademamix": Same(rules.AdEMAMix, stored={}),  # optax drops `mu_dtype` in the first update
    "lamb": Same(rules.LAMB),
    "lars": Same(rules.LARS, always={"decayed_norm": True, "lr_in_momentum": True}),
    "lion": Same(rules.Lion),
    "prodigy": Same(
        rules.Prodigy,
        names={"estim_lr0": "d0", "estim_lr_coef": "d_coef"},
        always={"bias_correction": True},
        rest=("betas",),
        form=_prodigy,
    ),
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
    "sophia": Same(
        rules.Sophia,
        names={"clip_threshold": "clip_update"},
        instead={"clip_threshold": float(np.finfo("float32").max)},
        around=estimating,
    ),
}
"""The functions that optax has too, by name."""
