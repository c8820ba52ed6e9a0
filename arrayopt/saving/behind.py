"""Checkpoints that ranks write together in the background.

Each rank copies the arrays that it writes, and a thread writes the copies. Threads send no messages. Each rank but rank
0 has a small file beside the checkpoint, which it locks until its part is on disk; the system releases the lock if the
process ends. Rank 0 waits for these locks, reads the checksums in the small files, and completes the checkpoint. The
other ranks wait for rank 0's lock on the checkpoint.
"""

import fcntl
import json
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from arrayopt.ranks.alone import Alone
from arrayopt.saving.atomic import created
from arrayopt.saving.words import as_memory
from arrayopt.saving.writing import File

WHO = "Optimizer.save"


def begin_behind(file: File, team: Alone) -> Callable[[], None] | None:
    """Copy this rank's arrays; return a function that writes them, or None. An error on one rank is raised on all."""
    stack, error, write = ExitStack(), None, None
    try:
        write = _copied(file, team, stack)
    except BaseException as caught:
        error = caught
    try:
        team.agree(WHO, dict, error)
    except BaseException:
        _give_up(stack)
        raise
    return write


def _copied(file: File, team: Alone, stack: ExitStack) -> Callable[[], None] | None:
    """See `begin_behind`."""
    files, temporary, shared = file.begin(team, stack) if team.size > 1 else ([], "", False)
    beside = list[IO[bytes]]()

    def add() -> str | None:
        if not team.rank:
            return None
        made, path = created(Path(os.path.realpath(file.path)))
        stack.callback(path.unlink, missing_ok=True)
        stack.callback(made.close)
        beside.append(made)
        return str(path)

    names = team.hear(WHO, add) if shared else []
    shared = shared and all(team.hear(WHO, lambda: _are_locked([temporary] if team.rank else names[1:])))
    if not shared:  # also if locks do not work on this file system
        error = file.copy(team.rank)
        _give_up(stack)
        if error is not None:
            raise error
        return file.write_copy if team.rank == 0 else None
    copies = list[tuple[int, int, Any]]()
    file.visit(
        team.rank,
        file.writers(team.size),
        lambda i, at, value: copies.append((i, at, np.array(as_memory(value)))),
    )
    if team.rank:
        return lambda: _write_part(file, copies, files[0], temporary, beside[0], stack)
    return lambda: _complete(file, copies, files[0], names[1:], stack)


def _give_up(stack: ExitStack) -> None:
    """Close and remove the files that were begun."""
    with suppress(InterruptedError):
        stack.__exit__(InterruptedError, InterruptedError(), None)


def _are_locked(names: list[str]) -> bool:
    """Whether all of these files are locked by other processes."""
    for name in names:
        try:
            with open(name, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except OSError:
            return False
        return False
    return True


def _write_part(
    file: File, copies: list[tuple[int, int, Any]], sink: IO[bytes], temporary: str, beside: IO[bytes], stack: ExitStack
) -> None:
    """Write the copies of a rank, tell rank 0 the checksums, and wait until the checkpoint is complete."""
    with stack:
        error: BaseException | None = None
        try:
            said: Any = [(i, file.put(sink, i, at, value)) for i, at, value in copies]
            sink.flush()
            os.fsync(sink.fileno())
        except BaseException as caught:
            error, said = caught, f"{type(caught).__name__}: {caught}"
        copies.clear()
        beside.write(json.dumps(said).encode())
        beside.flush()
        fcntl.flock(beside, fcntl.LOCK_UN)
        fcntl.flock(sink, fcntl.LOCK_SH)  # waits until rank 0 has read the checksums
        if error is not None:
            raise error
        if os.path.exists(temporary) or not os.fstat(sink.fileno()).st_nlink:
            raise RuntimeError(f"{WHO}: rank 0 could not complete the file; an earlier file is unchanged")


def _complete(
    file: File, copies: list[tuple[int, int, Any]], sink: IO[bytes], names: list[str], stack: ExitStack
) -> None:
    """Write the copies of rank 0, wait for the other ranks, and complete the file."""
    with stack:
        try:
            for i, at, value in copies:
                file.note([(i, file.put(sink, i, at, value))])
            copies.clear()
            for rank, name in enumerate(names, 1):
                with open(name, "rb") as beside:
                    fcntl.flock(beside, fcntl.LOCK_SH)
                    text = beside.read()
                said = json.loads(text) if text else "it has ended"
                if isinstance(said, str):
                    raise RuntimeError(f"{WHO}: rank {rank} could not write its part: {said}")
                file.note(said)
            file.finish(sink)
        finally:
            for name in names:
                Path(name).unlink(missing_ok=True)
