"""What a plan with products of matrices needs beside others: scratch memory that is shared, and
what is refused.
"""

from collections.abc import Sequence
from dataclasses import replace

from arrayopt.fusion.dims import WAY_OUT, TraceError
from arrayopt.fusion.graph import SCRATCH, Node, is_whole
from arrayopt.fusion.passes import Pass

__all__ = ["check_spaces", "multiplied", "renamed", "shared"]


def multiplied(n: Node) -> str:
    """The axes along which a product multiplies and adds: those of the result, and the one that is
    summed over.
    """
    a, ta = n.args[0].axes, n.data[0]
    return f"{n.axes}{a[-2] if ta else a[-1]}".upper()


def shared(passes: Sequence[Pass], kinds: dict[str, tuple[str, str]]) -> dict[str, str]:
    """For each scratch array, of some axes and kind, the name of the memory that holds it while it
    is needed.

    A pass works element by element: what it stores may lie where something lay that it is the last
    to load. A product may not write what it reads.
    """
    last = {name: k for k, p in enumerate(passes) for name in p.loads}
    free: dict[tuple[str, str], list[str]] = {}
    made: dict[str, str] = {}
    for k, p in enumerate(passes):
        over = [name for name in p.loads if name in kinds and last[name] == k]
        for name in [] if p.multiplies else over:
            free.setdefault(kinds[name], []).append(made[name])
        for name in p.stores:
            if name in kinds:
                room = free.setdefault(kinds[name], [])
                made[name] = room.pop() if room else f"{SCRATCH}{len(set(made.values()))}"
        for name in over if p.multiplies else []:
            free.setdefault(kinds[name], []).append(made[name])
    return made


def renamed(p: Pass, names: dict[str, str]) -> Pass:
    """A pass with other names for its arrays."""
    loads, stores = (
        {names.get(name, name): n for name, n in x.items()} for x in (p.loads, p.stores)
    )
    return replace(p, loads=loads, stores=stores)


def check_spaces(passes: Sequence[Pass], element: str) -> None:
    """Raise TraceError for what no engine does with a product of a matrix and its transpose."""
    for p in passes:
        used = [a for n in p.nodes for a in n.args if not is_whole(a.axes, element)]
        if (
            p.axes != element
            and not p.multiplies
            and (p.sums or any(set(n.axes) & set("RC") for n in used))
        ):
            raise TraceError(
                f"a value over {p.axes} that is summed up, or varies by row, is not fused{WAY_OUT}"
            )
