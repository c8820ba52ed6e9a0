"""Values that must be equal on all ranks: how they are described, compared, and reported."""

import re
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from arrayopt._version import __version__
from arrayopt.arrays import Array, array_namespace, detached, dtype_name, size, to_host
from arrayopt.params.groups import Group, labelled
from arrayopt.params.replaced import PUT, short
from arrayopt.ranks.comm import as_bytes
from arrayopt.ranks.machine import shared_at
from arrayopt.state.shares import Shards
from arrayopt.state.tensors import Tensor

PIECE = 1 << 18
"""The number of elements that `is_odd` checks at a time."""


def plain(x: Any) -> str:
    """Return an object as text that is the same in each process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(x))


def differences(every: Sequence[dict[str, Any]]) -> list[str]:
    """Return a description of each value that differs from that of rank 0."""
    if any(x["what"] != every[0]["what"] for x in every):
        return [f"rank {r} is in {x['what']}" for r, x in enumerate(every)]
    orders = [[*x["words"]] for x in every]
    if any(x != orders[0] for x in orders) and all(sorted(x) == sorted(orders[0]) for x in orders):
        return ["the order of the parameters is not the same"]
    found = []
    for name in dict.fromkeys(chain.from_iterable(orders)):
        values = [x["words"].get(name, "nothing") for x in every]
        odd = [f"{x} on rank {r}" for r, x in enumerate(values) if x != values[0]]
        if odd:
            found.append(f"{name} is {values[0]} on rank 0, {', '.join(odd)}")
    return found


def alike(groups: Sequence[Group], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an Optimizer that must be equal on all ranks, by their names."""
    words: dict[str, Any] = {"the version of arrayopt": __version__}
    words |= {f"`{name}`": x for name, x in options.items()}
    for label, group in labelled(groups):
        words[f"the rule of group {label}"] = group.rule
        for tensor in group.tensors:
            array = tensor.array
            words[repr(tensor.name)] = f"{dtype_name(array)} {tensor.shape} in group {label}"
            if tensor.block is not None:
                continue
            words[f"the checksum of {tensor.name!r}"] = checksum(array)
            ends = None if tensor.share is None else tensor.share.ends
            words[f"where {tensor.name!r} is cut for its engine"] = ends
            words[f"the memory that ranks share for {tensor.name!r}"] = shared_at(array)
    return words


def checksum(x: Array) -> int:
    """Return a checksum of an array's values."""
    return zlib.crc32(as_bytes(np.ascontiguousarray(to_host(x))).data)


def groups_of(tensor: Tensor, ranks: int) -> list[list[int]]:
    """Return the groups of ranks that must have equal values of a tensor.

    All ranks are one group; if the user divided the tensor, the ranks with the same part are one.
    """
    share = tensor.share
    shards = share if share is None or isinstance(share, Shards) else share.shards
    if shards is None:
        return [list(range(ranks))]
    found: dict[Any, list[int]] = {}
    for r, block in enumerate(shards.blocks):
        found.setdefault(block, []).append(r)
    return [own for own in found.values() if len(own) > 1]


def unlike(
    tensors: Sequence[Tensor],
    marks: Sequence[Mapping[int, int]],
    params: Sequence[Any],
    grads: Sequence[Any],
) -> list[str]:
    """Return descriptions of parameters and gradients that differ between ranks and must not.

    For each rank, `marks` has what the user did to its parameters (see `Replaced`); `params` and
    `grads` have the checksums of some of its parameters and gradients. Keys are tensors' places.
    """
    found, odd_grads = [], False
    for i, tensor in enumerate(tensors):
        for own in groups_of(tensor, len(marks)):
            put = [r for r in own if marks[r].get(i) == PUT]
            values = [params[r].get(i) for r in own]
            given = [grads[r].get(i) for r in own]
            if put and len(put) < len(own):
                found.append(f"{tensor.name!r} was replaced on {_ranks(put)} alone")
            elif values.count(values[0]) < len(own):
                was = "was replaced by other values" if put else "has other values"
                found.append(f"{tensor.name!r} {was} on {_odd(own, values)} than on rank {own[0]}")
            if given.count(given[0]) < len(own):
                odd = f"{_odd(own, given)} and rank {own[0]}"
                found.append(f"the gradient of {tensor.name!r} differs between {odd}")
                odd_grads = True
    shown = short(found)
    if odd_grads:
        shown.append(
            "each rank must pass the same gradients: reduce them, or pass Ranks(comm, grads='mean')"
        )
    return shown


def _odd(ranks: Sequence[int], values: Sequence[Any]) -> str:
    """Name the ranks whose value differs from the first."""
    return _ranks([r for r, value in zip(ranks, values, strict=True) if value != values[0]])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def is_odd(tensor: Tensor, grad: Array) -> bool:
    """Return whether a gradient is not finite in an element whose norm another rank computes."""
    share = tensor.share
    if share is None or not share.holders or share.shards is not None:
        return False
    xp, first, last = array_namespace(grad), 0, 0
    if not isinstance(share, Shards):
        first, last = share.first, share.last
    elif share.rank in share.holders:
        return False
    flat = xp.reshape(detached(grad), (-1,))
    for rest in (flat[:first], flat[last:]):
        count = size(rest)
        step = PIECE if isinstance(rest, np.ndarray) else max(1, count)
        for at in range(0, count, step):
            if not bool(xp.all(xp.isfinite(rest[at : at + step]))):
                return True
    return False
