"""The Numba engine: a plan as fused loops in machine code, over tables of tensors, on all cores."""

import functools
import heapq
import operator
from collections.abc import Sequence
from pickle import UnpicklingError
from typing import Any

import numpy as np
from numba.core.errors import NumbaError

from arrayopt.arrays import Array, dtype_name
from arrayopt.engines.base import Bucket
from arrayopt.engines.batches import Batch, Fused, Ints, plain
from arrayopt.engines.compiled import converts_float16, forget, load
from arrayopt.engines.threads import run
from arrayopt.fusion.emit_numba import emit
from arrayopt.fusion.layout import GEOMETRY
from arrayopt.fusion.plan import Plan

__all__ = ["Numba"]

PACKED = 4096
"""Gradients of up to so many elements are copied together first: cheaper than asking each for its address."""

SHARED = 1 << 18
"""So many elements a thread are worth a meeting of all threads; tensors of fewer are one thread's."""

ALONE = 1 << 15
"""Up to so many elements in all, one thread is quicker than several."""


class _Table(Batch):
    """Tensors as a table of sizes, addresses and offsets, and the compiled module that works through it."""

    def __init__(self, plan: Plan, dtype: str, grad_dtype: str, bucket: Bucket, members: list[int]) -> None:
        super().__init__(plan, bucket, members)
        self.module = module = load(lambda cache: emit(plan, dtype, grad_dtype, cache=cache))
        names = ["p", "g", *plan.slots]
        lengths = self.where.lengths(plan, self.geo)
        self.at = {name: len(GEOMETRY) + i for i, name in enumerate(names)}
        self.table: Ints = np.zeros((len(members), len(GEOMETRY) + len(names) + lengths.shape[1]), np.int64)
        self.table[:, : len(GEOMETRY)] = self.geo
        rooms = {"work": 0, "part": 0}
        for j, kind in enumerate([*("row" for _ in self.where.vectors), *self.where.partials.values()]):
            room = "work" if kind in ("row", "column") else "part"
            ends = np.cumsum(lengths[:, j])
            self.table[:, len(GEOMETRY) + len(names) + j] = rooms[room] + ends - lengths[:, j]
            rooms[room] += int(ends[-1])
        self.work = np.empty(rooms["work"], module.W)
        self.part = np.empty(rooms["part"])
        self.few = self.geo[:, 0] <= PACKED
        self.packed = np.empty(0)
        self.held: list[Any] = []
        self.staged: list[tuple[int, str]] = []
        busy = [bool(part) or (k > 0 and bool(plan.passes[k - 1].sums)) for k, part in enumerate(plan.prologues)]
        busy[-1] |= bool(plan.small)
        self.stages = [k for k in range(2 * len(busy) - 1) if k % 2 or busy[k // 2]]
        try:
            self._compile()
        except NumbaError as error:
            raise ValueError(
                f"engine 'numba' cannot compile {type(bucket.rule).__name__}; use another: {error}"
            ) from error
        except (EOFError, UnpicklingError):  # what Numba has kept is damaged
            forget(module)
            self.module = load(lambda cache: emit(plan, dtype, grad_dtype, cache=cache))
            self._compile()
        self.shares: dict[Any, tuple[Ints, list[Ints]]] = {}

    def _compile(self) -> None:
        """Have everything compiled, or read from disk, before anything is written."""
        rest = (self.table, self.scalars, self.values, self.work, self.part)
        self.module.run(np.zeros(0, np.int64), 0, 0, 0, 1, *rest)

    def run(self, rows: Ints, grads: Sequence[Array | None], threads: int) -> None:
        """See `Batch.run`."""
        self._bind()
        alive = self._bind_grads(rows, grads)
        chosen, copies = set(rows.tolist()), []
        for row, name in self.staged:
            if row in chosen:
                copies.append((row, name, np.array(self.stored(row, name), order="C", copy=True)))
                self.table[row, self.at[name]] = copies[-1][2].ctypes.data
        self._loop(rows, threads)
        for row, name, copy in copies:
            self.replace(row, name, copy)
        del alive

    def _bind(self) -> None:
        """Put the addresses of parameters and slots into the table, where they are other arrays than last time."""
        now: list[Any] = [x.array for x in self.tensors]
        now += [x.slots for x in self.tensors]
        if len(now) == len(self.held) and all(map(operator.is_, now, self.held)):
            return
        self.held, self.staged = now, []
        for name in self.plan.touched:
            for row in range(len(self.tensors)):
                x = self.stored(row, name)
                if plain(x):
                    self.table[row, self.at[name]] = x.ctypes.data
                else:
                    self.staged.append((row, name))

    def _bind_grads(self, rows: Ints, grads: Sequence[Array | None]) -> list[Array]:
        """Put the gradients' addresses into the table; what is returned must live until they have been used."""
        column, small = self.at["g"], rows[self.few[rows]]
        if len(small):
            little: list[Any] = [grads[i] for i in small.tolist()]
            sizes = self.table[small, 0]
            ends = np.cumsum(sizes)
            if self.packed.size < ends[-1]:
                self.packed = np.empty(ends[-1], little[0].dtype)
            np.concatenate(little, axis=None, out=self.packed[: ends[-1]])
            self.table[small, column] = self.packed.ctypes.data + (ends - sizes) * self.packed.itemsize
        kept = []
        for row in rows[~self.few[rows]].tolist():
            g = np.ascontiguousarray(grads[row])
            kept.append(g)
            self.table[row, column] = g.ctypes.data
        return kept

    def _share(self, rows: Ints, threads: int) -> tuple[Ints, list[Ints]]:
        """Sort rows out: those that all threads share, and for each thread those that are its own."""
        key = (threads, rows.tobytes())
        if key not in self.shares:
            sizes = self.table[rows, 0]
            total = int(sizes.sum())
            if threads == 1 or total <= ALONE:
                return rows[:0], [rows]
            big = sizes > max(SHARED, total // (4 * threads))
            loads = [(0, i) for i in range(threads)]
            own: list[list[int]] = [[] for _ in range(threads)]
            for row, n in sorted(zip(rows[~big].tolist(), sizes[~big].tolist(), strict=True), key=lambda x: -x[1]):
                least, i = heapq.heappop(loads)
                own[i].append(row)
                heapq.heappush(loads, (least + n + 64, i))
            self.shares = {key: (rows[big], [np.array(sorted(x), np.int64) for x in own])}
        return self.shares[key]

    def _loop(self, rows: Ints, threads: int) -> None:
        """All passes: over what threads share, meeting after each, then over what is each one's own."""
        shared, own = self._share(rows, threads)
        rest = (self.table, self.scalars, self.values, self.work, self.part)
        for row in shared:
            for stage in self.stages:
                n, alone = threads if stage % 2 else 1, np.array([row])
                run([functools.partial(self.module.run, alone, stage, stage + 1, i, n, *rest) for i in range(n)])
        stages = 2 * len(self.plan.passes) + 1
        tasks = [functools.partial(self.module.run, x, 0, stages, 0, 1, *rest) for x in own if len(x)]
        if tasks:
            run(tasks)


class Numba(Fused):
    """Fused loops in machine code; results do not depend on the number of threads."""

    name = "numba"
    batch = _Table

    def check(self, bucket: Bucket) -> None:
        """See `Engine.check`."""
        super().check(bucket)
        if dtype_name(bucket.tensors[0].array) == "float16" and not converts_float16():
            raise ValueError("it needs a processor that converts float16 (F16C)")

    def describe(self) -> str:
        """See `Fused.describe`."""
        return "fused loops"
