"""The columns that the table of tensors begins with in every engine that compiles."""

from collections.abc import Sequence

from arrayopt.fusion.layout import Layout
from arrayopt.fusion.plan import Plan
from arrayopt.state.quantized import scale_of

__all__ = ["first_columns"]


def first_columns(plan: Plan, where: Layout, head: Sequence[str]) -> list[str]:
    """The names of the columns, in their order: ``IN_`` and a name of `head`; ``AT_`` and the name
    of an array, for its address; ``VEC`` and ``PART`` and a number, for where a vector, or the
    partial results of a reduction, begin.
    """
    arrays = ["p", "g", *plan.slots, *map(scale_of, plan.quantized), *plan.spilled]
    return [
        *(f"IN_{name}" for name in head),
        *(f"AT_{name}" for name in arrays),
        *(f"VEC{i}" for i in range(len(where.vectors))),
        *(f"PART{i}" for i in range(len(where.partials))),
    ]
