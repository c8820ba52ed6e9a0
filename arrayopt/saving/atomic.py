"""Files that are replaced at once: whenever the writer is killed, the old or the new one is there, whole (POSIX)."""

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

# A writer holds a lock on its temporary file, which the system takes away when the writer ends, however it ends. So a
# temporary file whose lock can be had is litter. Where a file system has no locks, nothing is ever taken for litter.

LONG = 100
"""The bytes of the longest name that a temporary file's name holds; a longer one it holds a checksum of."""


@contextmanager
def replacing(who: str, path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file in path's folder to write into, which takes path's place, on disk, when the block ends without error.

    It gets the mode, and where that is possible the owner, of the file that it replaces; else what the umask leaves.
    Until then the file's `name` is where it lies. Raise ValueError, which begins with `who`, if there is something else
    than a file at path; OSError where the system cannot do it.
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
            with suppress(OSError):  # a child process may have it still
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
    """What not every file system can do with a folder: list it, bring it to disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
            raise


def created(target: Path) -> tuple[IO[bytes], Path]:
    """A temporary file beside the target, locked."""
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
            with suppress(OSError):  # as where it is another's
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
            with suppress(OSError):  # as on a file system without modes
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # if not, another writer has cleared it away before it was locked
            return file, temporary
        file.close()


def _stem(target: Path) -> str:
    """What the names of the target's temporary files begin with."""
    name = os.fsencode(target.name)
    return f".{target.name if len(name) <= LONG else blake2b(name, digest_size=16).hexdigest()}."


def _clear(target: Path) -> None:
    """Remove what dead writers of the same target left."""
    temporary = re.compile(rf"{re.escape(_stem(target))}[0-9a-f]{{16}}\.arrayopt-tmp")
    entries = list[Path]()
    with _where_possible():  # not in a folder that cannot be listed
        entries += target.parent.iterdir()
    for entry in entries:
        if temporary.fullmatch(entry.name):
            with suppress(OSError):  # the lock of a live writer raises BlockingIOError
                if not stat.S_ISREG(os.lstat(entry).st_mode):  # as a pipe, which nobody may ever write to
                    continue
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                with open(os.open(entry, flags), "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    entry.unlink()
