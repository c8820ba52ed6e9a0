"""A pass as a list of NumPy calls that write into a few numbered buffers."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """How a pass is run on a block: a list of values, in which each has its place, and calls on them.

    Attributes
    ----------
    steps : tuple of (callable, callable, int)
        What is called; what picks the arguments from the list of values, with where to write last; and where a result
        that is a view of an argument belongs, or -1.
    blank : tuple
        The list with nothing but constants in it.
    loads : tuple of (str, int)
        Stored arrays that are read.
    small : dict of Node to int
        Values over fewer axes, and scalars of the step, that are read.
    made : tuple of (int, int or str)
        In what results are written: a buffer by number, or a stored array by name.
    wanted : dict of Node to int
        What is summed or copied afterwards.
    buffers : tuple of str
        What each buffer holds: ``real``, ``complex`` or ``bool``.
    copies : dict of str to Node
        Stores that no step writes in place.
    """

    steps: tuple[tuple[Callable[..., Any], Callable[[list[Any]], tuple[Any, ...]], int], ...]
    blank: tuple[Any, ...]
    loads: tuple[tuple[str, int], ...]
    small: dict[Node, int]
    made: tuple[tuple[int, int | str], ...]
    wanted: dict[Node, int]
    buffers: tuple[str, ...]
    copies: dict[str, Node]

    def run(
        self, block: Mapping[str, Any], known: Mapping[Node, Any], buffers: Sequence[Any], real: Any
    ) -> dict[Node, Any]:
        """Make all calls, under an `errstate` of the caller's; what is wanted afterwards."""
        values = list(self.blank)
        for n, i in self.small.items():
            values[i] = known[n]
        for name, i in self.loads:
            x = block[name]
            values[i] = x.astype(np.result_type(real, np.complex64) if x.dtype.kind == "c" else real, copy=False)
        for i, target in self.made:
            values[i] = block[target] if isinstance(target, str) else buffers[target]
        for call, pick, view in self.steps:
            made = call(*pick(values))
            if view >= 0:
                values[view] = made
        return {n: values[i] for n, i in self.wanted.items()}


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
    elements = {*p.nodes, *p.loads.values()}
    used = [*(a for n in p.nodes for a in n.args), *kept]
    small = dict.fromkeys(n for n in used if n not in elements and n.op != "const")
    copies = {name: node for name, node in p.stores.items() if direct.get(node) != name}
    return _placed(p, targets, small, copies, tuple(buffers))


def _placed(
    p: Pass, targets: dict[Node, int | str], small: Iterable[Node], copies: dict[str, Node], buffers: tuple[str, ...]
) -> Program:
    """A program, with a place in one list for each value that it is about."""
    wanted = dict.fromkeys([*(s.args[0] for s in p.sums), *copies.values()])
    args = [a for n in targets for a in n.args]
    at = {n: i for i, n in enumerate(dict.fromkeys([*p.loads.values(), *args, *targets, *wanted]))}
    return Program(
        steps=tuple(
            (
                CALLS.get(n.op) or HOST[n.op],
                operator.itemgetter(*(at[a] for a in n.args), at[n]),
                at[n] if targets[n] == -1 else -1,
            )
            for n in targets
        ),
        blank=tuple(n.data if n.op == "const" else None for n in at),
        loads=tuple((name, at[n]) for name, n in p.loads.items()),
        small={n: at[n] for n in small},
        made=tuple((at[n], target) for n, target in targets.items() if target != -1),
        wanted={n: at[n] for n in wanted},
        buffers=buffers,
        copies=copies,
    )


def _where(cond: Any, yes: Any, no: Any, out: Any) -> None:
    np.copyto(out, no)
    np.copyto(out, yes, where=cond)


def _abs2(x: Any, out: Any) -> None:
    np.multiply(x.real, x.real, out=out)
    out += x.imag * x.imag


def _over(a: Any, scale: Any, reciprocal: Any, out: Any) -> None:
    """A division; the scale is almost always one, and then is left out."""
    unit = scale == 1.0
    if not (unit if isinstance(unit, bool | np.bool_) else unit.all()):
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
    # NumPy wants their third argument by name
    "minimum": lambda a, b, out: np.minimum(a, b, out=out),
    "maximum": lambda a, b, out: np.maximum(a, b, out=out),
}
