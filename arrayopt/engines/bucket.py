"""Buckets: tensors that one engine updates together, and what engines keep for them from step to
step. `bucketing.py` makes them; `step/` passes them to engines.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
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
"""The number of keys (dtypes of gradients, options) that a bucket keeps batches for."""


def chosen(every: Sequence[Any], places: Sequence[int] | Any) -> Sequence[Any]:
    """Return the entries at some places, in ascending order; the list itself if these are all."""
    if len(places) == len(every):
        return every
    if hasattr(every, "chosen"):  # a `Split`: whole stacks are chosen
        return every.chosen(places)  # type: ignore[no-any-return]
    return list(map(every.__getitem__, places))


@dataclass(slots=True, eq=False, weakref_slot=True)
class Bucket:
    """Tensors of one library, device and dtype, under rules of one structure. It lasts until groups
    change. With ranks, tensors that this rank has whole, shares or lacks are in separate buckets.
    """

    groups: list[Group] = field(default_factory=list)
    """The groups of the tensors."""
    tensors: list[Tensor] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)
    """The position of each tensor's group in `groups`."""
    places: list[int] = field(default_factory=list)
    """The place of each tensor in the list of all gradients."""
    run: Run = field(default_factory=Run)
    """The numbers of the run."""
    engine: tuple[str, Any, str] | None = None
    """The name that the user passed, the engine chosen for it, and the reason."""
    refused: dict[str, str] = field(default_factory=dict)
    """Engines that could not compile code for these tensors, with the reason."""
    remedy: str = ""
    """Why no fused engine was chosen, if the user can change that; else empty."""
    batches: "OrderedDict[Any, list[Any]]" = field(default_factory=OrderedDict)
    """The batches that a fused engine keeps, by options and dtypes of gradients."""
    companions: "dict[Any, Bucket]" = field(default_factory=dict)
    """Buckets of the same parameters under other rules; see `companion`."""
    counts: Any = None
    """The update counts on a device, which all batches of the bucket share; see `Run.give_to`."""
    totals: "dict[bool, set[tuple[Total, ...]]]" = field(default_factory=dict)
    """The totals of each plan of the bucket, for steps with a value (True) and without."""
    members: tuple[bytes, Ints] | None = None
    """The tensors of the last step with totals; see `arrayopt.engines.meeting`."""
    same: tuple[int, int] | None = None
    """If all tensors have one update count: that, and the version of the run's numbers."""
    ordered: bool | None = None
    """Whether `places` are 0, 1, 2, ...; None until it is first needed."""
    index: Any = None
    """The places of tensors among the run's numbers; a slice if they are the first ones."""
    reads: bool | None = None
    """Whether the rule reads the step's value; None until it is first needed."""

    @property
    def whole(self) -> "Bucket":
        """The bucket of the parameters, which is this one unless its tensors are layers."""
        return self

    @property
    def rule(self) -> Rule:
        """The rule of the first group, which has the structure of all."""
        return self.groups[0].rule

    @property
    def kind(self) -> str:
        """Whether this rank has the tensors whole, shares them, or has none; see `Tensor.kind`."""
        return self.tensors[0].kind

    def first_layer(self, k: int) -> int:
        """Return the number of the first layer, or block, of the stacked tensor at place k."""
        return 0

    def refresh(self) -> None:
        """Update views of arrays that the user may have replaced."""

    def follow(self) -> None:
        """Replace arrays that the user has replaced in companions and batches, also unused ones."""
        for made in self.companions.values():
            made.run.arrays += 1
            for own, tensor in zip(made.tensors, self.tensors, strict=True):
                own.array = tensor.array
            made.follow()
        for batch in chain.from_iterable(self.batches.values()):
            batch.follow()
        if self.whole is not self:
            self.whole.follow()

    def numbers(self, step: int, value: Any = None) -> list[dict[str, Any]]:
        """Return each group's hyper-parameters at a step, and the value if the rule reads it."""
        if (
            value is not None and self.reads is None
        ):  # kept, like plans: it depends on the rule's code
            self.reads = reads_value(self.rule)
        return [group.rule.hypers_at(step, value if self.reads else None) for group in self.groups]

    def own(self, every: Grads, left: Left | None = None) -> Grads:
        """Select the bucket's gradients from those of all tensors; None for layers in `left`."""
        if self.ordered is None:
            self.ordered = self.places == list(range(len(self.places)))
        if self.ordered:
            return chosen(every, self.places)
        return list(map(every.__getitem__, self.places))

    def sibling(self, group: Group, tensors: list[Tensor], run: Run) -> "Bucket":
        """Return a bucket of the same parameters and gradients with its own state."""
        return Bucket([group], tensors, [0] * len(tensors), self.places, run)

    def updates(self) -> "int | Ints":
        """Return the update count of each tensor; one number if they are equal."""
        if self.same is None or self.same[1] != self.run.changes:
            found = self.run.updates(self._index())
            if not (found == found[0]).all():
                return found.copy()
            self.same = int(found[0]), self.run.changes
        return self.same[0]

    def count(self, took: Ints) -> None:
        """Count an update of those that have gradients; `took` has their places among these."""
        if len(took) == len(self.tensors):
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
        """Return the batches kept under a key; make them if there are none."""
        if key in self.batches:
            self.batches.move_to_end(key)
        else:
            self.batches[key] = make()
            while len(self.batches) > KEPT:
                self.batches.popitem(last=False)
        return self.batches[key]


@dataclass(slots=True, eq=False, weakref_slot=True)
class AtHome(Bucket):
    """A bucket of whole tensors; the user has divided some of them among ranks."""

    given: Bucket = field(default_factory=Bucket)
    """The tensors as the user passed them."""

    @classmethod
    def of(cls, given: Bucket) -> "AtHome":
        """Return the bucket of a bucket's whole tensors."""
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
    """Return a bucket of the same parameters under another rule, with its own state.

    It is made once, and kept in the first bucket. `tensor_of` returns the tensor that holds a
    parameter's state under that rule. `run` has the numbers of those tensors; else they are zero.
    """
    made = bucket.companions.get(rule.structure)
    if made is None or (run is not None and made.run is not run):  # such as after a load
        mine = [tensor_of(tensor) for tensor in bucket.tensors]
        if run is None:
            run = Run(len(mine))
            for i, tensor in enumerate(mine):
                tensor.run, tensor.place = run, i
        made = bucket.sibling(Group("", rule, {}, mine), mine, run)
        bucket.companions[rule.structure] = made
        bucket.follow()
    made.groups[0].replace_rule(rule)
    return made
