"""Gradients that are let go during the backward pass: each parameter is updated as soon as its gradient is there."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Release"]


class Release:
    """The hooks of an optimizer's parameters.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer, one of `arrayopt.torch`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._hooked: set[int] = set()
        self._names: tuple[Any, dict[int, str]] = None, {}

    def watch(self, params: Iterable[Tensor]) -> None:
        """Have parameters updated in the backward pass."""
        for p in params:
            if p.requires_grad and id(p) not in self._hooked:
                self._hooked.add(id(p))
                p.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _take(self, p: Tensor) -> None:
        """Update a parameter, and let its gradient go."""
        optimizer = self._optimizer
        inner, below = optimizer.inner, optimizer._below
        if self._names[0] is not inner:
            pairs = zip(below.params, below.tensors, strict=True)
            self._names = inner, {id(param): tensor.name for param, tensor in pairs}
        name = self._names[1].get(id(p))
        if name is None or p.grad is None:
            return
        with torch.no_grad():
            inner.give(name, -p.grad if optimizer.negated(p) else p.grad)
        p.grad = None

    def end(self, inner: Any) -> bool:
        """End a step that the backward pass has made; whether there was one."""
        if not inner._step.release:
            return False
        inner.step()
        return True
