"""The base class of the optimizers of `arrayopt.torch`: a ``torch.optim.Optimizer`` around an `arrayopt.Optimizer`."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks as _of_all_after
from torch.optim.optimizer import _global_optimizer_pre_hooks as _of_all_before

from arrayopt.hyper import Hyper, checked_bool, is_number
from arrayopt.optimizer import Optimizer as Inner
from arrayopt.state.verdict import Verdict
from arrayopt.torch.below import Below, distinct, elsewhere
from arrayopt.torch.release import asked
from arrayopt.torch.saved import Saved, eager, guests_in
from arrayopt.torch.settings import RULE, Settings, check_group, check_names, check_params, defaults_of, rule_of
from arrayopt.torch.spelled import placed
from arrayopt.torch.state import Guests, State, own_of

_UNGIVEN: Any = object()


class Optimizer(Saved):
    """The base of the optimizers of `arrayopt.torch`. Each is made from a rule, by `arrayopt.torch.optimizer`.

    Parameters
    ----------
    params : iterable of tensors, of (name, tensor), or of group dicts
        The parameters, as for PyTorch's optimizers.
    lr, **fields
        Fields of the rule.
    maximize, engine, clip_norm, skip_nonfinite, stats, release, comm, overlap
        See the class of a rule, such as `LAMB`.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = _UNGIVEN,
        *more: Any,
        maximize: bool = False,
        engine: str = "auto",
        clip_norm: Hyper | None = None,
        skip_nonfinite: bool = False,
        stats: bool = False,
        release: bool | int = False,
        comm: Any = None,
        overlap: bool | int = False,
        **fields: Any,
    ) -> None:
        who = type(self).__name__
        check_params(who, params)
        every, overlap, comm = asked(who, release, overlap, comm)
        if not hasattr(self, "rule"):
            raise TypeError(
                "Optimizer: use the class of a rule, such as arrayopt.torch.LAMB, or create one with"
                " arrayopt.torch.optimizer(MyRule)"
            )
        given = {**placed(who, self.rule, more, fields), **fields}
        given |= {} if lr is _UNGIVEN else {"lr": lr}
        maximize = given.pop("maximize", maximize)
        checked_bool(f"{who}: `maximize`", maximize)
        if "max_grad_norm" in given:  # as timm and apex call it; with them 0 is no limit
            if clip_norm is not None:
                raise TypeError(f"{who}: pass `clip_norm` or `max_grad_norm`, not both")
            clip_norm = given.pop("max_grad_norm") or None
        check_names(who, self.rule, given)
        own = defaults_of(self.rule, given)
        options = {"engine": engine, "clip_norm": clip_norm, "skip_nonfinite": skip_nonfinite, "stats": stats}
        options |= {} if comm is None else {"comm": comm}
        self._options = options
        super().__init__(params, Settings(self.rule, {**own, **given, "maximize": maximize}))
        self._guests: Guests = Guests(dict)
        self._below = Below(who, self.rule, options, self.param_groups, {}, 0)
        self._watch(every, overlap=overlap)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, and say where to find what an `arrayopt.Optimizer` has under this name."""
        instead = elsewhere(type(self), name)
        said = f"{type(self).__name__!r} object has no attribute {name!r}{instead}"
        raise AttributeError(said, name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse assignments without effect, such as ``opt.lr = 0.1``. Subclasses may set other attributes."""
        if "rule" in vars(type(self)) and elsewhere(type(self), name):
            self.__getattr__(name)
        super().__setattr__(name, value)

    def wait(self) -> None:
        """Wait for the parameters that other ranks are still sending after a step with `overlap`.

        Modules wait for their own parameters before their forward pass, and before they are saved or loaded. Call this
        before you read or write a parameter by yourself.

        Raises
        ------
        RankError
            If another rank has failed or did not answer in time: load a checkpoint then.
        """
        if self._below is not None and self._below.made is not None:
            self._below.made._arrive()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate the gradients of backward passes in ``p.grad``, like `no_sync` of DistributedDataParallel.

        With `release` or `overlap`, the first backward pass after the block uses the sum and frees it, or `step` does.

        Returns
        -------
        context manager
            For a ``with`` statement around backward passes.

        Examples
        --------
        >>> import torch
        >>> from arrayopt.torch import SGD
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> opt = SGD([w], lr=0.1, release=True)
        >>> with opt.no_sync():
        ...     w.sum().backward()
        >>> w.sum().backward()
        >>> opt.step()
        >>> w.item()
        0.800000011920929
        """
        return nullcontext() if self._release is None else self._release.hold()

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients in ``p.grad``. With ``release=k``, the k backward passes of the step begin anew."""
        super().zero_grad(set_to_none)
        self._begin_anew()

    # ---- the step ---------------------------------------------------------------------------------------------------

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by their gradients.

        Parameters
        ----------
        closure : callable, optional
            Computes the gradients again, and returns the loss. It is called once, before the update.

        Returns
        -------
        loss
            What `closure` returned, or None.

        Raises
        ------
        TypeError
            If `closure` is not a function.
        ValueError
            If a setting in `param_groups` is out of range, or a gradient does not match. Nothing is changed.
        RuntimeError
            If `release` and a `GradScaler` are used together, or a step has failed while writing.
        RankError
            If another process has failed or did not answer in time.
        """
        if closure is not None and not callable(closure):
            got = type(closure).__name__
            raise TypeError(
                f"{type(self).__name__}.step: gradients are in p.grad; `closure` must be a function; got {got}"
            )
        own = type(self).step is Optimizer.step  # else PyTorch has wrapped the subclass's own step in the hooks
        step = _hooked if own and self._watched() else _step
        return step(self) if closure is None else step(self, closure)

    step.hooked = True  # type: ignore[attr-defined]  # or compiled code would see the hooks, and warn

    def _watched(self) -> bool:
        """Whether there are hooks or a profiler. Without them, PyTorch's slow wrapper is not needed."""
        own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return bool(own or _of_all_before or _of_all_after or torch._C._autograd._profiler_enabled())

    def _gradients(self, params: list[Tensor]) -> list[Tensor | None]:
        """The gradients, negated in groups with `maximize`."""
        grads = [p.grad for p in params]
        if any(group.get("maximize") for group in self.param_groups):
            up = [group.get("maximize") for group in self.param_groups for _ in distinct(group)]
            with torch.no_grad():
                grads = [-g if negated and g is not None else g for g, negated in zip(grads, up, strict=True)]
        return grads

    def negated(self, p: Tensor) -> bool:
        """Whether a parameter is in a group with `maximize`."""
        return any(group.get("maximize") and any(p is x for x in group["params"]) for group in self.param_groups)

    def _step_again(self, inner: Inner, below: Below) -> None:
        """Update parameters that a group lists several times as many times, as PyTorch does."""
        if not below.repeats:
            return
        often = Counter(p for group in self.param_groups for p in group["params"])
        grads, steps = self._gradients(below.params), inner.step_count - 1
        for k in range(1, max(often.values())):
            inner.__setattr__("step_count", steps)
            again = [g if often[p] > k else None for p, g in zip(below.params, grads, strict=True)]
            inner.step(again, loss_scale=self._verdict())

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a ``GradScaler`` leaves dividing gradients and skipping steps to `step`."""
        inner = self.inner
        if inner is not None and (self._release is not None or inner._team.sums):
            return True  # `step` refuses the scaler
        return inner is not None and inner.clip_norm is None and inner._team.size == 1

    def _verdict(self) -> Any:
        """What a ``GradScaler`` has found, without waiting for the device."""
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is None:
            return None
        skip = (found != 0).to(torch.int32) if isinstance(found, Tensor) else bool(found)
        return Verdict(None if scale is None else scale.double().reciprocal(), skip)

    # ---- groups and state -------------------------------------------------------------------------------------------

    @eager
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with new state.

        Parameters
        ----------
        param_group : dict
            ``params``, the group's own values of the rule's fields, and optionally ``rule``, a rule of its own, such as
            `Muon`. The group's defaults are then those of its rule.

        Raises
        ------
        TypeError, ValueError
            If a key is unknown, a value is invalid, or a parameter is in another group.
        """
        defaults = self.defaults
        if isinstance(param_group, dict):
            who, rule = type(self).__name__, self.rule
            check_params(who, param_group.get("params"))
            if RULE in param_group:
                rule, fields = rule_of(who, param_group[RULE])
                param_group = {**param_group, RULE: rule}
                check_group(who, rule, param_group, self._options)
                own = Settings(rule, {**defaults_of(rule, param_group), **fields})
                defaults = Settings(rule, {**own, "maximize": self.defaults["maximize"]})
            else:
                check_group(who, rule, param_group, self._options)
            param_group = Settings(rule, param_group)
        shared, self.defaults, count = self.defaults, defaults, len(self.param_groups)
        try:
            super().add_param_group(param_group)
            if self._below is not None:
                self._below.follow(self.param_groups)
                if self._release is not None:
                    self._release.watch(param_group["params"])
        except BaseException:
            del self.param_groups[count:]
            raise
        finally:
            self.defaults = shared

    @property
    def state(self) -> Any:
        """The state of each parameter, a mapping with ``step``, the number of updates, and the slots of the rule.

        Assigning to an entry copies the tensor, ``opt.state[p]["m"] = x``. Entries that others have added are kept.
        """
        inner, below = self.inner, self._below
        if inner is None or below is None:
            return State((), lambda states: None, Guests(dict))
        inner._parameters.lend()
        return State(zip(below.params, below.tensors, strict=True), below.write, self._guests)

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        if self.inner is not None and self._below is not None:
            pairs = list(zip(self._below.params, self._below.tensors, strict=True))
            self._below.write({p: own_of(x, states.get(p, {})) for p, x in pairs})
            self._guests = guests_in(pairs, states, lambda p, x: x)


def _step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    inner, below = self.inner, self._below
    release, sums = self._release, inner is not None and inner._team.sums
    if (release is not None or sums) and getattr(self, "found_inf", None) is not None:
        given = inner is not None and not inner._team.holds and len(inner._step.release.given)
        harm = f". {given} parameters have been updated with scaled gradients: load a checkpoint" if given else ""
        raise RuntimeError(
            f"{type(self).__name__}: a GradScaler cannot be used with `release`, `overlap` or gradients that differ"
            f" between ranks, because gradients are used before it divides them; use bfloat16 without a scaler{harm}"
        )
    if inner is None or below is None:
        return loss
    value = _value(loss)
    if release is None or not release.end(inner, value):
        inner.step(self._gradients(below.params), loss_scale=self._verdict(), value=value)
        self._step_again(inner, below)
        for p in below.params if release is not None else ():
            p.grad = None
    return loss


def _value(loss: Any) -> Any:
    """The value that rules read as `h.value`: the loss of a closure, if it is one number."""
    if isinstance(loss, Tensor):
        return loss.detach().reshape(()) if loss.numel() == 1 and loss.dtype.is_floating_point else None
    return loss if is_number(loss) else None


_hooked = torch.optim.Optimizer.profile_hook_step(_step)
"""`_step` with PyTorch's hooks and its entry in profiles."""
