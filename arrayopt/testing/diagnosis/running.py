"""Making the steps of a subject, and keeping what came of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import REAL, Array, detached, dtype_name, like, place
from arrayopt.libraries import to_numpy
from arrayopt.params.grads import match_grads
from arrayopt.testing.diagnosis import probe
from arrayopt.testing.diagnosis.subjects import Subject
from arrayopt.testing.diagnosis.trajectory import Trajectory, Values

__all__ = ["run"]


def run(
    subject: Subject,
    grads: Sequence[Any] | None,
    steps: int,
    who: str,
    start: Mapping[str, Values] | None = None,
) -> Trajectory:
    """Make steps, and keep what came of them; from `start`, if that is given.

    Raises
    ------
    TypeError, ValueError
        If gradients do not fit, or the subject returns something else than its parameters.
    """
    now = dict(subject.params)
    shapes = {name: tuple(x.shape) for name, x in now.items()}
    if start is not None:
        _check_start(shapes, {name: tuple(x.shape) for name, x in start.items()}, who)
        for name, x in now.items():
            value = _like(x, start[name])
            if array_api_compat.is_torch_array(x):  # PyTorch's optimizers own their parameters
                detached(x)[...] = value
            else:
                now[name] = value
    dtypes = {name: dtype_name(x) for name, x in now.items()}
    for name, x in dtypes.items():
        if x in REAL:
            raise TypeError(f"{who}: parameters must be real; got {x} at {name!r}")
    if grads is None:
        grads = probe.gradients(shapes, dtypes, steps)
    params, given = [{name: to_numpy(x) for name, x in now.items()}], []
    for s, tree in enumerate(grads):
        made = _gradients(who, s, now, tree)
        given.append({name: None if g is None else to_numpy(g) for name, g in made.items()})
        try:
            now = dict(subject.step(now, made))
        except Exception as error:
            error.add_note(f"{who}: raised by {subject.name} in step {s}")
            raise
        params.append({name: to_numpy(x) for name, x in now.items()})
    if not given:
        raise ValueError(f"{who}: `grads` must hold the gradients of at least one step; got none")
    return Trajectory(dtypes, params, given, subject.name)


def _gradients(who: str, step: int, now: Mapping[str, Array], tree: Any) -> dict[str, Array | None]:
    """The gradients of one step, as new arrays of the parameters' library and dtype."""
    if isinstance(tree, Mapping) and set(tree) == set(now) and all(isinstance(x, np.ndarray) for x in tree.values()):
        odd = [f"{tuple(x.shape)} at {n!r}" for n, x in tree.items() if tuple(x.shape) != tuple(now[n].shape)]
        if odd:
            raise ValueError(f"{who}: `grads[{step}]` must have the shapes of the parameters; got {', '.join(odd)}")
        return {name: _like(x, tree[name]) for name, x in now.items()}
    matched = match_grads(f"{who}: grads[{step}]", list(now.items()), tree, by_position=True)
    return {name: None if g is None else like(now[name], g) for name, g in matched.items()}


def _check_start(here: Mapping[str, Any], there: Mapping[str, Any], who: str) -> None:
    """Raise ValueError where the shapes of parameters are not those of a trajectory."""
    if here != there:
        counted = list(here) == list(map(str, range(len(here)))) and list(here.values()) == list(there.values())
        hint = "; a PyTorch optimizer of `model.named_parameters()` has names" if counted else ""
        raise ValueError(f"{who}: the parameters must be those that were recorded, {there}; got {here}{hint}")


def _like(x: Array, values: Values) -> Array:
    """The values as an array of the library, dtype and device of another."""
    xp, device = place(x)
    return xp.asarray(np.array(values), dtype=x.dtype, device=device)
