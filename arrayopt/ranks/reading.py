"""Parameters that processes of one machine copy from each other's memory, without messages."""

import ctypes
import os
import secrets
import sys
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from arrayopt.ranks.comm import Comm, as_bytes

MOST = 1024
"""The maximum number of pieces of a call of process_vm_readv (IOV_MAX)."""

STRETCH = 1 << 20
"""The maximum bytes of a piece, so that a call reads at most 1 GiB. The system's limit is 2."""


def can_read(comm: Comm) -> list[int]:
    """Return the process id of each rank if all may read each other's memory, else an empty list.

    This needs Linux, one machine, and a system on which processes of one user may read each other:
    many containers, and other systems with ``kernel.yama.ptrace_scope=0``.
    """
    token = np.frombuffer(secrets.token_bytes(16), np.uint8)
    machine = ""
    if sys.platform == "linux":
        boot = Path("/proc/sys/kernel/random/boot_id")
        try:
            machine = f"{boot.read_text('ascii')} {Path('/proc/self/ns/pid').readlink()}"
        except OSError:
            machine = ""
    said = [machine, os.getpid(), token.ctypes.data, token.tobytes().hex()]
    every = comm.tell(said)
    works = bool(machine) and all(other[0] == machine for other in every)
    for _, process, address, expected in every if works else ():
        room = np.zeros(16, np.uint8)
        try:
            _read(process, [(room.ctypes.data, 16)], [(address, 16)])
        except (OSError, AttributeError):  # not permitted, or no such call
            works = False
        works = works and room.tobytes().hex() == expected
    return [said[1] for said in every] if all(comm.tell(works)) else []


class Reading:
    """Copies pieces of memory from the processes of other ranks.

    `processes` are the ids of all ranks; see `can_read`. `broadcasts` have pieces of memory, each
    with the rank to read it from, the same on all ranks; see `Gather`.
    """

    def __init__(
        self, comm: Comm, processes: list[int], broadcasts: Sequence[Sequence[tuple[int, Any]]]
    ) -> None:
        self._comm, self._processes = comm, processes
        self._pieces = list(chain(*broadcasts))
        places = [(piece.ctypes.data, piece.size) for _, piece in self._pieces]
        self._places = np.array(places, np.int64).reshape(-1, 2)
        self._calls: list[tuple[int, Any, Any]] | None = None  # None until addresses are known

    def __call__(self) -> bool:
        """Wait until all ranks have updated, read, and wait until all have read.

        Addresses are exchanged only if a rank has new ones. Return False if a rank could not read;
        ranks may then have read a part.
        """
        comm = self._comm
        is_new = np.array([self._calls is None], np.uint8)
        if np.concatenate(comm.allgather(is_new, [1] * comm.size)()).any():
            self._calls = self._exchange()
        works = np.ones(1, np.uint8)
        try:
            for process, here, there in self._calls or ():
                _read(process, here, there)
        except OSError:  # no longer permitted, or a process has ended
            works[:] = 0
        return bool(np.concatenate(comm.allgather(works, [1] * comm.size)()).all())

    def _exchange(self) -> list[tuple[int, Any, Any]]:
        """Exchange addresses; return for each call the arguments of `_read`."""
        comm, addresses_here = self._comm, np.ascontiguousarray(self._places[:, 0])
        sent = comm.allgather(as_bytes(addresses_here), [addresses_here.nbytes] * comm.size)()
        owners = np.array([rank for rank, _ in self._pieces], np.int64)
        calls = list[tuple[int, Any, Any]]()
        for rank, addresses in enumerate(sent):
            chosen = np.flatnonzero(owners == rank) if rank != comm.rank else np.zeros(0, np.int64)
            counts = -(-self._places[chosen, 1] // STRETCH)
            at = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            rows = np.repeat(chosen, counts)
            sizes = np.minimum(STRETCH, self._places[rows, 1] - at * STRETCH)
            columns = []
            for starts in (self._places[rows, 0], addresses.view(np.int64)[rows]):
                columns.append(np.stack([starts + at * STRETCH, sizes], axis=1))
            for first in range(0, len(rows), MOST):
                cut = slice(first, first + MOST)
                calls.append((self._processes[rank], columns[0][cut], columns[1][cut]))
        return calls


@cache
def _call() -> Any:
    """Return process_vm_readv of the C library."""
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    place = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = [ctypes.c_int, *place, *place, ctypes.c_ulong]
    call.restype = ctypes.c_ssize_t
    return call


def _read(process: int, here: Any, there: Any) -> None:
    """Copy memory of a process, or raise OSError. Rows of `here`, `there`: address, length."""
    rows = [np.ascontiguousarray(x, np.int64) for x in (here, there)]
    count = len(rows[0])
    found = _call()(process, rows[0].ctypes.data, count, rows[1].ctypes.data, count, 0)
    if found != rows[0][:, 1].sum():
        number = ctypes.get_errno() if found < 0 else 0
        raise OSError(number, os.strerror(number) if number else "it was read in part only")
