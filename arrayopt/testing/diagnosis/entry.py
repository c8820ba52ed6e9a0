"""The public functions: `diagnose` an optimizer, `record` its steps, and `check` that it repeats them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import REAL, Array, detached, dtype_name, like, place
from arrayopt.foreign import unknown
from arrayopt.hyper import is_number, whole
from arrayopt.libraries import to_numpy
from arrayopt.params.grads import match_grads
from arrayopt.testing.diagnosis.diagnosis import Diagnosis
from arrayopt.testing.diagnosis.fit import LOWER
from arrayopt.testing.diagnosis.hypothesis import hyper_names
from arrayopt.testing.diagnosis.model import LIMITS
from arrayopt.testing.diagnosis.search import Watch
from arrayopt.testing.diagnosis.subjects import Subject, as_subject
from arrayopt.testing.diagnosis.tensors import Examination
from arrayopt.testing.diagnosis.trajectory import STEPS, Observed, Trajectory, Values, each, gradients
from arrayopt.testing.diagnosis.words import no_rule
from arrayopt.testing.equivalence import LIMITS as CHECKED


def diagnose(
    step: Any,
    params: Any = None,
    grads: Sequence[Any] | None = None,
    *,
    known: Mapping[str, float] | None = None,
    steps: int = STEPS,
    depth: int = 3,
    seconds: float | None = None,
    on_try: Callable[[Any], object] = lambda hypothesis: None,
) -> Diagnosis:
    """Find out which rule an optimizer follows, with which switches and hyper-parameters, and to how many ULPs.

    Parameters
    ----------
    step : callable, optimizer, Rule or Trajectory
        A function ``step(params, grads) -> params``, which may keep its state in a closure, and may write `params` and
        return None; a fresh ``torch.optim.Optimizer`` or `Optimizer`, of which a deep copy runs; an optax
        transformation; a `Rule`; or a recorded `Trajectory`.
    params : tree of arrays, optional
        The initial parameters, for a function, a transformation or a rule: real arrays of its library, which are
        copied. By default four NumPy arrays of float64, or JAX arrays for optax. Small arrays are enough, and the time
        grows with their size. Omit it for optimizers, which have parameters of their own.
    grads : sequence of trees, optional
        The gradients of each step. By default they are generated: elements span many decades, and signs, sizes and
        norms vary.
    known : dict of str to float, optional
        Known hyper-parameters, by the names of this package's fields, such as ``{"lr": 0.1, "beta1": 0.9}``. PyTorch's
        optimizers and those of this package state theirs. If nothing fits with them, the search goes on without them.
    steps : int, default 12
        The number of steps, if `grads` is not given.
    depth : int, default 3
        The maximum number of changes to a plain rule.
    seconds : float, optional
        The time limit of the search, at least 0, checked between two hypotheses. The result is then the nearest rule so
        far, and `Diagnosis.complete` is False. By default there is no limit.
    on_try : callable
        Called with each hypothesis that is tried, to show progress.

    Returns
    -------
    Diagnosis
        The result. Print it to read it as text.

    Raises
    ------
    TypeError, ValueError
        If the arguments cannot be used: complex parameters, gradients of other shapes, a function that returns
        other shapes or dtypes, an optimizer that has made steps, a name in `known` that no rule has.
    ImportError
        If SciPy is not installed, and hyper-parameters are not known.

    Notes
    -----
    Rules, their switches and common mistakes are simulated in float64, from the optimizer's own parameters in each
    step, and their numbers are fitted. Of those that fit, the result is the one with the fewest changes, and has the
    others' names. Settings that do not matter for these gradients cannot be found.

    Examples
    --------
    >>> from arrayopt.testing import diagnose
    >>> found = diagnose(lambda params, grads: {k: p - 0.1 * grads[k] for k, p in params.items()})
    >>> found.rule
    SGD(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0)
    """
    given, who = _known(known), "diagnose"
    depth = whole("diagnose: `depth`", depth)
    if seconds is not None and not (is_number(seconds) and seconds >= 0):
        raise ValueError(f"diagnose: `seconds` must be a number of at least 0; got {seconds!r}")
    subject = None if isinstance(step, Trajectory) else as_subject(step, params, who)
    seen = Observed(step if subject is None else run(subject, grads, whole("diagnose: `steps`", steps, first=1), who))
    if subject is not None and subject.repeatable:
        one = Observed(run(as_subject(step, params, who), seen.trajectory.grads[:1], 1, who))
        same = one.where(one.distance(seen.after[:1]) <= one.by_dtype(LIMITS))
        if same != seen.names:
            odd = ", ".join(name for name in seen.names if name not in same)
            return no_rule(seen, f"two runs of the first step differ in {odd}")
    given, watch = {**({} if subject is None else subject.known), **given}, Watch(on_try, seconds)
    found = Examination(seen, given, given, watch).run(depth)
    if found.name and given and not found.explained and found.error >= LOWER and not watch.expired:
        other = Examination(seen, {}, given, watch).run(depth)
        found = other if other.explained or other.error < found.error else found
    return replace(found, complete=not watch.stopped)


def record(
    path: Any, step: Any, params: Any = None, grads: Sequence[Any] | None = None, *, steps: int = STEPS
) -> Trajectory:
    """Run an optimizer, and write its steps to a file for `check`.

    Parameters
    ----------
    path : path
        The file, in JSON. Numbers are written without rounding.
    step, params, grads, steps
        As in `diagnose`.

    Returns
    -------
    Trajectory
        The recorded steps.

    Raises
    ------
    TypeError, ValueError
        As `diagnose`.
    OSError
        If the file cannot be written.
    """
    made = run(as_subject(step, params, "record"), grads, whole("record: `steps`", steps, first=1), "record")
    made.save(path)
    return made


def check(path: Any, step: Any, params: Any = None, *, max_ulp: float | None = None) -> Trajectory:
    """Assert that an optimizer repeats a recorded run, from the same parameters and with the same gradients.

    Parameters
    ----------
    path : path
        A file that `record` has written.
    step, params
        As in `diagnose`. The values of the parameters come from the file, and their library is that of `params`.
    max_ulp : float, optional
        The largest difference that is allowed, in ULPs of the update. By default 64, and 4 in half precision.

    Returns
    -------
    Trajectory
        The steps of the optimizer.

    Raises
    ------
    AssertionError
        If the optimizer differs. The message has the first such step, and the tensor and element.
    TypeError, ValueError
        As `diagnose`; or if the file is not a recording, or has other tensors.
    """
    if max_ulp is not None and (not is_number(max_ulp) or not max_ulp >= 0):
        raise ValueError(f"check: `max_ulp` must be a number of at least 0; got {max_ulp!r}")
    kept = Trajectory.load(path)
    if params is None:
        wide = [name for name, dtype in kept.dtypes.items() if dtype != "bfloat16"]
        first = {name: kept.params[0][name].astype(kept.dtypes[name]) for name in wide}
        owner = hasattr(step, "param_groups") or hasattr(step, "step_count")
        params = None if owner or len(first) < len(kept.names) else first
    made = run(as_subject(step, params, "check"), kept.grads, kept.steps, "check", kept.params[0])
    seen, got = Observed(kept), Observed(made).after
    distances = seen.distance(got)
    limits = seen.by_dtype(CHECKED if max_ulp is None else dict.fromkeys(CHECKED, max_ulp))
    where = seen.first_difference(distances, distances > limits, (seen.after, got))
    if where is not None:
        limit = limits[seen.parts[where.tensor]][0]
        raise AssertionError(f"{made.subject} does not match {str(path)!r}: {where}; the limit is {limit:g}")
    return made


def _known(known: Any) -> dict[str, float]:
    if known is None:
        return {}
    if not isinstance(known, Mapping) or not all(isinstance(k, str) and is_number(x) for k, x in known.items()):
        raise TypeError(f"diagnose: `known` must be a dict of names and numbers; got {known!r}")
    wrong = [name for name in known if name not in hyper_names()]
    if wrong:
        raise ValueError(unknown("diagnose: `known`", hyper_names(), wrong[0], {}))
    return {name: float(x) for name, x in known.items()}


def run(
    subject: Subject, grads: Sequence[Any] | None, steps: int, who: str, start: Mapping[str, Values] | None = None
) -> Trajectory:
    """Run a subject, from the values in `start` if given, and return its trajectory.

    Raise TypeError or ValueError if gradients do not fit, or the subject returns anything but its parameters.
    """
    now = dict(subject.params)
    shapes, dtypes = {name: tuple(x.shape) for name, x in now.items()}, {k: dtype_name(x) for k, x in now.items()}
    for name, x in dtypes.items():
        if x in REAL:
            raise TypeError(f"{who}: parameters must be real; got {x} at {name!r}")
    if start is not None:
        recorded = {name: x.shape for name, x in start.items()}
        if shapes != recorded:
            numbered = list(map(str, range(len(shapes))))  # as tensors without names are
            unnamed = [*shapes] == numbered and [*shapes.values()] == [*recorded.values()]
            hint = "; a PyTorch optimizer of `model.named_parameters()` has names" if unnamed else ""
            raise ValueError(f"{who}: the parameters must be those that were recorded, {recorded}; got {shapes}{hint}")
        for name, x in now.items():
            now[name] = _like(x, start[name])
            if array_api_compat.is_torch_array(x):  # PyTorch's optimizers own their parameters
                detached(x)[...] = now[name]
                now[name] = x
    params, given = [each([now], to_numpy)[0]], []
    for s, tree in enumerate(gradients(shapes, dtypes, steps) if grads is None else grads):
        made = _gradients(who, s, now, tree)
        given += each([made], to_numpy)
        try:
            now = dict(subject.step(now, made))
        except Exception as error:
            error.add_note(f"{who}: raised by {subject.name} in step {s}")
            raise
        params += each([now], to_numpy)
    if not given:
        raise ValueError(f"{who}: `grads` must hold the gradients of at least one step; got none")
    return Trajectory(dtypes, params, given, subject.name)


def _gradients(who: str, step: int, now: Mapping[str, Array], tree: Any) -> dict[str, Array | None]:
    """Return the gradients of one step as new arrays of the parameters' library and dtype."""
    if isinstance(tree, Mapping) and set(tree) == set(now) and all(isinstance(x, np.ndarray) for x in tree.values()):
        odd = [f"{tuple(x.shape)} at {n!r}" for n, x in tree.items() if tuple(x.shape) != tuple(now[n].shape)]
        if odd:
            raise ValueError(f"{who}: `grads[{step}]` must have the shapes of the parameters; got {', '.join(odd)}")
        return {name: _like(x, tree[name]) for name, x in now.items()}
    matched = match_grads(f"{who}: grads[{step}]", list(now.items()), tree, by_position=True)
    return {name: None if g is None else like(now[name], g) for name, g in matched.items()}


def _like(x: Array, values: Values) -> Array:
    """Return values as an array with the library, dtype and device of `x`."""
    xp, device = place(x)
    return xp.asarray(np.array(values), dtype=x.dtype, device=device)
