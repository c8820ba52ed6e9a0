"""Gradients that are let go during the backward pass: each parameter is updated as soon as its gradient is there."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor

__all__ = ["Release"]


class Release:
    """The hooks of an optimizer's parameters.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer, one of `arrayopt.torch`.
    every : int
        How many backward passes make a step. PyTorch adds their gradients up, and the last one lets them go.
    """

    def __init__(self, optimizer: Any, every: int) -> None:
        self._of, self._every = ref(optimizer), every
        self._hooked: set[int] = set()
        self._passes: Counter[int] = Counter()  # since the last step, by parameter
        self._names: tuple[Any, dict[int, str]] = None, {}

    @property
    def _optimizer(self) -> Any:
        return self._of()

    def watch(self, params: Iterable[Tensor]) -> None:
        """Have parameters updated in the backward pass."""
        for p in params:
            if p.requires_grad and id(p) not in self._hooked:
                self._hooked.add(id(p))
                take = partial(_call, WeakMethod(self._take))  # parameters outlive an optimizer
                p.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def _take(self, p: Tensor) -> None:
        """Count a backward pass; update the parameter in the last one."""
        self._passes[id(p)] += 1
        if self._passes[id(p)] >= self._every:
            self._update(p)

    def _update(self, p: Tensor) -> None:
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
        """End a step that backward passes have made; whether there was one.

        Parameters that took no part in the last pass have their gradients still, and are updated now.
        """
        self._passes.clear()
        if not inner._step.release:
            return False
        below, given = self._optimizer._below, inner._step.release.given
        for p, tensor in zip(below.params, below.tensors, strict=True):
            if p.grad is not None and tensor.name not in given:
                self._update(p)
        inner.step()
        return True


def _call(take: WeakMethod[Any], p: Tensor) -> None:
    """Call a method, unless its object is gone."""
    method = take()
    if method is not None:
        method(p)
