"""The engine `array_api`, the reference for all others: a rule runs as written, on whole arrays of
any array API library. `prepare` computes the update, and the step that it returns writes it.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from arrayopt.arrays import (
    Array,
    Ints,
    array_namespace,
    copied,
    detached,
    is_array,
    is_captured,
    on_its_device,
    size,
    to_host,
)
from arrayopt.engines.apply import apply
from arrayopt.engines.apply_one import Done, Update
from arrayopt.engines.base import Asked, Engine, MakeStep, Report, Stops
from arrayopt.engines.blocks import Parts, Stacks
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.layers import Layers, Split, layer_name, layers_with, unless
from arrayopt.engines.meeting import Meeting, numbers_of
from arrayopt.rules.totals import PREFIX, of_total, totals_in, unforeseen
from arrayopt.state.tensors import Tensor


class ArrayAPI(Engine):
    """Runs rules as written, one operation at a time: slow, simple, and the reference."""

    name = "array_api"

    def check(self, bucket: Bucket) -> None:
        """Accept any bucket."""

    def prepare(self, bucket: Bucket, asked: Asked, meetings: Sequence[Any] = ()) -> MakeStep:
        """See `Engine.prepare`: the update is computed again whenever totals become known."""
        if meetings and is_captured(bucket.tensors[0].array):
            raise RuntimeError(
                f"Optimizer.launch: {type(bucket.rule).__name__} uses totals, which are summed on"
                " the host, so its steps cannot be captured in a CUDA graph"
            )
        first = _Updates(bucket, asked)
        if not meetings and any(totals_in(x.report) for x in first.made):
            raise unforeseen(type(bucket.rule))
        for meeting in meetings:
            meeting.join()

        def run(reports: dict[str, Report]) -> Stops:
            done = first
            for meeting in meetings:
                for some in meeting.rounds:
                    done.tell(meeting, some)
                    while any(j not in meeting.known for j in some):
                        yield []
                    if meeting is meetings[0]:
                        done = _Updates(bucket, asked, meeting)
            reports.update(done.write())

        return run

    def explain(self, bucket: Bucket) -> str:
        return "whole arrays, one operation of the rule after the other; each makes a temporary"


class _Updated(NamedTuple):
    """The results of a tensor's update; `at` is the place of the tensor in the bucket."""

    at: int
    tensor: Tensor
    p: Array
    slots: dict[str, Array]
    report: Report


class _Updates:
    """The updates of a bucket, computed but not written: `made`, for tensors with a gradient. If
    there is a meeting, it has the totals known so far.
    """

    def __init__(self, bucket: Bucket, asked: Asked, meeting: Meeting | None = None) -> None:
        self.bucket, self.asked = bucket, asked
        of, grads, groups = bucket, asked.grads, bucket.group_of
        self.several, self.stacks = bucket.rule.several, False
        if isinstance(bucket, Layers) and isinstance(grads, Split):
            of, grads, groups = bucket.stacks, grads.wholes, bucket.group_of_stacks
            self.several = self.stacks = True
        if isinstance(of, Stacks) and isinstance(grads, Parts) and bucket.rule.several:
            of, grads = of.given, grads.wholes
            groups = of.group_of
            self.stacks = False  # `apply` divides tensors into blocks, and joins equal ones
        self.of = of
        self.left = [(asked.left or {}).get(tensor.layers) for tensor in of.tensors]
        # rules that measure gradients have no slots
        self.slotless = isinstance(bucket, Layers) and not bucket.rule.several
        self.made = list[_Updated]()
        # infinity and NaN are data: they reach the parameter without a warning
        with np.errstate(all="ignore"):
            for k, (x, g, left) in enumerate(zip(of.tensors, grads, self.left, strict=True)):
                if g is not None and (left is None or not left.all()):
                    totals = {} if meeting is None else self._totals(k, x, meeting)
                    self.made.append(_Updated(k, x, *self._update(x, g, groups[k], totals, left)))

    def _update(
        self, tensor: Tensor, g: Array, group: int, totals: dict[str, Any], left: Any
    ) -> Done:
        """Compute a tensor's new parameter, slots and report; layers in `left` do not change."""
        p, g, asked = detached(tensor.array), detached(g), self.asked
        slots, (name, first) = {} if self.slotless else tensor.slots, tensor.origin
        with on_its_device(p):
            if left is not None:  # LAPACK raises an error for NaN
                g = unless(left, g, array_namespace(g).zeros_like(g))
            hypers = {**asked.hypers[group], **totals} if totals else asked.hypers[group]
            rule, t = self.bucket.groups[group].rule, tensor.updates + 1
            update = Update(rule, name, t, hypers, asked.clip, asked.stats)
            stacked = self.stacks or None
            new, made, report = apply(update, p, g, slots, first=first, stacked=stacked)
            if asked.stats:  # a report may be a view of a slot, which is overwritten
                report = {key: copied(x) if is_array(x) else x for key, x in report.items()}
            if left is not None:
                new = unless(left, new, p)
                made = {slot: unless(left, x, tensor.slots[slot]) for slot, x in made.items()}
        return tensor.array if new is p else new, made, report  # `put` skips the same object

    @cached_property
    def numbers(self) -> list[Ints]:
        """The numbers by which a meeting knows the tensors, or their layers; see `numbers_of`."""
        return numbers_of(self.of)

    def _numbers(self, k: int) -> tuple[Ints, Any]:
        """The numbers of a tensor or its layers, and an index of those that take part."""
        mask = self.left[k]
        return self.numbers[k], slice(None) if mask is None else ~np.asarray(mask)

    def _totals(self, k: int, tensor: Tensor, meeting: Meeting) -> dict[str, Any]:
        """Return the known totals of a tensor, or of each of its layers."""
        if not size(tensor.array):
            return {}
        numbers, some = self._numbers(k)
        found: dict[str, Any] = {}
        known, alone = sorted(meeting.known), len(numbers) == 1
        alone = alone or self.bucket.rule.blocks is not None
        for j, made in zip(known, meeting.totals(known, numbers[some]), strict=True):
            each = np.ones(len(numbers))
            each[some] = made
            found[of_total(j)] = float(each[0]) if alone else each
        return found

    def tell(self, meeting: Meeting, some: list[int]) -> None:
        """Pass the tensors' contributions to some totals to a meeting."""
        for which in some:
            numbers, values = [np.zeros(0, np.int64)], [np.zeros(0)]
            for one in self.made:
                if size(one.p):
                    mine, here = self._numbers(one.at)
                    told = one.report.get(of_total(which), 0.0)
                    told = np.asarray(to_host(told) if is_array(told) else told, np.float64)
                    values.append(np.broadcast_to(told, len(mine))[here])
                    numbers.append(mine[here])
            meeting.tell([which], np.concatenate(numbers), np.concatenate(values))

    def write(self) -> dict[str, Report]:
        """Write and count the updates, and return their reports."""
        reports = {}
        for at, tensor, p, slots, told in self.made:
            report = {name: x for name, x in told.items() if not name.startswith(PREFIX)}
            if size(p):
                tensor.put(None, p)
                for name in slots:
                    tensor.put(name, slots[name])
            if self.several and report:
                mask, first = self.left[at], self.of.first_layer(at)
                for i in range(size(next(iter(report.values())))):
                    if mask is None or not mask[i]:
                        of_layer = {name: x[i, ...] for name, x in report.items()}
                        reports[layer_name(tensor.name, first + i)] = of_layer
            elif not self.several:
                reports[tensor.name] = report
        self.bucket.count(layers_with(self.asked.grads), self.asked.left)
        return reports
