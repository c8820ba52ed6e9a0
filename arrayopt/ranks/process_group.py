"""Process groups of torch.distributed, such as those of gloo."""

import atexit
import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from arrayopt.ranks.comm import Bytes, Comm, Pending, RankError

_USERS = WeakKeyDictionary[Any, int]()
"""How many `ProcessGroup` were made over each group."""

_KEPT: deque[Any] = deque(maxlen=256)
"""The last calls, whose tensors have released their memory.

A thread of gloo releases a call some time after the wait for it. If this were the last reference
to the call's tensors, the thread would need Python's lock. While the interpreter exits, this ends
the process with SIGABRT (https://github.com/pytorch/pytorch/pull/179291). So calls are kept here,
and are never freed at exit.
"""

atexit.register(ctypes.pythonapi.Py_IncRef, ctypes.py_object(_KEPT))


class ProcessGroup(Comm):
    """A process group of torch.distributed. If it has NCCL alone, bytes go through the GPU."""

    def __init__(self, group: Any, timeout: float) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._group, self.timeout = torch, dist, group, timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.number = _USERS[group] = _USERS.get(group, 0) + 1
        self._broken = False
        self._roots = dist.get_process_group_ranks(group)
        backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
        self._device = "cpu" if "cpu:" in backends else backends.partition(":")[0]

    def _tensor(self, memory: Bytes) -> Any:
        """Return bytes as a tensor; on the CPU a view, or a copy if they are read-only."""
        writable = memory if memory.flags.writeable else memory.copy()  # tensors always are
        return self._torch.from_numpy(writable).to(self._device)

    @contextmanager
    def _rank_errors(self) -> Iterator[None]:
        """A section of calls whose errors become RankErrors. Calls can fail when started, too."""
        try:
            yield
        except RuntimeError as error:
            self._broken = True
            first = str(error).partition("\n")[0]
            raise RankError(
                f"torch.distributed: {first} (the time limit is {self.timeout:g} s)"
            ) from error

    def _wait(
        self, works: Sequence[Any], sent: Sequence[Any], received: Sequence[tuple[Any, Any]] = ()
    ) -> None:
        """Wait for a call to end.

        `works` are its handles, `sent` the tensors that it sends, `received` those that it fills,
        each with the memory that gets a copy if the tensor is on a GPU.
        """
        tensors = [*sent, *(tensor for tensor, _ in received)]
        limit = timedelta(seconds=self.timeout)
        _KEPT.extend(works)
        with self._rank_errors():
            for work in works:
                if work is not None:
                    work.wait(limit)
        if self._device != "cpu":
            for tensor, room in received:
                room[...] = tensor.cpu().numpy()
        for tensor in tensors:
            tensor.set_()

    def renew(self) -> None:
        if self._broken:  # gloo aborts the process if a message has another size than expected
            raise RankError(
                "torch.distributed: a process group that has failed cannot be used again; restart"
                " the processes"
            )

    def allgather(self, sent: Bytes, counts: Sequence[int]) -> Pending:
        most = max(counts)
        room, padded = np.zeros((self.size, most), np.uint8), np.zeros(most, np.uint8)
        padded[: len(sent)] = sent
        tensors, own, works = [self._tensor(row) for row in room], self._tensor(padded), list[Any]()
        with self._rank_errors():
            if most:
                works = [self._dist.all_gather(tensors, own, group=self._group, async_op=True)]

        def finish() -> list[Bytes]:
            self._wait(works, [own], list(zip(tensors, room, strict=True)))
            return [row[:count] for row, count in zip(room, counts, strict=True)]

        return finish

    def start_rows(self, rows: Sequence[tuple[int, Bytes]]) -> Callable[[], None]:
        # all_gather needs rows of equal length
        works, sent, received = list[Any](), list[Any](), list[tuple[Any, Any]]()
        for root, row in rows:
            tensor, source = self._tensor(row), self._roots[root]
            with self._rank_errors():
                work = self._dist.broadcast(tensor, source, group=self._group, async_op=True)
            works.append(work)
            if root == self.rank:
                sent.append(tensor)
            else:
                received.append((tensor, row))
        return partial(self._wait, works, sent, received)

    def start_alltoall(
        self, sent: Bytes, counts: Sequence[int], room: Bytes, received: Sequence[int]
    ) -> Callable[[], None]:
        given, taken = self._tensor(sent), self._tensor(room)
        with self._rank_errors():
            work = self._dist.all_to_all_single(
                taken, given, list(received), list(counts), group=self._group, async_op=True
            )
        return partial(self._wait, [work], [given], [(taken, room)])
