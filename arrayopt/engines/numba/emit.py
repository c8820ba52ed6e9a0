"""Emitting Numba: a plan as the text of a Python module of fused loops.

For each pass k there is `pass_k`, the loop over a stretch of elements, and `units_k`, which runs it
over units of one tensor; for what comes before it `between_k`. `run` does stages of a list of
tensors, one tensor after the other: stage 2k is `between_k`, stage 2k + 1 one thread's share of
pass k.
"""

from functools import lru_cache

from arrayopt.codecs import STORED
from arrayopt.engines.numba.codes import CODES
from arrayopt.engines.numba.header import DRAW, HALF, HEADER, PRODUCT, ROUND, SPLIT, TILE
from arrayopt.engines.numba.printer import ARGUMENTS, NumbaPrinter
from arrayopt.fusion.graph import CACHED
from arrayopt.fusion.lanes import Lanes
from arrayopt.fusion.layout import layout
from arrayopt.fusion.lower import lowered
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import Program

__all__ = ["emit"]

ALL = "table, numbers, results, work, part"
"""Where everything lies, of all tensors."""


@lru_cache(maxsize=CACHED)
def emit(
    plan: Plan,
    dtype: str,
    grad_dtype: str | None = None,
    *,
    lanes: Lanes | None = None,
    about: str = ".",
) -> str:
    """The text of a module that runs a plan.

    Parameters
    ----------
    plan : Plan
        The plan.
    dtype, grad_dtype : str
        What parameters and gradients are stored in.
    lanes : Lanes, optional
        The plan in segments, for matrices that are laid side by side.
    about : str
        What to say in the first line.
    """
    plan.check_wide()
    text = NumbaPrinter(plan, dtype, grad_dtype or dtype, lanes.layout if lanes else layout(plan))
    text.put_text(HEADER.format(about=about, real=text.real))
    if any(STORED[kind].numba for kind in text.storage.values()):
        text.put_text(HALF)
    if "low8" in plan.storage.values():
        text.put_text(SPLIT)
    if plan.quantized:
        text.put_text(CODES)
    if plan.draws:
        text.put_text(DRAW)
        text.put_text(ROUND if STORED[dtype].rounds else "")
    if plan.multiplies:
        text.put_text(PRODUCT.format(real=text.real, tile=TILE))
    text.put(0, f"{', '.join(text.columns)} = range({len(text.columns)})")
    if lanes:
        text.copies()
    program = lowered(plan, lanes)
    for function in program.functions:
        text.function(function)
    _entry(text, program)
    return text.text()


def _entry(text: NumbaPrinter, program: Program) -> None:
    """The one entry, with the call of each stage.

    There is one only, so that each loop is compiled once and sums in the same order for everyone.
    """
    text.put(0, "", "", "@jit", f"def run({ALL}, rows, first, last, thread, threads):")
    text.put(1, "for row in rows:")
    text.put(2, "t, scalars, values = table[row], numbers[row], results[row]")
    text.put(2, "f, n = t[FIRST], t[LAST] - t[FIRST]")
    text.put(2, "lo, hi = f + n * thread // threads, f + n * (thread + 1) // threads")
    text.put(2, "for stage in range(first, last):")
    for number, stage in enumerate(program.stages):
        if stage.function.body:
            given = [ARGUMENTS[stage.function.shared], *(f"AT_{x}" for x in stage.scratch)]
            text.put(3, f"if stage == {number}:")
            text.put(4, f"{stage.function.name}({', '.join(given)})")
