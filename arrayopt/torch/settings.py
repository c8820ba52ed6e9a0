"""Parameter groups: dicts with the fields of a rule, which also understand other libraries' names for them."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from arrayopt.foreign import alias, close_to, spread, unknown
from arrayopt.foreign_names import DOOR
from arrayopt.params.groups import fields_of
from arrayopt.rules.base import Rule
from arrayopt.torch.spelled import DIFFERENTIABLE, HOW, more_of, otherwise, otherwise_all, spelled

RULE = "rule"
"""The key of a group's own rule; its value is the class."""

OPTIONS = ("maximize", "engine", "clip_norm", "skip_nonfinite", "stats", "release", "comm", "overlap")
"""The arguments that every optimizer has besides the fields of its rule."""


class Settings(dict[str, Any]):
    """A parameter group: a dict of the rule's fields, and of keys that schedulers and users add.

    Some keys stand for others, which are the ones that are stored: ``betas`` for ``beta1`` and ``beta2``, ``eps`` for
    the several of some rules, and PyTorch's names of fields, such as ``decoupled_weight_decay``. All of them can be
    read and written. A group with a rule of its own has its class under ``rule``.
    """

    def __init__(self, rule: type[Rule], given: Mapping[str, Any]) -> None:
        super().__init__()
        if RULE in given:
            rule = given[RULE]
            super().__setitem__(RULE, rule)
        self.rule, self._fields = rule, fields_of(rule)
        self.update({name: x for name, x in given.items() if name != RULE})

    def __setitem__(self, name: str, value: Any) -> None:
        if name == RULE and value is not self.get(RULE):
            raise TypeError("param_groups: a group's `rule` cannot change; set it when you add the group")
        spelling = spelled(self.rule, name)
        if spelling is not None:
            super().__setitem__(spelling.field, spelling.here(value))
            return
        every, several = spread(self._fields, name), isinstance(value, tuple | list)
        parts = next((x for x in every if several and len(x) == len(value)), None)
        meant = " or ".join(f"({', '.join(x)})" for x in every)
        if name == "eps" and several and not every:
            raise ValueError(f"param_groups: `eps` must be one number for {self.rule.__name__}; got {value!r}")
        if parts is not None:
            super().update(zip(parts, value, strict=True))
        elif every:
            raise ValueError(f"param_groups: `{name}` must be {meant}; got {value!r}")
        else:
            super().__setitem__(name, value)

    def __missing__(self, name: str) -> Any:
        spelling = spelled(self.rule, name)
        if spelling is not None:
            return spelling.there(self[spelling.field])
        if name == IDLE or name in more_of(self.rule):
            return otherwise(self.rule, name)
        if name not in self:
            raise KeyError(name)
        return tuple(self[part] for part in spread(self._fields, name)[0])

    def __contains__(self, name: object) -> bool:
        spelling = spelled(self.rule, str(name))
        if spelling is not None:
            return super().__contains__(spelling.field)
        meant = spread(self._fields, str(name))[:1]
        return super().__contains__(name) or any(self.keys() >= set(parts) for parts in meant)

    def __delitem__(self, name: str) -> None:
        spelling = spelled(self.rule, name)
        if spelling is not None:
            name = spelling.field
        for part in spread(self._fields, name)[0] if name in self and not super().__contains__(name) else (name,):
            super().__delitem__(part)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - it is that

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self:
            return super().pop(name, *default)
        value = self[name]
        del self[name]
        return value

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *given: Any, **named: Any) -> None:
        for name, value in dict(*given, **named).items():
            self[name] = value

    def guests(self) -> dict[str, Any]:
        """The entries of other code, such as schedulers."""
        idle = {IDLE} if self.get("lookahead_steps") is None else {}
        return {name: x for name, x in self.items() if name in idle or not _is_own(self.rule, name)}

    def copy(self) -> "Settings":
        return Settings(self.rule, self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "Settings":
        return Settings(self.rule, copy.deepcopy(dict(self), memo))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


IDLE = "lookahead_alpha"
"""A field that a group lacks while it has no effect, because other code uses the same key."""


def _is_own(rule: type[Rule], name: str) -> bool:
    """Whether a key of a group belongs to the optimizer, and not to other code."""
    known = fields_of(rule)
    own = name in ("params", "param_names", "maximize", RULE, *known, *HOW, *more_of(rule))
    return own or bool(spread(known, name)) or spelled(rule, name) is not None


def rule_of(who: str, given: Any) -> tuple[type[Rule], dict[str, Any]]:
    """The class of a group's own rule, and the values of its fields; none if a class is given. Or raise TypeError."""
    if isinstance(given, Rule):
        fields = {name: getattr(given, name) for name in fields_of(type(given))}
        idle = {IDLE} if given.lookahead_steps is None else set[str]()
        return type(given), {name: x for name, x in fields.items() if name not in idle}
    found = given if isinstance(given, type) and issubclass(given, Rule) else getattr(given, RULE, None)
    if not (isinstance(found, type) and issubclass(found, Rule)):
        raise TypeError(f"{who}: `rule` of a parameter group must be a rule such as Muon; got {given!r}")
    return found, {}


def defaults_of(rule: type[Rule], given: Mapping[str, Any]) -> dict[str, Any]:
    """The default values of a rule's fields. `given` decides some of them."""
    own = {f.name: f.default for f in dataclasses.fields(rule) if f.default is not dataclasses.MISSING}
    own |= otherwise_all(rule, given)
    if given.get("lookahead_steps") is None and IDLE not in given:
        del own[IDLE]
    return own


def check_params(who: str, params: Any) -> None:
    """Raise TypeError if `params` is a module, or a method of one."""
    if callable(params):
        raise TypeError(f"{who}: `params` must be tensors; got {type(params).__name__}; pass model.parameters()")


def check_names(who: str, rule: type[Rule], given: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown argument, or for two arguments that set the same field."""
    known = fields_of(rule)
    for name, value in given.items():
        if name == "differentiable" and value:
            raise TypeError(f"{who}: {DIFFERENTIABLE}")
        if name not in (*known, *HOW, *more_of(rule)) and not spread(known, name) and spelled(rule, name) is None:
            raise TypeError(unknown(who, [*known, *OPTIONS], name, DOOR, value))
    _check_twice(who, rule, given)


def check_group(
    who: str, rule: type[Rule], group: Mapping[str, Any], options: Mapping[str, Any], *, written: bool = False
) -> None:
    """Raise TypeError for a key that is a mistake: an option, or a field under another name.

    Groups may have other keys, such as ``initial_lr`` or ``lr_scale``. With `written`, the keys were added later, maybe
    by a wrapper of the optimizer, so only unmistakable ones are refused. An option with its present value is accepted.
    """
    known = fields_of(rule)
    for name, value in group.items():
        if name == "differentiable" and value:
            raise TypeError(f"{who}: a parameter group: {DIFFERENTIABLE}")
        if _is_own(rule, name):
            continue
        if name in OPTIONS and name in options and options[name] == value:
            continue
        if name in OPTIONS:
            raise TypeError(f"{who}: a parameter group has no `{name}`; it is an option: {who}(params, {name}=...)")
        own = not isinstance(name, str) or written
        own = own or any(name.endswith(f"_{field}") or name.startswith(f"{field}_") for field in known)
        if not (own or name in _KEPT) and (name in DOOR or alias(known, name) or close_to(known, name)):
            raise TypeError(f"{who}: a parameter group {unknown(who, known, name, DOOR, value).partition(' ')[2]}")
    _check_twice(f"{who}: a parameter group", rule, group)


_KEPT = frozenset(
    ("max_lr", "min_lr", "warmup_steps", "total_steps", "decay", "adaptive", "alpha", "gamma", "k", "rho")
)
_KEPT |= {"lookahead_step", "lookahead_k"}
"""Keys that schedulers, scripts and wrappers write into groups for their own use."""


def _check_twice(who: str, rule: type[Rule], given: Mapping[str, Any]) -> None:
    """Raise TypeError if a field is given under two names."""
    known: Sequence[str] = fields_of(rule)
    for name in given:
        spelling = spelled(rule, name)
        for parts in [*spread(known, name), *([] if spelling is None else [(spelling.field,)])]:
            if both := [part for part in parts if part in given]:
                raise TypeError(f"{who}: pass `{name}` or `{'`, `'.join(both)}`, not both")
