"""The interface of engines. An `Engine` gets a bucket and an `Asked`, checks and allocates
everything in `prepare`, and returns a function that makes the step. `step/` calls it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Protocol

from arrayopt.arrays import Array, Grads
from arrayopt.engines.bucket import Bucket
from arrayopt.rules.names import VALUE
from arrayopt.state.loss_scale import LossScale
from arrayopt.state.run import Holder
from arrayopt.state.verdict import Verdict

Report = dict[str, Array]
"""The values that a step reports for one tensor, by name."""


class NoRemedyError(ValueError):
    """An engine cannot run a bucket, for a reason that the user cannot change."""


class CompilationError(ValueError):
    """An engine cannot compile its code on this machine; another engine may do instead."""


class Partials(NamedTuple):
    """Partial results, of which each rank has computed a part."""

    pieces: tuple[Any, ...]
    """The part of each rank, in this rank's memory; on a device, consecutive parts of one array."""
    section: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Opens a section for work on them: on their device, in the stream that computes them."""


Stops = Iterator[list[Partials]]
"""A running step; it yields the partial results that other ranks must fill in, or [] to wait."""

MakeStep = Callable[[dict[str, Report]], Stops]
"""Makes a prepared step; see `Engine.prepare`."""

Swap = Callable[[list[Partials]], Callable[[], None]]
"""Begins to receive other ranks' partial results; the function that it returns waits for them."""


def interleaved(several: Iterable[Stops]) -> Stops:
    """Run several steps alternately to their ends; yield what all of them need at once."""
    running = list(several)
    while running:
        wanted: list[Partials] = []
        unfinished = []
        for step in running:
            partials = next(step, None)
            if partials is not None:
                wanted += partials
                unfinished.append(step)
        running = unfinished
        if running:
            yield wanted


class Asked(NamedTuple):
    """The arguments of a step, for an engine."""

    grads: Grads
    """The gradient of each tensor, or layer, of the bucket; None for one that is not updated."""
    hypers: Sequence[dict[str, Any]]
    """The values of hyper-parameters at this step, for each group of the bucket."""
    clip: Array | None = None
    """The factor by which all gradients are multiplied first."""
    stats: bool = False
    """Whether to report norms and the rule's own numbers."""
    skip: Array | None = None
    """A condition on the device, computed by `judge`: whether the step must change nothing."""
    updates: bool = True
    """Whether to update parameters and slots; else the step only reports."""

    @property
    def valued(self) -> bool:
        """Whether the step has a value, which some rules do not need; see `Rule.value_optional`."""
        return self.hypers[0].get(VALUE, 0.0) is not None


class Engine(ABC):
    """Runs rules over tensors. `prepare` raises all errors and writes nothing, so that a step that
    fails has changed nothing.

    A subclass must define the abstract methods and properties.
    """

    counts: ClassVar[bool] = False
    """Whether the engine counts updates itself, as engines on devices do."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The engine's name in ``explain()`` and errors, such as ``name = "mine"``."""

    @abstractmethod
    def check(self, bucket: Bucket) -> None:
        """Raise ValueError or `TraceError`, with the reason, if it cannot run the bucket."""

    @abstractmethod
    def prepare(self, bucket: Bucket, asked: Asked, meetings: Sequence[Any] = ()) -> MakeStep:
        """Prepare a step, and raise all its errors.

        Parameters
        ----------
        bucket : Bucket
            The tensors.
        asked : Asked
            The arguments of the step.
        meetings : sequence of Meeting
            If the rule uses totals, the meeting for the update; with reports, that for the report
            comes first. The engine joins each, passes numbers to it, and yields until the totals
            are known.

        Returns
        -------
        callable
            Called once, with a dict for the reports by tensor name, it makes the step: it updates
            arrays, slots and counts. Later steps do not overwrite the reported arrays. It yields
            whenever other ranks that share tensors, or other buckets, must run first.
        """

    def advance(self, bucket: Bucket, hypers: Sequence[dict[str, Any]]) -> None:  # noqa: B027
        """Write the hyper-parameters of the next step to where a captured step reads them."""

    def capturing(self, bucket: Bucket) -> bool:
        """Whether launches are now recorded in a CUDA graph."""
        return False

    def judge(self, buckets: Sequence[Bucket]) -> "Judge | None":
        """Return the `Judge` for these buckets on their device; None if the host decides."""
        return None

    @abstractmethod
    def explain(self, bucket: Bucket) -> str:
        """Describe in a few lines how the engine updates these tensors."""


class Criteria(NamedTuple):
    """By what a device judges a step; see `arrayopt.state.verdict.judge`."""

    scaling: LossScale | None
    """How the loss scale changes; None if it does not."""
    scale: str | None
    """The scale by which gradients are multiplied: ``"scale"``, which is on the device, or
    ``"given_scale"``; None if they are not scaled.
    """
    limit: bool
    """Whether the global norm is clipped."""
    check: bool
    """Whether a step is skipped if a gradient is not finite."""


class Judge(Holder, Protocol):
    """Decides on a device whether and how a step is made; it has the loss scale (`Run.give_to`)."""

    def send(self, scale: float | None, limit: float | None) -> None:
        """Write the host's numbers for the next step to where a captured step reads them."""

    def prepare(self, asked: Sequence[tuple[Bucket, Asked]]) -> Any:
        """Run the parts of a call that may fail, before anything is written."""

    def __call__(
        self,
        asked: Sequence[tuple[Bucket, Asked]],
        criteria: Criteria,
        swap: Swap | None = None,
        alone: bool = False,
    ) -> Verdict:
        """Compute the verdict on a step from its gradients.

        Parameters
        ----------
        asked : sequence of (Bucket, Asked)
            Buckets whose rules measure the gradients; see `arrayopt.step.norms.Measures`.
        criteria : Criteria
            By what to judge.
        swap : callable, optional
            With several ranks, begins to receive the partial results of the others.
        alone : bool
            Whether a layer of a stacked tensor may be skipped without the others.
        """

    def each_norm(self) -> dict[str, Any]:
        """Return the norms of the last step's gradients by tensor name."""

    def commit(self) -> None:
        """Make the loss scale and global norm of this step the current ones."""
