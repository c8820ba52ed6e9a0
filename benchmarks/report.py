"""The tables of a run: their content once, shown on a terminal here and written into a page by `benchmarks.page`."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.ours import ENGINES, REFERENCE
from benchmarks.results import Results, Row, Sheet

__all__ = [
    "IN_SHORT",
    "bandwidth",
    "beside",
    "contest",
    "doors",
    "engines",
    "in_short",
    "left_out",
    "matters",
    "memory",
    "more",
    "products",
    "scaling",
    "sheets",
    "show",
    "small",
]

TOLERATED = 1.15
"""How much the cost of a parameter may grow."""

IN_SHORT = "In short"
"""The heading of the table of five results."""


def in_short(results: Results) -> Sheet:
    """Five results: the fastest of the other libraries, where there is one."""
    lines = []
    for best in matters(results):
        name = best.shown(best.name)
        faster = best.name if best.ratio < 1 else "arrayopt"
        lines.append((best.rule, best.problem, name, faster, f"{best.ratio:.2f}"))
    columns = ("rule", "shapes", "fastest other optimizer", "faster", "its time / ours")
    return Sheet(IN_SHORT, columns, lines, names=4)


def matters(results: Results) -> list[Row]:
    """The fastest of the other libraries in five cases: large, usual, many small, matrices, a few small."""
    wanted = [("LAMB", results.rows, 0), ("AdamW", results.rows, 0), ("AdamW", results.rows, -1)]
    wanted += [("Muon", results.products, -1), ("AdamW", results.small, 0)]
    found = []
    for rule, rows, which in wanted:
        problems = list(dict.fromkeys(row.problem for row in rows if row.rule == rule))
        others = [row for row in rows if problems and (row.rule, row.problem) == (rule, problems[which])]
        if peers := [row for row in others if _is_peer(row)]:
            found.append(min(peers, key=lambda row: row.ratio))
    return found


def _is_peer(row: Row) -> bool:
    """Whether a row is of another library."""
    return not row.name.startswith("arrayopt") and row.name != "NumPy loop"


def contest(results: Results, problem: str) -> Sheet:
    """Every contestant over one problem."""
    lines = [
        (row.rule, row.shown(row.name), _ms(row.ms), f"{row.ratio:.2f}", *_moved(row))
        for row in results.rows
        if row.problem == problem
    ]
    return Sheet(problem, ("rule", "contestant", "ms", "ratio", "B/param", "of copy"), lines, names=2)


def _ms(ms: float) -> str:
    """Milliseconds, to three digits."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _moved(row: Row) -> tuple[str, str]:
    return ("", "") if row.moved is None or row.share is None else (f"{row.moved:.3g}", f"{row.share:.0%}")


def beside(results: Results) -> Sheet:
    """Our rules beside each other."""
    lines = [
        (row.problem, row.shown(row.rule), _ms(row.ms), f"{row.ratio:.2f}", *_moved(row)) for row in results.beside
    ]
    return Sheet("Rules side by side", ("shapes", "rule", "ms", "ratio", "B/param", "of copy"), lines, names=2)


def more(results: Results) -> Sheet:
    """The other rules, each with its own peers."""
    lines = [(row.rule, row.shown(row.name), _ms(row.ms), f"{row.ratio:.2f}", *_moved(row)) for row in results.more]
    title = f"More rules: {results.more[0].problem}" if lines else ""
    return Sheet(title, ("rule", "contestant", "ms", "ratio", "B/param", "of copy"), lines, names=2)


def products(results: Results) -> Sheet:
    """The rules for matrices."""
    lines = [
        (f"{row.rule}, {row.problem}", row.shown(row.name), _ms(row.ms), f"{row.ratio:.2f}") for row in results.products
    ]
    return Sheet("Products of matrices", ("rule and shapes", "contestant", "ms", "ratio"), lines, names=2)


def doors(results: Results) -> Sheet:
    """What `arrayopt.torch` costs."""
    lines = [
        (f"{row.rule}, {row.problem}", row.shown(row.name), f"{row.ms:.3f}", f"{row.ratio:.2f}")
        for row in results.doors
    ]
    return Sheet("Steps through arrayopt.torch", ("rule and shapes", "contestant", "ms", "ratio"), lines, names=2)


def small(results: Results) -> Sheet:
    """Steps over a few small tensors."""
    lines = [(row.problem, row.shown(row.name), f"{1e3 * row.ms:.1f}", f"{row.ratio:.2f}") for row in results.small]
    return Sheet("Small steps: AdamW", ("shapes", "contestant", "µs", "ratio"), lines, names=2)


def engines(results: Results) -> Sheet:
    """How much faster the fused engines are than the reference engine."""
    lines = []
    for rule in dict.fromkeys(row.rule for row in results.rows):
        for problem in results.problems:
            found = [results.row(rule, problem, f"arrayopt {engine}") for engine in ENGINES]
            if found[-1] is None:
                continue
            gains = ["" if row is None else f"{found[-1].ratio / row.ratio:.2f}" for row in found[:-1]]
            lines.append((rule, problem, *gains))
    return Sheet("Engines", ("rule", "shapes", *(f"array_api / {x}" for x in ENGINES[:-1])), lines, names=2)


def scaling(results: Results, series: str) -> Sheet:
    """The cost of a parameter along a series."""
    lines = [
        (x.rule, x.label, f"{x.ns:.3f}", f"{x.growth:.2f}", "yes" if x.growth <= TOLERATED else "no")
        for x in results.points[series]
    ]
    columns = ("rule", series, "ns per parameter", "to the first", f"at most {TOLERATED}")
    return Sheet(f"Scaling with the number of {series}", columns, lines, names=2)


def memory(results: Results) -> Sheet:
    """What a step allocates."""
    by_case: dict[tuple[str, str], dict[str, float]] = {}
    for x in results.memory:
        by_case.setdefault((x.rule, x.problem), {})[x.engine] = x.share
    lines = [
        (*case, *(f"{shares[engine]:.1%}" if engine in shares else "" for engine in ENGINES))
        for case, shares in by_case.items()
    ]
    return Sheet("Memory that a step allocates", ("rule", "shapes", *ENGINES), lines, names=2)


def left_out(results: Results) -> Sheet:
    """Who was not measured, and why."""
    cases: dict[tuple[str, str], list[str]] = {}
    for (rule, problem, name), why in results.left_out.items():
        cases.setdefault((name, why), []).append(f"{rule} over {problem}" if rule else problem)
    lines = [(name, "; ".join(where), why) for (name, why), where in cases.items()]
    return Sheet("Not measured", ("contestant", "where", "why"), lines, names=3)


def sheets(results: Results) -> Iterator[Sheet]:
    """All tables that have lines."""
    if (short := in_short(results)).lines:
        yield short
    yield from (contest(results, problem) for problem in results.problems)
    made = [
        beside(results),
        more(results),
        products(results),
        small(results),
        doors(results),
        engines(results),
        *(scaling(results, series) for series in results.points),
        memory(results),
        *results.sheets,
    ]
    yield from (sheet for sheet in [*made, left_out(results)] if sheet.lines)


def show(results: Results, console: Console) -> None:
    """Print the tables."""
    for heading, what in results.machine.rows.items():
        console.print(f"{heading}: {what}", soft_wrap=True, markup=False)
    if results.copies:
        console.print(f"copy bandwidth: {bandwidth(results)}; ratio: time to that of {REFERENCE}")
    for sheet in sheets(results):
        table = Table(title=sheet.title, title_justify="left", header_style="bold")
        for i, heading in enumerate(sheet.columns):
            table.add_column(heading, justify="left" if i < sheet.names else "right", overflow="fold")
        before = ""
        for line in sheet.lines:
            if before and line[0] != before and sheet.names == 2:
                table.add_section()
            before = line[0]
            table.add_row(*line, style="bold" if any(cell.startswith(REFERENCE) for cell in line) else "")
        console.print(table)


def bandwidth(results: Results) -> str:
    """What copying moved, from the slowest race to the fastest."""
    low, high = min(results.copies), max(results.copies)
    return f"{low / 1e9:.1f} to {high / 1e9:.1f} GB/s read and written"
