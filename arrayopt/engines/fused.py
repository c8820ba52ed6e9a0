"""The base class of engines that run plans. `prepare` sorts a bucket's tensors into batches, each
with one plan, and returns a `FusedStep`. Engines add the class of their batches.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from arrayopt.arrays import Grads, Ints, dtype_name, size
from arrayopt.codecs import BLOCK, PAIR
from arrayopt.engines.base import Asked, Engine, MakeStep, NoRemedyError, Stops
from arrayopt.engines.batch import DECODED, Batch, Kind, Prepared, Rows
from arrayopt.engines.bucket import Bucket, chosen
from arrayopt.engines.fused_step import FusedStep
from arrayopt.engines.layers import Split
from arrayopt.engines.phased_batch import PhasedBatch
from arrayopt.fusion.layout import as_matrices, flops, geometry, layout, moved
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.plans import is_of_library, plan_for, ways, widened
from arrayopt.fusion.segments import Segmented, in_segments, suits
from arrayopt.params.located import dtypes
from arrayopt.rules.base import Rule
from arrayopt.state.quantized import scales
from arrayopt.state.slots import BY_GROUP
from arrayopt.state.tensors import Tensor


class Fused(Engine):
    """An engine that runs plans."""

    lean: ClassVar[bool] = False
    """See `arrayopt.fusion.trace.trace`."""
    cuts: ClassVar[bool] = False
    """Whether ranks can share a tensor; see `Batch.run_cut`."""
    parts: ClassVar[bool] = False
    """Whether the engine runs parts of tensors that the user divided."""
    side_by_side: ClassVar[bool] = True
    """Whether small matrices are laid side by side; see `arrayopt.fusion.segments`."""
    narrows: ClassVar[bool] = False
    """Whether the engine has arithmetic in bfloat16, which Muon's iterations use."""
    products: ClassVar[bool] = False
    """Whether the engine runs plans with products of matrices."""
    codes: ClassVar[bool] = False
    """Whether the engine reads and writes 8-bit slots itself; if not, they are decoded first."""
    halves: ClassVar[bool] = True
    """Whether only half of a symmetric product is computed."""
    phased_batch: ClassVar[type[PhasedBatch]] = PhasedBatch
    """The class of batches whose plans have totals."""

    def __init__(self) -> None:
        if self.cuts and self.batch.run_cut is Batch.run_cut:
            raise TypeError(
                f"{type(self).__name__}: with `cuts = True` {self.batch.__name__} must have"
                " `run_cut`"
            )

    def geometry(self, shapes: list[tuple[int, ...]], element: str) -> Any:
        """Return `arrayopt.fusion.layout.geometry` of shared tensors, with the engine's units."""
        return geometry(shapes, element)

    @property
    @abstractmethod
    def batch(self) -> type[Batch]:
        """The class of the engine's batches; a class attribute (``batch = Table``) will do."""

    @abstractmethod
    def describe(self) -> str:
        """Describe in a few words how passes are run."""

    def check(self, bucket: Bucket) -> None:
        if bucket.rule.branches and self.counts:
            raise NoRemedyError(
                f"{type(bucket.rule).__name__} runs some updates unfused, depending on the step"
                " number, which this engine counts on the device; use engine='array_api'"
            )
        every = ways(bucket.rule)
        if is_of_library(bucket.rule):  # the other ways are tested; planning takes long
            every = every[:1]
        for way in every:
            for plan in self.plans(bucket, **way):
                if plan.phases and bucket.rule.branches:
                    raise NoRemedyError(
                        f"{type(bucket.rule).__name__} uses totals, and runs some updates unfused;"
                        " one rule cannot do both"
                    )
                layout(plan)
                if not self.narrows:
                    plan.check_wide()
                if plan.multiplies:
                    self.check_products(bucket)

    def check_products(self, bucket: Bucket) -> None:
        """Raise ValueError, with the reason, if the engine cannot multiply matrices."""
        if not self.products:
            raise ValueError(
                f"{type(bucket.rule).__name__} multiplies matrices, which the engine does not"
                " support"
            )
        if bucket.kind == "cut":
            raise ValueError(
                f"{type(bucket.rule).__name__} needs whole matrices, but"
                f" {bucket.tensors[0].name!r} is divided among the ranks; {BY_GROUP}"
            )

    def explain(self, bucket: Bucket) -> str:
        if bucket.kind == "none":
            return "their parameters come from other ranks after each step; here they are counted"
        branches = ["some updates of each tensor as they are written"] * bucket.rule.branches
        lines = self._explained(bucket, valued=not bucket.rule.value_optional)
        if bucket.rule.value_optional:
            lines += ["with a value:", *self._explained(bucket, valued=True)]
        return "\n    ".join([self.describe(), *branches, *lines])

    def _explained(self, bucket: Bucket, *, valued: bool) -> list[str]:
        """Return the lines about each plan."""
        some = any(size(x.array) for x in bucket.tensors)
        plans = self.plans(bucket, stats=False, valued=valued) if some else {}
        lines, deeper = list[str](), "  " * (len(plans) > 1)
        for plan, shapes in plans.items():
            if deeper:
                ranks = list(dict.fromkeys(map(len, shapes)))
                which = "" if not plan.multiplies else f", such as {'x'.join(map(str, shapes[0]))}"
                lines.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}{which}:")
            lines += [f"{deeper}{line}" for line in str(plan).splitlines()]
            if scales(bucket.rule, len(shapes[0])) and not plan.quantized:
                lines.append(f"{deeper}{DECODED}")
            if plan.multiplies:
                every = [tuple(x.shape) for x in bucket.tensors if tuple(x.shape) in set(shapes)]
                geo = geometry(every, plan.element)
                total = int(flops(plan, geo, halves=self.halves).sum())
                passed = int(moved(plan, geo).sum())
                full = "" if self.halves else ", symmetric ones in full"
                lines.append(
                    f"{deeper}in all {total / 1e6:.6g} MFLOPs in products{full},"
                    f" {passed / 1e6:.6g} MB in passes"
                )
        return lines

    def foresee(self, coming: Iterable[tuple[Bucket, Asked]]) -> None:
        """Start long work, such as compilation, for the first steps of all these buckets."""

    def prepare(self, bucket: Bucket, asked: Asked, meetings: Sequence[Any] = ()) -> MakeStep:
        return FusedStep(self, bucket, asked, meetings)

    def plan(self, rule: Rule, rank: int, dtype: str, **options: Any) -> Plan:
        """The engine's plan of a rule; see `plan_for`.

        If the engine does not read codes itself, slots of codes are widened; see `widened`.
        """
        found = plan_for(rule, rank, dtype, lean=self.lean, **options)
        if not found.quantized:
            return found
        # each row must consist of whole blocks of codes; a single row may end with part of one
        shape, codes = tuple(options.get("shape", ())), self.codes
        if codes and found.element != "C":
            codes = as_matrices(shape, found.element)[3] % BLOCK == 0
        return found if codes and PAIR not in found.storage.values() else widened(found)

    def plans(self, bucket: Bucket, **way: bool) -> dict[Plan, list[tuple[int, ...]]]:
        """Return the plans of a bucket's tensors, each with the shapes that use it."""
        dtype, found = dtype_name(bucket.tensors[0].array), dict[Plan, list[tuple[int, ...]]]()
        every = [tuple(x.shape) for x in bucket.tensors if size(x.array)]
        every = every or [tuple(x.shape) for x in bucket.tensors]
        for shape in sorted(set(every), key=lambda x: (len(x), x)):
            plan = self.plan(bucket.rule, len(shape), dtype, shape=shape, **way)
            found.setdefault(plan, []).append(shape)
        return found

    def count(self, bucket: Bucket, took: list[Ints]) -> None:
        """Count an update of these tensors, if the device has not counted them."""
        if took and not self.counts:
            bucket.count(took[0] if len(took) == 1 else np.concatenate(took))

    def lays_side_by_side(self, bucket: Bucket, tensor: Tensor) -> bool:
        """Whether the engine lays the matrices of a tensor side by side."""
        rank, dtype = tensor.array.ndim, dtype_name(tensor.array)
        shape = tensor.array.shape
        each = ways(bucket.rule)
        plans = [self.plan(bucket.rule, rank, dtype, shape=shape, **way) for way in each]
        return any(self._segmented(plan, tensor) is not None for plan in plans)

    def _segmented(self, plan: Plan, tensor: Tensor) -> Segmented | None:
        """Return the plan in segments if the tensor's matrices are laid side by side, else None."""
        is_part = tensor.block is not None and tensor.kind == "cut"
        if is_part or plan.quantized or plan.spilled or plan.phases:
            return None
        return in_segments(plan) if self.side_by_side and suits(tensor.array.shape) else None

    def batches(self, bucket: Bucket, asked: Asked) -> list[Prepared]:
        """Return the prepared batches of a step; with `stats`, those of the report."""
        grads, made = asked.grads, list[Prepared]()
        found, complete = dtypes(grads.given if isinstance(grads, Split) else grads)
        if isinstance(grads, Split):
            complete = complete and bool(grads.has_gradient.all())
        for batch in self._sorted(bucket, asked, found):
            given = chosen(grads, batch.members)
            rows = batch.rows(given, complete=complete)
            if len(rows.all):
                batch.prepare(rows, given, asked)
                made.append(Prepared(batch, rows, given))
        return made

    def _sorted(self, bucket: Bucket, asked: Asked, dtypes: set[Any]) -> list[Batch]:
        """Sort a bucket's tensors into batches, by plan and dtype of gradient; these are kept."""
        grads, clip, stats = asked.grads, asked.clip is not None, asked.stats
        common = next(iter(dtypes)) if len(dtypes) == 1 else None

        def made() -> list[Batch]:
            made = []
            for kind, members in self._members(bucket, asked, common).items():
                made.append(self.new_batch(kind, bucket, members))
            return made

        of_grads = common or tuple(None if g is None else g.dtype for g in grads)
        return bucket.keep((clip, stats, asked.valued, of_grads), made)

    def _members(self, bucket: Bucket, asked: Asked, common: Any) -> dict[Kind, list[int]]:
        """Return the places of tensors by kind; `common`: the one dtype of gradients, if any."""
        found: dict[Kind, list[int]] = {}
        seen: dict[Any, Kind] = {}  # by all properties that determine the kind
        options = {"clip": asked.clip is not None, "stats": asked.stats, "valued": asked.valued}
        for place, (tensor, g) in enumerate(zip(bucket.tensors, asked.grads, strict=True)):
            if g is None and common is None:
                continue
            array, shape = tensor.array, tensor.shape
            typed: Any = common or g.dtype  # type: ignore[union-attr]
            key = array.shape, shape, array.dtype, typed, tensor.kind, tensor.block is None
            if key not in seen:
                dtype, grad = dtype_name(array), str(typed).rsplit(".", 1)[-1]
                plan = self.plan(bucket.rule, array.ndim, dtype, shape=shape, **options)
                seen[key] = Kind(plan, self._segmented(plan, tensor), dtype, grad)
            found.setdefault(seen[key], []).append(place)
        return found

    def kinds(self, bucket: Bucket, asked: Asked) -> list[Kind]:
        """Return the kinds of all batches of a step, including those of its reports."""
        both = (False, True) if asked.stats else (False,)
        found = list[Kind]()
        for stats in both:
            for kind in self._members(bucket, asked._replace(stats=stats), None):
                found += [replace(kind, plan=plan) for plan in kind.plan.phases or (kind.plan,)]
        return found

    def new_batch(self, kind: Kind, bucket: Bucket, members: list[int]) -> Any:
        """Create the batch of the tensors at these places."""
        if kind.plan.phases:
            return self.phased_batch(self, kind, bucket, members)
        if kind.plan.idle and not self.counts:
            return _Idle(kind, bucket, members)
        return self.batch(kind, bucket, members)


class _Idle(Batch):
    """A batch that only counts: it writes nothing, and reports only scalars of the step."""

    def launch(self, rows: Rows, grads: Grads, threads: int) -> None:
        """See `Batch.launch`."""

    def run_cut(self, rows: Rows, grads: Grads, threads: int) -> Stops:
        yield from ()
