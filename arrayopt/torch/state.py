"""The state of parameters as PyTorch has it: read where it is, and put there, checked."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor as Param

from arrayopt.arrays import kind, like
from arrayopt.params.parts import block_of, local
from arrayopt.state.run import is_count
from arrayopt.state.shares import Shards
from arrayopt.state.tensors import Tensor

__all__ = ["State", "put", "show"]

STEP = "step"
"""What PyTorch calls the number of updates."""


class Entry(dict[str, Any]):
    """The state of one parameter. To set an item sets it in the optimizer, too."""

    write: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def __setitem__(self, key: str, value: Any) -> None:
        new = {**self, key: value}
        super().update(new if self.write is None else self.write(new))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class State(MutableMapping[Param, dict[str, Any]]):
    """The state of each parameter: ``step``, the number of its updates, and the rule's slots.

    Of a stacked parameter of which `skip_nonfinite` has skipped layers, ``step`` has the number of each layer.

    The slots are those that steps write. To set an entry copies it to them. A parameter whose entry is deleted or
    popped begins anew.
    """

    def __init__(self, pairs: Iterable[tuple[Param, Tensor]], write: Callable[[dict[Param, Any]], None]) -> None:
        self._tensors, self._write = dict(pairs), write

    def __getitem__(self, p: Param) -> dict[str, Any]:
        tensor = self._tensors[p]

        def write(new: dict[str, Any]) -> dict[str, Any]:
            self[p] = new
            return show(p, tensor)

        entry = Entry(show(p, tensor))
        entry.write = write
        return entry

    def __setitem__(self, p: Param, value: Mapping[str, Any]) -> None:
        if p not in self._tensors:
            raise KeyError(p)
        self._write({p: value})

    def __delitem__(self, p: Param) -> None:
        self[p] = {}

    def pop(self, p: Param, *default: Any) -> Any:
        """The state of a parameter, which begins anew; what is popped is no longer what steps write."""
        if p not in self and default:
            return default[0]
        state = dict(self[p])
        del self[p]
        return state

    def clear(self) -> None:
        """Have all parameters begin anew."""
        self._write({p: {} for p in self})

    def __iter__(self) -> Iterator[Param]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return repr(dict(self))


def show(p: Param, tensor: Tensor) -> dict[str, Any]:
    """The state of a parameter, its slots as they are; DTensors where the parameter is one."""
    undivided = tensor.share.undivided if tensor.share is not None else ()
    slots = {name: x if name in undivided else _as_given(p, x) for name, x in tensor.slots.items()}
    return {STEP: torch.tensor(tensor.updates), **slots}


def _as_given(p: Param, x: Param) -> Param:
    """What this rank has of a slot as a DTensor, like the parameter's."""
    if block_of(p) is None:
        return x
    from torch.distributed.tensor import DTensor

    assert isinstance(p, DTensor)
    return DTensor.from_local(x, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def put(who: str, given: Iterable[tuple[str, Tensor, Mapping[str, Any]]], *, copies: bool = True) -> bool:
    """Have tensors go on from states; nothing of an empty one.

    Parameters
    ----------
    who : str
        What errors begin with.
    given : iterable of (str, Tensor, mapping)
        Names, tensors in their first state, or in one that is to be replaced, and what `show` returned.
    copies : bool, default True
        Without, slots that fit are taken over as they are.

    Returns
    -------
    bool
        Whether any of them has been updated before.

    Raises
    ------
    ValueError
        Listing every mismatch. Nothing has been changed then.
    """
    wrong, ready = list[str](), list[tuple[Tensor, Any, dict[str, Param]]]()
    for name, tensor, state in given:
        if not state:
            ready.append((tensor, 0, {}))
            continue
        found = _differences(tensor, state)
        wrong += [f"{name}: {what}" for what in found]
        if not found:
            slots = {slot: _own(tensor, slot, state[slot], copies) for slot in tensor.slots}
            ready.append((tensor, torch.as_tensor(state[STEP]).cpu().numpy().astype(np.int64), slots))
    if wrong:
        raise ValueError(f"{who}: the state does not fit: {'; '.join(wrong)}")
    for tensor, t, slots in ready:
        tensor.run.put_updates(tensor.numbers, t, np.max(t) - t)
        tensor.slots = slots or tensor.slots
        tensor.run.arrays += 1
    return any(np.any(t) for _, t, _ in ready)


def _differences(tensor: Tensor, state: Mapping[str, Any]) -> list[str]:
    """In what a state is not that of a tensor."""
    if not isinstance(state, Mapping) or set(state) != {STEP, *tensor.slots}:
        here = ", ".join(sorted(map(str, state))) if isinstance(state, Mapping) else type(state).__name__
        return [f"expected {', '.join([STEP, *tensor.slots])}; got {here}"]
    wrong, t = [], state[STEP]
    each = tensor.layers > 0 and isinstance(t, Param) and tuple(t.shape) == (tensor.layers,)
    for number in t.tolist() if each else [t.item() if isinstance(t, Param) and t.numel() == 1 else t]:
        if not (
            isinstance(number, int | float) and math.isfinite(number) and is_count(int(number)) and number % 1 == 0
        ):
            wrong.append(f"{STEP} must be a whole number from 0; got {t!r}")
            break
    for slot, mine in tensor.slots.items():
        x = state[slot]
        if not isinstance(x, Param):
            wrong.append(f"{slot} must be a tensor; got {type(x).__name__}")
        elif tuple(x.shape) not in (tuple(mine.shape), tensor.whole[slot]) or kind(x) != kind(mine):
            wrong.append(f"{slot} is {x.dtype} {tuple(x.shape)}, expected {mine.dtype} {tensor.whole[slot]}")
    return wrong


def _own(tensor: Tensor, slot: str, x: Param, copies: bool) -> Param:
    """What this rank is to have of a slot, as its own is."""
    mine = tensor.slots[slot]
    part: Param = local(x)
    if part is x and isinstance(tensor.share, Shards) and tuple(x.shape) != tuple(mine.shape):
        part = tensor.share.taken(slot, x)
    same = part.dtype == mine.dtype and part.device == mine.device
    return part if part is mine or (same and not copies) else like(mine, part)
