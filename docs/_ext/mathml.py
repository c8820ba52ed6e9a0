r"""Formulas as MathML, made while the pages are built: readers need no script, no font from elsewhere and no network.

Takes LaTeX from ``$...$``, ``$$...$$`` and ``.. math::``. As with Sphinx's other renderers, a displayed formula that
has ``\\`` is set as lines aligned at ``&``.
"""

from typing import Any

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.application import Sphinx
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
CONVERTER = LatexToMathML(annotation=True, fancy_error=False)


def convert(node: nodes.Element, *, display: bool) -> str:
    """The MathML of a formula; a warning, and its source as text, where it is not understood."""
    latex = node.astext().strip()
    source = rf"\begin{{aligned}}{latex}\end{{aligned}}" if display and r"\\" in latex else latex
    try:
        return CONVERTER.convert_with_local_state(source, displaystyle=display)
    except LatexError as error:
        LOGGER.warning("formula not understood: %s: %s", error, latex, location=node)
        return latex


def visit_inline(translator: Any, node: nodes.Element) -> None:
    translator.body.append(convert(node, display=False))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.Element) -> None:
    translator.body.append(f'<div class="math-block">{convert(node, display=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
