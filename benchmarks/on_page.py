"""Tables that a benchmark prints, put on a page between two marks, with the commit and the date."""

import os
from pathlib import Path

from benchmarks.machine import look

__all__ = ["put"]

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def put(name, table, command, page=PAGE):
    """Replace what stands between the marks of a table.

    Parameters
    ----------
    name : str
        The name in the marks: ``<!-- name: written by benchmarks -->`` and ``<!-- end of name -->``.
    table : str
        The table.
    command : str
        How it was made.
    page : Path
        The page.

    Raises
    ------
    ValueError
        If the page does not have both marks, once each.
    """
    text = page.read_text("utf-8")
    begin, end = f"<!-- {name}: written by benchmarks -->", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"benchmarks: {page} must have '{begin}' and '{end}' once each")
    before, rest = text.split(begin)
    machine = look(command)
    load = machine.rows["load before the run"].partition(",")[0]
    said = f"{machine.rows['processor']}, {os.cpu_count()} cores; the load before the run was {load}"
    page.write_text(f"{before}{begin}\n\n{table}\n{machine.stamp} {said}.\n\n{end}{rest.partition(end)[2]}", "utf-8")
