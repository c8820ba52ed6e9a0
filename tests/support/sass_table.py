"""The table of what passes do, as their machine code says: ``python -m tests.support.sass_table`` writes it to the page.

The model is Little's law: a multiprocessor gets at most as many bytes per second as it waits for at once, divided by the
latency of memory. It knows nothing of the L2 cache, of arithmetic, or of stores, and is an upper bound.
"""

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import arrayopt as ao
from arrayopt.engines.cuda.stages import stages
from arrayopt.fusion.plan import plan_for
from tests.support import sass

__all__ = ["ARCH", "PAGE", "ROWS", "Row", "look", "rows_of", "said"]

PAGE = Path(__file__).parents[2] / "docs" / "cuda.md"
BEGIN, END = "<!-- passes: begin -->", "<!-- passes: end -->"
ARCH = "sm_90"

LATENCY = 700e-9
"""Seconds from asking for bytes until they are there while memory is busy: an assumption."""

DEVICES = {"H200": (132, 4.8e12), "A100": (108, 2.0e12)}
"""Multiprocessors, and bytes per second, as the maker gives them."""

RULES = {
    "AdamW": (ao.AdamW(), 1),
    "SGD": (ao.SGD(lr=0.1, momentum=0.9), 1),
    "LAMB": (ao.LAMB(), 1),
    "LANS": (ao.LANS(), 1),
    "LARS": (ao.LARS(lr=0.1), 1),
    "judging": (None, 1),
    "CAME": (ao.CAME(lr=0.1), 2),
    "Adafactor": (ao.Adafactor(lr=0.1), 2),
}
"""Rules, with the rank of the tensors. `judging` is the pass that measures gradients for `clip_norm` and loss scales."""

ROWS = tuple(RULES)


@dataclass(frozen=True)
class Row:
    """A pass: which arrays it reads and writes, the bytes for each parameter, and what its code does."""

    loads: tuple[str, ...]
    stores: tuple[str, ...]
    moved: int
    facts: sass.PassFacts


@cache
def look(name, arch=ARCH, dtype="float32"):
    """The compiled kernel of a rule, and its passes."""
    plan, text = _planned(name, dtype)
    kernel = sass.kernel(text, arch)
    at = [j for j, stage in enumerate(stages(plan)) if stage.kind == "pass"]
    return kernel, [
        Row(tuple(p.loads), tuple(p.stores), p.bytes, sass.facts(kernel, j))
        for j, p in zip(at, plan.passes, strict=True)
    ]
