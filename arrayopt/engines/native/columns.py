"""What printers for CPUs name: columns of the table, which `table.py` fills in, and arguments."""

from arrayopt.engines.table_batch import first_columns
from arrayopt.fusion.layout import GEOMETRY, Layout
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.windows import WINDOW

SHARE = {"": (), "units": ("lo", "hi", "thread"), "threads": ("thread", "threads")}
"""The integers by which a function knows a thread's share of its work; see `Function.shared`."""


def native_columns(plan: Plan, layout: Layout) -> list[str]:
    """Return the names of the columns on CPUs, in order.

    They are `first_columns`, with names of `GEOMETRY` and `WINDOW` (sizes, and the part of a matrix
    on this rank). ``START``: the position of the first element, for random numbers. ``BLAS``: the
    address of `gemm`. ``OWN``: the offset in `work` of memory for each thread. ``FIRST``, ``LAST``:
    the range of units to run, which is shorter if ranks share the tensor.
    """
    more = [*(["START"] if plan.draws else []), *(["BLAS"] if plan.multiplies else [])]
    sizes = [f"IN_{name}" for name in WINDOW]
    return [*first_columns(plan, layout, GEOMETRY), *sizes, *more, "OWN", "FIRST", "LAST"]
