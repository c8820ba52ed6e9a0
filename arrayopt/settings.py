"""`Settings`: the attributes of an Optimizer that users read and set."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from arrayopt.arrays import Ints, array_namespace, as_array, detached, on_its_device, place, size, working_dtype
from arrayopt.foreign import check_options, counted, unknown
from arrayopt.foreign_names import OPTIMIZER
from arrayopt.html import table
from arrayopt.hyper import coerce, whole
from arrayopt.interrupts import uninterrupted
from arrayopt.params.groups import Group, fields_of, unknown_key
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.rules.names import Values
from arrayopt.rules.namespace import current
from arrayopt.saving.saved import Saved
from arrayopt.state.run import LIMIT
from arrayopt.state.shown import States, TensorState
from arrayopt.state.tensors import Tensor
from arrayopt.state.verdict import CLIP_NORM
from arrayopt.step.stats import Stats


class Settings(Saved):
    """The base of `Optimizer` with its settings, its state and its counts."""

    __slots__ = ("_stats",)

    _stats: Stats

    def __new__(cls, *args: Any, **given: Any) -> Self:
        rule = args[1] if len(args) > 1 else given.get("rule")
        kind = rule if isinstance(rule, type) else type(rule)
        check_options(cls, given, kind.__name__, fields_of(kind) if issubclass(kind, Rule) else ())
        return super().__new__(cls)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups, in order. Their fields can be set too, as in ``opt.groups[0].lr = 0.1``."""
        return tuple(self._parameters.groups)

    @property
    def step_count(self) -> int:
        """The number of steps made, including skipped ones. Schedules get this number in the next step."""
        return self._run.steps

    @property
    def state(self) -> Mapping[str, Mapping[str, Any]]:
        """The state of each tensor by its name, a mapping with the number of updates ``t`` and the slots.

        Assign to a slot to change it: ``opt.state["w"]["m"] = x``. The array is copied. It must be finite and have the
        slot's library, device, dtype and shape; otherwise a TypeError or ValueError is raised. A rank may pass its part
        of the slot, or the whole slot. ``opt.state["w"]["s"]`` of a ring ``s`` is a copy of its members along a first
        axis; ``opt.state["w"]["s_0"]`` is the first member.
        """
        self._parameters.lend()
        rings = {x.name: group.rule.rings for group in self.groups for x in group.tensors}
        shown = {x.name: TensorState(x, self._changing, rings[x.name]) for x in self._parameters.all}
        return States(shown)

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """A context for writing to the state: other calls are refused, and the state is then no longer initial."""
        with self._guard(what, changes=True), uninterrupted():
            yield
            self._parameters.keep_state()

    @property
    def stats(self) -> Stats:
        """Norms and trust ratios of the last step (with ``stats=True``), the global norm, and the number of skips."""
        self._run.streams.meet("Optimizer.stats")
        return self._stats

    @property
    def loss_scale(self) -> Any:
        """The factor for the loss in the next step; 1.0 without a loss scale.

        A float. If a GPU decides whether steps are skipped, it is a 0-d array on the GPU, and reading it does not wait.
        """
        self._run.streams.meet("Optimizer.loss_scale")
        return self._run.peek("scale")

    def now(self, name: str = "lr") -> float | dict[str, float | None] | None:
        """Return the value of a hyper-parameter in the next step, as a plain number.

        Parameters
        ----------
        name : str, default "lr"
            A field of the rule that is a number: ``"lr"``, ``"weight_decay"``, ...

        Returns
        -------
        float, dict of str to float, or None
            One number if all groups have the same, else the number of each group by its label. None if the field is
            off, if a group's rule has no such field, and for the `lr` of `Adafactor` and `CAME` with
            ``relative_step=True``, which compute it for each tensor.

        Raises
        ------
        ValueError
            If no rule has such a number, or a schedule's value is out of range or its sequence has run out.

        Examples
        --------
        >>> import numpy as np, arrayopt as ao
        >>> opt = ao.Optimizer({"w": np.ones(2), "b": np.ones(2)}, ao.SGD(lr=lambda step: 0.1 / (step + 1)))
        >>> opt.now()
        0.1
        """
        if not any(name in hypers(type(rule)) for rule in (self._rule, *(group.rule for group in self.groups))):
            raise ValueError(f"Optimizer.now: {unknown_key(self._rule, name)}")
        found: dict[str, float | None] = {}
        for i, group in enumerate(self.groups):
            value = group.rule.at(self.step_count).get(name)
            label = group.label if group.label not in found else f"{group.label} ({i})"
            found[label] = None if value is None else float(value)
        return next(iter(found.values())) if len(set(found.values())) == 1 else found

    def nonfinite(self) -> list[str]:
        """Return the names of the tensors whose gradients were not finite in the last step. This waits for the device.

        Returns
        -------
        list of str
            Gradients are checked with `skip_nonfinite`, a loss scale or `clip_norm`; otherwise this raises a
            RuntimeError.
        """
        self._run.streams.meet("Optimizer.nonfinite")
        return self._step.judging.nonfinite()

    def skipped_layers(self) -> dict[str, Ints]:
        """Return how many updates each layer of the stacked tensors has skipped, by name. This waits for the device.

        Returns
        -------
        dict of str to array of int
            With `skip_nonfinite`, layers with a non-finite gradient are skipped separately. The update count of a layer
            is that of the tensor, ``state[name]["t"]``, minus this number. Steps that were skipped as a whole are not
            included: see `stats.skipped`.
        """
        return {x.name: x.skipped for x in self._parameters.all if x.layers}

    @np.errstate(all="ignore")  # infinity and NaN are valid results, and need no warning
    def averaged(self) -> Any:
        """Return copies of the points at which to evaluate, in the parameters' structure and dtypes.

        Returns
        -------
        params
            With `ema_decay`, the parameters' moving averages. Without it, the points at which `ScheduleFreeAdamW` and
            `FISTA` are evaluated. For other tensors, copies of the parameters.
        """
        with self._guard("Optimizer.averaged"):
            self._together("Optimizer.averaged", sums=False)
            rules, found = {x.name: group.rule for group in self.groups for x in group.tensors}, []
            for x in self._parameters.all:
                with on_its_device(x.array):
                    now = self._evaluated(x, rules[x.name])
                    found.append(as_array(array_namespace(now).astype(now, x.array.dtype)))
        return self._parameters.tree_of(found)

    def _evaluated(self, x: Tensor, rule: Rule) -> Any:
        """The point at which to evaluate a tensor, collected from all ranks that have a part of it."""
        if "ema" in x.slots:
            return self._team.collect(x, "ema")
        p = detached(self._team.collect(x, "p") if x.block is not None else x.array)
        if not rule.evaluated_from:
            return p
        if "master" in x.slots:
            p = current(p, self._team.collect(x, "master"))
        xp = array_namespace(p)
        slots = {name: self._team.collect(x, name) for name in rule.evaluated_from}
        t = x.updates
        t = t if isinstance(t, int) else xp.asarray(t.reshape(-1, *[1] * (p.ndim - 1)), device=place(p)[1])
        now = Values(**rule.at(max(self.step_count - 1, 0)), t=t)
        return rule._as_seen(now).evaluated(xp.astype(p, working_dtype(xp, p), copy=False), slots, now)

    @property
    def rule(self) -> Rule:
        """The rule of all tensors whose group has no other value.

        Read and set its fields on the optimizer: ``opt.lr = 0.1``.
        """
        return self._rule

    def __copy__(self) -> Self:
        raise TypeError("Optimizer: a shallow copy would share parameters and state; use copy.deepcopy")

    def __getstate__(self) -> Any:
        self._run.streams.meet("Optimizer")
        self._arrive()
        if self._team.size > 1:  # else a copy has the gradients, or what they have updated
            self._step.release.check_whole("Optimizer: a copy")
        names = {*Saved.__slots__, *Settings.__slots__, *self.__slots__} - {"__weakref__"}
        return None, {name: getattr(self, name) for name in sorted(names)}

    def __setstate__(self, state: Any) -> None:
        for name, value in state[1].items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in fields_of(type(self._rule)):
            return getattr(self._rule, name)
        if name.startswith("_"):
            raise AttributeError(f"Optimizer has no attribute {name!r}")
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # raises the property's own error once more
        public = [x for x in dir(type(self)) if not x.startswith("_")]
        raise AttributeError(unknown("Optimizer", [*fields_of(type(self._rule)), *public], name, OPTIMIZER))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "params":
            with self._guard("Optimizer.params", changes=True), uninterrupted():
                self._parameters.exchange(value, "Optimizer.params")
        elif name in fields_of(type(self._rule)):
            with uninterrupted():
                self._rule = self._parameters.follow(self._rule, {name: value})
        elif name == "clip_norm":
            object.__setattr__(self, name, coerce("Optimizer: `clip_norm`", value, CLIP_NORM, optional=True))
        elif name == "step_count":
            self._run.steps = whole("Optimizer: `step_count`", value, last=LIMIT - 1)
        elif name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(f"Optimizer: {unknown_key(self._rule, name, value)}")

    def __repr__(self) -> str:
        every, groups = self._parameters.all, self._parameters.groups
        counts = counted(len(every), "tensor"), counted(sum(size(x.array) for x in every), "parameter")
        head = f"Optimizer({self._rule!r}, {', '.join(counts)}, step {self.step_count})"
        return "\n".join([head, *(f"  {group!r}" for group in groups if len(groups) > 1 or group.overridden)])

    def _repr_html_(self) -> str:
        rows = []
        for group in self._parameters.groups:
            total = sum(size(tensor.array) for tensor in group.tensors)
            rows.append((group.label, len(group.tensors), f"{total:,}", repr(group.rule)))
        caption = f"Optimizer, step {self.step_count}"
        return table(caption, ("group", "tensors", "parameters", "rule"), rows)
