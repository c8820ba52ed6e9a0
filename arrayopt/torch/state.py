"""The state of parameters in PyTorch's form: how it is shown, and how a state that is given is checked and stored."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor as Param

from arrayopt.arrays import kind, like
from arrayopt.codecs import SCALE
from arrayopt.params.parts import block_of, local
from arrayopt.ranks.alone import Alone
from arrayopt.rules.names import AROUND
from arrayopt.state.first import FirstValues
from arrayopt.state.run import is_count
from arrayopt.state.shares import Block, Shards, scales_of
from arrayopt.state.tensors import Tensor

STEP = "step"
"""What PyTorch calls the number of updates."""


Guests = defaultdict[Any, Any]
"""What other code keeps in the state: a dict for each parameter, and anything under keys that are not parameters."""


def _knows(tensor: Tensor, key: Any) -> bool:
    """Whether a key of a tensor's state belongs to the optimizer, and not to other code."""
    return key == STEP or key in tensor.slots or key in AROUND


def guests_of(tensor: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state that belong to other code."""
    return {key: x for key, x in state.items() if not _knows(tensor, key)}


def own_of(tensor: Tensor, state: Any) -> Any:
    """The entries of a state that belong to the optimizer. Anything but a mapping is returned as it is."""
    return {key: x for key, x in state.items() if _knows(tensor, key)} if isinstance(state, Mapping) else state


class Entry(dict[str, Any]):
    """The state of one parameter. Setting an item also sets it in the optimizer, or in `guests` if it is not `own`."""

    write: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    guests: Guests | None = None
    of: Any = None
    own: frozenset[str] = frozenset()

    def _members(self, ring: str) -> list[str]:
        """The names of the slots that hold the members of a ring."""
        names = list[str]()
        while f"{ring}_{len(names)}" in self.own:
            names.append(f"{ring}_{len(names)}")
        return names

    def __missing__(self, ring: str) -> Any:
        """A ring as one tensor, a copy, with its members along the first axis."""
        names = self._members(ring)
        if not names:
            raise KeyError(f"{ring}; the state has {', '.join(self)}")
        return torch.stack([self[name] for name in names])

    def __setitem__(self, key: str, value: Any) -> None:
        names = self._members(key)
        if names:
            if not isinstance(value, Param) or value.ndim == 0 or len(value) != len(names):
                raise ValueError(f"state: ring {key!r} must be a tensor whose first axis has length {len(names)}")
            new = {**self, **dict(zip(names, value.unbind(), strict=True))}
            super().update(new if self.write is None else self.write(new))
        elif self.guests is not None and key not in self.own:
            self.guests[self.of][key] = value
            super().__setitem__(key, value)
        else:
            new = {**self, key: value}
            super().update(new if self.write is None else self.write(new))

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        if self.guests is not None:
            self.guests.get(self.of, {}).pop(key, None)

    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class State(MutableMapping[Any, Any]):
    """The state of each parameter: ``step``, the number of its updates; the rule's slots; and entries of other code.

    If `skip_nonfinite` has skipped layers of a stacked parameter, its ``step`` has one number per layer.

    The slots are the arrays that steps write. Assigning to an entry copies into them. Deleting or popping the entry of
    a parameter resets its state. Keys that are not tensors may hold anything, as in PyTorch's ``defaultdict``.
    """

    def __init__(
        self, pairs: Iterable[tuple[Param, Tensor]], write: Callable[[dict[Param, Any]], None], guests: Guests
    ) -> None:
        self._tensors, self._write, self._guests = dict(pairs), write, guests

    def __getitem__(self, p: Any) -> Any:
        if not isinstance(p, Param):
            return self._guests[p]
        tensor = self._tensors[p]

        def write(new: dict[str, Any]) -> dict[str, Any]:
            self[p] = new
            return show(p, tensor)

        mine = show(p, tensor)
        entry = Entry({**self._guests.get(p, {}), **mine})
        entry.write, entry.guests, entry.of, entry.own = write, self._guests, p, frozenset(mine)
        return entry

    def __setitem__(self, p: Any, value: Any) -> None:
        if not isinstance(p, Param):
            self._guests[p] = value
            return
        tensor = self._tensors[p]
        self._write({p: own_of(tensor, value)})
        self._guests.pop(p, None)  # an empty entry must not keep the parameter alive
        if kept := guests_of(tensor, value):
            self._guests[p] = kept

    def __delitem__(self, p: Any) -> None:
        if isinstance(p, Param):
            self[p] = {}
        else:
            del self._guests[p]

    def pop(self, p: Any, *default: Any) -> Any:
        """Return the state of a parameter and reset it. Later steps do not write to what is returned."""
        if p not in self and default:
            return default[0]
        state = dict(self[p]) if isinstance(p, Param) else self[p]
        del self[p]
        return state

    def clear(self) -> None:
        """Reset the state of all parameters."""
        self._write({p: {} for p in self._tensors})
        self._guests.clear()

    def __contains__(self, p: object) -> bool:
        return p in (self._tensors if isinstance(p, Param) else self._guests)

    def __iter__(self) -> Iterator[Any]:
        yield from self._tensors
        yield from (key for key in list(self._guests) if not isinstance(key, Param))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


def show(p: Param, tensor: Tensor) -> dict[str, Any]:
    """The state of a parameter with its slots themselves, as DTensors if the parameter is one."""
    if tensor.share is not None:
        undivided: Iterable[str] = tensor.share.undivided
    else:
        shape = tensor.array.shape
        undivided = [name for name, x in tensor.slots.items() if x.shape != shape and not name.startswith(SCALE)]
    as_it_is = tensor.home is not None  # its owner has whole slots, other ranks have empty ones
    slots = {}
    for name, x in tensor.slots.items():
        slots[name] = x if as_it_is or name in undivided else _as_given(p, tensor, name, x)
    return {STEP: torch.tensor(tensor.updates), **slots}


def complete(tensor: Tensor, team: Alone) -> dict[str, Param]:
    """The slots of a tensor. If only some ranks have a slot that is not a DTensor, all ranks get the whole of it.

    That is so where ranks share plain tensors, where one rank updates a tensor that others have parts of, and for slots
    of rows or columns where a rank has no elements. Programs that save a state keep one rank's copy of such tensors.
    """
    share, found = tensor.share, dict(tensor.slots)
    if share is None:
        return found
    lacking = isinstance(share, Shards) and len(share.holders) < len(share.blocks)
    plain = not isinstance(share, Shards)
    for slot in found:
        if plain or tensor.home is not None or (lacking and slot in share.undivided):
            found[slot] = team.collect(tensor, slot)
    return found


def _as_given(p: Param, tensor: Tensor, slot: str, x: Param) -> Param:
    """This rank's part of a slot as a DTensor, placed as the parameter is."""
    if block_of(p) is None:
        return x
    from torch.distributed.tensor import DTensor

    assert isinstance(p, DTensor)
    shape, stride, place = p.shape, p.stride(), None
    if slot.startswith(SCALE):
        place, here = _place_of(tensor, slot)
        x, shape = x.reshape(here), torch.Size(place.shape)
        stride = torch.empty(shape, device="meta").stride()
    made = None
    if all(getattr(along, "dim", -1) < len(shape) for along in p.placements):
        made = DTensor.from_local(x, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)
    if made is None or (place is not None and block_of(made) != place):
        raise ValueError(
            f"{tensor.name!r} has rows of {p.shape[-1]} elements, whose scales do not form a DTensor; put it into a"
            " group with another `state_dtype`, or use rows of a multiple of 32 elements"
        )
    return made


def _place_of(tensor: Tensor, slot: str) -> tuple[Block, tuple[int, ...]]:
    """Where this rank's scales lie among all scales, and their shape. One process has all of them."""
    share, shape = tensor.share, tensor.shape
    if isinstance(share, Shards):
        (offset, here), seen = share.parts_of(slot)[share.rank], share.seen
    else:
        ((offset, here),), seen = scales_of(tensor.name, shape, (((0,) * len(shape), shape),))
    return Block(offset if 0 not in here else (0,) * len(here), seen), here


def put(
    who: str, first: FirstValues, given: Iterable[tuple[str, Tensor, Mapping[str, Any]]], *, copies: bool = True
) -> bool:
    """Give tensors the states in `given`, which have the form that `show` returns. An empty state changes no slot.

    Return whether any of the tensors has been updated before. `first` is told which slots no longer follow the initial
    parameters. Without `copies`, slots of the right dtype and device are used as they are. If a state does not fit,
    raise a ValueError that begins with `who` and lists every mismatch; then nothing has been changed.
    """
    wrong, ready = list[str](), list[tuple[Tensor, Any, dict[str, Param]]]()
    for name, tensor, state in given:
        if isinstance(state, Mapping) and not any(_knows(tensor, key) for key in state):
            ready.append((tensor, 0, {}))
            continue
        found = _differences(tensor, state)
        wrong += [f"{name}: {what}" for what in found]
        if not found:
            t = torch.as_tensor(state[STEP]).cpu().numpy().astype(np.int64)
            slots = {slot: _own(tensor, slot, state[slot], copies) for slot in tensor.slots}
            ready.append((tensor, t, slots))
    if wrong:
        raise ValueError(f"{who}: the state does not fit: {'; '.join(wrong)}")
    taken = dict[Tensor, list[str]]()
    for tensor, t, slots in ready:
        tensor.run.put_updates(tensor.numbers, t, np.max(t) - t)
        taken[tensor] = [slot for slot, x in slots.items() if x is not tensor.slots[slot]]
        tensor.slots = slots or tensor.slots
        tensor.run.arrays += 1
    first.loaded(taken)
    return any(np.any(t) for _, t, _ in ready)


def _differences(tensor: Tensor, state: Mapping[str, Any]) -> list[str]:
    """List the differences between a state and the state that a tensor has."""
    if not isinstance(state, Mapping) or {key for key in state if _knows(tensor, key)} != {STEP, *tensor.slots}:
        here = ", ".join(sorted(map(str, state))) if isinstance(state, Mapping) else type(state).__name__
        return [f"expected {', '.join([STEP, *tensor.slots])}; got {here}"]
    wrong, t = [], state[STEP]
    each = tensor.layers > 0 and isinstance(t, Param) and tuple(t.shape) == (tensor.layers,)
    for number in t.tolist() if each else [t.item() if isinstance(t, Param) and t.numel() == 1 else t]:
        if not (
            isinstance(number, int | float) and math.isfinite(number) and is_count(int(number)) and number % 1 == 0
        ):
            wrong.append(f"{STEP} must be an integer of at least 0; got {t!r}")
            break
    for slot, mine in tensor.slots.items():
        x = state[slot]
        if not isinstance(x, Param):
            wrong.append(f"{slot} must be a tensor; got {type(x).__name__}")
        elif not _fits(tensor, slot, x) or kind(x) != kind(mine):
            wrong.append(f"{slot} is {x.dtype} {tuple(x.shape)}, expected {mine.dtype} {tensor.whole[slot]}")
    return wrong


def _fits(tensor: Tensor, slot: str, x: Param) -> bool:
    """Whether a slot in a state has the shape of this rank's part or of the whole slot. Scales may have rows."""
    mine, whole = tensor.slots[slot], tensor.whole[slot]
    if slot.startswith(SCALE):
        return x.numel() in (mine.numel(), math.prod(whole))
    return tuple(x.shape) in (tuple(mine.shape), whole)


def _own(tensor: Tensor, slot: str, x: Param, copies: bool) -> Param:
    """This rank's part of a slot, in the shape, dtype and device of its own."""
    mine = tensor.slots[slot]
    part: Param = local(x)
    if part is x and tensor.share is not None and x.numel() != mine.numel():
        part = tensor.share.taken(slot, x)
    part = part.reshape(tuple(mine.shape)) if tuple(part.shape) != tuple(mine.shape) else part
    same = part.dtype == mine.dtype and part.device == mine.device
    return part if part is mine or (same and not copies) else like(mine, part)


def moved(p: Param, x: Any) -> Any:
    """A copy of an entry of other code, with its tensors on the parameter's device."""
    if isinstance(x, Param):
        return x.detach().clone().to(p.device)
    if isinstance(x, dict):
        return {key: moved(p, y) for key, y in x.items()}
    return copy.deepcopy(x)
