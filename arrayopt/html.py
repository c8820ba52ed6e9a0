"""Tables and text as HTML, for notebooks."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


class Text(str):
    """A string that a notebook shows in a fixed-width font."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table. The first column is aligned to the left, and the others are as the notebook aligns them."""
    lines = [f"<table><caption>{escape(caption)}</caption>"]
    for kind, cells in [("th", head), *(("td", row) for row in rows)]:
        made = f'<{kind} style="text-align: left">{escape(str(cells[0]))}</{kind}>'
        for cell in cells[1:]:
            made += f"<{kind}>{escape(str(cell))}</{kind}>"
        lines.append(f"<tr>{made}</tr>")
    return "\n".join([*lines, "</table>"])


def number(x: Any) -> str:
    """A number with four digits; an empty string for None."""
    return "" if x is None else f"{float(x):.4g}"
