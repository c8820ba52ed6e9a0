"""The columns of the table that compiled code works through: named here, for the code and for what
fills them in.
"""

from arrayopt.fusion.layout import GEOMETRY, Layout
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.windows import WINDOW
from arrayopt.state.quantized import scale_of

__all__ = ["columns"]


def columns(plan: Plan, where: Layout) -> list[str]:
    """The names of the columns, in their order.

    Parameters
    ----------
    plan : Plan
        The plan.
    where : Layout
        Where its values lie.

    Returns
    -------
    list of str
        ``IN_`` and a name of `GEOMETRY` or `WINDOW`: sizes, and the batches, rows and columns that
        are here. ``AT_``
        and the name of an array: its address. ``VEC`` and ``PART`` and a number: where a vector, or
        the partial results
        of a reduction, begin in the rooms for these. ``START``: the position of the first element,
        where random numbers
        are drawn. ``BLAS``: the address of its product. ``OWN``: where in `work` the threads' own
        parts begin.
        ``FIRST`` and ``LAST``: the units to run, which are all, but where several processes share a
        tensor.
    """
    arrays = ["p", "g", *plan.slots, *map(scale_of, plan.quantized), *plan.spilled]
    return [
        *(f"IN_{name}" for name in GEOMETRY),
        *(f"AT_{name}" for name in arrays),
        *(f"VEC{i}" for i in range(len(where.vectors))),
        *(f"PART{i}" for i in range(len(where.partials))),
        *(f"IN_{name}" for name in WINDOW),
        *(["START"] if plan.draws else []),
        *(["BLAS"] if plan.multiplies else []),
        "OWN",
        "FIRST",
        "LAST",
    ]
