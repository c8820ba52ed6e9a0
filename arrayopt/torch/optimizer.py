"""What all optimizers of `arrayopt.torch` are: ``torch.optim.Optimizer`` on the outside, `arrayopt.Optimizer` below."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from operator import is_, itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from arrayopt.foreign import RULE, spread, unknown
from arrayopt.hyper import Hyper
from arrayopt.optimizer import Optimizer as Below
from arrayopt.params.groups import fields_of
from arrayopt.rules.base import Rule
from arrayopt.state.tensors import Tensor as Known
from arrayopt.state.verdict import Verdict
from arrayopt.torch.settings import Settings
from arrayopt.torch.state import State, put

__all__ = ["OPTIONS", "Optimizer"]

_UNGIVEN: Any = object()

OPTIONS = ("maximize", "engine", "clip_norm", "skip_nonfinite", "stats")
"""What every optimizer takes beside the fields of its rule."""


class Optimizer(torch.optim.Optimizer):
    """The base of the optimizers of `arrayopt.torch`; each is made from a rule. See `arrayopt.torch.optimizer`.

    What is told of the numbers stands in `param_groups`, as everywhere in PyTorch. Slots and counts are those of an
    `arrayopt.Optimizer`, `inner`, which is made anew when parameters come or go; it follows the groups in each step.
    """

    rule: ClassVar[type[Rule]]
    """The rule."""

    def __init__(
        self,
        params: Any,
        lr: Any = _UNGIVEN,
        *,
        maximize: bool = False,
        engine: str = "auto",
        clip_norm: Hyper | None = None,
        skip_nonfinite: bool = False,
        stats: bool = False,
        **fields: Any,
    ) -> None:
        who = type(self).__name__
        if not hasattr(self, "rule"):
            raise TypeError("Optimizer: take a rule's, such as arrayopt.torch.LAMB, or make one: optimizer(MyRule)")
        if not isinstance(maximize, bool):
            raise TypeError(f"{who}: `maximize` must be True or False; got {maximize!r}")
        known = fields_of(self.rule)
        given = fields if lr is _UNGIVEN else {"lr": lr, **fields}
        for name, value in given.items():
            if name not in known and not spread(known, name):
                raise TypeError(unknown(who, [*known, *OPTIONS], name, RULE, value))
        defaults = Settings(self.rule, {**_defaults(self.rule), **given, "maximize": maximize})
        self._options = {"engine": engine, "clip_norm": clip_norm, "skip_nonfinite": skip_nonfinite, "stats": stats}
        self._inner: Below | None = None
        self._made = False
        super().__init__(params, defaults)
        self._make({}, 0)

    # ---- what is below ----------------------------------------------------------------------------------------------

    @property
    def inner(self) -> Below | None:
        """The `arrayopt.Optimizer` that makes the steps, for ``explain()``, ``stats`` and ``save``.

        None where there are no parameters.
        """
        return self._follow()

    def _make(self, states: Mapping[Tensor, Mapping[str, Any]], steps: int, *, copies: bool = True) -> None:
        """Make the optimizer below of what `param_groups` say now, with these states; or raise and change nothing."""
        groups = [group for group in self.param_groups if group["params"]]
        params = [p for group in groups for p in group["params"]]
        values = [self._values(group) for group in groups]
        rules = [self._rule(x) for x in values]
        names = [name for group in groups for name in group.get("param_names", ())]
        named = len(params) == len(names) == len(set(names))
        entries = [
            {
                "params": dict(zip(group["param_names"], group["params"], strict=True)) if named else group["params"],
                **dict(zip(fields_of(self.rule), x, strict=True)),
            }
            for group, x in zip(groups, values, strict=True)
        ]
        options = self._options if self._inner is None else {**self._options, "clip_norm": self._inner.clip_norm}
        inner = Below(entries, rules[0], **options) if groups else None
        if inner is not None:
            self._restore(inner, params, states, copies=copies)
            inner.step_count = steps
        self._inner, self._params, self._seen, self._made = inner, params, values, True

    def _restore(
        self, inner: Below, params: list[Tensor], states: Mapping[Tensor, Mapping[str, Any]], *, copies: bool
    ) -> None:
        """Have parameters go on from states."""
        own = zip(params, inner._parameters.all, strict=True)
        given = [(f"parameter {x.name}", x, states[p]) for p, x in own if p in states]
        if put(type(self).__name__, given, copies=copies):
            inner._parameters.begin()

    def _follow(self) -> Below | None:
        """The optimizer below, as `param_groups` say now."""
        inner, seen = self._inner, self._seen
        groups = [group for group in self.param_groups if group["params"]]
        params = [p for group in groups for p in group["params"]]
        values = [self._values(group) for group in groups]
        same = len(params) == len(self._params) and all(map(is_, params, self._params))
        same = same and (inner is None or [len(x.tensors) for x in inner.groups] == [len(x["params"]) for x in groups])
        if same and inner is not None:
            pairs = list(zip(inner.groups, seen, values, strict=True))
            changed = [
                (group, self._rule(now)) for group, was, now in pairs if not all(map(is_, was, now)) and was != now
            ]
            if all(rule.structure == group.rule.structure for group, rule in changed):
                for group, rule in changed:
                    group.replace_rule(rule)
                self._seen = values
                return inner
        if not same or inner is not None:
            self._make(self._kept(), 0 if inner is None else inner.step_count, copies=False)
        return self._inner

    def _kept(self) -> dict[Tensor, dict[str, Any]]:
        """The states of parameters that have been updated."""
        if self._inner is None:
            return {}
        pairs = zip(self._params, self._inner._parameters.all, strict=True)
        return {p: {"step": x.t, **x.slots} for p, x in pairs if x.t}

    def _values(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of the rule's fields in a group; one-element tensors as numbers."""
        try:
            values: tuple[Any, ...] = itemgetter(*fields_of(self.rule))(group)
        except KeyError as error:
            raise ValueError(f"{type(self).__name__}: a parameter group must have {error}") from error
        if any(isinstance(x, Tensor) for x in values):
            values = tuple(self._number(name, x) for name, x in zip(fields_of(self.rule), values, strict=True))
        return values

    def _number(self, name: str, x: Any) -> Any:
        """A tensor of one element as a number."""
        if not isinstance(x, Tensor):
            return x
        if x.numel() != 1:
            raise ValueError(f"{type(self).__name__}: `{name}` as a tensor must have one element; got {x!r}")
        return x.item()

    def _rule(self, values: Iterable[Any]) -> Rule:
        """The rule with the values of a group."""
        return self.rule(**dict(zip(fields_of(self.rule), values, strict=True)))

    # ---- what PyTorch asks for --------------------------------------------------------------------------------------

    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by their gradients.

        Parameters
        ----------
        closure : callable, optional
            Computes the gradients again, and returns the loss. It is called once, before the update.

        Returns
        -------
        loss
            What `closure` returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            inner = self._follow()
            if inner is not None:
                inner.step(self._gradients(), loss_scale=self._verdict())
        return loss

    def _gradients(self) -> list[Tensor | None]:
        """The gradients, negated where the aim is to maximize."""
        grads = [p.grad for p in self._params]
        if any(group["maximize"] for group in self.param_groups):
            up = [group["maximize"] for group in self.param_groups for _ in group["params"]]
            grads = [-g if negated and g is not None else g for g, negated in zip(grads, up, strict=True)]
        return grads

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a ``GradScaler`` is to leave the division of gradients, and skipping, to `step`."""
        inner = self._inner
        return inner is not None and inner.clip_norm is None and inner._team.size == 1

    def _verdict(self) -> Any:
        """What a ``GradScaler`` has found, without waiting for it."""
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is None:
            return None
        skip = (found != 0).to(torch.int32) if isinstance(found, Tensor) else bool(found)
        return Verdict(None if scale is None else scale.double().reciprocal(), skip)

    @property  # type: ignore[override]
    def state(self) -> Any:
        """The state of each parameter: ``step``, the number of its updates, and the rule's slots."""
        inner = self._follow()
        if inner is None:
            return State((), self._write)
        inner._parameters.take_up()
        return State(zip(self._params, inner._parameters.all, strict=True), self._write)

    @state.setter
    def state(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        if self._made:
            self._write({p: states.get(p, {}) for p in self._params})

    def _write(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Set the states of some parameters; those that are empty begin anew."""
        inner = self._follow()
        if inner is not None:
            rules = {x.name: group.rule for group in inner.groups for x in group.tensors}
            anew: list[tuple[Known, dict[str, Any]]] = []
            pairs = list(zip(self._params, inner._parameters.all, strict=True))
            anew = [(x, x.fresh(rules[x.name])) for p, x in pairs if p in states and not states[p]]
            self._restore(inner, self._params, states, copies=True)
            for tensor, slots in anew:
                tensor.slots = slots

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: a dict with ``params`` and the group's own values of the rule's fields."""
        group = Settings(self.rule, param_group) if isinstance(param_group, dict) else param_group
        super().add_param_group(group)
        if self._made:
            try:
                self._follow()
            except BaseException:
                self.param_groups.pop()
                raise

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """The state as PyTorch's: ``state`` and ``param_groups`` of plain dicts, and the number of steps.

        Tensors are those that the next step writes. ``torch.load`` reads it with ``weights_only=True``, unless a field
        is a schedule.
        """
        inner, made = self._follow(), super().state_dict()
        state = {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in made["state"].items()}
        return {**made, "state": state, "step_count": 0 if inner is None else inner.step_count}

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned. Tensors are copied, and stay in the dtypes that they have here.

        Raises
        ------
        ValueError
            If it does not fit, listing every mismatch. Nothing has been changed then.
        """
        saved = state_dict.copy()
        for pre_hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            replaced = pre_hook(self, saved)
            saved = saved if replaced is None else replaced
        self.__setstate__(self._loaded(saved))
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    def _loaded(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict with the parameters themselves in it."""
        mine, theirs = self.param_groups, saved["param_groups"]
        sizes = [[len(group["params"]) for group in groups] for groups in (theirs, mine)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"{type(self).__name__}: saved groups of {sizes[0]} parameters, here {sizes[1]}")
        groups = []
        for group, was in zip(mine, theirs, strict=True):
            names = {"param_names": group["param_names"]} if "param_names" in group else {}
            groups.append({**self.defaults, **names, **was, "params": group["params"]})
        pairs = zip(theirs, mine, strict=True)
        home = {key: p for was, group in pairs for key, p in zip(was["params"], group["params"], strict=True)}
        strange = [key for key in saved["state"] if key not in home]
        if strange:
            raise ValueError(f"{type(self).__name__}: there is state of parameters that are in no group: {strange}")
        state = {home[key]: entry for key, entry in saved["state"].items()}
        return {"state": state, "param_groups": groups, "step_count": saved.get("step_count")}

    # ---- copies -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        inner = self._follow()
        return {
            "defaults": dict(self.defaults),
            "param_groups": [dict(group) for group in self.param_groups],
            "state": {p: dict(entry) for p, entry in self.state.items()},
            "step_count": 0 if inner is None else inner.step_count,
            "options": self._options,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        old = self.__dict__.copy()
        states = state.get("state", {})
        known = [int(entry["step"]) for entry in states.values() if "step" in entry]
        steps = state.get("step_count")
        self.__dict__.setdefault("_inner", None)
        self._options = state.get("options", old.get("_options"))
        super().__setstate__({"defaults": Settings(self.rule, state.get("defaults", old.get("defaults", {})))})
        try:
            self.param_groups = [Settings(self.rule, group) for group in state["param_groups"]]
            self._make(states, max(known, default=0) if steps is None else steps)
        except BaseException:
            self.__dict__.update(old)
            raise


def _defaults(rule: type[Rule]) -> dict[str, Any]:
    """The defaults of the fields that have some."""
    return {f.name: f.default for f in dataclasses.fields(rule) if f.default is not dataclasses.MISSING}
