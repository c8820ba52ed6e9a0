"""Files of text that are replaced, whole, by others."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


@contextmanager
def replacing_text(who: str, path: str, newline: str | None = None) -> Iterator[IO[str]]:
    """A text in UTF-8 to write into, which takes path's place when the block ends without error.

    On systems other than POSIX the file is written where it is.
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
            text.detach()  # which writes what is left, and leaves the file open
