"""Emitting C++: a plan as the text of one source."""

from arrayopt.codecs import CODECS
from arrayopt.engines.cpp.text import Text, print_function
from arrayopt.engines.headers import header
from arrayopt.fusion.lanes import Lanes
from arrayopt.fusion.layout import layout
from arrayopt.fusion.lower import lowered
from arrayopt.fusion.plan import Plan

__all__ = ["emit"]

REST = "t, s, v, work, part"
CALLS = {"": REST, "units": f"lo, hi, thread, {REST}", "threads": f"thread, threads, {REST}"}


def emit(
    plan: Plan,
    dtype: str,
    grad_dtype: str | None = None,
    *,
    split: Lanes | None = None,
    about: str = ".",
) -> str:
    """The text of a C++ source that runs a plan; see `arrayopt.engines.numba.emit.emit`."""
    plan.check_wide()
    m = Text(plan, dtype, grad_dtype or dtype, split.where if split else layout(plan))
    m.put(0, *(f"// {line}".rstrip() for line in f"Fused loops{about}".splitlines()), "")
    m.put(0, *header("cpu.h").splitlines(), "", f"typedef {CODECS[m.real].cuda} W;", "")
    for name in ("storage.cuh", "arithmetic.cuh", *(["random.cuh"] if plan.draws else []), "loops.h"):
        m.put(0, *header(name).splitlines(), "")
    m.put(0, f"enum {{ {', '.join(m.columns)}, kColumns }};")
    functions = lowered(plan, split).stages
    for function in functions:
        if function is not None:
            print_function(m, function)
    m.put(
        0, "", 'extern "C" void run(const int64_t* at, int64_t first, int64_t last, int64_t thread, int64_t threads) {'
    )
    m.put(1, "const int64_t* const rows = (const int64_t*)at[0];")
    m.put(1, "const double* const scalars = (const double*)at[2];")
    m.put(1, "double *const values = (double*)at[3], *const part = (double*)at[5];")
    m.put(1, "W* const work = (W*)at[4];")
    m.put(1, "for (int64_t j = 0; j < at[6]; ++j) {", "    int64_t* t = (int64_t*)at[1] + rows[j] * kColumns;")
    m.put(2, f"const double* s = scalars + rows[j] * {len(m.scalar)};")
    m.put(2, f"double* v = values + rows[j] * {len(m.tensor)};")
    m.put(2, "const int64_t f = t[FIRST], n = t[LAST] - f;")
    m.put(2, "const int64_t lo = f + n * thread / threads, hi = f + n * (thread + 1) / threads;")
    m.put(2, "if (first < 0) t[AT_g] = look(t[AT_g]);")
    m.put(2, "for (int64_t stage = first < 0 ? 0 : first; stage < last; ++stage) switch (stage) {")
    for stage, function in enumerate(functions):
        if function is not None:
            m.put(3, f"case {stage}: {function.name}({CALLS[function.shared]}); break;")
    m.put(2, "default: break;", "}")
    m.put(1, "}")
    m.put(0, "}")
    return m.text()
