"""Atomic replacement of files: if the writer is killed at any time, the complete old or new file exists (POSIX)."""

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO

from arrayopt.saving.paths import refuse_others

# A writer locks its temporary file, and the system releases the lock when the writer ends for any reason. So an un-
# locked temporary file is a leftover, and is removed. On a file system without locks, nothing is removed.

LONG = 100
"""The temporary file's name contains the target's name if that has at most this many bytes, else its checksum."""


@contextmanager
def replacing(who: str, path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a temporary file in path's folder for writing. It replaces path, on disk, if the block ends without error.

    It gets the mode, and if possible the owner, of the file that it replaces; a new file gets the mode that the umask
    allows. During the block, the file's `name` is the temporary path. Raise ValueError, which begins with `who`, if
    path exists and is not a file, and OSError if the system refuses.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder")
    refuse_others(who, target)
    _clear(target)
    file, temporary = created(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
            with suppress(OSError):  # a child process may have the file open
                fcntl.flock(file, fcntl.LOCK_UN)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with _where_possible():
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def _where_possible() -> Iterator[None]:
    """Ignore errors of operations that some file systems lack: listing a folder, and fsync on it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
            raise


def created(target: Path) -> tuple[IO[bytes], Path]:
    """Create and lock a temporary file beside the target."""
    try:
        old = os.stat(target)
    except FileNotFoundError:
        old = None
    while True:
        temporary = target.with_name(f"{_stem(target)}{secrets.token_hex(8)}.arrayopt-tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        mode = 0o666 if old is None else 0o600
        file = open(temporary, "wb", opener=lambda name, _: os.open(name, flags, mode))  # noqa: B023, SIM115
        if old is not None:
            with suppress(OSError):  # for instance if another user owns it
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
            with suppress(OSError):  # for instance on a file system without modes
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # else another writer has removed it before it was locked
            return file, temporary
        file.close()


def _stem(target: Path) -> str:
    """The first part of the names of the target's temporary files."""
    name = os.fsencode(target.name)
    return f".{target.name if len(name) <= LONG else blake2b(name, digest_size=16).hexdigest()}."


def _clear(target: Path) -> None:
    """Remove temporary files that dead writers of the same target have left."""
    temporary = re.compile(rf"{re.escape(_stem(target))}[0-9a-f]{{16}}\.arrayopt-tmp")
    entries = list[Path]()
    with _where_possible():  # the folder may not be readable
        entries += target.parent.iterdir()
    for entry in entries:
        if temporary.fullmatch(entry.name):
            with suppress(OSError):  # the lock of a live writer raises BlockingIOError
                if not stat.S_ISREG(os.lstat(entry).st_mode):  # to open a pipe might wait forever
                    continue
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                with open(os.open(entry, flags), "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    entry.unlink()
