"""Groups: which rule, with which hyper-parameters, each tensor is under."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from arrayopt.arrays import Array, dtype_name, is_array, size
from arrayopt.foreign import RULE, unknown
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.state.tensors import Tensor

__all__ = [
    "Group",
    "Groups",
    "assign",
    "field_parameters",
    "fields_of",
    "grouped",
    "labelled",
    "override",
    "unknown_key",
]

Pattern = str | re.Pattern[str] | Callable[[str, Array], bool]
Given = Rule | Mapping[str, Any]
"""What a group is given: a rule, or values of fields, of the optimizer's rule or of that under the key "rule"."""
Groups = Mapping[Any, Given] | Iterable[tuple[Pattern, Given]]
"""What groups are given, by pattern; a mapping's keys are patterns too (typed as anything, for they cannot vary)."""


class Group:
    """Tensors under one rule. The rule's hyper-parameters can be read and set as attributes: ``group.lr = 0.1``.

    Attributes
    ----------
    label : str
        What the group was made from: a pattern, its place in a list, or "rest".
    rule : Rule
        The group's own rule.
    names : tuple of str
        Names of its tensors.
    overridden : frozenset of str
        Fields that the group sets for itself; the others follow the optimizer's rule. All, if it has a rule of its own.
    """

    __slots__ = ("label", "overridden", "rule", "tensors")

    label: str
    overridden: frozenset[str]
    rule: Rule
    tensors: list[Tensor]

    def __init__(self, label: str, rule: Rule, given: Given, tensors: list[Tensor]) -> None:
        object.__setattr__(
            self, "label", label
        )  # attributes set the usual way are fields of the rule
        object.__setattr__(self, "tensors", tensors)
        self.replace_rule(*grouped(rule, given, f"group {label!r}"))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in Group.__slots__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name not in fields_of(type(self.rule)):
            raise AttributeError(
                unknown(
                    type(self).__name__, [*fields_of(type(self.rule)), *_public(self)], name, RULE
                )
            )
        return getattr(self.rule, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in fields_of(type(self.rule)):
            raise AttributeError(f"group {self.label!r}: {unknown_key(self.rule, name, value)}")
        self.replace_rule(self.checked(self.rule, {name: value}), self.overridden | {name})

    def checked(self, rule: Rule, changes: Mapping[str, Any]) -> Rule:
        """The rule with changes, if the state that the group's tensors have fits it; else ValueError."""
        old, rule = rule, override(rule, changes, f"group {self.label!r}")
        if rule.stacked != old.stacked:
            raise ValueError(
                f"group {self.label!r}: `stacked` cannot change while training: each layer of a stacked tensor has its"
                " own number of updates; make a new Optimizer"
            )
        if (
            "project" in changes
            and (old.constants or rule.constants)
            and old.project != rule.project
        ):
            raise ValueError(
                f"group {self.label!r}: `project` cannot change while training if it has arrays; make a new Optimizer"
            )
        for tensor in self.tensors if rule.structure != old.structure else ():
            slots = tensor.slots, tensor.fresh(rule)
            now, then = ({name: dtype_name(x) for name, x in made.items()} for made in slots)
            if list(now.items()) != list(then.items()):
                shown = (list(now), list(then)) if list(now) != list(then) else (now, then)
                raise ValueError(
                    f"group {self.label!r}: {', '.join(changes)} cannot change so while training: the state of"
                    f" {tensor.name!r} would have to change from {shown[0]} to {shown[1]};"
                    f" make a new Optimizer{_scheduled(old, rule, changes)}"
                )
        return rule

    def replace_rule(self, rule: Rule, overridden: frozenset[str] | None = None) -> None:
        """Put a checked rule in the place of the old one."""
        object.__setattr__(self, "rule", rule)
        if overridden is not None:
            object.__setattr__(self, "overridden", overridden)

    def __setstate__(self, state: Any) -> None:
        for name, value in state[1].items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        own = [f"{name}={getattr(self.rule, name)!r}" for name in sorted(self.overridden)]
        if len(own) == len(fields_of(type(self.rule))):
            own = [repr(self.rule)]
        total = sum(size(tensor.array) for tensor in self.tensors)
        return f"Group({', '.join([repr(self.label), f'{len(self.tensors)} tensors', f'{total} parameters', *own])})"


def _scheduled(old: Rule, new: Rule, changes: Iterable[str]) -> str:
    """How to have the state of a number that is off from the start."""
    off = [
        name
        for name in changes
        if 0.0 in (getattr(old, name), getattr(new, name)) and name in hypers(type(new))
    ]
    return f"; {off[0]}=lambda step: 0.0 in place of 0 has this state from the start" if off else ""


def labelled(groups: Iterable[Group]) -> list[tuple[str, Group]]:
    """Groups with their labels, quoted, and numbered where a label is that of an earlier one, too."""
    found: dict[str, Group] = {}
    for i, group in enumerate(groups):
        found[repr(group.label) if repr(group.label) not in found else f"{group.label!r} ({i})"] = (
            group
        )
    return list(found.items())


def _public(x: Any) -> list[str]:
    """The public names of an object's class."""
    return [name for name in dir(type(x)) if not name.startswith("_")]


@cache
def fields_of(rule: type[Rule]) -> list[str]:
    """The names of a rule's fields."""
    return [f.name for f in dataclasses.fields(rule)]


@cache
def field_parameters(rule: type[Rule]) -> tuple[inspect.Parameter, ...]:
    """How a function is called that takes a rule's fields: `lr` first, the rest by name, those of all rules last."""
    common = fields_of(Rule)
    return tuple(
        inspect.Parameter(
            f.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD
            if f.name == "lr"
            else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default,
        )
        for f in sorted(dataclasses.fields(rule), key=lambda f: (f.name != "lr", f.name in common))
    )


def unknown_key(rule: Rule, name: str, *value: Any) -> str:
    """What to say to a field that the rule does not have; `value` is what it was given as, where that is known."""
    return unknown(type(rule).__name__, fields_of(type(rule)), name, RULE, *value)


def override(rule: Rule, changes: Mapping[str, Any], who: str) -> Rule:
    """A rule with some fields changed, typed and validated like any; ValueError for a field that it does not have."""
    for name, value in changes.items():
        if name not in fields_of(type(rule)):
            raise ValueError(f"{who}: {unknown_key(rule, name, value)}")
    try:
        return dataclasses.replace(rule, **changes) if changes else rule
    except (TypeError, ValueError) as error:
        raise type(error)(f"{who}: {error}") from error


def grouped(rule: Rule, given: Given, who: str) -> tuple[Rule, frozenset[str]]:
    """The rule of a group, and the fields that do not follow the optimizer's `rule`.

    Raises
    ------
    TypeError, ValueError
        For fields that the rule does not have, or values that it cannot have.
    """
    changes: Mapping[str, Any] = {"rule": given} if isinstance(given, Rule) else given
    if "rule" not in changes:
        return override(rule, changes, who), frozenset(changes)
    own = changes["rule"]
    if not isinstance(own, Rule):
        raise TypeError(f"{who}: `rule` must be a Rule such as LAMB(lr=1e-3); got {own!r}")
    own = override(own, {name: value for name, value in changes.items() if name != "rule"}, who)
    return own, frozenset(fields_of(type(own)))


def assign(
    rule: Rule, groups: Groups | None, named: list[tuple[str, Array]]
) -> list[tuple[str, Given, list[str]]]:
    """Sort parameters into groups by pattern: (label, what is given, names), in the order given, then the rest.

    Raises
    ------
    ValueError
        For a group without tensors, or a key that is no hyper-parameter of the rule.
    TypeError
        For a pattern that is neither a glob, a compiled regular expression nor a function.
    """
    given: Any = groups.items() if isinstance(groups, Mapping) else () if groups is None else groups
    pairs: list[Any] = (
        list(given) if isinstance(given, Iterable) and not is_array(given) else [given]
    )
    if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise TypeError(
            f"groups: must map patterns to dicts of hyper-parameters or to rules, or list such pairs; got {groups!r}"
        )
    made: list[tuple[str, Given, list[str]]] = []
    for pattern, own in pairs:
        if not isinstance(own, Mapping | Rule):
            raise TypeError(
                f"groups: {pattern!r} must map to a dict of hyper-parameters or to a rule; got {own!r}"
            )
        label = (
            pattern
            if isinstance(pattern, str)
            else getattr(pattern, "pattern", getattr(pattern, "__name__", repr(pattern)))
        )
        grouped(rule, own, f"group {label!r}")
        made.append((label, own, []))
    rest: list[str] = []
    for name, array in named:
        hit = next(
            (i for i, (pattern, _) in enumerate(pairs) if _matches(pattern, name, array)), None
        )
        (rest if hit is None else made[hit][2]).append(name)
    for label, _, names in made:
        if not names:
            raise ValueError(
                f"group {label!r}: no parameter is left for it; the names are {', '.join(n for n, _ in named)}"
            )
    return [*made, *([("rest" if made else "all", {}, rest)] if rest else [])]


def _matches(pattern: Pattern, name: str, array: Array) -> bool:
    """Whether a pattern takes a tensor."""
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern)
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    if callable(pattern) and not isinstance(pattern, type):
        return bool(pattern(name, array))
    raise TypeError(
        f"groups: a pattern must be a glob, a compiled regular expression or f(name, array); got {pattern!r}"
    )
