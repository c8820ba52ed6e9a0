"""`Team`: the collective operations of the ranks of an Optimizer."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from array_api_compat import is_cupy_array

from arrayopt.arrays import Array, library, like, place, to_host
from arrayopt.engines.base import Partials, Report
from arrayopt.params.groups import Group
from arrayopt.params.parameters import Parameters
from arrayopt.ranks import homes
from arrayopt.ranks.agreement import Agreement
from arrayopt.ranks.alone import Alone
from arrayopt.ranks.collect import collect, pieces_of
from arrayopt.ranks.comm import AddingComm, Bytes, DeviceComm, as_bytes
from arrayopt.ranks.copies import Copies, Rooms
from arrayopt.ranks.gather import Arrivals, Gather
from arrayopt.ranks.partition import check_parts, divide, shards
from arrayopt.ranks.reading import can_read
from arrayopt.ranks.same import checksum, is_odd
from arrayopt.ranks.settings import Ranks, as_ranks
from arrayopt.ranks.sums import Sums
from arrayopt.state.tensors import Tensor


class Team(Agreement):
    """The ranks of an Optimizer."""

    gradients: Sums

    def __init__(self, ranks: Ranks, engine: str) -> None:
        super().__init__(ranks.open(), ranks.check)
        self._ranks, self._engine = ranks, engine
        fast = ranks.reduction == "fast" and isinstance(self._comm, AddingComm)
        self.gradients = Sums(self._comm, mean=ranks.grads == "mean", fast=fast)
        self.sums = self.holds = ranks.grads != "reduced"
        self._gather: Gather | None = None  # of the last step
        self._processes: list[int] | None = None  # see `can_read`; None until it was called

    def divide(self, groups: list[Group]) -> None:
        tensors = [tensor for group in groups for tensor in group.tensors]
        parts = [tensor for tensor in tensors if tensor.block is not None]
        with self.warned("Optimizer"):
            needs = check_parts(groups, self._engine)
        said: dict[str, Any] = {"the list of parts": [(part.name, part.shape) for part in parts]}
        for name in ("grads", "gather", "reduction"):
            said[f"`{name}`"] = getattr(self._ranks, name)
        self.agree("Optimizer", lambda: said)
        if parts:
            described = []
            for part in parts:
                offset = part.block and part.block.offset
                described.append((offset, tuple(part.array.shape), checksum(part.array)))
            costs = [needs[part.name].cost for part in parts]
            chosen = self._comm.tell(homes.owners(costs, self.size))[0]
            every = zip(parts, costs, chosen, *self._comm.tell(described), strict=True)
            for part, cost, owner, *of_ranks in every:
                share = shards(part, self.rank, of_ranks, needs[part.name])
                part.share = homes.homed(part, share, owner) if cost else share
            self.has_homes = self.has_homes or any(costs)
            homes.bring(self._comm, parts)
        divide(groups, self._engine, self.rank, self.size)

    def rooms(self, tensors: Sequence[Tensor], grads: Rooms) -> Rooms:
        """Return the arrays that `reduce` and `bring` will fill."""
        found = self.gradients.rooms(tensors, grads) if self.sums else grads
        return self.whole_rooms(tensors, found)

    def whole_rooms(self, tensors: Sequence[Tensor], grads: Rooms) -> Rooms:
        return homes.rooms(tensors, grads) if self.has_homes else grads

    def can_be_captured(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a CUDA graph can record the messages of a step: none is on the host."""
        if self.has_homes or not self._comm.on_device:
            return False
        sent = [tensor.array for tensor in tensors if tensor.block is None]
        return all(is_cupy_array(x) and x.flags.c_contiguous for x in sent)

    def bring(self, own: Parameters, grads: Rooms, rooms: Rooms) -> None:
        """Send parts of tensors with an owner, and of their gradients, to the owner."""
        if self.has_homes:
            homes.bring(self._comm, own.all, grads, rooms)
            own.first.follow(grads, at_home=True)

    def bring_homes(self, what: str, tensors: Sequence[Tensor]) -> None:
        if any(tensor.home is not None and not tensor.t for tensor in tensors):
            with self.answered(what):
                homes.bring(self._comm, tensors)

    def reduce(self, grads: Rooms, rooms: Rooms) -> None:
        """Put the sums of gradients into `rooms`, if each rank has its own gradients."""
        if self.sums:
            self.gradients.reduce(grads, rooms)

    def hold(self) -> None:
        """Allocate memory for a captured `reduce` of the same gradients as in the last step."""
        if self._comm.on_device:
            self.gradients.memory.hold()

    def renew(self, tensors: Sequence[Tensor]) -> None:
        super().renew(tensors)
        if self.sums and self.torn is None and not self._comm.renews:
            self.gradients.finish(tensors, [None] * len(tensors), wide=False)  # receive messages
        self.gradients.renew()
        self._gather = self._processes = None

    def swap(self, wanted: list[Partials]) -> Callable[[], None]:
        """Start to fill in the partial results of other ranks; the returned function ends it."""
        on_device, on_host = list[Partials](), list[Partials]()
        for partials in wanted:
            is_on_host = isinstance(partials.pieces[self.rank], np.ndarray)
            (on_host if is_on_host else on_device).append(partials)
        if not on_device or not isinstance(self._comm, DeviceComm):
            return self._swap_on_host(wanted)
        with on_device[0].section():
            end_device = self._comm.fill([partials.pieces for partials in on_device])
        end_host = self._swap_on_host(on_host) if on_host else None

        def finish() -> None:
            with on_device[0].section():
                end_device()
            if end_host is not None:
                end_host()

        return finish

    def _swap_on_host(self, wanted: list[Partials]) -> Callable[[], None]:
        """Start to fill in partial results through the host's memory; see `swap`."""
        counts, sent = [0] * self.size, []
        for partials in wanted:
            for r, piece in enumerate(partials.pieces):
                if piece.size:
                    counts[r] += piece.nbytes
            with partials.section():
                own = np.ascontiguousarray(to_host(partials.pieces[self.rank]))
                sent.append(as_bytes(own))
        pending = self._comm.allgather(np.concatenate(sent), counts)

        def finish() -> None:
            for r, received in enumerate(pending()):
                if r != self.rank:
                    _unpack(received, r, wanted)

        return finish

    def norms(
        self, own: dict[str, Any], tensors: Sequence[Tensor], grads: Sequence[Array]
    ) -> dict[str, Any]:
        measured_by = [x.share.holders[0] for x in tensors if x.share is not None]
        odd, rows = [], []
        for tensor, grad, rank in zip(tensors, grads, measured_by, strict=True):
            is_sum = self.sums and tensor.block is None  # it has the NaN and infinity of any rank
            odd.append(not is_sum and is_odd(tensor, grad))
            if rank == self.rank:
                norm = own[tensor.name]
                rows.append((float(norm), 0 if library(norm) == "numpy" else norm.dtype.itemsize))
        record = np.dtype([("norm", np.float64), ("itemsize", np.uint8)])
        flags = np.packbits(np.array(odd, bool))
        numbers = np.bincount(np.array(measured_by, np.int64), minlength=self.size)
        ends = [int(n) * record.itemsize for n in numbers]
        sent = np.concatenate([as_bytes(np.array(rows, record)), flags])
        received = self._comm.allgather(sent, [end + len(flags) for end in ends])()
        values, every = [], []
        for piece, end in zip(received, ends, strict=True):
            values.append(iter(piece[:end].view(record).tolist()))
            every.append(piece[end:])
        bad = np.unpackbits(np.bitwise_or.reduce(every)).tolist()
        found: dict[str, Any] = {}
        for tensor, rank, is_bad in zip(tensors, measured_by, bad, strict=False):
            norm, itemsize = next(values[rank])
            if is_bad and math.isfinite(norm):  # an infinite norm stays, as in one process
                norm = float("nan")
            found[tensor.name] = np.float64(norm)
            if itemsize:
                xp, device = place(tensor.array)
                dtype = xp.float64 if itemsize == 8 else xp.float32
                found[tensor.name] = xp.asarray(norm, dtype=dtype, device=device)
        return found

    def reports(self, own: dict[str, Report]) -> dict[str, Report]:
        numbers = {}
        for name, report in own.items():
            numbers[name] = {key: float(x) for key, x in report.items()}
        every: dict[str, Report] = {}
        for said in self._comm.tell(numbers):
            for name, report in said.items():
                every[name] = {key: np.float64(x) for key, x in report.items()}
        return every

    def gather(self, tensors: Sequence[Tensor], *, wait: bool) -> Arrivals | None:
        """Fetch the parameters that other ranks have updated; only start to if not `wait`."""
        comm, ordered = self._comm, self.gradients.forward(tensors)
        if self.has_homes:
            homes.send_back(comm, tensors)
        if self._processes is None:
            self._processes = can_read(comm) if comm.processes else []
        if self._gather is None or not self._gather.serves(ordered):
            packed = self._ranks.gather == "packed"
            self._gather = Gather(comm, ordered, packed=packed, processes=self._processes)
        if not wait:
            return Arrivals(self._gather)
        self._gather()
        return None

    def arrive(self, started: Arrivals, place: int | None) -> None:
        """Wait until `gather` has fetched the tensor at a place, or all tensors."""
        with self.answered("Optimizer.wait"):
            started.until(place)

    def collect(self, tensor: Tensor, slot: str, root: int | None = None) -> Any:
        with self.answered(f"the collection of {slot!r} of {tensor.name!r}"):
            return collect(self._comm, tensor, slot, root)

    def check_complete(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            for slot in ("p", *tensor.slots) if tensor.block is not None else tensor.slots:
                pieces_of(tensor, slot)

    def explain(self, tensors: Sequence[Tensor]) -> list[str]:
        kinds = [tensor.kind for tensor in tensors]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("whole", "cut", "none"))
        grads = self._ranks.grads
        return [f"rank {self.rank} of {self.size}; tensors here: {counts}; gradients: {grads}"]

    def __deepcopy__(self, memo: Any) -> "Team":
        made: Team = object.__new__(Team)
        made.__dict__.update(self.__dict__)  # over the same communicator
        made.replaced = copy.deepcopy(self.replaced, memo)
        made._gather = None
        made._known_error, made._sections = None, 0
        made.gradients = self.gradients.another()
        return made

    def __reduce__(self) -> Any:
        raise TypeError(
            "an Optimizer over ranks cannot be pickled; save it, and load the file in a new one"
        )


def _unpack(received: Bytes, rank: int, wanted: list[Partials]) -> None:
    """Write the partial results that a rank has sent into its pieces."""
    at = 0
    for partials in wanted:
        piece = partials.pieces[rank]
        if not piece.size:
            continue
        values = received[at : at + piece.nbytes].view(piece.dtype).reshape(piece.shape)
        with partials.section():
            piece[...] = values if isinstance(piece, np.ndarray) else like(piece, values)
        at += piece.nbytes


def team(comm: Any, engine: str) -> Alone:
    """Return the `Team` of a communicator, or `Alone` for one process."""
    if comm is None:
        return Alone()
    made, alone = Team(as_ranks(comm), engine), Alone()
    alone.holds, alone.gradients = made.holds, Copies()  # so that programs for ranks run with one
    return made if made.size > 1 else alone
