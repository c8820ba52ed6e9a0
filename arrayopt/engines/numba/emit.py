"""Emitting Numba: a plan as the text of a Python module of fused loops.

For each pass k there is `pass_k`, the loop over a stretch of elements, and `units_k`, which runs it
over units of one tensor; for what comes before it `between_k`. `run` does stages of a list of
tensors, one tensor after the other: stage 2k is `between_k`, stage 2k + 1 one thread's share of
pass k.
"""

from arrayopt.codecs import STORED
from arrayopt.engines.numba.codes import CODES
from arrayopt.engines.numba.header import DRAW, HALF, HEADER, ROUND, SPLIT
from arrayopt.engines.numba.printer import ARGUMENTS, print_copies, print_function
from arrayopt.engines.numba.products import header
from arrayopt.engines.numba.text import REST, Text
from arrayopt.fusion.lanes import Lanes
from arrayopt.fusion.layout import layout
from arrayopt.fusion.lower import lowered
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import Program

__all__ = ["emit"]


def emit(
    plan: Plan,
    dtype: str,
    grad_dtype: str | None = None,
    *,
    split: Lanes | None = None,
    about: str = ".",
) -> str:
    """The text of a module that runs a plan.

    Parameters
    ----------
    plan : Plan
        The plan.
    dtype, grad_dtype : str
        What parameters and gradients are stored in.
    split : Lanes, optional
        The plan in segments, for matrices that are laid side by side.
    about : str
        What to say in the first line.
    """
    plan.check_wide()
    text = Text(plan, dtype, grad_dtype or dtype, split.where if split else layout(plan))
    text.put(0, *HEADER.format(about=about, real=text.real).splitlines())
    if any(STORED[kind].numba for kind in text.storage.values()):
        text.put(0, *HALF.splitlines())
    if "low8" in plan.storage.values():
        text.put(0, *SPLIT.splitlines())
    if plan.quantized:
        text.put(0, *CODES.splitlines())
    if plan.draws:
        text.put(0, *DRAW.splitlines(), *(ROUND.splitlines() if STORED[dtype].rounds else ()))
    if plan.multiplies:
        text.put(0, *header(text).splitlines())
    text.put(0, f"{', '.join(text.columns)} = range({len(text.columns)})")
    if split:
        print_copies(text)
    program = lowered(plan, split)
    for function in program.functions:
        print_function(text, function)
    _entry(text, program)
    return text.text()


def _entry(text: Text, program: Program) -> None:
    """The one entry, with the call of each stage.

    There is one only, so that each loop is compiled once and sums in the same order for everyone.
    """
    text.put(
        0,
        "",
        "",
        "@jit",
        f"def run({REST}, rows, first, last, thread, threads):",
        "    for row in rows:",
    )
    text.put(2, "f, n = table[row, FIRST], table[row, LAST] - table[row, FIRST]")
    text.put(2, "lo, hi = f + n * thread // threads, f + n * (thread + 1) // threads")
    text.put(2, "if first < 0:", "    table[row, AT_g] = look(table[row, AT_g])")
    text.put(2, "for stage in range(max(0, first), last):")
    for stage, call in enumerate(program.stages):
        if call is not None:
            given = ", ".join([ARGUMENTS[call.function.shared], *(f"AT_{x}" for x in call.scratch)])
            text.put(3, f"if stage == {stage}:", f"    {call.function.name}({given})")
