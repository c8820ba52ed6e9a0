"""Process groups of torch.distributed, such as those of gloo."""

import atexit
import ctypes
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from arrayopt.ranks.comm import Bytes, Comm, Pending, RankError

__all__ = ["ProcessGroup"]

_KEPT: deque[Any] = deque(maxlen=256)
"""The last calls, whose tensors have given their memory back.

A thread of gloo lets go of a call some time after it has been waited for. If that thread were the last to hold the
call's tensors, it would need Python's lock, and while the interpreter ends, that ends the process with SIGABRT
(https://github.com/pytorch/pytorch/pull/179291). So calls are kept here, and at the end for good.
"""

atexit.register(ctypes.pythonapi.Py_IncRef, ctypes.py_object(_KEPT))


class ProcessGroup(Comm):
    """A process group of torch.distributed.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The group. One that has only NCCL moves bytes by way of the GPU.
    timeout : float
        Seconds that a call may take.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._group = torch, dist, group
        self.rank, self.size, self.timeout = (
            dist.get_rank(group),
            dist.get_world_size(group),
            timeout,
        )
        self._broken = False
        self._roots = dist.get_process_group_ranks(group)
        backend = dist.get_backend_config(group)
        self._device = "cuda" if "cpu:" not in str(backend) and str(backend) == "nccl" else "cpu"

    def _tensor(self, x: Bytes) -> Any:
        """Bytes as a tensor; on the CPU, of the same memory if that can be written: PyTorch knows no other."""
        return self._torch.from_numpy(x if x.flags.writeable else x.copy()).to(self._device)

    def _wait(
        self, begun: Sequence[Any], sent: Sequence[Any], received: Sequence[tuple[Any, Any]] = ()
    ) -> None:
        """Wait for a call to end: its works, the tensors it sends, and those it fills, with the memory they are for."""
        tensors, limit = [*sent, *(there for there, _ in received)], timedelta(seconds=self.timeout)
        _KEPT.extend(begun)
        try:
            for work in begun:
                if work is not None:
                    work.wait(limit)
        except RuntimeError as error:
            self._broken = True
            first = str(error).partition("\n")[0]
            raise RankError(
                f"torch.distributed: {first} (the time limit is {self.timeout:g} s)"
            ) from error
        if self._device != "cpu":
            for there, room in received:
                room[...] = there.cpu().numpy()
        for there in tensors:
            there.set_()

    def renew(self) -> None:
        if (
            self._broken
        ):  # gloo ends the process where a message is of another size than was expected
            raise RankError(
                "torch.distributed: a group that has failed cannot go on; start the processes again"
            )

    def allgather(self, sent: Bytes, counts: Sequence[int]) -> Pending:
        most = max(counts)
        room, mine = np.zeros((self.size, most), np.uint8), np.zeros(most, np.uint8)
        mine[: len(sent)] = sent
        rooms, own, begun = [self._tensor(x) for x in room], self._tensor(mine), list[Any]()
        if most:
            begun = [self._dist.all_gather(rooms, own, group=self._group, async_op=True)]

        def finish() -> list[Bytes]:
            self._wait(begun, [own], list(zip(rooms, room, strict=True)))
            return [x[:count] for x, count in zip(room, counts, strict=True)]

        return finish

    def broadcast(self, pieces: Sequence[tuple[int, Bytes]]) -> None:
        held = [(root, self._tensor(piece), piece) for root, piece in pieces]
        begun = [
            self._dist.broadcast(there, self._roots[root], group=self._group, async_op=True)
            for root, there, _ in held
        ]
        sent = [there for root, there, _ in held if root == self.rank]
        self._wait(
            begun, sent, [(there, piece) for root, there, piece in held if root != self.rank]
        )

    def add(self, x: Any, counts: Sequence[int]) -> Any:
        there = self._tensor(x)
        self._wait(
            [self._dist.all_reduce(there, group=self._group, async_op=True)], (), [(there, x)]
        )
        first = sum(counts[: self.rank])
        return x[first : first + counts[self.rank]]

    def exchange(
        self, sent: Sequence[tuple[int, Bytes]], received: Sequence[tuple[int, Bytes]]
    ) -> None:
        rooms = [(self._tensor(room), room) for _, room in received]
        pieces = [self._tensor(x) for _, x in sent]
        calls = [
            self._dist.P2POp(self._dist.irecv, there, self._roots[source], self._group)
            for (there, _), (source, _) in zip(rooms, received, strict=True)
        ]
        calls += [
            self._dist.P2POp(self._dist.isend, there, self._roots[to], self._group)
            for there, (to, _) in zip(pieces, sent, strict=True)
        ]
        if calls:
            self._wait(self._dist.batch_isend_irecv(calls), pieces, rooms)
