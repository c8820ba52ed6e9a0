"""Groups: the rule and the hyper-parameters of each tensor."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from arrayopt.arrays import Array, dtype_name, is_array, size
from arrayopt.foreign import counted, got, takes, unknown
from arrayopt.foreign_names import RULE
from arrayopt.interrupts import uninterrupted
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.rules.named import check_rule
from arrayopt.state.convert import check_convertible, convert
from arrayopt.state.tensors import Tensor

Pattern = str | re.Pattern[str] | Callable[[str, Array], bool]
Given = Rule | Mapping[str, Any]
"""What the user gives for a group: a rule, or values of fields.

The fields are those of the optimizer's rule, or of the rule under the key "rule".
"""

Groups = Mapping[Any, Given] | Iterable[tuple[Pattern, Given]]
"""What the user gives for groups, by pattern.

A mapping's keys are patterns too; their type is Any because a mapping is invariant in it.
"""


class Group:
    """Tensors under one rule, whose fields can be read and set: ``group.lr = 0.1``.

    Attributes
    ----------
    label : str
        The group's origin: a pattern, its position in a list, or "rest".
    rule : Rule
        The group's own rule.
    names : tuple of str
        The names of its tensors.
    overridden : frozenset of str
        Fields that the group sets itself; the others follow the optimizer's rule. All, if it has
        its own rule.
    """

    __slots__ = ("label", "overridden", "rule", "tensors")

    label: str
    overridden: frozenset[str]
    rule: Rule
    tensors: list[Tensor]

    def __init__(self, label: str, rule: Rule, given: Given, tensors: list[Tensor]) -> None:
        own, overridden = grouped(rule, given, f"group {label!r}")
        made = {"label": label, "tensors": tensors, "rule": own, "overridden": overridden}
        for name, value in made.items():
            # attributes that are set in the usual way are fields of the rule
            object.__setattr__(self, name, value)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in Group.__slots__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name not in fields_of(type(self.rule)):
            names = [*fields_of(type(self.rule)), *_public(self)]
            raise AttributeError(unknown(type(self).__name__, names, name, RULE))
        return getattr(self.rule, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in fields_of(type(self.rule)):
            raise AttributeError(f"group {self.label!r}: {unknown_key(self.rule, name, value)}")
        with uninterrupted():
            self.replace_rule(self.checked({name: value}), self.overridden | {name})

    def checked(self, changes: Mapping[str, Any], made: Rule | None = None) -> Rule:
        """Return the rule with changes, or `made`; ValueError if the state does not fit it."""
        who, old = f"group {self.label!r}", self.rule
        rule = override(old, changes, who) if made is None else made
        for name in ("stacked", "blocks"):
            if getattr(rule, name) != getattr(old, name):
                why = "each layer or block has slots of its own; make a new Optimizer"
                raise ValueError(f"{who}: `{name}` cannot change while training: {why}")
        if (
            "project" in changes
            and (old.constants or rule.constants)
            and old.project != rule.project
        ):
            raise ValueError(
                f"{who}: `project` cannot change while training if it has arrays; make a new"
                " Optimizer"
            )
        changed = rule.structure != old.structure
        stored = set(changes) <= {"state_dtype", "master_weights"} and rule.masters == old.masters
        if changed and stored:
            check_convertible(who, self.tensors, old, rule)
            return rule
        for tensor in self.tensors if changed else ():
            now = {slot: dtype_name(array) for slot, array in tensor.slots.items()}
            then = {slot: dtype_name(array) for slot, array in tensor.fresh(rule).items()}
            if list(now.items()) != list(then.items()):
                before: Any = now
                after: Any = then
                if list(now) != list(then):
                    before, after = list(now), list(then)
                raise ValueError(
                    f"{who}: {', '.join(changes)} cannot change like this while training: the state"
                    f" of {tensor.name!r} would have to change from {before} to {after};"
                    f" make a new Optimizer{_scheduled(old, rule, changes)}"
                )
        return rule

    def replace_rule(self, rule: Rule, overridden: frozenset[str] | None = None) -> None:
        """Replace the rule by a checked one; slots go on in the storage that it asks for."""
        replace_rules([self], [rule])
        if overridden is not None:
            object.__setattr__(self, "overridden", overridden)

    def __setstate__(self, state: Any) -> None:
        for name, value in state[1].items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        own = [f"{name}={getattr(self.rule, name)!r}" for name in sorted(self.overridden)]
        if len(own) == len(fields_of(type(self.rule))):
            own = [repr(self.rule)]
        n, total = len(self.tensors), sum(size(tensor.array) for tensor in self.tensors)
        words = [repr(self.label), counted(n, "tensor"), counted(total, "parameter"), *own]
        return f"Group({', '.join(words)})"


def replace_rules(groups: Sequence[Group], rules: Sequence[Rule]) -> None:
    """Replace the rules of all groups by checked ones, or of none if memory runs out."""
    convert([(group.tensors, group.rule, rule) for group, rule in zip(groups, rules, strict=True)])
    for group, rule in zip(groups, rules, strict=True):
        object.__setattr__(group, "rule", rule)


def _scheduled(old: Rule, new: Rule, changes: Iterable[str]) -> str:
    """Return advice for a number that is off, so that its state exists from the start."""
    for name in changes:
        if 0.0 in (getattr(old, name), getattr(new, name)) and name in hypers(type(new)):
            return f"; {name}=lambda step: 0.0 in place of 0 has this state from the start"
    return ""


def labelled(groups: Iterable[Group]) -> list[tuple[str, Group]]:
    """Return groups with their quoted labels, numbered where an earlier group has the same."""
    found: dict[str, Group] = {}
    for i, group in enumerate(groups):
        label = repr(group.label)
        found[label if label not in found else f"{label} ({i})"] = group
    return list(found.items())


def _public(x: Any) -> list[str]:
    """Return the public names of an object's class."""
    return [name for name in dir(type(x)) if not name.startswith("_")]


@cache
def fields_of(rule: type[Rule]) -> list[str]:
    """Return the names of a rule's fields."""
    return [f.name for f in dataclasses.fields(rule)]


@cache
def field_parameters(rule: type[Rule]) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a function that takes a rule's fields.

    `lr` is first, the others are by name, and the fields of all rules are last.
    """
    common, found = fields_of(Rule), []
    for field in sorted(dataclasses.fields(rule), key=lambda x: (x.name != "lr", x.name in common)):
        kind: Any = inspect.Parameter.KEYWORD_ONLY
        if field.name == "lr":
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        has_default = field.default is not dataclasses.MISSING
        default = field.default if has_default else inspect.Parameter.empty
        found.append(inspect.Parameter(field.name, kind, default=default))
    return tuple(found)


def unknown_key(rule: Rule, name: str, *value: Any) -> str:
    """Return the error for a field that the rule does not have, with the given value if known."""
    return unknown(type(rule).__name__, fields_of(type(rule)), name, RULE, *value)


def override(rule: Rule, changes: Mapping[str, Any], who: str) -> Rule:
    """Return a validated rule with some fields changed; ValueError for an unknown field."""
    for name, value in changes.items():
        if name not in fields_of(type(rule)):
            raise ValueError(f"{who}: {unknown_key(rule, name, value)}")
    try:
        return dataclasses.replace(rule, **changes) if changes else rule
    except (TypeError, ValueError) as error:
        raise type(error)(f"{who}: {error}") from error


def grouped(rule: Rule, given: Given, who: str) -> tuple[Rule, frozenset[str]]:
    """Return the rule of a group, and the fields that do not follow the optimizer's `rule`.

    Raise TypeError or ValueError for fields that the rule does not have, or values that it cannot
    have.
    """
    changes: Mapping[str, Any] = {"rule": given} if isinstance(given, Rule) else given
    if "rule" not in changes:
        return override(rule, changes, who), frozenset(changes)
    own = changes["rule"]
    check_rule(who, own, Rule)
    own = override(own, {name: x for name, x in changes.items() if name != "rule"}, who)
    return own, frozenset(fields_of(type(own)))


@dataclasses.dataclass(frozen=True)
class Assigned:
    """A group to be made: its label, what the user gave for it, and the names of its tensors."""

    label: str
    given: Given
    names: list[str] = dataclasses.field(default_factory=list)


def assign(rule: Rule, groups: Groups | None, named: list[tuple[str, Array]]) -> list[Assigned]:
    """Sort parameters into groups by pattern, in the order given; the rest are the last group.

    Raise ValueError for a group without tensors, or a key that is no hyper-parameter of the rule;
    TypeError for a pattern that is neither a glob, a compiled regular expression nor a function.
    """
    if groups is None:
        groups = ()
    given: Any = groups.items() if isinstance(groups, Mapping) else groups
    pairs: list[Any] = [given]
    if isinstance(given, Iterable) and not is_array(given):
        pairs = list(given)
    if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise TypeError(
            "`groups` must map patterns to dicts of hyper-parameters or to rules, or list such"
            f" pairs; got {groups!r}"
        )
    made: list[Assigned] = []
    for pattern, own in pairs:
        if not isinstance(own, Mapping | Rule):
            raise TypeError(
                f"groups: {pattern!r} must map to a dict of hyper-parameters or to a rule;"
                f" got {got(own)}"
            )
        label = pattern
        if not isinstance(pattern, str):
            name = getattr(pattern, "__name__", repr(pattern))
            label = getattr(pattern, "pattern", name)
        grouped(rule, own, f"group {label!r}")
        made.append(Assigned(label, own))
    rest = Assigned("rest" if made else "all", {})
    for name, array in named:
        for group, (pattern, _) in zip(made, pairs, strict=True):
            if _matches(pattern, name, array):
                group.names.append(name)
                break
        else:
            rest.names.append(name)
    for group in made:
        if not group.names:
            raise ValueError(
                f"group {group.label!r}: its pattern must match a parameter that no earlier group"
                f" has; the names are {', '.join(name for name, _ in named)}"
            )
    return [*made, rest] if rest.names else made


def _matches(pattern: Pattern, name: str, array: Array) -> bool:
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern)
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    if callable(pattern) and not isinstance(pattern, type) and takes(pattern, 2):
        found: Any = pattern(name, array)
        if is_array(found) and found.ndim:
            raise TypeError(f"groups: f(name, array) must return a bool; got an array for {name!r}")
        return bool(found)
    raise TypeError(
        "groups: a pattern must be a glob, a compiled regular expression or f(name, array); got"
        f" {pattern!r}"
    )
