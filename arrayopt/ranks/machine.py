"""Memory that all ranks of one machine share, so that they need not send parameters."""

import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from arrayopt.arrays import Array, is_array, memory, size
from arrayopt.params.kinds import refusal
from arrayopt.params.trees import flatten, rebuild
from arrayopt.ranks.comm import Comm, as_bytes
from arrayopt.ranks.settings import as_ranks

ALIGNED = 64
"""Arrays start at multiples of this many bytes."""

_REGIONS: dict[int, tuple[int, str]] = {}
"""Shared memory by its first address: its end, and its name, which is the same on all ranks."""


def shared(tree: Any, comm: Any) -> Any:
    """Return parameters in memory that all ranks on a machine share.

    An optimizer of these ranks then sends no parameters: each rank writes those that it updates,
    and the other ranks see them. All ranks call this function, with the same shapes and dtypes; the
    values are those of rank 0.

    Parameters
    ----------
    tree : array or tree of arrays
        NumPy arrays, which are copied, or PyTorch tensors on the CPU, which remain the same objects
        with new memory, so that a module keeps using them.
    comm : communicator or Ranks
        As for `Optimizer`, of ranks on one machine.

    Returns
    -------
    tree
        The arrays, in the same structure.

    Raises
    ------
    TypeError
        If a leaf is not such an array.
    ValueError
        If ranks differ in what they pass, or are on several machines.

    Notes
    -----
    Between steps a parameter exists once, so let only one rank change it by hand: ``p *= 0.5`` on
    two ranks halves it twice. Needs Linux. The memory is freed when all ranks have ended or
    deleted the arrays, even if they crash.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> def train(comm):
    ...     params = ao.ranks.shared({"w": np.ones(4)}, comm)
    ...     opt = ao.Optimizer(params, ao.SGD(lr=0.5), comm=comm)
    ...     return opt.step({"w": np.ones(4)})["w"].tolist()
    >>> ao.ranks.run(2, train)
    [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]]
    """
    ranks = as_ranks(comm).open()
    places, end, error = dict[int, int](), 0, None
    described = list[tuple[str, str, list[int]]]()
    try:
        for path, leaf in flatten(tree):
            if leaf is None or id(leaf) in places:
                continue
            why = refusal(leaf, parameter=True) if _is_host(leaf) else type(leaf).__name__
            if why is not None:
                raise TypeError(
                    f"ranks.shared: {path!r} must be an array of NumPy or a tensor of PyTorch on"
                    f" the CPU; got {why}"
                )
            places[id(leaf)] = end
            described.append((path, str(leaf.dtype), list(leaf.shape)))
            end += -(-memory(leaf).nbytes // ALIGNED) * ALIGNED
    except TypeError as caught:
        error = caught
    every = ranks.tell(described if error is None else str(error))
    if error is not None:
        raise error
    wrong = [r for r, said in enumerate(every) if said != every[0]]
    if wrong:
        raise ValueError(
            f"ranks.shared: all ranks must pass the same names, shapes and dtypes; got {every[0]}"
            f" on rank 0, {every[wrong[0]]} on rank {wrong[0]}"
        )
    room = _room(ranks, max(end, 1))

    def moved(leaf: Any) -> Any:
        if leaf is None:
            return None
        old, at = memory(leaf), places[id(leaf)]
        new = room[at : at + old.nbytes].view(old.dtype).reshape(old.shape)
        if ranks.rank == 0:
            new[...] = old
        if isinstance(leaf, np.ndarray):
            return new
        import torch

        with torch.no_grad():
            leaf.data = torch.from_numpy(new).view(leaf.dtype)
        return leaf

    found = rebuild(tree, moved)
    ranks.meet()()
    return found


def _is_host(leaf: Any) -> bool:
    """Return whether this is an array of NumPy, or a tensor of PyTorch on the CPU."""
    if isinstance(leaf, np.ndarray):
        return bool(leaf.dtype != object)
    return is_array(leaf) and getattr(getattr(leaf, "device", None), "type", "") == "cpu"


def _room(ranks: Comm, count: int) -> "np.ndarray[Any, Any]":
    """Return `count` bytes of memory that all ranks share."""
    descriptor = error = None
    name = secrets.token_hex(16)
    if ranks.rank == 0:
        try:
            descriptor = os.memfd_create("arrayopt", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, count + ALIGNED)
            os.pwrite(descriptor, name.encode(), count)
        except (OSError, AttributeError) as caught:
            error = f"rank 0: {caught}"
    name, where, error = ranks.tell([name, f"/proc/{os.getpid()}/fd/{descriptor}", error])[0]
    mapped = None
    if error is None:
        try:
            with Path(where).open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), count + ALIGNED)
            if mapped[count : count + len(name)] != name.encode():  # a file of another machine
                error = "it has not the memory of rank 0"
        except (OSError, ValueError) as caught:
            error = str(caught)
    every = ranks.tell(error)
    if descriptor is not None:
        os.close(descriptor)
    wrong = [f"rank {r}: {said}" for r, said in enumerate(every) if said is not None]
    if wrong or mapped is None:
        raise ValueError(
            f"ranks.shared: all ranks must be on one machine with Linux; {'; '.join(wrong)}"
        )
    room = np.frombuffer(mapped, np.uint8)
    begin = room.ctypes.data
    _REGIONS[begin] = begin + count, name
    weakref.finalize(mapped, _REGIONS.pop, begin, None)
    return room


def shared_at(array: Array) -> list[Any] | None:
    """Return the name of the shared memory that has an array, and the offset there, or None."""
    if not _REGIONS or not _is_host(array) or not size(array):
        return None
    if not memory(array).flags.c_contiguous:
        return None
    at = as_bytes(memory(array)).ctypes.data
    for begin, (end, name) in list(_REGIONS.items()):
        if begin <= at < end:
            return [name, at - begin]
    return None
