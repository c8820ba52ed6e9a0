"""The base of all update rules: a frozen, validated set of hyper-parameters with an update of one tensor."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from arrayopt.arrays import NARROW, Array, kind
from arrayopt.foreign import check_call
from arrayopt.foreign_names import RULE
from arrayopt.hyper import Hyper, choice, evaluate, flag, is_number, real, structural, whole
from arrayopt.rules.draws import rounded
from arrayopt.rules.fields import flags, function, hypers, is_off, numbers, readers
from arrayopt.rules.names import AROUND, VALUE, Numbers, OnFloat, Values, check_class, check_fields
from arrayopt.rules.returned import Slots, returned_slots, returned_update
from arrayopt.rules.rings import expanded, gathered
from arrayopt.rules.storage import code_of, read_storage, storage_for
from arrayopt.rules.stretches import read_blocks
from arrayopt.rules.unwritten import unwritten
from arrayopt.rules.words import (
    centralize,
    clip_by_norm,
    clip_by_value,
    clip_unitwise,
    ema,
    lookahead,
    norm,
    zeros_abs2,
)

PROJECT = "project_"
"""The first characters of the names of slots that hold arrays of `Rule.project`."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Rule(ABC):
    r"""An update rule: hyper-parameters as fields, and the update of one tensor as a pure function of arrays.

    To write one, subclass `Rule` as a frozen, keyword-only dataclass; declare numbers with `arrayopt.real` and switches
    with `arrayopt.flag`; give `slots` and `update`. See the documentation, "Writing your own rule". Every rule has the
    fields below. They act before and after the rule's own update, in this order.

    Parameters
    ----------
    grad_centralization : bool, default False
        Subtract from each gradient of rank ≥ 2 its mean over all axes but the first. This comes before everything else
        (Yong et al., arXiv:2004.01461).
    clip_value : number, schedule or sequence, optional
        Limit each element of the gradient to ±clip_value, in (0, inf). For complex elements, limit the magnitude.
        (`LANS` limits its normalized gradient; `LARS` can do it after its ratio.)
    clip_tensor_norm : number, schedule or sequence, optional
        The largest Euclidean norm of each tensor's gradient, in (0, inf). A larger gradient is scaled down.
    clip_unit_ratio : number, schedule or sequence, optional
        Adaptive gradient clipping (Brock et al., arXiv:2102.06171): the largest norm of each unit's gradient, divided
        by the norm of the unit's parameters, in (0, inf). A larger gradient is scaled down. Norms of parameters below
        1e-3 count as 1e-3. A unit is one index of the first axis; a tensor of rank < 2 is one unit.
    lookahead_steps : number, schedule or sequence, optional
        After this number of updates of a tensor, a whole number, slow weights move towards the parameter, and the
        parameter is set to them (Zhang et al., arXiv:1907.08610). The slow weights are the slot ``slow``.
    lookahead_alpha : number, schedule or sequence, default 0.5
        How far the slow weights move towards the parameter, in (0, 1]; 1 is all the way.
    project : callable, optional
        A function ``f(xp, p, h) -> p`` of the new parameter, in plain array API, that keeps it where it must be: see
        `arrayopt.projections`. It comes after lookahead and before the average. A master is projected, and then
        rounded.
    ema_decay : number, schedule or sequence, optional
        Keep an exponential moving average of the parameter, with this decay in [0, 1), in the slot ``ema``. It starts
        as the parameter is before its first update. See `Optimizer.averaged`.
    stacked : bool, default False
        The first axis of each tensor counts layers, as in models for ``jax.lax.scan``. The rule treats each layer as a
        tensor, with its own norms and ratios. The layers of a tensor share one update count, except layers that
        `skip_nonfinite` skips separately.
    blocks : int or sequence of int, optional
        Divide the first axis of each tensor into blocks, each of which the rule treats as a tensor: this many equal
        blocks, or blocks of these lengths, as in ``blocks=(768, 256, 256)`` for matrices of queries, keys and values in
        one array. The blocks of a tensor share one update count. Cannot be combined with `stacked`.
    master_weights : {"auto", True, False, "split"}
        Whether parameters in float16 and bfloat16 have a master in float32, the slot ``master``. The update changes the
        master, and the parameter is the rounded master. With False the update changes the 16-bit parameter itself, and
        steps below its precision are lost. With True, unlike "auto", wider parameters raise an error. With "split", the
        slot ``master`` has the 8 bits that the master has in addition to the parameter: 24 in all.
    rounding : {"nearest", "stochastic"}
        How a parameter in float16 or bfloat16 that has no master is rounded: to nearest, or at random to one of the two
        neighbouring numbers, with a mean equal to the exact value, so that small steps add up on average. With
        "stochastic", "auto" gives no masters. Wider parameters are not rounded.
    seed : int, default 0
        The seed of the random numbers of `rounding` and of `arrayopt.random`, in [0, 2**64).
    state_dtype : {None, "float16", "bfloat16", "int8"} or mapping of slot to one of them, optional
        The dtype in which to store slots that have a value for each element. Arithmetic is in float32, with one
        rounding per step. For second moments, the root is stored. Smaller slots keep their precision. ``"int8"`` stores
        an 8-bit code for each element, and a bfloat16 scale for each block of 32 neighbours, in a slot named ``scale_``
        and the slot's name. A mapping sets the dtype of each slot; slots that it does not name keep their precision.

    Raises
    ------
    TypeError
        If a value is not a number, a schedule or a sequence of numbers, or a switch is not a bool.
    ValueError
        If a number lies outside its interval, or a value is not among the options.
    """

    complex_ok: ClassVar[bool] = False
    """Whether the rule supports complex parameters."""

    squares: ClassVar[tuple[str, ...]] = ()
    """Slots that average squares. In 16 or 8 bits, their roots are stored, because squares would underflow."""

    wide: ClassVar[tuple[str, ...]] = ()
    """Slots that `state_dtype` does not narrow: points that small steps are added to, and single numbers."""

    begins_at_zero: ClassVar[bool] = False
    """Whether each slot is initially zero or equal to the parameter, so that stacked slots can be made at once."""

    rings: ClassVar[tuple[str, ...]] = ()
    """Slots that are rings. `slots` makes them with `arrayopt.ring`, and `update` writes them with `arrayopt.put`."""

    evaluated_from: ClassVar[tuple[str, ...]] = ()
    """Slots that `evaluated` uses; none if the parameter itself is the point to evaluate."""

    grad_centralization: bool = flag(False)
    clip_value: Hyper | None = real("(0, inf)", None)
    clip_tensor_norm: Hyper | None = real("(0, inf)", None)
    clip_unit_ratio: Hyper | None = real("(0, inf)", None)
    lookahead_steps: Hyper | None = real("(0, inf)", None)
    lookahead_alpha: Hyper = real("(0, 1]", 0.5)
    project: Callable[[Any, Array, Any], Array] | None = structural(None, function)
    ema_decay: Hyper | None = real("[0, 1)", None)
    stacked: bool = flag(False)
    blocks: int | Sequence[int] | None = structural(None, read_blocks)
    master_weights: bool | str = choice("auto", True, False, "split")
    rounding: str = choice("nearest", "stochastic")
    seed: int = structural(0, whole)
    state_dtype: str | Mapping[str, str | None] | None = structural(None, read_storage)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_fields(cls, Rule)

    def __new__(cls, *args: Any, **fields: Any) -> "Rule":
        check_class(cls, Rule)
        check_call(cls, args, fields, RULE)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        who = type(self).__name__
        for name, read in readers(type(self)).items():
            object.__setattr__(self, name, read(getattr(self, name)))
        if is_number(self.lookahead_steps) and self.lookahead_steps % 1:  # type: ignore[operator]
            raise ValueError(f"{who}: `lookahead_steps` must be an integer; got {self.lookahead_steps}")
        if self.rounding == "stochastic" and self.master_weights is True:
            raise ValueError(f"{who}: rounding='stochastic' is for parameters without masters; got master_weights=True")
        if self.stacked and self.blocks is not None:
            raise ValueError(f"{who}: `stacked` and `blocks` both define the first axis; set only one of them")
        self.check()

    @property
    def several(self) -> bool:
        """Whether the rule treats a parameter as several tensors: layers or blocks."""
        return self.stacked or self.blocks is not None

    @property
    def clips_itself(self) -> bool:
        """Whether `update` applies `clip_value` itself, so that the gradient is not clipped before."""
        return False

    @property
    def branches(self) -> bool:
        """Whether some updates run as written, not fused, in every engine."""
        return type(self).as_written is not Rule.as_written

    @property
    def value_optional(self) -> bool:
        """Whether steps may have no value; `h.value` is then None."""
        return False

    @property
    def masters(self) -> bool:
        """Whether parameters of 16 bits have masters."""
        return self.master_weights is not False and self.rounding == "nearest"

    @property
    def projects_itself(self) -> bool:
        """Whether `update` calls `project` itself, so that its result is not projected afterwards."""
        return False

    @property
    def constants(self) -> Mapping[str, Array]:
        """Arrays that `project` needs, by the names of the slots that hold them. Steps do not change them."""
        return {f"{PROJECT}{name}": x for name, x in getattr(self.project, "arrays", {}).items()}

    def check(self) -> None:  # noqa: B027 - a rule without conditions between its fields gives none
        """Raise ValueError or TypeError if fields that are valid by themselves do not go together."""

    def as_written(self, t: int) -> bool:
        """Whether the t-th update of a tensor, counted from 1, runs as written, not fused, in every engine.

        Return True for each update in which a condition of `branch` holds. The others may be fused.
        """
        return False

    def refuses(self, xp: Any, p: Array) -> str:
        """Return why the rule cannot update this tensor, as words that follow its name; empty if it can.

        A remedy may follow after a semicolon. Without one, the error tells users to give the tensor another rule.
        """
        return ""

    @abstractmethod
    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        """Return the state of one tensor before its first update, by slot name."""

    @abstractmethod
    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        """Compute one update of one tensor, with the array API alone, without writing to any input.

        Parameters
        ----------
        xp : namespace
            The array-API namespace of the arrays.
        p, g : array
            Parameter and gradient, of one shape, in at least float32.
        s : dict of str to array
            The slots, as `slots` or the last update returned them, in at least float32.
        h : namespace
            This step's hyper-parameters as scalars, by field name (None where off); `h.t`, the number of updates of
            this tensor, counting this one; and `h.value`, the value that the step was given (see `value_optional`).

        Returns
        -------
        array, dict of str to array
            The new parameter; and the new slots, with other values to report (see `Optimizer.stats`).
        """

    def evaluated(self, p: Array, s: dict[str, Array], h: Any) -> Array:
        """Return the point at which to evaluate, if it is not the parameter; element by element, from `evaluated_from`.

        `p`, `s` and `h` are as for `update`, after it, with the hyper-parameters of the last step.
        """
        return p

    def all_slots(self, xp: Any, p: Array, dtype: str) -> dict[str, Array]:
        """The whole initial state of one tensor, in the dtype of arithmetic.

        `p` is the parameter in the dtype of arithmetic, and `dtype` the name of the dtype in which it is stored.
        """
        around = {
            "master": self.masters and dtype in NARROW,
            "slow": self.lookahead_steps is not None,
            "ema": self.ema_decay is not None,
        }
        try:
            made = self.slots(xp, p)
        except TypeError as error:
            later = ", ".join(self._not_floats)
            if later:
                error.add_note(f"In `slots`, a number that is a schedule or an array has no value yet: {later}")
            raise
        own = returned_slots(type(self).__name__, p, made, self.rings)
        copies = {name: xp.astype(p, p.dtype) for name in AROUND if around[name]}
        fixed = {n: xp.zeros_like(p) if kind(x) == "complex" else zeros_abs2(xp, p) for n, x in self.constants.items()}
        return {**own, **copies, **fixed}

    def storage(self, rank: int, dtype: str = "float64") -> dict[str, str]:
        """The slots of a tensor that `state_dtype` narrows, with the dtypes in which they are stored.

        Only slots with a value for each element are narrowed.
        """
        if self.state_dtype is None:
            return {}
        p = np.zeros((2,) * rank, complex if dtype.startswith("complex") else float)
        found = {}
        for slot, made in self.slots(np, p).items():
            stored = storage_for(self.state_dtype, slot)
            for name, x in expanded({slot: made}).items():
                if stored is not None and x.shape == p.shape and slot not in self.wide:
                    found[name] = code_of(stored, unsigned=name in self.squares, pairs=x.dtype.kind == "c")
        return found

    def __call__(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        """Run `update` with everything that the fields of `Rule` add before and after it. Engines call this.

        `s` has `all_slots`; the new parameter is in the dtype of arithmetic.
        """
        p = s.get("master", p)
        g = centralize(xp, g) if self.grad_centralization else g
        g = g if self.clips_itself else clip_by_value(xp, g, h.clip_value)
        g = clip_unitwise(xp, clip_by_norm(xp, g, h.clip_tensor_norm), p, h.clip_unit_ratio)
        roots = [name for name in self.squares if name in s and storage_for(self.state_dtype, name)]
        fixed = {name: s[name] for name in self.constants}
        if fixed:
            h = Values(**vars(h), arrays={name.removeprefix(PROJECT): x for name, x in fixed.items()})
        own = {name: x for name, x in s.items() if name not in AROUND and name not in fixed}
        given = Slots(gathered(self.rings, {**own, **{name: s[name] * s[name] for name in roots}}))
        with unwritten(self, {"p": p, "g": g, **expanded(given)}, h.t):
            made = self._as_seen(h).update(xp, p, g, given, h)
        p, new = returned_update(type(self).__name__, made, given)
        new = {**new, **{name: xp.sqrt(new[name]) for name in roots}, **fixed}
        if "slow" in s:
            p, new["slow"] = lookahead(p, s["slow"], h)
        if self.project is not None and not self.projects_itself:
            p = self.project(xp, p, h)
        if "ema" in s:
            new["ema"] = ema(s["ema"], p, h.ema_decay)
        if "master" in s:
            new["master"] = p
        return p if self.rounding == "nearest" else rounded(xp, p, h), new

    def _as_seen(self, h: Any) -> "Rule":
        """Return the rule for its own functions in a step: `self.lr` is `h.lr`, even if it is a schedule."""
        if not self._not_floats:
            return self
        made = copy(self)
        for name, may_be_off in self._not_floats.items():
            x = getattr(h, name)
            made.__dict__[name] = OnFloat(x) if may_be_off and isinstance(x, float) else x
        return made

    @cached_property
    def _not_floats(self) -> dict[str, bool]:
        """The fields whose value is a schedule or an array, and whether zero would turn them off."""
        found = {f.name: f for f in numbers(type(self))}
        odd = [name for name in found if not isinstance(getattr(self, name), float | None)]
        return {name: bool(found[name].metadata.get("zero_is_off")) for name in odd}

    def norms(self, xp: Any, p: Array, g: Array, new_p: Array) -> dict[str, Array]:
        """The reports of every rule, besides those of `update`."""
        return {"param_norm": norm(xp, p), "grad_norm": norm(xp, g), "update_norm": norm(xp, new_p - p)}

    def at(self, step: Any, value: Any = None) -> dict[str, Any]:
        """Return the value of each hyper-parameter at a step, counted from 0, and the step's function value.

        Raises
        ------
        ValueError
            If a sequence has run out or a schedule's value lies outside the hyper-parameter's interval.
        TypeError
            If a schedule returns something that is not a number.
        """
        return Numbers(self.hypers_at(step, value))

    def hypers_at(self, step: Any, value: Any = None) -> dict[str, Any]:
        """As `at`, but the dict must not be changed, because steps with the same values share it."""
        values, scheduled = self._numbers
        if not (scheduled or self.value_optional) and value is None:
            return values
        now = Numbers(values)
        for name, who, interval in scheduled:
            now[name] = evaluate(who, values[name], step, interval)
        if value is not None or self.value_optional:
            now[VALUE] = value
        return now

    @cached_property
    def _numbers(self) -> tuple[Numbers, list[tuple[str, str, str | None]]]:
        """The hyper-parameters as set, and the names, owners and intervals of those that are schedules."""
        given = Numbers({name: getattr(self, name) for name in hypers(type(self))})
        intervals = hypers(type(self))
        scheduled = [name for name, x in given.items() if callable(x)]
        return given, [(name, f"{type(self).__name__}: `{name}`", intervals[name]) for name in scheduled]

    @cached_property
    def switches(self) -> tuple[tuple[str, Any], ...]:
        """The names and values of the fields that are switches."""
        return tuple((name, getattr(self, name)) for name in flags(type(self)))

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """What determines the computation and the state: the class, the switches, and which numbers are off."""
        switches = tuple(getattr(value, "structure", value) for _, value in self.switches)
        off = tuple(f.name for f in numbers(type(self)) if is_off(f, getattr(self, f.name)))
        return type(self), switches, off

    init: ClassVar[Callable[..., dict[str, Any]]]
    """`arrayopt.init` as a method; `arrayopt.functional` sets it."""

    def __repr__(self) -> str:
        common = {f.name for f in dataclasses.fields(Rule)}
        given = {
            f.name: value
            for f in dataclasses.fields(self)
            for value in [getattr(self, f.name)]
            if not (f.name in common or f.default is None or f.default is False)
            or not (type(value) is type(f.default) and value == f.default)
        }
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})"
