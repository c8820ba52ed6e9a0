"""Lowering products of matrices: bands of rows, which threads share."""

from collections.abc import Sequence

from arrayopt.fusion.bulk import Multiply
from arrayopt.fusion.index import ONE, column, greatest, least, name, product
from arrayopt.fusion.layout import BANDS
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.program import Function, Let, Loop, Statement

__all__ = ["lowered_product", "shared"]


def lowered_product(index: int, pass_: Pass) -> Function:
    """Product `index`: this thread's share of the bands, from outside in.

    Of a symmetric product the last bands take longest.
    """
    (made,), names = pass_.nodes, list(pass_.loads)
    turned_left, turned_right, symmetric, _ = made.data
    rows, columns = (x.upper() for x in pass_.axes[-2:])
    left = made.args[0].axes[-2:].upper()
    length = left[0] if turned_left else left[1]
    ab, band, bands = name("ab"), name("band"), name("bands")
    operands = [
        (names[0], made.args[0]),
        (names[-1], made.args[1]),
        (next(iter(pass_.stores)), made),
    ]
    starts = [(x, ab * product(node.axes[-2:].upper())) for x, node in operands]
    left_start, right_start, out = starts
    body: list[Statement] = [Let(x, column(f"IN_{x}")) for x in "ABRC"]
    body.append(Let("high", least(greatest(name(rows) // 4, BANDS[0]), BANDS[1])))
    body.append(Let("bands", (name(rows) + name("high") - 1) // name("high")))
    body.append(Let("total", name("A") * name("B") * bands))
    here: list[Statement] = [
        Let("ab", name("unit") // bands),
        Let("turn", name("unit") % bands),
    ]
    half, odd = name("turn") // 2, name("turn") % 2
    here.append(Let("band", (ONE - odd) * half + odd * (bands - 1 - half)))
    here += [
        Let("i0", band * name("high")),
        Let("i1", least(name(rows), name("i0") + name("high"))),
    ]
    sides = name(rows), name(columns), name(length)
    here.append(
        Multiply(
            left_start,
            right_start,
            out,
            name("i0"),
            name("i1"),
            sides,
            (turned_left, turned_right),
            symmetric,
        )
    )
    return Function(f"units_{index}", "threads", (*body, shared(here)))


def shared(body: Sequence[Statement]) -> Loop:
    """This thread's share of ``total`` units."""
    total, thread, threads = map(name, ("total", "thread", "threads"))
    return Loop("unit", total * thread // threads, total * (thread + 1) // threads, tuple(body))
