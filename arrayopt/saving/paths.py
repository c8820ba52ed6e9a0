"""Paths, checked."""

import os
import stat
from typing import Any

__all__ = ["checked_path", "refuse_others"]


def checked_path(who: str, path: Any) -> str:
    """A path as a string; TypeError or ValueError for what can be none."""
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
    """Raise ValueError for a pipe, a device or a socket, which to open as a file may wait for ever, or do harm."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(f"{who}: {os.fspath(path)} is not a regular file; pass the path of a file, or a new path")
