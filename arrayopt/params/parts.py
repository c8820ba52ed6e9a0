"""Parts of larger tensors, whose other parts are on other ranks: `Part`, and PyTorch's DTensor."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from arrayopt.arrays import Array, is_array
from arrayopt.params.trees import flatten, rebuild
from arrayopt.state.shares import Block

KEPT = 4096
"""The number of DTensor layouts that are remembered."""


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of a larger tensor. Norms are those of the whole tensor.

    Parameters
    ----------
    array : array
        This rank's part, which is updated in place.
    offset : sequence of int
        The first index of the part in the whole tensor, along each axis.
    shape : sequence of int
        The shape of the whole tensor. The parts of all ranks must cover it. Ranks may have the same
        part, or an empty one.

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
        inside = len(here) == len(self.offset) == len(self.shape)
        for first, count, length in zip(self.offset, here, self.shape, strict=False):
            inside = inside and first >= 0 and first + count <= length
        if not inside:
            raise ValueError(
                f"Part: an array of shape {here} from {self.offset} on must lie within a tensor of"
                f" shape {self.shape}"
            )


def _is_dtensor(leaf: Any) -> bool:
    if not hasattr(leaf, "_local_tensor"):
        return False
    return any(kind.__name__ == "DTensor" for kind in type(leaf).__mro__)


def has_parts(tree: Any) -> bool:
    """Return whether a tree has parts of larger tensors among its leaves."""
    return any(isinstance(leaf, Part) or _is_dtensor(leaf) for _, leaf in flatten(tree))


def local(leaf: Any) -> Any:
    """Return what this rank has of a leaf."""
    if isinstance(leaf, Part):
        return leaf.array
    if not _is_dtensor(leaf):
        return leaf
    if any(placement.is_partial() for placement in leaf.placements):
        raise ValueError(
            "a DTensor with a Partial placement must be reduced first; call x.redistribute()"
        )
    return leaf._local_tensor


def localized(tree: Any) -> tuple[Any, dict[int, Block]]:
    """Return a tree of what this rank has, and the block of each array of a part, by its id."""
    blocks: dict[int, Block] = {}

    def own(leaf: Any) -> Any:
        found, block = local(leaf), block_of(leaf)
        if block is not None:
            blocks[id(found)] = block
        return found

    return rebuild(tree, own), blocks


def block_of(leaf: Any) -> Block | None:
    """Return the place of a part in its whole tensor; None for other leaves."""
    if isinstance(leaf, Part):
        offset, here = leaf.offset, tuple(leaf.array.shape)
    elif _is_dtensor(leaf):
        shape, offset = _placed(leaf.shape, leaf.device_mesh, tuple(leaf.placements))
        here = tuple(leaf._local_tensor.shape)
        if shape != here:
            raise ValueError(
                f"a DTensor of shape {tuple(leaf.shape)}, placed by {leaf.placements}, has {here}"
                f" here, not {shape}"
            )
    else:
        return None
    return Block(tuple(offset) if 0 not in here else (0,) * len(here), tuple(leaf.shape))


@lru_cache(maxsize=KEPT)
def _placed(shape: Any, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the offset of what this rank has of a DTensor."""
    from torch.distributed.tensor import _utils  # there is no public function

    here, offset = _utils.compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(here), tuple(offset)


def strays(named: Iterable[tuple[str, Any]], blocks: Mapping[str, Block | None]) -> list[str]:
    """Return messages about parts whose places differ from the parameters of their names."""
    wrong = []
    for name, x in named:
        found, expected = block_of(x), blocks.get(name)
        if found is not None and name in blocks and found != expected:
            here = "no part"
            if expected is not None:
                here = f"from {expected.offset} on of {expected.shape}"
            wrong.append(
                f"{name!r} is the part from {found.offset} on of {found.shape}, expected {here}"
            )
    return wrong


def with_array(leaf: Any, array: Array) -> Any:
    """Return a leaf with another array in place of its own."""
    return Part(array, leaf.offset, leaf.shape) if isinstance(leaf, Part) else array


def mesh_of(tree: Any) -> Any:
    """Return the process group of the first DTensor of a tree, or None."""
    for _, x in flatten(tree):
        if _is_dtensor(x):
            mesh = x.device_mesh
            if mesh.ndim == 1:
                return mesh.get_group()
            import torch.distributed as dist

            if mesh.size() == dist.get_world_size():
                return dist.group.WORLD
            raise ValueError(
                "Optimizer: pass `comm`, the group of all ranks of the parameters' mesh"
            )
    return None
