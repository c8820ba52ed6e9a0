"""What a plan with products of matrices needs beside others: scratch memory that is shared, and
what is refused.
"""

from collections.abc import Sequence
from dataclasses import replace

from arrayopt.fusion.dims import WAY_OUT, TraceError
from arrayopt.fusion.graph import SCRATCH, Node, is_whole, operands
from arrayopt.fusion.passes import Pass

__all__ = ["check_spaces", "multiplied", "renamed", "shared"]


def multiplied(node: Node) -> str:
    """The axes along which a product multiplies and adds: those of the result, and the one that is
    summed over.
    """
    axes, ta = node.args[0].axes, node.data[0]
    return f"{node.axes}{axes[-2] if ta else axes[-1]}".upper()


def shared(passes: Sequence[Pass], kinds: dict[str, tuple[str, str]]) -> dict[str, str]:
    """For each scratch array, of some axes and kind, the name of the memory that holds it while it
    is needed.

    A pass works element by element: what it stores may lie where something lay that it is the last
    to load. A product may not write what it reads.
    """
    last = dict[str, int]()
    for number, pass_ in enumerate(passes):
        last |= dict.fromkeys(pass_.loads, number)
    free: dict[tuple[str, str], list[str]] = {}
    made: dict[str, str] = {}
    for number, pass_ in enumerate(passes):
        over = [name for name in pass_.loads if name in kinds and last[name] == number]
        for name in [] if pass_.multiplies else over:
            free.setdefault(kinds[name], []).append(made[name])
        for name in pass_.stores:
            if name in kinds:
                room = free.setdefault(kinds[name], [])
                made[name] = room.pop() if room else f"{SCRATCH}{len(set(made.values()))}"
        for name in over if pass_.multiplies else []:
            free.setdefault(kinds[name], []).append(made[name])
    return made


def renamed(p: Pass, names: dict[str, str]) -> Pass:
    """A pass with other names for its arrays."""
    loads = {names.get(name, name): n for name, n in p.loads.items()}
    stores = {names.get(name, name): n for name, n in p.stores.items()}
    return replace(p, loads=loads, stores=stores)


def check_spaces(passes: Sequence[Pass], element: str) -> None:
    """Raise TraceError for what no engine does with a product of a matrix and its transpose."""
    for pass_ in passes:
        if pass_.axes == element or pass_.multiplies:
            continue
        used = operands(pass_.nodes)
        varying = [operand for operand in used if not is_whole(operand.axes, element)]
        if pass_.sums or any(set(operand.axes) & set("RC") for operand in varying):
            what = f"a value over {pass_.axes} that is summed up, or varies by row,"
            raise TraceError(f"{what} is not fused{WAY_OUT}")
