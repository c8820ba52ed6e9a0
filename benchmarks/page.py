"""The page of figures, docs/benchmarks.md: a table is written between two marks when it is made; the others stay."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from benchmarks.machine import Machine
from benchmarks.results import Sheet, markdown
from benchmarks.tables import CONTEST, IN_SHORT, MATTER, MORE, in_short

__all__ = ["empty", "prune", "put", "read"]

BEGIN = "<!-- figures: written by benchmarks/run.py -->"
END = "<!-- end of figures -->"
HEADING = "## Figures"
MACHINE = "The machine"
STAMP = "Commit "

SHORT_PICTURE = "![The time of the fastest other optimizer as a multiple of ours, in five cases](benchmarks-short.png)"
PICTURE = "![Time of each contestant as a multiple of ours, by rule and shapes](benchmarks.png)"
MORE_PICTURE = "![Time of each contestant as a multiple of ours, by rule](benchmarks-more.png)"


def put(path: Path, sheet: Sheet, machine: Machine) -> None:
    """Write one table in place of the one with its title, or after the others, and what is made of all tables.

    Parameters
    ----------
    path : Path
        The page.
    sheet : Sheet
        The table.
    machine : Machine
        What it was made on. Its commit and date stand below the table.

    Raises
    ------
    ValueError
        If the page does not have the two marks, once each.
    """
    before, parts, after = _split(path)
    content = [markdown(sheet)]
    if sheet.columns == CONTEST:
        first = next((t for t in parts if _is_contest(t, parts)), sheet.title)
        content += [MORE_PICTURE] if sheet.title.startswith(MORE) else [PICTURE] if sheet.title == first else []
    parts[sheet.title] = "\n\n".join([*content, *sheet.notes, machine.stamp])
    rows = list(machine.rows.items())
    parts.pop(MACHINE, None)  # it is the last
    parts[MACHINE] = markdown(Sheet(MACHINE, ("", ""), rows, names=2))
    _write(path, before, parts, after)


def prune(path: Path, titles: Collection[str]) -> None:
    """Keep only the tables with these titles, in this order: those of a run that has made all."""
    before, parts, after = _split(path)
    kept = {title: parts[title] for title in (*titles, MACHINE) if title in parts}
    _write(path, before, kept, after)


def empty(template: Path, path: Path) -> None:
    """Write a page without tables that has the text of another."""
    before, _, after = _split(template)
    _write(path, before, {}, after)


def read(path: Path) -> list[Sheet]:
    """The tables that stand on a page, but for those that are made of others."""
    _, parts, _ = _split(path)
    return [_parsed(title, content) for title, content in parts.items() if title not in (IN_SHORT, MACHINE)]


def _parsed(title: str, content: str) -> Sheet:
    """The table of a part of the page."""
    columns, rule, *rest = [_cells(line) for line in content.splitlines() if line.startswith("|")]
    names, lines, before = rule.count("---"), [], ""
    for cells in rest:
        before = cells[0] or before
        lines.append((before, *cells[1:]))
    return Sheet(title, columns, lines, names)


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|"))


def _is_contest(title: str, parts: dict[str, str]) -> bool:
    """Whether a part has the contest over one problem."""
    return parts[title].startswith(f"| {' | '.join(CONTEST)} |") and not title.startswith(MORE)


def _split(path: Path) -> tuple[str, dict[str, str], str]:
    """What comes before the figures, what stands below each of their headings, and what comes after."""
    text = path.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"benchmarks: {path} must have '{BEGIN}' and '{END}' once each")
    before, rest = text.split(BEGIN)
    figures, after = rest.split(END)
    parts = {}
    for part in figures.split("\n### ")[1:]:
        title, _, content = part.partition("\n")
        parts[title] = content.strip()
    return before, parts, after


def _write(path: Path, before: str, parts: dict[str, str], after: str) -> None:
    """Write the page with the five results in short as its tables have them; whole, or not at all."""
    parts.pop(IN_SHORT, None)
    short = in_short(_parsed(title, content) for title, content in parts.items() if title != MACHINE)
    if short.lines:
        stamps = _joined(_stamp(parts[title]) for title, *_ in MATTER if title in parts)
        parts = {IN_SHORT: "\n\n".join([markdown(short), SHORT_PICTURE, stamps])} | parts
    figures = "\n\n".join([HEADING, *(f"### {title}\n\n{content}" for title, content in parts.items())])
    new = path.with_name(f".{path.name}.new")
    new.write_text(f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}", "utf-8")
    os.replace(new, path)


def _stamp(content: str) -> str:
    """The commit and the date that stand below a table."""
    return next(line for line in reversed(content.splitlines()) if line.startswith(STAMP))


def _joined(stamps: Iterable[str]) -> str:
    """Each commit once, with the first and the last date of its runs."""
    dates: dict[str, list[str]] = {}
    for stamp in stamps:
        commit, date = stamp.removesuffix(".").split(", ", 1)
        dates.setdefault(commit, []).append(date)
    return " ".join(f"{commit}, {' to '.join(sorted({min(of), max(of)}))}." for commit, of in dates.items())
