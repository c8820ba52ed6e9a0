"""Run one rule on several backends, and compare each step with the reference, which is `arrayopt.update`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from arrayopt.arrays import Array, array_namespace, detached, dtype_name, like, to_host
from arrayopt.codecs import PAIR
from arrayopt.hyper import evaluate, is_number, whole
from arrayopt.libraries import UnavailableError, library_name, to_numpy
from arrayopt.optimizer import Optimizer
from arrayopt.params.given import named_params
from arrayopt.params.grads import match_grads
from arrayopt.params.trees import flatten, rebuild
from arrayopt.rules.base import Rule
from arrayopt.state.quantized import narrowed, scale_of
from arrayopt.state.verdict import CLIP_NORM
from arrayopt.testing.backends import Backend, Functional, choose, start
from arrayopt.testing.ulps import Scale, ulps

LIMITS = {"float16": 4.0, "bfloat16": 4.0, "float32": 64.0, "float64": 64.0, "complex64": 64.0, "complex128": 64.0}
"""The largest difference that passes by default, in ULPs, for each dtype of parameters.

The order of sums and fused multiply-adds have made differences of up to 36 in 20 steps of float32 and float64. Half
precision is computed in float32 and rounded, so nearly all elements are the same. An element that is rounded the other
way differs by one ULP, and the difference may persist.

If state is stored in 8 bits, a number near the middle of two codes may be rounded to either. So codes may differ by
`NEAR`, and each step starts from the reference's codes.
"""

NEAR = 2
"""The largest difference between the codes of two runs after a step from the same state."""


@dataclass(frozen=True)
class Difference:
    """The largest difference of a run from the reference.

    Parameters
    ----------
    ulps : float
        The difference, in units in the last place of the update; infinity if only one of the values is finite.
    tensor, index : str, tuple of int
        The tensor's name, and the element.
    step : int
        The step after which the difference was found, counted from 0.
    expected, got : float or complex
        The element in the reference and in the run.
    """

    ulps: float
    tensor: str
    index: tuple[int, ...]
    step: int
    expected: complex
    got: complex

    def __str__(self) -> str:
        index = f"[{', '.join(map(str, self.index))}]"
        return f"{self.ulps:.4g} ULPs at {self.tensor!r} {index}, step {self.step}: {self.got!r} for {self.expected!r}"


@dataclass(frozen=True)
class Outcome:
    """The result of one backend: the largest difference, or why there is none.

    Parameters
    ----------
    difference : Difference, optional
        The largest difference; None if the backend was not run, or there is an error.
    skipped : str
        Why the backend cannot run this rule on these parameters; empty if it can.
    error : str
        The error that a step raised, or the slot whose codes differ too much; empty if there is none.
    """

    difference: Difference | None = None
    skipped: str = ""
    error: str = ""

    def passes(self, max_ulp: float) -> bool:
        """Whether there is no error and no difference above `max_ulp`."""
        return not self.error and (self.difference is None or self.difference.ulps <= max_ulp)


def assert_equivalent(
    rule: Rule,
    params: Any,
    grads_fn: Callable[[Any, int], Any],
    *,
    engines: Iterable[str] | None = None,
    steps: int = 10,
    max_ulp: float | None = None,
    **options: Any,
) -> dict[str, Outcome]:
    """Assert that a rule gives the same parameters on several backends as `arrayopt.update`.

    Parameters
    ----------
    rule : Rule
        The update rule, also one of your own.
    params : array or tree of arrays
        The initial parameters, in any library. The arrays are copied.
    grads_fn : callable
        ``grads_fn(params, step)`` returns the gradients of a step, counted from 0, as a tree like the parameters or by
        tensor name. It gets the reference's parameters, in the library of `params`; all backends get the same
        gradients.
    engines : iterable of str, optional
        The backends to compare: ``"numba"``, ``"torch"``, ``"numpy:numba"``, ...; see `arrayopt.testing`. By default
        every backend that is installed.
    steps : int, default 10
        The number of steps, at least 1.
    max_ulp : float, optional
        The largest difference that passes, in units in the last place of the update. By default 64, and 4 for float16
        and bfloat16.
    **options
        Options of `Optimizer`: ``groups``, ``clip_norm``.

    Returns
    -------
    dict of str to Outcome
        For each backend the difference, or why it could not run, for example because the rule cannot be traced.

    Raises
    ------
    AssertionError
        If a backend raises an error, or differs by more. The message has tensor, index, step and both values.
    UnavailableError
        If a named backend is not available.
    ValueError, TypeError
        If an argument is invalid, no backend can run, or the rule writes to its inputs.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> from arrayopt.testing import assert_equivalent
    >>> found = assert_equivalent(ao.LAMB(), {"w": np.ones(3)}, lambda params, step: params, engines=["numpy:numpy"])
    >>> found["numpy:numpy"].difference.ulps < 4
    True
    """
    limits = [LIMITS[dtype_name(x)] for _, x in named_params(params, "assert_equivalent")]
    if max_ulp is not None and not is_number(max_ulp):
        raise TypeError(f"assert_equivalent: `max_ulp` must be a number; got {max_ulp!r}")
    if max_ulp is not None and not max_ulp >= 0:
        raise ValueError(f"assert_equivalent: `max_ulp` must be at least 0; got {max_ulp}")
    limit = min(limits) if max_ulp is None else max_ulp
    found = compare(rule, params, grads_fn, engines=engines, steps=steps, **options)
    if all(outcome.skipped for outcome in found.values()):
        reasons = "; ".join(f"{name}: {outcome.skipped}" for name, outcome in found.items())
        raise ValueError(f"assert_equivalent: there is nothing to compare {type(rule).__name__} with: {reasons}")
    wrong = {name: outcome for name, outcome in found.items() if not outcome.passes(limit)}
    if wrong:
        lines = [f"  {name}: {outcome.error or outcome.difference}" for name, outcome in wrong.items()]
        reference = f"what arrayopt.update computes with {library_name(named_params(params)[0][1])}"
        raise AssertionError("\n".join([f"{rule!r} is not {reference} within {limit:g} ULPs of the update:", *lines]))
    return found


def compare(
    rule: Rule,
    params: Any,
    grads_fn: Callable[[Any, int], Any],
    *,
    engines: Iterable[str] | None = None,
    backends: Iterable[Backend] | None = None,
    steps: int = 10,
    **options: Any,
) -> dict[str, Outcome]:
    """Return the largest difference of each backend from the reference; see `assert_equivalent`.

    Parameters
    ----------
    rule, params, grads_fn, engines, steps, **options
        As in `assert_equivalent`.
    backends : iterable of Backend, optional
        Backends from `choose`, instead of `engines`.

    Returns
    -------
    dict of str to Outcome
        The outcome of each backend.

    Raises
    ------
    UnavailableError, ValueError, TypeError
        As `assert_equivalent`.
    """
    steps = whole("compare: `steps`", steps, first=1)
    if not callable(grads_fn):
        raise TypeError(f"compare: `grads_fn` must be a function; got {grads_fn!r}")
    named = named_params(params, "compare")
    checked = Optimizer(_copies(params), rule, engine="array_api", **options)
    reference = Functional(rule, checked.params, options.get("groups"))
    scales = {name: Scale(to_numpy(x)) for name, x in named}
    runs, found = {}, {}
    for backend in choose(engines) if backends is None else backends:
        try:
            runs[backend] = _Run(backend, rule, params, options, scales)
        except (UnavailableError, TypeError, ValueError) as error:
            found[backend.name] = Outcome(skipped=_line(error))
    for step in range(steps):
        now = reference.params
        grads = match_grads("compare", named, _copies(grads_fn(now, step)))
        limit = evaluate("Optimizer: `clip_norm`", checked.clip_norm, step, CLIP_NORM)
        now = _values(reference.step(grads, clip_norm=limit))
        for name, scale in scales.items():
            scale.follow(now[name])
        codes = _codes(reference.state)
        for run in runs.values():
            run.step(step, grads, now, codes)
    return {b.name: runs[b].outcome for b in runs} | found


def _codes(state: Mapping[str, Any]) -> dict[str, dict[str, Array]]:
    """The slots of each tensor that are stored in 8 bits, and their scales."""
    found: dict[str, dict[str, Array]] = {}
    for name, slots in state.items():
        coded = narrowed(slots)
        found[name] = {slot: slots[slot] for slot in (*coded, *map(scale_of, coded))}
    return found


class _Run:
    """The run of one backend, and its largest difference from the reference so far."""

    def __init__(
        self, backend: Backend, rule: Rule, params: Any, options: Mapping[str, Any], scales: Mapping[str, Scale]
    ) -> None:
        named = dict(named_params(params))
        self.array, self.scales, self.outcome = backend.array, scales, Outcome()
        self.native = {library_name(x) for x in named.values()} == {backend.library.name}
        self.dtypes = {name: dtype_name(x) for name, x in named.items()}
        self.run = start(backend, rule, _copies(params) if self.native else self.own(named), options)

    def own(self, named: Mapping[str, Array | None]) -> Any:
        """Copy arrays to the backend's library."""
        if self.native:
            return _copies(named)
        return {name: x if x is None else self.array(to_numpy(x), dtype_name(x)) for name, x in named.items()}

    def step(
        self, step: int, grads: Any, expected: Mapping[str, Any], codes: Mapping[str, Mapping[str, Array]]
    ) -> None:
        """Make a step, compare the result with the reference, and replace 8-bit state by the reference's."""
        if self.outcome.error or self.outcome.skipped:
            return
        given = self.own(grads)
        try:
            got = _values(self.run.step(given))
        except Exception as error:  # a user's rule may raise anything
            untraceable = any(kind.__name__ == "JAXTypeError" for kind in type(error).__mro__)
            said = f"{type(error).__name__}: {_line(error)}"
            self.outcome = Outcome(skipped=f"cannot be traced: {said}") if untraceable else Outcome(error=said)
            return
        for name, dtype in self.dtypes.items():
            distance = ulps(expected[name], got[name], self.scales[name].values, dtype)
            worst = self.outcome.difference
            if distance.size and (worst is None or distance.max() > worst.ulps):
                i = np.unravel_index(np.argmax(distance), distance.shape)
                pair = expected[name][i].item(), got[name][i].item()
                self.outcome = Outcome(Difference(float(distance[i]), name, tuple(map(int, i)), step, *pair))
        for name, slots in codes.items():
            own: Any = self.run.state[name]
            for slot, x in slots.items():
                apart = np.abs(to_numpy(x) - to_numpy(own[slot])).max(initial=0) if scale_of(slot) in slots else 0
                if dtype_name(x) != PAIR and apart > NEAR:
                    said = f"slot {slot!r} of {name!r} is {apart:.0f} codes off after step {step}"
                    self.outcome = Outcome(error=said)
                    return
                own[slot] = like(own[slot], to_host(x))


def _copies(tree: Any) -> Any:
    """Return the tree with copies of its arrays."""
    if isinstance(tree, Iterator):
        tree = list(tree)
    return rebuild(tree, lambda x: array_namespace(x).asarray(detached(x), copy=True) if hasattr(x, "shape") else x)


def _values(params: Any) -> dict[str, Any]:
    """The parameters by name, as NumPy arrays."""
    return {name: to_numpy(x) for name, x in flatten(params) if x is not None}


def _line(error: Exception) -> str:
    """The message of an error, on one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]
