"""How many blocks a multiprocessor has, and how many bytes it waits for at once."""

from collections.abc import Mapping

from arrayopt.codecs import STORED
from arrayopt.fusion.layout import layout
from arrayopt.fusion.lower_stages import in_stages, turns_of
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import Body

__all__ = ["ahead", "resident"]

AHEAD = 32 << 10
"""Bytes that a multiprocessor is to wait for at once. See "Bytes in flight" in ``docs/cuda.md``."""

WIDE, COMPLEX, WIDEST = 18, 10, 20
"""For so many 32-bit words per element, real or complex, 80 registers are enough but for 16 bytes;
for so many arrays, 128.
"""


def resident(plan: Plan, dtype: str, real: str, *, windows: bool = False) -> int:
    """Blocks of a multiprocessor: three leave a thread 80 registers, two 128."""
    if plan.multiplies:  # many passes in one kernel, and products take the time
        return 1
    if layout(plan, device=True).leaves or any(map(turns_of, in_stages(plan).stages)):
        return 2 if real == "float32" else 1  # waves, and loops over members of rings
    passes, words = plan.passes, 2 if real == "float64" else 1
    held = []
    for p in passes:
        moved = [*p.loads.values(), *p.stores.values()]
        held.append(words * sum(2 if n.dtype == "complex" else 1 for n in moved))
    if max(held, default=0) >= WIDEST:
        return 1
    most = max((x + len(p.reductions) for x, p in zip(held, passes, strict=True)), default=0)
    most += 5 * (STORED[dtype].itemsize == 2)  # for rounding
    if plan.draws or plan.quantized or windows:  # random bits, scales, and where elements lie
        return 2
    wide = COMPLEX if dtype.startswith("complex") else WIDE
    return 3 if real == "float32" and most <= wide else 2


def ahead(plan: Plan, body: Body, storage: Mapping[str, str], blocks: int) -> int:
    """The vectors of each array that a thread reads before it uses the first."""
    if plan.multiplies:  # many passes share the registers, and products take the time
        return 1
    loop, each, sizes = body.elements, 0, set[int]()
    for name in loop.loads:
        if name in loop.storage:
            size = STORED[storage[loop.storage[name]]].itemsize
            sizes.add(size)
            each += blocks * 256 * 4 * size
    if plan.element != "C":
        return next((n for n in (1, 2, 4) if n * each >= AHEAD), 8) if each else 1
    least = 2 if len(plan.passes) == 2 and sizes == {4} else 1  # as measured on an H200
    return next((n for n in (1, 2) if n >= least and n * each >= AHEAD), 4)  # a piece is of four
