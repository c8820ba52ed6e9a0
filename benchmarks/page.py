"""The page of figures: what stands between two marks in docs/benchmarks.md is replaced, table by table."""

from pathlib import Path

from benchmarks.report import IN_SHORT, bandwidth, sheets
from benchmarks.results import Results, Sheet

__all__ = ["write"]

BEGIN = "<!-- figures: written by benchmarks/run.py -->"
END = "<!-- end of figures -->"
HEADING = "## Figures"
MACHINE = "The machine"

SHORT = "![The time of the fastest other optimizer as a multiple of ours, in five cases](benchmarks-short.png)"
CONTEST = "![Time of each contestant as a multiple of ours, by rule and shapes](benchmarks.png)"
MORE = "![Time of each contestant as a multiple of ours, by rule](benchmarks-more.png)"


def write(results: Results, *, template: Path, path: Path, keep: bool = False) -> None:
    """Write the page that `template` is, with the tables of this run.

    Parameters
    ----------
    results : Results
        What the run found.
    template, path : Path
        The page as it is, and where to write the new one.
    keep : bool
        Whether tables of earlier runs stay, of which this run made none.

    Raises
    ------
    ValueError
        If the template does not have the two marks, once each.
    """
    text = template.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"benchmarks: {template} must have '{BEGIN}' and '{END}' once each")
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    parts = _made(results)
    if keep:
        kept = _parts(old)
        if results.incomplete:
            parts.pop(IN_SHORT, None)
        parts = kept | parts
        parts[MACHINE] = parts.pop(MACHINE)  # the last
    figures = "\n\n".join([HEADING, *(f"### {title}\n\n{content}" for title, content in parts.items())])
    path.write_text(f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}", "utf-8")


def _parts(figures: str) -> dict[str, str]:
    """What stands below each heading."""
    parts = {}
    for part in figures.split("\n### ")[1:]:
        title, _, content = part.partition("\n")
        parts[title] = content.strip()
    return parts


def _made(results: Results) -> dict[str, str]:
    """The tables of this run, with their pictures and stamps."""
    pictures = {IN_SHORT: SHORT}
    if results.rows:
        pictures[results.problems[0]] = CONTEST
    parts = {}
    for sheet in sheets(results):
        picture = MORE if sheet.title.startswith("More rules") else pictures.get(sheet.title)
        parts[sheet.title] = "\n\n".join([_table(sheet), *([picture] if picture else []), results.machine.stamp])
    machine = results.machine.rows | ({"copy bandwidth": bandwidth(results)} if results.copies else {})
    return parts | {MACHINE: _table(Sheet("", ("", ""), list(machine.items()), names=2))}


def _table(sheet: Sheet) -> str:
    """A table in Markdown; where a name stands again below itself, it is left out."""
    rule = "|".join("---" if i < sheet.names else "---:" for i in range(len(sheet.columns)))
    lines, before = [f"| {' | '.join(sheet.columns)} |", f"|{rule}|"], ""
    for line in sheet.lines:
        first = line[0] if line[0] != before or sheet.names != 2 else ""
        before = line[0]
        lines.append(f"| {' | '.join((first, *line[1:]))} |".replace("  |", " |"))
    return "\n".join(lines)
