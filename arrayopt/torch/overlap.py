"""`overlap`: ranks send gradients during a module's backward pass, and receive parameters during its forward pass."""

from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Module

from arrayopt.optimizer import Optimizer
from arrayopt.torch.modules import Hook, have_wait, refuse_reducers


class Overlap:
    """The hooks of a module, made by `overlap`. They do nothing once the optimizer is deleted."""

    def __init__(self, hooks: list[Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Remove the hooks. From then on gradients stay in ``p.grad``, and modules do not wait."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def overlap(opt: Optimizer, model: Module) -> Overlap:
    """Send the messages of ranks while a module computes, by hooks, in place of ``DistributedDataParallel``.

    Each gradient is passed to `Optimizer.give` in the backward pass, and its memory is freed. After
    ``opt.step(wait=False)`` each module waits for its own parameters before its forward pass.

    Parameters
    ----------
    opt : Optimizer
        An optimizer over ``dict(model.named_parameters())``, with ``comm=Ranks(group, grads="mean")`` or ``"sum"``. Its
        parameters may be a part of the model's, or more: gradients of others are yours to give.
    model : torch.nn.Module
        The module, not wrapped in ``DistributedDataParallel``, which would add gradients up a second time. All ranks
        must use the same of its parameters in each backward pass.

    Returns
    -------
    Overlap
        Keep it if you want to ``remove()`` the hooks.

    Raises
    ------
    TypeError
        If `opt` is not an `Optimizer` or `model` not a module.
    ValueError
        If `grads` is ``"reduced"``, or the optimizer has no parameter of the module.

    Examples
    --------
    >>> import torch, arrayopt as ao
    >>> def train(comm):
    ...     model = torch.nn.Linear(3, 2, bias=False)
    ...     torch.nn.init.ones_(model.weight)
    ...     opt = ao.Optimizer(dict(model.named_parameters()), ao.SGD(lr=0.1), comm=ao.Ranks(comm, grads="mean"))
    ...     ao.torch.overlap(opt, model)
    ...     model(torch.full((1, 3), float(comm.rank))).sum().backward()
    ...     opt.step(wait=False)
    ...     return opt.wait("weight")[0, 0].item()
    >>> ao.ranks.run(2, train)
    [0.949999988079071, 0.949999988079071]
    """
    who = "arrayopt.torch.overlap"
    if not isinstance(opt, Optimizer):
        raise TypeError(f"{who}: `opt` must be an arrayopt.Optimizer over ranks; got a {type(opt).__name__}")
    if not isinstance(model, Module):
        raise TypeError(f"{who}: `model` must be a torch.nn.Module; got a {type(model).__name__}")
    if opt._team.size > 1 and not opt._team.sums:
        raise ValueError(
            f"{who}: gradients are reduced during the backward pass, so the optimizer needs"
            ' comm=Ranks(group, grads="mean") or "sum"'
        )
    known = {id(tensor.array): tensor.name for tensor in opt._parameters.all}
    names = {id(p): known[id(p)] for p in model.parameters() if id(p) in known}
    if not names:
        raise ValueError(
            f"{who}: no parameter of the model is one of the optimizer's; make it over dict(model.named_parameters())"
        )
    refuse_reducers(who, names)
    there, unchecked, heard = ref(opt), set(names), dict[int, None]()
    if opt._team.size > 1:
        sums = opt._step._ranks.gradients
        others = sums.heard  # of other models
        sums.heard = lambda: [*others(), *(names[key] for key in heard if key in names)]

    def current() -> tuple[Optimizer, dict[int, str]] | None:
        opt = there()  # parameters and modules outlive it
        return None if opt is None else (opt, names)

    def give(p: Tensor) -> None:
        opt = there()
        if opt is None or p.grad is None:
            return
        if unchecked:
            refuse_reducers(who, unchecked)
            unchecked.clear()
        opt.give(names[id(p)], p.grad)
        p.grad = None

    made: list[Any] = []
    for p in model.parameters():
        if id(p) in names and p.requires_grad:
            made.append(p.register_post_accumulate_grad_hook(Hook(give)))
    return Overlap([*made, *have_wait(model.modules(), current, heard)])
