"""What an optimizer may be: a rule, with switches, and at most one twist; and which of these are near to another."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from arrayopt import rules as offered
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers, is_flag, is_off
from arrayopt.testing.diagnosis.twists import TWISTS, Twist

# Fields that change no step here, or that are tried with another; and those that are as plain switched on as off.
LEFT_ALONE = {"stacked", "blocks", "project", "ema_decay", "lookahead_alpha", "rounding", "ns_dtype"}
ORDINARY = {"momentum", "nesterov"}

WARMUP = (3.0, 5.0, 7.5, 10.0, 20.0, 100.0, 1000.0)
USUAL: Mapping[str, Sequence[float]] = {
    "beta1": (0.0, 0.5, 0.99),
    "beta2": (0.9, 0.95, 0.98, 0.99, 0.999),
    "beta3": (0.99,),
    "eps": (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2),
    "eps1": (1e-30, 1e-20, 1e-10, 1e-6),
    "eps2": (1e-16, 1e-10, 1e-6),
    "eps_scale": (1e-3, 0.01),
    "weight_decay": (0.0, 0.01, 0.1, 1.0),
    "momentum": (0.9, 0.5, 0.99),
    "dampening": (0.0, 0.5),
    "clip_threshold": (1.0, 0.1, 0.5, 2.0),
    "decay_rate": (0.8, 0.5),
    "initial_scale": (1.0, 0.1),
    "alpha": (0.9, 0.5, 2.0, 5.0),
    "alpha_warmup": WARMUP,
    "beta3_warmup": WARMUP,
    "warmup_steps": (0.0, 3.0, 5.0, 10.0),
    "r": (0.0, 1.0),
    "lookahead_steps": (2.0, 3.0, 4.0, 5.0, 6.0),
}
"""Where the search for numbers begins, beside a rule's own defaults, and where it jumps to."""
WIDE = [float(x) for x in 10.0 ** np.arange(-5.0, 3.1, 0.5)]  # for others that are switched on
BELOW_ONE = (0.9, 0.99, 0.5, 0.999)

# What fields are set to in published code that are neither numbers to be found nor choices.
POLAR_EXPRESS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
PUBLISHED: Mapping[str, Sequence[Any]] = {
    "ns_steps": (3, 4, 6, 8, 10),
    "ns_coefficients": ((2.0, -1.5, 0.5), POLAR_EXPRESS),
    "master_weights": (False,),
    "state_dtype": ("int8", "bfloat16", "float16") if find_spec("ml_dtypes") else (),
}

OFF = "off"  # in `Hypothesis.switches`: a number that is switched off


@dataclass(frozen=True)
class Hypothesis:
    """One of them."""

    kind: type[Rule]
    switches: tuple[
        tuple[str, Any], ...
    ] = ()  # fields that are not as by default; a number that is switched on has None
    twist: str = ""  # a key of `TWISTS`, or empty
    free: tuple[tuple[str, str], ...] = ()  # numbers that are not the same all the time, with "step" or "tensor"

    @property
    def changes(self) -> int:
        """How many there are."""
        return sum(name not in ORDINARY for name, _ in self.switches) + bool(self.twist) + len(self.free)

    @property
    def is_coded(self) -> bool:
        """Whether the state is stored in 8 bits."""
        return ("state_dtype", "int8") in self.switches

    @property
    def twisted(self) -> Twist:
        """The twist itself."""
        return TWISTS.get(self.twist, Twist(""))

    @cached_property
    def rule(self) -> Rule:
        """The rule without its twist, with the numbers that it has by default, or that switches begin at."""
        return self.rule_with({})

    def rule_with(self, values: Mapping[str, float]) -> Rule:
        """The same with some numbers; ValueError or TypeError if these or switches do not fit."""
        made: dict[str, Any] = {f.name: 0.1 for f in fields(self.kind) if f.default is MISSING}
        on = {name: x[0] for name, x in self._switched_on().items()}
        made |= {name: on.get(name, None if x == OFF else x) for name, x in self.switches} | dict(values)
        try:
            return self.kind(**made)
        except ValueError:  # lr where it must be given, and not where it must not
            if "lr" not in hypers(self.kind) or made.get("lr") is not None:
                raise
            return self.kind(**{**made, "lr": 0.01})

    def exists(self, values: Mapping[str, Any]) -> bool:
        """Whether the rule can be made with numbers that were found; arrays have one for each step or tensor."""
        own = {name: x for name, x in values.items() if name in hypers(self.kind)}
        try:
            for end in (np.min, np.max):
                self.rule_with({name: float(end(x)) for name, x in own.items()})
        except (TypeError, ValueError):
            return False
        return True

    def applies(self) -> bool:
        """Whether there is such a rule, and its twist means something there."""
        try:
            return self.twisted.applies(self.rule)
        except (TypeError, ValueError):
            return False

    def takes(self, shapes: Iterable[tuple[int, ...]]) -> bool:
        """Whether the rule is one for tensors of all these shapes."""
        return not any(self.rule.refuses(np, np.zeros(shape)) for shape in shapes)

    def _switched_on(self) -> dict[str, Sequence[float]]:
        """Numbers that are switched on, and where the search for these begins."""
        found = {}
        for name, x in self.switches:
            if x is None and name in hypers(self.kind):
                interval = hypers(self.kind)[name] or "(0, inf)"
                found[name] = USUAL.get(name, BELOW_ONE if interval.endswith(("1)", "1]")) else WIDE)
        return found

    def starts(self) -> dict[str, Sequence[float]]:
        """For each number that was switched on, or that a twist brings, where the search may begin."""
        return {**self._switched_on(), **self.twisted.numbers}

    def neighbours(self, *, narrow: bool, known: bool) -> Iterator["Hypothesis"]:
        """All with one change more."""
        rule, changed = self.rule, {name for name, _ in self.switches}
        for f in fields(self.kind):
            if f.name not in changed | LEFT_ALONE and (narrow or f.name != "master_weights"):
                yield from self.switched(f)
        for name, axis in (("weight_decay", "tensor"), ("lr", "tensor"), ("lr", "step"), ("weight_decay", "step")):
            if not self.free and name in numbers(rule) and (self.twist, axis) != ("joined", "tensor"):
                yield replace(self, free=((name, axis),))
        for key, twist in TWISTS.items() if not self.twist else ():
            able = twist.applies(rule) and (known or not twist.known) and not (narrow and twist.wide)
            if able and not (key == "joined" and "tensor" in dict(self.free).values()):
                yield replace(self, twist=key)

    def switched(self, f: Field[Any]) -> Iterator["Hypothesis"]:
        """All with another value of a field, or with it on or off, that exist."""
        value, values = getattr(self.rule, f.name), list[Any]()
        if f.name in PUBLISHED or f.metadata.get("options"):
            options = PUBLISHED[f.name] if f.name in PUBLISHED else f.metadata["options"]
            values = [x for x in options if x is not value and x != value]
        elif is_flag(f):
            values = [not value] if isinstance(value, bool) else []
        elif f.name in hypers(self.kind) and f.name != "lr":
            values = [None] if is_off(f, value) else [OFF] if f.metadata.get("optional") else []
        yield from self._existing((*self.switches, (f.name, x)) for x in values)

    def with_one_switch_less(self) -> Iterator["Hypothesis"]:
        """All in which a field is as by default again."""
        yield from self._existing(tuple(x for x in self.switches if x != switch) for switch in self.switches)

    def _existing(self, several: Iterable[tuple[tuple[str, Any], ...]]) -> Iterator["Hypothesis"]:
        """The same with other switches, where these go together."""
        for new in (replace(self, switches=switches) for switches in several):
            if new.applies():
                yield new


def plain(shapes: Iterable[tuple[int, ...]] = ((1,),)) -> list[Hypothesis]:
    """Every rule as it is by default that takes tensors of these shapes, and with the switches in `ORDINARY`."""
    several = set(shapes)
    found = [one for one in map(Hypothesis, _kinds()) if one.takes(several)]
    for name in sorted(ORDINARY):
        for one in list(found):
            for f in (f for f in fields(one.kind) if f.name == name):
                found += [new for new in one.switched(f) if (name, OFF) not in new.switches]
    return list(dict.fromkeys(found))


def hyper_names() -> list[str]:
    """The hyper-parameters of all rules."""
    return list(dict.fromkeys(name for kind in _kinds() for name in hypers(kind)))


def not_searched(name: str) -> str:
    """The rule that a name has in it, if it is known and not searched; empty elsewhere."""
    short, searched = name.lower().replace("_", ""), _kinds()
    return next((x.__name__ for x in _rules() if x not in searched and x.__name__.lower() in short), "")


def numbers(rule: Rule) -> list[str]:
    """The numbers of a rule that do something: neither off, nor for what is not parameters."""
    idle = {"ema_decay"} | ({"lookahead_alpha"} if rule.lookahead_steps is None else set())
    own = [f for f in fields(rule) if f.name in hypers(type(rule)) and f.name not in idle]
    return [f.name for f in own if not is_off(f, getattr(rule, f.name))]


def _rules() -> list[type[Rule]]:
    found = map(vars(offered).get, offered.__all__)
    return [x for x in found if isinstance(x, type) and issubclass(x, Rule) and x is not Rule]


def _kinds() -> list[type[Rule]]:
    """All rules whose tensors are updated by themselves, but those that run as they are written: this takes long."""
    return [kind for kind in _rules() if kind.as_written is Rule.as_written and kind is not offered.Prodigy]
