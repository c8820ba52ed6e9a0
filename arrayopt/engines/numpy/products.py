"""The NumPy engine on plans with products of matrices: tensors of equal shape in a stack, and BLAS among the passes.

All arrays are of rank 5: the tensors of the stack, then their axes A, B, R and C; of length one where a value is the
same along an axis.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from arrayopt.arrays import REAL, WORKING, Array, Ints
from arrayopt.engines.batch import Batch, Rows, plain
from arrayopt.engines.blas import BAND, bands, one_thread
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.numpy.buffers import buffers_of
from arrayopt.engines.numpy.lanes import positions
from arrayopt.engines.numpy.program import program
from arrayopt.engines.threads import run
from arrayopt.fusion.graph import POSITION, Node
from arrayopt.fusion.lanes import Lanes
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.stages import Sweep, staged

__all__ = ["Stacks"]

BLOCK = 1 << 17
"""Elements of a stack in which there is more than one tensor, and of what a pass takes at once."""

DIMS = {x: i + 1 for i, x in enumerate("ABRC")} | {"r": 4, "c": 4}
"""Which dimension an axis is; of a product of a matrix with itself, the second axis is the last dimension."""


def _dims(axes: str) -> list[int]:
    """The dimensions that axes are; columns are those of rows where there are no rows."""
    return [3 if x == "C" and "c" in axes else DIMS[x] for x in axes]


class Stacks(Batch):
    """Tensors whose plan has products."""

    chunk = BLOCK

    def __init__(
        self, plan: Plan, split: Lanes | None, dtype: str, grad_dtype: str, bucket: Bucket, members: list[int]
    ) -> None:
        super().__init__(plan, split, bucket, members)
        self.real = np.dtype(REAL.get(WORKING[dtype], WORKING[dtype]))
        storage = tuple(({"g": grad_dtype} | plan.storage).items())
        self.programs = [None if p.multiplies else program(p, storage) for p in staged(plan).passes]
        self.scratch = threading.local()

    def launch(self, rows: Rows, grads: Sequence[Array | None], threads: int) -> None:
        """See `Batch.launch`."""
        alone: list[list[int]] = []
        tasks: list[list[int]] = []
        for members in self._stacks(rows.full.tolist()):
            large = threads > 1 and self.geo[members[0], 0] > BLOCK
            (alone if large else tasks).append(members)
        with one_thread():
            for members in alone:
                self._stack(members, grads, threads)
            todo = deque(tasks)

            def work() -> None:
                while True:
                    try:
                        members = todo.popleft()
                    except IndexError:
                        return
                    self._stack(members, grads, 1)

            run([work] * min(threads, len(tasks)))

    def _stacks(self, rows: list[int]) -> list[list[int]]:
        """Tensors of equal shape, in stacks that stay in cache, those of most work first."""
        found: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            found.setdefault(self.tensors[row].shape, []).append(row)
        made = []
        for shape, members in found.items():
            most = max(1, BLOCK // math.prod(shape))
            made += [members[i : i + most] for i in range(0, len(members), most)]
        return sorted(made, key=lambda x: -len(x) * math.prod(self.tensors[x[0]].shape))

    def _stack(self, members: list[int], grads: Sequence[Array | None], threads: int) -> None:
        """All passes and products over a stack."""
        a, b, r, c = (int(x) for x in self.geo[members[0], 1:5])
        stack = _Stack(self, (len(members), a, b, r, c), self.firsts[members], threads)
        element, slots = self.plan.element, self.plan.slots
        axes = {name: slots.get(name, element) for name in self.plan.touched}
        stored = {name: [np.asarray(self.stored(row, name)) for row in members] for name in axes}
        inside = len(members) == 1 and all(plain(x) for (x,) in stored.values())
        whole = {name: x[0] if inside else np.stack(x) for name, x in stored.items()}
        arrays = {name: x.reshape(stack.shape(axes[name])) for name, x in whole.items()}
        given = [np.asarray(grads[row]) for row in members]
        arrays["g"] = (given[0] if len(given) == 1 else np.stack(given)).reshape(stack.shape(element))
        known: dict[Node, Any] = {}
        for i, n in enumerate(self.plan.scalars):
            column = self.scalars[members, i].astype(bool if n.dtype == "bool" else float)
            known[n] = column[0].item() if (column == column[0]).all() else column.reshape(-1, 1, 1, 1, 1)
        stack.run(arrays, known)
        for n, i in self.where.tensor.items():
            self.values[members, i] = np.ravel(known[n])
        for name in [] if inside else self.plan.written:
            for row, old, new in zip(members, stored[name], arrays[name], strict=True):
                if plain(old):
                    old[...] = new.reshape(old.shape)
                else:
                    self.replace(row, name, new.reshape(old.shape))


class _Stack:
    """A step of a stack.

    Parameters
    ----------
    of : Stacks
        The batch that it is of.
    extents : tuple of int
        Tensors, and the lengths of A, B, R and C.
    firsts : array of int64
        The position of each tensor's first element.
    threads : int
        How many threads share each pass.
    """

    def __init__(self, of: Stacks, extents: tuple[int, int, int, int, int], firsts: Ints, threads: int) -> None:
        self.plan, self.form, self.programs, self.scratch = of.plan, staged(of.plan), of.programs, of.scratch
        self.extents, self.real, self.threads = extents, of.real, threads
        self.firsts = firsts.reshape(-1, 1, 1, 1, 1)

    def shape(self, axes: str) -> tuple[int, ...]:
        """The shape of values over some axes."""
        out = [self.extents[0], 1, 1, 1, 1]
        for x, i in zip(axes, _dims(axes), strict=True):
            out[i] = self.extents[DIMS[x.upper()]]
        return tuple(out)

    @np.errstate(all="ignore")
    def run(self, arrays: dict[str, Any], known: dict[Node, Any]) -> None:
        """All passes and products over arrays by name, with the scalars of the step; what is computed is added."""
        kinds, axes = self.plan.spilled, self.plan.extents
        sizes = [math.prod(self.shape(axes[name])) for name in kinds]
        rooms = buffers_of(kinds.values(), self.real, max(sizes, default=0), self.scratch)
        arrays |= {name: x[:n].reshape(self.shape(axes[name])) for name, x, n in zip(kinds, rooms, sizes, strict=True)}
        parts: dict[Node, Any] = {}
        for k, between in enumerate(self.form.between):
            for r in between.combine:
                known[r] = parts[r]
            for n in between.nodes:
                known[n] = self._small(n, [self._value(a, arrays, known) for a in n.args])
            if k < len(self.form.passes):
                p = self.form.passes[k]
                parts = self._multiply(p, arrays) if p.multiplies else self._pass(k, p, arrays, known)
        for name, n in between.stores.items():
            arrays[name][...] = self._value(n, arrays, known)

    def _value(self, n: Node, arrays: dict[str, Any], known: dict[Node, Any]) -> Any:
        return n.data if n.op == "const" else known[n] if n in known else arrays[n.data]

    def _small(self, n: Node, args: list[Any]) -> Any:
        """A value over fewer axes than the elements; those per tensor are in float64."""
        if n.reduces:
            over = tuple(_dims("".join(x for x in n.args[0].axes if x not in n.axes)))
            made = REDUCTIONS[n.op].ufunc.reduce(args[0], axis=over, keepdims=True)
        else:
            made = OPS[n.op].numpy(*args)
        return made.astype(self.real, copy=False) if n.axes and n.dtype == "real" else made

    def _shared(self, tasks: list[Callable[[], None]]) -> None:
        """Run tasks, which take about as long as each other, on all threads."""
        threads = min(self.threads, len(tasks))

        def some(i: int) -> None:
            with np.errstate(all="ignore"):
                for task in tasks[i::threads]:
                    task()

        run([partial(some, i) for i in range(threads)])

    def _multiply(self, p: Sweep, arrays: dict[str, Any]) -> dict[Node, Any]:
        """A product: at once where the matrices are small, else in bands of rows."""
        (n,), names = p.nodes, list(p.loads)
        operands = zip((names[0], names[-1]), n.data, strict=False)
        a, b = (arrays[name].mT if turned else arrays[name] for name, turned in operands)
        out = arrays[next(iter(p.stores))]

        def band(lo: int, hi: int) -> None:
            end = hi if n.data[2] else out.shape[-1]
            np.matmul(a[..., lo:hi, :], b[..., :end], out=out[..., lo:hi, :end])
            if n.data[2]:
                out[..., :lo, lo:hi] = out[..., lo:hi, :lo].mT

        rows = out.shape[-2]
        self._shared([partial(band, lo, hi) for lo, hi in (bands(rows) if rows > BAND else [(0, rows)])])
        return {}

    def _pass(self, k: int, p: Sweep, arrays: dict[str, Any], known: dict[Node, Any]) -> dict[Node, Any]:
        """A pass in blocks of rows; what it reduces."""
        prog = self.programs[k]
        assert prog is not None
        shape = self.shape(p.axes)
        rows = max(1, BLOCK // max(1, math.prod(shape) // shape[3]))
        cuts = [slice(lo, min(shape[3], lo + rows)) for lo in range(0, shape[3], rows)]
        got: dict[Node, list[Any]] = {r: [None] * len(cuts) for r in p.reductions}
        spread = {n: self._real(self._value(n, arrays, known)) for n in prog.small if n.op != POSITION}

        def some(i: int, cut: slice) -> None:
            block = {name: arrays[name][..., cut, :] for name in p.arrays}
            env = {n: x[..., cut, :] if np.ndim(x) and x.shape[3] > 1 else x for n, x in spread.items()}
            here = (*shape[:3], cut.stop - cut.start, shape[4])
            for n in p.using(POSITION):
                cuts = [*(slice(0, length) for length in shape[:3]), cut, slice(0, shape[4])]
                env[n] = positions(cuts, (0, *(math.prod(shape[i:]) for i in (2, 3, 4)), 1), self.firsts)
            count = math.prod(here)
            room = [x[:count].reshape(here) for x in buffers_of(prog.buffers, self.real, count)]
            made = prog.run(block, env, room, self.real, lambda r, x: self._reduced(r, np.broadcast_to(x, here)))
            for r, x in made.items():
                got[r][i] = x

        self._shared([partial(some, i, cut) for i, cut in enumerate(cuts)])
        return {r: self._joined(r, x) for r, x in got.items()}

    def _real(self, x: Any) -> Any:
        """A value as passes take it in: numbers stay numbers, arrays are in the dtype of arithmetic."""
        return x.astype(self.real, copy=False) if isinstance(x, np.ndarray) and x.dtype != bool else x

    def _reduced(self, r: Node, x: Any) -> Any:
        """A reduction of a block."""
        reduce = REDUCTIONS[r.op].ufunc.reduce
        if r.axes == "":
            return reduce(x.reshape(len(x), -1), axis=1).astype(np.float64).reshape(-1, 1, 1, 1, 1)
        gone = tuple(i for i in range(1, 5) if i not in _dims(r.axes))
        return reduce(x, axis=gone, keepdims=True)

    def _joined(self, r: Node, parts: list[Any]) -> Any:
        """A reduction from those of the blocks, in their order."""
        if "R" in r.axes:
            return np.concatenate(parts, axis=3)
        return REDUCTIONS[r.op].ufunc.reduce(parts, axis=0) if len(parts) > 1 else parts[0]
