"""Paths, checked."""

import os
from typing import Any

__all__ = ["checked_path"]


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
        raise ValueError(f"{who}: `path` must be one that a file can have; got {given!r}")
    return given
