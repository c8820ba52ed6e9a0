"""`load_torch`: loads the state of a PyTorch optimizer, or a similar one, into an `Optimizer`."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arrayopt.arrays import Array, array_namespace, dtype_name, is_array, kind, of_host, place, size, to_host
from arrayopt.exchange.eight_bits import CODED, dequantized
from arrayopt.exchange.given import below, described, put_fields
from arrayopt.exchange.sources import KNOWN, SOURCES, Source
from arrayopt.foreign import counted
from arrayopt.optimizer import Optimizer
from arrayopt.rules import LAMB, SGD, Muon
from arrayopt.state.convert import converted
from arrayopt.state.slots import new_slots

if TYPE_CHECKING:
    import torch


def load_torch(
    opt: "Optimizer | torch.optim.Optimizer", state: Mapping[str, Any], *, names: Sequence[str] | None = None
) -> None:
    """Load the state of the ``torch.optim`` optimizer with the rule's name, or of a similar one of another library.

    Parameters
    ----------
    opt : Optimizer
        An optimizer of this package or of `arrayopt.torch`, for the same parameters, in any library, with the rule of
        that name (`LAMB` for Lamb) and the same switches. Tensors with different options in PyTorch must be in
        different groups here too.
    state : dict
        The ``state_dict()`` of PyTorch's optimizer; of timm's Lamb; of apex's FusedAdam, FusedLAMB or FusedSGD; of
        bitsandbytes' Adam, AdamW or SGD with 32-bit or 8-bit state; or of torchao's Adam8bit, AdamW8bit, Adam4bit,
        AdamW4bit, AdamFp8 or AdamWFp8.
    names : sequence of str, optional
        The names here of PyTorch's parameters, in the order of its groups. By default, the names that PyTorch's
        optimizer has. If it has none, the names here in their order, if there is a single group, or if `opt` is from
        `arrayopt.torch` with groups of the same sizes.

    Raises
    ------
    TypeError
        If `state` or `opt` is of another type.
    ValueError
        If the state does not match, with a list of every mismatch, or has an option without a counterpart, such as
        ``maximize`` for an `arrayopt.Optimizer`. An optimizer of `arrayopt.torch` must have ``maximize`` for the same
        tensors. Nothing is changed.

    Notes
    -----
    Hyper-parameters become PyTorch's, except schedules, which stay. `step_count`, which schedules use, becomes the
    largest update count of a tensor. PyTorch's SGD and Muon have no counts, so `step_count` does not change: set it.
    PyTorch has separate second moments for the two parts of a complex tensor; here they are added. ``max_grad_norm`` of
    timm and apex becomes `clip_norm`. apex does not save ``adam_w_mode``: the rule says which it is. bitsandbytes' Adam
    decays as AdamW does, so with decay it is `AdamW` here; on a GPU it decays after the update, so that p differs by
    lr² λ u in each step. Options for PyTorch's implementation, such as ``foreach``, are ignored. The parameters are not
    changed.

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
    source = SOURCES.get(type(under.rule)) if isinstance(under, Optimizer) else None
    if source is None:
        named = ", ".join(kind.__name__ for kind in SOURCES)
        raise TypeError(f"load_torch: `opt` must be an Optimizer with the rule {named}; got {described(under)}")
    with under._team.warned("load_torch"):
        other = [f"{g.label!r} {type(g.rule).__name__}" for g in under.groups if type(g.rule) is not type(under.rule)]
        if other:
            raise TypeError(
                f"load_torch: all groups must have the rule {type(under.rule).__name__}, because an optimizer of"
                f" PyTorch has one rule; group {', group '.join(other)}"
            )
        if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
            todo = "; pass its state_dict()" if hasattr(state, "state_dict") else ""
            keys = f" with the keys {[*state][:5]}" if isinstance(state, Mapping) else ""
            raise TypeError(
                f"load_torch: `state` must be a state_dict() of {source.of}; got {described(state)}{keys}{todo}"
            )
        names = _in_order(opt, under, state) if names is None else names
        saved = _read(under, source, state, names, _maximized(opt, under))
    under._restore(saved, "load_torch")
    if opt is not below(opt):
        _take_guests(opt, source, state)


def _in_order(outer: Any, opt: Optimizer, state: Any) -> list[str] | None:
    """All names in order, if the state has none, and groups of the same sizes as an optimizer of `arrayopt.torch`.

    Raise ValueError if the optimizer has several groups of other sizes, in whose order the state need not be.
    """
    groups = state["param_groups"]
    listed = outer is not opt or opt._parameters._by_position
    if not listed or any("param_names" in group for group in groups):
        return None
    here = [len(group.names) for group in opt.groups] if outer is opt else _sizes(outer.param_groups)
    there = _sizes(groups)
    if here != there and sum(map(bool, here)) > 1:
        raise ValueError(
            f"load_torch: the state has no names, and its groups have {there} parameters, those of the optimizer"
            f" {here}; pass `names`, which lists {list(opt.state)} in the order of the state"
        )
    return list(opt.state) if here == there and outer is not opt else None


def _sizes(groups: Any) -> list[int]:
    """The number of parameters in each group."""
    return [len(group.get("params", ())) for group in groups]


def _take_guests(outer: Any, source: Source, state: Mapping[str, Any]) -> None:
    """Copy the entries of other code from a state to `arrayopt.torch`, if their groups have the same sizes."""
    own = {*KNOWN, *CODED, *source.fixed, "step", "max_grad_norm"}.union(*source.slots.values())
    if _sizes(state["param_groups"]) == _sizes(outer.param_groups):
        for saved_group, group in zip(state["param_groups"], outer.param_groups, strict=True):
            guests = type(group)(outer.rule, {key: x for key, x in saved_group.items() if key not in own}).guests()
            group.update(guests)
            for index, p in zip(saved_group["params"], group["params"], strict=True):
                kept = {key: x for key, x in state["state"].get(index, {}).items() if key not in own}
                outer.state[p].update(copy.deepcopy(kept))
        outer.state.update({key: copy.deepcopy(x) for key, x in state["state"].items() if isinstance(key, str)})


def _maximized(outer: Any, opt: Optimizer) -> dict[str, bool] | None:
    """Whether each tensor of `arrayopt.torch` is in a group with `maximize`; None for an `Optimizer`."""
    if outer is opt:
        return None
    flags = [bool(group.get("maximize")) for group in outer.param_groups for _ in dict.fromkeys(group["params"])]
    return dict(zip(opt.state, flags, strict=True))


def _read(
    opt: Optimizer,
    source: Source,
    state: Mapping[str, Any],
    names: Sequence[str] | None,
    maximized: dict[str, bool] | None,
) -> dict[str, Any]:
    """As `_translated`, but raise TypeError if the state does not have the form of a state dict."""
    try:
        return _translated(opt, source, state["param_groups"], state["state"], names, maximized)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if str(error).startswith("load_torch:"):
            raise
        raise TypeError(
            f"load_torch: for {type(opt.rule).__name__}, pass the state_dict() of {source.of}; {error!r}"
        ) from error


def _translated(
    opt: Optimizer,
    source: Source,
    groups: Any,
    states: Any,
    names: Sequence[str] | None,
    maximized: dict[str, bool] | None,
) -> dict[str, Any]:
    """The state dict to load into the optimizer, made from the groups and states of another one."""
    states = dequantized(states)
    _check_keys(type(opt.rule).__name__, source, groups, states)
    _check_options(type(opt.rule).__name__, source, groups, states)
    origins = _origins(groups, list(opt.state), names)
    _check_maximized(groups, origins, maximized)
    saved = opt.state_dict()
    agreed = []
    for g in opt.groups:
        agreed.append(_agreed(g.label, {name: source.fields(groups[origins[name][0]]) for name in g.names}))
    alike = [fields for g, fields in zip(opt.groups, agreed, strict=True) if g.rule.structure == opt.rule.structure]
    if alike:  # the optimizer's own rule gets the values of a group with the same structure
        put_fields(saved["rule"], {k: x for k, x in alike[-1].items() if k in saved["rule"]["hypers"]})
    for group, was, fields in zip(opt.groups, saved["groups"], agreed, strict=True):
        put_fields(was, fields)
        own = {k for k in fields.keys() & was["hypers"].keys() if was["hypers"][k] != saved["rule"]["hypers"][k]}
        was["own"] = sorted(own.union(was["own"]))
        for tensor in group.tensors:
            i, index = origins[tensor.name]
            entry = {k: x for k, x in states.get(index, {}).items() if x is not None}
            wide = dataclasses.replace(group.rule, state_dtype=None)
            slots = new_slots(wide, tensor.name, tensor.array)
            is_complex = kind(tensor.array) == "complex"
            for slot, keys in source.slots.items():
                if entry and slot in slots:
                    slots[slot] = _cast(_found(entry, keys), slots[slot], complex_=is_complex)
            slots = converted(tensor.array, slots, wide, group.rule)
            saved["tensors"][tensor.name].update(t=int(source.count(groups[i], entry)), slots=slots)
    if isinstance(opt.rule, LAMB):
        limits = {f"group {i}": {"max_grad_norm": group["max_grad_norm"]} for i, group in enumerate(groups)}
        saved["clip_norm"] = _agreed("all", limits)["max_grad_norm"]
    if not isinstance(opt.rule, SGD | Muon):
        saved["step"] = max(about["t"] for about in saved["tensors"].values())
    return saved


def _check_keys(rule: str, source: Source, groups: Any, states: Any) -> None:
    """Raise TypeError if a group, or the state of a parameter, lacks keys that the optimizer's state has."""
    who = f"load_torch: under {rule} it needs the state of {source.of}"
    for i, group in enumerate(groups):
        try:
            source.fields(group)
        except KeyError as error:
            raise TypeError(f"{who}; group {i} has no {error}, but {', '.join(map(str, group))}") from error
    for key, state in states.items():
        if isinstance(key, str):  # an entry of other code
            continue
        has = [str(k) for k, x in state.items() if x is not None]
        lacking = [" or ".join(source.slots[slot]) for slot in source.core if not {*source.slots[slot]} & {*has}]
        if has and lacking:
            raise TypeError(f"{who}; that of parameter {key} has no {', no '.join(lacking)}, but {', '.join(has)}")


def _check_maximized(groups: Any, origins: dict[str, tuple[int, Any]], maximized: dict[str, bool] | None) -> None:
    """Raise ValueError if `maximize` differs between the state and the optimizer."""
    saved = {name: bool(groups[i].get("maximize")) for name, (i, _) in origins.items()}
    if maximized is None and any(saved.values()):
        raise ValueError(
            "load_torch: there is no counterpart for maximize=True: an Optimizer minimizes. Load into one of"
            " arrayopt.torch with maximize=True; or set it to False in the state's groups, and negate the gradients"
        )
    here = saved if maximized is None else maximized
    wrong = [f"{name!r} has maximize={x}, here {here[name]}" for name, x in saved.items() if here[name] != x]
    if wrong:
        raise ValueError(f"load_torch: set `maximize` in param_groups as it is in the state: {'; '.join(wrong)}")


def _check_options(rule: str, source: Source, groups: Any, states: Any) -> None:
    """Raise ValueError for an option that changes results and that the rule does not have."""
    wrong = []
    for i, group in enumerate(groups):
        wrong += [
            f"{key}={group[key]!r} in group {i}, where {rule} is {key}={value}"
            for key, value in source.fixed.items()
            if key in group and bool(group[key]) != value
        ]
        odd = sorted(k for k, x in group.items() if x is True and k not in KNOWN | source.fixed.keys())
        wrong += [f"{key}=True in group {i}, which is not known here" for key in odd]
        if rule == "Adam" and group["weight_decay"] and any("state1" in states.get(k, {}) for k in group["params"]):
            wrong.append(
                f"weight_decay={group['weight_decay']} in group {i}, which bitsandbytes' Adam applies as AdamW"
            )
    if wrong:
        raise ValueError(f"load_torch: there is no counterpart for {'; '.join(wrong)}")


def _origins(groups: Any, here: list[str], names: Sequence[str] | None) -> dict[str, tuple[int, Any]]:
    """For each tensor, by name, the index of its group in PyTorch's state, and its key in ``state``."""
    places = [(i, index) for i, group in enumerate(groups) for index in group["params"]]
    if names is None:
        given = [name for group in groups for name in group.get("param_names", ())]
        if given and sorted(given) != sorted(here):
            raise ValueError(
                f"load_torch: the state is for parameters {given}, but the optimizer has {here}; if only the names"
                " differ, pass yours as `names`, in the order of the state"
            )
        if len(places) != len(here):
            raise ValueError(
                f"load_torch: the state is for {counted(len(places), 'parameter')}, but the optimizer has"
                f" {len(here)}, {here}; they must be the same"
            )
        names = given or (here if len(groups) == 1 else ())
        if not names:
            raise ValueError(
                f"load_torch: the state has {counted(len(groups), 'group')} and no names; pass `names`,"
                f" which lists {here} in the order of these groups"
            )
    if len(names) != len(places) or sorted(names) != sorted(here):
        raise ValueError(
            f"load_torch: `names` must name the {counted(len(places), 'tensor')} of PyTorch's groups in their order,"
            f" chosen from {here}; got {list(names)}"
        )
    return dict(zip(names, places, strict=True))


def _agreed(label: str, fields: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The fields of a group, from those of each tensor. Raise ValueError if tensors have different ones."""
    first = next(iter(fields.values()))
    differing = [key for key in first if any(other[key] != first[key] for other in fields.values())]
    if differing:
        said = "; ".join(f"{key} of {', '.join(f'{n!r} is {x[key]}' for n, x in fields.items())}" for key in differing)
        raise ValueError(
            f"load_torch: tensors with different options must be in different groups; in {label!r}, {said}"
        )
    return first


def _found(entry: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The array in a tensor's state under the first of these names that the state has, or None."""
    return next((entry[name] for name in names if name in entry), None)


def _cast(x: Any, slot: Array, *, complex_: bool) -> Any:
    """Convert an array to the library, device, dtype and rank of a slot of the same kind, or return x as it is.

    If the slot of a complex tensor is real, the two parts of x, PyTorch's second moments of both parts, are added.
    """
    if not is_array(x):
        return x
    xp = array_namespace(x)
    if complex_ and kind(x) == "complex" and kind(slot) != "complex":
        x = xp.real(x) + xp.imag(x)
    if kind(x) != kind(slot):
        return x
    if x.ndim == slot.ndim + 1 and size(x) == size(slot):  # Adafactor's averages in PyTorch keep the reduced axis
        x = xp.reshape(x, tuple(slot.shape))
    x = xp.astype(x, getattr(xp, dtype_name(slot)))
    return x if place(x) == place(slot) else of_host(slot, to_host(x))
