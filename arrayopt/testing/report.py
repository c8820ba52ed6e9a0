"""Show a report of `verify` on a terminal or as an HTML page: a heat map of rules by backends, and a list.

The page needs no network and no script. Colours are on a logarithmic scale, and each cell also shows its number.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from arrayopt.testing.equivalence import Difference, Outcome
from arrayopt.testing.ulps import in_short
from arrayopt.testing.verify import Report, Row

# Differences that pass are white to dark blue; those beyond the limit are orange.
SCALE = ((247, 251, 255), (158, 202, 225), (49, 130, 189), (8, 69, 148))

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 2rem auto;
       padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; max-width: 60rem; } .verdict { font-weight: 600; } .bad { color: #a33b00; }
table { border-collapse: collapse; margin: .75rem 0; } .scroll { overflow-x: auto; }
th { font-weight: 600; text-align: left; padding: .3rem .6rem; vertical-align: bottom; }
td { padding: .2rem .6rem; vertical-align: top; font-variant-numeric: tabular-nums; }
.map td { text-align: right; border: 2px solid #fff; } .map td.plain { color: #555; text-align: left; }
.map td.none { color: #767676; background: #f1f1f1; text-align: center; }
.map td.over { background: #f4772e; color: #000; font-weight: 700; }
.list td { border-bottom: 1px solid #ddd; } .list td.number { text-align: right; }
.key span { display: inline-block; padding: .15rem .7rem; font-size: .85rem; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #333; }
* { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
@media print { body { font-size: 9pt; max-width: none; } .scroll { overflow: visible; } tr { break-inside: avoid; } }
"""


def document(title: str, heading: str, body: str) -> str:
    """Return an HTML page with this body. `title` and `heading` are plain text and are escaped."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(heading)}</h1>
{body}
</body>
</html>
"""


def table(look: str, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return an HTML table with the class `look`. A cell is a text, or a pair of a text and attributes of its tag."""
    top = "".join(f'<th scope="col">{escape(x).replace(chr(10), "<br>")}</th>' for x in heads)
    lines = [f'<div class="scroll"><table class="{look}"><thead><tr>{top}</tr></thead>', "<tbody>"]
    for row in rows:
        made = ""
        for cell in row:
            text, about = (cell, {}) if isinstance(cell, str) else cell
            own = "".join(f' {name}="{escape(x)}"' for name, x in about.items())
            made += f"<td{own}>{escape(text)}</td>"
        lines.append(f"<tr>{made}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def page(report: Report) -> str:
    """Return a report as an HTML page, to be written in UTF-8."""
    wrong = sum(not row.passed for row in report.rows)
    verdict = '<p class="verdict">All backends agree within the limit.</p>'
    if wrong:
        verdict = f'<p class="verdict bad">{wrong} of {len(report.rows)} rows are beyond the limit.</p>'
    s, top = report.settings, max((row.limit for row in report.rows), default=1.0)
    shapes = ", ".join("×".join(map(str, shape)) or "scalar" for shape in s.shapes)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    heads = ["rule", "dtype", *(name.replace(":", "\n") for name in report.backends), "limit"]
    plain, rows, notes = {"class": "plain"}, [], dict[str, list[str]]()
    for row in report.rows:
        cells = [_cell(row.outcomes[name], row, top) for name in report.backends]
        rows.append([(row.rule, plain), (row.dtype, plain), *cells, (f"{row.limit:g}", plain)])
        for name, outcome in row.outcomes.items():
            if outcome.skipped or outcome.error:
                notes.setdefault(f"{name}: {outcome.error or outcome.skipped}", []).append(f"{row.rule} {row.dtype}")
    lines = [f"<li>{escape(note)} ({escape(', '.join(where))})</li>" for note, where in notes.items()]
    marks = sorted({0.0, 1.0, round(top**0.5), top})
    key = "".join(f'<span style="{_look(x, top)}">{in_short(x)}</span>' for x in marks)
    body = f"""{verdict}
<p>{s.steps} steps from seed {s.seed}, on tensors of shapes {shapes}; every backend was given the same parameters and
gradients. {report.when}; {escape(versions)}.</p>
<h2>Largest difference from <code>{escape(report.reference)}</code>, in ULPs of the update</h2>
<p>A ULP is one unit in the last place that the parameters' dtype has at the largest magnitude of the element so far, or
at the root mean square of its tensor's update where that is larger. The reference is the rule as it is written.</p>
{table("map", heads, rows)}
<p class="key">ULPs: {key} <span style="background:#f4772e">beyond the limit, or an error</span>
<span style="background:#f1f1f1;color:#767676">– not compared</span></p>
<h2>Where</h2>
{_list(report)}
<h2>What was not compared, and errors</h2>
{f"<ul>{''.join(lines)}</ul>" if lines else "<p>Nothing.</p>"}"""
    return document("arrayopt verify", "Do all backends compute the same?", body)


def _cell(outcome: Outcome, row: Row, top: float) -> Any:
    """The cell of one rule on one backend: its text and the attributes of its tag."""
    found = outcome.difference
    if outcome.error:
        return "error", {"class": "over", "title": outcome.error}
    if found is None:
        return "–", {"class": "none", "title": outcome.skipped or "no elements"}
    look = {"style": _look(found.ulps, top)} if outcome.passes(row.limit) else {"class": "over"}
    return in_short(found.ulps), {**look, "title": str(found)}


def _look(value: float, top: float) -> str:
    """The colours of a cell, as CSS: the value on a logarithmic scale from 0 to `top`."""
    place = min(1.0, math.log1p(value) / math.log1p(top)) * (len(SCALE) - 1) if top > 0 else 0.0
    i = min(int(place), len(SCALE) - 2)
    red, green, blue = (round(a + (b - a) * (place - i)) for a, b in zip(SCALE[i], SCALE[i + 1], strict=True))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 115  # the luma weights of Rec. 601
    return f"background:rgb({red},{green},{blue});color:{'#fff' if dark else '#1a1a1a'}"


def _worst_first(report: Report) -> list[tuple[str, Row, Difference]]:
    """Return each difference with its backend and row; the largest in proportion to its limit comes first."""
    found = []
    for row in report.rows:
        for name, outcome in row.outcomes.items():
            if outcome.difference is not None:
                found.append((name, row, outcome.difference))
    return sorted(found, key=lambda x: -x[2].ulps / max(x[1].limit, 1e-9))


def _list(report: Report) -> str:
    """The table of all differences, with tensor, index and step."""
    rows, number = [], {"class": "number"}
    for name, row, d in _worst_first(report):
        if d.ulps > 0:
            where = [f"{row.rule}, {row.dtype}", name, d.tensor, f"[{', '.join(map(str, d.index))}]"]
            rows.append([(in_short(d.ulps), number), *where, (str(d.step), number), repr(d.got), repr(d.expected)])
    heads = ("ULPs", "rule", "backend", "tensor", "index", "step", "got", "expected")
    return table("list", heads, rows) if rows else "<p>Nowhere: all results are the same, bit for bit.</p>"


def show(report: Report, console: Any) -> None:
    """Print all differences as a table, the largest difference of each backend, and what is beyond the limit.

    `console` is a ``rich.console.Console``.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(f"Largest difference from {report.reference}, in ULPs of the update:")
    shown, failed = Table(box=SIMPLE, header_style="bold"), []
    shown.add_column("rule", no_wrap=True)
    shown.add_column("dtype", no_wrap=True)
    for name in report.backends:
        shown.add_column(name.replace(":", "\n"), justify="right", overflow="fold")
    for row in report.rows:
        cells = []
        for name in report.backends:
            outcome = row.outcomes[name]
            text = "error" if outcome.error else in_short(outcome.difference.ulps) if outcome.difference else "-"
            cells.append(text if outcome.passes(row.limit) else f"[bold red]{text}[/]")
            if not outcome.passes(row.limit):
                said = outcome.error or f"{outcome.difference}, above {row.limit:g}"
                failed.append(f"FAILED {row.rule} {row.dtype} {name}: {said}")
        shown.add_row(row.rule, row.dtype, *cells)
    console.print(shown)
    ordered = _worst_first(report)
    for name in report.backends:
        for _, row, worst in [x for x in ordered if x[0] == name][:1]:
            place = f"largest in {row.rule} {row.dtype}: {worst}" if worst.ulps else "the same, bit for bit"
            say(f"{name}: {place}")
        for note in dict.fromkeys(x.skipped for x in (row.outcomes[name] for row in report.rows) if x.skipped):
            say(f"{name}: not compared: {note}")
    for line in failed:
        say(line)
    say("passed" if report.passed else "failed")
