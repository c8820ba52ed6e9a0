"""The `arrayopt.Optimizer` below one of PyTorch's: made of parameter groups, and kept as they say."""

from collections.abc import Iterable, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any

from torch import Tensor

from arrayopt.optimizer import Optimizer
from arrayopt.params.groups import fields_of
from arrayopt.rules.base import Rule
from arrayopt.state.tensors import Tensor as Known
from arrayopt.torch.state import put

__all__ = ["Below"]

Groups = Sequence[Mapping[str, Any]]
States = Mapping[Tensor, Mapping[str, Any]]


class Below:
    """An `arrayopt.Optimizer` over the parameters of groups.

    The groups have the only truth about numbers and parameters, and the optimizer that about slots and counts: it is
    made anew, with the state that there is, where parameters come, go or change, or a field changes what is computed.

    Parameters
    ----------
    who : str
        What errors begin with.
    rule : type
        The rule.
    options : dict
        Those of `arrayopt.Optimizer`.
    groups : sequence of dict
        PyTorch's parameter groups, each with all fields of the rule.
    states : mapping of tensor to dict
        State for some of the parameters, as `arrayopt.torch.state.show` has it; it is copied.
    steps : int
        The number of steps made.
    """

    def __init__(
        self, who: str, rule: type[Rule], options: dict[str, Any], groups: Groups, states: States, steps: int
    ) -> None:
        self._who, self._rule, self._options = who, rule, options
        self.made: Optimizer | None = None
        self._fields = fields_of(rule)
        self._take: Any = itemgetter(*self._fields)
        self._make(groups, states, steps, copies=True)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the optimizer as they are now."""
        return self._options if self.made is None else {**self._options, "clip_norm": self.made.clip_norm}

    @property
    def steps(self) -> int:
        """The number of steps made."""
        return 0 if self.made is None else self.made.step_count

    @property
    def tensors(self) -> list[Known]:
        """The optimizer's tensors, in the order of `params`."""
        return [] if self.made is None else self.made._parameters.all

    def _make(self, groups: Groups, states: States, steps: int, *, copies: bool) -> None:
        """Make the optimizer, `made`; None where there are no parameters. Or raise, and change nothing."""
        filled = [group for group in groups if group["params"]]
        params = [p for group in filled for p in group["params"]]
        values = [self._values(group) for group in filled]
        rules = [self._of(x) for x in values]
        names = [name for group in filled for name in group.get("param_names", ())]
        named = len(params) == len(names) == len(set(names))
        entries = [
            {
                "params": dict(zip(group["param_names"], group["params"], strict=True)) if named else group["params"],
                **dict(zip(self._fields, x, strict=True)),
            }
            for group, x in zip(filled, values, strict=True)
        ]
        made = Optimizer(entries, rules[0], **self.options) if filled else None
        if made is not None:
            self._restore(params, made, states, copies=copies)
            made.__setattr__("step_count", steps)
        self.made, self.params, self._seen = made, params, values

    def _restore(self, params: list[Tensor], made: Optimizer, states: States, *, copies: bool) -> None:
        """Have parameters go on from states."""
        pairs = zip(params, made._parameters.all, strict=True)
        given = [(f"parameter {x.name}", x, states[p]) for p, x in pairs if p in states]
        if put(self._who if copies else f"{self._who}: groups have changed", given, copies=copies):
            made._parameters.begin()

    def follow(self, groups: Groups) -> Optimizer | None:
        """The optimizer, once it is as the groups say now."""
        filled = [group for group in groups if group["params"]]
        params = [p for group in filled for p in group["params"]]
        values = [self._values(group) for group in filled]
        same = len(params) == len(self.params) and all(map(is_, params, self.params))
        if self.made is None:
            if not same:
                self._make(groups, {}, 0, copies=False)
            return self.made
        own = self.made.groups
        if same and [len(x.tensors) for x in own] == [len(x["params"]) for x in filled]:
            changed = [
                (group, self._of(now))
                for group, was, now in zip(own, self._seen, values, strict=True)
                if not all(map(is_, was, now)) and was != now
            ]
            if all(rule.structure == group.rule.structure for group, rule in changed):
                for group, rule in changed:
                    group.replace_rule(rule)
                self.made._rule, self._seen = own[0].rule, values
                return self.made
        kept = {p: {"step": x.t, **x.slots} for p, x in zip(self.params, self.tensors, strict=True) if x.t}
        self._make(groups, kept, self.steps, copies=False)
        return self.made

    def write(self, states: States) -> None:
        """Set the states of some parameters; those whose state is empty begin anew."""
        if self.made is None:
            return
        rules = {x.name: group.rule for group in self.made.groups for x in group.tensors}
        pairs = zip(self.params, self.tensors, strict=True)
        anew = [(x, x.fresh(rules[x.name])) for p, x in pairs if p in states and not states[p]]
        self._restore(self.params, self.made, states, copies=True)
        for tensor, slots in anew:
            tensor.slots = slots

    # ---- what groups say --------------------------------------------------------------------------------------------

    def _values(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of the rule's fields in a group; tensors of one element as numbers."""
        try:
            values: tuple[Any, ...] = self._take(group)
        except KeyError as error:
            raise ValueError(f"{self._who}: a parameter group must have {error}") from error
        if any(isinstance(x, Tensor) for x in values):
            values = tuple(self._number(name, x) for name, x in zip(self._fields, values, strict=True))
        return values

    def _number(self, name: str, x: Any) -> Any:
        """A tensor of one element as a number; what is none as it is."""
        if not isinstance(x, Tensor):
            return x
        if x.numel() != 1:
            raise ValueError(f"{self._who}: `{name}` as a tensor must have one element; got {x!r}")
        return x.item()

    def _of(self, values: Iterable[Any]) -> Rule:
        """The rule with a group's values."""
        return self._rule(**dict(zip(self._fields, values, strict=True)))
