"""Log a line if compilation takes long, also for users without a terminal. Whatever compiles does
so in a `compiling` section, with names of what it compiles.
"""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

LOG = logging.getLogger("arrayopt")

PATIENCE = 2.0
"""The seconds of compilation after which a line is logged."""

_section = threading.local()
_logged: set[str] = set()


def quiet() -> bool:
    """Whether the user has switched off messages about compilation."""
    return os.environ.get("ARRAYOPT_QUIET", "0") not in ("", "0")


@contextmanager
def compiling(what: Sequence[str], kept: str = "") -> Iterator[None]:
    """A section in which something is compiled; if it takes long, one warning per name is logged.

    Nested sections log nothing of their own. Python's `warnings` are not used, because they can be
    turned into errors, and the step is correct. `kept` is the folder of the cache, if there is one.
    """
    if quiet() or getattr(_section, "open", False) or _logged.issuperset(what):
        yield
        return
    timer = threading.Timer(PATIENCE, _log, (what, kept))
    timer.daemon = _section.open = True
    with suppress(RuntimeError):  # the system has no more threads
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _section.open = False


def _log(what: Sequence[str], kept: str) -> None:
    """Log the line."""
    _logged.update(what)
    more = f" and {len(what) - 1} more" if len(what) > 1 else ""
    later = (
        f"kept for later runs in {kept}" if kept else "it is not kept, and made again in each run"
    )
    LOG.warning("arrayopt: compiling %s%s, which takes some seconds; %s", what[0], more, later)
