"""Parts of tensors that the user gave: which rank has which, and whether they can be run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arrayopt.arrays import dtype_name
from arrayopt.engines.buckets import bucketed
from arrayopt.engines.fused import Fused
from arrayopt.engines.table import select
from arrayopt.fusion.layout import CHUNK, geometry
from arrayopt.fusion.plans import plan_for
from arrayopt.fusion.windows import axes_of, windows
from arrayopt.params.groups import Group
from arrayopt.state.run import Run
from arrayopt.state.shares import Shards
from arrayopt.state.tensors import Tensor

__all__ = ["check_parts", "fill", "shards"]


@dataclass(frozen=True)
class Needs:
    """What a rule asks of the parts of a tensor.

    Attributes
    ----------
    elements : set of str
        The axes of an element, as the rule's plans see them.
    spans : dict of str to tuple of int
        The slots of fewer elements than the parameter, and the axes of the tensor that each goes over.
    """

    elements: set[str]
    spans: dict[str, tuple[int, ...]]


def check_parts(groups: Sequence[Group], engine: str) -> dict[str, Needs]:
    """What is asked of the parts of each tensor.

    Raises
    ------
    ValueError
        For parts that no engine can run; `engine` is what the user asked for.
    """
    found: dict[str, Needs] = {}
    for bucket in bucketed(groups, Run()):
        for tensor in bucket.whole.tensors:
            if tensor.block is None:
                continue
            who = f"Optimizer: {tensor.name!r} is a part of a tensor, which"
            if bucket.rule.stacked:
                raise ValueError(
                    f"{who} cannot be under a rule with stacked=True; give the layers one by one"
                )
            chosen, why = select(engine, bucket)
            if not isinstance(chosen, Fused) or not chosen.parts:
                raise ValueError(
                    f"{who} engines 'numba', 'cpp' and 'cupy' take; got {chosen.name!r} ({why})"
                )
            if bucket.rule.branches:
                raise ValueError(
                    f"{who} {type(bucket.rule).__name__} cannot take: it makes some updates as they are written, on"
                    " whole tensors; give these, and `comm`"
                )
            rank, dtype = len(tensor.shape), dtype_name(tensor.array)
            plans = [
                plan_for(bucket.rule, rank, dtype, shape=tensor.shape, stats=x, lean=chosen.lean)
                for x in (False, True)
            ]
            if any(plan.multiplies for plan in plans):
                raise ValueError(
                    f"{who} {type(bucket.rule).__name__} cannot take: it multiplies whole matrices; give these, and"
                    " `comm`"
                )
            stretch = tensor.block.first(tuple(tensor.array.shape)) is not None
            if any(plan.draws and plan.element == "C" for plan in plans) and not stretch:
                raise ValueError(
                    f"{who} {type(bucket.rule).__name__} cannot take with these fields: random numbers go by elements'"
                    " positions, and those of the part are not one stretch of the tensor; cut the first axis only"
                )
            letters = axes_of(tensor.shape, plans[0].element)
            found[tensor.name] = Needs(
                {plan.element for plan in plans},
                {
                    name: tuple(i for i, x in enumerate(letters) if x in axes)
                    for name, axes in plans[0].slots.items()
                    if axes != plans[0].element
                },
            )
    return found


def shards(tensor: Tensor, rank: int, every: Sequence[Any], needs: Needs) -> Shards:
    """The parts of a tensor.

    Parameters
    ----------
    tensor : Tensor
        The tensor, of which this rank has a part.
    rank : int
        This rank.
    every : sequence of (offset, shape, checksum)
        Each rank's part.
    needs : Needs
        What the tensor's rule asks of them.

    Raises
    ------
    ValueError
        If the parts do not fill the tensor, or lie on each other, or those of one place have other values, or they are
        not cut along whole rows and columns, where they must be.
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
    if not fill(list(at), tensor.shape):
        raise ValueError(
            f"Optimizer: the parts of {tensor.name!r} must fill a tensor of shape {tensor.shape}, each place once; got"
            f" {', '.join(f'{shape} from {offset} on' for offset, shape in at)}"
        )
    found = Shards(rank, tuple(ends), tuple(needs.spans), blocks, tuple(starts), needs.spans)
    for element in needs.elements - {"C"} if found.kind == "cut" else ():
        try:
            windows(blocks, tensor.shape, element, geometry([tensor.shape], element)[0])
        except ValueError as error:
            raise ValueError(f"Optimizer: {tensor.name!r} {error}") from None
    return found


def fill(blocks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> bool:
    """Whether blocks fill a shape, each place once."""
    if sum(int(np.prod(n)) for _, n in blocks) != int(np.prod(shape)):
        return False
    for i, (a, n) in enumerate(blocks):
        for b, m in blocks[:i]:
            if all(x < y + q and y < x + p for x, p, y, q in zip(a, n, b, m, strict=True)):
                return False
    return True
