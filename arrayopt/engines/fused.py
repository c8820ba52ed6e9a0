"""What the fused engines share: tensors of a bucket sorted by plan, their scalars, and access to their memory."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, dtype_name, look, memory, size
from arrayopt.engines.base import Bucket, Judge, Report, chosen
from arrayopt.engines.threads import thread_count
from arrayopt.fusion.graph import Node, evaluate, reachable
from arrayopt.fusion.lanes import Lanes, lane_geometry, lanes, suits
from arrayopt.fusion.layout import CHUNK, GEOMETRY, geometry, layout
from arrayopt.fusion.plan import Plan, plan_for
from arrayopt.fusion.trace import CLIP, UPDATES

__all__ = ["Batch", "Fused", "Ints"]

Ints = np.ndarray[Any, np.dtype[np.int64]]

_DTYPE = operator.attrgetter("dtype")


class Batch(ABC):
    """Tensors of one plan, from one bucket.

    Attributes
    ----------
    geo : array of int64
        `GEOMETRY` of each tensor.
    scalars : array of float64
        For each tensor the plan's scalars of the step.
    values : array of float64
        For each tensor the values per tensor that the plan computes.
    """

    chunk: ClassVar[int] = CHUNK
    lane_room: ClassVar[int] = 1 << 16

    def __init__(self, plan: Plan, split: Lanes | None, bucket: Bucket, members: list[int]) -> None:
        self.plan, self.split, self.members = plan, split, members
        self.tensors = [bucket.tensors[i] for i in members]
        self.updates, self.places = bucket.counts, np.array(members)
        self.groups = np.array([bucket.group_of[i] for i in members])
        self.lain: Any = None
        torch = array_api_compat.is_torch_array(self.tensors[0].array)
        self.looks = [look(type(x.array))(x.array) for x in self.tensors] if torch else []
        self.where = layout(plan) if split is None else split.where
        shapes = [tuple(x.array.shape) for x in self.tensors]
        if split is None:
            self.geo = geometry(shapes, plan.element, self.chunk)
        else:
            self.geo = lane_geometry(shapes, plan.element, self.lane_room)
        self.scalars = np.zeros((len(members), len(plan.scalars)))
        self.values = np.zeros((len(members), len(self.where.tensor)))
        self.counts = {n.data for n in reachable(plan.scalars) if n.op == "host" and n.data.startswith("count:")}

    def evaluate(self, hypers: Sequence[dict[str, Any]], clip: float | None) -> None:
        """Fill in the scalars of the step."""
        t: Any = self.updates[self.places] + 1.0
        if (t == t[0]).all():  # as a rule; then scalars are mostly the same for all
            t = t[0]
        given: dict[str, Any] = {UPDATES: t, CLIP: clip}
        for name, first in hypers[0].items():
            if first is not None:
                column = [float(h[name]) for h in hypers]
                given[name] = column[0] if len(column) == 1 else np.array(column)[self.groups]
        for name in self.counts:
            extents = [self.geo[:, GEOMETRY.index(x)].astype(np.float64) for x in name.removeprefix("count:")]
            given[name] = np.prod(extents, axis=0)
        known = evaluate(self.plan.scalars, given)
        values = [known[node] for node in self.plan.scalars]
        if all(np.ndim(x) == 0 for x in values):
            self.scalars[:] = values
            return
        for i, x in enumerate(values):
            self.scalars[:, i] = x

    def ready(
        self,
        rows: Ints,
        grads: Sequence[Array | None],
        hypers: Sequence[dict[str, Any]],
        clip: Array | None,
        skip: Array | None,
    ) -> None:
        """Make a step over some of the tensors ready, raising whatever there is to raise."""
        self.evaluate(hypers, None if clip is None else float(clip))
        self.follow()

    def step(self, rows: Ints, grads: Sequence[Array | None], threads: int) -> None:
        """Update some of the tensors."""
        full = self.full(rows)
        if len(full):
            self.run(full, grads, threads)
        self.updates[self.places[rows]] += 1

    @abstractmethod
    def run(self, rows: Ints, grads: Sequence[Array | None], threads: int) -> None:
        """All passes over some of the tensors."""

    def follow(self) -> None:
        """Have `bind` called if parameters or slots may lie elsewhere than when it last was.

        Raises
        ------
        ValueError
            If a parameter of PyTorch, whose ``data`` can be set, has become another kind of array.
        """
        loose = [x.array for x in self.tensors] if self.looks else []
        now = self.updates.replaced, [(x.data_ptr(), x.shape, x.stride()) for x in loose]
        if now == self.lain:
            return
        for tensor, was in zip(self.tensors, self.looks, strict=False):
            became = look(type(tensor.array))(tensor.array)
            if became != was:
                raise ValueError(
                    f"Optimizer: {tensor.name!r} must stay what it was, {was}; it has become {became};"
                    " make a new Optimizer"
                )
        self.bind()
        self.lain = now

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

    def report(self, rows: Ints) -> dict[str, Report]:
        """What the last step reports, by tensor name."""
        columns = {name: self._column(node) for name, node in self.plan.reports.items()}
        return {self.tensors[i].name: {name: x[i] for name, x in columns.items()} for i in self.full(rows).tolist()}

    def full(self, rows: Ints) -> Ints:
        """Those of some tensors that have elements."""
        chosen: Ints = rows[self.geo[rows, GEOMETRY.index("SIZE")] > 0]
        return chosen

    def _column(self, node: Node) -> Any:
        """A value of every tensor."""
        if node in self.where.tensor:
            return self.values[:, self.where.tensor[node]].copy()
        if node.op == "const":
            return np.full(len(self.tensors), float(node.data))
        return self.scalars[:, self.plan.scalars.index(node)].copy()


def plain(x: Array) -> bool:
    """Whether an array can be read and written where it lies, element after element."""
    return isinstance(x, np.ndarray) and bool(x.flags.carray)


class Fused(ABC):
    """An engine that runs plans."""

    name: ClassVar[str]
    batch: ClassVar[type[Any]]
    """The kind of `Batch` that the engine runs."""
    side_by_side: ClassVar[bool] = True
    """Whether small matrices are taken side by side; see `arrayopt.fusion.lanes`."""

    @abstractmethod
    def describe(self) -> str:
        """How the passes are run, in some words."""

    def check(self, bucket: Bucket) -> None:
        """See `Engine.check`."""
        for plan in _plans(bucket, stats=True):  # the most that can be asked for
            layout(plan)

    def advance(self, bucket: Bucket, hypers: Sequence[dict[str, Any]]) -> None:  # noqa: B027
        """Nothing is captured."""

    def judge(self, buckets: Sequence[Bucket]) -> Judge | None:
        """The host decides."""
        return None

    def explain(self, bucket: Bucket) -> str:
        """See `Engine.explain`."""
        plans, lines = _plans(bucket, stats=False), list[str]()
        for plan, ranks in plans.items():
            if len(plans) > 1:
                lines.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}:")
            lines += [f"{'  ' * (len(plans) > 1)}{line}" for line in str(plan).splitlines()]
        return "\n    ".join([self.describe(), *lines])

    def prepare(
        self,
        bucket: Bucket,
        grads: Sequence[Array | None],
        hypers: Sequence[dict[str, Any]],
        *,
        clip: Array | None,
        stats: bool,
        skip: Array | None = None,
    ) -> Callable[[], dict[str, Report]]:
        """See `Engine.prepare`."""
        threads, work = thread_count(), self.made_ready(bucket, grads, hypers, clip=clip, stats=stats, skip=skip)

        def launch() -> dict[str, Report]:
            reports: dict[str, Report] = {}
            for batch, rows, given in work:
                batch.step(rows, given, threads)
                if stats:
                    reports |= batch.report(rows)
            return reports

        return launch

    def made_ready(
        self,
        bucket: Bucket,
        grads: Sequence[Array | None],
        hypers: Sequence[dict[str, Any]],
        *,
        clip: Array | None = None,
        stats: bool = False,
        skip: Array | None = None,
    ) -> list[tuple[Any, Ints, Sequence[Array | None]]]:
        """The batches of a step, which are ready to make it, with the rows and the gradients that each is to take."""
        work = []
        try:
            dtypes, complete = set(map(_DTYPE, grads)), True
        except AttributeError:  # of None
            dtypes, complete = {g.dtype for g in grads if g is not None}, False
        for batch in self._batches(bucket, grads, dtypes, clip is not None, stats):
            given = chosen(grads, batch.members)
            rows = np.arange(len(given)) if complete else np.flatnonzero([g is not None for g in given])
            if len(rows):
                batch.ready(rows, given, hypers, clip, skip)
                work.append((batch, rows, given))
        return work

    def _batches(
        self, bucket: Bucket, grads: Sequence[Array | None], dtypes: set[Any], clip: bool, stats: bool
    ) -> list[Batch]:
        """The tensors of a bucket by plan and by dtype of gradient."""
        common = next(iter(dtypes)) if len(dtypes) == 1 else None
        key = (self.name, clip, stats, common or tuple(None if g is None else g.dtype for g in grads))
        if key not in bucket.kept:
            found: dict[Any, list[int]] = {}
            for i, (tensor, g) in enumerate(zip(bucket.tensors, grads, strict=True)):
                if g is not None or common is not None:
                    plan = plan_for(bucket.rule, tensor.array.ndim, dtype_name(tensor.array), clip=clip, stats=stats)
                    small = self.side_by_side and suits(tensor.array.shape) and not plan.spilled
                    split = lanes(plan) if small else None
                    grad = dtype_name(g) if common is None else str(common).rsplit(".", 1)[-1]
                    found.setdefault((plan, split, dtype_name(tensor.array), grad), []).append(i)
            bucket.kept[key] = [self.batch(*kind, bucket, members) for kind, members in found.items()]
        made: list[Batch] = bucket.kept[key]
        return made


def _plans(bucket: Bucket, *, stats: bool) -> dict[Plan, list[int]]:
    """The plans that a bucket's tensors take, and the ranks that take each."""
    dtype, found = dtype_name(bucket.tensors[0].array), dict[Plan, list[int]]()
    for rank in sorted({x.array.ndim for x in bucket.tensors if size(x.array)}):
        found.setdefault(plan_for(bucket.rule, rank, dtype, stats=stats), []).append(rank)
    return found
