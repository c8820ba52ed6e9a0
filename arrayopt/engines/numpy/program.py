"""A pass as a list of NumPy calls that write into a few numbered buffers."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from arrayopt.codecs import CODECS, Codec
from arrayopt.fusion.graph import Node
from arrayopt.fusion.ops import OPS
from arrayopt.fusion.stages import Sweep

__all__ = ["Program", "program"]

_VIEWS = ("real", "imag")


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """How a pass is run on a block: a list of values, in which each has its place, and calls on them.

    Attributes
    ----------
    steps : tuple of (callable, callable, int)
        What is called; what picks the arguments from the list of values, with where to write last; and where a result
        that is a view of an argument belongs, or -1.
    blank : tuple
        The list with nothing but constants in it.
    loads : tuple of (str, callable, int)
        Stored arrays that are read, and by what.
    small : dict of Node to int
        Values over fewer axes, and scalars of the step, that are read.
    made : tuple of (int, int or str)
        In what results are written: a buffer by number, or a stored array by name.
    wanted : dict of Node to int
        What is summed or copied afterwards.
    buffers : tuple of str
        What each buffer holds: ``real``, ``complex`` or ``bool``.
    copies : tuple of (str, callable, Node)
        Stores that no step writes in place, and by what.
    """

    steps: tuple[tuple[Callable[..., Any], Callable[[list[Any]], tuple[Any, ...]], int], ...]
    blank: tuple[Any, ...]
    loads: tuple[tuple[str, Callable[..., Any], int], ...]
    small: dict[Node, int]
    made: tuple[tuple[int, int | str], ...]
    wanted: dict[Node, int]
    buffers: tuple[str, ...]
    copies: tuple[tuple[str, Callable[..., Any], Node], ...]

    def run(
        self, block: Mapping[str, Any], known: Mapping[Node, Any], buffers: Sequence[Any], real: Any
    ) -> dict[Node, Any]:
        """Make all calls, under an `errstate` of the caller's; what is wanted afterwards."""
        values = list(self.blank)
        for n, i in self.small.items():
            values[i] = known[n]
        for name, load, i in self.loads:
            values[i] = load(block[name], real)
        for i, target in self.made:
            values[i] = block[target] if isinstance(target, str) else buffers[target]
        for call, pick, view in self.steps:
            made = call(*pick(values))
            if view >= 0:
                values[view] = made
        return {n: values[i] for n, i in self.wanted.items()}

    def finish(self, p: Sweep, block: Mapping[str, Any], made: Mapping[Node, Any]) -> None:
        """Make the stores that no step has made in place."""
        if self.copies:
            raw = {*p.loads.values(), *(n for n in p.nodes if n.op in _VIEWS)}
            copied = [np.array(made[n]) if n in raw and len(self.copies) > 1 else made[n] for _, _, n in self.copies]
            for (name, store, _), x in zip(self.copies, copied, strict=True):
                store(block[name], x)


@lru_cache(maxsize=512)
def program(p: Sweep, storage: tuple[tuple[str, str], ...]) -> Program:
    """The program of a pass.

    Parameters
    ----------
    p : Sweep
        The pass.
    storage : tuple of (str, str)
        Stored arrays, and their dtypes. Those that do not round can be written by a step itself.
    """
    stored = {name: CODECS[dtype] for name, dtype in storage}
    read = dict(p.loads)
    last = {a: i for i, n in enumerate(p.nodes) for a in n.args}
    kept = {s.args[0] for s in p.reductions} | set(p.stores.values())
    bases = {n: n.args[0] for n in p.nodes if n.op in _VIEWS}
    direct: dict[Node, str] = {}
    for name, node in p.stores.items():
        if not stored[name].rounds and node in p.nodes and node not in direct and node.op not in _VIEWS:
            old, at = read.get(name), p.nodes.index(node)
            still_read = -1 if old is None else max(last.get(old, -1), len(p.nodes) if old in kept else -1)
            if old in bases.values():
                continue  # a view of what is stored is read later
            if still_read < at or (still_read == at and OPS[node.op].in_place):
                direct[node] = name
    buffers: list[str] = []
    free: dict[str, list[int]] = {"real": [], "complex": [], "bool": []}
    where: dict[Node, int] = {}
    targets: dict[Node, int | str] = {}
    for i, n in enumerate(p.nodes):
        target: int | str = direct.get(n, -1)
        if n in bases:
            target = -1
        elif target == -1:
            if not free[n.dtype]:
                free[n.dtype].append(len(buffers))
                buffers.append(n.dtype)
            target = where[n] = free[n.dtype].pop()
        targets[n] = target
        for a in set(n.args):
            held = a in kept or any(bases.get(v) is a for v in bases)
            if a in where and last[a] == i and not held:
                free[a.dtype].append(where.pop(a))
    copies = {name: node for name, node in p.stores.items() if direct.get(node) != name}
    return _placed(p, stored, targets, copies, tuple(buffers))


def _placed(
    p: Sweep,
    stored: dict[str, Codec],
    targets: dict[Node, int | str],
    copies: dict[str, Node],
    buffers: tuple[str, ...],
) -> Program:
    """A program, with a place in one list for each value that it is about."""
    wanted = dict.fromkeys([*(s.args[0] for s in p.reductions), *copies.values()])
    args = [a for n in targets for a in n.args]
    at = {n: i for i, n in enumerate(dict.fromkeys([*p.loads.values(), *args, *targets, *wanted]))}
    return Program(
        steps=tuple(
            (
                OPS[n.op].into or OPS[n.op].numpy,
                operator.itemgetter(*(at[a] for a in n.args), at[n]),
                at[n] if targets[n] == -1 else -1,
            )
            for n in targets
        ),
        blank=tuple(n.data if n.op == "const" else None for n in at),
        loads=tuple((name, stored[name].load, at[n]) for name, n in p.loads.items()),
        small={n: at[n] for n in p.uses},
        made=tuple((at[n], target) for n, target in targets.items() if target != -1),
        wanted={n: at[n] for n in wanted},
        buffers=buffers,
        copies=tuple((name, stored[name].store, n) for name, n in copies.items()),
    )
