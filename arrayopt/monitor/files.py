"""Atomic replacement of text files."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


@contextmanager
def replacing_text(who: str, path: str, newline: str | None = None) -> Iterator[IO[str]]:
    """Yield a UTF-8 text file to write to. It replaces the file at `path` when the block ends without an error.

    On systems other than POSIX, the file at `path` is written directly.
    """
    if os.name != "posix":
        with open(path, "w", newline=newline, encoding="utf-8") as file:
            yield file
        return
    from arrayopt.saving.atomic import replacing  # for POSIX systems only

    with replacing(who, path) as raw:
        text = io.TextIOWrapper(raw, "utf-8", newline=newline)
        try:
            yield text
        finally:
            text.detach()  # this flushes the text, and leaves the file open
