"""`minimize`: runs a rule until the gradient is small, for one problem or for many side by side."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Never

from arrayopt.arrays import Array, array_namespace, library, place, to_host
from arrayopt.foreign import arguments_of, check_names
from arrayopt.foreign_names import SOLVER
from arrayopt.functional import init, update
from arrayopt.hyper import checked_bool, scalar, whole
from arrayopt.optimizer import Optimizer
from arrayopt.rules import SGD, Rule
from arrayopt.rules.conjugate import SPG
from arrayopt.rules.lbfgs import LBFGS
from arrayopt.rules.named import check_rule
from arrayopt.solving.check import check_gradient as look_at_gradient
from arrayopt.solving.mapping import GradientMapping
from arrayopt.solving.problem import Problem, engine_for
from arrayopt.solving.ranks import ranks_of
from arrayopt.solving.result import Result
from arrayopt.solving.run import Run
from arrayopt.state.slots import advising


def minimize(
    f: Callable[[Any], Any],
    params: Any,
    rule: Rule | None = None,
    *,
    tol: float = 1e-6,
    max_steps: int = 500,
    stacked: bool = False,
    project: Callable[[Any, Array, Any], Array] | Mapping[str, Any] | None = None,
    engine: str = "auto",
    callback: Callable[[Result], Any] | None = None,
    check_every: int = 1,
    check_gradient: bool = False,
    progress: bool = False,
    comm: Any = None,
    **kwargs: Never,
) -> Result:
    """Find a local minimum of a function, or of many functions side by side.

    Parameters
    ----------
    f : callable
        ``f(params) -> (value, grads)``: a real number, or with `stacked` an array with one per problem; and gradients
        in the structure of the parameters. Values and gradients must be exact, not those of batches or samples.
    params : array, or tree of arrays
        The start, in any library; see `Optimizer`. The arrays are copied.
    rule : Rule, optional
        The rule; by default `LBFGS`, or `SPG` with a `project`. LBFGS, CG and SPG treat the elements of all arrays as
        one vector of unknowns.
    tol : number, default 1e-6
        A problem has converged if no element of its gradient has a larger magnitude, in [0, inf), as with SciPy's
        `gtol`. It is absolute: if typical gradients are far from 1, pass 1e-6 times their largest element.
    max_steps : int, default 500
        The maximum number of accepted steps of each problem, `Result.steps`. With LBFGS, CG and SPG, a step usually
        takes one or two evaluations, and at most 21; with other rules one, or two where the gradient is taken at
        another point than the result and there is a `project`: `FISTA`, `ScheduleFreeAdamW`.
    stacked : bool, default False
        The first axis of all arrays counts independent problems. Each has its own step lengths and history, and stops
        separately.
    project : callable, or mapping of pattern to callable, optional
        The set in which the parameters must stay, such as ``ao.projections.box(0, 1)``; see `Rule`. It is applied to
        each array separately. A mapping such as ``{"b": ao.projections.nonnegative}`` is for arrays of a tree by
        their names, as the groups of `Optimizer`; arrays that no pattern matches are free. For a penalty such as
        `arrayopt.projections.soft_threshold`, `f` must return the value including the penalty.
    engine : str, default "auto"
        As for `Optimizer`, but for LBFGS on a CPU: where a problem has fewer than 65,536 unknowns, ``"auto"`` is
        ``"numpy"`` for NumPy arrays and ``"array_api"`` for others, and nothing is compiled.
    callback : callable, optional
        A function of the `Result` so far, called after each step's evaluation, also the last one. It may end the run
        by raising StopIteration.
    check_every : int, default 1
        The number of evaluations after which the host checks whether all problems have stopped, and calls `callback`.
        On a GPU, only this waits for the device.
    check_gradient : bool, default False
        First compare the gradients at the start with finite differences, along three directions for each array. This
        takes nine evaluations per array, and one more. If they differ by more than 0.01 % in float64, or 2 % in
        float32, a ValueError names the array and the problem. A gradient that is wrong only elsewhere, or in a few of
        many elements, may pass.
    progress : bool, default False
        Show a progress bar, on a terminal or in a notebook. It needs the package rich.
    comm : communicator or Ranks, optional
        Ranks that minimize one function together; see `Optimizer`. Each stores its part of the history and makes its
        part of each step. All ranks make the same call, with the same params. ``Ranks(comm, grads="sum")``, or
        ``"mean"``: each rank's `f` returns the value and the gradients of its own part of the function, and these are
        added. Otherwise `f` must return the same on all ranks. Stacked problems are independent: pass each rank some of
        them, without `comm`.

    Returns
    -------
    Result
        The best evaluated point, with its value and gradient norm.

    Raises
    ------
    TypeError, ValueError
        If an argument, or a result of `f`, is invalid. Exceptions of `f` are raised.
    RankError
        If another rank fails, or does not answer in time.

    Notes
    -----
    Ctrl-C stops the run, and the best point so far is returned, with a message; over ranks, on all of them. It is
    raised only before the first evaluation. NaN and infinity count as worse than any other value, and the rule tries
    a shorter step. At the start, they stop the problem.

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
    naming = partial(
        advising, "`minimize` takes one rule for all arrays, so use another", "minimize"
    )
    with naming():
        ranks = ranks_of(comm)
    with ranks.warned("minimize"), naming():
        check_names("minimize", arguments_of(minimize), kwargs, SOLVER)
        tol = float(scalar("minimize: `tol`", tol, "[0, inf)"))
        max_steps = whole("minimize: `max_steps`", max_steps)
        check_every = whole("minimize: `check_every`", check_every, first=1)
        flags = {"stacked": stacked, "check_gradient": check_gradient, "progress": progress}
        for name, flag in flags.items():
            checked_bool(f"minimize: `{name}`", flag)
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
        groups = None
        if isinstance(project, Mapping):
            groups = {pattern: {"project": one} for pattern, one in project.items()}
        joint = getattr(rule, "joint", None)
        if joint is not None and rule.blocks is not None:
            raise ValueError(
                f"minimize: {type(rule).__name__} treats all params as one unknown, which `blocks` would divide;"
                " leave it out, or pass stacked=True for several problems"
            )
        # others are given each array as it is
        alike = rule.project is None or getattr(rule.project, "elementwise", False)
        packs = bool(joint) and alike and groups is None
        problem = Problem(f, params, stacked=rule.stacked, joint=packs, ranks=ranks)
        if joint is False and len(problem.named) > 1:
            raise ValueError(
                f"minimize: {type(rule).__name__} with joint=False makes each array a separate problem, but `f` is one"
                f" function of {len(problem.named)}; leave out `joint`"
            )
        if joint and len(problem.arrays) == 1:  # one array is one unknown
            rule = dataclasses.replace(rule, joint=False)  # type: ignore[call-arg]
        probe, measure = SGD(lr=1.0, project=rule.project, stacked=rule.stacked), None
        if rule.project is not None or groups is not None:
            init(rule, problem.arrays, groups=groups)  # errors must name this rule
            none = {name: array_namespace(x).zeros_like(x) for name, x in problem.arrays.items()}
            state = init(probe, problem.arrays, groups=groups)
            problem.arrays, _ = update(probe, problem.arrays, none, state, groups=groups)
            leading = GradientMapping(
                tol=tol, project=rule.project, stacked=rule.stacked, joint=len(problem.arrays) > 1
            )
            state = init(leading, problem.arrays, groups=groups)
            measure = partial(update, leading, state=state, groups=groups)
    said = {"`tol`": tol, "`max_steps`": max_steps, "`check_every`": check_every}
    said |= {"`check_gradient`": check_gradient}
    calls = ranks.agree("minimize", lambda: said, wish=progress or callback is not None)
    if check_gradient:
        look_at_gradient(problem, probe, groups)
    engine = engine_for(rule, problem) if engine == "auto" else engine
    with naming():
        opt = Optimizer(problem.arrays, rule, groups=groups, engine=engine, comm=ranks.ranks)
    first = problem.named[0][1]
    spares = library(first) in ("numpy", "torch") and "cuda" not in str(place(first)[1])
    spares = spares and engine != "array_api"
    run = Run(problem, opt, measure, tol, max_steps, check_every, spares)
    if not calls:
        return run.result()
    with _bar(max_steps, callback) if progress else nullcontext(callback) as call:
        return run.result(call or _nothing)


def _rule(rule: Any, project: Any, *, stacked: bool) -> Rule:
    """Return the rule with the arguments `project` and `stacked` of `minimize`."""
    if rule is None:
        rule = LBFGS() if project is None else SPG()
    if inspect.isroutine(rule):
        raise TypeError(
            f"minimize: `rule` must be a Rule such as LBFGS(memory=20); got {rule!r}; {SOLVER['jac']}"
        )
    check_rule("minimize", rule, Rule, "LBFGS(memory=20)")
    given: dict[str, Any] = {"stacked": True} if stacked else {}
    if project is not None and rule.project is not None:
        raise ValueError(
            f"minimize: both `rule` and `project` have a projection: {rule.project!r} and {project!r}; pass"
            " one, such as project=ao.projections.compose(first, second)"
        )
    if project is not None and not isinstance(project, Mapping):
        given["project"] = project
    made: Rule = dataclasses.replace(rule, **given)
    return made


def _nothing(result: Result) -> None:
    """The callback of ranks that have none, while other ranks have one."""


@contextmanager
def _bar(total: int, call: Callable[[Result], Any] | None = None) -> Iterator[Any]:
    """Show a bar of `total` steps; yield what to call with each `Result`, which then calls `call`."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError as error:
        raise ImportError("minimize: `progress` needs rich; pip install rich") from error
    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield call
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("minimize", total=total)

        def show(result: Result) -> None:
            if isinstance(result.value, float):
                words = f"value {result.value:.6g}"
            else:
                converged = to_host(result.converged)
                words = f"{converged.sum()} of {converged.size} converged"
            steps = int(to_host(result.steps).max(initial=0))
            bar.update(task, completed=steps, description=words)
            if call is not None:
                call(result)

        yield show
