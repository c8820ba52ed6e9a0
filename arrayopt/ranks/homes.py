"""Tensors that the user divided, and whose rule needs them whole: one rank updates each of them."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter, setitem
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from arrayopt.arrays import (
    Array,
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

Grads = Sequence[Array | None]


def owners(costs: Sequence[int], ranks: int) -> list[int]:
    """Return a rank for each tensor, such that the largest sum of costs of a rank is small.

    The dearest tensors come first, each to the rank that has the least so far (R. L. Graham, SIAM
    J. Appl. Math. 17, 1969).
    """
    loads, found = [0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        found[i] = min(range(ranks), key=loads.__getitem__)
        loads[found[i]] += costs[i]
    return found


def cost_of(tensor: Tensor, bucket: Bucket, engine: Any) -> int:
    """Return the FLOPs of an update of a tensor that only one rank can update; 0 for others.

    These are tensors whose rule multiplies matrices, and not each layer or block by itself.
    """
    shape, rule = tensor.shape, bucket.rule
    if rule.several or 0 in shape:
        return 0
    ends = shape[-2:] if len(shape) > 1 else (1, 1)
    if rule.branches:  # each side's basis, and the products with both
        return int(np.prod(shape)) * sum(ends)
    if not isinstance(engine, Fused) and tensor.block is None:
        return 0
    try:
        plans = plans_of(tensor, bucket, engine)
    except TraceError:
        return 0
    return max(int(flops(plan, geometry([shape], plan.element)).sum()) for plan in plans)


def plans_of(tensor: Tensor, bucket: Bucket, engine: Any) -> list[Plan]:
    """Return the plans of a whole tensor in all kinds of steps, that of its update first."""
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.array)
    lean = isinstance(engine, Fused) and engine.lean
    found = []
    for way in ways(bucket.rule):
        found.append(plan_for(bucket.rule, len(shape), dtype, shape=shape, lean=lean, **way))
    return found


def homed(tensor: Tensor, parts: Shards, owner: int) -> Share:
    """Return the share of a tensor that its owner updates, and give the tensor its home."""
    count, ranks = int(np.prod(tensor.shape)), len(parts.blocks)
    ends = (0,) * (owner + 1) + (count,) * (ranks - owner)
    share = Share(parts.rank, ends, shards=parts)
    tensor.home = Tensor(tensor.name, _whole(tensor, share, tensor.array), share=share)
    return share


def _whole(tensor: Tensor, share: Share, part: Array) -> Array:
    """Return room for a whole array like a part; elsewhere than at the owner it has no memory."""
    xp, device = place(part)
    with on_its_device(part):
        if share.kind == "whole":
            return xp.zeros(tensor.shape, dtype=part.dtype, device=device)
        return xp.broadcast_to(xp.zeros((), dtype=part.dtype, device=device), tensor.shape)


def rooms(tensors: Sequence[Tensor], grads: Grads) -> list[Array | None]:
    """Return gradients, with room for the whole one where the tensor has an owner."""
    found = list(grads)
    for index, tensor in enumerate(tensors):
        grad, home = grads[index], tensor.home
        if home is not None and home.share is not None and grad is not None:
            found[index] = _whole(tensor, home.share, grad)
    return found


def bring(
    comm: Comm, tensors: Iterable[Tensor], grads: Grads = (), whole: list[Any] | None = None
) -> None:
    """Bring parts of parameters to their owners; with gradients, theirs too, into their rooms.

    Tensors without a gradient are left out then.
    """
    legs = list[_Leg]()
    for index, tensor in enumerate(tensors):
        if tensor.home is None or (whole is not None and grads[index] is None):
            continue
        share: Any = tensor.share
        (owner,), ways = share.holders, []
        for sender in share.senders:
            ways.append((sender, owner, (...,), (*share.shards.slices("p", sender), ...)))
        legs.append(_Leg(tensor.array, tensor.home.array, ways, tensor.home.take))
        if whole is not None:
            legs.append(_Leg(grads[index], whole[index], ways, partial(setitem, whole, index)))
    _move(comm, legs)


def send_back(comm: Comm, tensors: Iterable[Tensor]) -> None:
    """Write what owners have computed into the parts of all ranks."""
    legs = list[_Leg]()
    for tensor in tensors:
        if tensor.home is None:
            continue
        share: Any = tensor.share
        (owner,), ways = share.holders, []
        for receiver, (_, shape) in enumerate(share.shards.blocks):
            if 0 not in shape:
                here = (*share.shards.slices("p", receiver), ...)
                ways.append((owner, receiver, here, (...,)))
        legs.append(_Leg(tensor.home.array, tensor.array, ways, partial(tensor.put, None)))
    _move(comm, legs)


class _Leg(NamedTuple):
    """An array, and the array that it goes to: from which rank to which, from where to where; and
    what takes another array if the target cannot be written.
    """

    source: Any
    target: Any
    ways: list[tuple[int, int, Any, Any]]
    replace: Callable[[Array], object]


def _move(comm: Comm, legs: Sequence[_Leg]) -> None:
    """Move parts of arrays between ranks, in one message from each to each."""
    rank, size = comm.rank, comm.size
    sent: list[list[Bytes]] = [[] for _ in range(size)]
    views: list[list[Any]] = [[] for _ in range(size)]
    written: list[Any] = []
    for leg in legs:
        receives = any(receiver == rank for _, receiver, *_ in leg.ways)
        target: Any = _written_through(leg.target) if receives else None
        written.append(target)
        for sender, receiver, here, there in leg.ways:
            if sender == rank == receiver:
                target[there] = to_host(leg.source)[here]
            elif sender == rank:
                part = np.ascontiguousarray(to_host(leg.source)[here])
                sent[receiver].append(as_bytes(part))
            elif receiver == rank:
                views[sender].append(target[there])
    none = np.zeros(0, np.uint8)
    received = [sum(map(attrgetter("nbytes"), own)) for own in views]
    rooms = comm.alltoall([np.concatenate([none, *pieces]) for pieces in sent], received)
    for own, room in zip(views, rooms, strict=True):
        at = 0
        for view in own:
            view[...] = room[at : at + view.nbytes].view(view.dtype).reshape(view.shape)
            at += view.nbytes
    for leg, values in zip(legs, written, strict=True):
        new = leg.target if values is None else _stored(leg.target, values)
        if new is not leg.target:
            leg.replace(new)


def _written_through(array: Array) -> Any:
    """Return the memory of an array, as NumPy's; a copy if it is elsewhere or cannot be written."""
    if writable(array) and is_on_host(array):
        return to_host(array)
    return np.array(to_host(array))


def _stored(array: Array, values: Any) -> Array:
    """Return an array with values that `_written_through` took."""
    if not np.may_share_memory(values, to_host(array)):
        return store(array, like(array, values))
    if array_api_compat.is_torch_array(array):
        array_namespace(array).autograd.graph.increment_version([array])
    return array
