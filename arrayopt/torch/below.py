"""The `arrayopt.Optimizer` inside an optimizer of `arrayopt.torch`: made from `param_groups`, and kept like them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import is_, itemgetter
from typing import Any, cast

from torch import Tensor, as_tensor

from arrayopt.foreign_names import INNER
from arrayopt.interrupts import uninterrupted
from arrayopt.optimizer import Optimizer
from arrayopt.params.groups import Group, fields_of, replace_rules
from arrayopt.rules.base import Rule
from arrayopt.state.convert import check_convertible
from arrayopt.state.slots import advising
from arrayopt.state.tensors import Tensor as Known
from arrayopt.torch.settings import Settings, check_group
from arrayopt.torch.spelled import as_pytorch, more_of
from arrayopt.torch.state import complete, put

Groups = Sequence[Mapping[str, Any]]
States = Mapping[Tensor, Mapping[str, Any]]


class Below:
    """An `arrayopt.Optimizer` over the parameters of groups.

    The groups hold the parameters and hyper-parameters, and the optimizer holds slots and counts. If parameters are
    added, removed or replaced, or a field changes what is computed, a new optimizer is made with the state of the old.

    Parameters
    ----------
    options : dict
        Those of `arrayopt.Optimizer`.
    groups : sequence of dict
        PyTorch's parameter groups, each with all fields of the rule.
    states : mapping of tensor to dict
        State for some of the parameters, as `arrayopt.torch.state.show` has it; it is copied.

    Attributes
    ----------
    repeats : bool
        Whether a group has a parameter more than once.
    """

    def __init__(
        self, who: str, rule: type[Rule], options: dict[str, Any], groups: Groups, states: States, steps: int
    ) -> None:
        self._who, self._rule, self._options = who, rule, options
        self.made: Optimizer | None = None
        self._keys = [{*group} for group in groups]
        self._make(groups, states, steps, copies=True)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the optimizer as they are now."""
        return self._options if self.made is None else {**self._options, "clip_norm": self.made.clip_norm}

    @property
    def steps(self) -> int:
        """The number of steps made."""
        return 0 if self.made is None else self.made.step_count

    @property
    def tensors(self) -> list[Known]:
        """The optimizer's tensors, in the order of `params`."""
        return [] if self.made is None else self.made._parameters.all

    def _make(self, groups: Groups, states: States, steps: int, *, copies: bool) -> None:
        """Make the optimizer, `made`, or None if there are no parameters. An error changes nothing."""
        if self.made is not None:
            self.made._step.release.check_whole(f"{self._who}: groups have changed")
            self.made._arrive()
        filled = [group for group in groups if group["params"]]
        params = [p for group in filled for p in distinct(group)]
        values = [self._values(group) for group in filled]
        rules = [_of(group, x) for group, x in zip(filled, values, strict=True)]
        names = [name for group in filled for name in group.get("param_names", ())]
        named = len(params) == len(names) == len(set(names))
        entries = [
            {
                "params": dict(zip(group["param_names"], group["params"], strict=True)) if named else distinct(group),
                "rule": rule,
            }
            for group, rule in zip(filled, rules, strict=True)
        ]
        with advising('give vectors a group, {"params": vectors, "rule": AdamW}; see arrayopt.torch.split', self._who):
            made = Optimizer(entries, rules[0], **self.options) if filled else None
        if made is not None:
            with made._team.warned(self._who):
                self._restore(params, made, states, copies=copies)
            counts = {"the numbers of steps and updates": (steps, [x.t for x in made._parameters.all])}
            made._team.agree(self._who, lambda: counts)
            made.__setattr__("step_count", steps)
        with uninterrupted():
            if made is not None:
                made._take_place(self.made)
            self.made, self.params = made, params
            self.repeats = len(params) < sum(len(group["params"]) for group in filled)
            self._see(groups, values)

    def _see(self, groups: Groups, values: Iterable[tuple[Any, ...]]) -> None:
        """Remember the parameters and values of the groups."""
        found = iter(values)
        self._rules = [] if self.made is None else [self.made.rule, *(group.rule for group in self.made.groups)]
        self._seen = [(list(group["params"]), next(found) if group["params"] else ()) for group in groups]

    def _is_seen(self, group: Mapping[str, Any], seen: tuple[list[Tensor], tuple[Any, ...]]) -> bool:
        """Whether a group holds the same objects as when it was last read. Tensors among its values may differ."""
        params, values = seen
        try:
            return _holds(group, params) and (not params or all(map(is_, _taking(group)[1](group), values)))
        except KeyError:
            return False

    def _restore(self, params: list[Tensor], made: Optimizer, states: States, *, copies: bool) -> None:
        """Give the state in `states` to the optimizer's tensors."""
        who = self._who if copies else f"{self._who}: groups have changed"
        pairs = zip(params, made._parameters.all, strict=True)
        given = []
        for p, x in pairs:
            if p in states and (copies or _goes_on(x, states[p])):
                given.append((f"parameter {x.name}", x, states[p]))
        if put(who, made._parameters.first, given, copies=copies):
            made._parameters.keep_state()

    def follow(self, groups: list[dict[str, Any]]) -> Optimizer | None:
        """Bring the optimizer up to date with the groups and return it. Plain dicts among them become `Settings`."""
        for i, given in enumerate(groups):
            if type(given) is not Settings:
                groups[i] = Settings(self._rule, given)
        self._check_keys(groups)
        self._take_settings(groups)
        if len(groups) == len(self._seen) and all(map(self._is_seen, groups, self._seen)):
            return self.made
        same = len(groups) == len(self._seen) and all(map(_holds, groups, (params for params, _ in self._seen)))
        if same and self.made is not None:
            values = [self._values(group) for group in groups if group["params"]]
            filled = [group for group in groups if group["params"]]
            own, seen = self.made.groups, [x for params, x in self._seen if params]
            rules = [
                group.rule if all(map(is_, new, old)) else _of(given, new)
                for group, given, new, old in zip(own, filled, values, seen, strict=True)
            ]
            alike = [_wide(rule) == _wide(group.rule) for group, rule in zip(own, rules, strict=True)]
            if all(alike):
                self._check_storage(zip(own, rules, strict=True))
                with uninterrupted():
                    replace_rules(own, rules)
                    self.made._rule = rules[0]
                    self._see(groups, values)
                return self.made
            if any(x.t for x in self.tensors):
                for group, rule in zip(own, rules, strict=True):
                    self._check_switched(group, rule)
        kept = {}
        if self.made is not None:
            self.made._parameters.first.follow()
        for p, x in zip(self.params, self.tensors, strict=True):
            if self.made is not None and (x.t or not same):  # a new rule makes the first state anew
                kept[p] = {"step": as_tensor(x.updates), **complete(x, self.made._team)}
        self._make(groups, kept, self.steps, copies=False)
        return self.made

    def _check_keys(self, groups: Groups) -> None:
        """Raise TypeError if a group has a new key that is a mistake. Schedulers may write keys of their own."""
        self._keys += [set[str]() for _ in groups[len(self._keys) :]]
        for group, keys in zip(groups, self._keys, strict=False):
            if not group.keys() <= keys:
                new = {key: group[key] for key in group.keys() - keys}
                check_group(self._who, cast(Settings, group).rule, new, self.options, written=True)
                keys.update(new)

    def _take_settings(self, groups: Groups) -> None:
        """Copy values that were set on groups of `inner` into `param_groups`. Refuse values set on `inner` itself."""
        if self.made is None or all(map(is_, self._rules, (self.made.rule, *(x.rule for x in self.made.groups)))):
            return
        first, *own = self._rules
        self._rules = [self.made.rule, *(x.rule for x in self.made.groups)]
        if all(map(is_, own, self._rules[1:])):
            self.made._rule, self._rules[0] = first, first
            raise ValueError(f"{self._who}: settings were changed on `inner`; set them in `param_groups`")
        for group, new, old in zip((x for x in groups if x["params"]), self._rules[1:], own, strict=False):
            pairs = ((name, getattr(new, name), getattr(old, name)) for name in fields_of(type(old)))
            cast(dict[str, Any], group).update({name: x for name, x, was in pairs if x is not was})

    def _check_storage(self, pairs: Iterable[tuple[Group, Rule]]) -> None:
        """Raise ValueError if the state of a group cannot be converted to the storage that its new rule asks for."""
        for group, rule in pairs:
            old = group.rule
            if (rule.state_dtype, rule.master_weights) != (old.state_dtype, old.master_weights):
                assert self.made is not None
                self.made._step.release.check_whole(f"{self._who}: groups have changed")
                self.made._arrive()
                check_convertible(f"{self._who}: group {group.label!r}", group.tensors, old, rule)

    def _check_switched(self, group: Group, rule: Rule) -> None:
        """Raise ValueError if a group's new rule needs other slots than its state has."""
        names = [name for name in fields_of(type(rule)) if hasattr(group.rule, name)]  # Adam has not all of AdamW's
        pairs = ((name, getattr(group.rule, name), getattr(rule, name)) for name in names)
        try:
            group.checked({name: new for name, old, new in pairs if new is not old and new != old})
        except ValueError as error:
            raise ValueError(f"{self._who}: {error}") from error

    def write(self, states: States) -> None:
        """Set the states of some parameters. An empty state resets its parameter."""
        if self.made is None:
            return
        rules = {x.name: group.rule for group in self.made.groups for x in group.tensors}
        anew = {}
        for p, x in zip(self.params, self.tensors, strict=True):
            if p in states and not states[p]:
                anew[p] = {"step": as_tensor(0), **x.fresh(rules[x.name])}
        with uninterrupted():
            self._restore(self.params, self.made, {**states, **anew}, copies=True)

    # ---- what groups say --------------------------------------------------------------------------------------------

    def _values(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of the rule's fields in a group. Tensors of one element become numbers."""
        names, take = _taking(group)
        try:
            values: tuple[Any, ...] = take(group)
        except KeyError as error:
            raise ValueError(f"{self._who}: `{error.args[0]}` must be given; a parameter group has none") from error
        if any(isinstance(x, Tensor) for x in values):
            values = tuple(self._number(name, x) for name, x in zip(names, values, strict=True))
        return values

    def _number(self, name: str, x: Any) -> Any:
        """A tensor of one element as a number. Anything but a tensor is returned as it is."""
        if not isinstance(x, Tensor):
            return x
        if x.numel() != 1:
            raise ValueError(f"{self._who}: `{name}` as a tensor must have one element; got {x!r}")
        return x.item()


def _goes_on(tensor: Known, state: Mapping[str, Any]) -> bool:
    """Whether a tensor keeps a state. One without updates, which users may have written, is kept only if it fits."""
    now = {slot: (x.dtype, x.shape) for slot, x in tensor.slots.items()}
    return bool(state["step"].any()) or now == {slot: (x.dtype, x.shape) for slot, x in state.items() if slot != "step"}


def _wide(rule: Rule) -> Any:
    """The structure of a rule's state, whatever its storage."""
    plain = rule.state_dtype is None and rule.master_weights in ("auto", False)
    masters = "auto" if rule.masters else False
    return (rule if plain else dataclasses.replace(rule, state_dtype=None, master_weights=masters)).structure


def _taking(group: Mapping[str, Any]) -> tuple[list[str], Any]:
    """The names of the fields of a group's rule, and a function that reads their values from the group."""
    return _taken(cast(Settings, group).rule)


@cache
def _taken(rule: type[Rule]) -> tuple[list[str], Any]:
    """As `_taking`, for a rule."""
    names = [*fields_of(rule), *more_of(rule)]
    return names, itemgetter(*names)


def _of(group: Mapping[str, Any], values: Iterable[Any]) -> Rule:
    """The rule of a group with its values."""
    return as_pytorch(cast(Settings, group).rule, dict(zip(_taking(group)[0], values, strict=True)))


def _holds(group: Mapping[str, Any], params: list[Tensor]) -> bool:
    """Whether a group's parameters are exactly these tensors."""
    now = group["params"]
    return len(now) == len(params) and all(map(is_, now, params))


def distinct(group: Mapping[str, Any]) -> list[Tensor]:
    """The parameters of a group without duplicates, for which PyTorch only warns."""
    return list(dict.fromkeys(group["params"]))


def elsewhere(cls: type[Any], name: str) -> str:
    """Where to find here what an `arrayopt.Optimizer` has under this name; empty if it has nothing."""
    if name in INNER:
        return f"; {INNER[name]}"
    own = hasattr(cls, "rule") and name in fields_of(cls.rule)
    return f"; read and set opt.param_groups[i][{name!r}]" if own else ""
