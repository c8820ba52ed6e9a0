"""What an Optimizer does, once more in the plainest way: the witness, with what stands around a step, in float64."""

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
        The rule's name; of each tensor, where they differ.
    params : dict of str to array
        The parameters.
    options : dict of str to dict
        For each tensor the rule's fields; a number, or a function of the step.
    clip_norm, accumulate, skip_nonfinite
        As for an Optimizer.
    scale : dict, optional
        The loss scale: ``scale``, and ``factor`` and ``window`` where it is dynamic.
    """

    def __init__(self, rule, params, options, *, clip_norm=None, accumulate=1, skip_nonfinite=False, scale=None):
        self.rule, self.options = rule, options
        self.shapes = {name: x.shape for name, x in params.items()}
        self.p = {name: x.ravel().tolist() for name, x in params.items()}
        self.t, self.slots = dict.fromkeys(params, 0), {name: {} for name in params}
        self.clip_norm, self.accumulate, self.skip_nonfinite = clip_norm, accumulate, skip_nonfinite
        self.scale, self.good = copy.copy(scale), 0
        self.step_count = self.skipped = self.calls = 0
        self.sums = {}

    def add(self, name, x, options):
        """Take one more tensor in."""
        self.shapes[name], self.p[name], self.options[name] = x.shape, x.ravel().tolist(), options
        self.t[name], self.slots[name] = 0, {}

    def step(self, grads):
        """Take the gradients of one call: arrays by name, or None."""
        share = 1 / (self.accumulate * (self.scale["scale"] if self.scale else 1.0))
        for name, g in grads.items():
            if g is not None:
                old = self.sums.get(name, [0.0] * g.size)
                self.sums[name] = [a + share * b for a, b in zip(old, g.ravel().tolist(), strict=True)]
        self.calls += 1
        if self.calls < self.accumulate:
            return
        self.calls, g, self.sums = 0, self.sums, {}
        finite = all(math.isfinite(x.real) and math.isfinite(x.imag) for some in g.values() for x in some)
        if not finite and (self.scale or self.skip_nonfinite):
            self.skipped += 1
        else:
            self._update(g)
        self._rescale(finite)
        self.step_count += 1

    def _update(self, grads):
        """One update of the tensors that have a gradient."""
        limit, total = self._now(self.clip_norm), math.hypot(*(witness.norm(g) for g in grads.values()))
        factor = limit / total if limit is not None and total > limit else 1.0
        for name, g in grads.items():
            self.t[name] += 1
            now = {key: self._now(x) for key, x in self.options[name].items()}
            step = witness.step_of_layers if now.pop("stacked", False) else witness.step
            self.p[name], self.slots[name] = step(
                self.rule if isinstance(self.rule, str) else self.rule[name],
                now,
                self.shapes[name],
                self.p[name],
                [factor * x for x in g],
                self.slots[name],
                self.t[name],
            )

    def _now(self, x):
        """A number at this step."""
        return x(self.step_count) if callable(x) else x[self.step_count] if isinstance(x, list) else x

    def _rescale(self, finite):
        """Follow the loss scale."""
        if not (self.scale and "factor" in self.scale):
            return
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale["scale"] = max(self.scale["scale"] / self.scale["factor"], 1.0)
        elif self.good == self.scale["window"]:
            self.scale["scale"], self.good = self.scale["scale"] * self.scale["factor"], 0

    def tensors(self):
        """For each tensor its parameter, count and slots, as arrays of the right sizes."""
        return {
            name: {
                "t": self.t[name],
                "p": np.array(self.p[name]).reshape(self.shapes[name]),
                **{slot: np.array(x) for slot, x in self.slots[name].items()},
            }
            for name in self.p
        }
