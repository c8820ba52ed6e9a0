"""Buckets: tensors that one engine updates together."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from arrayopt.arrays import Grads, Ints
from arrayopt.fusion.plan import Total
from arrayopt.params.groups import Group
from arrayopt.rules.base import Rule
from arrayopt.rules.ones import reads_value
from arrayopt.state.run import Run
from arrayopt.state.tensors import Left, Tensor

KEPT = 16
"""So many patterns of dtypes of gradients are kept for a bucket; the oldest is dropped."""


def chosen(every: Sequence[Any], places: Sequence[int] | Any) -> Sequence[Any]:
    """Those at some places, which ascend; the list itself where that is all of it."""
    if len(places) == len(every):
        return every
    if hasattr(every, "chosen"):  # layers, of which whole stacks are chosen
        return every.chosen(places)  # type: ignore[no-any-return]
    return list(map(every.__getitem__, places))


@dataclass(slots=True, eq=False, weakref_slot=True)
class Bucket:
    """Tensors of one library, device and dtype, under rules of one structure; it lasts until groups
    change.

    Where ranks share the work, tensors that this rank has whole, cut or none of are in buckets of
    their own.
    """

    groups: list[Group] = field(default_factory=list)
    """The groups that the tensors come from."""
    tensors: list[Tensor] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)
    """For each tensor the position of its group in `groups`."""
    places: list[int] = field(default_factory=list)
    """For each tensor its place in the list of all gradients."""
    run: Run = field(default_factory=Run)
    """The numbers of the run."""
    engine: tuple[str, Any, str] | None = None
    """The engine that was chosen: what was asked for, the engine, and why it is that one."""
    refused: dict[str, str] = field(default_factory=dict)
    """The engines that could not compile what these tensors need, and why."""
    remedy: str = ""
    """Why no fused engine was, where a user can change that."""
    batches: "OrderedDict[Any, list[Any]]" = field(default_factory=OrderedDict)
    """What a fused engine keeps of the tensors, by what steps ask for."""
    companions: "dict[Any, Bucket]" = field(default_factory=dict)
    """Buckets of the same parameters under other rules; see `companion`."""
    counts: Any = None
    """The update counts on the device, shared by all tables of the bucket; see `Run.give_to`."""
    totals: "dict[bool, set[tuple[Total, ...]]]" = field(default_factory=dict)
    """When tensors meet for totals, for each way of the rule; in steps with a value, or without."""
    members: tuple[bytes, list[Any]] | None = None
    """What took part in the last step with totals; see `arrayopt.engines.meeting`."""
    arrays: int = -1
    """The version of the arrays that a companion was last given."""
    same: tuple[int, int] | None = None
    """The number of updates if all tensors have the same, and the version of the run's numbers."""
    ordered: bool | None = None
    """Whether the gradients of all tensors are those of the bucket's, in its order."""
    index: Any = None
    """The tensors' places among the numbers of the run; a slice if they are the first."""

    @property
    def whole(self) -> "Bucket":
        """The bucket of the parameters themselves: this one, unless its tensors are layers."""
        return self

    @property
    def rule(self) -> Rule:
        """A rule of the bucket's structure."""
        return self.groups[0].rule

    @property
    def kind(self) -> str:
        """What this rank has of the tensors; see `Tensor.kind`."""
        return self.tensors[0].kind

    def first_layer(self, k: int) -> int:
        """The number of the first layer, or block, of the stacked tensor at a place."""
        return 0

    def refresh(self) -> None:
        """Take note of where arrays lie now."""

    def numbers(self, step: int, value: Any = None) -> list[dict[str, Any]]:
        """The hyper-parameters of each group at a step, and the value if the rule reads it."""
        value = value if value is None or reads_value(self.rule) else None
        return [group.rule.hypers_at(step, value) for group in self.groups]

    def own(self, every: Grads, left: Left | None = None) -> Grads:
        """The gradients, out of those of all tensors; None for layers that are left out."""
        if self.ordered is None:
            self.ordered = self.places == list(range(len(self.places)))
        if self.ordered:
            return chosen(every, self.places)
        return list(map(every.__getitem__, self.places))

    def sibling(self, group: Group, tensors: list[Tensor], run: Run) -> "Bucket":
        """A bucket of the same parameters, and so of the same gradients, with state of its own."""
        return Bucket([group], tensors, [0] * len(tensors), self.places, run)

    def updates(self) -> "int | Ints":
        """How often each tensor was updated: one number where all have the same."""
        if self.same is None or self.same[1] != self.run.changes:
            found = self.run.updates(self._index())
            if not (found == found[0]).all():
                return found.copy()
            self.same = int(found[0]), self.run.changes
        return self.same[0]

    def count(self, took: Ints, left: Left | None = None) -> None:
        """The host has updated these tensors, usually all, except layers that are `left`."""
        if self.tensors[0].layers:  # not in a bucket of its layers
            for i in took:
                self.tensors[i].count(left or {})
        elif len(took) == len(self.tensors):
            same = self.same if self.same and self.same[1] == self.run.changes else None
            self.run.count(self._index())
            self.same = same and (same[0] + 1, self.run.changes)
        else:
            index = self._index()
            self.run.count(took if isinstance(index, slice) else index[took])
            self.same = None

    def _index(self) -> Any:
        if self.index is None:
            places = np.array([tensor.first for tensor in self.tensors], int)
            whole = (places == np.arange(len(places))).all()
            self.index = slice(len(places)) if whole else places
        return self.index

    def keep(self, key: Any, make: Callable[[], list[Any]]) -> list[Any]:
        """What is kept under a key, made where it is not there."""
        if key in self.batches:
            self.batches.move_to_end(key)
        else:
            self.batches[key] = make()
            while len(self.batches) > KEPT:
                self.batches.popitem(last=False)
        return self.batches[key]


@dataclass(slots=True, eq=False, weakref_slot=True)
class AtHome(Bucket):
    """A bucket of whole tensors, of some of which the user gave parts."""

    given: Bucket = field(default_factory=Bucket)
    """The tensors that the user gave."""

    @classmethod
    def of(cls, given: Bucket) -> "AtHome":
        """The whole tensors of a bucket."""
        tensors = [tensor.home or tensor for tensor in given.tensors]
        made = cls(given.groups, tensors, given.group_of, given.places, given.run, given=given)
        made.refresh()
        return made

    @property
    def whole(self) -> Bucket:
        return self.given

    def refresh(self) -> None:
        for part in self.given.tensors:
            if part.home is not None:
                home = part.home
                home.slots, home.run = part.slots, part.run
                home.place, home.number = part.place, part.number


def companion(
    bucket: Bucket, rule: Rule, tensor_of: Callable[[Tensor], Tensor], run: Run | None = None
) -> Bucket:
    """A bucket of the same parameters under another rule, with state of its own; made once, and
    kept with the first.

    `tensor_of` gives the tensor that holds a parameter's state under that rule. `run` has the
    numbers of those tensors; without it they begin anew.
    """
    made = bucket.companions.get(rule.structure)
    if made is None or (run is not None and made.run is not run):  # as after a load
        mine = [tensor_of(tensor) for tensor in bucket.tensors]
        if run is None:
            run = Run(len(mine))
            for i, tensor in enumerate(mine):
                tensor.run, tensor.place = run, i
        made = bucket.sibling(Group("", rule, {}, mine), mine, run)
        bucket.companions[rule.structure] = made
    if made.arrays != bucket.run.arrays:
        made.arrays = bucket.run.arrays
        made.run.arrays += 1
        for own, tensor in zip(made.tensors, bucket.tensors, strict=True):
            own.array = tensor.array
    made.groups[0].replace_rule(rule)
    return made
