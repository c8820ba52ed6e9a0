"""Emitting C++: a plan as the text of one source."""

from functools import lru_cache

from arrayopt.codecs import CODECS
from arrayopt.engines.cplusplus import header
from arrayopt.engines.cpp.printer import CppPrinter
from arrayopt.fusion.graph import CACHED
from arrayopt.fusion.lanes import Lanes
from arrayopt.fusion.layout import layout
from arrayopt.fusion.lower import lowered
from arrayopt.fusion.plan import Plan

__all__ = ["emit"]

REST = "t, s, v, work, part"
CALLS = {"": REST, "units": f"lo, hi, thread, {REST}", "threads": f"thread, threads, {REST}"}

RUN = """
// The words of a call are the addresses of its arrays, the rows last, and how many rows there are.
extern "C" void run(const int64_t* call, int64_t first, int64_t last, int64_t thread,
                    int64_t threads) {{
    const double* const scalars = (const double*)call[1];
    double *const values = (double*)call[2], *const part = (double*)call[4];
    W* const work = (W*)call[3];
    const int64_t* const rows = (const int64_t*)call[5];
    for (int64_t j = 0; j < call[6]; ++j) {{
        int64_t* t = (int64_t*)call[0] + rows[j] * kColumns;
        const double* s = scalars + rows[j] * {scalars};
        double* v = values + rows[j] * {values};
        const int64_t f = t[FIRST], n = t[LAST] - f;
        const int64_t lo = f + n * thread / threads, hi = f + n * (thread + 1) / threads;
        for (int64_t stage = first; stage < last; ++stage) switch (stage) {{
"""


@lru_cache(maxsize=CACHED)
def emit(
    plan: Plan,
    dtype: str,
    grad_dtype: str | None = None,
    *,
    lanes: Lanes | None = None,
    about: str = ".",
) -> str:
    """The text of a C++ source that runs a plan; see `arrayopt.engines.numba.emit.emit`."""
    plan.check_wide()
    text = CppPrinter(plan, dtype, grad_dtype or dtype, lanes.layout if lanes else layout(plan))
    text.comment(f"Fused loops{about}")
    text.put_text(header("cpu.h"))
    text.put(0, "", f"typedef {CODECS[text.real].cuda} W;", "")
    draws = ["random.cuh", "draws.h"] if plan.draws else []
    for name in ("storage.cuh", "arithmetic.cuh", "quantized.cuh", "loops.h", *draws):
        text.put_text(header(name))
        text.put(0, "")
    text.put(0, f"enum {{ {', '.join(text.columns)}, kColumns }};")
    program = lowered(plan, lanes)
    for function in program.functions:
        text.function(function)
    scalars, values = len(text.layout.scalars), text.layout.values
    text.put_text(RUN.format(scalars=scalars, values=values))
    for number, stage in enumerate(program.stages):
        if stage.function.body:
            given = ", ".join([CALLS[stage.function.shared], *(f"AT_{x}" for x in stage.scratch)])
            text.put(3, f"case {number}: {stage.function.name}({given}); break;")
    text.put(2, "default: break;", "}")
    text.put(0, "    }", "}")
    return text.text()
