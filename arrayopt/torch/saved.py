"""Saving, loading, copying and pickling the optimizers of `arrayopt.torch`, in PyTorch's form."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from arrayopt.interrupts import uninterrupted
from arrayopt.optimizer import Optimizer as Inner
from arrayopt.params.groups import fields_of
from arrayopt.rules.base import Rule
from arrayopt.saving.differences import describe, rule_differences
from arrayopt.torch.below import Below
from arrayopt.torch.release import Release
from arrayopt.torch.settings import RULE, Settings, defaults_of
from arrayopt.torch.state import Guests, complete, guests_of, moved

eager = torch._disable_dynamo  # type: ignore[attr-defined]
"""A decorator: ``torch.compile`` calls the function, but does not compile it."""

_SHARED = frozenset(fields_of(Rule)) - {"weight_decay"}
"""Fields of every rule. Our groups have them, and groups of other libraries' optimizers do not."""

_BARE = {"params", "param_names"}
"""Keys of a group that do not tell which optimizer it is from."""


class Saved(torch.optim.Optimizer):
    """The part of an optimizer that saves, loads, copies and pickles."""

    rule: ClassVar[type[Rule]]
    """The rule."""

    _below: Below | None = None
    _options: Mapping[str, Any] = {}
    _release: Release | None = None
    _guests: Guests

    def _watch(self, every: int, *, overlap: bool) -> None:
        """Take gradients in the backward pass, if a step consists of `every` such passes and not of none."""
        if every:
            self._release = Release(self, every, overlap=overlap)
            self._release.watch(p for group in self.param_groups for p in group["params"])

    @property
    def inner(self) -> Inner | None:
        """The `arrayopt.Optimizer` that makes the steps, for ``explain()``, ``stats`` and ``now()``.

        Change settings and state in `param_groups` and `state`, not here. When parameters are added or removed, or a
        state is loaded, a new one takes its place. Without parameters it is None.
        """
        if self._below is None:
            return None
        made = self._below.follow(self.param_groups)
        if made is not None:
            made._arrive()
        return made

    def _begin_anew(self) -> None:
        """Reset the count of backward passes in this step, if gradients are taken in the backward pass."""
        if self._release is not None and self._below is not None:
            self._release.begin_anew(self._below.made)

    @eager
    def state_dict(self) -> dict[str, Any]:
        """Return the state in PyTorch's form: plain dicts ``state`` and ``param_groups``, and the number of steps.

        The tensors are not copied: later steps write to them. ``torch.load`` reads the result with
        ``weights_only=True``, unless a field is a schedule.

        Raises
        ------
        RuntimeError
            If `release` or `overlap` has taken some gradients of an unfinished step. So do copying and pickling.
        """
        self._check_whole("state_dict")
        inner, made = self.inner, super().state_dict()
        state = {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in made["state"].items()}
        if inner is not None and self._below is not None:
            keys = (key for group in made["param_groups"] for key in dict.fromkeys(group["params"]))
            for key, tensor in zip(keys, self._below.tensors, strict=False):
                whole = complete(tensor, inner._team)
                if key in state:
                    state[key] |= {slot: x for slot, x in whole.items() if x is not tensor.slots[slot]}
        steps = 0 if inner is None else inner.step_count
        groups = [{**group, RULE: group[RULE].__name__} if RULE in group else group for group in made["param_groups"]]
        return {**made, "state": state, "param_groups": groups, "step_count": steps, "rule": self.rule.__name__}

    @eager
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. Tensors are copied to the dtypes and devices of this optimizer.

        If `release` has taken some gradients of a step, that step is dropped: load the model's parameters too.

        Raises
        ------
        ValueError
            If the state does not fit (the message lists every mismatch), or is from another rule, or from the rule with
            other switches. Nothing has been changed then.
        """
        saved = state_dict.copy()
        for pre_hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            replaced = pre_hook(self, saved)
            saved = saved if replaced is None else replaced
        loaded = _loaded_of(type(self).__name__, self.rule, self.defaults, self.param_groups, saved)
        made = self._made(loaded)
        if self.inner is not None and made[1].made is not None:
            pairs = enumerate(zip(made[1].made.groups, self.inner.groups, strict=True))
            wrong = [x for i, (a, b) in pairs for x in rule_differences(f"group {i}", describe(a.rule), b.rule)]
            if wrong:
                how = ""
                if any("state_dtype=" in x for x in wrong):
                    how = ". First set param_groups[i]['state_dtype'] to what was saved; load; then set what you want"
                listed = "; ".join(wrong)
                raise ValueError(f"{type(self).__name__}: the state was saved with other options: {listed}{how}")
        self._go_on(loaded, *made)
        self._begin_anew()
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    def _check_whole(self, what: str) -> None:
        """Raise RuntimeError in the middle of a step, when some of its gradients have been taken."""
        inner = self.inner
        if inner is not None:
            inner._step.release.check_whole(f"{type(self).__name__}: {what}")
            inner._parameters.first.follow()

    def __getstate__(self) -> dict[str, Any]:
        self._check_whole("a copy")
        inner, below = self.inner, self._below
        return {
            "defaults": dict(self.defaults),
            "param_groups": [dict(group) for group in self.param_groups],
            "state": {p: dict(entry) if isinstance(p, Tensor) else entry for p, entry in self.state.items()},
            "step_count": 0 if inner is None else inner.step_count,
            "options": {} if below is None else below.options,
            "release": None if self._release is None else (self._release.every, self._release.overlap),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._go_on(state, *self._made(state))
        every, overlap = state.get("release") or (0, False)
        self._watch(every, overlap=overlap)

    def _made(self, state: dict[str, Any]) -> tuple[list[dict[str, Any]], Below]:
        """Make the groups of a state, and an optimizer over them."""
        states, steps = state["state"], state.get("step_count")
        if steps is None:  # other software has taken the state apart and put it together again
            tensors = [entry for p, entry in states.items() if isinstance(p, Tensor) and isinstance(entry, Mapping)]
            counts = [int(torch.as_tensor(entry["step"]).max()) for entry in tensors if "step" in entry]
            steps = max(counts, default=0)
        options = state["options"] if "options" in state else getattr(self._below, "options", {})
        groups: list[dict[str, Any]] = [Settings(self.rule, group) for group in state["param_groups"]]
        return groups, Below(type(self).__name__, self.rule, options, groups, states, steps)

    def _go_on(self, state: dict[str, Any], groups: list[dict[str, Any]], below: Below) -> None:
        """Use the groups and the optimizer that `_made` has made from a state: all of it, or, after an error, none."""
        guests = guests_in(zip(below.params, below.tensors, strict=True), state["state"], moved)
        with uninterrupted():
            super().__setstate__({"defaults": Settings(self.rule, state.get("defaults") or self.defaults)})
            if below.made is not None and self._below is not None:
                below.made._take_place(self._below.made)
            self.param_groups, self._below, self._guests = groups, below, guests


def guests_in(pairs: Iterable[tuple[Tensor, Any]], states: Mapping[Any, Any], take: Callable[..., Any]) -> Guests:
    """The entries of other code in states. ``take(p, x)`` returns what is kept of each entry."""
    found: Guests = Guests(dict)
    for p, tensor in pairs:
        state = states.get(p)
        if isinstance(state, Mapping) and (kept := guests_of(tensor, state)):
            found[p] = {key: take(p, x) for key, x in kept.items()}
    return Guests(dict, {**found, **{key: x for key, x in states.items() if not isinstance(key, Tensor)}})


def _loaded_of(
    who: str,
    rule: type[Rule],
    defaults: Mapping[str, Any],
    groups: list[dict[str, Any]],
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    """Replace the numbers of parameters in a state dict by the parameters themselves.

    `rule` is for groups without a rule of their own, and `defaults` has values for fields that a saved group lacks.
    Raise ValueError if the state is from other rules or other groups.
    """
    lacks = [repr(key) for key in ("param_groups", "state") if key not in saved]
    if lacks:
        raise ValueError(f"{who}: the state must be what `state_dict` returned; it has no {' and no '.join(lacks)}")
    saved_groups = saved["param_groups"]
    if saved.get("rule", rule.__name__) != rule.__name__:
        raise ValueError(f"{who}: the state is for {saved['rule']}, but the rule here is {rule.__name__}")
    if "rule" not in saved and not any(_SHARED & group.keys() or group.keys() <= _BARE for group in saved_groups):
        raise ValueError(
            f"{who}: the state is from an optimizer of PyTorch, or of another library; where it has the same rule, use"
            " arrayopt.load_torch(opt, state)"
        )
    sizes = [[len(group["params"]) for group in some] for some in (saved_groups, groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{who}: the groups of the state have {sizes[0]} parameters, but those of the optimizer have {sizes[1]}"
        )
    wrong, made, parameter = list[str](), [], dict[Any, Tensor]()
    for i, (group, was) in enumerate(zip(groups, saved_groups, strict=True)):
        own, saved_rule = (getattr(x.get(RULE), "__name__", x.get(RULE)) for x in (group, was))
        if own != saved_rule:
            wrong.append(f"group {i} is under {saved_rule}, here {own}")
            continue
        parameter |= zip(was["params"], group["params"], strict=True)
        first = defaults if own is None else defaults_of(group[RULE], was)
        names, here = ({key: group[key] for key in (some,) if key in group} for some in ("param_names", RULE))
        made.append({**first, **names, **was, **here, "params": group["params"]})
    if wrong:
        raise ValueError(f"{who}: the state is for other rules: {'; '.join(wrong)}")
    strange = [key for key in saved["state"] if isinstance(key, int) and key not in parameter]
    if strange:
        raise ValueError(f"{who}: the state has {strange}, which are in no group")
    state = {parameter.get(key, key): entry for key, entry in saved["state"].items()}
    return {"state": state, "param_groups": made, "step_count": saved.get("step_count")}
