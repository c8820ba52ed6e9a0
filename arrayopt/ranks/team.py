"""What the ranks of one Optimizer do together: agree, swap partial results, add up gradients, bring parameters home."""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np

from arrayopt.arrays import Array
from arrayopt.engines.interrupts import uninterrupted
from arrayopt.params.groups import Group
from arrayopt.params.replaced import Replaced
from arrayopt.ranks.alone import Alone, Said
from arrayopt.ranks.comm import RankError
from arrayopt.ranks.cuts import divide
from arrayopt.ranks.home import Gather, collect, pieces_of
from arrayopt.ranks.same import checksum, differences, groups_of, plain, texts, unlike
from arrayopt.ranks.settings import Ranks, as_ranks
from arrayopt.ranks.shards import check_parts, shards
from arrayopt.ranks.sums import Sums
from arrayopt.ranks.swaps import Swaps
from arrayopt.state.tensors import Tensor

__all__ = ["Team", "team"]


WISH, CHANGED, CHECKED, HOOKED = 1, 2, 4, 8
"""What a rank says in its vote: that it wants statistics, has other parameters, or compares, or has hooks."""


class Team(Swaps):
    """The ranks of an Optimizer.

    Attributes
    ----------
    torn : str or None
        Why ranks may hold different parameters or state: a step was broken off.
    """

    def __init__(self, ranks: Ranks, engine: str) -> None:
        self._comm, self._ranks, self._engine = ranks.open(), ranks, engine
        self.rank, self.size = self._comm.rank, self._comm.size
        self._sums = Sums(self._comm, mean=ranks.grads == "mean", fast=ranks.reduction == "fast")
        self.sums = ranks.grads != "reduced"
        self.captured = self._comm.on_device and not self.sums
        self._gather: Gather | None = None  # of the last step
        self._first: int | None = None  # the number of the first step
        self._met = (
            False  # whether ranks meet once more after this step, for one has functions to call
        )
        self.replaced = Replaced([])
        self._told: BaseException | None = None  # an error that all ranks know of
        self._inside = 0  # sections of `warned`, one in the other

    # ---- agreement --------------------------------------------------------------------------------------------------

    def agree(
        self,
        what: str,
        said: Said = dict,
        error: BaseException | None = None,
        *,
        wish: bool = False,
        grads: Sequence[Array | None] | None = None,
        step: int = 0,
        after: bool = False,
    ) -> bool:
        if self.torn is not None and what != "Optimizer.load":
            raise RankError(
                f"{what}: {self.torn}; the ranks may hold different numbers: load a checkpoint on all"
            )
        words: dict[str, Any] = {}
        if error is None:
            try:
                words = {"which Optimizer over the communicator": self._comm.number, **said()}
            except BaseException as caught:
                error = caught
        digest = blake2b(plain((what, words)).encode(), digest_size=14).digest()
        flags = (
            wish
            | CHANGED * self._changed(what)
            | CHECKED * self._due(grads, step)
            | HOOKED * self.hooked
        )
        vote = np.frombuffer(bytes([error is not None, flags]) + digest, np.uint8)
        with self._answered(what):
            votes = np.stack(self._comm.allgather(vote, [16] * self.size)())
            flags = int(np.bitwise_or.reduce(votes[:, 1]))
            if votes[:, 0].any() or (votes[:, 2:] != votes[0, 2:]).any():
                self._differ(what, words, error, after=after)
            self._met = bool(flags & HOOKED)
            if flags & (CHANGED | CHECKED):
                self._compare(what, grads if flags & CHECKED else None)
            if what != "Optimizer.load":
                self.replaced.agreed()
            return bool(flags & WISH)

    def _differ(
        self, what: str, words: dict[str, Any], error: BaseException | None, *, after: bool
    ) -> None:
        """Raise what the ranks say that do not agree."""
        mine = {
            "what": what,
            "error": error and f"{type(error).__name__}: {error}",
            "words": texts(words),
        }
        every = [json.loads(x) for x in self._comm.words(json.dumps(mine).encode())]
        self._raise(what, error, every, after=after)
        differing = "; ".join(differences(every))
        self._told = ValueError(
            f"{what}: nothing was changed, for the ranks do not agree: {differing}"
        )
        raise self._told

    def _raise(
        self,
        what: str,
        error: BaseException | None,
        every: list[dict[str, Any]],
        *,
        after: bool = False,
    ) -> None:
        """Raise this rank's own error, or what others have said of theirs."""
        if error is not None:
            self._told = error
            raise error
        done, how = (
            ("the step was made, but", " in a hook after it")
            if after
            else ("nothing was changed, for", "")
        )
        failed = [f"rank {r} failed{how}: {x['error']}" for r, x in enumerate(every) if x["error"]]
        if failed:
            self._told = RankError(f"{what}: {done} {'; '.join(failed)}")
            raise self._told

    def _due(self, grads: Sequence[Array | None] | None, step: int) -> bool:
        """Whether what must be the same bytes is compared in a step; see `Ranks.check`."""
        if grads is None or not self._ranks.check:
            return False
        self._first = step if self._first is None else self._first
        return (step - self._first) % self._ranks.check == 0

    def _changed(self, what: str) -> bool:
        """Whether the user did something to parameters that other ranks must have done, too."""
        marked = (
            [self.replaced.tensors[i] for i in self.replaced.marks]
            if what != "Optimizer.load"
            else []
        )
        return any(groups_of(tensor, self.size) for tensor in marked)

    def _compare(self, what: str, grads: Sequence[Array | None] | None) -> None:
        """Raise where ranks have not done the same to parameters, or have other values; with gradients, of all."""
        tensors = self.replaced.tensors
        marks = [dict(x) for x in self._hear(what, lambda: list(self.replaced.marks.items()))]
        which = sorted(set().union(*marks)) if grads is None else range(len(tensors))
        reduced = [
            (i, g)
            for i, g in enumerate(grads or ())
            if g is not None and not (self.sums and tensors[i].block is None)
        ]

        def sums() -> list[Any]:
            return [
                [(i, checksum(tensors[i].array)) for i in which],
                [(i, checksum(g)) for i, g in reduced],
            ]

        every = self._hear(what, sums)
        wrong = unlike(tensors, marks, *([dict(x[k]) for x in every] for k in range(2)))
        if wrong:
            self._told = ValueError(
                f"{what}: nothing was changed, for the ranks do not agree: {'; '.join(wrong)}"
            )
            raise self._told

    def _hear(self, what: str, call: Callable[[], Any]) -> list[Any]:
        """What each rank finds; an error of one is one of all."""
        found = error = None
        try:
            found = call()
        except BaseException as caught:
            error = caught
        mine = {"error": error and f"{type(error).__name__}: {error}", "found": found}
        every = [json.loads(x) for x in self._comm.words(json.dumps(mine).encode())]
        self._raise(what, error, every)
        return [x["found"] for x in every]

    @contextmanager
    def after(self, what: str) -> Iterator[None]:
        error = None
        self._inside += 1
        try:
            try:
                yield
            except BaseException as caught:
                if (
                    not self._met
                    or self.torn
                    or caught is self._told
                    or isinstance(caught, RankError)
                ):
                    raise
                error = caught
            if self._met:
                with uninterrupted():
                    self.agree(
                        what, lambda: {"the part of the step": "its hooks"}, error, after=True
                    )
        finally:
            self._inside -= 1
            self._told = self._told if self._inside else None

    @contextmanager
    def _answered(self, what: str) -> Iterator[None]:
        """A section of messages: what a rank leaves unread there, it would take for the answer to its next question."""
        try:
            yield
        except BaseException as error:
            if error is not self._told:
                self.torn = f"rank {self.rank} broke off {what} ({type(error).__name__}: {error})"
                self._comm.give_up()
            raise

    def warn(self, what: str, error: BaseException) -> None:
        try:
            if error is not self._told and not isinstance(error, RankError):
                with uninterrupted():
                    self.agree(what, dict, error)
        finally:
            if not self._inside:
                self._told = None  # the same object may be raised once more

    @contextmanager
    def warned(self, what: str) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        except BaseException as error:
            self._inside -= 1
            self.warn(what, error)
            raise
        else:
            self._inside -= 1

    def tear(self, what: str, error: BaseException) -> None:
        """See `unbroken`, which notes it."""

    @contextmanager
    def unbroken(self, what: str) -> Iterator[None]:
        try:
            with uninterrupted():
                yield
        except BaseException as error:
            self.torn = f"rank {self.rank} broke off {what} ({type(error).__name__}: {error})"
            self._comm.give_up()
            raise

    def renew(self) -> None:
        self._comm.renew()

    # ---- who has what -----------------------------------------------------------------------------------------------

    def divide(self, groups: list[Group]) -> None:
        tensors = [tensor for group in groups for tensor in group.tensors]
        parts = [x for x in tensors if x.block is not None]
        with self.warned("Optimizer"):
            needs = check_parts(groups, self._engine)
        settings = {
            f"`{name}`": getattr(self._ranks, name) for name in ("grads", "gather", "reduction")
        }
        self.agree(
            "Optimizer",
            lambda: {"the list of parts": [(x.name, x.shape) for x in parts]} | settings,
        )
        if parts:
            mine = [
                (x.block and x.block.offset, tuple(x.array.shape), checksum(x.array)) for x in parts
            ]
            every = [json.loads(x) for x in self._comm.words(json.dumps(mine).encode())]
            for i, tensor in enumerate(parts):
                tensor.share = shards(
                    tensor, self.rank, [own[i] for own in every], needs[tensor.name]
                )
        divide(groups, self._engine, self.rank, self.size)

    # ---- gradients --------------------------------------------------------------------------------------------------

    def rooms(self, tensors: Sequence[Tensor], grads: list[Array | None]) -> list[Array | None]:
        return grads if self._ranks.grads == "reduced" else self._sums.rooms(tensors, grads)

    def reduce(
        self, tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]
    ) -> None:
        if self._ranks.grads != "reduced":
            self._sums.reduce(tensors, grads, rooms)

    # ---- parameters and slots ----------------------------------------------------------------------------------------

    def gather(self, tensors: Sequence[Tensor]) -> None:
        if self._gather is None or not self._gather.serves(tensors):
            self._gather = Gather(self._comm, tensors, packed=self._ranks.gather == "packed")
        self._gather()

    def collect(self, tensor: Tensor, slot: str, root: int | None = None) -> Any:
        with self._answered(f"the collection of {slot!r} of {tensor.name!r}"):
            return collect(self._comm, tensor, slot, root)

    def check_whole(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            for slot in ("p", *tensor.slots) if tensor.block is not None else tensor.slots:
                pieces_of(tensor, slot)

    def explain(self, tensors: Sequence[Tensor]) -> list[str]:
        kinds = [x.kind for x in tensors]
        held = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("whole", "cut", "none"))
        return [
            f"rank {self.rank} of {self.size}; tensors here: {held}; gradients: {self._ranks.grads}"
        ]

    def __deepcopy__(self, memo: Any) -> "Team":
        made: Team = object.__new__(Team)
        made.__dict__.update(self.__dict__)  # over the same communicator
        made.replaced, made._gather = copy.deepcopy(self.replaced, memo), None
        made._told, made._inside = None, 0
        return made

    def __reduce__(self) -> Any:
        raise TypeError(
            "an Optimizer over ranks cannot be pickled; save it, and load the file in a new one"
        )


def team(comm: Any, engine: str) -> Alone:
    """The ranks of a communicator; one process is alone."""
    if comm is None:
        return Alone()
    made = Team(as_ranks(comm), engine)
    return made if made.size > 1 else Alone()
