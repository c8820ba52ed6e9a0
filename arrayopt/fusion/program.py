"""A pass as a list of NumPy calls that write into a few numbered buffers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from arrayopt.fusion.graph import HOST, Node
from arrayopt.fusion.plan import Pass, Plan

__all__ = ["CALLS", "Program", "program"]

_VIEWS = ("real", "imag")


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """How a pass is run on a block.

    Attributes
    ----------
    steps : tuple of (callable, tuple of Node, Node, int or str)
        What is called, on what, giving what, written where: a buffer by number, or a stored array by name.
    buffers : tuple of str
        What each buffer holds: ``real``, ``complex`` or ``bool``.
    copies : dict of str to Node
        Stores that no step writes in place.
    small : tuple of Node
        Values over fewer axes, and scalars of the step, that the steps read.
    """

    steps: tuple[tuple[Callable[..., Any], tuple[Node, ...], Node, int | str], ...]
    buffers: tuple[str, ...]
    copies: dict[str, Node]
    small: tuple[Node, ...]


@lru_cache(maxsize=512)
def program(plan: Plan, k: int, in_place: frozenset[str]) -> Program:
    """The program of pass k.

    Parameters
    ----------
    plan : Plan
        The plan.
    k : int
        Which pass.
    in_place : frozenset of str
        Stored arrays that are of the dtype of arithmetic, so that a step can write them itself.
    """
    p: Pass = plan.passes[k]
    read = dict(p.loads)
    last = {a: i for i, n in enumerate(p.nodes) for a in n.args}
    kept = {s.args[0] for s in p.sums} | set(p.stores.values())
    bases = {n: n.args[0] for n in p.nodes if n.op in _VIEWS}
    direct: dict[Node, str] = {}
    for name, node in p.stores.items():
        if name in in_place and node in p.nodes and node not in direct and node.op not in _VIEWS:
            old, at = read.get(name), p.nodes.index(node)
            still_read = -1 if old is None else max(last.get(old, -1), len(p.nodes) if old in kept else -1)
            if old in bases.values():
                continue  # a view of what is stored is read later
            if still_read < at or (still_read == at and isinstance(HOST.get(node.op), np.ufunc)):
                direct[node] = name
    buffers: list[str] = []
    free: dict[str, list[int]] = {"real": [], "complex": [], "bool": []}
    where: dict[Node, int] = {}
    steps = []
    for i, n in enumerate(p.nodes):
        target: int | str = direct.get(n, -1)
        if n in bases:
            target = -1
        elif target == -1:
            if not free[n.dtype]:
                free[n.dtype].append(len(buffers))
                buffers.append(n.dtype)
            target = where[n] = free[n.dtype].pop()
        steps.append((CALLS.get(n.op) or HOST[n.op], n.args, n, target))
        for a in set(n.args):
            held = a in kept or any(bases.get(v) is a for v in bases)
            if a in where and last[a] == i and not held:
                free[a.dtype].append(where.pop(a))
    elements = {*p.nodes, *p.loads.values()}
    used = [a for n in p.nodes for a in n.args] + [*p.stores.values(), *(s.args[0] for s in p.sums)]
    small = dict.fromkeys(n for n in used if n not in elements and n.op != "const")
    copies = {name: node for name, node in p.stores.items() if direct.get(node) != name}
    return Program(tuple(steps), tuple(buffers), copies, tuple(small))


def _where(cond: Any, yes: Any, no: Any, out: Any) -> None:
    np.copyto(out, no)
    np.copyto(out, yes, where=cond)


def _abs2(x: Any, out: Any) -> None:
    np.multiply(x.real, x.real, out=out)
    out += x.imag * x.imag


def _over(a: Any, scale: Any, reciprocal: Any, out: Any) -> None:
    """A division; the scale is almost always one, and then is left out."""
    unit = scale == 1.0
    if not (unit if isinstance(unit, bool) else unit.all()):
        a = np.multiply(a, scale, out=out)
    np.multiply(a, reciprocal, out=out)


def _complex(re: Any, im: Any, out: Any) -> None:
    out.real, out.imag = re, im


def _copy(x: Any, out: Any) -> None:
    np.copyto(out, x)


CALLS: dict[str, Callable[..., Any]] = {
    "where": _where,
    "abs2": _abs2,
    "complex": _complex,
    "float": _copy,
    "over": _over,
    "real": lambda x, out: x.real,
    "imag": lambda x, out: x.imag,
    "conj": np.conjugate,
}
