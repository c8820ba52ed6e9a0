"""What the ranks of one Optimizer do together: agree, swap partial results, add up gradients, bring parameters home."""

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np

from arrayopt._version import __version__
from arrayopt.arrays import Array, dtype_name, library, like, place, to_host
from arrayopt.engines.base import Partials, Report
from arrayopt.engines.interrupts import uninterrupted
from arrayopt.params.groups import Group, labelled
from arrayopt.ranks.alone import Alone, Said
from arrayopt.ranks.comm import RankError, as_bytes
from arrayopt.ranks.cuts import divide
from arrayopt.ranks.home import Gather, collect, pieces_of
from arrayopt.ranks.settings import Ranks, as_ranks
from arrayopt.ranks.shards import check_parts, shards
from arrayopt.ranks.sums import Sums
from arrayopt.state.tensors import Tensor

__all__ = ["Team", "alike", "team"]


class Team(Alone):
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
        self._told: BaseException | None = None  # an error that all ranks know of
        self._inside = 0  # sections of `warned`, one in the other

    # ---- agreement --------------------------------------------------------------------------------------------------

    def agree(self, what: str, said: Said = dict, error: BaseException | None = None, *, wish: bool = False) -> bool:
        if self.torn is not None and what != "Optimizer.load":
            raise RankError(f"{what}: {self.torn}; the ranks may hold different numbers: load a checkpoint on all")
        words = {} if error is not None else {"which Optimizer over the communicator": self._comm.number, **said()}
        digest = blake2b(_plain((what, words)).encode(), digest_size=14).digest()
        vote = np.frombuffer(bytes([error is not None, wish]) + digest, np.uint8)
        with self._answered(what):
            votes = np.stack(self._comm.allgather(vote, [16] * self.size)())
        if not votes[:, 0].any() and (votes[:, 2:] == votes[0, 2:]).all():
            return bool(votes[:, 1].any())
        mine = {"what": what, "error": error and f"{type(error).__name__}: {error}", "words": _texts(words)}
        with self._answered(what):
            every = [json.loads(x) for x in self._comm.words(json.dumps(mine).encode())]
        if error is not None:
            self._told = error
            raise error
        failed = [f"rank {r} failed: {x['error']}" for r, x in enumerate(every) if x["error"]]
        if failed:
            self._told = RankError(f"{what}: nothing was changed, for {'; '.join(failed)}")
        else:
            differing = "; ".join(_differences(every))
            self._told = ValueError(f"{what}: nothing was changed, for the ranks do not agree: {differing}")
        raise self._told

    @contextmanager
    def _answered(self, what: str) -> Iterator[None]:
        """A section of messages: what a rank leaves unread there, it would take for the answer to its next question."""
        try:
            yield
        except BaseException as error:
            self.torn = f"rank {self.rank} broke off {what} ({type(error).__name__}: {error})"
            self._comm.give_up()
            raise

    def warn(self, what: str, error: BaseException) -> None:
        try:
            if error is not self._told and not isinstance(error, RankError):
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

    def mend(self) -> None:
        self.torn = None

    # ---- who has what -----------------------------------------------------------------------------------------------

    def divide(self, groups: list[Group]) -> None:
        tensors = [tensor for group in groups for tensor in group.tensors]
        parts = [x for x in tensors if x.block is not None]
        with self.warned("Optimizer"):
            needs = check_parts(groups, self._engine)
        settings = {f"`{name}`": getattr(self._ranks, name) for name in ("grads", "gather", "reduction")}
        self.agree("Optimizer", lambda: {"the list of parts": [(x.name, x.shape) for x in parts]} | settings)
        if parts:
            mine = [(x.block and x.block.offset, tuple(x.array.shape), _checksum(x.array)) for x in parts]
            every = [json.loads(x) for x in self._comm.words(json.dumps(mine).encode())]
            for i, tensor in enumerate(parts):
                tensor.share = shards(tensor, self.rank, [own[i] for own in every], needs[tensor.name])
        divide(groups, self._engine, self.rank, self.size)

    # ---- gradients --------------------------------------------------------------------------------------------------

    def rooms(self, tensors: Sequence[Tensor], grads: list[Array | None]) -> list[Array | None]:
        return grads if self._ranks.grads == "reduced" else self._sums.rooms(tensors, grads)

    def reduce(self, tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]) -> None:
        if self._ranks.grads != "reduced":
            self._sums.reduce(tensors, grads, rooms)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def swap(self, wanted: list[Partials]) -> Callable[[], None]:
        there = [x for x in wanted if self._comm.on_device and not isinstance(x.pieces[self.rank], np.ndarray)]
        if not there:
            return self._swap(wanted)
        with there[0].where():
            ended = self._comm.fill([x.pieces for x in there])
        rest = [x for x in wanted if isinstance(x.pieces[self.rank], np.ndarray)]
        others = self._swap(rest) if rest else None

        def finish() -> None:
            with there[0].where():
                ended()
            if others is not None:
                others()

        return finish

    def _swap(self, wanted: list[Partials]) -> Callable[[], None]:
        """See `swap`; by way of the host."""
        counts = [sum(x.pieces[r].nbytes for x in wanted) for r in range(self.size)]
        mine = []
        for x in wanted:
            with x.where():
                mine.append(as_bytes(np.ascontiguousarray(to_host(x.pieces[self.rank]))))
        pending = self._comm.allgather(np.concatenate(mine), counts)

        def finish() -> None:
            for r, got in enumerate(pending()):
                at = 0
                for x in wanted if r != self.rank else ():
                    piece = x.pieces[r]
                    if not piece.size:
                        continue
                    values = got[at : at + piece.nbytes].view(piece.dtype.name).reshape(piece.shape)
                    with x.where():
                        piece[...] = values if isinstance(piece, np.ndarray) else like(piece, values)
                    at += piece.nbytes

        return finish

    def norms(self, own: dict[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
        owner = [x.share.holders[0] for x in tensors if x.share is not None]
        mine = [own[x.name] for x, r in zip(tensors, owner, strict=True) if r == self.rank]
        record = np.dtype([("norm", np.float64), ("kind", np.uint8)])
        sent = np.array([(float(x), 0 if library(x) == "numpy" else x.dtype.itemsize) for x in mine], record)
        got = self._comm.allgather(as_bytes(sent), [owner.count(r) * record.itemsize for r in range(self.size)])()
        values = [iter(x.view(record).tolist()) for x in got]
        found: dict[str, Any] = {}
        for tensor, r in zip(tensors, owner, strict=True):
            norm, itemsize = next(values[r])
            found[tensor.name] = _number_of(tensor.array, norm, itemsize) if itemsize else np.float64(norm)
        return found

    def reports(self, own: dict[str, Report]) -> dict[str, Report]:
        numbers = {name: {key: float(x) for key, x in report.items()} for name, report in own.items()}
        every: dict[str, Report] = {}
        for x in self._comm.words(json.dumps(numbers).encode()):
            every |= json.loads(x)
        return {name: {key: np.float64(x) for key, x in report.items()} for name, report in every.items()}

    def gather(self, tensors: Sequence[Tensor]) -> None:
        if self._gather is None or not self._gather.serves(tensors):
            self._gather = Gather(self._comm, tensors, packed=self._ranks.gather == "packed")
        self._gather()

    # ---- slots ------------------------------------------------------------------------------------------------------

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
        return [f"rank {self.rank} of {self.size}; tensors here: {held}; gradients: {self._ranks.grads}"]

    def __deepcopy__(self, memo: Any) -> "Team":
        return self

    def __reduce__(self) -> Any:
        raise TypeError("an Optimizer over ranks cannot be pickled; save it, and load the file in a new one")


def _number_of(mine: Array, x: float, itemsize: int) -> Array:
    """A norm, as the library of a parameter reports it, in a dtype of so many bytes."""
    xp, device = place(mine)
    return xp.asarray(x, dtype=xp.float64 if itemsize == 8 else xp.float32, device=device)


def _texts(words: Mapping[str, Any]) -> dict[str, str]:
    return {name: x if isinstance(x, str) else _plain(x) for name, x in words.items()}


def _plain(x: Any) -> str:
    """An object as text, the same in each process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(x))


def _differences(every: Sequence[dict[str, Any]]) -> list[str]:
    """What ranks say that is not what rank 0 says."""
    if any(x["what"] != every[0]["what"] for x in every):
        return [f"rank {r} is in {x['what']}" for r, x in enumerate(every)]
    orders = [[*x["words"]] for x in every]
    if any(x != orders[0] for x in orders) and all(sorted(x) == sorted(orders[0]) for x in orders):
        return ["the order of the parameters is not the same"]
    found = []
    for name in dict.fromkeys(name for x in every for name in x["words"]):
        values = [x["words"].get(name, "nothing") for x in every]
        odd = [f"{x} on rank {r}" for r, x in enumerate(values) if x != values[0]]
        if odd:
            found.append(f"{name} is {values[0]} on rank 0, {', '.join(odd)}")
    return found


def alike(groups: Sequence[Group], options: Mapping[str, Any]) -> dict[str, Any]:
    """What of an Optimizer must be the same on all ranks."""
    words: dict[str, Any] = {"the version of arrayopt": __version__}
    words |= {f"`{name}`": x for name, x in options.items()}
    for label, group in labelled(groups):
        words[f"the rule of group {label}"] = group.rule
        for tensor in group.tensors:
            x = tensor.array
            words[repr(tensor.name)] = f"{dtype_name(x)} {tensor.shape} in group {label}"
            if tensor.block is not None:
                continue
            words[f"the checksum of {tensor.name!r}"] = _checksum(x)
    return words


def _checksum(x: Array) -> int:
    """A checksum of an array's values."""
    return zlib.crc32(as_bytes(np.ascontiguousarray(to_host(x))).data)


def team(comm: Any, engine: str) -> Alone:
    """The ranks of a communicator; one process is alone."""
    if comm is None:
        return Alone()
    made = Team(as_ranks(comm), engine)
    return made if made.size > 1 else Alone()
