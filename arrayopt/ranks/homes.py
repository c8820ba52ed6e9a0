"""Tensors that the user divided, but whose rule needs them whole: an owner updates each of them."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter, setitem
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from arrayopt.arrays import (
    Array,
    Grads,
    array_namespace,
    dtype_name,
    is_on_host,
    like,
    on_its_device,
    place,
    store,
    to_host,
    writable,
)
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.fused import Fused
from arrayopt.fusion.dims import TraceError
from arrayopt.fusion.layout import flops, geometry
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.plans import plan_for, ways
from arrayopt.ranks.comm import Bytes, Comm, as_bytes
from arrayopt.state.shares import Shards, Share
from arrayopt.state.tensors import Tensor


def owners(costs: Sequence[int], ranks: int) -> list[int]:
    """Return a rank for each tensor, such that the largest sum of costs of a rank is small.

    The most expensive tensor comes first, each to the rank with the smallest sum so far (R. L.
    Graham, SIAM J. Appl. Math. 17, 1969).
    """
    loads, found = [0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        found[i] = min(range(ranks), key=loads.__getitem__)
        loads[found[i]] += costs[i]
    return found


def cost_of(tensor: Tensor, bucket: Bucket, engine: Any) -> int:
    """Return the FLOPs of an update if one rank must update the whole tensor, else 0.

    It must if the rule multiplies matrices, unless layers or blocks are updated separately.
    """
    shape, rule = tensor.shape, bucket.rule
    if rule.several or 0 in shape:
        return 0
    ends = shape[-2:] if len(shape) > 1 else (1, 1)
    if rule.branches:  # products for a basis of each side, and with both bases
        return int(np.prod(shape)) * sum(ends)
    if not isinstance(engine, Fused) and tensor.block is None:
        return 0
    try:
        plans = plans_of(tensor, bucket, engine)
    except TraceError:
        return 0
    return max(int(flops(plan, geometry([shape], plan.element)).sum()) for plan in plans)


def plans_of(tensor: Tensor, bucket: Bucket, engine: Any) -> list[Plan]:
    """Return the plans of a whole tensor for all kinds of steps; the first is its update."""
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.array)
    lean = isinstance(engine, Fused) and engine.lean
    found = []
    for way in ways(bucket.rule):
        found.append(plan_for(bucket.rule, len(shape), dtype, shape=shape, lean=lean, **way))
    return found


def homed(tensor: Tensor, parts: Shards, owner: int) -> Share:
    """Return the share in which `owner` has all elements, and set `tensor.home`."""
    count, ranks = int(np.prod(tensor.shape)), len(parts.blocks)
    ends = (0,) * (owner + 1) + (count,) * (ranks - owner)
    share = Share(parts.rank, ends, shards=parts)
    tensor.home = Tensor(tensor.name, _whole(tensor, share, tensor.array), share=share)
    return share


def _whole(tensor: Tensor, share: Share, part: Array) -> Array:
    """Return an array for the whole tensor, like `part`; only on the owner it has memory."""
    xp, device = place(part)
    with on_its_device(part):
        if share.kind == "whole":
            return xp.zeros(tensor.shape, dtype=part.dtype, device=device)
        return xp.broadcast_to(xp.zeros((), dtype=part.dtype, device=device), tensor.shape)


def rooms(tensors: Sequence[Tensor], grads: Grads) -> list[Array | None]:
    """Return the gradients, or an array for the whole gradient if the tensor has an owner."""
    found = list(grads)
    for index, tensor in enumerate(tensors):
        grad, home = grads[index], tensor.home
        if home is not None and home.share is not None and grad is not None:
            found[index] = _whole(tensor, home.share, grad)
    return found


def bring(
    comm: Comm, tensors: Iterable[Tensor], grads: Grads = (), whole: list[Any] | None = None
) -> None:
    """Send parts of parameters to their owners, and with `whole` parts of gradients into these.

    With `whole`, tensors without a gradient are left out.
    """
    transfers = list[_Transfer]()
    for index, tensor in enumerate(tensors):
        if tensor.home is None or (whole is not None and grads[index] is None):
            continue
        share: Any = tensor.share
        (owner,), copies = share.holders, []
        for sender in share.senders:
            copies.append((sender, owner, (...,), (*share.shards.slices("p", sender), ...)))
        transfers.append(_Transfer(tensor.array, tensor.home.array, copies, tensor.home.take))
        if whole is not None:
            replace = partial(setitem, whole, index)
            transfers.append(_Transfer(grads[index], whole[index], copies, replace))
    _move(comm, transfers)


def send_back(comm: Comm, tensors: Iterable[Tensor]) -> None:
    """Send updated parameters from their owners back into the parts of all ranks."""
    transfers = list[_Transfer]()
    for tensor in tensors:
        if tensor.home is None:
            continue
        share: Any = tensor.share
        (owner,), copies = share.holders, []
        for receiver, (_, shape) in enumerate(share.shards.blocks):
            if 0 not in shape:
                taken = (*share.shards.slices("p", receiver), ...)
                copies.append((owner, receiver, taken, (...,)))
        replace = partial(tensor.put, None)
        transfers.append(_Transfer(tensor.home.array, tensor.array, copies, replace))
    _move(comm, transfers)


class _Transfer(NamedTuple):
    """Copies between ranks, from parts of one array into parts of another."""

    source: Any
    target: Any
    copies: list[tuple[int, int, Any, Any]]
    """For each the sender, the receiver, and the slices of the source and of the target."""
    replace: Callable[[Array], object]
    """Takes the new array if the target cannot be written."""


def _move(comm: Comm, transfers: Sequence[_Transfer]) -> None:
    """Copy parts of arrays between ranks, in one message from each rank to each."""
    rank, size = comm.rank, comm.size
    sent: list[list[Bytes]] = [[] for _ in range(size)]
    views: list[list[Any]] = [[] for _ in range(size)]
    written: list[Any] = []
    for transfer in transfers:
        receives = any(receiver == rank for _, receiver, *_ in transfer.copies)
        target: Any = _on_host(transfer.target) if receives else None
        written.append(target)
        for sender, receiver, taken, filled in transfer.copies:
            if sender == rank == receiver:
                target[filled] = to_host(transfer.source)[taken]
            elif sender == rank:
                part = np.ascontiguousarray(to_host(transfer.source)[taken])
                sent[receiver].append(as_bytes(part))
            elif receiver == rank:
                views[sender].append(target[filled])
    none = np.zeros(0, np.uint8)
    received = [sum(map(attrgetter("nbytes"), own)) for own in views]
    rooms = comm.alltoall([np.concatenate([none, *pieces]) for pieces in sent], received)
    for own, room in zip(views, rooms, strict=True):
        at = 0
        for view in own:
            view[...] = room[at : at + view.nbytes].view(view.dtype).reshape(view.shape)
            at += view.nbytes
    for transfer, values in zip(transfers, written, strict=True):
        new = transfer.target if values is None else _with_values(transfer.target, values)
        if new is not transfer.target:
            transfer.replace(new)


def _on_host(array: Array) -> Any:
    """Return an array as NumPy's: a view, or a copy if it is on a device or cannot be written."""
    if writable(array) and is_on_host(array):
        return to_host(array)
    return np.array(to_host(array))


def _with_values(array: Array, values: Any) -> Array:
    """Write values, from `_on_host`, back to an array; return it, or a new one in its place."""
    if not np.may_share_memory(values, to_host(array)):
        return store(array, like(array, values))
    if array_api_compat.is_torch_array(array):
        array_namespace(array).autograd.graph.increment_version([array])
    return array
