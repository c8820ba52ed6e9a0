"""Tensors as a table, which compiled code works through on all cores."""

import contextlib
import heapq
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np

from arrayopt.arrays import Array, Ints, memory
from arrayopt.codecs import CODECS
from arrayopt.engines.base import Asked, Partials
from arrayopt.engines.batch import Batch, Kind, Rows, plain
from arrayopt.engines.blas import blas_address, one_thread
from arrayopt.engines.bucket import Bucket, chosen
from arrayopt.engines.layers import Split
from arrayopt.engines.native.columns import columns
from arrayopt.engines.native.cut import Cut, windows_of
from arrayopt.engines.threads import run
from arrayopt.fusion.layout import GEOMETRY, extent, flops
from arrayopt.fusion.lower import lowered
from arrayopt.fusion.program import evaluated
from arrayopt.fusion.windows import WINDOW
from arrayopt.params.headers import LocatedGrads, Locations

__all__ = ["Code", "Table", "divide"]

SHARED = 1 << 18
"""All threads work on a tensor together if each gets at least this many elements; one thread does
smaller ones.
"""

FEW = 8
"""Up to so many gradients, Python asks each where it lies; of more, machine code does."""

FLOPS = 32
"""So many operations of a product take about as long as an element of the passes."""

ALONE = 1 << 15
"""Up to so many elements in all, one thread is quicker than several."""

_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class Code:
    """Compiled code.

    Attributes
    ----------
    bind : callable
        ``bind(table, scalars, values, work, part, rows)`` returns a function of ``first, last,
        thread, threads``, which
        does stages `first` to `last` of the tensors that have these rows; of passes, one thread's
        share. The arrays
        stay where they are as long as the function lives. Stage -1 puts the address of a gradient's
        elements in the
        place of that of the NumPy array; 0 if these are not contiguous and aligned.
    real : type
        NumPy's type of arithmetic.
    """

    bind: Callable[..., Callable[[int, int, int, int], Any]]
    real: Any


class Table(Batch):
    """Tensors as a table of sizes, addresses and offsets, and the compiled code that works through
    it.

    Attributes
    ----------
    code : Code
        The code.
    column : dict of str to int
        Where a column of the table is; see `arrayopt.engines.native.columns`.
    """

    def __init__(self, kind: Kind, bucket: Bucket, members: list[int]) -> None:
        super().__init__(kind, bucket, members)
        plan, split = kind.plan, kind.split
        windows, every = windows_of(self)
        self.compiled, self.multiplies = self.compile(kind), plan.multiplies
        names = columns(plan, self.where)
        self.column = {name: i for i, name in enumerate(names)}
        self.table: Ints = np.zeros((len(members), len(names)), np.int64)
        for group, values in ((GEOMETRY, self.geo), (WINDOW, windows)):
            for name, column in zip(group, values.T, strict=True):
                self.put(f"IN_{name}", column)
        self.room = {
            "work": np.zeros(len(members), np.int64),
            "part": np.zeros(len(members), np.int64),
        }
        self.offsets: list[tuple[int, str]] = []
        lengths = self.where.lengths(plan, self.geo)
        for (name, room), length in zip(self._vectors().items(), lengths.T, strict=True):
            self.offsets.append((self.column[name], room))
            self.put(name, self.room[room])
            self.room[room] += length
        if self.multiplies:
            self.put("BLAS", blas_address(self.compiled.real.__name__))
        if plan.draws:
            self.put("START", self.firsts)
        self.put("OWN", self.room["work"])
        self.put("LAST", self.geo[:, GEOMETRY.index("UNITS")])
        self.loads = self.geo[:, 0] + flops(plan, self.geo) // FLOPS
        self.cut = Cut(self, every) if bucket.kind == "cut" else None
        self.own = np.zeros(len(members), np.int64)  # what each thread needs for itself
        if split is not None:
            extents = dict(zip(GEOMETRY, self.geo.T, strict=True))
            planes = [evaluated(x, extents) for x in lowered(plan, split).planes]
            self.own += extents["G"] * reduce(np.maximum, planes)
        self.scratch: dict[str, Any] = {}
        self.staged: list[tuple[int, str]] = []
        self.copies: list[tuple[int, str, Any]] = []
        count = len(plan.passes if split is None else split.segments)
        self.stages = list(range(2 * count + 1))
        self.nothing = self._rooms(np.zeros(0, np.int64), 1)
        self.grad_bytes = CODECS[kind.grad_dtype].itemsize
        self.put_last: tuple[Ints, Locations] | None = (
            None  # the rows and gradients whose addresses are in the table
        )
        # the gradients that a step that is ready has the addresses of
        self.alive: Sequence[Any] = []

    @abstractmethod
    def compile(self, kind: Kind) -> Code:
        """The compiled code of the plan, for parameters and gradients of these dtypes."""

    def about(self, kind: Kind) -> str:
        """What is compiled, for a message."""
        return f"{type(self.bucket.rule).__name__} for {kind.dtype}"

    def put(self, name: str, values: Any, rows: Any = slice(None)) -> None:
        """Fill in a column, for some rows."""
        self.table[rows, self.column[name]] = values

    def _vectors(self) -> dict[str, str]:
        """In which room each vector and each reduction's partial results lie, by the column that
        says where.
        """
        vectors = {f"VEC{i}": "work" for i in range(len(self.where.vectors))}
        kinds = self.where.partials.values()
        return vectors | {
            f"PART{i}": "work" if x in ("row", "column") else "part" for i, x in enumerate(kinds)
        }

    def _rooms(self, rows: Ints, threads: int) -> tuple[Any, Any]:
        """Room for the values between the passes of any of these tensors, and for partial sums."""
        need = (
            (self.room["work"] + threads * self.own)[rows].max(initial=0),
            self.room["part"][rows].max(initial=0),
        )
        return np.empty(need[0], self.compiled.real), np.empty(need[1])

    def prepare(self, rows: Rows, grads: Sequence[Array | None], asked: Asked) -> None:
        """See `Batch.prepare`."""
        super().prepare(rows, grads, asked)
        full = rows.full if self.cut is None else self.held(rows).full
        self.alive = self._bind_grads(full, grads) if len(full) else []
        if self.cut is not None:
            self.cut.shift_grads(full, grads)

    def launch(self, rows: Rows, grads: Sequence[Array | None], threads: int) -> None:
        """See `Batch.launch`."""
        if not len(rows.full):
            return
        with one_thread() if self.multiplies else _NOTHING:
            self._loop(rows, threads)
        if self.copies:
            self.write_back()
        self.alive = []

    def passes(
        self, rows: Rows, grads: Sequence[Array | None], threads: int
    ) -> Iterator[list[Partials]]:
        """See `Batch.passes`."""
        assert self.cut is not None
        if len(rows.full):
            yield from self.cut.passes(rows, threads)
        self.alive = []

    def allocate(self, rows: Rows, threads: int) -> None:
        """See `Batch.allocate`. What does not lie in memory as it must is copied, and written back
        from the copy.
        """
        if self.cut is None and len(rows.full):
            shares = self._share(rows, threads)
            if self.plan.spilled:
                self._scratch(*shares[:2])
        self.copies = []
        if not self.staged:
            return
        here = rows if self.cut is None else self.held(rows)
        chosen = set(here.full.tolist())
        for row, name in self.staged:
            if row in chosen:
                if name in self.widens:
                    copy = np.ascontiguousarray(self.wide(row, name))
                else:
                    copy = np.array(memory(self.stored(row, name)), order="C", copy=True)
                self.copies.append((row, name, copy))
                before = 0 if self.cut is None else self.cut.before(row, name, copy.itemsize)
                self.put(f"AT_{name}", copy.ctypes.data - before, row)

    def write_back(self) -> None:
        """Write what was computed in copies to where it belongs."""
        copies, self.copies = self.copies, []
        for row, name, copy in copies:
            if name in self.plan.written:
                (self.put_wide if name in self.widens else self.replace)(row, name, copy)

    def bind(self) -> None:
        """See `Batch.bind`."""
        self.staged = []
        for name in self.plan.touched:
            for row in range(len(self.tensors)):
                x = self.stored(row, name)
                # memory of a scalar is a copy
                copied = name in self.widens or isinstance(x, np.generic)
                if not copied and plain(memory(x)):
                    self.put(f"AT_{name}", memory(x).ctypes.data, row)
                else:
                    self.staged.append((row, name))
        if self.cut is not None:
            self.cut.shift()

    def _bind_grads(self, rows: Ints, grads: Sequence[Array | None]) -> Sequence[Any]:
        """Put the gradients' addresses into the table; what is returned must live until they have
        been used.
        """
        if isinstance(grads, Split):
            return self._bind_stacks(rows, grads)
        if self._put_known(rows, grads):
            return grads
        given = list(chosen(grads, rows))
        kinds = set(map(type, given))
        if all(hasattr(kind, "data_ptr") for kind in kinds):
            return self._bind_tensors(rows, given)
        # a NumPy scalar has no such head
        if not all(issubclass(kind, np.ndarray) for kind in kinds):
            given = list(map(memory, given))
        column = self.column["AT_g"]
        if len(given) <= FEW:
            given = [x if x.flags.carray else np.require(x, requirements=["C", "A"]) for x in given]
            self.table[rows, column] = [x.__array_interface__["data"][0] for x in given]
            return given
        self.table[rows, column] = np.fromiter(map(id, given), np.int64, len(given))
        self.compiled.bind(self.table, self.scalars, self.values, *self.nothing, rows)(-1, 0, 0, 1)
        if self.table[rows[0], column] not in (0, given[0].ctypes.data):
            raise RuntimeError(
                "NumPy's arrays are not laid out in memory as compiled code knows them; use"
                " engine='array_api'"
            )
        for i in np.flatnonzero(self.table[rows, column] == 0).tolist():
            given[i] = np.require(given[i], requirements=["C", "A"])
            self.table[rows[i], column] = given[i].ctypes.data
        return given

    def _bind_stacks(self, rows: Ints, grads: Split) -> Sequence[Any]:
        """As `_bind_grads`, for layers, which lie in stacks."""
        given, ends = [], np.cumsum([0, *grads.counts])
        addresses = np.zeros(ends[-1], np.int64)
        for at, stack in enumerate(grads.stacks):
            if stack is not None:
                given.append(np.require(memory(stack), requirements=["C", "A"]))
                count = grads.counts[at]
                layers = np.arange(count) * (given[-1].nbytes // count)
                addresses[ends[at] : ends[at + 1]] = given[-1].ctypes.data + layers
        self.put("AT_g", addresses[rows], rows)
        return given

    def _put_known(self, rows: Ints, grads: Sequence[Array | None]) -> bool:
        """Put the gradients' addresses into the table if they are known, and no gradient must be
        copied.

        Those that the last step has put there are not put there again.
        """
        found = grads.locations if isinstance(grads, LocatedGrads) else None
        last, self.put_last = self.put_last, None
        if found is None or len(found.addresses) != len(rows):
            return False
        if last is None or last[0] is not rows or not _same(last[1], found):
            in_order = np.asarray(found.contiguous) & 1
            addresses = np.asarray(found.addresses)
            if not in_order.all() or (addresses % self.grad_bytes).any():
                return False
            self.put("AT_g", addresses, rows)
        if self.cut is None:  # which shifts them
            self.put_last = rows, found
        return True

    def _bind_tensors(self, rows: Ints, given: list[Array]) -> list[Array]:
        """As `_bind_grads`, for tensors of PyTorch, which tell their addresses themselves."""
        at = np.array([x.data_ptr() if x.is_contiguous() else 0 for x in given], np.int64)
        at[at % given[0].element_size() != 0] = 0  # such lie in memory that NumPy gave
        for i in np.flatnonzero(at == 0).tolist():
            given[i] = np.require(memory(given[i]), requirements=["C", "A"])
            at[i] = given[i].ctypes.data
        self.put("AT_g", at, rows)
        return given

    def _share(self, rows: Rows, threads: int) -> tuple[Any, ...]:
        """Divide the rows: those that all threads share, for each thread its own, and the calls for
        either.
        """
        if rows.kept is None or rows.kept[0] != threads:
            full, asked = rows.full, threads
            sizes = self.loads[full]
            total = int(sizes.sum())
            if total <= ALONE:
                threads = 1
            least = SHARED * (len(self.plan.passes) if self.multiplies else 1)
            big = (threads > 1) & (sizes > max(least, total // (4 * threads)))
            own_rows = [x for x in divide(full[~big], sizes[~big] + 64, threads) if len(x)]
            rest, stages = (self.table, self.scalars, self.values), self.stages[-1] + 1
            room = self._rooms(full[big], threads)
            shared = [self.compiled.bind(*rest, *room, np.array([row])) for row in full[big]]
            own = [self.compiled.bind(*rest, *self._rooms(some, 1), some) for some in own_rows]
            rows.kept = (
                asked,
                full[big],
                own_rows,
                shared,
                [partial(call, 0, stages, 0, 1) for call in own],
            )
        return rows.kept[1:]  # type: ignore[no-any-return]

    def _scratch(self, shared: Ints, own: list[Ints]) -> None:
        """Put the addresses of scratch memory into the table: room for one tensor of each thread,
        or a shared one.
        """
        for name, kind in self.plan.spilled.items():
            sizes = extent(self.plan.extents[name], self.geo)
            largest = max((int(sizes[rows].max(initial=0)) for rows in own), default=0)
            need = max(len(own) * largest, int(sizes[shared].max(initial=0)))
            if name not in self.scratch or self.scratch[name].size < need:
                wide = (
                    np.result_type(self.compiled.real, np.complex64)
                    if kind == "complex"
                    else self.compiled.real
                )
                self.scratch[name] = np.empty(need, wide)
            room = self.scratch[name]
            self.put(f"AT_{name}", room.ctypes.data, shared)
            for i, rows in enumerate(own):
                self.put(f"AT_{name}", room.ctypes.data + i * largest * room.itemsize, rows)

    def _loop(self, rows: Rows, threads: int) -> None:
        """All passes: over what threads share, meeting after each, then over what is each one's
        own.
        """
        *_, shared, own = self._share(rows, threads)
        for call in shared:
            for stage in self.stages:
                n = threads if stage % 2 else 1
                run([partial(call, stage, stage + 1, i, n) for i in range(n)])
        if own:
            run(own)


def _same(one: Locations, other: Locations) -> bool:
    """Whether arrays, as many, lie in the same places, in the same order."""
    if type(one.addresses) is not type(other.addresses):
        return False
    if isinstance(one.addresses, list):
        return one == other
    return bool(
        (one.addresses == other.addresses).all() and (one.contiguous == other.contiguous).all()
    )


def divide(rows: Ints, loads: Ints, parts: int) -> list[Ints]:
    """Rows in parts of about the same load: large ones one by one, and of the small ones a run for
    each part.

    What lies side by side is best worked through by the same thread, for its processor fetches
    ahead.
    """
    small = loads <= loads.sum() // (64 * parts)
    large: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, i) for i in range(parts)]
    for row, n in sorted(
        zip(rows[~small].tolist(), loads[~small].tolist(), strict=True), key=lambda x: -x[1]
    ):
        least, i = heapq.heappop(heap)
        large[i].append(row)
        heapq.heappush(heap, (least + n, i))
    taken = np.array([n for n, _ in sorted(heap, key=lambda x: x[1])])
    room = np.maximum(loads.sum() / parts - taken, 0.0)
    cuts = np.searchsorted(np.cumsum(loads[small]), np.cumsum(room)[:-1])
    runs = np.split(rows[small], cuts)
    return [
        np.array(sorted([*some, *run]), np.int64) for some, run in zip(large, runs, strict=True)
    ]
