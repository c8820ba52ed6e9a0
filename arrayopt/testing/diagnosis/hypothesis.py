"""Hypotheses about an optimizer: a rule with switches, varying numbers and at most one twist; and their neighbours."""

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

# Fields that have no effect here, or are tried with another field; and fields that count as no change if switched on.
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
"""Values from which the fit of a number starts, besides the rule's default, and to which it jumps."""
WIDE = [float(x) for x in 10.0 ** np.arange(-5.0, 3.1, 0.5)]  # the same for other numbers that are switched on
BELOW_ONE = (0.9, 0.99, 0.5, 0.999)  # and for those that must be below 1

# Values in published code, for fields that are neither numbers to fit nor choices.
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
    """A rule and its changes."""

    kind: type[Rule]
    switches: tuple[tuple[str, Any], ...] = ()  # fields with other values than by default; None: a number is on
    twist: str = ""  # a key of `TWISTS`, or empty
    varying: tuple[tuple[str, str], ...] = ()  # numbers that vary, each with "step" or "tensor"

    @property
    def changes(self) -> int:
        """The number of changes to the plain rule."""
        return sum(name not in ORDINARY for name, _ in self.switches) + bool(self.twist) + len(self.varying)

    @property
    def is_coded(self) -> bool:
        """Whether the state is stored in 8 bits."""
        return ("state_dtype", "int8") in self.switches

    @property
    def twisted(self) -> Twist:
        """The twist, or one that changes nothing."""
        return TWISTS.get(self.twist, Twist(""))

    @cached_property
    def rule(self) -> Rule:
        """The rule without its twist, with default numbers, and the first start of numbers that are switched on."""
        return self.rule_with({})

    def rule_with(self, values: Mapping[str, float]) -> Rule:
        """Return the rule with these numbers. Raise ValueError or TypeError if they or the switches are not valid."""
        made: dict[str, Any] = {f.name: 0.1 for f in fields(self.kind) if f.default is MISSING}
        on = {name: x[0] for name, x in self._switched_on().items()}
        made |= {name: on.get(name, None if x == OFF else x) for name, x in self.switches} | dict(values)
        try:
            return self.kind(**made)
        except ValueError:  # some switches need an lr that is None by default
            if "lr" not in hypers(self.kind) or made.get("lr") is not None:
                raise
            return self.kind(**{**made, "lr": 0.01})

    def exists(self, values: Mapping[str, Any]) -> bool:
        """Whether the rule accepts these numbers. Arrays have one for each step or tensor."""
        own = {name: x for name, x in values.items() if name in hypers(self.kind)}
        try:
            for end in (np.min, np.max):
                self.rule_with({name: float(end(x)) for name, x in own.items()})
        except (TypeError, ValueError):
            return False
        return True

    def applies(self) -> bool:
        """Whether the rule accepts the switches, and the twist makes sense for it."""
        try:
            return self.twisted.applies(self.rule)
        except (TypeError, ValueError):
            return False

    def takes(self, shapes: Iterable[tuple[int, ...]]) -> bool:
        """Whether the rule supports tensors of all these shapes."""
        return not any(self.rule.refuses(np, np.zeros(shape)) for shape in shapes)

    def _switched_on(self) -> dict[str, Sequence[float]]:
        """The starts for the numbers that are switched on."""
        found = {}
        for name, x in self.switches:
            if x is None and name in hypers(self.kind):
                interval = hypers(self.kind)[name] or "(0, inf)"
                found[name] = USUAL.get(name, BELOW_ONE if interval.endswith(("1)", "1]")) else WIDE)
        return found

    def starts(self) -> dict[str, Sequence[float]]:
        """The starts for the numbers that are switched on, and for those of the twist."""
        return {**self._switched_on(), **self.twisted.numbers}

    def neighbours(self, *, narrow: bool, known: bool) -> Iterator["Hypothesis"]:
        """Yield all hypotheses with one more change."""
        rule, changed = self.rule, {name for name, _ in self.switches}
        for f in fields(self.kind):
            if f.name not in changed | LEFT_ALONE and (narrow or f.name != "master_weights"):
                yield from self.switched(f)
        for name, axis in (("weight_decay", "tensor"), ("lr", "tensor"), ("lr", "step"), ("weight_decay", "step")):
            if not self.varying and name in numbers(rule) and (self.twist, axis) != ("joined", "tensor"):
                yield replace(self, varying=((name, axis),))
        for key, twist in TWISTS.items() if not self.twist else ():
            able = twist.applies(rule) and (known or not twist.known) and not (narrow and twist.wide)
            if able and not (key == "joined" and "tensor" in dict(self.varying).values()):
                yield replace(self, twist=key)

    def switched(self, f: Field[Any]) -> Iterator["Hypothesis"]:
        """Yield the valid hypotheses in which a field has another value, or is switched on or off."""
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
        """Yield the valid hypotheses in which one field has its default value again."""
        yield from self._existing(tuple(x for x in self.switches if x != switch) for switch in self.switches)

    def _existing(self, several: Iterable[tuple[tuple[str, Any], ...]]) -> Iterator["Hypothesis"]:
        """Yield this hypothesis with other switches, if the rule accepts them."""
        for new in (replace(self, switches=switches) for switches in several):
            if new.applies():
                yield new


def plain(shapes: Iterable[tuple[int, ...]] = ((1,),)) -> list[Hypothesis]:
    """Return every rule that supports these shapes, with its defaults, and with the switches in `ORDINARY`."""
    several = set(shapes)
    found = [one for one in map(Hypothesis, _searched_rules()) if one.takes(several)]
    for name in sorted(ORDINARY):
        for one in list(found):
            for f in (f for f in fields(one.kind) if f.name == name):
                found += [new for new in one.switched(f) if (name, OFF) not in new.switches]
    return list(dict.fromkeys(found))


def hyper_names() -> list[str]:
    """The names of the hyper-parameters of all searched rules."""
    return list(dict.fromkeys(name for kind in _searched_rules() for name in hypers(kind)))


def not_searched(name: str) -> str:
    """The name of a rule that is not searched, if the name of an optimizer contains it; else empty."""
    short, searched = name.lower().replace("_", ""), _searched_rules()
    return next((x.__name__ for x in _all_rules() if x not in searched and x.__name__.lower() in short), "")


def numbers(rule: Rule) -> list[str]:
    """The numbers of a rule that are not off, and have an effect on parameters."""
    idle = {"ema_decay"} | ({"lookahead_alpha"} if rule.lookahead_steps is None else set())
    own = [f for f in fields(rule) if f.name in hypers(type(rule)) and f.name not in idle]
    return [f.name for f in own if not is_off(f, getattr(rule, f.name))]


def _all_rules() -> list[type[Rule]]:
    found = map(vars(offered).get, offered.__all__)
    return [x for x in found if isinstance(x, type) and issubclass(x, Rule) and x is not Rule]


def _searched_rules() -> list[type[Rule]]:
    """The rules that are searched: not Prodigy, which joins tensors, nor rules that only run as written (slow)."""
    return [kind for kind in _all_rules() if kind.as_written is Rule.as_written and kind is not offered.Prodigy]
