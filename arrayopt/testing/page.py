"""A report of `verify` as one HTML page: a heat map of rules by backends, and where the largest differences are.

The page needs no network and no script. Colours are of a logarithmic scale; each cell also has its number.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from arrayopt.testing.equivalence import Outcome
from arrayopt.testing.ulps import in_short
from arrayopt.testing.verify import Report, Row

__all__ = ["document", "page", "table"]

# From white over blue to dark blue, of one hue, for what passes; orange for what does not.
SCALE = ((247, 251, 255), (158, 202, 225), (49, 130, 189), (8, 69, 148))

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 2rem auto;
       padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; max-width: 60rem; } .verdict { font-weight: 600; } .bad { color: #a33b00; }
table { border-collapse: collapse; margin: .75rem 0; } caption { text-align: left; padding-bottom: .4rem; }
th { font-weight: 600; text-align: left; padding: .3rem .6rem; vertical-align: bottom; }
.map td { text-align: right; padding: .35rem .7rem; min-width: 4.6rem; border: 2px solid #fff;
          font-variant-numeric: tabular-nums; }
.map td.none { color: #767676; background: #f1f1f1; text-align: center; }
.map td.over { background: #f4772e; color: #000; font-weight: 700; }
.map td.plain { color: #555; text-align: left; min-width: 0; }
.list th { border-bottom: 1px solid #888; }
.list td { padding: .2rem .6rem; vertical-align: top; border-bottom: 1px solid #ddd; }
.list td.number { text-align: right; font-variant-numeric: tabular-nums; }
.key span { display: inline-block; padding: .15rem .7rem; font-size: .85rem; }
code { font: .92em ui-monospace, monospace; } .scroll { overflow-x: auto; }
* { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
@media print { body { font-size: 9pt; margin: 0; max-width: none; padding: 0; } .scroll { overflow: visible; }
               tr { break-inside: avoid; } .map td { padding: .2rem .4rem; min-width: 0; } }
"""


def document(title: str, heading: str, body: str, style: str = "") -> str:
    """A whole page of some HTML, of a title and a heading that are plain text, with more style."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}{style}</style>
</head>
<body>
<h1>{escape(heading)}</h1>
{body}
</body>
</html>
"""


def table(look: str, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of plain texts; a line break in a head is one. A cell may have attributes of its tag, such as a style."""
    top = "".join(f'<th scope="col">{escape(x).replace(chr(10), "<br>")}</th>' for x in heads)
    lines = []
    for row in rows:
        cells = []
        for cell in row:
            text, about = (cell, {}) if isinstance(cell, str) else cell
            own = "".join(f' {name}="{escape(x)}"' for name, x in about.items())
            cells.append(f"<td{own}>{escape(text)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    head = f'<table class="{look}"><thead><tr>{top}</tr></thead>'
    return f'<div class="scroll">{head}\n<tbody>\n{body}\n</tbody></table></div>'


def page(report: Report) -> str:
    """The whole page, as text to be written in UTF-8."""
    wrong = sum(not row.passed for row in report.rows)
    verdict = f'<p class="verdict bad">{wrong} of {len(report.rows)} rows are beyond the limit.</p>'
    if report.passed:
        verdict = '<p class="verdict">All backends agree within the limit.</p>'
    s, top = report.settings, max((row.limit for row in report.rows), default=1.0)
    shapes = ", ".join("×".join(map(str, shape)) or "scalar" for shape in s.shapes)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    setting = (
        f"{s.steps} steps from seed {s.seed}, on tensors of shapes {shapes}; every backend was given the same"
        f" parameters and gradients. {report.when}; {versions}."
    )
    heads = ["rule", "dtype", *(name.replace(":", "\n") for name in report.backends), "limit"]
    rows = []
    for row in report.rows:
        cells = [_cell(row.outcomes[name], row, top) for name in report.backends]
        rows.append([(row.rule, PLAIN), (row.dtype, PLAIN), *cells, (f"{row.limit:g}", PLAIN)])
    marks = sorted({0.0, 1.0, round(top**0.5), top})
    key = "".join(f'<span style="{_look(x, top)}">{in_short(x)}</span>' for x in marks)
    body = f"""{verdict}
<p>{escape(setting)}</p>
<h2>Largest difference from <code>{escape(report.reference)}</code>, in ULPs of the update</h2>
<p>A ULP is one unit in the last place that the parameters' dtype has at the largest magnitude of the element so far, or
at the root mean square of its tensor's update where that is larger. The reference is the rule as it is written.</p>
{table("map", heads, rows)}
<p class="key">ULPs: {key} <span style="background:#f4772e">beyond the limit, or an error</span>
<span style="background:#f1f1f1;color:#767676">– not compared</span></p>
<h2>Where</h2>
{_list(report)}
<h2>What was not compared, and errors</h2>
{_notes(report)}"""
    return document("arrayopt verify", "Do all backends compute the same?", body)


PLAIN = {"class": "plain"}


def _cell(outcome: Outcome, row: Row, top: float) -> Any:
    """One rule on one backend."""
    found = outcome.difference
    if outcome.error:
        return "error", {"class": "over", "title": outcome.error}
    if found is None:
        return "–", {"class": "none", "title": outcome.skipped or "no elements"}
    look = {"style": _look(found.ulps, top)} if outcome.passes(row.limit) else {"class": "over"}
    return in_short(found.ulps), {**look, "title": str(found)}


def _look(value: float, top: float) -> str:
    """The colours of a cell: the logarithm of the value on the way from 0 to `top`."""
    place = min(1.0, math.log1p(value) / math.log1p(top)) * (len(SCALE) - 1) if top > 0 else 0.0
    i = min(int(place), len(SCALE) - 2)
    red, green, blue = (round(a + (b - a) * (place - i)) for a, b in zip(SCALE[i], SCALE[i + 1], strict=True))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 115  # the usual weights of brightness
    return f"background:rgb({red},{green},{blue});color:{'#fff' if dark else '#1a1a1a'}"


def _list(report: Report) -> str:
    """Where each difference is, the largest in proportion to its limit first."""
    found, number = [], {"class": "number"}
    for row in report.rows:
        for name, outcome in row.outcomes.items():
            d = outcome.difference
            if d is not None and d.ulps > 0:
                where = [f"{row.rule}, {row.dtype}", name, d.tensor, f"[{', '.join(map(str, d.index))}]"]
                cells = [(in_short(d.ulps), number), *where, (str(d.step), number), repr(d.got), repr(d.expected)]
                found.append((d.ulps / max(row.limit, 1e-9), cells))
    found.sort(key=lambda x: -x[0])
    heads = ("ULPs", "rule", "backend", "tensor", "index", "step", "got", "expected")
    same = "<p>Nowhere: all results are the same, bit for bit.</p>"
    return table("list", heads, [cells for _, cells in found]) if found else same


def _notes(report: Report) -> str:
    """Why cells have no number."""
    notes: dict[str, list[str]] = {}
    for row in report.rows:
        for name, outcome in row.outcomes.items():
            if outcome.skipped or outcome.error:
                notes.setdefault(f"{name}: {outcome.error or outcome.skipped}", []).append(f"{row.rule} {row.dtype}")
    lines = [f"<li>{escape(note)} ({escape(', '.join(where))})</li>" for note, where in notes.items()]
    return f"<ul>{''.join(lines)}</ul>" if lines else "<p>Nothing.</p>"
