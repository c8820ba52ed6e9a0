"""Sphinx's settings; ``make docs`` builds the pages into ``docs/_build``, without network access."""

import gc
import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

import arrayopt  # noqa: E402
from arrayopt import Rule  # noqa: E402

# Pages are a large tree that lives to the end: to look through it for garbage takes a quarter of the time.
gc.disable()

project = "arrayopt"
author = "the arrayopt authors"
project_copyright = "the arrayopt authors"
version = release = arrayopt.__version__

extensions = [
    "mathml",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

default_role = "py:obj"
nitpick_ignore_regex = [
    (
        "py:obj",
        ".*",
    ),  # `x` in a docstring is a link where it names something public, and else just code
    ("py:class", r"(?!arrayopt\.).*"),  # types in docstrings are prose: "mapping of str to mapping"
]

autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_use_ivar = True

copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = ">>> "

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"arrayopt {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_search_scorer = str(HERE / "_static" / "scorer.js")
html_copy_source = False
html_show_sphinx = False


def without_footnotes(app, what, name, obj, options, lines):
    """Make list items of footnotes: they are numbered by docstring, and would meet others of that number on a page."""
    lines[:] = [re.sub(r" \[\d+\]_", "", re.sub(r"^\.\. \[\d+\] ", "*  ", line)) for line in lines]


def plain_signature(app, what, name, obj, options, signature, annotation):
    """Write the arguments of classes as their `__init__` has them, and an argument without default as left out."""
    if signature and signature.startswith("(*args"):
        taken = list(inspect.signature(obj.__init__).parameters.values())[1:]
        shared = (
            {f.name for f in fields(Rule)} if issubclass(obj, Rule) and obj is not Rule else set()
        )
        own = [x.replace(annotation=inspect.Parameter.empty) for x in taken if x.name not in shared]
        signature = f"{str(inspect.Signature(own))[:-1]}{', **options' if shared else ''})"
    unknown = r"<(dataclasses._MISSING_TYPE )?object[^>]*>|<function <lambda>[^>]*>"
    return signature and re.sub(unknown, "...", signature).replace(", **given)", ")"), annotation


def setup(app):
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("autodoc-process-docstring", without_footnotes)
