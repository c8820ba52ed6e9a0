"""What the fused engines share: tensors of a bucket sorted by plan, their scalars, and access to their memory."""

import operator
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, Ints, array_namespace, dtype_name, memory, size
from arrayopt.engines.base import Asked, Judge, Partials, Report, abreast
from arrayopt.engines.bucket import Bucket, chosen
from arrayopt.engines.threads import thread_count
from arrayopt.fusion.graph import COUNT, LETTERS, Node
from arrayopt.fusion.lanes import Lanes, lane_geometry, lanes, suits
from arrayopt.fusion.layout import CHUNK, GEOMETRY, flops, geometry, layout, moved
from arrayopt.fusion.plan import Plan, plan_for
from arrayopt.fusion.scalars import scalar_code
from arrayopt.state.tensors import Tensor

__all__ = ["Batch", "Fused", "Rows", "plain"]

_DTYPE = operator.attrgetter("dtype")

KEPT = 8
"""So many sets of tensors that took part in a step are remembered."""


@dataclass(slots=True, eq=False)
class Rows:
    """Which tensors of a batch take part in a step.

    Attributes
    ----------
    all : array of int64
        Their rows in the batch.
    full : array of int64
        Those of them that have elements.
    kept : object
        What an engine keeps for a step over just these rows.
    """

    all: Ints
    full: Ints
    kept: Any = None


class Batch(ABC):
    """Tensors of one plan, from one bucket.

    Attributes
    ----------
    geo : array of int64
        `GEOMETRY` of each tensor.
    filled : array of bool
        Whether the whole tensor has elements.
    scalars : array of float64
        For each tensor the plan's scalars of the step.
    values : array of float64
        For each tensor the values per tensor that the plan computes.
    """

    chunk: ClassVar[int] = CHUNK
    lane_room: ClassVar[int] = 1 << 16

    def __init__(self, plan: Plan, split: Lanes | None, bucket: Bucket, members: list[int]) -> None:
        self.plan, self.split, self.members = plan, split, members
        self.bucket = weakref.proxy(bucket)  # which keeps this: a circle would wait for the garbage collector
        self.tensors = [bucket.tensors[i] for i in members]
        self.whole_bucket = len(members) == len(bucket.tensors)
        self.groups = np.array([bucket.group_of[i] for i in members])
        self.where = layout(plan) if split is None else split.where
        shapes = [x.shape for x in self.tensors]
        if split is None:
            self.geo = geometry(shapes, plan.element, self.chunk)
        else:
            self.geo = lane_geometry(shapes, plan.element, self.lane_room)
        self.filled = self.geo[:, GEOMETRY.index("SIZE")] > 0  # of whole tensors: the same on all ranks
        self.scalars = np.zeros((len(members), len(plan.scalars)))
        self.values = np.zeros((len(members), len(self.where.tensor)))
        self.whole = self._made_rows(np.arange(len(members)))
        self._some: dict[bytes, Rows] = {}
        self.code = scalar_code(plan)
        self._names = [name for name in self.code.names if not name.startswith(COUNT)]
        self._sizes, self._numbers = self._counted(), list[Any]()
        self._located = -1
        self._versioned = array_api_compat.is_torch_array(self.tensors[0].array) and "p" in plan.written

    # ---- which tensors ----------------------------------------------------------------------------------------------

    def rows(self, grads: Sequence[Array | None], *, complete: bool) -> Rows:
        """The tensors that have a gradient."""
        if complete:
            return self.whole
        some = np.flatnonzero([g is not None for g in grads])
        key = some.tobytes()
        if key not in self._some:
            if len(self._some) >= KEPT:
                self._some.pop(next(iter(self._some)))
            self._some[key] = self._made_rows(some)
        return self._some[key]

    def _made_rows(self, rows: Ints) -> Rows:
        return Rows(rows, rows[self.filled[rows]])

    # ---- a step -----------------------------------------------------------------------------------------------------

    def prepare(self, rows: Rows, grads: Sequence[Array | None], asked: Asked) -> None:
        """Make a step over some of the tensors ready, raising whatever there is to raise; `grads` are the batch's."""
        self.evaluate(asked.hypers, None if asked.clip is None else float(asked.clip))
        self.locate()

    @abstractmethod
    def launch(self, rows: Rows, grads: Sequence[Array | None], threads: int) -> None:
        """All passes over some of the tensors, which are ready."""

    def passes(self, rows: Rows, grads: Sequence[Array | None], threads: int) -> Iterator[list[Partials]]:
        """Run the passes over this rank's units of tensors that ranks share; stop where partial results are wanted."""
        yield from ()

    def held(self, rows: Rows) -> Rows:
        """Those of the rows of which this rank has elements."""
        mine = [i for i in rows.full.tolist() if self.tensors[i].share.last > self.tensors[i].share.first]
        return Rows(rows.all, np.array(mine, np.int64))

    def evaluate(self, hypers: Sequence[dict[str, Any]], clip: float | None) -> None:
        """Fill in the scalars of the step."""
        numbers = [[float(h[name]) for name in self._names] for h in hypers]
        if numbers != self._numbers:
            columns = {name: [row[i] for row in numbers] for i, name in enumerate(self._names)}
            each = {name: x[0] if len(x) == 1 else np.array(x)[self.groups] for name, x in columns.items()}
            self._constants, self._numbers = self.code.constants(self._sizes | each), numbers
        t: Any = self.bucket.updates()
        t = (t if self.whole_bucket or isinstance(t, int) else t[self.members]) + 1.0
        values = self.code.scalars(t, clip, self._constants)
        if np.ndarray not in map(type, values):
            self.scalars[:] = values
            return
        for i, x in enumerate(values):
            self.scalars[:, i] = x

    def _counted(self) -> dict[str, Any]:
        """The numbers of elements that means divide by."""
        names = [name for name in self.code.names if name.startswith(COUNT)]
        extents = {x: self.geo[:, GEOMETRY.index(x.upper())].astype(np.float64) for x in LETTERS}
        return {name: np.prod([extents[x] for x in name.removeprefix(COUNT)], axis=0) for name in names}

    # ---- arrays -----------------------------------------------------------------------------------------------------

    def locate(self) -> None:
        """Have `bind` called if parameters or slots may lie elsewhere than when it last was."""
        now = self.bucket.run.arrays
        if now != self._located:
            self.bind()
            self._located = now

    def written(self, rows: Rows) -> None:
        """Tell PyTorch that the parameters were written: what a graph has saved of them is no longer what it was."""
        if self._versioned:
            xp = array_namespace(self.tensors[0].array)
            xp.autograd.graph.increment_version([self.tensors[i].array for i in rows.full.tolist()])

    def bind(self) -> None:  # noqa: B027
        """Take down where parameters and slots lie."""

    def stored(self, row: int, name: str) -> Array:
        """A tensor's parameter or slot."""
        return self.tensors[row].array if name == "p" else self.tensors[row].slots[name]

    def replace(self, row: int, name: str, value: Array) -> None:
        """Write a parameter or slot, or put another array in its place where it cannot be written."""
        tensor, old = self.tensors[row], self.stored(row, name)
        if array_api_compat.is_torch_array(old) and isinstance(value, np.ndarray):
            memory(old)[...] = value
        else:
            tensor.put(None if name == "p" else name, value)

    # ---- reports ----------------------------------------------------------------------------------------------------

    def report(self, rows: Rows) -> dict[str, Report]:
        """What the last step reports, by tensor name."""
        columns = {name: self._column(node) for name, node in self.plan.reports.items()}
        return {self.tensors[i].name: {name: x[i] for name, x in columns.items()} for i in rows.full.tolist()}

    def _column(self, node: Node) -> Any:
        """A value of every tensor."""
        if node in self.where.tensor:
            return self.values[:, self.where.tensor[node]].copy()
        if node.op == "const":
            return np.full(len(self.tensors), float(node.data))
        return self.scalars[:, self.plan.scalars.index(node)].copy()


class _Idle(Batch):
    """Tensors whose step is only counted: nothing is written, and nothing but scalars of the step is reported."""

    def __init__(
        self, plan: Plan, split: Lanes | None, dtype: str, grad_dtype: str, bucket: Bucket, members: list[int]
    ) -> None:
        super().__init__(plan, split, bucket, members)

    def launch(self, rows: Rows, grads: Sequence[Array | None], threads: int) -> None:
        """See `Batch.launch`."""


def plain(x: Array) -> bool:
    """Whether an array can be read and written where it lies, element after element."""
    return isinstance(x, np.ndarray) and bool(x.flags.carray)


Prepared = list[tuple[Any, Rows, Sequence[Array | None]]]
"""Batches that are ready for a step, each with the rows and the gradients that it is to take."""


class Fused(ABC):
    """An engine that runs plans."""

    name: ClassVar[str]
    batch: ClassVar[type[Any]]
    """The kind of `Batch` that the engine runs."""
    lean: ClassVar[bool] = False
    """See `arrayopt.fusion.trace.trace`."""
    cuts: ClassVar[bool] = False
    """Whether ranks can share a tensor; see `Batch.passes`."""
    side_by_side: ClassVar[bool] = True
    """Whether small matrices are taken side by side; see `arrayopt.fusion.lanes`."""
    counts: ClassVar[bool] = False
    """Whether the batches themselves count the updates."""
    products: ClassVar[type[Any] | None] = None
    """The kind of `Batch` for plans with products of matrices, where the engine has these."""

    @abstractmethod
    def describe(self) -> str:
        """How the passes are run, in some words."""

    def check(self, bucket: Bucket) -> None:
        """See `Engine.check`."""
        for stats in (False, True):
            for plan in _plans(bucket, stats=stats, lean=self.lean):
                layout(plan)
                if plan.multiplies:
                    self.check_products(bucket)

    def check_products(self, bucket: Bucket) -> None:
        """Raise ValueError, saying why, if the engine cannot multiply matrices."""
        if self.products is None:
            raise ValueError(f"{type(bucket.rule).__name__} multiplies matrices, which the engine does not do")
        if bucket.kind == "cut":
            raise ValueError(
                f"{type(bucket.rule).__name__} multiplies whole matrices, and of {bucket.tensors[0].name!r} each rank"
                " has a part; give such tensors another rule, by a group"
            )

    def advance(self, bucket: Bucket, hypers: Sequence[dict[str, Any]]) -> None:  # noqa: B027
        """Nothing is captured."""

    def judge(self, buckets: Sequence[Bucket]) -> Judge | None:
        """The host decides."""
        return None

    def explain(self, bucket: Bucket) -> str:
        """See `Engine.explain`."""
        plans, lines = _plans(bucket, stats=False, lean=self.lean), list[str]()
        for plan, shapes in plans.items():
            if len(plans) > 1:
                ranks = list(dict.fromkeys(map(len, shapes)))
                which = "" if not plan.multiplies else f", such as {'x'.join(map(str, shapes[0]))}"
                lines.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}{which}:")
            lines += [f"{'  ' * (len(plans) > 1)}{line}" for line in str(plan).splitlines()]
            if plan.multiplies:
                every = [tuple(x.shape) for x in bucket.tensors if tuple(x.shape) in set(shapes)]
                geo = geometry(every, plan.element)
                total, passed = int(flops(plan, geo).sum()), int(moved(plan, geo).sum())
                lines.append(
                    f"{'  ' * (len(plans) > 1)}in all {total / 1e6:.6g} MFLOPs in products, {passed / 1e6:.6g} MB in"
                    " passes"
                )
        return "\n    ".join([self.describe(), *lines])

    def prepare(self, bucket: Bucket, asked: Asked) -> Callable[[], dict[str, Report]]:
        """See `Engine.prepare`."""
        threads, work = thread_count(), self.batches(bucket, asked._replace(stats=False))
        watched = self.batches(bucket, asked) if asked.stats else []

        def launch() -> dict[str, Report]:
            reports: dict[str, Report] = {}
            for batch, rows, given in watched:  # they see what the update is about to overwrite
                batch.launch(rows, given, threads)
                reports |= batch.report(rows)
            for batch, rows, given in work:
                batch.launch(rows, given, threads)
                batch.written(rows)
            self.count(bucket, [np.array(batch.members)[rows.all] for batch, rows, _ in work])
            return reports

        return launch

    def prepare_cut(self, bucket: Bucket, asked: Asked, reports: dict[str, Report]) -> Iterator[list[Partials]]:
        """Make a step over tensors that ranks share ready; what is returned runs it, and stops at each exchange.

        Parameters
        ----------
        bucket, asked
            As for `prepare`.
        reports : dict
            Where reports of the tensors go of which this rank has elements.
        """
        threads, work = thread_count(), self.batches(bucket, asked._replace(stats=False))
        watched = self.batches(bucket, asked) if asked.stats else []

        def steps() -> Iterator[list[Partials]]:
            yield from abreast(batch.passes(rows, given, threads) for batch, rows, given in watched)
            for batch, rows, _ in watched:
                reports.update(batch.report(batch.held(rows)))
            yield from abreast(batch.passes(rows, given, threads) for batch, rows, given in work)
            for batch, rows, _ in work:
                batch.written(batch.held(rows))
            self.count(bucket, [np.array(batch.members)[rows.all] for batch, rows, _ in work])

        return steps()

    def count(self, bucket: Bucket, took: list[Ints]) -> None:
        """Note that these tensors of a bucket were updated."""
        if took:
            bucket.count(took[0] if len(took) == 1 else np.concatenate(took))

    def lays_side_by_side(self, bucket: Bucket, tensor: Tensor) -> bool:
        """Whether the engine takes the matrices of a tensor side by side."""
        rank, dtype = tensor.array.ndim, dtype_name(tensor.array)
        shape = tensor.array.shape
        plans = [plan_for(bucket.rule, rank, dtype, shape=shape, stats=x, lean=self.lean) for x in (False, True)]
        return any(self._split(plan, tensor) is not None for plan in plans)

    def _split(self, plan: Plan, tensor: Tensor) -> Lanes | None:
        """The plan in segments, where the engine takes the matrices of a tensor side by side."""
        return lanes(plan) if self.side_by_side and suits(tensor.array.shape) and not plan.spilled else None

    def batches(self, bucket: Bucket, asked: Asked) -> Prepared:
        """The batches of a step, ready to make it; with `stats`, those that report of it and write nothing."""
        grads = asked.grads
        work = []
        try:
            dtypes, complete = set(map(_DTYPE, grads)), True
        except AttributeError:  # of None
            dtypes, complete = {g.dtype for g in grads if g is not None}, False
        for batch in self._sorted(bucket, asked, dtypes):
            given = chosen(grads, batch.members)
            rows = batch.rows(given, complete=complete)
            if len(rows.all):
                batch.prepare(rows, given, asked)
                work.append((batch, rows, given))
        return work

    def _sorted(self, bucket: Bucket, asked: Asked, dtypes: set[Any]) -> list[Batch]:
        """The tensors of a bucket by plan and by dtype of gradient."""
        grads, clip, stats = asked.grads, asked.clip is not None, asked.stats
        common = next(iter(dtypes)) if len(dtypes) == 1 else None

        def made() -> list[Batch]:
            found: dict[Any, list[int]] = {}
            for i, (tensor, g) in enumerate(zip(bucket.tensors, grads, strict=True)):
                if g is not None or common is not None:
                    x = tensor.array
                    plan = plan_for(
                        bucket.rule, x.ndim, dtype_name(x), shape=x.shape, clip=clip, stats=stats, lean=self.lean
                    )
                    split = self._split(plan, tensor)
                    grad = dtype_name(g) if common is None else str(common).rsplit(".", 1)[-1]
                    found.setdefault((plan, split, dtype_name(tensor.array), grad), []).append(i)
            return [self._batch(kind[0])(*kind, bucket, members) for kind, members in found.items()]

        return bucket.keep((clip, stats, common or tuple(None if g is None else g.dtype for g in grads)), made)

    def _batch(self, plan: Plan) -> type[Any]:
        """The kind of batch that runs a plan."""
        if plan.idle and not self.counts:
            return _Idle
        return self.products if plan.multiplies and self.products else self.batch


def _plans(bucket: Bucket, *, stats: bool, lean: bool) -> dict[Plan, list[tuple[int, ...]]]:
    """The plans that a bucket's tensors take, and the shapes that take each."""
    dtype, found = dtype_name(bucket.tensors[0].array), dict[Plan, list[tuple[int, ...]]]()
    for shape in sorted({tuple(x.shape) for x in bucket.tensors if size(x.array)}, key=lambda x: (len(x), x)):
        plan = plan_for(bucket.rule, len(shape), dtype, shape=shape, stats=stats, lean=lean)
        found.setdefault(plan, []).append(shape)
    return found
