"""The page of figures: what stands between two marks in docs/benchmarks.md is replaced."""

from pathlib import Path

from benchmarks.report import Sheet, bandwidth, sheets
from benchmarks.results import Results

__all__ = ["write"]

BEGIN = "<!-- figures: written by benchmarks/run.py -->"
END = "<!-- end of figures -->"


def write(results: Results, *, template: Path, path: Path) -> None:
    """Write the page that `template` is, with the figures of this run.

    Raises
    ------
    ValueError
        If the template does not have the two marks, once each.
    """
    text = template.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"benchmarks: {template} must have '{BEGIN}' and '{END}' once each")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n\n{_figures(results)}\n\n{END}{after}", "utf-8")


def _figures(results: Results) -> str:
    machine = results.machine.rows | ({"copy bandwidth": bandwidth(results)} if results.copies else {})
    parts, pictures = ["## Figures"], list[str]()
    if results.rows:
        pictures.append("![Time of each contestant as a multiple of ours, by rule and shapes](benchmarks.png)")
    if results.more:
        pictures.append(f"![The same of more rules, over {results.more[0].problem}](benchmarks-more.png)")
    for sheet in sheets(results):
        parts += [f"### {sheet.title}", _table(sheet)]
        if sheet.title == "In short":
            parts += pictures
            pictures = []
    parts += pictures
    parts += ["### The machine", _table(Sheet("", ("", ""), list(machine.items()), names=2))]
    return "\n\n".join(parts)


def _table(sheet: Sheet) -> str:
    """A table in Markdown; where a name stands again below itself, it is left out."""
    rule = "|".join("---" if i < sheet.names else "---:" for i in range(len(sheet.columns)))
    lines, before = [f"| {' | '.join(sheet.columns)} |", f"|{rule}|"], ""
    for line in sheet.lines:
        first = line[0] if line[0] != before or sheet.names != 2 else ""
        before = line[0]
        lines.append(f"| {' | '.join((first, *line[1:]))} |".replace("  |", " |"))
    return "\n".join(lines)
