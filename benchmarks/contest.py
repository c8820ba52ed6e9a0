"""Timing side by side: contestants take turns, so that what else the machine does falls on all of them alike."""

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from arrayopt.engines.threads import thread_count

__all__ = ["THREADS", "Contestant", "Race", "Running", "by_threads", "memory_available", "race", "use_threads"]

THREADS = thread_count()
"""How many threads each contestant may use at most."""

MEMORY = 9e9
"""Bytes that contestants may hold at a time; where the machine has less, half of what is free."""

TRYING = 1.0
"""Seconds after which no more steps are made to find out which setting is best."""


def use_threads(count: int) -> None:
    """Let this library's engines use so many threads."""
    os.environ["ARRAYOPT_NUM_THREADS"] = str(count)


def by_threads(use: Callable[[int], object] = use_threads) -> dict[str, Callable[[], object]]:
    """Settings of a contestant: one thread, and all. Over small tensors, one is often faster."""
    return {f"{n} thread{'s' if n > 1 else ''}": partial(use, n) for n in sorted({1, THREADS})}


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
            use_threads(THREADS)
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
                    _once(running[c.name])
                if running[c.name].settings:
                    made.settings[c.name], running[c.name] = _at_best(running[c.name])
        except Exception as error:  # whatever another library's version may raise
            if c.name in fixed:
                raise
            running.pop(c.name, None)
            made.left_out[c.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return running


def _at_best(runner: Running) -> tuple[str, Running]:
    """The fastest of its settings, by the median of up to five steps of each in turns; and the contestant with it."""
    tried = {setting: _set(runner, make) for setting, make in runner.settings.items()}
    times: dict[str, list[float]] = {setting: [] for setting in tried}
    began = time.perf_counter()
    while len(tried) > 1 and len(times[next(iter(tried))]) < 5:
        for setting, runner_so in tried.items():
            _once(runner_so)  # the first step with a setting may start threads
            times[setting].append(_once(runner_so))
        if time.perf_counter() - began > TRYING:
            break
    best = min(times, key=lambda setting: median(times[setting] or [0.0]))
    return best, tried[best]


def _set(runner: Running, make: Callable[[], object]) -> Running:
    """A contestant with one of its settings."""

    def before() -> None:
        make()
        runner.before()

    return replace(runner, before=before)


def _once(runner: Running) -> float:
    """The seconds of one step."""
    use_threads(THREADS)  # the contestant before may have had a setting
    runner.before()
    begin = time.perf_counter()
    runner.step()
    return time.perf_counter() - begin


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
        _once(running[name])
        times[name] = _once(running[name])
    return times


def _check(running: dict[str, Running]) -> None:
    """Raise FloatingPointError if a contestant's parameters are not finite."""
    for name, runner in running.items():
        if not all(np.isfinite(x.ravel()[:1000]).all() for x in runner.values()):
            raise FloatingPointError(f"benchmark: {name} no longer has finite parameters, so its times mean nothing")
