"""What a rule makes of a trajectory's gradients, for many sets of hyper-parameters at once.

Each step starts from the parameters that the optimizer really had, so that one step's difference is not the next one's.
The rule's traced graph is evaluated in float64, with axes for sets, steps and tensors before those of the elements.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW
from arrayopt.codecs import QUANTIZED
from arrayopt.fusion.dims import RetraceError, TraceError, View
from arrayopt.fusion.graph import PRODUCT, UPDATES, Node, reachable
from arrayopt.fusion.layout import as_matrices
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.trace import Trace, trace
from arrayopt.rules.base import Rule
from arrayopt.state.quantized import dequantized, quantized
from arrayopt.testing.diagnosis.trajectory import Trajectory, Values

__all__ = ["Simulation", "rounded"]

AT_ONCE = 2**15  # so many elements are evaluated at once
_TRACES: dict[Any, Trace] = {}  # what rules were traced as
_GRAPHS: dict[Any, Trace] = {}  # one of those that are the same


def rounded(x: Values, dtype: str) -> Values:
    """Values rounded to float16, bfloat16 or float32, or as codes, in float64.

    Codes are of arrays of shape (sets, steps, tensors, ...): those of a tensor are in C order.
    """
    if dtype in QUANTIZED:
        return np.asarray(dequantized(*quantized(x, dtype, 3)), np.float64)
    with np.errstate(over="ignore"):
        made = OPS[dtype].numpy(x) if dtype == "bfloat16" else np.asarray(x).astype(dtype)
    return made.astype(np.float64)


class Simulation:
    """A rule on the gradients of a trajectory. Of the rule's numbers only matters which are None or zero.

    `state` is what slots are stored in, if not in what the rule says.
    """

    def __init__(self, rule: Rule, trajectory: Trajectory, state: str = "") -> None:
        self.trajectory = trajectory
        narrow = {x for x in trajectory.dtypes.values() if x in NARROW}
        dtype = narrow.pop() if len(narrow) == 1 else "float64"
        together: dict[Any, tuple[Trace, list[int]]] = {}  # where rows and columns do not matter, in one block
        for i, name in enumerate(trajectory.names):
            made = _traced(rule, trajectory.params[0][name].shape, dtype)
            together.setdefault((id(made), made.element == "C" or i), (made, []))[1].append(i)
        self.blocks = [_Block(rule, trajectory, made, index, dtype, state) for made, index in together.values()]

    def run(self, hypers: Mapping[str, Any]) -> Values:
        """The parameters after each step, of shape (sets, steps, elements), one tensor after the other.

        Numbers broadcast to (sets, steps, tensors). ``t`` is the number of updates, and gradients are multiplied by
        ``grad_factor``.
        """
        steps, sizes = self.trajectory.steps, [self.trajectory.params[0][name].size for name in self.trajectory.names]
        ends, sets = np.cumsum([0, *sizes]), max(len(x) for x in hypers.values())
        numbers = {k: np.broadcast_to(x, (len(x), steps, len(sizes))) for k, x in hypers.items()}
        found = np.empty((sets, steps, ends[-1]))
        with np.errstate(all="ignore"):
            for block in self.blocks:
                ones = (1,) * (block.p.ndim - 3)
                laid = {k: x[:, :, block.index].reshape(len(x), steps, -1, *ones) for k, x in numbers.items()}
                few = max(1, AT_ONCE // block.p.size)
                for i in range(0, sets, few):
                    new = block.run({k: x if len(x) == 1 else x[i : i + few] for k, x in laid.items()})
                    for k, tensor in enumerate(block.index):
                        own = new[:, :, k].reshape(len(new), steps, -1)
                        found[i : i + few, :, ends[tensor] : ends[tensor + 1]] = own[:, :, : sizes[tensor]]
        return found


class _Block:
    """Some tensors side by side, shorter ones filled up with zeros, and the graph that computes all of them.

    What needs no slots is computed for all steps at once, and so is what no new slot needs; the rest step by step.
    """

    def __init__(
        self, rule: Rule, trajectory: Trajectory, made: Trace, index: list[int], dtype: str, state: str
    ) -> None:
        self.index, self._given = index, dict[str, Values]()
        names = [trajectory.names[i] for i in index]
        starts = [trajectory.params[0][name] for name in names]
        sizes = [dict(zip("ABRC", as_matrices(x.shape, made.element), strict=True)) for x in starts]

        def lay(arrays: list[Any], axes: str = made.element) -> Values:
            """An array of each tensor, as the graph sees it: with ones for axes that it has not."""
            shapes = [tuple(size[a] if a in axes else 1 for a in made.element) for size in sizes]
            laid = np.zeros((len(arrays), *np.max(shapes, axis=0)))
            for row, x, shape in zip(laid, arrays, shapes, strict=True):
                if x is not None:
                    row[tuple(map(slice, shape))] = np.reshape(x, shape)
            return laid

        self.p = np.stack([lay([row[name] for name in names]) for row in trajectory.params[:-1]])[None]
        self._g = np.stack([lay([row[name] for name in names]) for row in trajectory.grads])[None]
        self._took = trajectory.took[:, index].reshape(-1, len(index), *(1,) * len(made.element))
        filled = len({x.size for x in starts}) > 1
        self._mask: Any = lay([np.ones(x.shape) for x in starts]).astype(bool)[None, None] if filled else True
        fresh = [rule.all_slots(np, x, dtype) for x in starts]
        for slot, axes in made.slots.items():
            self._given[slot] = lay([x[slot] for x in fresh], str(axes))[None, None]

        self._nodes = nodes = reachable(made.outputs.values())
        place = {n: k for k, n in enumerate(nodes)}
        slots = {n: made.outputs[n.data] for n in nodes if n.op == "input" and n.data in made.slots}
        late: set[Node] = set()  # all that slots go into
        for n in nodes:
            if n in slots or not late.isdisjoint(n.args):
                late.add(n)
            if n.op == "host" and n.data.startswith("count:"):
                counts = [float(prod(size[a] for a in n.data.removeprefix("count:"))) for size in sizes]
                self._given[n.data] = np.reshape(counts, (1, 1, -1, *(1,) * len(made.element)))
        needed = late & {*reachable(slots.values())}  # of these, what new slots are computed from
        Steps = list[tuple[int, Callable[..., Any], list[int]]]
        self._before, self._during, self._after = Steps(), Steps(), Steps()
        self._loaded = []
        for k, n in enumerate(nodes):
            if n.op in ("const", "host", "input"):
                self._loaded += [(k, n)] if n not in slots else []
            else:
                part = self._before if n not in late else self._during if n in needed else self._after
                part.append((k, self._operation(n, made.element), [place[a] for a in n.args]))
        self._out, self._slots = place[made.outputs["p"]], []
        for n, new in slots.items():
            stored = state or made.storage[n.data]
            self._slots.append((place[n], place[new], n.data, stored if stored in {*NARROW, *QUANTIZED} else ""))
        stepwise = {k for k, *_ in self._during} | {k for k, *_ in self._slots}
        read = {a for _, _, args in self._during for a in args} | {new for _, new, *_ in self._slots}
        self._read = sorted(read - stepwise)
        self._kept = sorted(stepwise & ({a for _, _, args in self._after for a in args} | {self._out}))

    def _operation(self, n: Node, element: str) -> Callable[..., Any]:
        """The function of a node."""
        if n.op == PRODUCT:
            first, second, *_ = n.data

            def product(x: Values, y: Values) -> Any:
                turned = [np.swapaxes(z, -1, -2) if turn else z for z, turn in ((x, first), (y, second))]
                return np.matmul(*turned)

            return product
        if n.op in REDUCTIONS:
            reduce, start = REDUCTIONS[n.op].ufunc.reduce, REDUCTIONS[n.op].initial
            axes = tuple(3 + i for i, a in enumerate(element) if a in n.args[0].axes and a not in n.axes)
            return lambda x: reduce(x, axis=axes, keepdims=True, where=self._mask, initial=start)
        return OPS[n.op].numpy

    def run(self, numbers: dict[str, Values]) -> Values:
        """The new parameters of all steps, from those before each."""
        given = {**self._given, **numbers, "p": self.p, "g": self._g * numbers.get("grad_factor", 1.0)}
        given[UPDATES] = given.pop("t")
        values: list[Any] = [None] * len(self._nodes)
        for k, n in self._loaded:
            values[k] = np.full((1,) * self.p.ndim, n.data) if n.op == "const" else given[n.data]
        for k, function, args in self._before:
            values[k] = function(*[values[a] for a in args])
        self._loop(values)
        for k, function, args in self._after:
            values[k] = function(*[values[a] for a in args])
        new = values[self._out]
        return new if self._took.all() else np.where(self._took, new, self.p)

    def _loop(self, values: list[Any]) -> None:
        """What new slots need, step after step."""
        at = list(values)
        for k, _, name, _ in self._slots:
            at[k] = self._given[name]
        rows: dict[int, list[Values]] = {k: [] for k in self._kept}
        moving = [k for k in self._read if values[k].shape[1] > 1]
        for s, took in enumerate(self._took):
            for k in moving:
                at[k] = values[k][:, s : s + 1]
            for k, function, args in self._during:
                at[k] = function(*[at[a] for a in args])
            for k, row in rows.items():
                row.append(at[k])
            fresh = [rounded(at[new], stored) if stored else at[new] for _, new, _, stored in self._slots]
            for (k, *_), new in zip(self._slots, fresh, strict=True):
                at[k] = new if took.all() else np.where(took, new, at[k])
        for k, row in rows.items():  # the slots before the first step are the same for all sets
            values[k] = np.concatenate(np.broadcast_arrays(*row) if row[0].shape != row[-1].shape else row, axis=1)


def _traced(rule: Rule, shape: tuple[int, ...], dtype: str) -> Trace:
    """A rule's graph for tensors of a shape, each traced once; flat where it sees no rows or columns."""
    views = [View(flat=True), View()]
    if rule.refuses(np, np.zeros(1)) and len(shape) > 1:  # one for matrices asks which way these lie
        tall, folded = (int(np.sign(rows - columns)) for rows, columns in (shape[-2:], (shape[0], prod(shape[1:]))))
        views = [View(tall=tall), View(tall=folded, folded=True)]
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
    """Whether values over r or c, which products bring, meet no values along one axis alone, and are not reduced."""
    for n in nodes:
        square = [bool(set("rc") & set(a.axes)) for a in n.args]
        single = any(a.axes and not x for a, x in zip(n.args, square, strict=True))
        if any(square) and n.op != PRODUCT and (single or n.op in REDUCTIONS):
            return False
    return True
