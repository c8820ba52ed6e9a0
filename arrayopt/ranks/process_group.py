"""Process groups of torch.distributed, such as those of gloo."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from arrayopt.ranks.comm import Bytes, Comm, Pending, RankError

__all__ = ["ProcessGroup"]


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
        self.rank, self.size, self.timeout = dist.get_rank(group), dist.get_world_size(group), timeout
        self._broken = False
        self._roots = dist.get_process_group_ranks(group)
        backend = dist.get_backend_config(group)
        self._device = "cuda" if "cpu:" not in str(backend) and str(backend) == "nccl" else "cpu"

    def _tensor(self, x: Bytes) -> Any:
        """Bytes as a tensor; on the CPU, of the same memory."""
        own = x if x.flags.writeable else x.copy()
        return self._torch.from_numpy(own).to(self._device)

    def _wait(self, begun: Sequence[Any]) -> None:
        limit = timedelta(seconds=self.timeout)
        try:
            for work in begun:
                if work is not None:
                    work.wait(limit)
        except RuntimeError as error:
            self._broken = True
            first = str(error).partition("\n")[0]
            raise RankError(f"torch.distributed: {first} (the time limit is {self.timeout:g} s)") from error

    def renew(self) -> None:
        if self._broken:  # gloo ends the process where a message is of another size than was expected
            raise RankError("torch.distributed: a group that has failed cannot go on; start the processes again")

    def allgather(self, sent: Bytes, counts: Sequence[int]) -> Pending:
        most = max(counts)
        room, begun = np.zeros((self.size, most), np.uint8), list[Any]()
        rooms = [self._tensor(x) for x in room]
        if most:
            mine = np.zeros(most, np.uint8)
            mine[: len(sent)] = sent
            begun = [self._dist.all_gather(rooms, self._tensor(mine), group=self._group, async_op=True)]

        def finish() -> list[Bytes]:
            self._wait(begun)
            return [x.cpu().numpy()[:count] for x, count in zip(rooms, counts, strict=True)]

        return finish

    def broadcast(self, pieces: Sequence[tuple[int, Bytes]]) -> None:
        begun = []
        for root, piece in pieces:
            there = self._tensor(piece)
            begun.append(
                (self._dist.broadcast(there, self._roots[root], group=self._group, async_op=True), there, piece)
            )
        self._wait([work for work, _, _ in begun])
        if self._device != "cpu":
            for _, there, piece in begun:
                piece[:] = there.cpu().numpy()

    def add(self, x: Any, counts: Sequence[int]) -> Any:
        there = self._torch.from_numpy(x).to(self._device)
        self._wait([self._dist.all_reduce(there, group=self._group, async_op=True)])
        first = sum(counts[: self.rank])
        return there.cpu().numpy()[first : first + counts[self.rank]]

    def exchange(self, sent: Sequence[tuple[int, Bytes]], received: Sequence[tuple[int, Bytes]]) -> None:
        rooms = [(self._tensor(room), source, room) for source, room in received]
        calls = [self._dist.P2POp(self._dist.irecv, x, self._roots[source], self._group) for x, source, _ in rooms]
        calls += [self._dist.P2POp(self._dist.isend, self._tensor(x), self._roots[to], self._group) for to, x in sent]
        if calls:
            self._wait(self._dist.batch_isend_irecv(calls))
        if self._device != "cpu":
            for there, _, room in rooms:
                room[:] = there.cpu().numpy()
