"""The benchmark's command line: ``python benchmarks/run.py --help``."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of this folder
# Before any library starts its threads: idle ones are not to spin while another contestant works.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console  # noqa: E402

from benchmarks import (  # noqa: E402
    alone,
    apart,
    doors,
    options,
    ours,
    page,
    picture,
    products,
    report,
    scaling,
    tables,
)
from benchmarks.contest import THREADS  # noqa: E402
from benchmarks.machine import look  # noqa: E402
from benchmarks.problems import PROBLEMS, Problem, equal  # noqa: E402
from benchmarks.results import Sheet  # noqa: E402
from benchmarks.tables import Say  # noqa: E402

__all__ = ["FULL", "QUICK", "Job", "Settings", "jobs", "main"]


SQUARES = equal(64, (256, 256))


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
    costed : tuple of str
        The rules whose options are measured.
    cost : Problem
        What these are over.
    engines : tuple of str
        The engines that they are measured in.
    doors : tuple of tuple of int
        The shapes of the tensors that are updated through `arrayopt.torch`.
    jitted : tuple of tuple of int
        The shapes of the tensors that are updated through `arrayopt.optax`.
    little : float
        As `seconds`, in these three contests.
    alone : tuple of Problem
        What AdamW is run over by contestants that have a process of their own.
    turns : int
        How often each of them has its turn.
    first : tuple of str
        The rules whose first steps are timed, over `model`.
    minimize : tuple of str
        The options of `benchmarks.minimize`.
    ranks : int
        How often the steps of ranks are timed.
    weighs : bool
        Whether the tables of `benchmarks.memory` are made.
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
    costed: tuple[str, ...] = ("AdamW", "LAMB")
    cost: Problem = SQUARES
    engines: tuple[str, ...] = ours.FUSED
    doors: tuple[tuple[int, ...], ...] = doors.SHAPES
    jitted: tuple[tuple[int, ...], ...] = ((64, 64), (512, 512))
    little: float = 3.0
    alone: tuple[Problem, ...] = tuple(PROBLEMS[x] for x in ("bert-base", "resnet-50", "10000x64"))
    turns: int = 3
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
    costed=("AdamW",),
    cost=equal(4, (256, 256)),
    engines=tuple(engine for engine in ours.FUSED if engine != "numba"),  # which compiles for minutes
    doors=doors.SHAPES[:1],
    jitted=((64, 64),),
    little=0.7,
    alone=(PROBLEMS["2000x64"],),
    turns=1,
    first=("LAMB",),
    minimize=("--only", "many", "--count", "100"),
    ranks=2,
    weighs=False,
)


@dataclass(frozen=True)
class Job:
    """One table, or what one process tells.

    Attributes
    ----------
    part : str
        What `--parts` calls it.
    name : str
        What is said if it fails.
    make : callable
        Measures, and gives tables as they are made.
    """

    part: str
    name: str
    make: Callable[[], Iterable[Sheet]]


PARTS = ("contest", "more", "options", "products", "small", "doors", "scaling", "memory", "alone", "first")
PARTS += ("minimize", "ranks")
"""The parts of a run, in the order of the page."""


def jobs(settings: Settings, say: Say = lambda line: None) -> Iterator[Job]:
    """All that the settings ask for.

    Parameters
    ----------
    settings : Settings
        How much.
    say : callable
        Is told what is being measured.
    """
    x = settings

    def table(part: str, name: str, make: Callable[..., Sheet], *arguments: Any, **options: Any) -> Job:
        return Job(part, name, lambda: [make(*arguments, **options)])

    for problem in x.problems if x.rules else ():
        yield table("contest", problem.title, tables.contest, x.rules, problem, x.copied, x.patience, say, **x.pace)
    if x.rules:
        yield table("contest", "rules side by side", tables.beside, x.rules, x.problems, x.copied, say, **x.pace)
    if x.more:
        yield table("more", "more rules", tables.more, x.more, x.model, x.copied, x.patience, say, **x.quickly)
    yield table("options", "what an option costs", options.costs, x.costed, x.cost, x.engines, say, **x.quickly)
    yield table("products", "products of matrices", tables.of_matrices, x.products, x.patience, say, **x.quickly)
    yield table("small", "small steps", tables.small, x.few, **x.pace)
    if find_spec("torch"):
        yield table("doors", "steps through arrayopt.torch", tables.through_doors, x.doors, **x.quickly)
    if find_spec("jax") and find_spec("optax"):
        yield table("doors", "steps through arrayopt.optax", tables.under_jit, x.jitted, **x.quickly)
    for series, points in (
        ("parameters", lambda rule: scaling.by_parameters(rule, x.sizes, **x.quickly)),
        ("tensors", lambda rule: scaling.by_tensors(rule, x.counts, x.total, **x.quickly)),
    ):
        yield table("scaling", f"scaling with {series}", tables.scaled, x.scaled, series, say, points)
    yield table("memory", "memory that a step allocates", tables.memory, x.scaled, x.weighed, say)
    if x.weighs:
        yield Job("memory", "bytes and times with 8 bits", lambda: apart.sheets(["benchmarks.memory", "--data"]))
    yield table("alone", "contestants alone in a process", alone.settings, "AdamW", x.alone, say, x.turns)
    yield table("first", "first steps", alone.first_steps, x.first, x.model, say)
    # with more threads, SciPy's loop over small problems is some 40 times slower
    solvers = partial(apart.sheets, ["benchmarks.minimize", "--data", *x.minimize], {"OPENBLAS_NUM_THREADS": "1"})
    yield Job("minimize", "minimize", solvers)
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.defpath]))
    step = ["benchmarks.ranks", "--measure", "--data", f"--rounds={x.ranks}"]
    yield Job("ranks", "ranks", lambda: apart.sheets(step, launcher=[mpiexec or "mpiexec", "-n", "2"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print each table, and write it into the page where that is asked for; 1 if something failed."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py",
        description="Time this library's rules and engines beside other libraries' optimizers.",
        epilog="With no options but --parts and --patience, each table is written into docs/benchmarks.md as soon as "
        "it is made, and the pictures at the end; else only where --output says.",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything: a few minutes")
    every = (*ours.RULES, *ours.MORE)
    parser.add_argument("--rules", type=_choice(every), metavar="RULE,...", help=f"of {', '.join(every)}")
    parser.add_argument("--shapes", type=_choice(PROBLEMS), metavar="NAME,...", help=f"of {', '.join(PROBLEMS)}")
    parser.add_argument("--parts", type=_choice(PARTS), metavar="PART,...", help=f"only some of {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to write benchmarks.md and its pictures")
    parser.add_argument("--patience", type=float, metavar="SECONDS", help="how long a contestant may compile")
    given = parser.parse_args(arguments)
    settings, parts = QUICK if given.quick else FULL, given.parts or PARTS
    if given.rules:
        own, more = (tuple(x for x in given.rules if x in of) for of in (ours.RULES, ours.MORE))
        settings = replace(settings, rules=own, scaled=own, more=more)
    if given.shapes:
        shapes = tuple(PROBLEMS[name] for name in given.shapes)
        settings = replace(settings, problems=shapes, model=shapes[0])
    if (given.rules or given.shapes) and not given.parts:
        parts = ("contest", "more", "scaling")
    path = DOCS / "benchmarks.md" if settings == FULL else None
    if given.output:
        given.output.mkdir(parents=True, exist_ok=True)
        path = given.output / "benchmarks.md"
        page.empty(DOCS / "benchmarks.md", path)
    if given.patience is not None:
        settings = replace(settings, patience=given.patience)
    _use_all_threads()
    shown = " ".join(["python benchmarks/run.py", *(sys.argv[1:] if arguments is None else arguments)])
    return _measured(settings, parts, shown, path)


def _measured(settings: Settings, parts: Collection[str], command: str, path: Path | None) -> int:
    """Do the jobs of some parts, one after the other; one that fails is told at the end and stops no other."""
    console, machine, began = Console(highlight=False), look(command), time.monotonic()
    for heading, what in machine.rows.items():
        console.print(f"{heading}: {what}", soft_wrap=True, markup=False)
    titles, failed = [], {}
    try:
        with console.status("") as status:
            for job in jobs(settings, status.update if console.is_terminal else console.print):
                if job.part not in parts:
                    continue
                try:
                    for sheet in job.make():
                        report.show(sheet, console)
                        titles.append(sheet.title)
                        machine.rows["duration"] = f"{(time.monotonic() - began) / 60:.0f} min"
                        if path is not None and sheet.lines:
                            page.put(path, sheet, machine)
                except Exception as error:  # whatever a library may raise: the other tables are still wanted
                    console.print_exception()
                    failed[f"{job.name} (--parts {job.part})"] = f"{type(error).__name__}: {error}"
        if path is not None and not failed and set(parts) == set(PARTS):
            page.prune(path, titles)
    finally:
        if path is not None and titles:
            picture.draw_all(page.read(path), path.parent)
            console.print(f"written: {path} and its pictures", soft_wrap=True)
    for name, why in failed.items():
        console.print(f"failed: {name}: {why}", soft_wrap=True, markup=False)
    return 1 if failed else 0


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
