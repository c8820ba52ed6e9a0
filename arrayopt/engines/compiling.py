"""A line in the log if compiling takes long, also for users without a terminal."""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

LOG = logging.getLogger("arrayopt")

PATIENCE = 2.0
"""After so many seconds of compiling, the log gets a line."""

_section = threading.local()
_told: set[str] = set()


def quiet() -> bool:
    """Whether the user wants no word of what is compiled."""
    return os.environ.get("ARRAYOPT_QUIET", "0") not in ("", "0")


@contextmanager
def compiling(what: Sequence[str], kept: str = "") -> Iterator[None]:
    """A section in which something is compiled; if it lasts, the log gets a warning, once in a
    process for each thing.

    What is compiled in a section within it is part of it.

    It is no warning of Python's: those can be made errors, and the step is right. `kept` says where
    the result is kept, so that later runs need not compile it.
    """
    if quiet() or getattr(_section, "open", False) or _told.issuperset(what):
        yield
        return
    timer = threading.Timer(PATIENCE, _tell, (what, kept))
    timer.daemon = _section.open = True
    with suppress(RuntimeError):  # the system has no more threads
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _section.open = False


def _tell(what: Sequence[str], kept: str) -> None:
    """The line."""
    _told.update(what)
    more = f" and {len(what) - 1} more" if len(what) > 1 else ""
    later = (
        f"kept for later runs in {kept}" if kept else "it is not kept, and made again in each run"
    )
    LOG.warning("arrayopt: compiling %s%s, which takes some seconds; %s", what[0], more, later)
