"""The scalars of a plan at a step, for each tensor of a batch: computed from hyper-parameters,
counts and sizes by the code of `fusion/scalars.py`. Batches call `evaluate` in each step.
"""

import operator
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from arrayopt.arrays import Ints, size, to_host
from arrayopt.engines.base import Asked
from arrayopt.engines.bucket import Bucket
from arrayopt.fusion.graph import COUNT, KEY
from arrayopt.fusion.phases import GIVEN
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.scalars import scalar_code
from arrayopt.randomness import halves, key
from arrayopt.rules.names import VALUE

AHEAD = 64
"""The number of steps for which scalars are computed at once, while hyper-parameters stay."""


class StepScalars:
    """The scalars of a step, for the tensors of a batch, at places `members` of a bucket.

    Attributes
    ----------
    groups : array of int64
        The group of each tensor, by its place in the bucket.
    of_tensors : array of float64
        The plan's scalars, a row for each tensor.
    fixed : dict of str to array
        Values that no step changes, such as sizes and keys of random numbers; and values that
        `learn` gets in the middle of a step.
    """

    def __init__(self, plan: Plan, bucket: Bucket, members: list[int], geo: Any) -> None:
        # weak, because the bucket refers to the batch: no cycles for the garbage collector
        self._bucket, self._members = weakref.proxy(bucket), members
        self._all = len(members) == len(bucket.tensors)
        self.groups = np.array([bucket.group_of[i] for i in members])
        self._code = scalar_code(plan)
        self.of_tensors = np.zeros((len(members), len(plan.scalars)))
        self.fixed = self._counts(geo) | self._keys()
        for name in self._code.names:
            if name.startswith(GIVEN):  # until `learn` gets it
                self.fixed[name] = np.ones(len(members))
        self._names = [name for name in self._code.names if name not in self.fixed]
        self._hypers: Sequence[dict[str, Any]] = []  # in the last step
        self._numbers: list[list[float]] = []  # the values of these
        self._steps: Any = []  # scalars of the next steps
        self._first = 0  # the number of updates before the first of them

    def _counts(self, geo: Any) -> dict[str, Any]:
        """Return the numbers of elements by which means are divided."""
        found = {}
        for name in self._code.names:
            if name.startswith(COUNT):
                lengths = [geo[x.upper()].astype(np.float64) for x in name.removeprefix(COUNT)]
                found[name] = np.prod(lengths, axis=0)
        return found

    def _keys(self) -> dict[str, Any]:
        """Return the halves of the keys of random numbers."""
        found = {}
        for name in self._code.names:
            if name.startswith(KEY):
                _, stream, i = name.split(":")
                column = []
                for member in self._members:
                    origin, _ = self._bucket.tensors[member].origin
                    words = key(self._bucket.rule.seed, stream, origin)
                    column.append(halves(words)[int(i)])
                found[name] = np.array(column, np.float64)
        return found

    def learn(self, known: Mapping[str, Any]) -> None:
        """Take values that are known only in the middle of a step, one for each tensor."""
        for name in self.fixed:
            if name in known:
                self.fixed[name] = known[name]
        self._hypers, self._numbers = [], []

    def evaluate(self, asked: Asked) -> None:
        """Compute the scalars of a step."""
        hypers, clip = asked.hypers, asked.clip
        same = bool(self._hypers) and all(map(operator.is_, hypers, self._hypers))
        if not same:
            self._set_constants(hypers)
        updates: Any = self._bucket.updates()
        alike = self._uniform and isinstance(updates, int)
        if alike and same and clip is None:
            if not 0 <= updates - self._first < len(self._steps):
                self._compute_ahead(updates)
            self.of_tensors[:] = self._steps[updates - self._first]
            return
        if not (self._all or isinstance(updates, int)):
            updates = updates[self._members]
        factor = None if clip is None else float(clip)
        values = self._code.scalars(updates + 1.0, factor, self._constants)
        for i, x in enumerate(values):
            self.of_tensors[:, i] = x

    def _compute_ahead(self, updates: int) -> None:
        """Compute the scalars of the next steps, if only the update count changes in them."""
        numbers = np.arange(updates, updates + AHEAD) + 1.0
        values = self._code.scalars(numbers, None, self._constants)
        steps = np.empty((AHEAD, len(values)))
        for i, x in enumerate(values):
            steps[:, i] = x
        self._first, self._steps = updates, steps

    def _set_constants(self, hypers: Sequence[dict[str, Any]]) -> None:
        """Compute what depends only on hyper-parameters and sizes, if these have changed.

        One statement stores all of it, because a signal handler or lack of memory may end this.
        """
        value = hypers[0].get(VALUE) if VALUE in self._names else None
        plain, of_layers = hypers, dict[str, Any]()
        if getattr(value, "ndim", 0) == 1:  # each layer has a value of its own
            of_layers[VALUE] = to_host(value).astype(np.float64)[self.layers]
            plain = [{**h, VALUE: 0.0} for h in hypers]
        numbers = [list(map(float, map(h.__getitem__, self._names))) for h in plain]
        if numbers == self._numbers and not of_layers:
            self._hypers = hypers
            return
        each = {}
        for name, *column in zip(self._names, *numbers, strict=True):
            each[name] = column[0] if len(column) == 1 else np.array(column)[self.groups]
        made = self._code.constants(self.fixed | each | of_layers)
        uniform = np.ndarray not in map(type, made)
        state = made, uniform, list[Any](), [] if of_layers else numbers, hypers
        self._constants, self._uniform, self._steps, self._numbers, self._hypers = state

    @cached_property
    def layers(self) -> Ints:
        """The number of each tensor in its stack."""
        tensors = [self._bucket.tensors[member] for member in self._members]
        return np.array([x.origin[1] // max(1, size(x.array)) for x in tensors], np.int64)
