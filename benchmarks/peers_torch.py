"""Optimizers of PyTorch, and written for it, as contestants."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.contest import Contestant, Running, by_threads
from benchmarks.ours import STATE
from benchmarks.problems import Problem

__all__ = ["contestants"]

DISTRIBUTIONS = {"torch": "PyTorch", "came_pytorch": "came-pytorch"}

Make = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Peer:
    """An optimizer class with options.

    Attributes
    ----------
    rule : str
        Which of our rules it computes.
    name : str
        What tables call it.
    module : str
        What it is imported from.
    make : callable
        Of a list of tensors makes an optimizer.
    extra : float
        Arrays that a step makes, each as large as all parameters together, about.
    spoils_grads : bool
        Whether it writes into the gradients, so that they must be put right before each step.
    curved : bool
        Whether it makes less work of gradients that do not change: each step gets those of a quadratic function.
    """

    rule: str
    name: str
    module: str
    make: Make
    extra: float = 1.0
    spoils_grads: bool = False
    curved: bool = False


def _of(module: str, name: str, **options: Any) -> Make:
    """Makes an optimizer of that class, which is imported when it is first wanted."""
    if module == "timm":
        return lambda params: getattr(_timm(name.lower()), name)(params, **options)
    return lambda params: getattr(importlib.import_module(module), name)(params, **options)


def _training(make: Make) -> Make:
    """The same, told that it is to train."""

    def build(params: list[Any]) -> Any:
        opt = make(params)
        opt.train()
        return opt

    return build


def _timm(module: str) -> ModuleType:
    """A module of timm.optim, imported past timm itself, which wants torchvision (made for the same PyTorch)."""
    package = "benchmarks_timm_optim"
    if package not in sys.modules:
        spec = find_spec("timm")
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(Path(folder) / "optim") for folder in spec.submodule_search_locations]
    return importlib.import_module(f"{package}.{module}")


# No global clipping by timm's Lamb, and weight decay within the update for both LAMBs, as ours.
TIMM_LAMB = {"lr": 1e-3, "weight_decay": 0.01, "max_grad_norm": None}
PO_LAMB = {"lr": 1e-3, "weight_decay": 0.01, "weight_decouple": False}
LARS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
ADAMW = {"lr": 1e-3, "weight_decay": 0.01}
SGD = {"lr": 0.01, "momentum": 0.9}
LION = {"lr": 1e-4, "weight_decay": 0.01}
LBFGS = {"lr": 1.0, "history_size": 5, "max_iter": 1, "tolerance_grad": 0.0, "tolerance_change": 0.0}
FREE = {"lr": 2.5e-3, "weight_decay": 0.01}

PEERS = [
    Peer("LAMB", "timm", "timm", _of("timm", "Lamb", **TIMM_LAMB, foreach=False), 0.8),
    Peer("LAMB", "timm foreach", "timm", _of("timm", "Lamb", **TIMM_LAMB, foreach=True), 2),
    Peer("LAMB", "pytorch_optimizer", "pytorch_optimizer", _of("pytorch_optimizer", "Lamb", **PO_LAMB), 2),
    Peer("CAME", "came-pytorch", "came_pytorch", _of("came_pytorch", "CAME", lr=2e-4), 0.8),
    Peer("CAME", "pytorch_optimizer", "pytorch_optimizer", _of("pytorch_optimizer", "CAME", lr=2e-4), 3),
    Peer("LARS", "timm", "timm", _of("timm", "Lars", **LARS, foreach=False), 0.8),
    Peer("LARS", "timm foreach", "timm", _of("timm", "Lars", **LARS, foreach=True), 2),
    Peer("LARS", "pytorch_optimizer", "pytorch_optimizer", _of("pytorch_optimizer", "LARS", **LARS), 1, True),
    Peer("AdamW", "torch fused", "torch", _of("torch.optim", "AdamW", **ADAMW, fused=True), 0),
    Peer("AdamW", "torch foreach", "torch", _of("torch.optim", "AdamW", **ADAMW, foreach=True), 2),
    Peer("SGD", "torch fused", "torch", _of("torch.optim", "SGD", **SGD, fused=True), 0),
    Peer("SGD", "torch foreach", "torch", _of("torch.optim", "SGD", **SGD, foreach=True), 1),
    Peer("Lion", "timm foreach", "timm", _of("timm", "Lion", **LION, foreach=True), 2),
    Peer("Lion", "pytorch_optimizer", "pytorch_optimizer", _of("pytorch_optimizer", "Lion", **LION), 1),
    Peer("RMSprop", "torch foreach", "torch", _of("torch.optim", "RMSprop", lr=1e-3, foreach=True), 2),
    Peer("NAdam", "torch foreach", "torch", _of("torch.optim", "NAdam", lr=2e-3, foreach=True), 2),
    Peer("RAdam", "torch foreach", "torch", _of("torch.optim", "RAdam", lr=1e-3, foreach=True), 2),
    Peer("Adan", "timm foreach", "timm", _of("timm", "Adan", **ADAMW, foreach=True), 2),
    Peer("Adan", "pytorch_optimizer", "pytorch_optimizer", _of("pytorch_optimizer", "Adan", **ADAMW), 2),
    Peer(
        "AdEMAMix",
        "pytorch_optimizer",
        "pytorch_optimizer",
        _of("pytorch_optimizer", "AdEMAMix", **ADAMW, weight_decouple=True),
        2,
    ),
    Peer(
        "ScheduleFreeAdamW",
        "schedulefree",
        "schedulefree",
        _training(_of("schedulefree", "AdamWScheduleFree", **FREE, foreach=True)),
        2,
        True,
    ),
    Peer("Prodigy", "prodigyopt", "prodigyopt", _of("prodigyopt", "Prodigy", lr=1.0, growth_rate=1.02), 2),
    Peer("LBFGS", "torch", "torch", _of("torch.optim", "LBFGS", **LBFGS), 6, curved=True),
]


def contestants(rule: str, problem: Problem, clip: float | None = None) -> list[Contestant]:
    """The peers of a rule; with `clip`, `torch.nn.utils.clip_grad_norm_` before each step."""
    size = 4.0 * problem.elements
    return [
        Contestant(
            peer.name,
            lambda peer=peer: _running(peer, problem, clip),
            held=size * (1 + STATE[rule] + peer.spoils_grads),
            extra=size * peer.extra,
            left_out=_missing("torch") or _missing(peer.module),
        )
        for peer in PEERS
        if peer.rule == rule
    ]


def _missing(module: str) -> str:
    return "" if find_spec(module) else f"{DISTRIBUTIONS.get(module, module)} is not installed"


def _running(peer: Peer, problem: Problem, clip: float | None) -> Running:
    import torch

    params = [torch.from_numpy(x).clone().requires_grad_() for x in problem.params()]
    grads = [torch.from_numpy(x) for x in problem.grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone() if peer.spoils_grads else g
    opt = peer.make(params)

    def restore() -> None:
        for p, g in zip(params, grads, strict=True):
            if peer.spoils_grads:
                p.grad.copy_(g)
            elif peer.curved:
                p.grad = p.detach() * g.abs()

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(params, clip)
        opt.step()

    step = (lambda: opt.step(lambda: 0.0)) if peer.curved else opt.step if clip is None else clipped
    return Running(step, lambda: [p.detach().numpy() for p in params], restore, by_threads(torch.set_num_threads))
