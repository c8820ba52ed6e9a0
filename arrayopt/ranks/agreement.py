"""The vote of ranks before each step, and errors of one rank that are raised on all ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np

from arrayopt.arrays import Array
from arrayopt.interrupts import uninterrupted
from arrayopt.params.replaced import Replaced
from arrayopt.ranks.alone import Alone, Said
from arrayopt.ranks.comm import Comm, RankError
from arrayopt.ranks.machine import shared_at
from arrayopt.ranks.same import checksum, differences, groups_of, plain, unlike
from arrayopt.state.tensors import Tensor

WISH, CHANGED, CHECKED, HOOKED = 1, 2, 4, 8
"""Flags of a vote: the rank wants reports, has changed parameters, compares, has hooks."""


class Agreement(Alone):
    """The votes of ranks, and errors that are raised on all of them. A base class of `Team`.

    `torn` is None; or it says which call was interrupted, so that ranks may have different
    parameters or state.
    """

    def __init__(self, comm: Comm, check: int | None) -> None:
        self._comm, self._check = comm, check
        self.rank, self.size = comm.rank, comm.size
        self.replaced = Replaced([])
        self._first: int | None = None  # the first step, from which `check` counts
        self._votes_again = False  # after this step, because a rank has hooks
        self._known_error: BaseException | None = None  # an error that all ranks know of
        self._sections = 0  # how many of `warned` and `after` are open
        self._voted = False  # whether `warned` is past its vote, so that an error needs none

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
        if what != "Optimizer.load":
            self.refuse_torn(what)
        words: dict[str, Any] = {}
        if error is None:
            try:
                words = {"which Optimizer over the communicator": self._comm.number, **said()}
            except BaseException as caught:
                error = caught
        digest = blake2b(plain((what, words)).encode(), digest_size=14).digest()
        flags = WISH * wish | HOOKED * self.hooked
        flags |= CHANGED * self._changed(what) | CHECKED * self._due(grads, step)
        vote = np.frombuffer(bytes([error is not None, flags]) + digest, np.uint8)
        with self.answered(what):
            votes = np.concatenate(self._comm.allgather(vote, [16] * self.size)()).reshape(-1, 16)
            flags = int(np.bitwise_or.reduce(votes[:, 1]))
            if votes[:, 0].any() or (votes[:, 2:] != votes[0, 2:]).any():
                self._differ(what, words, error, after=after)
            self._votes_again = bool(flags & HOOKED)
            if flags & (CHANGED | CHECKED):
                self._compare(what, grads if flags & CHECKED else None)
            if what != "Optimizer.load":
                self.replaced.agreed()
            return bool(flags & WISH)

    def refuse_torn(self, what: str) -> None:
        if self.torn is not None:
            said = "the ranks may hold different numbers: load a checkpoint on all"
            raise RankError(f"{what}: {self.torn}; {said}")

    def _differ(
        self, what: str, words: dict[str, Any], error: BaseException | None, *, after: bool
    ) -> None:
        """Raise the error of a rank, or a ValueError that lists how ranks differ."""
        said = {name: x if isinstance(x, str) else plain(x) for name, x in words.items()}
        every = self._comm.tell({"what": what, "error": _text(error), "words": said})
        self._raise(what, error, every, after=after)
        self._known_error = self._unequal(what, differences(every))
        raise self._known_error

    def _unequal(self, what: str, found: list[str]) -> ValueError:
        """Return the error about differences between ranks."""
        listed = "; ".join(found)
        return ValueError(f"{what}: nothing was changed, for the ranks do not agree: {listed}")

    def _raise(
        self,
        what: str,
        error: BaseException | None,
        every: list[dict[str, Any]],
        *,
        after: bool = False,
    ) -> None:
        """Raise this rank's error, or else a RankError that lists those of other ranks, if any."""
        if error is not None:
            self._known_error = error
            raise error
        done, where = "nothing was changed, for", ""
        if after:
            done, where = "the step was made, but", " in a hook after it"
        told = [(r, said["error"]) for r, said in enumerate(every) if said["error"]]
        failed = [f"rank {r} failed{where}: {text}" for r, text in told]
        if failed:
            self._known_error = RankError(f"{what}: {done} {'; '.join(failed)}")
            raise self._known_error

    def _due(self, grads: Sequence[Array | None] | None, step: int) -> bool:
        """Return whether ranks compare checksums in this step; see `Ranks.check`."""
        if grads is None or not self._check:
            return False
        self._first = step if self._first is None else self._first
        return (step - self._first) % self._check == 0

    def _changed(self, what: str) -> bool:
        """Return whether the user has changed parameters that other ranks have, too."""
        if what == "Optimizer.load":
            return False
        return any(groups_of(self.replaced.tensors[i], self.size) for i in self.replaced.marks)

    def _compare(self, what: str, grads: Sequence[Array | None] | None) -> None:
        """Raise ValueError if ranks have changed different parameters, or if checksums differ.

        Compare the changed parameters; with `grads` all, and gradients that ranks must share.
        """
        tensors = self.replaced.tensors
        marks = [dict(x) for x in self.hear(what, lambda: list(self.replaced.marks.items()))]
        places: Iterable[int] = sorted(set().union(*marks))
        reduced: list[tuple[int, Array]] = []
        if grads is not None:
            places = range(len(tensors))
            for i, grad in enumerate(grads):
                if grad is not None and not (self.sums and tensors[i].block is None):
                    reduced.append((i, grad))

        def checksums() -> list[Any]:
            params = []
            for i in places:
                array = tensors[i].array
                params.append((i, [checksum(array), shared_at(array)]))
            return [params, [(i, checksum(grad)) for i, grad in reduced]]

        every = self.hear(what, checksums)
        params = [dict(found) for found, _ in every]
        given = [dict(found) for _, found in every]
        wrong = unlike(tensors, marks, params, given)
        if wrong:
            self._known_error = self._unequal(what, wrong)
            raise self._known_error

    def hear(self, what: str, call: Callable[[], Any]) -> list[Any]:
        """Return the results of a call on all ranks; an error on one is raised on all."""
        found = error = None
        try:
            found = call()
        except RankError:
            raise
        except BaseException as caught:
            error = caught
        with self.answered(what):
            every = self._comm.tell({"error": _text(error), "found": found})
        self._raise(what, error, every)
        return [said["found"] for said in every]

    @contextmanager
    def after(self, what: str) -> Iterator[None]:
        error = None
        self._sections += 1
        try:
            try:
                yield
            except BaseException as caught:
                told = caught is self._known_error or isinstance(caught, RankError)
                if told or self.torn or not self._votes_again:
                    raise
                error = caught
            if self._votes_again:
                with uninterrupted():
                    here = {"the part of the step": "its hooks"}
                    self.agree(what, lambda: here, error, after=True)
        finally:
            self._sections -= 1
            self._known_error = self._known_error if self._sections else None

    @contextmanager
    def answered(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if error is not self._known_error:
                self.break_off(what, error)
            raise

    def break_off(self, what: str, error: BaseException) -> None:
        """Set `torn`, for a call was interrupted on this rank, and make other ranks fail soon."""
        if isinstance(error, RankError) and not error.what:
            error.what, error.args = what, (f"{what}: {error}",)
        self.torn = f"rank {self.rank} broke off {what} ({_text(error)})"
        self._comm.give_up(self.torn)

    @contextmanager
    def warned(self, what: str) -> Iterator[None]:
        torn, voted = self.torn, self._voted
        self._sections, self._voted = self._sections + 1, False
        try:
            yield
        except BaseException as error:
            told = error is self._known_error or isinstance(error, RankError) or self.torn != torn
            if not (told or self._voted):
                with uninterrupted():
                    self.agree(what, dict, error)
            raise
        finally:
            self._sections, self._voted = self._sections - 1, voted
            self._known_error = self._known_error if self._sections else None  # outer ones see it

    def tear(self, what: str, error: BaseException) -> None:
        """Do nothing: `unbroken` calls `break_off`."""

    @contextmanager
    def unbroken(self, what: str) -> Iterator[None]:
        try:
            with uninterrupted():
                self._voted = True
                yield
        except BaseException as error:
            self.break_off(what, error)
            raise

    def renew(self, tensors: Sequence[Tensor]) -> None:
        with self.answered("Optimizer.load"):
            self._comm.renew()


def _text(error: BaseException | None) -> str | None:
    """Return an error as the text that other ranks quote."""
    return None if error is None else f"{type(error).__name__}: {error}"
