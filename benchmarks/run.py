"""The benchmark's command line: ``python benchmarks/run.py --help``."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Sequence
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

from benchmarks import (  # noqa: E402
    alone,
    apart,
    doors,
    loops,
    ours,
    page,
    peers_jax,
    peers_torch,
    picture,
    products,
    report,
    scaling,
)
from benchmarks.contest import THREADS, Contestant, race  # noqa: E402
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
    alone : tuple of Problem
        What AdamW is run over by contestants that have a process of their own.
    first : tuple of str
        The rules whose first steps are timed, over `model`.
    minimize : tuple of str
        The options of `benchmarks.minimize`, if that is wanted; `ranks` and `weighs`: whether those of
        `benchmarks.ranks` and `benchmarks.memory` are.
    """

    rules: tuple[str, ...] = tuple(ours.RULES)
    problems: tuple[Problem, ...] = tuple(PROBLEMS[x] for x in ("bert-base", "resnet-50", "10000x64"))
    rounds: int = 15
    least: int = 3
    warmup: int = 2
    seconds: float = 8.0
    patience: float = 60.0
    copied: int = 1 << 28
    scaled: tuple[str, ...] = tuple(ours.RULES)
    sizes: tuple[int, ...] = (10_000_000, 40_000_000, 100_000_000)
    counts: tuple[int, ...] = (10, 100, 1_000, 10_000)
    total: int = 100_000_000
    weighed: tuple[Problem, ...] = tuple(PROBLEMS[x] for x in ("resnet-50", "10000x64"))

    few: tuple[int, ...] = (2, 20, 200)
    more: tuple[str, ...] = tuple(ours.MORE)
    model: Problem = PROBLEMS["resnet-50"]
    products: tuple[Problem, ...] = tuple(products.PROBLEMS.values())
    doors: tuple[tuple[int, ...], ...] = doors.SHAPES
    little: float = 3.0
    alone: tuple[Problem, ...] = tuple(PROBLEMS[x] for x in ("bert-base", "resnet-50", "10000x64"))
    first: tuple[str, ...] = ("LAMB", "CAME")
    minimize: tuple[str, ...] = ("--side", "2000")
    ranks: int = 7
    weighs: bool = True

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
    alone=(PROBLEMS["2000x64"],),
    first=("LAMB",),
    minimize=("--only", "many", "--count", "100"),
    ranks=2,
    weighs=False,
)
PARTS: dict[str, tuple[str, ...]] = {
    "contest": ("problems",),
    "more": ("more",),
    "products": ("products",),
    "doors": ("doors",),
    "small": ("few",),
    "scaling": ("sizes", "counts"),
    "memory": ("weighed", "weighs"),
    "alone": ("alone",),
    "first": ("first",),
    "minimize": ("minimize",),
    "ranks": ("ranks",),
}
"""What is measured, by the settings that say how much of it."""


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
    results, began = Results(look(command)), time.monotonic()
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
        for rule in products.rules_over(problem):
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
    for rule in settings.scaled if settings.sizes else ():
        say(f"scaling of {rule}")
        series = {
            "parameters": scaling.by_parameters(rule, settings.sizes, **settings.quickly),
            "tensors": scaling.by_tensors(rule, settings.counts, settings.total, **settings.quickly),
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
    _apart(settings, results, say)
    results.machine.rows["duration"] = f"{(time.monotonic() - began) / 60:.0f} min"
    return results


def _apart(settings: Settings, results: Results, say: Callable[[str], object]) -> None:
    """The tables that processes of their own make."""
    if settings.alone:
        results.sheets.append(alone.settings("AdamW", settings.alone, results, say))
    if settings.first:
        results.sheets.append(alone.first_steps(settings.first, settings.model, results, say))
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.defpath]))
    wanted: list[tuple[str, list[str], dict[str, str], list[str]]] = []
    if settings.minimize:
        # with more threads, SciPy's loop over small problems is some 40 times slower
        wanted.append(("minimize", ["--data", *settings.minimize], {"OPENBLAS_NUM_THREADS": "1"}, []))
    if settings.ranks:
        ranks = ["--measure", "--data", f"--rounds={settings.ranks}"]
        wanted.append(("ranks", ranks, {}, [mpiexec or "mpiexec", "-n", "2"]))
    if settings.weighs:
        wanted.append(("memory", ["--data"], {}, []))
    for name, arguments, env, launcher in wanted:
        say(name)
        try:
            results.sheets += apart.sheets(apart.run([f"benchmarks.{name}", *arguments], env, launcher))
        except RuntimeError as error:
            results.left_out["", f"`python -m benchmarks.{name}`", "arrayopt"] = str(error)


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
        epilog="With no options but --parts and --patience it writes benchmarks.md and its pictures in docs; "
        "else only where --output says.",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything: a few minutes")
    every = (*ours.RULES, *ours.MORE)
    parser.add_argument("--rules", type=_choice(every), metavar="RULE,...", help=f"of {', '.join(every)}")
    parser.add_argument("--shapes", type=_choice(PROBLEMS), metavar="NAME,...", help=f"of {', '.join(PROBLEMS)}")
    parser.add_argument("--parts", type=_choice(PARTS), metavar="PART,...", help=f"only some of {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to write benchmarks.md and its pictures")
    parser.add_argument("--patience", type=float, metavar="SECONDS", help="how long a contestant may compile")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else FULL
    if given.rules:
        own, more = (tuple(x for x in given.rules if x in of) for of in (ours.RULES, ours.MORE))
        settings = replace(_only(settings, ("contest", "more", "scaling")), rules=own, scaled=own, more=more)
    if given.shapes:
        shapes = tuple(PROBLEMS[name] for name in given.shapes)
        settings = replace(_only(settings, ("contest", "more", "scaling")), problems=shapes, model=shapes[0])
    output = given.output or (ROOT / "docs" if settings == FULL else None)
    if given.parts:
        settings = _only(settings, given.parts)
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
        template, keep = ROOT / "docs" / "benchmarks.md", bool(given.parts)
        page.write(results, template=template, path=output / "benchmarks.md", keep=keep)
        if not results.incomplete:
            picture.draw_short(report.matters(results), output / "benchmarks-short.png")
        picture.draw(results.rows, output / "benchmarks.png")
        picture.draw(results.more, output / "benchmarks-more.png")
        console.print(f"written: {output / 'benchmarks.md'} and its pictures", soft_wrap=True)
    return 0


def _only(settings: Settings, parts: Sequence[str]) -> Settings:
    """The same settings for some parts, and nothing of the others."""
    nothing: dict[str, Any] = {"minimize": (), "ranks": 0, "weighs": False}
    for part, names in PARTS.items():
        if part not in parts:
            settings = replace(settings, **{name: nothing.get(name, ()) for name in names})
    return settings


def _choice(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
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
    torch.set_num_threads(THREADS)


if __name__ == "__main__":
    sys.exit(main())
