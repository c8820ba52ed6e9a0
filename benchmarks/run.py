"""The benchmark's command line: ``python benchmarks/run.py --help``."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of this folder
# Before any library starts its threads: idle ones are not to spin while another contestant works.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console  # noqa: E402

from arrayopt.engines.threads import thread_count  # noqa: E402
from benchmarks import doors, loops, ours, page, peers_jax, peers_torch, picture, products, report, scaling  # noqa: E402
from benchmarks.contest import Contestant, race  # noqa: E402
from benchmarks.machine import COPY, copying, look  # noqa: E402
from benchmarks.problems import PROBLEMS, Problem  # noqa: E402
from benchmarks.results import Memory, Results, Row, rows  # noqa: E402
from benchmarks.rules import side_by_side  # noqa: E402
from benchmarks.small import small_steps  # noqa: E402

__all__ = ["FULL", "QUICK", "Settings", "main", "measure"]


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes
    ----------
    rules : tuple of str
        The rules of the contest.
    problems : tuple of Problem
        What they are run over.
    rounds : int
        How often each contestant is timed.
    least : int
        How often at least, however slow it is.
    warmup : int
        How many steps each makes before.
    seconds : float
        How long the contestants of one rule and problem make steps, all together.
    patience : float
        A contestant that would take so many seconds to compile is left out.
    copied : int
        Bytes of the array whose copying is timed.
    scaled : tuple of str
        The rules whose scaling and memory are measured.
    sizes : tuple of int
        Parameters of the first scaling series.
    counts : tuple of int
        Tensors of the second.
    total : int
        Parameters of the second.
    weighed : tuple of Problem
        What memory is measured over.
    few : tuple of int
        Tensors of small steps.
    more : tuple of str
        The rules that have one contest only.
    model : Problem
        What that is over.
    products : tuple of Problem
        The matrices that the rules for these are run over.
    doors : tuple of tuple of int
        The shapes of the tensors that are updated through `arrayopt.torch`.
    little : float
        As `seconds`, in these three contests.
    """

    rules: tuple[str, ...] = tuple(ours.RULES)
    problems: tuple[Problem, ...] = tuple(PROBLEMS[x] for x in ("bert-base", "resnet-50", "10000x64"))
    rounds: int = 15
    least: int = 3
    warmup: int = 2
    seconds: float = 15.0
    patience: float = 60.0
    copied: int = 1 << 28
    scaled: tuple[str, ...] = tuple(ours.RULES)
    sizes: tuple[int, ...] = (10_000_000, 40_000_000, 100_000_000, 400_000_000)
    counts: tuple[int, ...] = (10, 100, 1_000, 10_000)
    total: int = 100_000_000
    weighed: tuple[Problem, ...] = tuple(PROBLEMS[x] for x in ("resnet-50", "10000x64"))

    few: tuple[int, ...] = (2, 20, 200)
    more: tuple[str, ...] = tuple(ours.MORE)
    model: Problem = PROBLEMS["resnet-50"]
    products: tuple[Problem, ...] = tuple(products.PROBLEMS.values())
    doors: tuple[tuple[int, ...], ...] = doors.SHAPES
    little: float = 5.0

    @property
    def pace(self) -> dict[str, Any]:
        """What a race is to be told."""
        return {"rounds": self.rounds, "least": self.least, "warmup": self.warmup, "seconds": self.seconds}

    @property
    def quickly(self) -> dict[str, Any]:
        """What a race is to be told that is one of many."""
        return self.pace | {"seconds": self.little}


FULL = Settings()
QUICK = Settings(
    problems=tuple(PROBLEMS[x] for x in ("bert-2-layers", "resnet-3-stages", "2000x64")),
    rounds=7,
    least=2,
    warmup=1,
    seconds=1.5,
    patience=8.0,
    scaled=("LAMB",),
    sizes=(10_000_000, 40_000_000),
    total=10_000_000,
    weighed=tuple(PROBLEMS[x] for x in ("bert-2-layers", "2000x64")),
    model=PROBLEMS["resnet-3-stages"],
    products=(products.PROBLEMS["mixed"],),
    doors=doors.SHAPES[:1],
    little=0.7,
)
ONE_PART: dict[str, Any] = {
    "problems": (),
    "weighed": (),
    "few": (),
    "scaled": (),
    "more": (),
    "products": (),
    "doors": (),
}


def measure(settings: Settings, command: str, say: Callable[[str], object] = lambda line: None) -> Results:
    """Run all that the settings ask for.

    Parameters
    ----------
    settings : Settings
        How much.
    command : str
        What the page is to give as the command.
    say : callable
        Is told what is being measured.
    """
    results = Results(look(command))
    for problem in settings.problems if settings.rules else ():
        for rule in settings.rules:
            say(f"{rule} over {problem.title}")
            own = [*ours.contestants(rule, problem), *loops.contestants(rule, problem)]
            results.rows += _raced(rule, problem, own, settings, results, **settings.pace)
        say(f"rules side by side over {problem.title}")
        results.beside += side_by_side(settings.rules, problem, settings.copied, **settings.pace)
        problem.__dict__.pop("grads", None)
    for rule in settings.more:
        say(f"{rule} over {settings.model.title}")
        fused = [c for c in ours.contestants(rule, settings.model) if c.name != "arrayopt array_api"]
        results.more += _raced(rule, settings.model, fused, settings, results, **settings.quickly)
    settings.model.__dict__.pop("grads", None)
    for problem in settings.products:
        for rule in products.RULES:
            say(f"{rule} over {problem.title}")
            entered = products.contestants(rule, problem, settings.patience)
            times = race(entered, **settings.quickly)
            results.products += rows(times, problem, {}, to=ours.REFERENCE, rule=rule)
            results.left_out |= {(rule, problem.title, name): why for name, why in times.left_out.items()}
    if settings.doors and find_spec("torch"):
        say("steps through arrayopt.torch")
        results.doors += doors.through_doors(settings.doors, **settings.quickly)
    if settings.few:
        say("small steps")
        results.small += small_steps(settings.few, **settings.pace)
    for rule in settings.scaled:
        say(f"scaling of {rule}")
        series = {
            "parameters": scaling.by_parameters(rule, settings.sizes, **settings.pace),
            "tensors": scaling.by_tensors(rule, settings.counts, settings.total, **settings.pace),
        }
        for name, points in series.items():
            results.points.setdefault(name, []).extend(points)
    for problem in settings.weighed:
        say(f"memory over {problem.title}")
        for rule in settings.scaled:
            for engine in dict.fromkeys((*ours.FUSED, "array_api")):
                share = ours.step_memory(rule, problem, engine)
                results.memory.append(Memory(rule, problem.title, engine, share))
        problem.__dict__.pop("grads", None)
    return results


def _raced(
    rule: str, problem: Problem, own: Sequence[Contestant], settings: Settings, results: Results, **pace: Any
) -> list[Row]:
    """One rule over one problem: some of ours, and all peers."""
    contestants = [
        *own,
        *peers_torch.contestants(rule, problem),
        *peers_jax.contestants(rule, problem, settings.patience),
    ]
    copy = copying(settings.copied)
    times = race(contestants, always=[copy], **pace)
    copied, moved = 2 * settings.copied, ours.bytes_per_parameter(rule, problem)
    results.copies.append(copied / times.seconds(COPY))
    fused = {f"arrayopt {engine}": moved for engine in ours.FUSED}
    results.left_out |= {(rule, problem.title, name): why for name, why in times.left_out.items()}
    return rows(times, problem, fused, copied, to=ours.REFERENCE, rule=rule)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page and the picture where that is asked for."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py",
        description="Time this library's rules and engines beside other libraries' optimizers.",
        epilog="Without options it writes benchmarks.md and its pictures in docs; else only where --output says.",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything: a few minutes")
    every = (*ours.RULES, *ours.MORE)
    parser.add_argument("--rules", type=_choice(every), metavar="RULE,...", help=f"of {', '.join(every)}")
    parser.add_argument("--shapes", type=_choice(PROBLEMS), metavar="NAME,...", help=f"of {', '.join(PROBLEMS)}")
    parser.add_argument("--scaling", action="store_true", help="only whether the cost of a parameter stays the same")
    parser.add_argument("--small", action="store_true", help="only small steps, where the time is the host's")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to write benchmarks.md and its pictures")
    parser.add_argument("--patience", type=float, metavar="SECONDS", help="how long a contestant may compile")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else FULL
    if given.rules:
        own, more = (tuple(x for x in given.rules if x in of) for of in (ours.RULES, ours.MORE))
        settings = replace(settings, rules=own, scaled=own, more=more, products=(), doors=(), few=())
    if given.shapes:
        shapes = tuple(PROBLEMS[name] for name in given.shapes)
        settings = replace(settings, problems=shapes, model=shapes[0], products=(), doors=())
    if given.scaling:
        settings = replace(settings, **ONE_PART | {"scaled": settings.scaled})
    if given.small:
        settings = replace(settings, **ONE_PART | {"few": settings.few})
    output = given.output or (ROOT / "docs" if settings == FULL else None)
    if given.patience is not None:
        settings = replace(settings, patience=given.patience)
    _use_all_threads()
    shown = " ".join(["python benchmarks/run.py", *(sys.argv[1:] if arguments is None else arguments)])
    console = Console(highlight=False)
    with console.status("") as status:
        results = measure(settings, shown, status.update if console.is_terminal else console.print)
    report.show(results, console)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        page.write(results, template=ROOT / "docs" / "benchmarks.md", path=output / "benchmarks.md")
        picture.draw(results.rows, output / "benchmarks.png")
        picture.draw(results.more, output / "benchmarks-more.png")
        console.print(f"written: {output / 'benchmarks.md'} and its pictures", soft_wrap=True)
    return 0


def _choice(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of names with commas between them."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if wrong := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}; got {', '.join(wrong)}")
        return names

    return parse


def _use_all_threads() -> None:
    """Give PyTorch as many threads as this library uses; NumPy's and XLA's follow the process's cores."""
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(thread_count())


if __name__ == "__main__":
    sys.exit(main())
