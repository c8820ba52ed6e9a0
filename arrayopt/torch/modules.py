"""What else has an optimizer's parameters: modules, which wait for them, and what would use their gradients later."""

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
"""The scalers that an error was about."""

Current = Callable[[], tuple[Optimizer, dict[int, str]] | None]
"""Returns an optimizer, and the names of its parameters by their ids; None after its end."""


class Hook:
    """Calls a function. In copies of what it is attached to, and in pickles, it does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> Any:
        return Hook, ()


def have_wait(modules: Iterable[Module], current: Current, heard: dict[int, None]) -> list[Any]:
    """Have modules wait for their own parameters before their forward pass, and before they are saved or loaded.

    `current` must not keep the optimizer alive. `heard` gets the ids of parameters whose modules have been called, in
    the order of the first calls. What is returned removes the hooks.
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
    """The living modules that have parameters with these ids. PyTorch does not tell its optimizers of modules."""
    found = []
    for x in _every(Module):
        own = list(x.__dict__.get("_parameters", {}).values())  # at once: another thread may be making the module
        if any(id(p) in params for p in own):
            found.append(x)
    return found


def refuse_reducers(who: str, params: Collection[int]) -> None:
    """Raise ValueError where DistributedDataParallel adds up the gradients of parameters with these ids, later."""
    if not (is_available() and is_initialized() and _are_reduced(params)):
        return
    gc.collect()  # what reduced them may be gone
    if not _are_reduced(params):
        return
    raise ValueError(
        f"{who}: `release` and `overlap` use gradients before DistributedDataParallel has added them up, so processes"
        " would get different parameters; use the module without the wrapper, and pass"
        " comm=torch.distributed.group.WORLD, overlap=True"
    )


def refuse_scalers(who: str) -> None:
    """Raise RuntimeError where a GradScaler has scaled a loss, and has divided nothing by its factor so far.

    An optimizer asks in its first backward pass. Nothing there tells which loss was scaled; a scaler that has had steps
    before, or gradients of another optimizer, is taken for that one's. What has been told once may go on.
    """
    for scaler in _every(torch.amp.GradScaler):
        scale = getattr(scaler, "_scale", None)
        if scale is not None and not (scale._version or scaler._per_optimizer_states or scaler in _TOLD):
            _TOLD.add(scaler)  # an interactive session may keep it alive
            raise RuntimeError(
                f"{who}: `release` and `overlap` use gradients before a GradScaler divides them; nothing was updated."
                " Use bfloat16 without a scaler, or an optimizer without them. If the scaler is for another optimizer,"
                " call its first `scaler.step` before this backward pass"
            )


def _are_reduced(params: Collection[int]) -> bool:
    """Whether a living DistributedDataParallel has parameters with these ids."""
    return any(any(id(p) in params for p in x.parameters()) for x in _every(DistributedDataParallel))


def _every(kind: type[Any]) -> Iterator[Any]:
    """All living objects of a class."""
    every = gc.get_objects()
    kinds = {found for found in set(map(type, every)) if issubclass(found, kind)}
    return (x for x in every if type(x) in kinds)
