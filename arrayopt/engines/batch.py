"""The base class of batches: tensors of a bucket that have one plan. A `Fused` engine makes them;
in each step, `FusedStep` calls `prepare`, `allocate` and `launch` with the rows that take part.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, Grads, Ints, array_namespace, dtype_name, memory, size, to_host
from arrayopt.engines.base import Asked, Report, Stops
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.layers import Layers, of_layers, taking_part
from arrayopt.engines.step_scalars import StepScalars
from arrayopt.fusion.graph import Node
from arrayopt.fusion.layout import CHUNK, geometry, layout
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.segments import Segmented, segment_geometry
from arrayopt.state.quantized import dequantized, quantized, scale_of
from arrayopt.state.tensors import Tensor

DECODED = "state in 8 bits is decoded to a temporary copy"

KEPT_ROWS = 8
"""The number of different sets of rows that a batch remembers."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties that all tensors of a batch share."""

    plan: Plan
    segmented: Segmented | None
    """The plan in segments, if small matrices are laid side by side."""
    dtype: str
    grad_dtype: str
    """The dtypes of parameters and of gradients."""


@dataclass(slots=True, eq=False)
class Rows:
    """The tensors of a batch that take part in a step."""

    all: Ints
    """Their rows in the batch."""
    full: Ints
    """The rows of those that have elements."""
    kept: Any = None
    """Data that an engine keeps for steps over exactly these rows."""


class Prepared(NamedTuple):
    """A batch, prepared for a step over some rows."""

    batch: Any
    rows: Rows
    grads: Grads
    """The gradients of all its rows."""


class Batch(ABC):
    """Tensors of a bucket that have one plan.

    Attributes
    ----------
    geo : array of records
        The `geometry` of each tensor.
    filled : array of bool
        Whether each tensor has elements, on any rank.
    firsts : array of int64
        The position of each tensor's first element in the whole tensor, of which it may be a layer.
    step_scalars : StepScalars
        Computes the scalars of a step.
    scalars : array of float64
        The plan's scalars at this step, a row for each tensor.
    values : array of float64
        The values per tensor that the plan computes, a row for each tensor.
    stacks : dict of Tensor to array of int64
        If tensors are layers: for each stacked tensor, the rows of the batch that are its layers.
    layer : array of int64
        If tensors are layers: the number of each layer in its stacked tensor.
    widens : set of str
        Slots of codes that the plan sees as decoded numbers; see `arrayopt.fusion.plans.widened`.
    """

    vectors: Mapping[str, Sequence[Array]] = {}
    """Slots of each tensor that last from phase to phase; see `arrayopt.fusion.phases`."""
    layout_of = staticmethod(layout)
    chunk: ClassVar[int] = CHUNK
    segment_room: ClassVar[int] = 1 << 16

    def __init__(self, kind: Kind, bucket: Bucket, members: list[int]) -> None:
        self.plan, self.segmented, self.members = kind.plan, kind.segmented, members
        # weak, because the bucket refers to the batch: no cycles for the garbage collector
        self.bucket = weakref.proxy(bucket)
        self.tensors = [bucket.tensors[i] for i in members]
        shapes = [x.shape for x in self.tensors]
        if self.segmented is None:
            self.layout = self.layout_of(self.plan)
            self.geo = geometry(shapes, self.plan.element, self.chunk)
        else:
            self.layout = self.segmented.layout
            self.geo = segment_geometry(shapes, self.plan.element, self.segment_room)
        self.firsts: Ints = np.array([x.origin[1] for x in self.tensors], np.int64)
        self.stacks: dict[Tensor, Ints] = {}
        if isinstance(bucket, Layers):
            of, self.layer = np.array([bucket.stack_and_index[member] for member in members]).T
            for at in np.unique(of).tolist():
                self.stacks[bucket.stacks.tensors[at]] = np.flatnonzero(of == at)
        # whole tensors count, so that it is the same on all ranks
        self.filled = self.geo["SIZE"] > 0
        self.step_scalars = StepScalars(self.plan, bucket, members, self.geo)
        self.scalars = self.step_scalars.of_tensors
        self.values = np.zeros((len(members), self.layout.values))
        self.whole = self._made_rows(np.arange(len(members)))
        self._some: dict[bytes, Rows] = {}
        self._located = -1
        first, coded = self.tensors[0], set(self.plan.quantized)
        self.widens = {x for x in self.plan.slots if scale_of(x) in first.slots} - coded
        self._versioned = "p" in self.plan.written and array_api_compat.is_torch_array(first.array)

    def rows(self, grads: Grads, *, complete: bool) -> Rows:
        """Return the rows of tensors that have a gradient; with `complete`, all have one."""
        if complete:
            return self.whole
        there = taking_part(grads)
        key = there.tobytes()
        if key not in self._some:
            if len(self._some) >= KEPT_ROWS:
                self._some.pop(next(iter(self._some)))
            self._some[key] = self._made_rows(np.flatnonzero(there))
        return self._some[key]

    def _made_rows(self, rows: Ints) -> Rows:
        return Rows(rows, rows[self.filled[rows]])

    # ---- a step ----------------------------------------------------------------------------------

    def prepare(self, rows: Rows, grads: Grads, asked: Asked) -> None:
        """Prepare a step over some rows, and raise all errors; `grads` are those of all rows."""
        self.step_scalars.evaluate(asked)
        self.locate()

    def allocate(self, rows: Rows, threads: int) -> None:  # noqa: B027
        """Allocate all memory of a launch over these rows, so that it cannot fail later."""

    def enter(self, known: dict[str, Any], rows: Rows, asked: Asked, threads: int) -> None:
        """Begin a later phase; `known` has totals and other values, one for each tensor."""
        self.step_scalars.learn(known)
        self.step_scalars.evaluate(asked)
        self.allocate(rows, threads)

    def is_shared(self, rows: Rows) -> bool:
        """Whether a prepared launch over these rows depends on the number of threads."""
        return True

    @abstractmethod
    def launch(self, rows: Rows, grads: Grads, threads: int) -> None:
        """Run all passes over these rows, which are prepared."""

    def run_cut(self, rows: Rows, grads: Grads, threads: int) -> Stops:
        """Run this rank's units of tensors that ranks share; yield partial results to exchange.

        An engine with `cuts` must have this method.
        """
        raise NotImplementedError

    def steps(self, rows: Rows, grads: Grads, threads: int) -> Stops:
        """Call `run_cut` if ranks share the tensors, else `launch`."""
        if self.bucket.kind == "cut":
            yield from self.run_cut(rows, grads, threads)
        else:
            self.launch(rows, grads, threads)

    def held(self, rows: Rows) -> Rows:
        """Return those of the rows of which this rank has elements."""
        mine = []
        for i in rows.full.tolist():
            share = self.tensors[i].share
            if share.last > share.first:
                mine.append(i)
        return Rows(rows.all, np.array(mine, np.int64))

    # ---- arrays ----------------------------------------------------------------------------------

    def locate(self) -> None:
        """Call `bind` if parameters or slots may have moved since it was last called."""
        now = self.bucket.run.arrays
        if now != self._located:
            self.bind()
            self._located = now

    def follow(self) -> None:
        """Let go of arrays that were replaced."""
        self.locate()

    def written(self, rows: Rows) -> None:
        """Tell PyTorch that parameters were written: graphs may have saved the old values."""
        if self._versioned:
            xp = array_namespace(self.tensors[0].array)
            xp.autograd.graph.increment_version([self.tensors[i].array for i in rows.full.tolist()])

    def bind(self) -> None:  # noqa: B027
        """Store the addresses of parameters and slots."""

    def whole_stacks(self, name: str) -> Iterator[tuple[Any, Ints]]:
        """Yield stacked arrays whose layers can be used in place, with the rows of the layers."""
        if name in self.vectors or name in self.widens:
            return
        for tensor, rows in self.stacks.items():
            if tensor.kind == "whole" and size(tensor.array):
                x = memory(of_layers(name, tensor))
                if plain(x):
                    yield x, rows

    def apart(self, name: str) -> Sequence[int]:
        """Return the rows whose arrays are in none of `whole_stacks`."""
        left = set(range(len(self.tensors)))
        for _, rows in self.whole_stacks(name):
            left.difference_update(rows.tolist())
        return sorted(left)

    def stored(self, row: int, name: str) -> Array:
        """Return a tensor's parameter (``"p"``) or slot."""
        if name in self.vectors:
            return self.vectors[name][row]
        return self.tensors[row].array if name == "p" else self.tensors[row].slots[name]

    def wide(self, row: int, name: str) -> Any:
        """Decode a slot of codes to a NumPy array of the plan's dtype."""
        slots = self.tensors[row].slots
        codes, scale = memory(slots[name]), to_host(slots[scale_of(name)])
        return dequantized(codes, scale, np.dtype(self.plan.storage[name]))

    def put_wide(self, row: int, name: str, value: Any) -> None:
        """Encode numbers, and write them to a slot of codes."""
        codes = self.tensors[row].slots[name]
        made = quantized(value.reshape(codes.shape), dtype_name(codes))
        for slot, x in zip((name, scale_of(name)), made, strict=True):
            self.replace(row, slot, x)

    def replace(self, row: int, name: str, value: Array) -> None:
        """Write a parameter or slot, or replace the array if it cannot be written."""
        tensor, old = self.tensors[row], self.stored(row, name)
        if array_api_compat.is_torch_array(old) and isinstance(value, np.ndarray):
            here = memory(old)  # integers, if NumPy lacks the dtype
            here[...] = value if dtype_name(here) == dtype_name(old) else value.view(here.dtype)
        else:
            tensor.put(None if name == "p" else name, value)

    # ---- reports ---------------------------------------------------------------------------------

    def report(self, rows: Rows) -> dict[str, Report]:
        """Return the reports of the last step by tensor name."""
        columns = {name: self.values_of(node) for name, node in self.plan.reports.items()}
        return self.report_of(rows, columns)

    def report_of(self, rows: Any, columns: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the values in these columns by tensor name."""
        report, tensors, every = {}, self.tensors, rows.full.tolist()
        if len(columns) == 1:  # of each step that clips: this takes half of the time
            ((name, x),) = columns.items()
            return {tensors[row].name: {name: x[row]} for row in every}
        for row in every:
            report[tensors[row].name] = {name: x[row] for name, x in columns.items()}
        return report

    def values_of(self, node: Node) -> Any:
        """Return a value for each tensor."""
        if node in self.layout.tensor:
            return self.values[:, self.layout.tensor[node]].copy()
        if node.op == "const":
            return np.full(len(self.tensors), float(node.data))
        return self.scalars[:, self.plan.scalars.index(node)].copy()


def plain(x: Array) -> bool:
    """Whether a C-ordered array can be read and written in place."""
    return isinstance(x, np.ndarray) and bool(x.flags.carray)
