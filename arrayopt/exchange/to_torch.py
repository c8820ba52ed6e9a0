"""The state of an `Optimizer`, as PyTorch's optimizer of the same rule writes it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from arrayopt.arrays import dtype_name, is_array, to_host
from arrayopt.exchange.given import below, said
from arrayopt.optimizer import Optimizer
from arrayopt.rules import SGD, Adam, AdamW, Rule
from arrayopt.rules.names import AROUND

if TYPE_CHECKING:
    import torch

__all__ = ["to_torch"]

_SLOTS = {"m": "exp_avg", "v": "exp_avg_sq", "v_max": "max_exp_avg_sq", "buf": "momentum_buffer"}


def _adam(h: Mapping[str, Any], rule: Any) -> dict[str, Any]:
    numbers = {"lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "eps": h["eps"], "weight_decay": h["weight_decay"]}
    return {**numbers, "amsgrad": rule.amsgrad}


def _sgd(h: Mapping[str, Any], rule: Any) -> dict[str, Any]:
    return {**{k: h[k] for k in ("lr", "momentum", "dampening", "weight_decay")}, "nesterov": rule.nesterov}


_THEIRS: dict[type[Rule], tuple[str, Callable[..., dict[str, Any]], dict[str, Any]]] = {
    AdamW: ("AdamW", _adam, {"bias_correction": True, "nesterov": False, "eps_root": 0.0}),
    Adam: ("Adam", _adam, {"bias_correction": True, "nesterov": False, "eps_root": 0.0}),
    SGD: ("SGD", _sgd, {}),
}
"""For each rule PyTorch's class, the options of a group, and what it cannot do: fields with their only value."""

_COMMON = {"grad_centralization": False, "stacked": False, "state_dtype": None, "rounding": "nearest"}
_COMMON |= dict.fromkeys(("clip_value", "clip_tensor_norm", "clip_unit_ratio", "lookahead_steps", "project"))


def to_torch(opt: "Optimizer | torch.optim.Optimizer") -> dict[str, Any]:
    """The state of an optimizer, for ``load_state_dict`` of ``torch.optim``'s AdamW, Adam or SGD.

    Parameters
    ----------
    opt : Optimizer
        Of this package, or of `arrayopt.torch`. Under `AdamW`, `Adam` or `SGD`; its parameters may be of any library.

    Returns
    -------
    dict
        What ``state_dict()`` of PyTorch's optimizer would return: ``state`` by the numbers of the parameters, and
        ``param_groups``, a group for each group of `opt`, in their order, with the names of its parameters. Schedules
        become their values at the next step. Arrays are tensors on the CPU; loading brings them to the parameters.

    Raises
    ------
    TypeError
        If `opt` is no Optimizer under one of these rules.
    ValueError
        If it does something that PyTorch's optimizer cannot do, listing what.
    ImportError
        If PyTorch is not installed.

    Notes
    -----
    The parameters themselves are not in it, and neither are moving averages (`ema_decay`). What the optimizer does
    around its rule, such as `clip_norm`, is up to PyTorch's loop.

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

    outer, opt = opt, below(opt)
    if not isinstance(opt, Optimizer) or any(type(group.rule) not in _THEIRS for group in opt.groups):
        raise TypeError(f"to_torch: `opt` must be an Optimizer under AdamW, Adam or SGD; got {said(opt)}")
    _check(opt)
    kind, options, _ = _THEIRS[type(opt.groups[0].rule)]
    saved, rules = opt.state_dict()["tensors"], [group.rule for group in opt.groups]
    upward = [False for _ in rules]
    if outer is not opt:
        upward = [bool(group.get("maximize")) for group in outer.param_groups if group["params"]]
    here = [
        {
            "params": [(name, torch.empty(saved[name]["shape"], device="meta")) for name in group.names],
            **options(rule.at(opt.step_count), rule),
            "maximize": up,
        }
        for group, rule, up in zip(opt.groups, rules, upward, strict=True)
    ]
    made: dict[str, Any] = getattr(torch.optim, kind)(here, lr=0.0).state_dict()
    names = [name for group in opt.groups for name in group.names]
    made["state"] = {
        i: _state(torch, saved[name], counted=kind != "SGD") for i, name in enumerate(names) if saved[name]["t"]
    }
    return made


def _check(opt: Optimizer) -> None:
    """Raise ValueError for what PyTorch's optimizer cannot do."""
    first, wrong = type(opt.groups[0].rule), list[str]()
    for group in opt.groups:
        rule, who = group.rule, f"group {group.label!r}"
        if type(rule) is not first:
            wrong.append(f"{who} is under {type(rule).__name__}, and {opt.groups[0].label!r} under {first.__name__}")
            continue
        fixed = {**_COMMON, **_THEIRS[first][2]}
        wrong += [f"{k}={getattr(rule, k)!r} in {who}" for k, x in fixed.items() if getattr(rule, k) != x]
        wrong += [f"the master of {name!r}" for name in group.names if "master" in opt.state[name]]
    if wrong:
        raise ValueError(f"to_torch: torch.optim.{_THEIRS[first][0]} has no counterpart for {'; '.join(wrong)}")


def _state(torch: Any, about: Mapping[str, Any], *, counted: bool) -> dict[str, Any]:
    """The state of one tensor."""
    slots = {k: x for k, x in about["slots"].items() if k in _SLOTS and k not in AROUND and is_array(x)}
    step = {"step": torch.tensor(float(about["t"]))} if counted else {}
    return step | {_SLOTS[k]: _tensor(torch, x) for k, x in slots.items()}


def _tensor(torch: Any, x: Any) -> Any:
    """An array as a tensor on the CPU."""
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().clone()
    host = to_host(x)
    if dtype_name(host) == "bfloat16":
        return torch.tensor(host.view("int16")).view(torch.bfloat16)
    return torch.tensor(host)
