"""A report of `verify` on a terminal; imports rich."""

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from arrayopt.testing.equivalence import Outcome
from arrayopt.testing.ulps import in_short
from arrayopt.testing.verify import Report

__all__ = ["show"]


def show(report: Report, console: Console) -> None:
    """Print a table of the largest differences, where the worst of each backend is, and what is beyond the limit."""
    console.print(f"Largest difference from {report.reference}, in ULPs of the update:", soft_wrap=True)
    table = Table(box=SIMPLE, header_style="bold")
    table.add_column("rule", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    for name in report.backends:
        table.add_column(name.replace(":", "\n"), justify="right", overflow="fold")
    for row in report.rows:
        cells = [_cell(row.outcomes[name], row.limit) for name in report.backends]
        table.add_row(row.rule, row.dtype, *cells)
    console.print(table)
    for name in report.backends:
        outcomes = [(row, row.outcomes[name]) for row in report.rows]
        found = [(x.difference.ulps / max(row.limit, 1e-9), row, x.difference) for row, x in outcomes if x.difference]
        if found:
            _, row, worst = max(found, key=lambda x: x[0])
            place = f"largest in {row.rule} {row.dtype}: {worst}" if worst.ulps else "the same, bit for bit"
            console.print(f"{name}: {place}", markup=False, soft_wrap=True)
        for note in dict.fromkeys(x.skipped for _, x in outcomes if x.skipped):
            console.print(f"{name}: not compared: {note}", markup=False, soft_wrap=True)
    for row in report.rows:
        for name, outcome in row.outcomes.items():
            if not outcome.passes(row.limit):
                said = outcome.error or f"{outcome.difference}, above {row.limit:g}"
                console.print(f"FAILED {row.rule} {row.dtype} {name}: {said}", markup=False, soft_wrap=True)
    console.print("passed" if report.passed else "failed")


def _cell(outcome: Outcome, limit: float) -> Text:
    """One rule on one backend."""
    if outcome.error:
        return Text("error", "bold red")
    if outcome.difference is None:
        return Text("-", "dim")
    return Text(in_short(outcome.difference.ulps), "" if outcome.passes(limit) else "bold red")
