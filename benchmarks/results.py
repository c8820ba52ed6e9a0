"""What a benchmark finds, as data."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.contest import Race
from benchmarks.machine import COPY
from benchmarks.problems import Problem

__all__ = ["Row", "Sheet", "markdown", "reasons", "rows"]


@dataclass(frozen=True)
class Sheet:
    """A table as text.

    Attributes
    ----------
    title : str
        Its heading.
    columns : tuple of str
        The columns' headings; all but the first `names` columns are of numbers.
    lines : list of tuple of str
        The cells.
    names : int
        How many columns are of names.
    notes : tuple of str
        Sentences below the table, such as who was not measured, and why.
    """

    title: str
    columns: tuple[str, ...]
    lines: list[tuple[str, ...]]
    names: int = 1
    notes: tuple[str, ...] = ()


def markdown(sheet: Sheet) -> str:
    """A table in Markdown; where a name stands again below itself, it is left out."""
    rule = "|".join("---" if i < sheet.names else "---:" for i in range(len(sheet.columns)))
    lines, before = [f"| {' | '.join(sheet.columns)} |", f"|{rule}|"], ""
    for line in sheet.lines:
        first = line[0] if line[0] != before or sheet.names != 2 else ""
        before = line[0]
        lines.append(f"| {' | '.join((first, *line[1:]))} |".replace("  |", " |"))
    return "\n".join(lines)


@dataclass(frozen=True)
class Row:
    """One contestant's time over one problem.

    Attributes
    ----------
    rule, problem, name : str
        The rule, the problem's title and the contestant.
    ms : float
        The median time of a step in milliseconds.
    ratio : float
        How many times longer it takes than the reference in the same round, as a median.
    moved : float or None
        Bytes per parameter that its plan moves, where it has one.
    share : float or None
        Those bytes per second, as a share of what a copy moves in the same round, as a median.
    setting : str
        Its fastest setting, where it has several.
    """

    rule: str
    problem: str
    name: str
    ms: float
    ratio: float
    moved: float | None = None
    share: float | None = None
    setting: str = ""

    def shown(self, name: str) -> str:
        """A name of the row, with its setting."""
        return f"{name}, {self.setting}" if self.setting else name


def reasons(left_out: Mapping[str, str]) -> tuple[str, ...]:
    """Notes on contestants that have no row."""
    return tuple(f"Not measured: {name}, because {why}." for name, why in left_out.items())


def rows(
    race: Race,
    problem: Problem,
    moved: Mapping[str, float],
    copied: float = 0.0,
    *,
    to: str,
    rule: str | None = None,
) -> list[Row]:
    """The rows that a race gives.

    Parameters
    ----------
    race : Race
        The race.
    problem : Problem
        What it was run over.
    moved : mapping of str to float
        Bytes per parameter, by contestant, where they are known.
    copied : float
        Bytes that the copy moved.
    to : str
        Whom all are compared with.
    rule : str, optional
        Whose rule all compute; else contestants are named by their rules.
    """
    made = []
    for name in race.names:
        if name == COPY:
            continue
        share = race.ratio(COPY, name) * moved[name] * problem.elements / copied if name in moved else None
        times = 1e3 * race.seconds(name), race.ratio(name, to)
        made.append(Row(rule or name, problem.title, name, *times, moved.get(name), share, race.settings.get(name, "")))
    return made
