"""Sort the tensors of an optimizer into buckets. The step asks `Buckets.now` for them; they are
kept until groups, rules or arrays change.
"""

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

from arrayopt.arrays import dtype_name, library, place, size, writable
from arrayopt.engines.bucket import AtHome, Bucket
from arrayopt.engines.layers import Layers, Stacked
from arrayopt.engines.registry import advise, select
from arrayopt.foreign import counted
from arrayopt.params.groups import Group
from arrayopt.params.parameters import Parameters
from arrayopt.state.run import Run
from arrayopt.state.tensors import explain_wide

_STRUCTURE = operator.attrgetter("rule.structure")


class Buckets:
    """The buckets of an optimizer's parameters; `version` counts how often they were made."""

    def __init__(self, parameters: Parameters, run: Run) -> None:
        self._parameters, self._run, self.version = parameters, run, 0
        self._structures: list[Any] = []
        self._made: list[Bucket] = []
        self._alone: dict[int, Bucket] = {}
        self._warned: set[str] = set()
        self._advised = 0
        self._arrays = -1  # the version of the arrays that buckets have; see `Run.arrays`

    def now(self) -> list[Bucket]:
        """Return the buckets; make them again if a rule's structure or an array's kind changed."""
        groups = self._parameters.groups
        structures: list[Any] = [self._parameters.kinds, *map(_STRUCTURE, groups)]
        if structures != self._structures:
            self._run.take_back()
            self._made, self._alone = bucketed(groups, self._run), {}
            self._structures = structures
            self.version += 1
        for bucket in self._made:
            bucket.refresh()
        if self._arrays != self._run.arrays:
            for bucket in chain(self._made, self._alone.values()):
                bucket.refresh()  # before batches look up addresses
                bucket.follow()
            self._arrays = self._run.arrays
        return self._made

    def alone(self, place: int) -> Bucket:
        """Return a bucket of the tensor at a place, for an update of this tensor only."""
        if not self._alone:
            every = bucketed(self._parameters.groups, self._run, alone=True)
            self._alone = {bucket.places[0]: bucket for bucket in every}
            for bucket in self._made:
                for at in bucket.places:
                    self._alone[at].engine, self._alone[at].refused = bucket.engine, bucket.refused
        return self._alone[place]

    def chosen(self, engine: str) -> list[Bucket]:
        """Choose an engine for each bucket; warn if a user can enable a fused one."""
        buckets = self.now()
        if self._advised != self.version:
            for bucket in buckets:
                select(engine, bucket)
            advise(buckets, self._warned)
            self._advised = self.version
        return buckets

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_structures": [], "_made": [], "_alone": {}}


def bucketed(groups: Sequence[Group], run: Run, *, alone: bool = False) -> list[Bucket]:
    """Sort the tensors of groups into buckets; with `alone`, each into its own."""
    buckets: dict[Any, Bucket] = {}
    for group in groups:
        for tensor in group.tensors:
            xp, device = place(tensor.array)
            dtype, number = dtype_name(tensor.array), tensor.place if alone else None
            several = group.rule.several and writable(tensor.array)
            key = group.rule.structure, dtype, xp, str(device), tensor.kind, several, number
            kind = Stacked if group.rule.stacked else Bucket
            bucket = buckets.setdefault(key, kind(run=run))
            if group not in bucket.groups:
                bucket.groups.append(group)
            bucket.tensors.append(tensor)
            bucket.places.append(tensor.place)
            bucket.group_of.append(len(bucket.groups) - 1)
    made: list[Bucket] = []
    for x in buckets.values():
        if any(tensor.home is not None for tensor in x.tensors):
            x = AtHome.of(x)
        several = x.rule.several and writable(x.tensors[0].array)
        made.append(Layers.of(x) if several else x)
    return made


def explain_buckets(buckets: Sequence[Bucket], engine: str) -> str:
    """Describe each group's rule, and each bucket's tensors, engine and plan."""
    groups = dict[int, Group]()
    for bucket in buckets:
        groups |= {id(group): group for group in bucket.groups}
    labelled = len(groups) > 1
    lines = [f"{x.label}: {x.rule!r}" if labelled else repr(x.rule) for x in groups.values()]
    for bucket in buckets:
        chosen, why = select(engine, bucket)
        whole, first = bucket.whole.tensors, bucket.whole.tensors[0].array
        total = counted(sum(size(tensor.array) for tensor in whole), "parameter")
        what = "layer" if bucket.rule.stacked else "block"
        layers = f" of {counted(len(bucket.tensors), what)}" if isinstance(bucket, Layers) else ""
        where = f"{dtype_name(first)}, {library(first)} on {place(first)[1]}"
        owners = f", of {', '.join(x.label for x in bucket.groups)}" if labelled else ""
        lines.append(f"  {counted(len(whole), 'tensor')}{layers}, {total}, {where}{owners}")
        lines.append(f"  engine {chosen.name} ({why}): {chosen.explain(bucket)}")
        lines += explain_wide(bucket.rule, whole)
    return "\n".join(lines)
