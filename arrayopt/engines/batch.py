"""Tensors of a bucket with one plan: their scalars, which take part, and their memory."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, Grads, Ints, array_namespace, dtype_name, memory, size, to_host
from arrayopt.engines.base import Asked, Report, Stops
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.layers import Layers, layers_with, of_layers
from arrayopt.engines.step_scalars import StepScalars
from arrayopt.fusion.graph import Node
from arrayopt.fusion.lanes import Lanes, lane_geometry
from arrayopt.fusion.layout import CHUNK, geometry, layout
from arrayopt.fusion.plan import Plan
from arrayopt.state.quantized import dequantized, quantized, scale_of
from arrayopt.state.tensors import Tensor

DECODED = "state in 8 bits is decoded to a temporary copy"

KEPT_ROWS = 8
"""So many sets of tensors that took part in a step are remembered."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What is the same for all tensors of a batch."""

    plan: Plan
    lanes: Lanes | None
    """The plan in segments, where small matrices are taken side by side."""
    dtype: str
    grad_dtype: str
    """The dtypes of parameters and of gradients."""


@dataclass(slots=True, eq=False)
class Rows:
    """Which tensors of a batch take part in a step."""

    all: Ints
    """Their rows in the batch."""
    full: Ints
    """Those of them that have elements."""
    kept: Any = None
    """What an engine keeps for a step over just these rows."""


Prepared = list[tuple[Any, Rows, Grads]]
"""Batches that are ready for a step, each with the rows and the gradients that it is to take."""


class Batch(ABC):
    """Tensors of one plan, from one bucket.

    Attributes
    ----------
    geo : array of records
        The `geometry` of each tensor.
    filled : array of bool
        Whether the whole tensor has elements.
    firsts : array of int64
        The position in the whole of each tensor's first element, where it is a layer of a tensor.
    step_scalars : StepScalars
        What computes the scalars of a step.
    scalars : array of float64
        For each tensor the plan's scalars of the step.
    values : array of float64
        For each tensor the values per tensor that the plan computes.
    stacks : dict of Tensor to array of int64
        Where tensors are layers: of each stacked tensor, which rows of the batch are layers of it.
    layer : array of int64
        Where tensors are layers: which layer each is.
    widens : set of str
        Slots of codes that the plan takes as numbers: see `arrayopt.fusion.plans.widened`.
    """

    vectors: Mapping[str, Sequence[Array]] = {}
    """Slots that last from phase to phase of a step, for each tensor; see `arrayopt.fusion.phases`.
    """
    on_device: ClassVar[bool] = False
    chunk: ClassVar[int] = CHUNK
    lane_room: ClassVar[int] = 1 << 16

    def __init__(self, kind: Kind, bucket: Bucket, members: list[int]) -> None:
        self.plan, self.lanes, self.members = kind.plan, kind.lanes, members
        # which keeps this: a circle would wait for the garbage collector
        self.bucket = weakref.proxy(bucket)
        self.tensors = [bucket.tensors[i] for i in members]
        shapes = [x.shape for x in self.tensors]
        if self.lanes is None:
            self.layout = layout(self.plan, device=self.on_device)
            self.geo = geometry(shapes, self.plan.element, self.chunk)
        else:
            self.layout = self.lanes.layout
            self.geo = lane_geometry(shapes, self.plan.element, self.lane_room)
        self.firsts: Ints = np.array([x.origin[1] for x in self.tensors], np.int64)
        self.stacks: dict[Tensor, Ints] = {}
        if isinstance(bucket, Layers):
            of, self.layer = np.array([bucket.lying[member] for member in members]).T
            for at in np.unique(of).tolist():
                self.stacks[bucket.stacks.tensors[at]] = np.flatnonzero(of == at)
        # of whole tensors: the same on all ranks
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
        """The tensors that have a gradient."""
        if complete:
            return self.whole
        some = layers_with(grads)
        key = some.tobytes()
        if key not in self._some:
            if len(self._some) >= KEPT_ROWS:
                self._some.pop(next(iter(self._some)))
            self._some[key] = self._made_rows(some)
        return self._some[key]

    def _made_rows(self, rows: Ints) -> Rows:
        return Rows(rows, rows[self.filled[rows]])

    # ---- a step ----------------------------------------------------------------------------------

    def prepare(self, rows: Rows, grads: Grads, asked: Asked) -> None:
        """Make a step over some tensors ready, and raise all errors; `grads` are the batch's."""
        self.step_scalars.evaluate(asked)
        self.locate()

    def allocate(self, rows: Rows, threads: int) -> None:  # noqa: B027
        """Allocate all memory of a launch over these tensors, so that it cannot fail later."""

    def enter(self, known: dict[str, Any], rows: Rows, asked: Asked, threads: int) -> None:
        """Begin a later phase with what is known now, a value for each tensor."""
        self.step_scalars.learn(known)
        self.step_scalars.evaluate(asked)
        self.allocate(rows, threads)

    def is_shared(self, rows: Rows) -> bool:
        """Whether the number of threads matters to a launch over these tensors, which is ready."""
        return True

    @abstractmethod
    def launch(self, rows: Rows, grads: Grads, threads: int) -> None:
        """All passes over some of the tensors, which are ready."""

    def run_cut(self, rows: Rows, grads: Grads, threads: int) -> Stops:
        """Run the passes over this rank's units of tensors that ranks share; stop where partial
        results are wanted.

        An engine with `cuts` must have this method.
        """
        raise NotImplementedError

    def steps(self, rows: Rows, grads: Grads, threads: int) -> Stops:
        """`run_cut` over tensors that ranks share; over others `launch`."""
        if self.bucket.kind == "cut":
            yield from self.run_cut(rows, grads, threads)
        else:
            self.launch(rows, grads, threads)

    def held(self, rows: Rows) -> Rows:
        """Those of the rows of which this rank has elements."""
        mine = []
        for i in rows.full.tolist():
            share = self.tensors[i].share
            if share.last > share.first:
                mine.append(i)
        return Rows(rows.all, np.array(mine, np.int64))

    # ---- arrays ----------------------------------------------------------------------------------

    def locate(self) -> None:
        """Have `bind` called if parameters or slots may lie elsewhere than when it last was."""
        now = self.bucket.run.arrays
        if now != self._located:
            self.bind()
            self._located = now

    def written(self, rows: Rows) -> None:
        """Tell PyTorch that parameters were written: graphs may have saved the old values."""
        if self._versioned:
            xp = array_namespace(self.tensors[0].array)
            xp.autograd.graph.increment_version([self.tensors[i].array for i in rows.full.tolist()])

    def bind(self) -> None:  # noqa: B027
        """Take down where parameters and slots lie."""

    def whole_stacks(self, name: str) -> Iterator[tuple[Any, Ints]]:
        """The arrays of stacks whose layers can be used in place, with the rows of these layers."""
        if name in self.vectors or name in self.widens:
            return
        for tensor, rows in self.stacks.items():
            if tensor.kind == "whole" and size(tensor.array):
                x = memory(of_layers(name, tensor))
                if plain(x):
                    yield x, rows

    def stored(self, row: int, name: str) -> Array:
        """A tensor's parameter or slot."""
        if name in self.vectors:
            return self.vectors[name][row]
        return self.tensors[row].array if name == "p" else self.tensors[row].slots[name]

    def wide(self, row: int, name: str) -> Any:
        """What the codes of a slot stand for, as a NumPy array of the plan's dtype."""
        slots = self.tensors[row].slots
        codes, scale = memory(slots[name]), to_host(slots[scale_of(name)])
        return dequantized(codes, scale, np.dtype(self.plan.storage[name]))

    def put_wide(self, row: int, name: str, value: Any) -> None:
        """Write numbers to a slot of codes."""
        codes = self.tensors[row].slots[name]
        made = quantized(value.reshape(codes.shape), dtype_name(codes))
        for slot, x in zip((name, scale_of(name)), made, strict=True):
            self.replace(row, slot, x)

    def replace(self, row: int, name: str, value: Array) -> None:
        """Write a parameter or slot, or put another array in its place if it cannot be written."""
        tensor, old = self.tensors[row], self.stored(row, name)
        if array_api_compat.is_torch_array(old) and isinstance(value, np.ndarray):
            here = memory(old)  # integers, if NumPy lacks the dtype
            here[...] = value if dtype_name(here) == dtype_name(old) else value.view(here.dtype)
        else:
            tensor.put(None if name == "p" else name, value)

    # ---- reports ---------------------------------------------------------------------------------

    def report(self, rows: Rows) -> dict[str, Report]:
        """What the last step reports, by tensor name."""
        columns = {name: self.values_of(node) for name, node in self.plan.reports.items()}
        return self.report_of(rows, columns)

    def report_of(self, rows: Any, columns: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The values of each tensor, by its name."""
        report = {}
        for row in rows.full.tolist():
            report[self.tensors[row].name] = {name: x[row] for name, x in columns.items()}
        return report

    def values_of(self, node: Node) -> Any:
        """A value of every tensor."""
        if node in self.layout.tensor:
            return self.values[:, self.layout.tensor[node]].copy()
        if node.op == "const":
            return np.full(len(self.tensors), float(node.data))
        return self.scalars[:, self.plan.scalars.index(node)].copy()


def plain(x: Array) -> bool:
    """Whether an array can be read and written where it lies, element after element."""
    return isinstance(x, np.ndarray) and bool(x.flags.carray)
