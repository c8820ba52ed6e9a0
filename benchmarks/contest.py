"""Timing side by side: contestants take turns, so that what else the machine does falls on all of them alike."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np

__all__ = ["Contestant", "Race", "Running", "memory_available", "race"]

MEMORY = 9e9
"""Bytes that contestants may hold at a time; where the machine has less, half of what is free."""


@dataclass(frozen=True)
class Running:
    """A contestant that is ready.

    Attributes
    ----------
    step : callable
        Makes one step, and returns when it is done.
    values : callable
        The parameters as NumPy arrays.
    before : callable
        Called before each step, outside the timing.
    settings : mapping of str to callable
        What makes each setting that it can run with, such as a number of threads. A race uses the fastest.
    """

    step: Callable[[], object]
    values: Callable[[], Sequence[np.ndarray]] = tuple
    before: Callable[[], object] = lambda: None
    settings: Mapping[str, Callable[[], object]] = field(default_factory=dict)


@dataclass(frozen=True)
class Contestant:
    """Something to be timed.

    Attributes
    ----------
    name : str
        What tables call it.
    build : callable
        Makes it ready.
    held : float
        Bytes that it holds from then on, about.
    extra : float
        Bytes that a step takes on top, about.
    left_out : str
        Why it does not take part; empty if it does.
    """

    name: str
    build: Callable[[], Running] = lambda: Running(lambda: None)
    held: float = 0.0
    extra: float = 0.0
    left_out: str = ""


@dataclass
class Race:
    """What came of it.

    Attributes
    ----------
    rounds : list of dict of str to float
        Seconds by contestant, for each round.
    left_out : dict of str to str
        Who could not be timed, and why.
    settings : dict of str to str
        The setting of each contestant that has several.
    """

    rounds: list[dict[str, float]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Who has times, in order of entry."""
        return list(dict.fromkeys(name for times in self.rounds for name in times))

    def seconds(self, name: str) -> float:
        """The median time of a step."""
        return median(times[name] for times in self.rounds if name in times)

    def ratio(self, name: str, to: str) -> float:
        """The median of how many times longer one takes than another in the same round."""
        return median(times[name] / times[to] for times in self.rounds if name in times and to in times)


def race(
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    least: int = 3,
    warmup: int = 1,
    seconds: float = np.inf,
    always: Sequence[Contestant] = (),
) -> Race:
    """Time contestants in turns.

    Parameters
    ----------
    contestants : sequence of Contestant
        Where they do not fit into memory together, they are split; the first takes part in every part.
    rounds : int
        How often each is timed.
    least : int
        How often each is timed at least, however slow it is.
    warmup : int
        How many steps each makes before: the first compiles and makes state.
    seconds : float
        For how long all make steps together, about: who has used up an equal part of it sits out from then on.
    always : sequence of Contestant
        Who else takes part in every part.
    """
    made = Race(left_out={c.name: c.left_out for c in contestants if c.left_out})
    able = [c for c in contestants if not c.left_out]
    budget = min(MEMORY, memory_available() / 2)
    heats = list(_heats(able, budget - sum(c.held for c in always)))
    fixed = [c.name for c in [*always, *able[:1]]]
    for heat in heats:
        running = _ready([*always, *heat], fixed, warmup, made)
        gc.collect()
        gc.disable()
        try:
            made.rounds += _rounds(running, fixed, rounds, least, seconds / len(heats))
        finally:
            gc.enable()
        _check(running)
        running.clear()
        gc.collect()
    return made


def memory_available() -> float:
    """Bytes of memory that are free for use."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 2 * MEMORY


def _heats(contestants: Sequence[Contestant], budget: float) -> Iterator[list[Contestant]]:
    """Split into groups that fit into memory, each with the first contestant."""
    first, *others = contestants
    heat = [first]
    for c in others:
        if len(heat) > 1 and sum(x.held for x in [*heat, c]) + max(x.extra for x in [*heat, c]) > budget:
            yield heat
            heat = [first]
        heat.append(c)
    yield heat


def _ready(heat: Sequence[Contestant], fixed: list[str], warmup: int, made: Race) -> dict[str, Running]:
    """Build and warm up those of one heat, each with its best setting; who fails is left out, if it can be."""
    running: dict[str, Running] = {}
    for c in heat:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                running[c.name] = c.build()
                for _ in range(warmup):
                    running[c.name].before()
                    running[c.name].step()
                if running[c.name].settings:
                    made.settings[c.name], running[c.name] = _at_best(running[c.name])
        except Exception as error:  # whatever another library's version may raise
            if c.name in fixed:
                raise
            running.pop(c.name, None)
            made.left_out[c.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return running


def _at_best(runner: Running) -> tuple[str, Running]:
    """The fastest of its settings, by the median of three steps of each in turns; and the contestant with it."""
    times: dict[str, list[float]] = {setting: [] for setting in runner.settings}
    for _ in range(3):
        for setting, make in runner.settings.items():
            make()
            for kept in (False, True):  # the first step with a setting may start threads
                runner.before()
                begin = time.perf_counter()
                runner.step()
                if kept:
                    times[setting].append(time.perf_counter() - begin)
    best = min(times, key=lambda setting: median(times[setting]))

    def before() -> None:
        runner.settings[best]()
        runner.before()

    return best, replace(runner, before=before)


def _rounds(
    running: dict[str, Running], fixed: list[str], rounds: int, least: int, seconds: float
) -> Iterator[dict[str, float]]:
    """The rounds of one heat; `fixed` ones do not sit out while anyone goes on."""
    spent, part = dict.fromkeys(running, 0.0), seconds / max(1, len(running))
    for i in range(rounds):
        going = {name for name in running if i < least or spent[name] < part}
        if not going:
            return
        times = _round({name: x for name, x in running.items() if name in going.union(fixed)}, turn=i)
        for name, taken in times.items():
            spent[name] += 2 * taken
        yield times


def _round(running: dict[str, Running], turn: int) -> dict[str, float]:
    """One timed step of each, beginning with another in each turn.

    A step that is not timed comes first, so that nobody pays for what the one before has left in caches and memory.
    """
    names = list(running)
    times = dict.fromkeys(names, 0.0)
    for name in names[turn % len(names) :] + names[: turn % len(names)]:
        for _ in range(2):
            running[name].before()
            begin = time.perf_counter()
            running[name].step()
            times[name] = time.perf_counter() - begin
    return times


def _check(running: dict[str, Running]) -> None:
    """Raise FloatingPointError if a contestant's parameters are not finite."""
    for name, runner in running.items():
        if not all(np.isfinite(x.ravel()[:1000]).all() for x in runner.values()):
            raise FloatingPointError(f"benchmark: {name} no longer has finite parameters, so its times mean nothing")
