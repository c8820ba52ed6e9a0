"""Ranks that minimize one function together: they add up evaluations, and make the same decisions."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from arrayopt.arrays import WORKING, Array, dtype_name, place, size, to_host
from arrayopt.interrupts import uninterrupted
from arrayopt.ranks.agreement import Agreement
from arrayopt.ranks.alone import Alone
from arrayopt.ranks.comm import as_bytes
from arrayopt.ranks.reduction import add_up
from arrayopt.ranks.settings import Ranks, as_ranks

Evaluation = tuple[Array, list[Array]]
"""A value, and gradients."""


class One(Alone):
    """One process."""

    ranks: Ranks | None = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context for a run. With several ranks, Ctrl-C interrupts only the user's functions; see `own`."""
        yield

    def own(self, call: Callable[[], Any]) -> Any:
        """Call a function of the user, which Ctrl-C may interrupt."""
        return call()

    def are_stopped(self, error: BaseException) -> bool:
        """Whether an error of the run is a Ctrl-C, on any rank."""
        return isinstance(error, KeyboardInterrupt)

    def evaluated(self, call: Callable[[], Evaluation]) -> Evaluation:
        """The value and gradients of all ranks together; `call` evaluates those of this rank."""
        return call()

    def known(self, x: Array) -> Array:
        """A number of the state; x is empty on ranks without it."""
        return x


class Several(Agreement, One):
    """Several ranks.

    Parameters
    ----------
    ranks : Ranks
        The communicator. Its `grads` tells whether `f` returns the same on all ranks, or parts that
        are added up.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks.open(), None)
        self._grads, self._stopped = ranks.grads, False
        self._section: uninterrupted | None = None
        self.ranks = dataclasses.replace(ranks, grads="reduced")

    @contextmanager
    def together(self) -> Iterator[None]:
        self._section = uninterrupted()
        with self._section:
            yield

    def own(self, call: Callable[[], Any]) -> Any:
        section = self._section
        if section is None:
            return call()
        try:
            section.__exit__(None, None, None)  # raises a Ctrl-C that came before
            return call()
        finally:
            section.__enter__()

    def _raise(
        self, what: str, error: BaseException | None, every: list[Any], *, after: bool = False
    ) -> None:
        texts = [said["error"] for said in every if said["error"]]
        self._stopped = all(text.startswith(KeyboardInterrupt.__name__) for text in texts)
        super()._raise(what, error, every, after=after)

    def are_stopped(self, error: BaseException) -> bool:
        return self._stopped and error is self._known_error

    def evaluated(self, call: Callable[[], Evaluation]) -> Evaluation:
        """See `One.evaluated`. An error on one rank is raised on all."""
        found: Any = None
        error: BaseException | None = None
        try:
            found = self.own(call)
        except BaseException as caught:
            error = caught
        said: dict[str, Any] = {}
        if error is None and self._grads == "reduced":
            said = {"the value that `f` has returned": float(found[0])}
        self.agree("minimize", lambda: said, error)
        value, grads = found
        if self._grads == "reduced":
            return value, grads
        with self.answered("minimize"):
            return self._added(value), [self._added(g) for g in grads]

    def _added(self, array: Array) -> Array:
        """The sum over ranks, in their order, or the mean; the same bits on all ranks."""
        flat = np.ascontiguousarray(to_host(array)).reshape(-1)
        flat = flat.astype(WORKING[dtype_name(array)], copy=False)
        parts = np.array_split(flat, self.size)
        own = parts[self.rank].nbytes
        received = self._comm.alltoall(list(map(as_bytes, parts)), [own] * self.size)
        total, *rest = (part.view(flat.dtype) for part in received)
        add_up(rest, total, self.size if self._grads == "mean" else 1)
        counts = [part.nbytes for part in parts]
        pieces = self._comm.allgather(as_bytes(total), counts)()
        whole = np.concatenate(pieces).view(flat.dtype).reshape(tuple(array.shape))
        xp, device = place(array)
        return xp.asarray(whole, device=device)

    def known(self, x: Array) -> Array:
        """See `One.known`."""
        with self.answered("minimize"):
            every = self._comm.tell(float(x) if size(x) else None)
        xp, device = place(x)
        number = next(found for found in every if found is not None)
        return xp.asarray(number, dtype=x.dtype, device=device)


def ranks_of(comm: Any) -> One:
    """The ranks of a communicator; `One` if there is only one."""
    if comm is None:
        return One()
    made = Several(as_ranks(comm))
    return made if made.size > 1 else One()
