"""Files that are replaced at once: whenever the writer is killed, the old or the new one is there, whole (POSIX)."""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

__all__ = ["replacing"]

# A writer holds a lock on its temporary file, which the system takes away when the writer ends, however it ends. So a
# temporary file whose lock can be had is litter. Where a file system has no locks, nothing is ever taken for litter.


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file in path's folder to write into, which takes path's place, on disk, when the block ends without error.

    Raises
    ------
    ValueError
        If there is something else than a file at path.
    OSError
        Where the system cannot do it.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder")
    if target.exists() and not target.is_file():
        raise ValueError(f"{target} is not a regular file")
    _clear(target)
    file, temporary = _create(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _create(target: Path) -> tuple[IO[bytes], Path]:
    """A temporary file beside the target, locked."""
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.arrayopt-tmp")
        file = open(temporary, "xb")  # noqa: SIM115 - closed by the caller
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # if not, another writer has cleared it away before it was locked
            return file, temporary
        file.close()


def _clear(target: Path) -> None:
    """Remove what dead writers of the same target left."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.arrayopt-tmp")
    for entry in target.parent.iterdir():
        if ours.fullmatch(entry.name):
            with suppress(OSError), open(entry, "rb") as file:  # the lock of a live writer raises BlockingIOError
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                entry.unlink()
