"""What every update rule is: a frozen, validated set of hyper-parameters with an update of one tensor."""

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from arrayopt.arrays import Array
from arrayopt.hyper import coerce, evaluate, flag
from arrayopt.rules.words import centralize, is_zero

__all__ = ["Rule"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Rule(ABC):
    r"""An update rule: hyper-parameters as fields, and the update of one tensor as a pure function of arrays.

    To write one, subclass `Rule` as a frozen, keyword-only dataclass; declare numbers with `arrayopt.real` and switches
    with `arrayopt.flag`; give `slots` and `update`. See the documentation, "Writing your own rule".

    Parameters
    ----------
    grad_centralization : bool, default False
        Subtract from each gradient of rank ≥ 2 its mean over all axes but the first, before all else
        (Yong et al., arXiv:2004.01461).

    Raises
    ------
    TypeError
        If a value is not a number, a schedule or a sequence of numbers, or a switch is not a bool.
    ValueError
        If a number lies outside its interval.
    """

    complex_ok: ClassVar[bool] = False
    """Whether complex parameters make sense under this rule."""

    grad_centralization: bool = flag(False)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            where, value = f"{type(self).__name__}: `{f.name}`", getattr(self, f.name)
            if is_flag(f):
                if not isinstance(value, bool):
                    raise TypeError(f"{where} must be True or False; got {value!r}")
            else:
                value = coerce(
                    where, value, f.metadata.get("interval"), optional=f.metadata.get("optional", f.default is None)
                )
                object.__setattr__(self, f.name, value)
        self.check()

    def check(self) -> None:  # noqa: B027 - a rule without conditions between its fields gives none
        """Raise ValueError or TypeError where fields that are each valid do not go together."""

    @abstractmethod
    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        """The state of one tensor before its first update, by slot name."""

    @abstractmethod
    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        """One update of one tensor, in plain array API, without writing any input.

        Parameters
        ----------
        xp : namespace
            The array-API namespace of the arrays.
        p, g : array
            Parameter and gradient, of one shape, in at least float32.
        s : dict of str to array
            The slots, as `slots` made them or as the last update returned them.
        h : namespace
            This step's hyper-parameters as scalars, by field name (None where off), and `h.t`, the number of updates of
            this tensor, counting this one.

        Returns
        -------
        array, dict of str to array
            The new parameter; and the new slots, with whatever else is worth reporting (see `Optimizer.stats`).
        """

    def __call__(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        """`update`, with the gradient centralized first where that is asked for: what an engine runs."""
        return self.update(xp, p, centralize(xp, g) if self.grad_centralization else g, s, h)

    def at(self, step: Any) -> dict[str, Any]:
        """The value of each hyper-parameter at a step, counted from 0.

        Raises
        ------
        ValueError
            If a sequence has run out or a schedule's value lies outside the hyper-parameter's interval.
        TypeError
            If a schedule returns something that is not a number.
        """
        return {
            name: evaluate(f"{type(self).__name__}: `{name}`", getattr(self, name), step, interval)
            for name, interval in hypers(type(self)).items()
        }

    @property
    def structure(self) -> tuple[Any, ...]:
        """What shapes the computation and the state: the class, the switches, and which numbers are off."""
        switches = tuple(getattr(self, f.name) for f in dataclasses.fields(self) if is_flag(f))
        off = tuple(f.name for f in dataclasses.fields(self) if not is_flag(f) and _is_off(f, getattr(self, f.name)))
        return type(self), switches, off

    def init(self, params: Any, *, groups: Any = None) -> dict[str, Any]:
        """The state of the functional form for a tree of parameters; see `arrayopt.init`."""
        from arrayopt.functional import init  # built on rules, so imported when used

        return init(self, params, groups=groups)

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        default = {f.name: f.default for f in dataclasses.fields(self) if f.default is None or f.default is False}
        given = {k: v for k, v in shown.items() if not (k in default and v is default[k])}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})"


def is_flag(f: "dataclasses.Field[Any]") -> bool:
    """Whether a field is a structural switch and not a number."""
    return bool(f.metadata.get("flag")) or isinstance(f.default, bool)


def _is_off(f: "dataclasses.Field[Any]", value: Any) -> bool:
    """Whether a number is off: None, or plainly zero where the field says that this is structural."""
    return value is None or (bool(f.metadata.get("zero_is_off")) and is_zero(value))


@cache
def hypers(rule: type[Rule]) -> dict[str, str | None]:
    """The numeric fields of a rule class, with their intervals."""
    return {f.name: f.metadata.get("interval") for f in dataclasses.fields(rule) if not is_flag(f)}
