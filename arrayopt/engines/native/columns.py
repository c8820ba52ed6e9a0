"""The columns of the table that compiled code works through: named here, for the code and for what
fills them in.
"""

from arrayopt.engines.columns import first_columns
from arrayopt.fusion.layout import GEOMETRY, Layout
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.windows import WINDOW

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
        Those of `first_columns`, with names of `GEOMETRY` and `WINDOW`: sizes, and the batches,
        rows and columns that are here. ``START``: the position of the first element, where random
        numbers are drawn. ``BLAS``: the address of its product. ``OWN``: where in `work` the
        threads' own parts begin. ``FIRST`` and ``LAST``: the units to run, which are all, but where
        several processes share a tensor.
    """
    return [
        *first_columns(plan, where, GEOMETRY),
        *(f"IN_{name}" for name in WINDOW),
        *(["START"] if plan.draws else []),
        *(["BLAS"] if plan.multiplies else []),
        "OWN",
        "FIRST",
        "LAST",
    ]
