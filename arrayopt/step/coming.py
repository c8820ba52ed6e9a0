"""Data of a step: `Coming` before its gradients, `Begun` before all ranks agree to make it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from arrayopt.arrays import Array, Grads, array_namespace, detached, dtype_name, is_array, library
from arrayopt.engines.bucket import Bucket
from arrayopt.foreign import counted
from arrayopt.params.groups import labelled
from arrayopt.params.located import LocatedGrads, dtypes
from arrayopt.params.parameters import Parameters
from arrayopt.rules.base import Rule
from arrayopt.rules.names import VALUE
from arrayopt.rules.one_unknown import check_alike
from arrayopt.state.run import Run
from arrayopt.state.verdict import Verdict
from arrayopt.step.accumulate import Adding
from arrayopt.step.judging import Known
from arrayopt.step.ready import Ready


class Coming(NamedTuple):
    """The host's data of a step before its gradients, such as the hyper-parameters of each bucket's
    groups. `wait` is whether the step waits for the parameters of other ranks.
    """

    version: int
    step: int
    buckets: list[Bucket]
    hypers: list[list[dict[str, Any]]]
    known: Known
    wait: bool = True

    @property
    def form(self) -> tuple[Any, ...]:
        """The properties that a replay of a captured step cannot change."""
        known = self.known
        given = known.scale is None, known.limit is None, known.check, known.verdict is None
        return (self.version, *given, self.valued)

    @property
    def valued(self) -> bool:
        """Whether each rule that uses the function's value has one in this step."""
        return all(own[0].get(VALUE, 0.0) is not None for own in self.hypers)


@dataclass(slots=True)
class Begun:
    """A step that is prepared, before all ranks agree to make it."""

    given: list[Array | None]
    """The gradients of this call."""
    grads: list[Array | None]
    """The gradients of the step: those of this call, or the means of all micro-steps."""
    rooms: list[Array | None]
    """Arrays for the sums of gradients over ranks; or the gradients, if they are not added up."""
    adding: Adding | None = None
    """With `accumulate`, the additions of this micro-step."""
    ready: Ready | None = None
    """The launches of the step, if they do not depend on the values of gradients."""
    reduced: bool = False
    """Whether `rooms` already has the sums of gradients over ranks."""


def form_of(coming: Coming, grads: Grads, verdict: Verdict) -> tuple[Any, ...] | None:
    """Return a key; the same `Ready` can make steps with equal keys. None if it makes only one."""
    if not isinstance(grads, LocatedGrads) or grads.dtype is None or grads.locations is None:
        return None
    if not grads.locations.complete:
        return None
    left = [(count, mask.tobytes()) for count, mask in (verdict.left or {}).items()]
    return coming.form, grads.dtype, verdict.factor is None, verdict.skip is False, left


def checked_value(value: Any, buckets: list[Bucket], ranks: int) -> Any:
    """Check the value of a step, and return it as rules get it: a number, or an array."""
    if getattr(value, "ndim", 0) == 1:
        _check_values(value, buckets, ranks)
        return detached(value)
    return detached(value) if ranks == 1 and is_array(value) else float(value)


def numbers_at(buckets: list[Bucket], step: int, value: Any) -> list[list[dict[str, Any]]]:
    """Return the hyper-parameters of each bucket's groups. Those of one line search must agree."""
    hypers = [bucket.numbers(step, value) for bucket in buckets]
    if value is not None:
        settings: list[tuple[Rule, dict[str, Any]]] = []
        for bucket, own in zip(buckets, hypers, strict=True):
            settings += zip([group.rule for group in bucket.groups], own, strict=True)
        check_alike(settings)
    return hypers


def _check_values(values: Array, buckets: list[Bucket], ranks: int) -> None:
    """Raise TypeError unless there can be a value for each layer."""
    who = "Optimizer.step: `value` must be a number, or one number per layer of stacked tensors"
    several = counted(len(values), "value")
    if ranks > 1:
        raise TypeError(f"{who}, and the array does not work over ranks; got {several}")
    for bucket in buckets:
        for tensor in bucket.whole.tensors:
            array, name = tensor.array, tensor.name
            if not bucket.rule.stacked:
                raise TypeError(f"{who}; got {several}, but {name!r} is not stacked")
            if len(array) != len(values):
                raise TypeError(
                    f"{who}; got {several}, but {name!r} has {counted(len(array), 'layer')}"
                )
            if array_namespace(array) is not array_namespace(values):
                raise TypeError(
                    f"{who}; got {library(values)} values, but {name!r} is of {library(array)}"
                )


def said(
    coming: Coming, parameters: Parameters, run: Run, done: int, grads: list[Array | None]
) -> dict[str, Any]:
    """Return the data of a step that must be equal on all ranks.

    `done` is the number of accumulated micro-steps; `grads` is empty if no gradients are known.
    """
    known = coming.known
    kinds, complete = dtypes(grads)
    names, absent = list[str | None](), list[str]()
    if complete and len(kinds) == 1:
        names = [dtype_name(grads[0])]
    else:
        names = [None if g is None else dtype_name(g) for g in grads]
        every = zip(parameters.all, names, strict=bool(grads))
        absent = [x.name for x, kind in every if kind is None]
    scale = run.peek("scale") if known.scale is None else known.scale
    if known.judge is not None and known.scale is None:
        scale = None  # a device decides it, the same on all ranks; reading it would wait
    found: dict[str, Any] = {
        "the number of steps": (run.steps, done),
        "the list of tensors without a gradient": absent,
        "the list of dtypes of gradients": names if len(set(names)) > 1 else names[:1],
        "clip_norm": known.limit,
        "the loss scale": scale,
        "`wait`": coming.wait,
    }
    hypers: dict[int, dict[str, Any]] = {}
    for bucket, own in zip(coming.buckets, coming.hypers, strict=True):
        for group, values in zip(bucket.groups, own, strict=True):
            hypers[id(group)] = values
    for label, group in labelled(parameters.groups):
        for name, value in [*hypers[id(group)].items(), *group.rule.switches]:
            how = " (all-reduce the loss, so that all pass the same)" if name == VALUE else ""
            found[f"`{name}` of group {label}{how}"] = value
    return found
