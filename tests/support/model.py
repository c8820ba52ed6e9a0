"""A second, plain implementation of the Optimizer in float64: the witness, with clipping, loss scale and the like."""

import copy
import math

import numpy as np

from tests.support import witness

__all__ = ["Model"]


class Model:
    """An Optimizer over tensors by name, each a shape and a flat list.

    Parameters
    ----------
    rule : str or dict of str to str
        The rule's name, or the names by tensor if they differ.
    params : dict of str to array
        The parameters.
    options : dict of str to dict
        For each tensor the rule's fields; a number, or a function of the step.
    clip_norm, accumulate, skip_nonfinite
        As for an Optimizer.
    scale : dict, optional
        The loss scale: ``scale``, and ``factor`` and ``window`` if it is dynamic.
    """

    def __init__(self, rule, params, options, *, clip_norm=None, accumulate=1, skip_nonfinite=False, scale=None):
        self.rule, self.options = rule, options
        self.shapes = {name: x.shape for name, x in params.items()}
        self.p = {name: x.ravel().tolist() for name, x in params.items()}
        self.t, self.slots = dict.fromkeys(params, 0), {name: {} for name in params}
        self.clip_norm, self.accumulate, self.skip_nonfinite = clip_norm, accumulate, skip_nonfinite
        self.scale, self.good = copy.copy(scale), 0
        self.left = {name: [0] * (x.shape or (1,))[0] for name, x in params.items()}
        self.step_count = self.skipped = self.calls = 0
        self.sums = {}

    def add(self, name, x, options):
        """Add a tensor."""
        self.shapes[name], self.p[name], self.options[name] = x.shape, x.ravel().tolist(), options
        self.t[name], self.slots[name], self.left[name] = 0, {}, [0] * (x.shape or (1,))[0]

    def step(self, grads):
        """Make one call with gradients, arrays or None by name."""
        share = 1 / (self.accumulate * (self.scale["scale"] if self.scale else 1.0))
        for name, g in grads.items():
            if g is not None:
                old = self.sums.get(name, [0.0] * g.size)
                self.sums[name] = [a + share * b for a, b in zip(old, g.ravel().tolist(), strict=True)]
        self.calls += 1
        if self.calls < self.accumulate:
            return
        self.calls, g, self.sums = 0, self.sums, {}
        finite = all(map(_finite, g.values()))
        left = self._left_out(g) if self.skip_nonfinite and not self.scale else None
        if not finite and left is None and (self.scale or self.skip_nonfinite):
            self.skipped += 1
        else:
            self._update(g, left or set())
        self._rescale(finite)
        self.step_count += 1

    def _layers(self, name):
        """The number of layers of a stacked tensor; 0 for other tensors."""
        return self.shapes[name][0] if self.options[name].get("stacked") and self.p[name] else 0

    def _left_out(self, grads):
        """The layers to skip separately, as (number of layers, index); None if the whole step is skipped."""
        bad, parts = set(), []
        for name, g in grads.items():
            count = self._layers(name)
            own = [((count, i), witness.part(g, i, count)) for i in range(count)] or [(None, g)]
            bad |= {key for key, x in own if not _finite(x)}
            parts += [key for key, x in own if x]
        return None if bad and (None in bad or bad >= set(parts)) else bad

    def _update(self, grads, left):
        """Update the tensors that have a gradient, except layers in `left`."""
        took = {}
        for name, g in grads.items():
            count = self._layers(name)
            out = {i for i in range(count) if (count, i) in left}
            took[name] = [x for i in range(count) if i not in out for x in witness.part(g, i, count)] if count else g
            self.left[name] = [n + (i in out) for i, n in enumerate(self.left[name])]
        limit, total = self._now(self.clip_norm), math.hypot(*(witness.norm(g) for g in took.values()))
        factor = limit / total if limit is not None and total > limit else 1.0
        for name, g in grads.items():
            self.t[name] += 1
            now = {key: self._now(x) for key, x in self.options[name].items()}
            count, t = self._layers(name), self.t[name]
            each = [None if (count, i) in left else t - self.left[name][i] for i in range(count)]
            step = witness.step_of_layers if now.pop("stacked", False) else witness.step
            self.p[name], self.slots[name] = step(
                self.rule if isinstance(self.rule, str) else self.rule[name],
                now,
                self.shapes[name],
                self.p[name],
                [factor * x for x in g],
                self.slots[name],
                each if step is witness.step_of_layers else t,
            )

    def _now(self, x):
        """The value of a number, schedule or list at this step."""
        return x(self.step_count) if callable(x) else x[self.step_count] if isinstance(x, list) else x

    def _rescale(self, finite):
        """Update the loss scale."""
        if not (self.scale and "factor" in self.scale):
            return
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale["scale"] = max(self.scale["scale"] / self.scale["factor"], 1.0)
        elif self.good == self.scale["window"]:
            self.scale["scale"], self.good = self.scale["scale"] * self.scale["factor"], 0

    def tensors(self):
        """Each tensor's count, parameter and slots, as arrays."""
        return {
            name: {
                "t": self.t[name],
                "p": np.array(self.p[name]).reshape(self.shapes[name]),
                **{slot: np.array(x) for slot, x in self._slots(name).items()},
            }
            for name in self.p
        }

    def _slots(self, name):
        """A tensor's slots, those of layers end to end. Layers that were never updated have initial slots."""
        count, slots = self._layers(name), self.slots[name]
        if not count or not slots:
            return {} if count else slots
        like = next(iter(slots.values()))
        begun = {k: x if k in ("slow", "ema", "z", "x") else [NUMBERS.get(k, 0.0)] * len(x) for k, x in like.items()}
        for i in range(count):
            if i not in slots:
                slots[i] = {k: witness.part(self.p[name], i, count) if x is like[k] else x for k, x in begun.items()}
        return {k: [y for i in range(count) for y in slots[i][k]] for k in like}


NUMBERS = {"theta": 1.0, "mu_product": 1.0}
"""The initial values of slots of one number, if not 0."""


def _finite(some):
    return all(math.isfinite(x.real) and math.isfinite(x.imag) for x in some)
