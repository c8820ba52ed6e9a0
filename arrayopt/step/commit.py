"""The section of a step that writes."""

from types import TracebackType

from arrayopt.interrupts import uninterrupted
from arrayopt.ranks.alone import Alone


class Commit(uninterrupted):
    """The section of a step that writes. Signals are deferred; after an error the state is torn."""

    __slots__ = ("_team",)

    def __init__(self, team: Alone) -> None:
        self._team = team

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._team.tear("a step", error)
        super().__exit__(kind, error, traceback)
