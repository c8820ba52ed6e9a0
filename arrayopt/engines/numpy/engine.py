"""The NumPy engine. Its batch divides tensors into chunks, which threads run: a chunk's passes are
functions of NumPy calls (`making.py`) on blocks that fit in cache (`stacks.py`).
"""

import threading
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise, repeat
from operator import setitem
from typing import Any

import numpy as np

from arrayopt.arrays import Grads, real_dtype
from arrayopt.engines.batch import Batch, Kind, Rows, plain
from arrayopt.engines.blas import one_thread
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.fused import Fused
from arrayopt.engines.layers import Split, of_layers
from arrayopt.engines.numpy.blocks import joined
from arrayopt.engines.numpy.stacks import GROUP_SIZE, Grouped, Ragged, Stack
from arrayopt.engines.numpy.values import Setup, Values
from arrayopt.engines.threads import run, thread_count
from arrayopt.foreign import counted
from arrayopt.fusion.graph import Node
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.plans import plan_for, widened
from arrayopt.fusion.segments import in_segments
from arrayopt.rules.base import Rule
from arrayopt.state.tensors import Tensor

MANY_LAYERS = 8
"""If a stacked tensor has fewer layers, they are processed like other tensors."""

PACKED = 16384
"""The number of elements up to which equal tensors are packed with those of other sizes."""

TOGETHER = 32768
"""The number of elements of small tensors that are processed at once."""

LEAST_SHARED = 1 << 20
"""The number of elements above which all threads may share a chunk; else one thread runs it."""


@dataclass(eq=False, slots=True)
class Chunk:
    """Tensors that are processed at once."""

    rows: list[int]
    """Their rows in the batch."""
    size: int
    """The number of their elements."""
    ragged: bool = False
    """Whether they have different sizes."""
    layers: tuple[Tensor, Any] | None = None
    """If they are layers of one stacked tensor: that, and an index of the layers; else None."""
    runner: Stack | None = None
    """Runs their passes; created in the first step."""
    views: dict[str, Any] = field(default_factory=dict)
    """The parameters and slots that can be used in place, in the runner's shapes."""


class _Blocks(Batch):
    """A batch that runs tensors of equal shape together, block by block."""

    # threads pass the interpreter lock to each other after each call: calls must be long
    chunk = 1 << 18

    def __init__(self, kind: Kind, bucket: Bucket, members: list[int]) -> None:
        super().__init__(kind, bucket, members)
        plan, dtype = kind.plan, kind.dtype
        self.real = np.dtype(real_dtype(dtype))
        storage = tuple(({"g": kind.grad_dtype} | plan.storage).items())
        self.setup = Setup(plan, storage, self.real, self.chunk, threading.local())
        self.flat = set(plan.slots.values()) <= {"C"} and plan.element == "C"
        self.axes = {name: plan.slots.get(name, plan.element) for name in plan.touched}
        # by row, its stacked tensor if that has many layers
        self.stacked_of: dict[int, Tensor] = {}
        self.place_of: dict[Tensor, int] = {}  # the places of stacked tensors in the batch
        for place, (tensor, rows) in enumerate(self.stacks.items()):
            if len(rows) >= MANY_LAYERS:
                self.stacked_of |= dict.fromkeys(rows.tolist(), tensor)
            self.place_of[tensor] = place
        self.reported = [n for n in plan.reports.values() if n in self.layout.tensor]

    def bind(self) -> None:
        self.not_in_place: set[int] = set()
        self._flat_arrays: dict[str, list[Any]] = {}
        for some in (self.whole, *self._some.values()):
            some.kept = None
        for name in self.plan.touched:
            for row in self.apart(name):
                if not plain(self.stored(row, name)):
                    self.not_in_place.add(row)

    def flat_arrays(self, name: str) -> list[Any]:
        """Return the parameters or slots of all rows, as flat views if usable in place."""
        if name not in self._flat_arrays:
            each = [self.stored(row, name) for row in range(len(self.tensors))]
            self._flat_arrays[name] = [x.reshape(-1) if plain(x) else x for x in each]
        return self._flat_arrays[name]

    def launch(self, rows: Rows, grads: Grads, threads: int) -> None:
        if rows.kept is None or rows.kept[0] != self._located:
            rows.kept = self._located, self._chunks(rows.full.tolist())
        chunks: list[Chunk] = rows.kept[1]
        large = max(LEAST_SHARED, sum(x.size for x in chunks) // (4 * threads))
        if self.plan.multiplies:
            large = self.chunk
        with one_thread() if self.plan.multiplies else nullcontext():
            tasks = []
            for chunk in chunks:
                if chunk.size > large and threads > 1:
                    self._run(chunk, grads, threads)
                else:
                    tasks.append(partial(self._run, chunk, grads, 1))
            run(tasks, threads)

    def _chunks(self, rows: list[int]) -> list[Chunk]:
        """Divide rows into chunks for the cache: of equal shape, or size if only that matters."""
        found: dict[Any, list[int]] = {}
        for row in rows:
            shape = int(self.geo["SIZE"][row]) if self.flat else self.tensors[row].shape
            found.setdefault((shape, self.stacked_of.get(row)), []).append(row)
        made, small = list[Chunk](), list[list[int]]()
        for (_, stack), members in found.items():
            size = int(self.geo["SIZE"][members[0]])
            alone = self.flat and size > TOGETHER and stack is None  # copies would take longer
            most = 1 if alone else max(1, self.chunk // size)
            for i in range(0, len(members), most):
                some = members[i : i + most]
                if self.flat and len(some) * size <= PACKED and stack is None:
                    small.append(some)
                else:
                    made.append(Chunk(some, len(some) * size, layers=self._layers(some)))
        return sorted(made + self._packed(small), key=lambda x: -x.size)

    def _packed(self, small: list[list[int]]) -> list[Chunk]:
        """Pack small groups of equal tensors into chunks of several sizes."""
        made, group, total = list[Chunk](), list[list[int]](), 0
        for some in [*small, []]:
            size = len(some) * int(self.geo["SIZE"][some[0]]) if some else TOGETHER
            if group and total + size > TOGETHER:
                made.append(Chunk(list(chain.from_iterable(group)), total, len(group) > 1))
                group, total = [], 0
            group, total = [*group, some], total + size
        return made

    def _layers(self, rows: list[int]) -> tuple[Tensor, Any] | None:
        """Return the stacked tensor and an index of these layers, if it can be indexed at once."""
        stack = self.stacked_of.get(rows[0])
        if stack is None or self.vectors or self.not_in_place.intersection(rows):
            return None
        if not all(plain(of_layers(name, stack)) for name in self.axes):
            return None
        layers = self.layer[rows]
        if layers[-1] - layers[0] + 1 == len(layers):
            return stack, slice(int(layers[0]), int(layers[-1]) + 1)
        return stack, layers

    def _gradient(self, chunk: Chunk, grads: Grads) -> Any:
        """Return the gradients of a chunk as one array."""
        if chunk.layers is not None and isinstance(grads, Split):
            stack, layers = chunk.layers
            return np.ascontiguousarray(np.asarray(grads.wholes[self.place_of[stack]])[layers])
        given = [np.asarray(grads[row]) for row in chunk.rows]
        return np.ascontiguousarray(given[0]) if len(given) == 1 else joined("g", given)

    def _run(self, chunk: Chunk, grads: Grads, threads: int) -> None:
        """Run all passes over a chunk."""
        rows, stack = chunk.rows, chunk.runner or self._begin(chunk)
        stack.threads = threads
        gradient = self._gradient(chunk, grads)
        arrays = {"g": gradient.reshape(stack.shape(self.plan.element)), **chunk.views}
        if "p" in arrays and np.may_share_memory(arrays["g"], arrays["p"]):
            # a gradient may share memory with the parameter, which may be written before it is read
            arrays["g"] = arrays["g"].copy()
        copied = self.axes.keys() - chunk.views if len(chunk.views) < len(self.axes) else set()
        for name in copied:
            arrays[name] = self._copied(name, chunk).reshape(stack.shape(self.axes[name]))
        known = self._known(rows, stack)
        stack.run(Values(arrays, known))
        for node in self.reported:
            self.values[rows, self.layout.tensor[node]] = np.ravel(known[node])
        for name in copied.intersection(self.plan.written) if copied else ():
            self._put(name, chunk, arrays[name].reshape(-1))

    def _copied(self, name: str, chunk: Chunk) -> Any:
        """Copy a parameter or slot of all tensors of a chunk to one array."""
        if name in self.widens:
            return joined(name, [self.wide(row, name).reshape(-1) for row in chunk.rows])
        if chunk.layers is not None:
            return of_layers(name, chunk.layers[0])[chunk.layers[1]]
        return joined(name, [self.flat_arrays(name)[row] for row in chunk.rows])

    def _known(self, rows: list[int], stack: Stack) -> dict[Node, Any]:
        """Return the scalars of the step: numbers if equal for all tensors, else arrays."""
        some, known, nodes = self.scalars[rows], dict[Node, Any](), self.plan.scalars
        if len(some) == 1 or (some == some[0]).all():
            for node, number in zip(nodes, some[0].tolist(), strict=True):
                known[node] = bool(number) if node.kind == "bool" else number
            return known
        for node, column in zip(nodes, some.T, strict=True):
            column = column.astype(bool) if node.kind == "bool" else column
            same = (column == column[0]).all()
            known[node] = column[0].item() if same else column.reshape(stack.each)
        return known

    def _begin(self, chunk: Chunk) -> Stack:
        """Create the runner of a chunk, and its views."""
        rows, firsts = chunk.rows, self.firsts[chunk.rows]
        if chunk.ragged:
            chunk.runner = Ragged(self.setup, self.geo["SIZE"][rows], firsts)
            return chunk.runner
        geo = self.geo[rows[0]]
        large = geo["SIZE"] > GROUP_SIZE
        kind = Grouped if large and in_segments(self.plan) is not None else Stack
        chunk.runner = kind(self.setup, (len(rows), *(int(geo[x]) for x in "ABRC")), firsts)
        for name, axes in self.axes.items() if not self.widens else ():
            if chunk.layers is not None and isinstance(chunk.layers[1], slice):
                found = of_layers(name, chunk.layers[0])[chunk.layers[1]]
            elif len(rows) == 1 and rows[0] not in self.not_in_place:
                found = self.flat_arrays(name)[rows[0]]
            else:
                break
            shape = chunk.runner.shape(axes) if axes or len(rows) > 1 else ()  # quicker to write
            chunk.views[name] = found.reshape(shape)
        return chunk.runner

    def _put(self, name: str, chunk: Chunk, new: Any) -> None:
        """Write what was computed in a copy back to the tensors."""
        if chunk.layers is not None and name not in self.widens:
            stacked, layers = of_layers(name, chunk.layers[0]), chunk.layers[1]
            stacked[layers] = new.reshape(len(chunk.rows), *stacked.shape[1:])
            return
        rows = chunk.rows
        flat = [self.flat_arrays(name)[row] for row in rows]
        sizes = [x.size for x in flat]
        if len(set(sizes)) == 1:
            pieces: Any = new.reshape(len(sizes), -1)
        else:
            ends = np.cumsum([0, *sizes]).tolist()
            pieces = [new[first:end] for first, end in pairwise(ends)]
        if name not in self.widens and self.not_in_place.isdisjoint(rows):
            deque(map(setitem, flat, repeat(...), pieces), maxlen=0)  # a loop that Python's is not
            return
        for row, old, piece in zip(rows, flat, pieces, strict=True):
            if name in self.widens:
                self.put_wide(row, name, piece)
            elif plain(old):
                old[...] = piece
            else:
                self.replace(row, name, piece.reshape(old.shape).copy())


class NumPy(Fused):
    """NumPy calls on blocks that fit in cache; results do not depend on the number of threads."""

    name = "numpy"
    batch = _Blocks
    products = True
    side_by_side = False

    def plan(self, rule: Rule, rank: int, dtype: str, **options: Any) -> Plan:
        plan = plan_for(rule, rank, dtype, lean=self.lean, **options)
        if in_segments(plan) is None:  # in segments, no value is stored for all elements
            plan = plan_for(rule, rank, dtype, lean=self.lean, calls=True, **options)
        return widened(plan)

    def describe(self) -> str:
        return f"NumPy on blocks that stay in cache, {counted(thread_count(), 'thread')}"
