"""A table on a terminal. `benchmarks.page` writes it into a page."""

from rich.console import Console
from rich.table import Table

from benchmarks.ours import REFERENCE
from benchmarks.results import Sheet

__all__ = ["show"]


def show(sheet: Sheet, console: Console) -> None:
    """Print a table and its notes."""
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
    for note in sheet.notes:
        console.print(note, soft_wrap=True, markup=False)
