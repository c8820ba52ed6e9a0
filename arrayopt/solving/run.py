"""A run of `minimize`: the loop, the best point so far, and the conditions that end it."""

from collections.abc import Callable
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from arrayopt.arrays import Array, copied, place, size, to_host
from arrayopt.foreign import counted
from arrayopt.optimizer import Optimizer
from arrayopt.ranks.comm import RankError
from arrayopt.rules.line_search import MOST
from arrayopt.solving.problem import Point, Problem, fresh
from arrayopt.solving.reasons import ENDLESS, NOWHERE, reasons
from arrayopt.solving.result import Result
from arrayopt.state.verdict import Verdict

KINDS = {"value": float, "grad_norm": float, "steps": int, "evaluations": int, "converged": bool}
"""The numbers of a `Result`, and their Python types for one problem."""


_PLAIN: Any = SimpleNamespace(
    abs=np.abs,  # Python's, of complex scalars, differs from that of arrays in the last bit
    all=bool,
    astype=lambda x, dtype, copy=True: dtype(x),
    finfo=cache(np.finfo),
    int32=np.int32,
    isfinite=np.isfinite,
    max=lambda x, axis: x.max(),
    maximum=np.maximum,
    where=lambda condition, yes, no: yes if condition else no,
    zeros_like=lambda x: type(x)(0),
)
"""The functions that this module uses, on NumPy's scalars, for which NumPy's own take ten times as long."""


class _Seen(NamedTuple):
    """The best point so far, and its properties; arrays have one entry per problem."""

    best: Point
    value: Array
    grad_norm: Array
    steps: Array
    evaluations: Array
    converged: Array
    done: Array
    endless: Array


class Run:
    """A run of `minimize`.

    With `spares`, engines skip problems that have ended. `measure` computes from a point and its gradients the arrays
    that are small at a minimum; by default these are the gradients.
    """

    _seen: _Seen

    def __init__(
        self,
        problem: Problem,
        opt: Optimizer,
        measure: Callable[[Point, Point], Any] | None,
        tol: float,
        max_steps: int,
        check_every: int,
        spares: bool,
    ) -> None:
        self._problem, self._opt, self._measure, self._tol = problem, opt, measure, tol
        self._max_steps, self._check_every = max_steps, check_every
        self._xp: Any = _PLAIN if problem.plain else problem.xp
        # not by `Optimizer.state`, which looks for changed slots of all tensors each time
        self._first = opt._parameters.all[0]
        slots = self._first.slots
        self._searches, self._brackets = "accepted" in slots, "width" in slots
        # such a rule evaluates gradients at points that may lie outside of the set
        self._apart = measure is not None and bool(opt.rule.evaluated_from)
        self._scale: Array | None = None
        self._stepped, self._left = (problem.count or 0) * spares, None
        self._wasted = 0

    def result(self, callback: Callable[[Result], Any] | None = None) -> Result:
        """Run the loop, and return the result, whose message says why it has ended."""
        ranks = self._problem.ranks
        with ranks.together():
            value, grads = self._problem(fresh(self._opt.params))
            self._seen = self._started(value, grads)
            try:
                if self._searches:
                    self._scale = self._scale_for(value, grads)
                return self._result(self._loop(value, grads, callback))
            except (KeyboardInterrupt, RankError) as error:
                if not ranks.are_stopped(error):
                    raise
                return self._result("it was interrupted")

    def _loop(self, value: Array, grads: Point, callback: Callable[[Result], Any] | None) -> str:
        """Step until all problems have ended; return the reason for those without a reason of their own."""
        opt, problem = self._opt, self._problem
        for step in count():
            due = step % self._check_every == 0
            if due and callback is not None and self._called_back(callback):
                return "the callback stopped it"
            if due and self._ended():
                break
            if due and self._stepped:
                self._spare()
            if self._scale is not None:
                value, grads = value * self._scale, self._scaled(grads, self._scale)
            opt.step(grads, value=value, loss_scale=self._left)
            self._note()
            if due and self._ended():
                break
            value, grads = problem(self._shown(opt.params), apart=self._apart)
            if self._apart:
                inside = opt.averaged()
                self._judge(inside, *problem(self._shown(inside)), 2)
            else:
                self._judge(opt.params, value, grads, 1)
        return NOWHERE

    def _ended(self) -> bool:
        """Whether all problems have ended. This waits for the device."""
        return bool(self._xp.all(self._seen.done))

    def _spare(self) -> None:
        """Let steps skip problems that have ended, once their steps have cost more than a new launch."""
        done = to_host(self._seen.done)
        going = len(done) - int(done.sum())
        self._wasted += self._stepped - going
        if self._wasted >= len(done):
            left: Any = Verdict(left={len(done): done.copy()})
            self._stepped, self._left, self._wasted = going, left, 0

    def _called_back(self, callback: Callable[[Result], Any]) -> bool:
        """Call the callback; return whether it ends the run, on this rank or on another."""
        stop, error, ranks = False, None, self._problem.ranks
        try:
            found = self._result("still running", copies=True)
            ranks.own(lambda: callback(found))
        except StopIteration:
            stop = True
        except BaseException as caught:
            error = caught
        return ranks.agree("minimize: `callback`", dict, error, wish=stop)

    def _shown(self, now: Point) -> Point:
        """The point to evaluate, in arrays that `f` may write; for ended problems, their best points."""
        if self._problem.count is None and self._check_every == 1:
            return fresh(now)
        return self._chosen(self._seen.done, self._seen.best, now)

    def _chosen(self, condition: Array, yes: Point, no: Point) -> Point:
        """Choose between two points by a condition for each problem; the arrays are new."""
        return {name: self._where(condition, yes[name], x) for name, x in no.items()}

    def _where(self, condition: Array, yes: Array, no: Array) -> Array:
        """Choose between two arrays by a condition for each problem; the array is new."""
        if isinstance(condition, np.ndarray | np.generic) and condition.ndim == 0:
            return copied(yes if condition else no)
        return self._problem.xp.where(self._each(condition, no), yes, no)

    def _each(self, numbers: Array, x: Array) -> Array:
        """Reshape an array with one number per problem so that it broadcasts to x."""
        if self._problem.count is None:
            return numbers
        return self._problem.xp.reshape(numbers, (-1, *(1,) * (x.ndim - 1)))

    def _scale_for(self, value: Array, grads: Point) -> Array | None:
        """Powers of two that scale the function for the rule, if squares of gradients would overflow or underflow.

        They do not change steps, except for SPG, which needs p - g without rounding. None if no scale is needed.
        """
        xp, dtype = self._problem.xp, self._problem.real
        info, narrow = xp.finfo(dtype), float(xp.finfo(dtype).eps) > 1e-10
        most, limit = to_host(self._most(value, grads)), 40 if narrow else 400
        if self._measure is not None:
            points = to_host(self._most(value, self._problem.arrays))
            most, limit = most / np.clip(points, 1.0, 2.0**20), 20
        with np.errstate(all="ignore"):
            power, height = np.frexp(most)[1], np.frexp(to_host(value))[1]
        far = np.isfinite(most) & (most > 0) & (abs(power) > limit)
        if not far.any():
            return None
        top = int(np.frexp(float(info.max))[1])
        power = np.clip(np.maximum(power, height - top // 2), 2 - top, top - 2)
        factors = np.ldexp(1.0, -np.where(far, power, 0))
        return xp.asarray(factors, dtype=dtype, device=place(value)[1])

    def _scaled(self, grads: Point, scale: Array) -> Point:
        """Multiply gradients by one number per problem."""
        xp = self._problem.xp
        return {
            name: xp.astype(g * self._each(scale, g), g.dtype, copy=False)
            for name, g in grads.items()
        }

    def _norm(self, value: Array, now: Point, grads: Point) -> Array:
        """The largest magnitude in the gradient, or with a projection in what `measure` returns."""
        return self._most(value, grads if self._measure is None else self._measure(now, grads)[0])

    def _most(self, value: Array, arrays: Point) -> Array:
        """The largest magnitude in arrays, one per problem."""
        xp = self._xp
        found = xp.zeros_like(value)
        for g in [g for g in arrays.values() if size(g)]:
            axes = None if self._problem.count is None else tuple(range(1, g.ndim))
            most = xp.abs(g) if axes == () else xp.max(xp.abs(g), axis=axes)
            found = xp.maximum(found, xp.astype(most, self._problem.real, copy=False))
        return found

    @np.errstate(all="ignore")
    def _started(self, value: Array, grads: Point) -> _Seen:
        """The record of the start."""
        xp, now = self._xp, self._opt.params
        norm, none = self._norm(value, now, grads), xp.astype(xp.zeros_like(value), xp.int32)
        small = norm <= self._tol
        return _Seen(
            best={name: copied(x) for name, x in now.items()},
            value=value,
            grad_norm=norm,
            steps=none,
            evaluations=none + 1,
            converged=small & xp.isfinite(value),
            done=small | ~xp.isfinite(value + 0.0 * norm) | (none >= self._max_steps),
            endless=none,
        )

    @np.errstate(all="ignore")
    def _judge(self, now: Point, value: Array, grads: Point, evaluations: int) -> None:
        """Update the record after evaluations: the last point is the best one if it is better.

        A value that is not finite is never better: minus infinity is an overflow.
        """
        xp, old = self._xp, self._seen
        norm, going = self._norm(value, now, grads), ~old.done
        slack = 100.0 * float(xp.finfo(self._problem.real).eps) * xp.abs(old.value)
        small = going & (norm <= self._tol) & (value <= old.value + slack)
        better = small | going & xp.isfinite(value + 0.0 * norm) & (value < old.value)
        self._seen = old._replace(
            best=self._chosen(better, now, old.best),
            value=xp.where(better, value, old.value),
            grad_norm=xp.where(better, norm, old.grad_norm),
            # the last point counts as an accepted step, although the rule does not see it
            steps=old.steps + xp.astype(small & self._searches, xp.int32),
            evaluations=old.evaluations + evaluations * xp.astype(going, xp.int32),
            converged=old.converged | small,
            done=old.done | small | (old.steps >= self._max_steps),
        )

    def _note(self) -> None:
        """Read from the rule's state how many points it has accepted, and which searches have ended."""
        xp, seen = self._xp, self._seen
        if not self._searches:
            self._seen = seen._replace(steps=seen.steps + xp.astype(~seen.done, xp.int32))
            return
        accepted, endless = xp.astype(self._known("accepted"), xp.int32), seen.endless
        if self._brackets:
            open_ = (self._known("trials") >= MOST) & (self._known("width") == np.inf)
            endless = endless + xp.astype(open_ & ~seen.done, xp.int32)
        done = seen.done | (self._known("ended") > 0) | (accepted >= self._max_steps)
        steps = xp.where(seen.done, seen.steps, accepted)
        self._seen = seen._replace(steps=steps, done=done | (endless >= ENDLESS), endless=endless)

    def _known(self, slot: str) -> Array:
        """A slot of the rule with one number per problem."""
        self._first.run.streams.meet("minimize")
        found = self._problem.ranks.known(self._first.slots[slot])
        return found[()] if self._problem.plain else found

    def _result(self, otherwise: str, *, copies: bool = False) -> Result:
        """The record as a `Result`; with `copies`, for a callback, which may write to it."""
        seen, problem = self._seen, self._problem
        numbers = {name: getattr(seen, name) for name in KINDS}
        if problem.count is None:
            numbers = {name: KINDS[name](x) for name, x in numbers.items()}
        best = {name: copied(x) for name, x in seen.best.items()} if copies else seen.best
        return Result(params=problem.tree(best), message=self._said(otherwise), **numbers)

    def _said(self, otherwise: str) -> str:
        """The message of the result; `otherwise` is the reason for problems without another one."""
        known, count = self._seen._asdict(), self._problem.count
        told = {name: np.atleast_1d(to_host(x)) for name, x in known.items() if name != "best"}
        converged, done, at_start = told["converged"], told["done"], told["steps"] == 0
        good = int(converged.sum())
        if good and count is None:
            where = " at the start" if at_start.any() else ""
            return f"converged: the gradient{where} is within `tol`"
        ended, off = np.zeros_like(done), np.zeros(done.shape)
        if self._searches and (done & ~converged).any():
            ended = done & (np.atleast_1d(to_host(self._known("ended"))) > 0)
            off = np.atleast_1d(to_host(self._known("off")))
        why = reasons(told, ended, off, self._max_steps, otherwise)
        if count is None:
            return f"not converged: {why[0][1]}"
        parts = [f"{good} of {counted(count, 'problem')} converged"]
        if (converged & at_start).any():
            parts[0] += f", {(converged & at_start).sum()} at the start"
        return "; ".join(parts + [f"{many}: {words}" for many, words in why])
