"""The cache of compiled code: `read` and `write` files, each for an identity, which is a text with
all that the data depends on. A file begins with a checksum of both, so one of another identity,
or with a changed bit, is not used; nor is one that another user could have written.
"""

import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from arrayopt._version import __version__
from arrayopt.engines.compiling import LOG

try:
    import fcntl
except ImportError:  # on Windows, processes do not wait for each other
    fcntl = None  # type: ignore[assignment]

LARGEST = 1 << 28
"""The largest number of bytes that is read from a file."""

CHECKSUM = 32
"""The number of bytes of a checksum."""

PATIENCE = 120.0
"""The seconds to wait for another process that makes a file, before this one makes it."""

_logged: set[str] = set()


class _DistrustError(OSError):
    """Another user could have written a file."""


def cache_folder() -> Path:
    """Return the cache's folder, in ``ARRAYOPT_CACHE_DIR`` or the user's cache; OSError if none."""
    given, cache = os.environ.get("ARRAYOPT_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(given or cache or Path.home() / ".cache")
    except (RuntimeError, KeyError) as error:
        raise OSError("the user has no home folder") from error
    return (folder if given else folder / "arrayopt") / __version__


def usable_folder() -> Path:
    """Return `cache_folder`; create it if it is missing.

    OSError if it cannot be created; or if it, or its parent, belongs to another user, or other
    users may write there.
    """
    folder = cache_folder()
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _check(folder.parent, os.stat(folder.parent))
    _check(folder, os.lstat(folder))
    return folder


def kept_in() -> str:
    """Return the folder of the cache, for a message; empty if it cannot be used."""
    try:
        return str(usable_folder())
    except OSError:
        return ""


def read(name: str, identity: str) -> bytes | None:
    """Return the data of a file, if it exists, is the user's own, intact, and of this identity."""
    try:
        path = usable_folder() / name
        flags = os.O_RDONLY
        for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
            flags |= getattr(os, flag, 0)
        with open(os.open(path, flags), "rb") as file:
            about = os.fstat(file.fileno())
            _check(path, about)
            if not stat.S_ISREG(about.st_mode) or not CHECKSUM <= about.st_size <= LARGEST:
                return None
            whole = file.read(LARGEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log(error)
        return None
    checksum, data = whole[:CHECKSUM], whole[CHECKSUM:]
    return data if checksum == _checksum(data, identity) else None


def write(name: str, identity: str, data: bytes) -> None:
    """Write data to a file, if possible; several processes may do so at once."""
    try:
        folder = usable_folder()
        path = folder / name
        descriptor, temporary = tempfile.mkstemp(".tmp", dir=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(_checksum(data, identity) + data)
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        _log(error)


@contextmanager
def turn(name: str, *, wait: bool) -> Iterator[bool]:
    """Yield whether this process should make a file, which is False while another one makes it.

    This only saves time: if files cannot be locked, each process makes what it needs.

    Parameters
    ----------
    name : str
        The name of the file.
    wait : bool
        Whether to wait until the other process has made it, or has ended.
    """
    path, descriptor = None, -1
    if fcntl is not None:
        with suppress(OSError):
            path = usable_folder() / f"{name}.lock"
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
    if path is None or descriptor < 0:
        yield True
        return
    mine = False
    try:
        mine = _lock(descriptor, PATIENCE if wait else 0.0)
        yield mine
    finally:
        if mine:
            with suppress(OSError):
                os.unlink(path)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough after a fork
        os.close(descriptor)


def _lock(descriptor: int, patience: float) -> bool:
    """Lock a file; False if another process has it, unless `patience` seconds have passed."""
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return patience > 0.0
        except OSError:  # this file system has no locks
            return True
        time.sleep(0.02)


def _check(path: Path, about: os.stat_result) -> None:
    """Raise OSError if other users could have written a file."""
    if stat.S_ISLNK(about.st_mode):
        raise _DistrustError(f"{path} is a link")
    if os.name == "posix":  # other systems have no modes for other users
        if about.st_uid != os.geteuid():
            raise _DistrustError(f"{path} belongs to another user")
        if about.st_mode & 0o022:
            raise _DistrustError(
                f"other users can write to {path}; remove the permission with `chmod go-w`"
            )


def _checksum(data: bytes, identity: str) -> bytes:
    """Return the checksum of data and its identity."""
    about = blake2b(identity.encode()).digest()
    return blake2b(about + data, digest_size=CHECKSUM).digest()


def _log(error: OSError) -> None:
    """Log once why something is not kept, or not read."""
    message = str(error)
    if message not in _logged:
        _logged.add(message)
        level = logging.WARNING if isinstance(error, _DistrustError) else logging.INFO
        LOG.log(level, "compiled code is not kept: %s", message)
