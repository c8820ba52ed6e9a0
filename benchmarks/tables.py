"""The tables that this process measures: each is made whole, and is then written."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks import doors, loops, ours, peers_jax, peers_torch, products, scaling
from benchmarks.contest import Contestant, race
from benchmarks.machine import COPY, copying
from benchmarks.problems import Problem
from benchmarks.results import Row, Sheet, reasons, rows
from benchmarks.rules import side_by_side
from benchmarks.small import small_steps

__all__ = ["CONTEST", "IN_SHORT", "MORE", "Say", "beside", "contest", "in_short", "memory", "more", "of_matrices"]
__all__ += ["scaled", "small", "through_doors", "under_jit"]

Say = Callable[[str], object]
"""Is told what is being measured."""

CONTEST = ("rule", "contestant", "ms", "ratio", "B/param", "of copy")
"""The columns of a contest."""

IN_SHORT = "In short"
MORE = "More rules: "

MATTER = (
    ("BERT-base", "LAMB", "LAMB", "BERT-base"),
    ("Each alone in a process: AdamW", "BERT-base", "AdamW", "BERT-base"),  # where PyTorch's threads may wait actively
    ("10,000 tensors of 64", "AdamW", "AdamW", "10,000 tensors of 64"),
    ("Products of matrices", "Muon, a layer of GPT-2", "Muon", "a layer of GPT-2"),
    ("Small steps: AdamW", "2 tensors of 64", "AdamW", "2 tensors of 64"),
)
"""The five results that matter: the table, the first cell of its lines, and the rule and the shapes to show."""

TOLERATED = 1.15
"""How much the cost of a parameter may grow."""


def in_short(sheets: Iterable[Sheet]) -> Sheet:
    """The fastest of the other libraries in five cases, as far as there are tables of them."""
    found, lines = {sheet.title: sheet for sheet in sheets}, []
    for title, case, rule, shapes in MATTER:
        if title not in found:
            continue
        others = [line for line in found[title].lines if line[0] == case and _is_peer(line[1])]
        if others:
            best = min(others, key=lambda line: float(line[3]))
            theirs, ratio = best[1].partition(",")[0], float(best[3])
            faster = theirs if ratio < 1 else "arrayopt" if ratio > 1 else "neither"
            lines.append((rule, shapes, best[1], faster, best[3]))
    columns = ("rule", "shapes", "fastest other optimizer", "faster", "its time / ours")
    return Sheet(IN_SHORT, columns, lines, names=4)


def _is_peer(name: str) -> bool:
    """Whether a contestant is of another library."""
    return not name.startswith(("arrayopt", "NumPy loop"))


def contest(rules: Sequence[str], problem: Problem, copied: int, patience: float, say: Say, **pace: Any) -> Sheet:
    """Every engine of ours, a loop in NumPy and all peers over one problem."""
    lines, notes, speeds = [], [], []
    for rule in rules:
        say(f"{rule} over {problem.title}")
        own = [*ours.contestants(rule, problem), *loops.contestants(rule, problem)]
        raced, left_out, speed = _raced(rule, problem, own, copied, patience, **pace)
        lines += [_of_contest(row) for row in raced]
        notes += left_out
        speeds.append(speed)
    problem.__dict__.pop("grads", None)
    said = f"A copy moved {min(speeds):.1f} to {max(speeds):.1f} GB/s, read and written."
    return Sheet(problem.title, CONTEST, lines, names=2, notes=(*notes, said))


def more(rules: Sequence[str], problem: Problem, copied: int, patience: float, say: Say, **pace: Any) -> Sheet:
    """The other rules, each with its own peers."""
    lines, notes = [], []
    for rule in rules:
        say(f"{rule} over {problem.title}")
        fused = [c for c in ours.contestants(rule, problem) if c.name != "arrayopt array_api"]
        raced, left_out, _ = _raced(rule, problem, fused, copied, patience, **pace)
        lines += [_of_contest(row) for row in raced]
        notes += left_out
    problem.__dict__.pop("grads", None)
    return Sheet(f"{MORE}{problem.title}", CONTEST, lines, names=2, notes=tuple(notes))


def _raced(
    rule: str, problem: Problem, own: Sequence[Contestant], copied: int, patience: float, **pace: Any
) -> tuple[list[Row], tuple[str, ...], float]:
    """One rule over one problem, some of ours and all peers: rows, notes, and what a copy moves, in GB/s."""
    peers = [*peers_torch.contestants(rule, problem), *peers_jax.contestants(rule, problem, patience)]
    times = race([*own, *peers], always=[copying(copied)], **pace)
    bytes_moved = ours.bytes_per_parameter(rule, problem)
    moved = {f"arrayopt {engine}": bytes_moved for engine in ours.FUSED}
    found = rows(times, problem, moved, 2 * copied, to=ours.REFERENCE, rule=rule)
    left_out = reasons({f"{rule} of {name}": why for name, why in times.left_out.items()})
    return found, left_out, 2e-9 * copied / times.seconds(COPY)


def _of_contest(row: Row) -> tuple[str, ...]:
    return (row.rule, row.shown(row.name), _ms(row.ms), f"{row.ratio:.2f}", *_moved(row))


def _ms(ms: float) -> str:
    """Milliseconds, to three digits."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _moved(row: Row) -> tuple[str, str]:
    return ("", "") if row.moved is None or row.share is None else (f"{row.moved:.3g}", f"{row.share:.0%}")


def beside(rules: Sequence[str], problems: Sequence[Problem], copied: int, say: Say, **pace: Any) -> Sheet:
    """Our rules beside each other."""
    lines = []
    for problem in problems:
        say(f"rules side by side over {problem.title}")
        for row in side_by_side(rules, problem, copied, **pace):
            lines.append((row.problem, row.shown(row.rule), _ms(row.ms), f"{row.ratio:.2f}", *_moved(row)))
        problem.__dict__.pop("grads", None)
    return Sheet("Rules side by side", ("shapes", "rule", "ms", "ratio", "B/param", "of copy"), lines, names=2)


def of_matrices(problems: Sequence[Problem], patience: float, say: Say, **pace: Any) -> Sheet:
    """The rules for matrices."""
    lines, notes = [], []
    for problem in problems:
        for rule in products.rules_over(problem):
            case = f"{rule}, {problem.title}"
            say(case)
            times = race(products.contestants(rule, problem, patience), **pace)
            for row in rows(times, problem, {}, to=ours.REFERENCE, rule=rule):
                lines.append((case, row.shown(row.name), _ms(row.ms), f"{row.ratio:.2f}"))
            notes += reasons({f"{name} with {case}": why for name, why in times.left_out.items()})
    columns = ("rule and shapes", "contestant", "ms", "ratio")
    return Sheet("Products of matrices", columns, lines, names=2, notes=tuple(notes))


def small(counts: Sequence[int], **pace: Any) -> Sheet:
    """Steps over a few small tensors."""
    lines = []
    for row in small_steps(counts, **pace):
        lines.append((row.problem, row.shown(row.name), f"{1e3 * row.ms:.1f}", f"{row.ratio:.2f}"))
    return Sheet("Small steps: AdamW", ("shapes", "contestant", "µs", "ratio"), lines, names=2)


def through_doors(shapes: Sequence[tuple[int, ...]], **pace: Any) -> Sheet:
    """What `arrayopt.torch` costs."""
    return _through("torch", doors.through_doors(shapes, **pace))


def under_jit(shapes: Sequence[tuple[int, ...]], **pace: Any) -> Sheet:
    """`arrayopt.optax` beside optax."""
    return _through("optax", doors.under_jit(shapes, **pace))


def _through(library: str, measured: Iterable[Row]) -> Sheet:
    lines = []
    for row in measured:
        lines.append((f"{row.rule}, {row.problem}", row.shown(row.name), f"{row.ms:.3f}", f"{row.ratio:.2f}"))
    columns = ("rule and shapes", "contestant", "ms", "ratio")
    return Sheet(f"Steps through arrayopt.{library}", columns, lines, names=2)


def scaled(rules: Sequence[str], series: str, say: Say, points: Callable[[str], list[scaling.Point]]) -> Sheet:
    """The cost of a parameter along a series."""
    lines = []
    for rule in rules:
        say(f"scaling of {rule} with the number of {series}")
        for x in points(rule):
            kept = "yes" if x.growth <= TOLERATED else "no"
            lines.append((rule, x.label, f"{x.ns:.3f}", f"{x.growth:.2f}", kept))
    columns = ("rule", series, "ns per parameter", "to the first", f"at most {TOLERATED}")
    return Sheet(f"Scaling with the number of {series}", columns, lines, names=2)


def memory(rules: Sequence[str], problems: Sequence[Problem], say: Say) -> Sheet:
    """What a step allocates."""
    lines = []
    for problem in problems:
        say(f"memory over {problem.title}")
        for rule in rules:
            cells = []
            for engine in ours.ENGINES:
                works = engine in (*ours.FUSED, "array_api")
                cells.append(f"{ours.step_memory(rule, problem, engine):.1%}" if works else "")
            lines.append((rule, problem.title, *cells))
        problem.__dict__.pop("grads", None)
    return Sheet("Memory that a step allocates", ("rule", "shapes", *ours.ENGINES), lines, names=2)
