"""A report of `verify` as one HTML page: a heat map of rules by backends, and where the largest differences are.

The page needs no network and no script. Colours are of a logarithmic scale; each cell also has its number.
"""

import math
from html import escape

from arrayopt.testing.equivalence import Outcome
from arrayopt.testing.ulps import in_short
from arrayopt.testing.verify import Report, Row

__all__ = ["document", "page"]

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
.map tbody th { vertical-align: middle; } .map td.plain { color: #555; text-align: left; min-width: 0; }
.list th { border-bottom: 1px solid #888; }
.list td { padding: .2rem .6rem; vertical-align: top; border-bottom: 1px solid #ddd; }
.list td.number { text-align: right; font-variant-numeric: tabular-nums; }
.key span { display: inline-block; padding: .15rem .7rem; font-size: .85rem; }
code { font: .92em ui-monospace, monospace; } .scroll { overflow-x: auto; }
* { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
@media print { body { font-size: 9pt; margin: 0; max-width: none; padding: 0; } .scroll { overflow: visible; }
               tr { break-inside: avoid; } .map td { padding: .2rem .4rem; min-width: 0; } }
"""


def page(report: Report) -> str:
    """The whole page, as text to be written in UTF-8."""
    wrong = sum(not row.passed for row in report.rows)
    verdict = (
        '<p class="verdict">All backends agree within the limit.</p>'
        if report.passed
        else f'<p class="verdict bad">{wrong} of {len(report.rows)} rows are beyond the limit.</p>'
    )
    body = f"""{verdict}
<p>{_setting(report)}</p>
<h2>Largest difference from <code>{escape(report.reference)}</code>, in ULPs of the update</h2>
<p>A ULP is one unit in the last place that the parameters' dtype has at the largest magnitude of the element so far, or
at the root mean square of its tensor's update where that is larger. The reference is the rule as it is written.</p>
{_map(report)}
{_key(report)}
<h2>Where</h2>
{_list(report)}
<h2>What was not compared, and errors</h2>
{_notes(report)}"""
    return document("arrayopt verify", "Do all backends compute the same?", body)


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


def _setting(report: Report) -> str:
    """What was run, in two sentences."""
    s = report.settings
    shapes = ", ".join("×".join(map(str, shape)) or "scalar" for shape in s.shapes)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return escape(
        f"{s.steps} steps from seed {s.seed}, on tensors of shapes {shapes}; every backend was given the same"
        f" parameters and gradients. {report.when}; {versions}."
    )


def _map(report: Report) -> str:
    """The heat map: a row for each rule and dtype, a column for each backend."""
    top = _top(report)
    columns = "".join(
        f'<th scope="col">{escape(library)}<br>{escape(engine)}</th>'
        for library, _, engine in (name.partition(":") for name in report.backends)
    )
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row.rule)}</th><td class="plain">{escape(row.dtype)}</td>'
        + "".join(_cell(row.outcomes[name], row, top) for name in report.backends)
        + f'<td class="plain">{row.limit:g}</td></tr>'
        for row in report.rows
    )
    return (
        '<div class="scroll"><table class="map"><thead><tr><th scope="col">rule</th><th scope="col">dtype</th>'
        f'{columns}<th scope="col">limit</th></tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'
    )


def _cell(outcome: Outcome, row: Row, top: float) -> str:
    """One rule on one backend."""
    if outcome.skipped:
        return f'<td class="none" title="{escape(outcome.skipped)}">–</td>'
    if outcome.error:
        return f'<td class="over" title="{escape(outcome.error)}">error</td>'
    if outcome.difference is None:
        return '<td class="none" title="no elements">–</td>'
    title, value = escape(str(outcome.difference)), outcome.difference.ulps
    if not outcome.passes(row.limit):
        return f'<td class="over" title="{title}">{in_short(value)}</td>'
    return f'<td style="{_look(value, top)}" title="{title}">{in_short(value)}</td>'


def _key(report: Report) -> str:
    """What the colours mean."""
    top = _top(report)
    marks = sorted({0.0, 1.0, round(top**0.5), top})
    shown = "".join(f'<span style="{_look(x, top)}">{in_short(x)}</span>' for x in marks)
    return (
        f'<p class="key">ULPs: {shown} <span style="background:#f4772e">beyond the limit, or an error</span>'
        ' <span style="background:#f1f1f1;color:#767676">– not compared</span></p>'
    )


def _top(report: Report) -> float:
    """The end of the colours: the largest limit."""
    return max((row.limit for row in report.rows), default=1.0)


def _look(value: float, top: float) -> str:
    """The colours of a cell: the logarithm of the value on the way from 0 to `top`."""
    place = min(1.0, math.log1p(value) / math.log1p(top)) * (len(SCALE) - 1) if top > 0 else 0.0
    i = min(int(place), len(SCALE) - 2)
    red, green, blue = (round(a + (b - a) * (place - i)) for a, b in zip(SCALE[i], SCALE[i + 1], strict=True))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 115  # the usual weights of brightness
    return f"background:rgb({red},{green},{blue});color:{'#fff' if dark else '#1a1a1a'}"


def _list(report: Report) -> str:
    """Where each difference is, the largest in proportion to its limit first."""
    found = [
        (row, name, outcome.difference)
        for row in report.rows
        for name, outcome in row.outcomes.items()
        if outcome.difference is not None and outcome.difference.ulps > 0
    ]
    if not found:
        return "<p>Nowhere: all results are the same, bit for bit.</p>"
    found.sort(key=lambda x: -x[2].ulps / max(x[0].limit, 1e-9))
    rows = "\n".join(
        f'<tr><td class="number">{in_short(d.ulps)}</td><td>{escape(row.rule)}, {escape(row.dtype)}</td>'
        f"<td>{escape(name)}</td><td>{escape(d.tensor)}</td><td>[{', '.join(map(str, d.index))}]</td>"
        f'<td class="number">{d.step}</td><td><code>{d.got!r}</code></td><td><code>{d.expected!r}</code></td></tr>'
        for row, name, d in found
    )
    heads = ("ULPs", "rule", "backend", "tensor", "index", "step", "got", "expected")
    return (
        f'<div class="scroll"><table class="list"><thead><tr>{"".join(f"<th>{x}</th>" for x in heads)}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _notes(report: Report) -> str:
    """Why cells have no number."""
    notes: dict[str, list[str]] = {}
    for row in report.rows:
        for name, outcome in row.outcomes.items():
            if outcome.skipped or outcome.error:
                notes.setdefault(f"{name}: {outcome.error or outcome.skipped}", []).append(
                    escape(f"{row.rule} {row.dtype}")
                )
    if not notes:
        return "<p>Nothing.</p>"
    return "<ul>" + "".join(f"<li>{escape(note)} ({', '.join(where)})</li>" for note, where in notes.items()) + "</ul>"
