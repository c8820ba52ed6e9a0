"""The engine `array_api`, the reference for all others: a rule runs as written, on whole arrays of
any array API library. `prepare` computes the update, and the step that it returns writes it.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from arrayopt.arrays import (
    Array,
    Grads,
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
from arrayopt.engines.array_api.apply import apply
from arrayopt.engines.array_api.apply_one import Done, Update
from arrayopt.engines.base import Asked, Engine, MakeStep, Report, Stops
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.layers import Layers, Split, layer_name, taking_part, unless
from arrayopt.engines.meeting import Meeting, numbers_of
from arrayopt.engines.stacks_of_blocks import Stacks
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
                for totals in meeting.rounds:
                    done.tell(meeting, totals)
                    while not meeting.known.issuperset(totals):
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


class _Together(NamedTuple):
    """Tensors that `apply` updates, each with all its layers or blocks at once."""

    bucket: Bucket
    grads: Sequence[tuple[Array | None, Any]]
    """Each tensor's gradient, and which of its layers do not change; see `Split.of_stacks`."""
    stacked: bool = False
    """Whether each layer is updated like a tensor, whatever the rule's field `stacked` is."""


def _together(bucket: Bucket, grads: Grads) -> _Together:
    """Return a bucket's tensors, or those whose layers or blocks they are."""
    if not isinstance(grads, Split):
        return _Together(bucket, [(grad, None) for grad in grads])
    stacks = bucket.stacks if isinstance(bucket, Layers) else bucket
    if isinstance(stacks, Stacks) and bucket.rule.several:  # `apply` divides them into blocks
        return _Together(stacks.given, grads.of_given())
    return _Together(stacks, grads.of_stacks(), stacked=True)


class _Updates:
    """The updates of a bucket, computed but not written: `made`, for tensors with a gradient. If
    there is a meeting, it has the totals known so far.
    """

    def __init__(self, bucket: Bucket, asked: Asked, meeting: Meeting | None = None) -> None:
        self.bucket, self.asked, self.of = bucket, asked, _together(bucket, asked.grads)
        self.made = list[_Updated]()
        # infinity and NaN are data: they reach the parameter without a warning
        with np.errstate(all="ignore"):
            for at, tensor in enumerate(self.of.bucket.tensors):
                if self.of.grads[at][0] is not None:
                    totals = {} if meeting is None else self._totals(at, tensor, meeting)
                    self.made.append(_Updated(at, tensor, *self._update(at, tensor, totals)))

    def _update(self, at: int, tensor: Tensor, totals: dict[str, Any]) -> Done:
        """Compute a tensor's new parameter, slots and report."""
        asked, (grad, left) = self.asked, self.of.grads[at]
        param, grad = detached(tensor.array), detached(grad)
        # a bucket that measures gradients has one group, of its own
        group = self.of.bucket.group_of[at] if len(self.bucket.groups) > 1 else 0
        measures = isinstance(self.bucket, Layers) and not self.bucket.rule.several
        slots, (name, first) = {} if measures else tensor.slots, tensor.origin
        with on_its_device(param):
            if left is not None:  # LAPACK raises an error for NaN
                grad = unless(left, grad, array_namespace(grad).zeros_like(grad))
            hypers = {**asked.hypers[group], **totals} if totals else asked.hypers[group]
            rule, t = self.bucket.groups[group].rule, tensor.updates + 1
            update = Update(rule, name, t, hypers, asked.clip, asked.stats)
            stacked = self.of.stacked or None
            new, made, report = apply(update, param, grad, slots, first=first, stacked=stacked)
            if asked.stats:  # a report may be a view of a slot, which is overwritten
                report = {key: copied(x) if is_array(x) else x for key, x in report.items()}
            if left is not None:
                new = unless(left, new, param)
                made = {slot: unless(left, x, tensor.slots[slot]) for slot, x in made.items()}
        return tensor.array if new is param else new, made, report  # `put` skips the same object

    @cached_property
    def numbers(self) -> list[Ints]:
        """The numbers by which a meeting knows the tensors, or their layers; see `numbers_of`."""
        return numbers_of(self.of.bucket)

    def _numbers(self, at: int) -> tuple[Ints, Any]:
        """The numbers of a tensor or its layers, and an index of those that take part."""
        _, left = self.of.grads[at]
        return self.numbers[at], slice(None) if left is None else ~np.asarray(left)

    def _totals(self, at: int, tensor: Tensor, meeting: Meeting) -> dict[str, Any]:
        """Return the known totals of a tensor, or of each of its layers."""
        found, known = dict[str, Any](), sorted(meeting.known)
        if not size(tensor.array):
            return found
        numbers, some = self._numbers(at)
        alone = len(numbers) == 1 or self.bucket.rule.blocks is not None
        for which, made in zip(known, meeting.totals(known, numbers[some]), strict=True):
            each = np.ones(len(numbers))
            each[some] = made
            found[of_total(which)] = float(each[0]) if alone else each
        return found

    def tell(self, meeting: Meeting, totals: list[int]) -> None:
        """Pass the tensors' contributions to some totals to a meeting."""
        for which in totals:
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
            if not (self.bucket.rule.several or self.of.stacked):
                reports[tensor.name] = report
            elif report:
                (_, left), first = self.of.grads[at], self.of.bucket.first_layer(at)
                for i in range(size(next(iter(report.values())))):
                    if left is None or not left[i]:
                        of_layer = {name: x[i, ...] for name, x in report.items()}
                        reports[layer_name(tensor.name, first + i)] = of_layer
        self.bucket.count(np.flatnonzero(taking_part(self.asked.grads)))
        return reports
