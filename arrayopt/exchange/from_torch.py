"""State of other libraries' optimizers, translated to that of an `Optimizer`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from arrayopt.arrays import Array, array_namespace, dtype_name, is_array, kind
from arrayopt.exchange.given import below, put_fields, said
from arrayopt.optimizer import Optimizer
from arrayopt.rules import LAMB, SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Rule
from arrayopt.state.tensors import new_slots

if TYPE_CHECKING:
    import torch

__all__ = ["load_torch"]


@dataclass(frozen=True)
class _Source:
    """What one of PyTorch's optimizers keeps.

    Attributes
    ----------
    fields : callable
        Takes a group; returns the rule's fields.
    slots : dict
        The names of its arrays, by slot: PyTorch's, and bitsandbytes'.
    fixed : dict
        Options with the only value that the rule can be.
    count : callable
        Takes a group and a tensor's state; returns the number of updates (SGD's only shows whether there was one).
    """

    fields: Callable[[Mapping[str, Any]], dict[str, Any]]
    slots: dict[str, tuple[str, ...]]
    fixed: dict[str, Any]
    count: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]


def _adam(group: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Adam and AdamW, and most of LAMB's."""
    beta1, beta2 = group["betas"]
    numbers = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
    return {**{k: float(x) for k, x in numbers.items()}, "weight_decay": float(group["weight_decay"])}


def _adamw(group: Mapping[str, Any]) -> dict[str, Any]:
    """PyTorch's; apex and bitsandbytes have no amsgrad, and apex may leave out the bias correction."""
    switches = {"amsgrad": False, "bias_correction": True}
    return {**_adam(group), **{name: bool(group.get(name, x)) for name, x in switches.items()}}


def _lamb(group: Mapping[str, Any]) -> dict[str, Any]:
    """timm's and apex's: without decay there is no trust ratio, unless timm's `always_adapt`."""
    return {
        **_adam(group),
        "bias_correction": bool(group["bias_correction"]),
        "grad_averaging": bool(group["grad_averaging"]),
        "adapt": group["weight_decay"] != 0 or bool(group.get("always_adapt")),
        "max_ratio": 1.0 if group.get("trust_clip") else None,
    }


def _sgd(group: Mapping[str, Any]) -> dict[str, Any]:
    """PyTorch's: without momentum there is no dampening."""
    fields = {k: float(group[k]) for k in ("lr", "momentum", "dampening", "weight_decay")}
    return {**fields, "dampening": fields["dampening"] * (fields["momentum"] != 0), "nesterov": bool(group["nesterov"])}


def _rmsprop(group: Mapping[str, Any]) -> dict[str, Any]:
    fields = {k: float(group[k]) for k in ("lr", "alpha", "eps", "weight_decay", "momentum")}
    return {**fields, "centered": bool(group["centered"])}


def _decoupled(group: Mapping[str, Any]) -> dict[str, Any]:
    """RAdam's, and most of NAdam's."""
    return {**_adam(group), "decoupled": bool(group["decoupled_weight_decay"])}


def _nadam(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**_decoupled(group), "momentum_decay": float(group["momentum_decay"])}


_MOMENTS: dict[str, tuple[str, ...]] = {"m": ("exp_avg", "state1"), "v": ("exp_avg_sq", "state2")}
_ADAMW = _Source(
    fields=_adamw,
    slots={**_MOMENTS, "v_max": ("max_exp_avg_sq",)},
    fixed={"maximize": False, "decoupled_weight_decay": True},
    count=lambda group, state: state.get("step", group.get("step", 0) if state else 0),  # apex counts for a group
)
_SOURCES: dict[type[Rule], _Source] = {
    AdamW: _ADAMW,
    Adam: replace(_ADAMW, fixed={"maximize": False, "decoupled_weight_decay": False}),
    SGD: _Source(
        fields=_sgd,
        slots={"buf": ("momentum_buffer", "state1")},
        fixed={"maximize": False},
        count=lambda group, state: bool({"momentum_buffer", "state1"} & state.keys()),
    ),
    RMSprop: _Source(
        fields=_rmsprop,
        slots={"v": ("square_avg",), "m": ("grad_avg",), "buf": ("momentum_buffer",)},
        fixed={"maximize": False},
        count=_ADAMW.count,
    ),
    NAdam: replace(_ADAMW, fields=_nadam, slots={**_MOMENTS, "mu_product": ("mu_product",)}, fixed={"maximize": False}),
    RAdam: replace(_ADAMW, fields=_decoupled, slots=_MOMENTS, fixed={"maximize": False}),
    LAMB: _Source(
        fields=_lamb,
        slots=_MOMENTS,
        fixed={"caution": False, "decoupled_decay": False},
        count=lambda group, state: group.get("step", 0),
    ),
}
_KNOWN = {
    "amsgrad",
    "nesterov",
    "bias_correction",
    "grad_averaging",
    "always_adapt",
    "trust_clip",
    "corrected_weight_decay",
    "centered",
    "decoupled_weight_decay",
}
_KNOWN |= {"foreach", "fused", "capturable", "differentiable"}  # how it is computed, and not what
"""Switches that are translated, or that change no result."""


def load_torch(
    opt: "Optimizer | torch.optim.Optimizer", state: Mapping[str, Any], *, names: Sequence[str] | None = None
) -> None:
    """Go on from the state of ``torch.optim``'s AdamW, Adam, SGD, RMSprop, NAdam or RAdam, or of their like elsewhere.

    Parameters
    ----------
    opt : Optimizer
        Of this package, or of `arrayopt.torch`. Over the same parameters, of any library, under the rule of that name
        (`LAMB` for Lamb) with the same switches. Tensors that PyTorch has in groups with different options must be in
        groups of their own here, too.
    state : dict
        What ``state_dict()`` of PyTorch's optimizer returned; of timm's Lamb; of apex's FusedAdam, FusedLAMB or
        FusedSGD; or of bitsandbytes' Adam, AdamW or SGD with 32-bit state.
    names : sequence of str, optional
        For each of PyTorch's parameters, in the order of its groups, the name of the tensor here. By default the
        names that PyTorch's optimizer was given, if it was; else, where it has a single group, or where `opt` is one of
        `arrayopt.torch` with groups as large as PyTorch's, the names here in their order.

    Raises
    ------
    TypeError
        If `state` is no such dict, or `opt` no such Optimizer.
    ValueError
        If it does not fit, listing every mismatch, or has an option that has no counterpart, such as ``maximize``.
        Nothing has been changed then.

    Notes
    -----
    Hyper-parameters become PyTorch's, except those that are schedules here, which stay. `step_count`, which schedules
    see, becomes the largest number of updates of a tensor; PyTorch's SGD keeps none, so that it stays as it is: set it.
    ``max_grad_norm`` of timm and apex becomes `clip_norm`. apex does not save ``adam_w_mode``: the rule says which it
    is. bitsandbytes' Adam decays as AdamW does; on a GPU after the update, so that p differs by lr² λ u in each step.
    Options about how PyTorch computes, such as ``foreach``, mean nothing. The parameters themselves are not touched.

    Examples
    --------
    >>> import torch, arrayopt as ao
    >>> w = torch.nn.Parameter(torch.ones(3))
    >>> theirs = torch.optim.AdamW([w], lr=0.1)
    >>> w.grad = torch.ones(3)
    >>> theirs.step()
    >>> opt = ao.Optimizer({"w": w}, ao.AdamW())
    >>> ao.load_torch(opt, theirs.state_dict())
    >>> opt.lr, opt.step_count, opt.state["w"]["t"]
    (0.1, 1, 1)
    """
    under = below(opt)
    source = _SOURCES.get(type(under.rule)) if isinstance(under, Optimizer) else None
    if source is None:
        named = ", ".join(kind.__name__ for kind in _SOURCES)
        raise TypeError(f"load_torch: `opt` must be an Optimizer under {named}; got {said(under)}")
    with under._team.warned("load_torch"):
        other = [f"{g.label!r} {type(g.rule).__name__}" for g in under.groups if type(g.rule) is not type(under.rule)]
        if other:
            raise TypeError(
                f"load_torch: all groups must be under {type(under.rule).__name__}, as in one optimizer of PyTorch;"
                f" group {', group '.join(other)}"
            )
        saved = _read(under, source, state, _in_order(opt, under, state) if names is None else names)
    under._restore(saved, "load_torch")
    below(opt)  # its groups say so, too


def _in_order(outer: Any, opt: Optimizer, state: Any) -> list[str] | None:
    """The names here in their order, where `arrayopt.torch` has groups as large as those of a state without names."""
    groups = state.get("param_groups", ()) if isinstance(state, Mapping) else ()
    if outer is opt or any("param_names" in group for group in groups):
        return None
    sizes = [[len(group["params"]) for group in every] for every in (groups, outer.param_groups)]
    return list(opt.state) if sizes[0] == sizes[1] else None


def _read(opt: Optimizer, source: _Source, state: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """The state dict that the optimizer is to have; see `load_torch`."""
    try:
        return _translated(opt, source, state["param_groups"], state["state"], names)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if str(error).startswith("load_torch:"):
            raise
        raise TypeError(
            f"load_torch: needs what state_dict() of PyTorch's {type(opt.rule).__name__} returned; {error!r}"
        ) from error


def _translated(
    opt: Optimizer, source: _Source, groups: Any, states: Any, names: Sequence[str] | None
) -> dict[str, Any]:
    """The state dict that the optimizer is to have."""
    _check_options(type(opt.rule).__name__, source, groups)
    home = _homes(groups, list(opt.state), names)
    saved = opt.state_dict()
    agreed = [_agreed(g.label, {name: source.fields(groups[home[name][0]]) for name in g.names}) for g in opt.groups]
    put_fields(saved["rule"], {k: x for k, x in agreed[-1].items() if k in saved["rule"]["hypers"]})
    for group, was, fields in zip(opt.groups, saved["groups"], agreed, strict=True):
        put_fields(was, fields)
        own = {k for k in fields.keys() & was["hypers"].keys() if was["hypers"][k] != saved["rule"]["hypers"][k]}
        was["own"] = sorted(own.union(was["own"]))
        for tensor in group.tensors:
            i, index = home[tensor.name]
            theirs = {k: x for k, x in states.get(index, {}).items() if x is not None}
            if any(k.startswith(("qmap", "absmax")) for k in theirs):
                raise ValueError(
                    f"load_torch: the state of {tensor.name!r} is in 8 bits, which are not read; give bitsandbytes'"
                    " optimizer optim_bits=32"
                )
            slots = new_slots(group.rule, tensor.name, tensor.array)
            if theirs:
                slots |= {k: _cast(_found(theirs, source.slots[k]), x) for k, x in slots.items() if k in source.slots}
            saved["tensors"][tensor.name].update(t=int(source.count(groups[i], theirs)), slots=slots)
    if isinstance(opt.rule, LAMB):
        limits = {f"group {i}": {"max_grad_norm": group["max_grad_norm"]} for i, group in enumerate(groups)}
        saved["clip_norm"] = _agreed("all", limits)["max_grad_norm"]
    if not isinstance(opt.rule, SGD):
        saved["step"] = max(about["t"] for about in saved["tensors"].values())
    return saved


def _check_options(rule: str, source: _Source, groups: Any) -> None:
    """Raise ValueError for an option that would change results and has no counterpart."""
    wrong = []
    for i, group in enumerate(groups):
        wrong += [
            f"{key}={group[key]!r} in group {i}, where {rule} is {key}={value}"
            for key, value in source.fixed.items()
            if key in group and bool(group[key]) != value
        ]
        odd = sorted(k for k, x in group.items() if x is True and k not in _KNOWN | source.fixed.keys())
        wrong += [f"{key}=True in group {i}, which is not known here" for key in odd]
    if wrong:
        raise ValueError(f"load_torch: there is no counterpart for {'; '.join(wrong)}")


def _homes(groups: Any, here: list[str], names: Sequence[str] | None) -> dict[str, tuple[int, Any]]:
    """For the name of each tensor the group, and the key of the state, that PyTorch has for it."""
    places = [(i, index) for i, group in enumerate(groups) for index in group["params"]]
    if names is None:
        given = [name for group in groups for name in group.get("param_names", ())]
        names = given or (here if len(groups) == 1 else ())
    if len(names) != len(places) or sorted(names) != sorted(here):
        raise ValueError(
            f"load_torch: `names` must be the {len(places)} tensors of PyTorch's {len(groups)} groups in their order,"
            f" of those here, {here}; got {list(names)}"
        )
    return dict(zip(names, places, strict=True))


def _agreed(label: str, fields: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What all tensors of a group have, by field."""
    first = next(iter(fields.values()))
    differing = [key for key in first if any(other[key] != first[key] for other in fields.values())]
    if differing:
        said = "; ".join(f"{key} of {', '.join(f'{n!r} is {x[key]}' for n, x in fields.items())}" for key in differing)
        raise ValueError(f"load_torch: tensors with different options need groups of their own; in {label!r}, {said}")
    return first


def _found(theirs: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """An array of a tensor's state, under the name that it has there."""
    return next((theirs[name] for name in names if name in theirs), None)


def _cast(x: Any, slot: Array) -> Any:
    """An array in the dtype of a slot; what is none, and complex for real, as it is."""
    if not is_array(x) or kind(x) != kind(slot):
        return x
    xp = array_namespace(x)
    return xp.astype(x, getattr(xp, dtype_name(slot)))
