"""`to_torch`: converts the state of an `Optimizer` to that of PyTorch's optimizer with the same rule."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from arrayopt.arrays import dtype_name, is_array, of_host, to_host
from arrayopt.exchange.eight_bits import put_codes
from arrayopt.exchange.given import below, described
from arrayopt.exchange.sources import SOURCES
from arrayopt.optimizer import Optimizer
from arrayopt.rules import SGD, Adafactor, Adam, AdamW, Muon, NAdam, RAdam, RMSprop, Rule
from arrayopt.saving.differences import describe
from arrayopt.state.convert import converted

if TYPE_CHECKING:
    import torch


def _adam(h: Mapping[str, Any], rule: Any) -> dict[str, Any]:
    numbers = {"lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "eps": h["eps"], "weight_decay": h["weight_decay"]}
    return {**numbers, "amsgrad": rule.amsgrad} if hasattr(rule, "amsgrad") else numbers


def _decoupled(h: Mapping[str, Any], rule: Any) -> dict[str, Any]:
    return {**_adam(h, rule), "decoupled_weight_decay": rule.decoupled}


def _nadam(h: Mapping[str, Any], rule: Any) -> dict[str, Any]:
    return {**_decoupled(h, rule), "momentum_decay": h["momentum_decay"]}


def _sgd(h: Mapping[str, Any], rule: Any) -> dict[str, Any]:
    return {**{k: h[k] for k in ("lr", "momentum", "dampening", "weight_decay")}, "nesterov": rule.nesterov}


def _rmsprop(h: Mapping[str, Any], rule: Any) -> dict[str, Any]:
    return {**{k: h[k] for k in ("lr", "alpha", "eps", "weight_decay", "momentum")}, "centered": rule.centered}


def _adafactor(h: Mapping[str, Any], rule: Any) -> dict[str, Any]:
    numbers = {"lr": h["lr"], "beta2_decay": -h["decay_rate"], "eps": (h["eps1"], h["eps_scale"])}
    return {**numbers, "d": h["clip_threshold"], "weight_decay": h["weight_decay"]}


def _muon(h: Mapping[str, Any], rule: Any) -> dict[str, Any]:
    numbers = {k: h[k] for k in ("lr", "weight_decay", "momentum", "eps")}
    switches = {k: getattr(rule, k) for k in ("nesterov", "ns_coefficients", "ns_steps")}
    return {**numbers, **switches, "adjust_lr_fn": rule.scale}


_THEIRS: dict[type[Rule], Callable[..., dict[str, Any]]] = {
    AdamW: _adam,
    Adam: _adam,
    SGD: _sgd,
    RMSprop: _rmsprop,
    NAdam: _nadam,
    RAdam: _decoupled,
    Adafactor: _adafactor,
    Muon: _muon,
}
"""For each rule, a function that returns the options of a group of the class with the same name in PyTorch."""

_FREE = {"lookahead_alpha", "ema_decay", "master_weights", "seed", "matrix", "ns_dtype"}
"""Fields that may have any value: alone they do not change parameters, or they select what PyTorch does anyway."""


_FORMS = ("torch", "bitsandbytes", "torchao")
"""The packages whose optimizers load a state; those of all but the first with codes of 8 bits."""


def to_torch(
    opt: "Optimizer | torch.optim.Optimizer", *, form: Literal["torch", "bitsandbytes", "torchao"] = "torch"
) -> dict[str, Any]:
    """Convert the state of an optimizer for ``load_state_dict`` of the ``torch.optim`` optimizer with the same name.

    Parameters
    ----------
    opt : Optimizer
        Of this package, or of `arrayopt.torch`. Under `AdamW`, `Adam`, `SGD`, `RMSprop`, `NAdam`, `RAdam`, `Adafactor`
        with ``variant="pytorch"``, or `Muon` over matrices; its parameters may be of any library.
    form : {'torch', 'bitsandbytes', 'torchao'}
        The package of the optimizer that loads the state. Those of bitsandbytes and torchao are ``AdamW8bit`` for
        `AdamW` and ``Adam8bit`` for `Adam`, with any `state_dtype`.

    Returns
    -------
    dict
        A state dict of PyTorch's optimizer: ``state`` by parameter number, and ``param_groups``, one for each group of
        `opt`, with the names of its parameters. Schedules become their values at the next step. Arrays are tensors on
        the CPU; loading copies them to the devices of the parameters.

    Raises
    ------
    TypeError
        If `opt` is not an Optimizer with one of these rules.
    ValueError
        If it has features that the other optimizer lacks, with a list of them, or if `form` is not one of these.
    ImportError
        If PyTorch is not installed, or torchao for its form.

    Notes
    -----
    The result does not contain parameters or moving averages (`ema_decay`). Options of the optimizer, such as
    `clip_norm`, belong to PyTorch's loop. PyTorch has separate second moments for the two parts of a complex tensor:
    each gets half. As in bitsandbytes and torchao, tensors of fewer than 4,096 elements have no codes, and for torchao
    those that are not divisible into blocks of 256.

    Examples
    --------
    >>> import torch, numpy as np, arrayopt as ao
    >>> opt = ao.Optimizer({"w": np.ones(3, np.float32)}, ao.AdamW(lr=0.1))
    >>> params = opt.step({"w": np.ones(3, np.float32)})
    >>> theirs = torch.optim.AdamW([("w", torch.nn.Parameter(torch.tensor(params["w"])))])
    >>> theirs.load_state_dict(ao.to_torch(opt))
    >>> theirs.param_groups[0]["lr"]
    0.1
    """
    import torch

    if form not in _FORMS:
        raise ValueError(f"to_torch: `form` must be one of {', '.join(map(repr, _FORMS))}; got {form!r}")
    outer, opt, narrow = opt, below(opt), form != "torch"
    allowed = (AdamW, Adam) if narrow else (*_THEIRS,)
    if not isinstance(opt, Optimizer) or any(type(group.rule) not in allowed for group in opt.groups):
        known = ", ".join(rule.__name__ for rule in allowed) + f" for form={form!r}" * narrow
        raise TypeError(f"to_torch: `opt` must be an Optimizer with the rule {known}; got {described(opt)}")
    named = sorted({type(group.rule).__name__ for group in opt.groups})
    if named != ["Adam", "AdamW"] and len(named) > 1:
        raise TypeError(
            "to_torch: all groups must have the same rule, because an optimizer of PyTorch has one rule; got"
            f" {', '.join(named)}"
        )
    kind = type(opt.groups[0].rule)
    theirs = f"{kind.__name__}8bit of {form}" if narrow else f"torch.optim.{kind.__name__}"
    _check(opt, theirs)
    options = _THEIRS[kind]
    whole, rules = opt.state_dict(), [group.rule for group in opt.groups]
    saved, micro_steps, every = whole["tensors"], whole["extra"]["micro_steps"], whole["extra"]["accumulate"]
    maximized = [False for _ in rules]
    if outer is not opt:
        maximized = [bool(group.get("maximize")) for group in outer.param_groups if group["params"]]
    here = [
        {
            "params": [(name, torch.empty(saved[name]["shape"], device="meta")) for name in group.names],
            **options(rule.at(opt.step_count), rule),
            "maximize": maximize,
        }
        for group, rule, maximize in zip(opt.groups, rules, maximized, strict=True)
    ]
    made: dict[str, Any] = getattr(torch.optim, kind.__name__)(here, lr=0.0).state_dict()
    wrong = []
    if micro_steps:
        wrong.append(f"accumulated gradients, after micro-step {micro_steps} of {every}")
    for group, saved_group in zip(opt.groups, made["param_groups"], strict=True):
        rule = dataclasses.replace(group.rule, state_dtype=None) if narrow else group.rule
        lost = _lost(rule, opt.step_count, SOURCES[kind].fields(saved_group))
        lost += _lacking(form, group, saved_group) if narrow else []
        wrong += [f"{field} in group {group.label!r}" for field in lost]
    _refuse(theirs, wrong)
    tensors = [(group.rule, tensor) for group in opt.groups for tensor in group.tensors]
    for i, (rule, tensor) in enumerate(tensors):
        about = saved[tensor.name]
        if narrow:
            about["slots"] = converted(tensor.array, about["slots"], rule, dataclasses.replace(rule, state_dtype=None))
        if about["t"]:
            made["state"][i] = _state(torch, kind, about)
    if narrow:
        put_codes(form, made)
    if outer is not opt:
        _put_guests(made, outer)
    return made


def _put_guests(made: dict[str, Any], outer: Any) -> None:
    """Copy the entries of other code, such as schedulers and wrappers, from `arrayopt.torch` to a state dict."""
    for saved, group in zip(made["param_groups"], (x for x in outer.param_groups if x["params"]), strict=True):
        saved.update(group.guests())
    for i, p in enumerate(outer._below.params):
        if i in made["state"]:  # otherwise PyTorch's first update would take the entries for its own state
            made["state"][i].update(outer._guests.get(p, {}))
    made["state"].update({key: x for key, x in outer._guests.items() if isinstance(key, str)})


def _lacking(form: str, group: Any, options: Mapping[str, Any]) -> list[str]:
    """What a group has that bitsandbytes' or torchao's Adam lacks, and PyTorch's has."""
    wrong = [f"complex {x.name!r}" for x in group.tensors if dtype_name(x.array).startswith("complex")]
    wrong += ["maximize=True"] if options["maximize"] else []
    if form == "bitsandbytes":
        wrong += ["amsgrad=True"] if options["amsgrad"] else []
        coupled = type(group.rule) is Adam and options["weight_decay"]
        wrong += [f"weight_decay={coupled!r}, which it applies as AdamW does,"] if coupled else []
    return wrong


def _check(opt: Optimizer, theirs: str) -> None:
    """Raise ValueError for rules and tensors that PyTorch's optimizer does not support."""
    first, wrong = type(opt.groups[0].rule), list[str]()
    for group in opt.groups:
        rule, who = group.rule, f"group {group.label!r}"
        if type(rule) is not first:
            wrong.append(f"{who} is under {type(rule).__name__}, and {opt.groups[0].label!r} under {first.__name__}")
        elif isinstance(rule, Muon):
            wrong += [f"{x.name!r}, which is not a matrix" for x in group.tensors if len(x.shape) != 2]
            several = isinstance(rule.ns_coefficients[0], tuple)
            wrong += [f"ns_coefficients={rule.ns_coefficients!r} in {who}"] if several else []
            wrong += [f"scale='none' in {who}"] if rule.scale == "none" else []
        elif isinstance(rule, Adafactor) and rule.variant != "pytorch":
            wrong.append(f"variant={rule.variant!r} in {who}")
        wrong += [f"the master of {name!r}" for name in group.names if "master" in opt.state[name]]
    _refuse(theirs, wrong)


def _refuse(theirs: str, wrong: list[str]) -> None:
    """Raise ValueError if the list of features that PyTorch's optimizer lacks is not empty."""
    if wrong:
        how = ""
        if any(x.startswith("state_dtype=") for x in wrong):
            how = "; set `state_dtype` to None first: in each of param_groups, or on an arrayopt.Optimizer"
        raise ValueError(f"to_torch: {theirs} has no counterpart for {'; '.join(wrong)}{how}")


def _lost(rule: Rule, step: int, read: Mapping[str, Any]) -> list[str]:
    """The fields whose values differ from those `read` back from PyTorch's options, or else from their defaults."""
    here = {**describe(rule)["switches"], **rule.at(step)}
    kept = {f.name: read.get(f.name, f.default) for f in dataclasses.fields(rule) if f.name not in _FREE}
    return [f"{name}={getattr(rule, name)!r}" for name, value in kept.items() if here[name] != value]


def _state(torch: Any, kind: type[Rule], about: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one tensor in PyTorch's form."""
    names = SOURCES[kind].slots
    made = {} if kind in (SGD, Muon) else {"step": torch.tensor(float(about["t"]))}
    for slot, array in about["slots"].items():
        if slot not in names or not is_array(array):
            continue
        x = _tensor(torch, array)
        if slot in kind.squares and about["dtype"].startswith("complex"):
            x = torch.complex(x / 2, x / 2)
        if slot in ("r", "c"):  # Adafactor's averages in PyTorch keep the reduced axis
            x = x.unsqueeze(-1 if slot == "r" else -2)
        made[names[slot][0]] = x
    return made


def _tensor(torch: Any, x: Any) -> Any:
    """A copy of an array as a tensor on the CPU."""
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().clone()
    host = to_host(x)
    return of_host(torch.empty((), dtype=getattr(torch, dtype_name(host))), host)
