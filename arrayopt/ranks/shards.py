"""Parts of tensors that the user gave: which rank has which, and whether they can be run."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import dtype_name
from arrayopt.engines.buckets import bucketed
from arrayopt.engines.fused import Fused
from arrayopt.engines.table import select
from arrayopt.fusion.layout import CHUNK
from arrayopt.fusion.plan import plan_for
from arrayopt.params.groups import Group
from arrayopt.state.run import Run
from arrayopt.state.tensors import Shards, Tensor

__all__ = ["check_parts", "shards"]


def check_parts(groups: Sequence[Group], engine: str) -> None:
    """Raise ValueError for parts that no engine can run; `engine` is what the user asked for."""
    for bucket in bucketed(groups, Run()):
        for tensor in bucket.whole.tensors:
            if tensor.block is None:
                continue
            who = f"Optimizer: {tensor.name!r} is a part of a tensor, which"
            if bucket.rule.stacked:
                raise ValueError(f"{who} cannot be under a rule with stacked=True; give the layers one by one")
            chosen, why = select(engine, bucket)
            if not isinstance(chosen, Fused) or not chosen.cuts:
                raise ValueError(
                    f"{who} engine 'numba' takes, of NumPy and of PyTorch on a CPU; got {chosen.name!r} ({why})"
                )
            for stats in (False, True):
                rank, dtype = len(tensor.shape), dtype_name(tensor.array)
                plan = plan_for(bucket.rule, rank, dtype, shape=tensor.shape, stats=stats, lean=chosen.lean)
                name = type(bucket.rule).__name__
                if plan.draws and tensor.block.first(tuple(tensor.array.shape)) is None:
                    raise ValueError(
                        f"{who} {name} cannot take with these fields: random numbers go by elements' positions,"
                        " and those of the part are not one stretch of the tensor; cut the first axis only"
                    )
                if plan.element != "C":
                    raise ValueError(
                        f"{who} {name} cannot take with these fields: it has sums over rows or columns, and a part may"
                        " have pieces of these; give whole tensors, and `comm`"
                    )


def shards(tensor: Tensor, rank: int, every: Sequence[Any]) -> Shards:
    """The parts of a tensor.

    Parameters
    ----------
    tensor : Tensor
        The tensor, of which this rank has a part.
    rank : int
        This rank.
    every : sequence of (offset, shape, checksum)
        Each rank's part.

    Raises
    ------
    ValueError
        If the parts do not fill the tensor, or lie on each other, or those of one place have other values.
    """
    blocks = tuple((tuple(offset), tuple(shape)) for offset, shape, _ in every)
    first: dict[Any, tuple[int, Any]] = {}
    for r, (block, (*_, checksum)) in enumerate(zip(blocks, every, strict=True)):
        before, other = first.setdefault(block, (r, checksum))
        if checksum != other:
            raise ValueError(
                f"Optimizer: ranks {before} and {r} have the same part of {tensor.name!r}, but other values in it"
            )
    at: dict[Any, int] = {}
    ends, starts = [0], []
    for block in blocks:
        n = int(np.prod(block[1]))
        new = n > 0 and block not in at
        if new:
            at[block] = ends[-1]
        starts.append(at.get(block, 0))
        ends.append(ends[-1] + (-(-n // CHUNK) * CHUNK if new else 0))
    if not _fill(list(at), tensor.shape):
        raise ValueError(
            f"Optimizer: the parts of {tensor.name!r} must fill a tensor of shape {tensor.shape}, each place once; got"
            f" {', '.join(f'{shape} from {offset} on' for offset, shape in at)}"
        )
    return Shards(rank, tuple(ends), (), blocks, tuple(starts))


def _fill(blocks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> bool:
    """Whether blocks fill a shape, each place once."""
    if sum(int(np.prod(n)) for _, n in blocks) != int(np.prod(shape)):
        return False
    for i, (a, n) in enumerate(blocks):
        for b, m in blocks[:i]:
            if all(x < y + q and y < x + p for x, p, y, q in zip(a, n, b, m, strict=True)):
                return False
    return True
