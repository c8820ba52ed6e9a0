"""Simulate a rule on the gradients of a trajectory, for many sets of hyper-parameters at once.

Each step starts from the parameters that the optimizer had, so that differences do not add up from step to step. The
rule's traced graph is evaluated in float64, with axes for sets, steps and tensors before those of the elements.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW
from arrayopt.codecs import QUANTIZED
from arrayopt.fusion.dims import Aspect, RetraceError, TraceError
from arrayopt.fusion.graph import PRODUCT, UPDATES, Node, reachable
from arrayopt.fusion.layout import as_matrices
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.trace import Trace, trace
from arrayopt.rules.base import Rule
from arrayopt.state.quantized import dequantized, quantized
from arrayopt.testing.diagnosis.trajectory import Observed, Values

AT_ONCE = 2**15  # how many elements are evaluated at once
Steps = list[tuple[Node, Callable[..., Any]]]
"""Nodes, each with the function that computes it."""
_TRACES: dict[Any, Trace] = {}  # traces by rule, rank, dtype and view
_GRAPHS: dict[Any, Trace] = {}  # one trace for each distinct graph


def rounded(x: Values, dtype: str) -> Values:
    """Round values to float16, bfloat16, float32 or the numbers of 8-bit codes. The result is float64.

    For codes, values have the shape (sets, steps, tensors, ...); blocks of codes are in C order within a tensor.
    """
    if dtype in QUANTIZED:
        return np.asarray(dequantized(*quantized(x, dtype, 3)), np.float64)
    with np.errstate(over="ignore"):
        made = OPS[dtype].numpy(x) if dtype == "bfloat16" else np.asarray(x).astype(dtype)
    return made.astype(np.float64)


class Simulation:
    """The simulation of a rule. Of the rule's own numbers, it uses only which of them are off.

    `state` is the dtype of the slots; empty for that of the rule.
    """

    def __init__(self, rule: Rule, seen: Observed, state: str = "") -> None:
        self.seen = seen
        narrow = {x for x in seen.dtypes.values() if x in NARROW}
        dtype = narrow.pop() if len(narrow) == 1 else "float64"
        together: dict[Any, tuple[Trace, list[int]]] = {}  # tensors without rows and columns share a block
        for i, shape in enumerate(seen.shapes):
            made = _traced(rule, shape, dtype)
            together.setdefault((id(made), made.element == "C" or i), (made, []))[1].append(i)
        self.blocks = [_Block(rule, seen, made, index, dtype, state) for made, index in together.values()]

    def run(self, hypers: Mapping[str, Any]) -> Values:
        """Return the parameters after each step, of shape (sets, steps, elements).

        `hypers` are arrays that broadcast to (sets, steps, tensors). They include ``t``, the number of updates, and
        optionally ``grad_factor``, a factor of the gradients.
        """
        sets = max(len(x) for x in hypers.values())
        found = np.empty((sets, *self.seen.after.shape))
        with np.errstate(all="ignore"):
            for block in self.blocks:
                ones = (1,) * (block.p.ndim - 3)
                own = {k: x if x.shape[2] == 1 else x[:, :, block.index] for k, x in hypers.items()}
                laid = {k: x.reshape(*x.shape, *ones) for k, x in own.items()}
                few = max(1, AT_ONCE // block.p.size)
                for i in range(0, sets, few):
                    new = block.run({k: x if len(x) == 1 else x[i : i + few] for k, x in laid.items()})
                    whole = np.broadcast_to(new, (*new.shape[:2], *block.filled.shape))
                    found[i : i + few, :, block.place[block.filled]] = whole[:, :, block.filled]
        return found


class _Block:
    """Tensors with one graph, side by side and padded with zeros.

    Nodes that do not read slots (`_before`) are computed for all steps at once. Nodes that new slots need (`_during`)
    are computed step by step, and the rest (`_after`) again for all steps at once.
    """

    def __init__(self, rule: Rule, seen: Observed, made: Trace, index: list[int], dtype: str, state: str) -> None:
        self.index, self._given = index, dict[str, Values]()
        sizes = [dict(zip("ABRC", as_matrices(seen.shapes[i], made.element), strict=True)) for i in index]

        def lay(arrays: list[Any], axes: str = made.element, other: float = 0.0) -> Values:
            """Stack an array for each tensor, padded with `other`. Graph axes that are not in `axes` have length 1."""
            shapes = [tuple(size[a] if a in axes else 1 for a in made.element) for size in sizes]
            laid = np.full((len(arrays), *np.max(shapes, axis=0)), other)
            for row, x, shape in zip(laid, arrays, shapes, strict=True):
                row[tuple(map(slice, shape))] = np.reshape(x, shape)
            return laid

        parts, last = [seen.parts[seen.names[i]] for i in index], len(seen.tensor)
        self.place = lay([np.arange(part.start, part.stop) for part in parts], other=last).astype(int)
        self.filled = self.place < last  # `place` is the index of each element, and `last` for padding
        self.p, self._g = (np.pad(x, ((0, 0), (0, 1)))[None, :, self.place] for x in (seen.before, seen.grads))
        ones = (1,) * len(made.element)
        self._has_grad = seen.has_grad[:, index].reshape(-1, len(index), *ones)
        starts = [seen.before[0, part].reshape(seen.shapes[i]) for i, part in zip(index, parts, strict=True)]
        fresh = [rule.all_slots(np, x, dtype) for x in starts]
        for slot, axes in made.slots.items():
            self._given[slot] = lay([x[slot] for x in fresh], str(axes))[None, None]

        nodes, self._out = reachable(made.outputs.values()), made.outputs["p"]
        slots = {n: made.outputs[n.data] for n in nodes if n.op == "input" and n.data in made.slots}
        needed, late = {*reachable(slots.values())}, {*slots}  # nodes that new slots need, and that need old slots
        self._loaded, self._before, self._during, self._after = [], Steps(), Steps(), Steps()
        for n in nodes:
            if n.op == "host" and n.data.startswith("count:"):
                counts = [float(prod(size[a] for a in n.data.removeprefix("count:"))) for size in sizes]
                self._given[n.data] = np.reshape(counts, (1, 1, -1, *ones))
            if n.op in ("const", "host", "input"):
                self._loaded.append(n)
            elif late.isdisjoint(n.args):
                self._before.append((n, self._operation(n, made.element)))
            else:
                late.add(n)
                (self._during if n in needed else self._after).append((n, self._operation(n, made.element)))
        self._slots = []
        for n, new in slots.items():
            stored = state or made.storage[n.data]
            self._slots.append((n, new, stored if stored in {*NARROW, *QUANTIZED} else ""))
        stepwise = {*slots, *(n for n, _ in self._during)}
        self._read = _arguments(self._during, *slots.values()) - stepwise
        self._kept = _arguments(self._after, self._out) & stepwise

    def _operation(self, n: Node, element: str) -> Callable[..., Any]:
        """The function that computes a node."""
        if n.op == PRODUCT:
            first, second, *_ = n.data

            def product(x: Values, y: Values) -> Any:
                turned = [np.swapaxes(z, -1, -2) if turn else z for z, turn in ((x, first), (y, second))]
                return np.matmul(*turned)

            return product
        if n.op in REDUCTIONS:
            reduce, start = REDUCTIONS[n.op].ufunc.reduce, REDUCTIONS[n.op].initial
            axes = tuple(3 + i for i, a in enumerate(element) if a in n.args[0].axes and a not in n.axes)
            mask: Any = True if self.filled.all() else self.filled[None, None]
            return lambda x: reduce(x, axis=axes, keepdims=True, where=mask, initial=start)
        return OPS[n.op].numpy

    def run(self, numbers: dict[str, Values]) -> Values:
        """Return the parameters after each step, computed from those before it."""
        given = {**self._given, **numbers, "p": self.p, "g": self._g * numbers.get("grad_factor", 1.0)}
        given[UPDATES] = given.pop("t")
        values: dict[Node, Any] = {}
        for n in self._loaded:
            values[n] = np.full((1,) * self.p.ndim, n.data) if n.op == "const" else given[n.data]
        _evaluate(self._before, values)
        self._loop(values)
        _evaluate(self._after, values)
        new = values[self._out]
        return new if self._has_grad.all() else np.where(self._has_grad, new, self.p)

    def _loop(self, values: dict[Node, Any]) -> None:
        """Compute the nodes that new slots need, step by step."""
        at, rows = dict(values), {n: list[Values]() for n in self._kept}
        moving = [n for n in self._read if values[n].shape[1] > 1]
        for s, has_grad in enumerate(self._has_grad):
            for n in moving:
                at[n] = values[n][:, s : s + 1]
            _evaluate(self._during, at)
            for n, row in rows.items():
                row.append(at[n])
            fresh = [rounded(at[new], stored) if stored else at[new] for _, new, stored in self._slots]
            every = has_grad.all()
            for (n, *_), new in zip(self._slots, fresh, strict=True):
                at[n] = new if every else np.where(has_grad, new, at[n])
        for n, row in rows.items():  # in the first step, slots have no axis of sets: they are the same for all
            values[n] = np.concatenate(np.broadcast_arrays(*row) if row[0].shape != row[-1].shape else row, axis=1)


def _evaluate(steps: Steps, values: dict[Node, Any]) -> None:
    """Compute nodes in order, and store their values."""
    for n, function in steps:
        values[n] = function(*[values[a] for a in n.args])


def _arguments(steps: Steps, *others: Node) -> set[Node]:
    """The arguments of nodes, and `others`."""
    return {*others, *(a for n, _ in steps for a in n.args)}


def _traced(rule: Rule, shape: tuple[int, ...], dtype: str) -> Trace:
    """Return the trace of a rule for tensors of a shape, from a cache. It is flat if rows and columns do not matter."""
    views = [Aspect(flat=True), Aspect()]
    if rule.refuses(np, np.zeros(1)) and len(shape) > 1:  # rules for matrices depend on whether these are tall or wide
        tall, folded = (int(np.sign(rows - columns)) for rows, columns in (shape[-2:], (shape[0], prod(shape[1:]))))
        views = [Aspect(tall=tall), Aspect(tall=folded, folded=True)]
    rank = max(len(shape), 1)
    key = (rule.structure, rank, dtype, repr(views))
    for view in views if key not in _TRACES else ():
        try:
            made = trace(rule, rank, dtype, view, lean=True)
        except (RetraceError, TraceError):
            continue
        nodes = reachable(made.outputs.values())
        place = {n: k for k, n in enumerate(nodes)}
        graph = tuple((n.op, *[place[a] for a in n.args], n.axes, repr(n.data)) for n in nodes)
        if _is_simple(nodes):
            _TRACES[key] = _GRAPHS.setdefault((graph, made.element, repr(made.storage)), made)
        break
    if key not in _TRACES:
        raise TraceError(f"{type(rule).__name__} cannot be simulated on tensors of shape {shape}")
    return _TRACES[key]


def _is_simple(nodes: list[Node]) -> bool:
    """Whether values with axes r or c, which come from products, are neither reduced nor meet values without them."""
    for n in nodes:
        square = [bool(set("rc") & set(a.axes)) for a in n.args]
        single = any(a.axes and not x for a, x in zip(n.args, square, strict=True))
        if any(square) and n.op != PRODUCT and (single or n.op in REDUCTIONS):
            return False
    return True
