"""`release` and `overlap`: hooks that pass each gradient to the optimizer in the backward pass, and free it.

In one process the parameter is updated immediately. Over ranks its gradient is sent, and with `overlap`, parameters
arrive during the next forward pass.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakMethod, WeakSet, ref

import torch
from torch import Tensor

from arrayopt.optimizer import Optimizer as Inner
from arrayopt.params.parts import block_of
from arrayopt.ranks.settings import Ranks
from arrayopt.torch.modules import Hook, have_wait, modules_of, refuse_reducers, refuse_scalers


def asked(who: str, release: Any, overlap: Any, comm: Any) -> tuple[int, bool, Any]:
    """Return the number of backward passes in a step (0 if `step` reads ``p.grad``), whether they overlap, the ranks.

    Raise TypeError or ValueError if a value is invalid, or needs another one.
    """
    for name, x in (("release", release), ("overlap", overlap)):
        if not isinstance(x, int) or x < 0:
            raise TypeError(
                f"{who}: `{name}` must be True, False, or the number of backward passes in a step; got {x!r}"
            )
    if not overlap:
        return int(release), False, comm
    if release:
        raise ValueError(f"{who}: `overlap` frees gradients too; leave out `release`")
    if comm is None:
        raise ValueError(
            f"{who}: `overlap` needs `comm`, such as torch.distributed.group.WORLD; with FSDP2, leave out `overlap`"
        )
    ranks = comm if isinstance(comm, Ranks) else Ranks(comm, grads="mean")
    if ranks.grads == "reduced":
        raise ValueError(
            f"{who}: `overlap` adds up the gradients of the processes; pass"
            ' comm=Ranks(group, grads="mean") or "sum", or the group itself'
        )
    return int(overlap), True, ranks


class Release:
    """The hooks of an optimizer's parameters and their modules.

    A step consists of `every` backward passes. PyTorch adds their gradients up, and in the last pass they are given to
    the optimizer. With `overlap`, modules wait for the parameters of other ranks, and `step` does not. Of several
    optimizers, such as those of a notebook's cell that runs again, the one that is made last gets a gradient.
    """

    _every: ClassVar[WeakSet["Release"]] = WeakSet()

    def __init__(self, optimizer: Any, every: int, *, overlap: bool) -> None:
        self._of: Callable[[], Any] = ref(optimizer)
        self.every, self.overlap = every, overlap
        self._hooked = dict[int, ref[Tensor]]()  # by id: another parameter may get the id of one that has gone
        self._passes: Counter[int] = Counter()  # since the last step, by parameter
        self._names: tuple[Any, dict[int, str]] = None, {}
        self._heard = dict[int, None]()  # parameters whose modules wait, in the order of a forward pass
        self._checked = self._held = False
        self._later: Callable[[], Release | None] = lambda: None  # that of an optimizer of the same parameters

    def watch(self, params: Iterable[Tensor]) -> None:
        """Add hooks that take the gradients of parameters in the backward pass."""
        params, optimizer = list(params), self._of()
        new = [p for p in params if p.requires_grad and not self._is_hooked(p)]
        who, inner = type(optimizer).__name__, optimizer._below.made
        if inner is not None:
            self._check(who, inner, params)
        ids = set(map(id, new))
        refuse_reducers(who, ids)
        for p in new:  # parameters and modules outlive an optimizer
            p.register_post_accumulate_grad_hook(Hook(_weakly(self._take)))  # type: ignore[no-untyped-call]
        for other in list(self._every):
            former = other._of()
            groups = [] if former is None or former is optimizer else former.param_groups
            if any(id(p) in ids for group in groups for p in group["params"]):
                other._later = ref(self)
        self._every.add(self)
        self._hooked |= {id(p): ref(p) for p in new}
        if self.overlap:
            have_wait(modules_of(ids), _weakly(self._current), self._heard)

    def _is_hooked(self, p: Tensor) -> bool:
        """Whether this parameter has a hook already."""
        found = self._hooked.get(id(p))
        return found is not None and found() is p

    def _check(self, who: str, inner: Inner, params: Iterable[Tensor]) -> None:
        """Raise ValueError if gradients cannot be taken one by one."""
        if any(block_of(p) is not None for p in params):
            raise ValueError(
                f"{who}: `release` and `overlap` do not support DTensors, whose gradients FSDP2 reduces; leave them out"
            )
        waits = [] if self.overlap and inner._team.size == 1 else inner._waits()
        if waits:
            raise ValueError(
                f"{who}: `release` uses each gradient in the backward pass, but with {' and '.join(waits)} a step"
                " needs all gradients at once; leave out one of them"
            )

    def _current(self) -> tuple[Inner, dict[int, str]] | None:
        """The inner optimizer and the names of its parameters by their ids, or None if there is none."""
        optimizer = self._of()
        below = None if optimizer is None else optimizer._below
        if below is None or below.made is None:
            return None
        if self._names[0] is not below.made:
            pairs = zip(below.params, below.tensors, strict=True)
            self._names = below.made, {id(p): tensor.name for p, tensor in pairs}
            here = {id(p) for p in below.params if self._is_hooked(p)}
            for key in self._heard.keys() - here:  # others may have the ids of those gone
                del self._heard[key]
        return self._names

    def begin_anew(self, inner: Inner | None) -> None:
        """Reset the count of backward passes when gradients are dropped, unless some were already given."""
        if inner is None or not inner._step.release:
            self._passes.clear()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Leave gradients in ``p.grad`` during a block."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def _take(self, p: Tensor) -> None:
        """Count a backward pass, and give the gradient in the last pass of the step."""
        later = self._later()
        if self._held or (later is not None and later._is_hooked(p)):
            return
        if not self._checked:
            who = type(self._of()).__name__
            refuse_reducers(who, self._hooked)
            refuse_scalers(who)
            self._checked = True
        self._passes[id(p)] += 1
        if self._passes[id(p)] >= self.every:
            self._give(p)

    def _give(self, p: Tensor) -> None:
        """Give a gradient to the optimizer, and free it."""
        optimizer = self._of()
        made = optimizer._below.made
        inner = made if made is not None and made._step.release else optimizer.inner  # settings are read once per step
        found = self._current()
        name = None if found is None else found[1].get(id(p))
        if name is None or p.grad is None or (self.overlap and inner._team.size == 1):
            return
        if name in inner._step.release.given:
            more = "" if self.overlap else f", or set release={self.every + 1}"
            raise ValueError(
                f"{type(optimizer).__name__}: the gradient of {name!r}{_place_of(p)} was already used in this step; "
                "call step() first; zero_grad() does not undo an update. Use `with opt.no_sync():` for passes that"
                f" you may skip, and for all but the last of several passes in a step{more}"
            )
        with torch.no_grad():
            inner.give(name, -p.grad if optimizer.negated(p) else p.grad)
        p.grad = None

    def end(self, inner: Inner, value: Any) -> bool:
        """End a step whose gradients were given. Return False if none were, and there is one process.

        Gradients that are still in ``p.grad``, because of `no_sync` or fewer passes, are given now.
        """
        later = self._later()
        if later is not None:
            raise RuntimeError(
                f"{type(self._of()).__name__}.step: an optimizer that was made later, {type(later._of()).__name__},"
                " takes the gradients of its parameters in the backward pass; use that one, or delete it"
            )
        self._passes.clear()
        ranks, holds = inner._team.size > 1, inner._team.holds
        if not inner._step.release and not ranks:
            return False
        found, given = self._current(), inner._step.release.given
        names = {} if found is None else found[1]
        for p in self._of()._below.params:
            if p.grad is not None and names.get(id(p)) not in given:
                self._give(p)
        if not ranks:
            inner.step(value=value if holds else None)
            return True
        heard = self._heard
        inner._step._ranks.gradients.heard = lambda: [names[key] for key in heard if key in names]
        inner._end_taken(None, value, incomplete=False, wait=not self.overlap, none=True)
        for key, name in names.items() if self.overlap else ():
            if key not in self._heard:
                inner.wait(name)
        return True


def _place_of(p: Tensor) -> str:
    """The module of a parameter, for errors; empty if it is in no module."""
    for module in modules_of({id(p)}):
        for name, own in module._parameters.items():
            if own is p:
                return f" ({name} of {module})"
    return ""


def _weakly(method: Any) -> Any:
    """A method that does not keep its object alive, and returns None once the object is deleted."""
    weak = WeakMethod(method)

    def call(*args: Any) -> Any:
        there = weak()
        return None if there is None else there(*args)

    return call
