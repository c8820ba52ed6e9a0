"""Arrays that are parts of larger tensors, whose other parts are on other ranks: `Part`, and DTensor of PyTorch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from arrayopt.arrays import Array, is_array
from arrayopt.params.trees import flatten, rebuild
from arrayopt.state.shares import Block

__all__ = ["Part", "block_of", "has_parts", "local", "localized", "mesh_of", "strays", "with_array"]

KEPT = 4096
"""So many layouts of DTensors are remembered."""


@dataclass(frozen=True, eq=False)
class Part:
    """An array that is a part of a larger tensor: what this rank has of it. Norms are those of the whole tensor.

    Parameters
    ----------
    array : array
        This rank's part, which is updated in place.
    offset : sequence of int
        Where in the whole tensor the part begins, along each axis.
    shape : sequence of int
        The shape of the whole tensor. The parts of all ranks fill it; ranks may have the same one, or none of it.

    Raises
    ------
    TypeError, ValueError
        If the part does not lie within the tensor.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> def train(comm):  # the upper half on rank 0, the lower on rank 1
    ...     half = ao.Part(np.ones((2, 3)), offset=(2 * comm.rank, 0), shape=(4, 3))
    ...     opt = ao.Optimizer({"w": half}, ao.LARS(lr=0.1), comm=comm, engine="numba")
    ...     opt.step({"w": np.ones((2, 3))})
    ...     return half.array.round(4)[0, 0]
    >>> [float(x) for x in ao.ranks.run(2, train)]
    [0.9999, 0.9999]
    """

    array: Array
    offset: Sequence[int]
    shape: Sequence[int]

    def __post_init__(self) -> None:
        if not is_array(self.array):
            raise TypeError(f"Part: `array` must be an array; got {self.array!r}")
        for name in ("offset", "shape"):
            object.__setattr__(self, name, tuple(int(x) for x in getattr(self, name)))
        here = tuple(self.array.shape)
        inside = len(here) == len(self.offset) == len(self.shape) and all(
            first >= 0 and first + n <= whole
            for first, n, whole in zip(self.offset, here, self.shape, strict=True)
        )
        if not inside:
            raise ValueError(
                f"Part: an array of shape {here} from {self.offset} on must lie within a tensor of shape {self.shape}"
            )


def _is_dtensor(x: Any) -> bool:
    return hasattr(x, "_local_tensor") and any(
        kind.__name__ == "DTensor" for kind in type(x).__mro__
    )


def has_parts(tree: Any) -> bool:
    """Whether a tree has parts of larger tensors among its leaves."""
    return any(isinstance(x, Part) or _is_dtensor(x) for _, x in flatten(tree))


def local(x: Any) -> Any:
    """What this rank has of a leaf."""
    if isinstance(x, Part):
        return x.array
    if not _is_dtensor(x):
        return x
    if any(placement.is_partial() for placement in x.placements):
        raise ValueError(
            "a DTensor whose ranks have terms of a sum (Partial) is not reduced yet; call x.redistribute()"
        )
    return x._local_tensor


def localized(tree: Any) -> tuple[Any, dict[int, Block]]:
    """A tree of what this rank has, and for each array of a part, by its id, where in the whole tensor it lies."""
    blocks: dict[int, Block] = {}

    def own(x: Any) -> Any:
        found, block = local(x), block_of(x)
        if block is not None:
            blocks[id(found)] = block
        return found

    return rebuild(tree, own), blocks


def block_of(x: Any) -> Block | None:
    """Where in the whole tensor a part lies; None for whole arrays."""
    if isinstance(x, Part):
        offset, here = x.offset, tuple(x.array.shape)
    elif _is_dtensor(x):
        shape, offset = _placed(x.shape, x.device_mesh, tuple(x.placements))
        here = tuple(x._local_tensor.shape)
        if shape != here:
            raise ValueError(
                f"a DTensor of shape {tuple(x.shape)}, placed by {x.placements}, has {here} here, not {shape}"
            )
    else:
        return None
    return Block(tuple(offset) if 0 not in here else (0,) * len(here), tuple(x.shape))


@lru_cache(maxsize=KEPT)
def _placed(shape: Any, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and the offset of what this rank has of a DTensor."""
    from torch.distributed.tensor._utils import (
        compute_local_shape_and_global_offset,
    )  # there is no public one

    here, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(here), tuple(offset)


def strays(named: Iterable[tuple[str, Any]], blocks: Mapping[str, Block | None]) -> list[str]:
    """What is wrong with parts that are not of the same place as the parameters of their names."""
    wrong = []
    for name, x in named:
        found, expected = block_of(x), blocks.get(name)
        if found is not None and name in blocks and found != expected:
            here = (
                f"from {expected.offset} on of {expected.shape}"
                if expected is not None
                else "no part"
            )
            wrong.append(
                f"{name!r} is the part from {found.offset} on of {found.shape}, expected {here}"
            )
    return wrong


def with_array(x: Any, array: Array) -> Any:
    """A leaf with another array in the place of its own."""
    return Part(array, x.offset, x.shape) if isinstance(x, Part) else array


def mesh_of(tree: Any) -> Any:
    """The process group of the first DTensor of a tree; None where there is none."""
    for _, x in flatten(tree):
        if _is_dtensor(x):
            mesh = x.device_mesh
            if mesh.ndim == 1:
                return mesh.get_group()
            import torch.distributed as dist

            if mesh.size() == dist.get_world_size():
                return dist.group.WORLD
            raise ValueError(
                "Optimizer: give `comm`, the group of all ranks of the parameters' mesh"
            )
    return None
