"""What an optimizer may be: a rule, with switches, and at most one twist; and which of these are near to another."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from arrayopt import rules as offered
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers, is_flag
from arrayopt.rules.words import is_zero
from arrayopt.testing.diagnosis.twists import TWISTS, Twist

__all__ = ["OFF", "Hypothesis", "fields", "not_searched", "numbers", "plain"]

# Fields that change no step here, or that are tried with another; and those that are as plain switched on as off.
LEFT_ALONE = {"stacked", "blocks", "project", "ema_decay", "master_weights", "lookahead_alpha", "rounding"}
ORDINARY = {"momentum", "nesterov"}

# Where the search begins for numbers that are switched on.
WIDE = [float(x) for x in 10.0 ** np.arange(-5.0, 3.1, 0.5)]
BELOW_ONE = [0.9, 0.99, 0.5, 0.999]
STARTS: Mapping[str, list[float]] = {
    "lookahead_steps": [2.0, 3.0, 4.0, 5.0, 6.0],
    "momentum": [0.9, 0.5],
    "clip_threshold": [1.0, 0.1],
    "decay_rate": [0.8, 0.5],
    "initial_scale": [1.0, 0.1],
    "alpha_warmup": [3.0, 5.0, 7.5, 10.0, 20.0, 100.0, 1000.0],
    "beta3_warmup": [3.0, 5.0, 7.5, 10.0, 20.0, 100.0, 1000.0],
}

# What fields are set to in published code that are neither numbers to be found nor choices.
PUBLISHED: Mapping[str, list[Any]] = {
    "ns_steps": [3, 4, 6, 8, 10],
    "ns_coefficients": [
        (2.0, -1.5, 0.5),
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
    ],
}

NO_TWIST = Twist("")
OFF = "off"  # in `Hypothesis.switches`: a number that is switched off


@dataclass(frozen=True)
class Hypothesis:
    """One of them.

    Attributes
    ----------
    kind : type of Rule
        The rule.
    switches : tuple of (str, object)
        Fields that are not as by default. A number that is switched on has None here.
    twist : str
        A key of `TWISTS`, or empty.
    free : tuple of (str, str)
        Numbers that are not the same all the time, each with ``"step"`` or ``"tensor"``.
    """

    kind: type[Rule]
    switches: tuple[tuple[str, Any], ...] = ()
    twist: str = ""
    free: tuple[tuple[str, str], ...] = ()

    @property
    def changes(self) -> int:
        """How many there are."""
        return sum(name not in ORDINARY for name, _ in self.switches) + bool(self.twist) + len(self.free)

    @property
    def twisted(self) -> Twist:
        """The twist itself."""
        return TWISTS.get(self.twist, NO_TWIST)

    def rule(self, values: Mapping[str, float] | None = None) -> Rule:
        """The rule with some numbers; without, it is one to be traced. Not twisted.

        Raises
        ------
        ValueError, TypeError
            If the switches do not go together.
        """
        made: dict[str, Any] = {f.name: 0.1 for f in dataclasses.fields(self.kind) if f.default is dataclasses.MISSING}
        for name, value in self.switches:
            on = value is None and name in hypers(self.kind)
            made[name] = _starts(self.kind, name)[0] if on else None if value == OFF else value
        made |= values or {}
        try:
            return self.kind(**made)
        except ValueError:  # lr where it must be given, and not where it must not
            if "lr" not in hypers(self.kind) or made.get("lr") is not None:
                raise
            return self.kind(**{**made, "lr": 0.01})

    def exists(self, values: Mapping[str, Any] = MappingProxyType({})) -> bool:
        """Whether the rule can be made with numbers that were found; arrays have one for each step or tensor."""
        own = {name: x for name, x in values.items() if name in hypers(self.kind)}
        try:
            for end in (np.min, np.max):
                self.rule({name: float(end(x)) for name, x in own.items()})
        except (TypeError, ValueError):
            return False
        return True

    def starts(self) -> dict[str, list[float]]:
        """For each number that was switched on, or that a twist brings, where the search may begin."""
        on = [name for name, x in self.switches if x is None and name in hypers(self.kind)]
        made = {name: _starts(self.kind, name) for name in on}
        return made | dict(self.twisted.numbers)

    def neighbours(self, *, narrow: bool, known: bool) -> Iterator["Hypothesis"]:
        """All with one change more."""
        rule, changed = self.rule(), {name for name, _ in self.switches}
        for f in dataclasses.fields(self.kind):
            if f.name in changed or (f.name in LEFT_ALONE and not (f.name == "master_weights" and narrow)):
                continue
            for value in _others(f, getattr(rule, f.name), self.kind):
                new = replace(self, switches=(*self.switches, (f.name, value)))
                if new.exists():
                    yield new
        if not self.free:
            for name, axis in (("weight_decay", "tensor"), ("lr", "tensor"), ("lr", "step"), ("weight_decay", "step")):
                if name in numbers(rule) and (self.twist, axis) != ("joined", "tensor"):
                    yield replace(self, free=((name, axis),))
        if not self.twist:
            for key, twist in TWISTS.items():
                if key == "joined" and "tensor" in dict(self.free).values():
                    continue
                if twist.applies(rule) and not (twist.known and not known) and not (twist.wide and narrow):
                    yield replace(self, twist=key)

    def with_one_switch_less(self) -> Iterator["Hypothesis"]:
        """All in which a field is as by default again."""
        for name, _ in self.switches:
            new = replace(self, switches=tuple(x for x in self.switches if x[0] != name))
            if new.exists():
                yield new

    def takes(self, tensors: Iterable[Any]) -> bool:
        """Whether the rule is one for all these tensors."""
        rule = self.rule()
        return not any(rule.refuses(np, x) for x in tensors)


def plain(shapes: Iterable[tuple[int, ...]] = ((1,),)) -> list[Hypothesis]:
    """Every rule as it is by default that takes tensors of these shapes."""
    tensors = [np.zeros(shape) for shape in set(shapes)]
    found = [one for one in map(Hypothesis, _kinds()) if one.takes(tensors)]
    for name in ("momentum", "nesterov"):
        for one in list(found):
            for f in (f for f in dataclasses.fields(one.kind) if f.name == name):
                for value in _others(f, getattr(one.rule(), name), one.kind):
                    new = replace(one, switches=(*one.switches, (name, value)))
                    if value != OFF and new not in found and new.exists():
                        found.append(new)
    return found


def fields() -> list[str]:
    """The hyper-parameters of all rules."""
    return list(dict.fromkeys(name for kind in _kinds() for name in hypers(kind)))


def not_searched(name: str) -> str:
    """The rule that a name has in it, if it is known and not searched; empty elsewhere."""
    searched, short = _kinds(), name.lower().replace("_", "")
    others = [kind.__name__ for kind in _rules() if kind not in searched]
    return next((other for other in others if other.lower() in short), "")


def _rules() -> list[type[Rule]]:
    found = map(vars(offered).get, offered.__all__)
    return [x for x in found if isinstance(x, type) and issubclass(x, Rule) and x is not Rule]


def _kinds() -> list[type[Rule]]:
    """All rules whose tensors are updated by themselves.

    Left out are those of which some updates run as they are written: to evaluate them takes long.
    """
    return [kind for kind in _rules() if kind.as_written is Rule.as_written and kind is not offered.Prodigy]


def numbers(rule: Rule) -> list[str]:
    """The numbers of a rule that do something: neither off, nor for what is not parameters."""
    idle = {"ema_decay"} | ({"lookahead_alpha"} if rule.lookahead_steps is None else set())
    found = []
    for f in dataclasses.fields(rule):
        value = getattr(rule, f.name)
        off = value is None or (f.metadata.get("zero_is_off") and is_zero(value))
        if f.name in hypers(type(rule)) and f.name not in idle and not off:
            found.append(f.name)
    return found


def _others(f: "dataclasses.Field[Any]", value: Any, kind: type[Rule]) -> list[Any]:
    """What a field may be switched to."""
    if f.metadata.get("function"):
        return []
    if f.metadata.get("options"):
        if f.name in ("master_weights", "ns_dtype"):
            return [False] if f.name == "master_weights" else []
        return [x for x in f.metadata["options"] if x is not value and x != value]
    if f.name in PUBLISHED:
        return [x for x in PUBLISHED[f.name] if x != value]
    if is_flag(f):
        return [not value] if isinstance(value, bool) else []
    if f.name not in hypers(kind):
        return []
    if value is None or (is_zero(value) and f.metadata.get("zero_is_off")):
        return [None] if f.name != "lr" else []
    return [OFF] if f.metadata.get("optional") and f.name != "lr" else []


def _starts(kind: type[Rule], name: str) -> list[float]:
    if name in STARTS:
        return list(STARTS[name])
    interval = hypers(kind)[name] or "(0, inf)"
    return list(BELOW_ONE if interval.endswith(("1)", "1]")) else WIDE)
