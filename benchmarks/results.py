"""What a run finds, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.contest import Race
from benchmarks.machine import COPY, Machine
from benchmarks.problems import Problem

__all__ = ["Memory", "Point", "Results", "Row", "Sheet", "find", "rows"]


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
    """

    title: str
    columns: tuple[str, ...]
    lines: list[tuple[str, ...]]
    names: int = 1


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


@dataclass(frozen=True)
class Point:
    """One of a series: the cost of a parameter.

    Attributes
    ----------
    rule, label : str
        The rule, and what is updated.
    ns : float
        Nanoseconds per parameter.
    growth : float
        As a multiple of the first of the series, in the same round, as a median.
    """

    rule: str
    label: str
    ns: float
    growth: float


@dataclass(frozen=True)
class Memory:
    """What one step allocates at most at a time, as a share of parameters and state."""

    rule: str
    problem: str
    engine: str
    share: float


@dataclass
class Results:
    """All that a run finds.

    Attributes
    ----------
    machine : Machine
        What it was made on.
    rows : list of Row
        The contest.
    beside : list of Row
        Our rules beside each other.
    left_out : dict of (str, str, str) to str
        Why a contestant has no row, by rule, problem and contestant.
    copies : list of float
        Bytes per second that copying moved, of each race.
    points : dict of str to list of Point
        The scaling series, by heading.
    memory : list of Memory
        What steps allocate.
    small : list of Row
        Small steps.
    more : list of Row
        The contest of the other rules, over one model's shapes.
    products : list of Row
        The contest of the rules for matrices.
    doors : list of Row
        Steps through `arrayopt.torch`, beside those of `arrayopt.Optimizer`.
    sheets : list of Sheet
        Other tables.
    """

    machine: Machine
    rows: list[Row] = field(default_factory=list)
    beside: list[Row] = field(default_factory=list)
    left_out: dict[tuple[str, str, str], str] = field(default_factory=dict)
    copies: list[float] = field(default_factory=list)
    points: dict[str, list[Point]] = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)
    small: list[Row] = field(default_factory=list)
    more: list[Row] = field(default_factory=list)
    products: list[Row] = field(default_factory=list)
    doors: list[Row] = field(default_factory=list)
    sheets: list[Sheet] = field(default_factory=list)

    @property
    def incomplete(self) -> bool:
        """Whether a part is missing that the five results in short are taken from."""
        return not (self.rows and self.products and self.small)

    @property
    def problems(self) -> list[str]:
        """The titles of the problems of the contest, in order."""
        return list(dict.fromkeys(row.problem for row in self.rows))

    def row(self, rule: str, problem: str, name: str) -> Row | None:
        """A row of the contest."""
        return find(self.rows, rule, problem, name)


def find(rows: Sequence[Row], rule: str, problem: str, name: str) -> Row | None:
    """The row of a contestant, if there is one."""
    return next((x for x in rows if (x.rule, x.problem, x.name) == (rule, problem, name)), None)


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
