"""`minimize`: a rule is run until the gradient is small, for one problem or for many side by side."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from arrayopt.arrays import Array, copied, size
from arrayopt.functional import init, update
from arrayopt.hyper import scalar, whole
from arrayopt.optimizer import Optimizer
from arrayopt.rules import SGD, Rule
from arrayopt.rules.conjugate import SPG
from arrayopt.rules.lbfgs import LBFGS
from arrayopt.solving.check import check_gradient as look_at_gradient
from arrayopt.solving.problem import Problem, engine_for
from arrayopt.solving.progress import progress as bar
from arrayopt.solving.result import Result

__all__ = ["minimize"]

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


def minimize(
    f: Callable[[Any], Any],
    params: Any,
    rule: Rule | None = None,
    *,
    tol: float = 1e-6,
    max_steps: int = 500,
    stacked: bool = False,
    project: Callable[[Any, Array, Any], Array] | None = None,
    engine: str = "auto",
    callback: Callable[[Result], Any] | None = None,
    check_every: int = 1,
    check_gradient: bool = False,
    progress: bool = False,
) -> Result:
    """Find a local minimum of a function, or those of many functions side by side.

    Parameters
    ----------
    f : callable
        ``f(params) -> (value, grads)``: one real number, or with `stacked` an array of one for each
        problem; and gradients in the structure of the parameters. It must be the whole function,
        and not one of batches or samples.
    params : array, or tree of arrays
        Where to begin, in any library; see `Optimizer`. The arrays are copied.
    rule : Rule, optional
        How to step; `LBFGS` if left out, and `SPG` where there is a `project`. Every rule will do.
        Under LBFGS, CG and SPG the elements of all arrays are one unknown; these must have one
        dtype and device then.
    tol : number, default 1e-6
        A problem has converged where no element of its gradient is larger, in [0, inf).
    max_steps : int, default 500
        The most steps; there is one evaluation more than steps.
    stacked : bool, default False
        The first axis of all arrays counts problems that have nothing to do with each other. Each
        has its own step lengths, its own history, and its own end: then it stands still.
    project : callable, optional
        Where the parameters must stay, such as ``ao.projections.box(0, 1)``; see `Rule`. Under SPG
        it is given all unknowns of a problem as one array. The value of a penalty, such as
        `arrayopt.projections.soft_threshold` stands for, must be a part of what `f` returns.
    engine : str, default "auto"
        As for `Optimizer`.
    callback : callable, optional
        A function of the `Result` so far, called after each evaluation. It may end the run by
        raising StopIteration.
    check_every : int, default 1
        After how many evaluations the host looks whether all problems have ended, and calls back.
        On a GPU only this waits for the device.
    check_gradient : bool, default False
        Compare the gradients at the start with differences of values first, along three ways
        for each array; that takes nine evaluations for each, and one more. Where they do not agree, a
        ValueError names the array, and the problem where there are several. A gradient that is
        wrong elsewhere only, or in a few of many elements, may pass.
    progress : bool, default False
        Show a progress bar, on a terminal or in a notebook. It needs the package rich.

    Returns
    -------
    Result
        The best point that was evaluated, and what is known of it.

    Raises
    ------
    TypeError, ValueError
        If something cannot be used, such as what `f` returns. What `f` raises comes through.

    Notes
    -----
    Ctrl-C ends the run, and what has been found so far is returned; the message says so. It is
    raised only where nothing has been evaluated yet. Values that are NaN or infinite are worse than
    any other: the rule tries a shorter step.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> def rosenbrock(x):
    ...     a, b = x[..., 0], x[..., 1]
    ...     value = (1 - a) ** 2 + 100 * (b - a**2) ** 2
    ...     return value, np.stack([2 * (a - 1) - 400 * a * (b - a**2), 200 * (b - a**2)], axis=-1)
    >>> ao.minimize(rosenbrock, np.array([-1.2, 1.0])).params.round(6)
    array([1., 1.])
    >>> many = np.random.default_rng(0).uniform(-2, 2, (1000, 2))
    >>> ao.minimize(rosenbrock, many, stacked=True).message
    '1000 of 1000 problems converged'
    """
    tol = scalar("minimize: `tol`", tol, "[0, inf)")
    max_steps = whole("minimize: `max_steps`", max_steps)
    check_every = whole("minimize: `check_every`", check_every, first=1)
    if not isinstance(stacked, bool):
        raise TypeError(f"minimize: `stacked` must be True or False; got {stacked!r}")
    if not isinstance(check_gradient, bool):
        raise TypeError(f"minimize: `check_gradient` must be True or False; got {check_gradient!r}")
    if not isinstance(progress, bool):
        raise TypeError(f"minimize: `progress` must be True or False; got {progress!r}")
    if callback is not None and not callable(callback):
        raise TypeError(f"minimize: `callback` must be a function of a Result; got {callback!r}")
    rule = _rule(rule, project, stacked=stacked)
    problem = Problem(f, params, stacked=rule.stacked, joint=getattr(rule, "joint", False))
    if problem.packed and getattr(rule.project, "arrays", None):
        raise ValueError(
            f"minimize: {type(rule).__name__} takes all params as one unknown, and `project` has"
            " arrays; give params as one array"
        )
    probe = SGD(lr=1.0, project=rule.project, stacked=rule.stacked)
    if rule.project is not None:
        none = [problem.xp.zeros_like(x) for x in problem.arrays]
        problem.arrays, _ = update(probe, problem.arrays, none, init(probe, problem.arrays))
    if check_gradient:
        look_at_gradient(problem, probe)
    engine = engine_for(rule, problem) if engine == "auto" else engine
    opt = Optimizer(problem.arrays, rule, engine=engine)
    run = partial(_Run, problem, opt, probe, tol, max_steps, check_every)
    if not progress:
        return run(callback).result()
    with bar(max_steps) as show:

        def both(result: Result) -> None:
            show(result)
            if callback is not None:
                callback(result)

        return run(both).result()


def _rule(rule: Any, project: Any, *, stacked: bool) -> Rule:
    """The rule, with what `minimize` was given beside it."""
    if rule is None:
        rule = LBFGS() if project is None else SPG()
    if not isinstance(rule, Rule):
        raise TypeError(f"minimize: `rule` must be a Rule such as LBFGS(memory=20); got {rule!r}")
    given: dict[str, Any] = {"stacked": True} if stacked else {}
    if project is not None:
        given["project"] = project
    return dataclasses.replace(rule, **given)


class _Run:
    """A run of `minimize`."""

    def __init__(
        self,
        problem: Problem,
        opt: Optimizer,
        probe: Rule,
        tol: float,
        max_steps: int,
        check_every: int,
        callback: Callable[[Result], Any] | None,
    ) -> None:
        self._problem, self._opt, self._tol = problem, opt, tol
        self._max_steps, self._check_every, self._callback = max_steps, check_every, callback
        self._own = opt.state["0"].keys()
        # a step of this rule tells how far a gradient leads where parameters are projected
        self._probe = probe
        self._probed = None if probe.project is None else init(probe, problem.arrays)
        self._seen: _Seen | None = None

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
        xp, opt = self._problem.xp, self._opt
        for step in range(self._max_steps + 1):
            value, grads = self._problem(self._shown())
            self._seen = self._judged(value, grads)
            due = step % self._check_every == 0 or step == self._max_steps
            if due and bool(xp.all(self._seen.done)):
                return ENDED
            if due and self._callback is not None:
                try:
                    self._callback(self._result("it goes on"))
                except StopIteration:
                    return "the callback has ended it"
            if step < self._max_steps:
                opt.step(grads, value=value)
                self._note()
                if due and bool(xp.all(self._seen.done)):
                    return ENDED
        return f"after max_steps={self._max_steps} steps"

    def _shown(self) -> list[Array]:
        """Where to evaluate: at the optimizer's point; where a problem has ended, at its best one."""
        now = list(self._opt.params)
        if self._seen is None or (self._problem.count is None and self._check_every == 1):
            return now
        pairs = zip(self._seen.best, now, strict=True)
        return [self._where(self._seen.done, best, p) for best, p in pairs]

    def _where(self, condition: Array, yes: Array, no: Array) -> Array:
        """One of two arrays, by a condition for each problem."""
        xp = self._problem.xp
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

    def _judged(self, value: Array, grads: list[Array]) -> _Seen:
        """What is known after an evaluation: where it is better, it is the best."""
        xp, now, old = self._problem.xp, list(self._opt.params), self._seen
        norm = self._norm(value, now, grads)
        none = xp.zeros_like(value)
        if old is None:
            small = norm <= self._tol
            counts = xp.astype(none, xp.int32)
            return _Seen([copied(x) for x in now], value, norm, counts, counts + 1, small, small)
        going = ~old.done
        slack = 100.0 * float(xp.finfo(self._problem.real).eps) * xp.abs(old.value)
        small = going & (norm <= self._tol) & (value <= old.value + slack)
        better = small | going & ((value < old.value) | xp.isnan(old.value) & ~xp.isnan(value))
        pairs = zip(now, old.best, strict=True)
        return _Seen(
            best=[self._where(better, p, best) for p, best in pairs],
            value=xp.where(better, value, old.value),
            norm=xp.where(better, norm, old.norm),
            steps=old.steps,
            evaluations=old.evaluations + xp.astype(going, xp.int32),
            converged=old.converged | small,
            done=old.done | small,
        )

    def _note(self) -> None:
        """Take from the rule how many points it has taken, and where it has ended."""
        assert self._seen is not None
        xp, seen = self._problem.xp, self._seen
        if "accepted" not in self._own:
            steps = seen.steps + xp.astype(~seen.done, xp.int32)
            self._seen = seen._replace(steps=steps)
            return
        state = self._opt.state["0"]
        accepted = xp.astype(state["accepted"], xp.int32)
        done = seen.done | (state["ended"] > 0)
        self._seen = seen._replace(steps=xp.where(seen.done, seen.steps, accepted), done=done)

    def _result(self, ended: str) -> Result:
        """What is known, as it is returned."""
        seen, problem = self._seen, self._problem
        assert seen is not None
        numbers = [seen.value, seen.norm, seen.steps, seen.evaluations, seen.converged]
        if problem.count is None:
            if not float(seen.value) < math.inf:
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
