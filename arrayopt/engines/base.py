"""What an engine is: something that runs a rule's update over a bucket of tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Protocol

from arrayopt.arrays import Array, Grads
from arrayopt.engines.bucket import Bucket
from arrayopt.rules.names import VALUE
from arrayopt.state.loss_scale import LossScale
from arrayopt.state.run import Holder
from arrayopt.state.tensors import Left
from arrayopt.state.verdict import Verdict

Report = dict[str, Array]
"""What a step reports of one tensor."""


class NoRemedyError(ValueError):
    """An engine cannot run a bucket, and its user can do nothing about that."""


class CompilationError(ValueError):
    """An engine cannot compile here what it is to run; another engine may serve."""


class Partials(NamedTuple):
    """Partial results in which each rank has filled its own piece."""

    pieces: tuple[Any, ...]
    """What each rank fills in, in this rank's memory; on a device, together one stretch of it."""
    section: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A section in which to work on them: on their device, in the stream that has filled them."""


Stops = Iterator[list[Partials]]
"""A step that runs, with stops where ranks or other buckets have something to do."""

MakeStep = Callable[[dict[str, Report]], Stops]
"""Makes a step that is ready; see `Engine.prepare`."""

Swap = Callable[[list[Partials]], Callable[[], None]]
"""Begins to fill in partial results of other ranks; what it returns ends it."""


def interleaved(several: Iterable[Stops]) -> Stops:
    """Run several to where each wants partial results, and yield those together, to the end."""
    going = list(several)
    while going:
        wanted: list[Partials] = []
        still = []
        for one in going:
            found = next(one, None)
            if found is not None:
                wanted += found
                still.append(one)
        going = still
        if going:
            yield wanted


class Asked(NamedTuple):
    """What a step asks of an engine."""

    grads: Grads
    """A gradient for each tensor of the bucket; None leaves it out."""
    hypers: Sequence[dict[str, Any]]
    """For each group of the bucket its hyper-parameters' values at this step."""
    clip: Array | None = None
    """What to multiply all gradients by first."""
    stats: bool = False
    """Whether norms and what the rule reports are wanted."""
    skip: Array | None = None
    """Whether to change nothing after all, which only the device knows: what `judge` has said."""
    left: Left | None = None
    """Layers of stacked tensors to leave as they are; as tensors these have no gradient."""

    @property
    def valued(self) -> bool:
        """Whether there is a value for rules that do without; see `Rule.value_optional`."""
        return self.hypers[0].get(VALUE, 0.0) is not None


class Engine(ABC):
    """Runs rules over tensors. It writes nothing before `launch`, so that a step that fails has
    changed nothing.

    A subclass must have what is abstract here: Python refuses to create an engine that lacks any of
    it.
    """

    counts: ClassVar[bool] = False
    """Whether the engine counts the updates itself, as on a device."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The engine's name in ``explain()`` and errors, such as ``name = "mine"``."""

    @abstractmethod
    def check(self, bucket: Bucket) -> None:
        """Raise ValueError or `TraceError`, saying why, if the bucket is not for this engine."""

    @abstractmethod
    def prepare(self, bucket: Bucket, asked: Asked, meetings: Sequence[Any] = ()) -> MakeStep:
        """Make a step ready, raising whatever there is to raise.

        Parameters
        ----------
        bucket : Bucket
            The tensors.
        asked : Asked
            What is asked for.
        meetings : sequence of Meeting
            Where they meet those of other buckets, if their rule uses totals: for the update; or
            first for what reports of it, and then for the update. The engine joins each, tells
            numbers, and stops where it waits.

        Returns
        -------
        callable
            Called once, with where reports go, it makes the step: it updates the tensors (arrays,
            slots and counts), and reports by tensor name, in arrays that later steps leave alone.
            It stops where ranks that share tensors, or other buckets, have something to do.
        """

    def advance(self, bucket: Bucket, hypers: Sequence[dict[str, Any]]) -> None:  # noqa: B027
        """Have the hyper-parameters of the next step where a captured step will look for them."""

    def capturing(self, bucket: Bucket) -> bool:
        """Whether what is launched now goes into a CUDA graph."""
        return False

    def judge(self, buckets: Sequence[Bucket]) -> "Judge | None":
        """What decides for all these buckets on their device; None where the host does."""
        return None

    @abstractmethod
    def explain(self, bucket: Bucket) -> str:
        """Say in a few lines how these tensors' updates are run."""


class Judge(Holder, Protocol):
    """Decides on a device what becomes of each step, with the loss scale; see `Run.give_to`."""

    def send(self, scale: float | None, limit: float | None) -> None:
        """Have the host's numbers for the next step where a captured step will look for them."""

    def prepare(self, asked: Sequence[tuple[Bucket, Asked]]) -> Any:
        """Let what may fail in a call do so, before anything is done."""

    def __call__(
        self,
        asked: Sequence[tuple[Bucket, Asked]],
        scaling: LossScale | None,
        scale: str | None,
        limit: bool,
        check: bool,
        swap: Swap | None = None,
        alone: bool = False,
    ) -> Verdict:
        """Say what these gradients mean for the step.

        Parameters
        ----------
        asked : sequence of (Bucket, Asked)
            What measures the gradients; see `arrayopt.step.norms.Measures`.
        scaling, scale, limit, check
            As for `arrayopt.engines.cuda.emit_judge.emit_judge`.
        swap : callable, optional
            Where there are several ranks: begins to fill in partial results of others, and returns
            what ends it.
        alone : bool
            Whether a layer of a stacked tensor is skipped alone.
        """

    def each_norm(self) -> dict[str, Any]:
        """The norms of the last step's gradients by tensor name."""

    def commit(self) -> None:
        """The step is made: its loss scale and global norm hold from now on."""
