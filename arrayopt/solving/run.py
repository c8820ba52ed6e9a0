"""A run of `minimize`: the loop, what has been seen, and what ends it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from arrayopt.arrays import Array, copied, size, to_host, writable
from arrayopt.functional import init, update
from arrayopt.optimizer import Optimizer
from arrayopt.rules import Rule
from arrayopt.solving.problem import Problem
from arrayopt.solving.result import Result
from arrayopt.state.verdict import Verdict

__all__ = ["Run"]

ENDED = (
    "no step makes the value less: it is as small as rounding lets it be, or the gradient is wrong"
)


class _Seen(NamedTuple):
    """What has been seen so far, of one problem or of all: the best point, and what is known of it."""

    best: list[Array]
    value: Array
    norm: Array
    steps: Array
    evaluations: Array
    converged: Array
    done: Array


class Run:
    """A run of `minimize`; where it `spares`, engines make no steps of problems that have ended."""

    def __init__(
        self,
        problem: Problem,
        opt: Optimizer,
        probe: Rule,
        tol: float,
        max_steps: int,
        check_every: int,
        spares: bool,
        callback: Callable[[Result], Any] | None,
    ) -> None:
        self._problem, self._opt, self._tol = problem, opt, tol
        self._max_steps, self._check_every, self._callback = max_steps, check_every, callback
        self._searches = "accepted" in opt.state["0"]
        # such a rule takes gradients at points that may lie outside of the set
        self._apart = probe.project is not None and bool(opt.rule.evaluated_from)
        # a step of this rule tells how far a gradient leads where parameters are projected
        self._probe = probe
        self._probed = None if probe.project is None else init(probe, problem.arrays)
        self._seen: _Seen | None = None
        self._stepped, self._left = (problem.count or 0) * spares, None

    def result(self) -> Result:
        """The loop. What it ends by is in the message."""
        try:
            return self._result(self._loop())
        except KeyboardInterrupt:
            if self._seen is None:
                raise
            return self._result("it was interrupted")

    def _loop(self) -> str:
        """Step until all problems have ended; what ended those that have not converged."""
        xp, opt, problem = self._problem.xp, self._opt, self._problem
        for step in range(self._max_steps + 1):
            value, grads = problem(self._shown(opt.params))
            if self._apart and step:
                inside = opt.averaged()
                self._seen = self._judged(inside, *problem(self._shown(inside)), 2)
            else:
                self._seen = self._judged(opt.params, value, grads, 1)
            due = step % self._check_every == 0 or step == self._max_steps
            if due and bool(xp.all(self._seen.done)):
                return ENDED
            if due and self._callback is not None and self._called_back(self._callback):
                return "the callback has ended it"
            if step < self._max_steps:
                if due and self._stepped:
                    self._spare(self._seen)
                opt.step(grads, value=value, loss_scale=self._left)
                self._note()
                if due and bool(xp.all(self._seen.done)):
                    return ENDED
        return f"after max_steps={self._max_steps} steps"

    def _spare(self, seen: _Seen) -> None:
        """Leave problems that have ended out of steps, once half of those that are stepped have."""
        done = to_host(seen.done)
        going = len(done) - int(done.sum())
        if 2 * going <= self._stepped:
            left: Any = Verdict(left={len(done): done.copy()})
            self._stepped, self._left = going, left

    def _called_back(self, callback: Callable[[Result], Any]) -> bool:
        """Call back; whether the run is to end, on this rank or on another."""
        stop, error = False, None
        try:
            callback(self._result("it goes on"))
        except StopIteration:
            stop = True
        except BaseException as caught:
            error = caught
        return self._problem.ranks.agree("minimize: `callback`", dict, error, wish=stop)

    def _shown(self, now: list[Array]) -> list[Array]:
        """Where to evaluate: here, in arrays that `f` may write; where a problem has ended, at its
        best point.
        """
        if self._seen is None or (self._problem.count is None and self._check_every == 1):
            return [copied(x) if writable(x) else x for x in now]
        pairs = zip(self._seen.best, now, strict=True)
        return [self._where(self._seen.done, best, p) for best, p in pairs]

    def _where(self, condition: Array, yes: Array, no: Array) -> Array:
        """One of two arrays, by a condition for each problem, in a new array."""
        xp = self._problem.xp
        if isinstance(condition, np.ndarray | np.generic) and condition.ndim == 0:
            return copied(yes if condition else no)
        if self._problem.count is not None:
            condition = xp.reshape(condition, (-1, *(1,) * (no.ndim - 1)))
        return xp.where(condition, yes, no)

    def _norm(self, value: Array, arrays: list[Array], grads: list[Array]) -> Array:
        """The largest element of the gradient, or of the step that it leads to where it is projected."""
        xp = self._problem.xp
        if self._probed is not None:
            new, _ = update(self._probe, arrays, grads, self._probed)
            grads = [p - q for p, q in zip(arrays, new, strict=True)]
        found = xp.zeros_like(value)
        for g in [g for g in grads if size(g)]:
            axes = None if self._problem.count is None else tuple(range(1, g.ndim))
            most = xp.abs(g) if axes == () else xp.max(xp.abs(g), axis=axes)
            found = xp.maximum(found, xp.astype(most, self._problem.real, copy=False))
        return found

    @np.errstate(all="ignore")
    def _judged(
        self, now: list[Array], value: Array, grads: list[Array], evaluations: int
    ) -> _Seen:
        """What is known after so many evaluations: where the last is better, it is the best.

        One that is not finite is never better: minus infinity is an overflow.
        """
        xp, old = self._problem.xp, self._seen
        norm = self._norm(value, now, grads)
        none = xp.zeros_like(value)
        if old is None:
            small = norm <= self._tol
            counts = xp.astype(none, xp.int32)
            return _Seen([copied(x) for x in now], value, norm, counts, counts + 1, small, small)
        going = ~old.done
        slack = 100.0 * float(xp.finfo(self._problem.real).eps) * xp.abs(old.value)
        small = going & (norm <= self._tol) & (value <= old.value + slack)
        known, better = xp.isfinite(old.value), xp.isfinite(value + 0.0 * norm)
        better = small | going & better & ((value < old.value) | ~known)
        pairs = zip(now, old.best, strict=True)
        return _Seen(
            best=[self._where(better, p, best) for p, best in pairs],
            value=xp.where(better, value, old.value),
            norm=xp.where(better, norm, old.norm),
            # the point at which it ends is taken, too, and the rule never told so
            steps=old.steps + xp.astype(small & self._searches, xp.int32),
            evaluations=old.evaluations + evaluations * xp.astype(going, xp.int32),
            converged=old.converged | small,
            done=old.done | small,
        )

    def _note(self) -> None:
        """Take from the rule how many points it has taken, and where it has ended."""
        assert self._seen is not None
        xp, seen = self._problem.xp, self._seen
        if not self._searches:
            steps = seen.steps + xp.astype(~seen.done, xp.int32)
            self._seen = seen._replace(steps=steps)
            return
        state = self._opt.state["0"]
        accepted = xp.astype(self._problem.ranks.known(state["accepted"]), xp.int32)
        done = seen.done | (self._problem.ranks.known(state["ended"]) > 0)
        self._seen = seen._replace(steps=xp.where(seen.done, seen.steps, accepted), done=done)

    def _result(self, ended: str) -> Result:
        """What is known, as it is returned."""
        seen, problem = self._seen, self._problem
        assert seen is not None
        numbers = [seen.value, seen.norm, seen.steps, seen.evaluations, seen.converged]
        if problem.count is None:
            if not math.isfinite(float(seen.value)):
                ended = f"no value of `f` was finite; {ended}"
            kinds = (float, float, int, int, bool)
            numbers = [kind(x) for kind, x in zip(kinds, numbers, strict=True)]
            message = (
                "converged: the gradient is within `tol`"
                if numbers[4]
                else f"not converged: {ended}"
            )
        else:
            good = int(problem.xp.sum(problem.xp.astype(seen.converged, problem.xp.int32)))
            message = f"{good} of {problem.count} problems converged"
            message += "" if good == problem.count else f"; the others not: {ended}"
        names = ("value", "grad_norm", "steps", "evaluations", "converged")
        found = dict(zip(names, numbers, strict=True))
        return Result(params=problem.tree(seen.best), message=message, **found)
