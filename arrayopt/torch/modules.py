"""Modules that wait for their parameters, and checks for other users of gradients: DDP and gradient scalers."""

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed import is_available, is_initialized
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from arrayopt.optimizer import Optimizer

_TOLD = WeakSet[Any]()
"""The scalers for which an error was already raised."""

Current = Callable[[], tuple[Optimizer, dict[int, str]] | None]
"""Returns an optimizer and the names of its parameters by their ids, or None once it has been deleted."""


class Hook:
    """Calls a function. Copies and pickles of a hook do nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> Any:
        return Hook, ()


def have_wait(modules: Iterable[Module], current: Current, heard: dict[int, None]) -> list[Any]:
    """Add hooks by which modules wait for their own parameters before the forward pass, saving and loading.

    `current` must not keep the optimizer alive. The ids of parameters whose modules have been called are added to
    `heard`, in the order of the first calls. Return handles that remove the hooks.
    """

    def wait(module: Module, *args: Any) -> None:
        found = current()
        if found is not None and found[0]._step.is_arriving:
            opt, names = found
            for p in module._parameters.values():
                if id(p) in names:
                    opt.wait(names[id(p)])

    def before(module: Module, args: Any) -> None:
        heard.update(dict.fromkeys(map(id, module._parameters.values())))
        wait(module)

    hooks = list[Any]()
    for module in modules:
        hooks.append(module.register_forward_pre_hook(Hook(before)))
        hooks.append(module.register_state_dict_pre_hook(Hook(wait)))
        hooks.append(module.register_load_state_dict_pre_hook(Hook(wait)))
    return hooks


def modules_of(params: Collection[int]) -> list[Module]:
    """All modules in memory that have parameters with these ids. PyTorch does not tell optimizers about modules."""
    found = []
    for x in _every(Module):
        own = list(x.__dict__.get("_parameters", {}).values())  # a copy, since another thread may be making the module
        if any(id(p) in params for p in own):
            found.append(x)
    return found


def refuse_reducers(who: str, params: Collection[int]) -> None:
    """Raise ValueError if a DistributedDataParallel reduces the gradients of parameters with these ids."""
    if not (is_available() and is_initialized() and _are_reduced(params)):
        return
    gc.collect()  # the wrapper may be garbage
    if not _are_reduced(params):
        return
    raise ValueError(
        f"{who}: `release` and `overlap` use gradients before DistributedDataParallel has added them up, so processes"
        " would get different parameters; use the module without the wrapper, and pass"
        " comm=torch.distributed.group.WORLD, overlap=True"
    )


def refuse_scalers(who: str) -> None:
    """Raise RuntimeError if a GradScaler has scaled a loss, and has not divided any gradients so far.

    An optimizer calls this in its first backward pass. It cannot tell which loss was scaled, so it ignores a scaler
    that has made steps, or that has gradients of another optimizer. The error is raised once per scaler.
    """
    for scaler in _every(torch.amp.GradScaler):
        scale = getattr(scaler, "_scale", None)
        if scale is not None and not (scale._version or scaler._per_optimizer_states or scaler in _TOLD):
            _TOLD.add(scaler)  # a notebook may keep it alive
            raise RuntimeError(
                f"{who}: `release` and `overlap` use gradients before a GradScaler divides them; nothing was updated."
                " Use bfloat16 without a scaler, or an optimizer without them. If the scaler is for another optimizer,"
                " call its first `scaler.step` before this backward pass"
            )


def _are_reduced(params: Collection[int]) -> bool:
    """Whether a DistributedDataParallel in memory has parameters with these ids."""
    return any(any(id(p) in params for p in x.parameters()) for x in _every(DistributedDataParallel))


def _every(kind: type[Any]) -> Iterator[Any]:
    """All objects of a class that are in memory."""
    every = gc.get_objects()
    kinds = {found for found in set(map(type, every)) if issubclass(found, kind)}
    return (x for x in every if type(x) in kinds)
