"""Compile a pass to a Python function of NumPy calls, which write into as few buffers as possible.
`stacks.py` calls `pass_function`, and then the function for each block.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from arrayopt.codecs import STORED
from arrayopt.fusion.graph import Node, Spare, operands, within
from arrayopt.fusion.ops import OPS
from arrayopt.fusion.passes import Pass

VIEWS = ("real", "imag")
"""Operations that return views of their operands."""


@dataclass(frozen=True, eq=False, slots=True)
class PassFunction:
    """A pass over a block, as a function."""

    run: Callable[..., dict[Node, Any]]
    """``run(block, buffers, real, reduce, *small)`` makes all calls and stores, and returns the
    result of `reduce` for each reduction. The caller sets `errstate`. `block` has stored arrays by
    name; `real` is the dtype of arithmetic.
    """
    small: tuple[Node, ...]
    """The arguments `small`: values over fewer axes, scalars of the step, and positions."""
    buffers: tuple[str, ...]
    """The type of each buffer: ``real``, ``complex`` or ``bool``."""


@lru_cache(maxsize=512)
def pass_function(pass_: Pass, storage: tuple[tuple[str, str], ...]) -> PassFunction:
    """Return the function of a pass.

    Parameters
    ----------
    pass_ : Pass
        The pass.
    storage : tuple of (str, str)
        Stored arrays, and their dtypes. Calls write directly to arrays whose dtype does not round.
    """
    pass_ = replace(pass_, stores=pass_.new)
    summed = {r: _factors(r, pass_) for r in pass_.reductions}
    extras = _extras(pass_, summed)
    spare = list(chain(*extras.values()))
    kept = {*chain(*summed.values()), *pass_.stores.values()}
    wanted = within(kept, pass_.nodes).difference(spare)
    order = [n for n in pass_.nodes if n in wanted] + spare
    last = dict[Node, int]()
    for number, node in enumerate(order):
        last |= dict.fromkeys(node.args, number)
    last |= dict.fromkeys(kept, len(order))
    direct = _in_place(pass_, dict(storage), order, last)
    targets, buffers = _targets(order, direct, last)
    copies = {name: node for name, node in pass_.stores.items() if direct.get(node) != name}
    taken = {*operands(order), *chain(*summed.values()), *copies.values(), *pass_.guards.values()}
    small = tuple(n for n in pass_.uses if n in taken)
    text = _Text(pass_, targets, small)
    text.calls(n for n in order if n not in spare)
    text.reductions(summed, extras)
    text.stores(copies)
    return PassFunction(text.compiled(dict(storage)), small, tuple(buffers))


def _viewed(order: Iterable[Node]) -> set[Node]:
    """Return the values that other values are views of."""
    return {n.args[0] for n in order if n.op in VIEWS}


def _in_place(
    pass_: Pass, storage: dict[str, str], order: list[Node], last: dict[Node, int]
) -> dict[Node, str]:
    """Return the values that calls write directly to stored arrays; `last`: last readers."""
    direct: dict[Node, str] = {}
    for name, node in pass_.stores.items():
        free = node in order and node not in direct and node.op not in VIEWS
        free = free and name not in pass_.guards
        old = pass_.loads.get(name)
        if STORED[storage[name]].rounds or not free or old in _viewed(order):
            continue
        at, still_read = order.index(node), -1 if old is None else last.get(old, -1)
        if still_read < at or (still_read == at and OPS[node.op].in_place):
            direct[node] = name
    return direct


def _targets(
    order: list[Node], direct: dict[Node, str], last: dict[Node, int]
) -> tuple[dict[Node, str], list[str]]:
    """Return where each call writes, and each buffer's type; it is free after the last reader."""
    buffers, targets, viewed = list[str](), dict[Node, str](), _viewed(order)
    free: dict[str, list[int]] = {"real": [], "complex": [], "bool": []}
    buffer_of: dict[Node, int] = {}
    for at, node in enumerate(order):
        dying = []
        for operand in dict.fromkeys(node.args):
            if operand in buffer_of and last[operand] == at and operand not in viewed:
                dying.append(operand)
        over = OPS[node.op].in_place
        for operand in dying if over else ():
            free[operand.kind].append(buffer_of.pop(operand))
        if node in direct:
            targets[node] = f"block[{direct[node]!r}]"
        elif node.op not in VIEWS:
            if not free[node.kind]:
                free[node.kind].append(len(buffers))
                buffers.append(node.kind)
            buffer_of[node] = free[node.kind].pop()
            targets[node] = f"buffers[{buffer_of[node]}]"
        for operand in () if over else dying:
            free[operand.kind].append(buffer_of.pop(operand))
    return targets, buffers


def _factors(r: Node, p: Pass) -> tuple[Node, ...]:
    """Return the operands of a reduction: two factors if it is a dot product of whole tensors."""
    (x,) = r.args
    dot = r.op == "sum" and not r.axes and x.op == "mul" and x in p.nodes
    for a in x.args:
        dot = dot and a.axes == p.axes and a.kind == "real" and not a.on_host
    return x.args if dot else (x,)


def _extras(pass_: Pass, summed: dict[Node, tuple[Node, ...]]) -> dict[Node, list[Node]]:
    """Return the spare sums that plain sums can make needless, and the values only they need."""
    plain, spare = _plain(pass_), list[Node]()
    for reduction, about in ((r, r.data) for r in pass_.reductions):
        if isinstance(about, Spare) and (about.plain, reduction.axes) in plain:
            spare.append(reduction)
    others = chain(*(factors for r, factors in summed.items() if r not in spare))
    needed = {r: within(summed[r], pass_.nodes) for r in spare}
    always = within([*pass_.stores.values(), *others], pass_.nodes)
    users = Counter(chain(always, *needed.values()))  # how many of these need each value
    alone = {}
    for reduction, some in needed.items():
        alone[reduction] = [n for n in pass_.nodes if n in some and users[n] == 1]
    return alone


def _plain(p: Pass) -> dict[tuple[int, str], Node]:
    """Return the plain sums by operand and axes."""
    summed = [r for r in p.reductions if r.op == "sum" and not isinstance(r.data, Spare)]
    return {(r.args[0].id, r.axes): r for r in summed}


class _Text:
    """The text of `PassFunction.run`."""

    def __init__(self, pass_: Pass, targets: dict[Node, str], small: Iterable[Node]) -> None:
        self.pass_, self.targets = pass_, targets
        self.loaded = {node: f"at{i}" for i, node in enumerate(pass_.loads.values())}
        given = ["block", "buffers", "real", "reduce", *map(self.name, small)]
        self.lines = [f"def run({', '.join(given)}):"]
        for name, node in pass_.loads.items():
            self.put(1, f"{self.name(node)} = load[{name!r}](block[{name!r}], real)")

    def put(self, depth: int, line: str) -> None:
        """Add a line."""
        self.lines.append("    " * depth + line)

    def name(self, n: Node) -> str:
        """Return the name of a value."""
        return f"({n.data!r})" if n.op == "const" else self.loaded.get(n, f"x{n.id}")

    def calls(self, nodes: Iterable[Node], depth: int = 1) -> None:
        """Print the calls that compute some values."""
        for node in nodes:
            given, result = ", ".join(map(self.name, node.args)), self.name(node)
            if node in self.targets:
                self.put(depth, f"{result} = {self.targets[node]}")
                self.put(depth, f"{node.op}_({given}, {result})")
            else:
                self.put(depth, f"{result} = {node.op}_({given}, None)")

    def reductions(
        self, summed: dict[Node, tuple[Node, ...]], extras: dict[Node, list[Node]]
    ) -> None:
        """Print the reductions; spare sums come last."""
        plain = _plain(self.pass_)
        for reduction in [*(x for x in summed if x not in extras), *extras]:
            made, depth, about = f"s{reduction.id}", 1, reduction.data
            if reduction in extras:
                beside = f"s{plain[about.plain, reduction.axes].id}"
                self.put(1, f"{made} = idle({beside}, {about.low!r}, {about.high!r})")
                self.put(1, f"if {made} is None:")
                depth = 2
                self.calls(extras[reduction], depth)
            factors = ", ".join(map(self.name, summed[reduction]))
            self.put(depth, f"{made} = reduce(r{reduction.id}, {factors})")

    def stores(self, copies: dict[str, Node]) -> None:
        """Print the stores that no call makes in place, and the return statement."""
        views = {n for n in self.pass_.nodes if n.op in VIEWS}
        new = [self.name(node) for node in copies.values()]
        for i, node in enumerate(copies.values() if len(copies) > 1 else ()):
            if node in self.loaded or node in views:  # another store may overwrite it
                self.put(1, f"new{i} = array({new[i]})")
                new[i] = f"new{i}"
        for name, value in zip(copies, new, strict=True):
            begin, guard = "", self.pass_.guards.get(name)
            if guard is not None:  # for several tensors, it is an array
                only, old = self.name(guard), self.name(self.pass_.loads[name])
                begin = f"if {only} is not False: "
                value = f"{value} if {only} is True else where({only}, {value}, {old})"
            self.put(1, f"{begin}store[{name!r}](block[{name!r}], {value})")
        made = ", ".join(f"r{r.id}: s{r.id}" for r in self.pass_.reductions)
        self.put(1, f"return {{{made}}}")

    def compiled(self, storage: dict[str, str]) -> Callable[..., dict[Node, Any]]:
        """Compile the text, and return the function."""
        names: dict[str, Any] = {"inf": np.inf, "nan": np.nan, "array": np.array, "idle": idle}
        names["where"] = np.where
        names["load"] = {name: STORED[dtype].load for name, dtype in storage.items()}
        names["store"] = {name: STORED[dtype].store for name, dtype in storage.items()}
        names |= {f"{name}_": op.into or op.numpy for name, op in OPS.items()}
        names |= {f"r{r.id}": r for r in self.pass_.reductions}
        exec(compile("\n".join(self.lines), "<pass>", "exec"), names)
        made: Callable[..., dict[Node, Any]] = names["run"]
        return made


def idle(plain: Any, low: float, high: float) -> Any:
    """Return zeros for a sum that is not needed, because `plain` is in [low, high]; else None."""
    least, most = (plain.min(), plain.max()) if np.ndim(plain) else (plain, plain)
    if low <= least and most <= high:
        return np.zeros_like(plain) if np.ndim(plain) else 0.0
    return None
