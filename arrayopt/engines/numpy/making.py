"""Making of a pass a list of NumPy calls, which write into as few buffers as there can be."""

import operator
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain

from arrayopt.codecs import STORED, Codec
from arrayopt.engines.numpy.program import VIEWS, Extra, Program, Steps
from arrayopt.fusion.graph import Node, Spare, operands
from arrayopt.fusion.ops import OPS
from arrayopt.fusion.passes import Pass

__all__ = ["program"]


@lru_cache(maxsize=512)
def program(pass_: Pass, storage: tuple[tuple[str, str], ...]) -> Program:
    """The program of a pass.

    Parameters
    ----------
    pass_ : Pass
        The pass.
    storage : tuple of (str, str)
        Stored arrays, and their dtypes. Those that do not round can be written by a step itself.
    """
    stored = {name: STORED[dtype] for name, dtype in storage}
    read, summed = dict(pass_.loads), {r: _factors(r, pass_) for r in pass_.reductions}
    extras = _extras(pass_, summed)
    spare = list(chain(*extras.values()))
    kept = {*chain(*summed.values()), *pass_.stores.values()}
    wanted = _needed(kept, pass_).difference(spare)
    order = [n for n in pass_.nodes if n in wanted] + spare
    last = dict[Node, int]()
    for number, node in enumerate(order):
        last |= dict.fromkeys(node.args, number)
    bases = {n: n.args[0] for n in order if n.op in VIEWS}
    direct: dict[Node, str] = {}
    for name, node in pass_.stores.items():
        if (
            not stored[name].rounds
            and node in order
            and node not in direct
            and node.op not in VIEWS
        ):
            old, at = read.get(name), order.index(node)
            still_read = (
                -1 if old is None else max(last.get(old, -1), len(order) if old in kept else -1)
            )
            if old in bases.values():
                continue  # a view of what is stored is read later
            if still_read < at or (still_read == at and OPS[node.op].in_place):
                direct[node] = name
    buffers: list[str] = []
    free: dict[str, list[int]] = {"real": [], "complex": [], "bool": []}
    where: dict[Node, int] = {}
    targets: dict[Node, int | str] = {}
    for i, node in enumerate(order):
        dying = []
        for operand in dict.fromkeys(node.args):
            if operand in where and last[operand] == i and operand not in kept:
                dying.append(operand)
        dying = [a for a in dying if a not in bases.values()]
        over = OPS[node.op].in_place
        if over:
            for operand in dying:
                free[operand.dtype].append(where.pop(operand))
        target: int | str = direct.get(node, -1)
        if node not in bases and target == -1:
            if not free[node.dtype]:
                free[node.dtype].append(len(buffers))
                buffers.append(node.dtype)
            target = where[node] = free[node.dtype].pop()
        targets[node] = target
        for operand in () if over else dying:
            free[operand.dtype].append(where.pop(operand))
    copies = {name: node for name, node in pass_.stores.items() if direct.get(node) != name}
    return _placed(pass_, stored, targets, summed, extras, copies, tuple(buffers))


def _needed(roots: Iterable[Node], p: Pass) -> set[Node]:
    """What of a pass's own values some are computed from, and these."""
    found, stack, own = set[Node](), list(roots), set(p.nodes)
    while stack:
        n = stack.pop()
        if n in own and n not in found:
            found.add(n)
            stack += n.args
    return found


def _factors(r: Node, p: Pass) -> tuple[Node, ...]:
    """What a reduction is of: two factors, where it is a sum of products over a whole tensor."""
    (x,) = r.args
    dot = r.op == "sum" and not r.axes and x.op == "mul" and x in p.nodes
    for a in x.args:
        dot = dot and a.axes == p.axes and a.dtype == "real" and not a.on_host
    return x.args if dot else (x,)


def _extras(pass_: Pass, summed: dict[Node, tuple[Node, ...]]) -> dict[Node, list[Node]]:
    """The sums that can be spared, for the pass makes what they stand beside; and what is computed
    for each alone.
    """
    plain = _plain(pass_)
    spare = [r for r in pass_.reductions if isinstance(r.data, Spare)]
    can = [r for r in spare if (r.data.plain, r.axes) in plain]
    others = chain(*(factors for r, factors in summed.items() if r not in can))
    found = [_needed([*pass_.stores.values(), *others], pass_)]
    found += [_needed(summed[r], pass_) for r in can]
    needed = Counter(chain(*found))
    alone = {}
    for r, some in zip(can, found[1:], strict=True):
        alone[r] = [n for n in pass_.nodes if n in some and needed[n] == 1]
    return alone


def _plain(p: Pass) -> dict[tuple[int, str], Node]:
    """The sums that no other makes idle, by what they are of, and their axes."""
    summed = [r for r in p.reductions if r.op == "sum" and not isinstance(r.data, Spare)]
    return {(r.args[0].id, r.axes): r for r in summed}


def _placed(
    pass_: Pass,
    stored: dict[str, Codec],
    targets: dict[Node, int | str],
    summed: dict[Node, tuple[Node, ...]],
    extras: dict[Node, list[Node]],
    copies: dict[str, Node],
    buffers: tuple[str, ...],
) -> Program:
    """A program, with a place in one list for each value that it is about."""
    wanted = [*operands(targets), *targets, *chain(*summed.values()), *copies.values()]
    every = dict.fromkeys([*pass_.loads.values(), *wanted])
    at = {n: i for i, n in enumerate(every)}
    raw = {*pass_.loads.values(), *(n for n in pass_.nodes if n.op in VIEWS)}
    plain, first = _plain(pass_), [r for r in pass_.reductions if r not in extras]

    def steps(nodes: Iterable[Node]) -> Steps:
        made = []
        for n in nodes:
            take = operator.itemgetter(*(at[a] for a in n.args), at[n])
            new = at[n] if targets[n] == -1 else -1
            made.append((OPS[n.op].into or OPS[n.op].numpy, take, new))
        return tuple(made)

    def extra(r: Node) -> Extra:
        return Extra(plain[r.data.plain, r.axes], r.data.low, r.data.high, steps(extras[r]))

    spare, reductions = set(chain(*extras.values())), []
    for r in [*first, *extras]:
        places = tuple(at[a] for a in summed[r])
        reductions.append((r, places, extra(r) if r in extras else None))
    return Program(
        steps=steps(n for n in targets if n not in spare),
        reductions=tuple(reductions),
        blank=tuple(n.data if n.op == "const" else None for n in at),
        loads=tuple((name, stored[name].load, at[n]) for name, n in pass_.loads.items()),
        small={n: at[n] for n in pass_.uses if n in at},
        made=tuple((at[n], target) for n, target in targets.items() if target != -1),
        buffers=buffers,
        copies=tuple((name, stored[name].store, at[n], n in raw) for name, n in copies.items()),
    )
