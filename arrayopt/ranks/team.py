"""What the ranks of one Optimizer do together: agree, swap partial results, add up gradients, bring parameters home."""

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from typing import Any

import array_api_compat
import numpy as np

from arrayopt._version import __version__
from arrayopt.arrays import Array, array_namespace, dtype_name, library, memory, place, size, to_host, working_dtype
from arrayopt.engines.base import Partials, Report
from arrayopt.engines.interrupts import uninterrupted
from arrayopt.params.groups import Group
from arrayopt.ranks.comm import Bytes, RankError, as_bytes
from arrayopt.ranks.cuts import divide
from arrayopt.ranks.settings import Ranks, as_ranks
from arrayopt.ranks.shards import check_parts, shards
from arrayopt.ranks.sums import Sums
from arrayopt.state.tensors import Shards, Tensor

__all__ = ["Alone", "Team", "alike", "team"]

Said = Callable[[], Mapping[str, Any]]
"""What ranks must have in common, by what it is called."""

_NOTHING = nullcontext()

SMALL = 1 << 18
"""Parts of fewer bytes are sent together."""


class Alone:
    """One process: it agrees with itself, and has everything."""

    size, rank = 1, 0
    torn: str | None = None
    sums = False
    """Whether each rank has gradients of its own, which are added up."""

    def agree(self, what: str, said: Said = dict, error: BaseException | None = None, *, wish: bool = False) -> bool:
        """Have all ranks raise if one has an error, or says something else than the others; whether one has a wish."""
        if error is not None:
            raise error
        return wish

    def warn(self, what: str, error: BaseException) -> None:
        """Have all ranks raise, for this one has an error."""

    def warned(self, what: str) -> AbstractContextManager[None]:
        """A section of which an error is one of all ranks."""
        return _NOTHING

    def unbroken(self, what: str) -> AbstractContextManager[None]:
        """A section that all ranks must get through, for they write in it."""
        return _NOTHING

    def divide(self, groups: list[Group]) -> None:
        """Give tensors of new groups their shares."""
        for tensor in (tensor for group in groups for tensor in group.tensors):
            if tensor.block is not None and tensor.shape != tuple(tensor.array.shape):
                raise ValueError(
                    f"Optimizer: {tensor.name!r} is a part of a tensor of shape {tensor.shape}: give `comm`, the ranks"
                    " that have the others"
                )

    def rooms(self, tensors: Sequence[Tensor], grads: list[Array | None]) -> list[Array | None]:
        """What `reduce` will fill."""
        return grads

    def reduce(self, tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]) -> None:
        """Put the gradients that a step takes into their rooms."""

    def swap(self, wanted: list[Partials]) -> Callable[[], None]:
        """Begin to fill in partial results of other ranks; what is returned ends it."""
        raise AssertionError("one process has all partial results")

    def norms(self, own: dict[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The norms of all gradients, from those that this rank has measured."""
        return own

    def reports(self, own: dict[str, Report]) -> dict[str, Report]:
        """The reports of all tensors."""
        return own

    def gather(self, tensors: Sequence[Tensor]) -> None:
        """Bring parameters that other ranks have updated here."""

    def collect(self, tensor: Tensor, slot: str, root: int | None = None) -> Any:
        """A slot, whole, on one rank or on all."""
        return tensor.slots[slot]

    def renew(self) -> None:
        """Forget messages that were on their way when ranks were torn apart."""

    def mend(self) -> None:
        """Go on after ranks were torn apart, for all of them have loaded the same state."""

    def explain(self, tensors: Sequence[Tensor]) -> list[str]:
        """What there is to say of the ranks."""
        return []


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
        self._sums = Sums(self._comm, mean=ranks.grads == "mean")
        self.sums = ranks.grads != "reduced"
        self._told: BaseException | None = None  # an error that all ranks know of

    # ---- agreement --------------------------------------------------------------------------------------------------

    def agree(self, what: str, said: Said = dict, error: BaseException | None = None, *, wish: bool = False) -> bool:
        if self.torn is not None and what != "Optimizer.load":
            raise RankError(f"{what}: {self.torn}; the ranks may hold different numbers: load a checkpoint on all")
        words = {} if error is not None else said()
        digest = blake2b(_plain((what, words)).encode(), digest_size=14).digest()
        vote = np.frombuffer(bytes([error is not None, wish]) + digest, np.uint8)
        votes = np.stack(self._comm.allgather(vote, [16] * self.size)())
        if not votes[:, 0].any() and (votes[:, 2:] == votes[0, 2:]).all():
            return bool(votes[:, 1].any())
        mine = {"what": what, "error": error and f"{type(error).__name__}: {error}", "words": _texts(words)}
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

    def warn(self, what: str, error: BaseException) -> None:
        if error is not self._told and not isinstance(error, RankError):
            self.agree(what, dict, error)

    @contextmanager
    def warned(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.warn(what, error)
            raise

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
        if self.torn is not None:
            self._comm.renew()

    def mend(self) -> None:
        self.torn = None

    # ---- who has what -----------------------------------------------------------------------------------------------

    def divide(self, groups: list[Group]) -> None:
        tensors = [tensor for group in groups for tensor in group.tensors]
        mine = [(x.name, x.block.offset, x.shape, tuple(x.array.shape)) for x in tensors if x.block is not None]
        with self.warned("Optimizer"):
            check_parts(groups, self._engine)
        self.agree("Optimizer", lambda: {"the list of parts": [(name, shape) for name, _, shape, _ in mine]})
        if mine:
            every = [
                json.loads(x) for x in self._comm.words(json.dumps([(at, here) for _, at, _, here in mine]).encode())
            ]
            parts = [x for x in tensors if x.block is not None]
            for i, tensor in enumerate(parts):
                tensor.share = shards(tensor, self.rank, [own[i] for own in every])
        divide(groups, self._engine, self.rank, self.size)

    # ---- gradients --------------------------------------------------------------------------------------------------

    def rooms(self, tensors: Sequence[Tensor], grads: list[Array | None]) -> list[Array | None]:
        return grads if self._ranks.grads == "reduced" else self._sums.rooms(tensors, grads)

    def reduce(self, tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]) -> None:
        if self._ranks.grads != "reduced":
            self._sums.reduce(tensors, grads, rooms)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def swap(self, wanted: list[Partials]) -> Callable[[], None]:
        counts = [sum((x.ends[r + 1] - x.ends[r]) * x.room.itemsize for x in wanted) for r in range(self.size)]
        mine = [as_bytes(x.room[x.ends[self.rank] : x.ends[self.rank + 1]]) for x in wanted]
        pending = self._comm.allgather(np.concatenate(mine), counts)

        def finish() -> None:
            for r, got in enumerate(pending()):
                at = 0
                for x in wanted if r != self.rank else ():
                    room = as_bytes(x.room[x.ends[r] : x.ends[r + 1]])
                    room[:] = got[at : at + len(room)]
                    at += len(room)

        return finish

    def norms(self, own: dict[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
        owner = [x.share.holders[0] for x in tensors if x.share is not None]
        mine = [own[x.name] for x, r in zip(tensors, owner, strict=True) if r == self.rank]
        record = np.dtype([("norm", np.float64), ("theirs", np.bool_)])
        sent = np.array([(float(x), library(x) != "numpy") for x in mine], record)
        got = self._comm.allgather(as_bytes(sent), [owner.count(r) * record.itemsize for r in range(self.size)])()
        values = [iter(x.view(record).tolist()) for x in got]
        found: dict[str, Any] = {}
        for tensor, r in zip(tensors, owner, strict=True):
            norm, theirs = next(values[r])
            found[tensor.name] = _number_of(tensor.array, norm) if theirs else np.float64(norm)
        return found

    def reports(self, own: dict[str, Report]) -> dict[str, Report]:
        numbers = {name: {key: float(x) for key, x in report.items()} for name, report in own.items()}
        every: dict[str, Report] = {}
        for x in self._comm.words(json.dumps(numbers).encode()):
            every |= json.loads(x)
        return {name: {key: np.float64(x) for key, x in report.items()} for name, report in every.items()}

    def gather(self, tensors: Sequence[Tensor]) -> None:
        shared = [x for x in tensors if x.share is not None and x.share.holders and x.block is None]
        homes = [_Home(x) for x in shared]
        pieces = [
            (r, home.bytes[share.ends[r] * home.item : share.ends[r + 1] * home.item])
            for home, x in zip(homes, shared, strict=True)
            if (share := x.share) is not None
            for r in share.holders
        ]
        packed = [(r, x) for r, x in pieces if self._ranks.gather == "packed" or x.size < SMALL]
        if packed:
            mine = [x for r, x in packed if r == self.rank]
            counts = [sum(x.size for root, x in packed if root == r) for r in range(self.size)]
            got = self._comm.allgather(np.concatenate([*mine, np.empty(0, np.uint8)]), counts)()
            at = [0] * self.size
            for r, x in packed:
                x[:] = got[r][at[r] : at[r] + x.size]
                at[r] += x.size
        if len(packed) < len(pieces):
            self._comm.broadcast([(r, x) for r, x in pieces if self._ranks.gather != "packed" and x.size >= SMALL])
        for home in homes:
            home.settle()

    # ---- slots ------------------------------------------------------------------------------------------------------

    def collect(self, tensor: Tensor, slot: str, root: int | None = None) -> Any:
        own, share = tensor.array if slot == "p" else tensor.slots[slot], tensor.share
        shape = tensor.shape if slot == "p" else tensor.whole[slot]
        if share is None or not share.holders:
            return own
        if isinstance(share, Shards):
            return self._assembled(own, share, shape, root)
        mine = np.ascontiguousarray(to_host(own)).reshape(-1)
        room = np.empty(int(np.prod(shape)), mine.dtype)
        ends = _ends(share.ends, share.holders[0], len(room)) if slot in share.undivided else share.ends
        item = mine.itemsize
        mine = mine[: ends[self.rank + 1] - ends[self.rank]]
        room[ends[self.rank] : ends[self.rank + 1]] = mine
        data = as_bytes(room)
        pieces = [(r, data[ends[r] * item : ends[r + 1] * item]) for r in share.holders if ends[r] < ends[r + 1]]
        if root is None:
            self._comm.broadcast(pieces)
            return _of_library(own, room.reshape(shape))
        sent = [(root, x) for r, x in pieces if r == self.rank != root]
        self._comm.exchange(sent, [(r, x) for r, x in pieces if r != root == self.rank])
        return room.reshape(shape)

    def _assembled(self, own: Array, share: Shards, shape: tuple[int, ...], root: int | None) -> Any:
        """A whole array from the parts that the user gave."""
        mine = np.ascontiguousarray(to_host(own))
        parts = {r: mine if r == self.rank else np.empty(share.blocks[r][1], mine.dtype) for r in share.holders}
        pieces = [(r, as_bytes(x)) for r, x in parts.items()]
        if root is None:
            self._comm.broadcast(pieces)
        else:
            sent = [(root, x) for r, x in pieces if r == self.rank != root]
            self._comm.exchange(sent, [(r, x) for r, x in pieces if r != root == self.rank])
        room = np.empty(shape, mine.dtype)
        for r, x in parts.items():
            room[share.where(r)] = x.reshape(share.blocks[r][1])
        return room if root is not None else _of_library(own, room)

    def explain(self, tensors: Sequence[Tensor]) -> list[str]:
        kinds = [x.kind for x in tensors]
        held = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("whole", "cut", "none"))
        return [f"rank {self.rank} of {self.size}; tensors here: {held}; gradients: {self._ranks.grads}"]

    def __deepcopy__(self, memo: Any) -> "Team":
        return self

    def __reduce__(self) -> Any:
        raise TypeError("an Optimizer over ranks cannot be pickled; save it, and load the file in a new one")


class _Home:
    """A parameter's memory as bytes; or a copy of it, where it cannot be written in place, or does not lie in a row."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        x = tensor.array
        host = isinstance(x, np.ndarray) or (array_api_compat.is_torch_array(x) and x.device.type == "cpu")
        self.copy = None if host and memory(x).flags.carray else np.array(to_host(x), order="C")
        flat = memory(x) if self.copy is None else self.copy
        self.bytes: Bytes = as_bytes(flat)
        self.item = flat.itemsize

    def settle(self) -> None:
        """The bytes of other ranks are here."""
        x, share = self.tensor.array, self.tensor.share
        if self.copy is not None:
            self.tensor.put(None, _of_library(x, self.copy))
        elif array_api_compat.is_torch_array(x) and share is not None and share.last - share.first < size(x):
            array_namespace(x).autograd.graph.increment_version([x])


def _of_library(mine: Array, x: "np.ndarray[Any, Any]") -> Array:
    """Values of mine's dtype, in an array of mine's library and device."""
    xp, device = place(mine)
    if isinstance(mine, np.ndarray | np.generic):
        return x
    if array_api_compat.is_torch_array(mine) and dtype_name(mine) == "bfloat16":
        return xp.asarray(x.view(np.int16), device=device).view(xp.bfloat16)
    return xp.asarray(x, dtype=mine.dtype, device=device, copy=True)


def _number_of(mine: Array, x: float) -> Array:
    """A norm, as the library of a parameter reports it."""
    xp, device = place(mine)
    return xp.asarray(x, dtype=working_dtype(xp, mine, real=True), device=device)


def _ends(ends: tuple[int, ...], holder: int, n: int) -> tuple[int, ...]:
    """Ends of parts where one rank has all."""
    return tuple(0 if r <= holder else n for r in range(len(ends)))


def _texts(words: Mapping[str, Any]) -> dict[str, str]:
    return {name: x if isinstance(x, str) else _plain(x) for name, x in words.items()}


def _plain(x: Any) -> str:
    """An object as text, the same in each process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(x))


def _differences(every: Sequence[dict[str, Any]]) -> list[str]:
    """What ranks say that is not what rank 0 says."""
    if any(x["what"] != every[0]["what"] for x in every):
        return [f"rank {r} is in {x['what']}" for r, x in enumerate(every)]
    if [*every[0]["words"]] != [*every[-1]["words"]] and sorted(every[0]["words"]) == sorted(every[-1]["words"]):
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
    for group in groups:
        words[f"the rule of group {group.label!r}"] = group.rule
        for tensor in group.tensors:
            x = tensor.array
            words[repr(tensor.name)] = f"{dtype_name(x)} {tensor.shape} in group {group.label!r}"
            if tensor.block is not None:
                continue
            words[f"the checksum of {tensor.name!r}"] = zlib.crc32(as_bytes(np.ascontiguousarray(to_host(x))).data)
    return words


def team(comm: Any, engine: str) -> Alone:
    """The ranks of a communicator; one process is alone."""
    if comm is None:
        return Alone()
    made = Team(as_ranks(comm), engine)
    return made if made.size > 1 else Alone()
