"""Checks of paths."""

import os
import stat
import warnings
from typing import Any

OTHERS = (".h5", ".hdf5", ".json", ".msgpack", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth")
"""File name extensions of other formats."""


def checked_path(who: str, path: Any) -> str:
    """Return a path as a string; raise TypeError or ValueError if it is not a path."""
    given = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(given, str):
        raise TypeError(f"{who}: `path` must be a string or a path; got {path!r}")
    try:
        possible = b"\0" not in os.fsencode(given)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise ValueError(f"{who}: `path` must be a valid file name; got {given!r}")
    return given


def refuse_others(who: str, path: str | os.PathLike[str]) -> None:
    """Raise ValueError for a pipe, a device or a socket: opening one may wait forever, or do harm."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(f"{who}: {os.fspath(path)} is not a regular file; pass the path of a file, or a new path")


def warn_of_name(who: str, path: str) -> None:
    """Warn if the file name has the extension of another format. The warning points to the caller's caller."""
    stem, suffix = os.path.splitext(path)
    if suffix.lower() in OTHERS:
        warnings.warn(
            f"{who}: the format of the file is safetensors, but {path!r} names another one; call it"
            f" {stem + '.safetensors'!r}",
            stacklevel=3,
        )
