"""`minimize`: a rule is run until the gradient is small, for one problem or for many side by side."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from arrayopt.arrays import Array, array_namespace, library, place
from arrayopt.functional import init, update
from arrayopt.hyper import scalar, whole
from arrayopt.optimizer import Optimizer
from arrayopt.rules import SGD, Rule
from arrayopt.rules.conjugate import SPG
from arrayopt.rules.lbfgs import LBFGS
from arrayopt.solving.check import check_gradient as look_at_gradient
from arrayopt.solving.problem import Problem, engine_for
from arrayopt.solving.progress import progress as bar
from arrayopt.solving.ranks import ranks_of
from arrayopt.solving.result import Result
from arrayopt.solving.run import Run

__all__ = ["minimize"]


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
    comm: Any = None,
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
        Under LBFGS, CG and SPG the elements of all arrays are one vector of unknowns.
    tol : number, default 1e-6
        A problem has converged where no element of its gradient is larger in magnitude, in
        [0, inf), as with `gtol` of SciPy's. It is not relative: give 1e-6 times the largest element
        of a typical gradient if that is far from 1.
    max_steps : int, default 500
        The most steps of each problem. What counts is `Result.steps`: points that were taken to go
        on from. A step of a rule with a line search evaluates the function once or twice as a rule,
        and never more than 21 times; one of other rules, once.
    stacked : bool, default False
        The first axis of all arrays counts problems that have nothing to do with each other. Each
        has its own step lengths, its own history, and its own end: then it stands still.
    project : callable, optional
        Where the parameters must stay, such as ``ao.projections.box(0, 1)``; see `Rule`. It is
        given each array by itself. The value of a penalty, such as
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
    comm : communicator or Ranks, optional
        Ranks that minimize one function together, see `Optimizer`: each keeps its part of the
        history and makes its part of each step. They make the same call, with the same params.
        ``Ranks(comm, grads="sum")``, or ``"mean"``: each rank's `f` returns the value and the
        gradients of its own part of the function, and these are added. Else `f` returns the same
        on all ranks. Stacked problems have nothing to tell each other: give each rank some.

    Returns
    -------
    Result
        The best point that was evaluated, and what is known of it.

    Raises
    ------
    TypeError, ValueError
        If something cannot be used, such as what `f` returns. What `f` raises comes through.
    RankError
        If another rank fails, or does not answer in time. An error of one rank, or Ctrl-C, ends the
        run on all.

    Notes
    -----
    Ctrl-C ends the run, and what has been found so far is returned; the message says so. It is
    raised only where nothing has been evaluated yet. Values that are NaN or infinite are worse than
    any other: the rule tries a shorter step. At the start they end the problem.

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
    ranks = ranks_of(comm)
    with ranks.warned("minimize"):
        tol = float(scalar("minimize: `tol`", tol, "[0, inf)"))
        max_steps = whole("minimize: `max_steps`", max_steps)
        check_every = whole("minimize: `check_every`", check_every, first=1)
        if not isinstance(stacked, bool):
            raise TypeError(f"minimize: `stacked` must be True or False; got {stacked!r}")
        if not isinstance(check_gradient, bool):
            raise TypeError(
                f"minimize: `check_gradient` must be True or False; got {check_gradient!r}"
            )
        if not isinstance(progress, bool):
            raise TypeError(f"minimize: `progress` must be True or False; got {progress!r}")
        if callback is not None and not callable(callback):
            raise TypeError(
                f"minimize: `callback` must be a function of a Result; got {callback!r}"
            )
        rule = _rule(rule, project, stacked=stacked)
        if rule.stacked and ranks.size > 1:
            raise ValueError(
                "minimize: `comm` shares one problem among ranks, but `stacked` problems are independent; pass each"
                " rank its own problems, without `comm`"
            )
        joint = getattr(rule, "joint", None)
        if joint is not None and rule.blocks is not None:
            raise ValueError(
                f"minimize: {type(rule).__name__} takes params as one unknown, and `blocks` makes several of them;"
                " leave it out, or give stacked=True for several problems"
            )
        # each array is projected as it was given
        packs = bool(joint) and rule.project is None
        problem = Problem(f, params, stacked=rule.stacked, joint=packs, ranks=ranks)
        if joint is False and len(problem.named) > 1:
            raise ValueError(
                f"minimize: {type(rule).__name__} with joint=False makes each array a separate problem, but `f` is one"
                f" function of {len(problem.named)}; leave out `joint`"
            )
        if joint and len(problem.arrays) == 1:  # one array is one unknown
            rule = dataclasses.replace(rule, joint=False)  # type: ignore[call-arg]
        probe = SGD(lr=1.0, project=rule.project, stacked=rule.stacked)
        if rule.project is not None:
            if rule.constants:
                init(rule, problem.arrays)  # they may not fit, and the error is to name the rule
            none = {name: array_namespace(x).zeros_like(x) for name, x in problem.arrays.items()}
            problem.arrays, _ = update(probe, problem.arrays, none, init(probe, problem.arrays))
    said = {"`tol`": tol, "`max_steps`": max_steps, "`check_every`": check_every}
    said |= {"`check_gradient`": check_gradient, "`callback`": callback is not None}
    ranks.agree("minimize", lambda: said)
    if check_gradient:
        look_at_gradient(problem, probe)
    engine = engine_for(rule, problem) if engine == "auto" else engine
    opt = Optimizer(problem.arrays, rule, engine=engine, comm=ranks.ranks)
    first = problem.named[0][1]
    spares = library(first) in ("numpy", "torch") and "cuda" not in str(place(first)[1])
    spares = spares and engine != "array_api"
    run = partial(Run, problem, opt, probe, tol, max_steps, check_every, spares)
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
        if rule.project is not None:
            raise ValueError(
                f"minimize: `rule` and `project` are both given a projection: {rule.project!r} and {project!r}; give"
                " it once, such as project=ao.projections.compose(first, second)"
            )
        given["project"] = project
    return dataclasses.replace(rule, **given)
