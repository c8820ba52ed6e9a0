"""`Tensor`: a parameter with its slots."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from arrayopt.arrays import (
    Array,
    Ints,
    array_namespace,
    beside,
    detached,
    dtype_name,
    on_its_device,
    size,
    store,
    working_dtype,
)
from arrayopt.codecs import BLOCK, item_size
from arrayopt.rules.base import Rule
from arrayopt.rules.storage import why_wide
from arrayopt.state.quantized import narrowed, scale_of, scale_shape
from arrayopt.state.run import Run
from arrayopt.state.shares import Block, Shards, Share
from arrayopt.state.slots import new_slots

Left = dict[int, Any]
"""Which layers a step skips: for each number of layers an array of bool, for all stacked tensors with that many."""


@dataclass(eq=False, slots=True)
class Tensor:
    """One parameter with its state: its name, array, slots, and its place in the counters of the run.

    If ranks share the work, `slots` are this rank's part of them; see `Share`.
    """

    name: str
    array: Array
    slots: dict[str, Array] = field(default_factory=dict)
    run: Run = field(default_factory=lambda: Run(1))
    place: int = 0
    share: Share | None = None
    block: Block | None = None
    """The position of the array in a larger tensor, if it is a part of one."""
    whole: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of the whole slots."""
    layer_of: tuple[str, int] | None = None
    """If it is a layer of a stacked tensor: the name of that, and the number of elements before the layer."""
    number: int = -1
    """Its first place in the counters of the run, if that differs from `place`, its place among all tensors."""
    layers: int = 0
    """The number of layers of a stacked tensor, each with its own counters; 0 for other tensors."""
    home: "Tensor | None" = None
    """If it is a part of a tensor that one rank updates: the whole tensor on that rank, and zeros on others."""

    @property
    def origin(self) -> tuple[str, int]:
        """The name of the tensor and the position of the first element in it, which determine random numbers."""
        return self.layer_of or (self.name, 0 if self.block is None else self.block.first(tuple(self.array.shape)) or 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.array.shape) if self.block is None else self.block.shape

    @property
    def kind(self) -> str:
        """Whether this rank updates the ``"whole"`` tensor, a part of it (``"cut"``), or ``"none"``; see `Share`."""
        return "whole" if self.share is None else self.share.kind

    def own(self, slot: str, x: Array) -> Array:
        """This rank's part of a slot, or of an array with a value per element, that is as large as `array`."""
        return x if self.share is None else self.share.of(slot, x)

    def taken(self, slot: str, x: Array) -> Array:
        """This rank's part of a slot, or of the parameter ("p"), taken from the saved whole."""
        return x if self.share is None else self.share.taken(slot, x)

    def fresh(self, rule: Rule, array: Array | None = None) -> dict[str, Array]:
        """This rank's initial state; see `new_slots`."""
        return self.made(rule, array)[0]

    def made(self, rule: Rule, array: Array | None = None) -> tuple[dict[str, Array], dict[str, tuple[int, ...]]]:
        """As `fresh`, and the shapes of the whole slots."""
        if self.home is not None:
            return self.home.made(rule)
        self.run.streams.meet("Optimizer")  # also if a group is changed, which is no call
        array = self.array if array is None else array
        made = new_slots(rule, self.name, detached(array), self.block)
        here, shape = tuple(array.shape), tuple(array.shape) if self.block is None else self.shape
        whole = {slot: shape if tuple(x.shape) == here else tuple(x.shape) for slot, x in made.items()}
        if self.block is not None:
            whole |= {scale_of(slot): scale_shape(self.shape, 0) for slot in narrowed(made)}
        if isinstance(self.share, Shards) and self.share.spans:
            for slot, x in self._undivided(rule, made).items():
                whole[slot], made[slot] = tuple(x.shape), self.share.held(x)
        return {slot: self.own(slot, x) for slot, x in made.items()}, whole

    def hold(self, slots: dict[str, Array], whole: dict[str, tuple[int, ...]]) -> None:
        """Replace the slots; the arguments are what `made` returns."""
        self.run.streams.part()
        for tensor in filter(None, (self, self.home)):
            tensor.slots, tensor.whole = slots, whole
        self.run.arrays += 1

    def _undivided(self, rule: Rule, made: dict[str, Array]) -> dict[str, Array]:
        """The undivided slots of the whole tensor, if the user made the parts."""
        assert isinstance(self.share, Shards)
        xp, dtype, found = array_namespace(self.array), dtype_name(self.array), {}
        with on_its_device(self.array):
            one = xp.full((1,) * self.array.ndim, 0.7, dtype=working_dtype(xp, self.array), **beside(self.array))
            for slot, first in rule.all_slots(xp, one, dtype).items():
                if slot in self.share.spans:
                    begun = made[slot]
                    if not bool(xp.all(begun == first)):
                        raise ValueError(
                            f"{type(rule).__name__}: slot {slot!r} is made from the values of {self.name!r}, but this"
                            " rank has only a part of it; initialize it with a constant"
                        )
                    shape = self.share.whole(slot, begun, self.shape)
                    found[slot] = xp.asarray(xp.broadcast_to(xp.reshape(first, ()), shape), copy=True)
        return found

    @property
    def first(self) -> int:
        """Its first place in the counters of the run."""
        return self.place if self.number < 0 else self.number

    @property
    def numbers(self) -> "int | Ints":
        """Its place in the counters of the run, or the places of the layers of a stacked tensor."""
        return np.arange(self.first, self.first + self.layers) if self.layers else self.first

    @property
    def t(self) -> int:
        """The number of updates so far, including those that layers have skipped. This waits for the device."""
        own = int(self.run.updates(self.first))
        return own + int(self.run.skipped(self.first)) if self.layers else own

    @t.setter
    def t(self, value: int) -> None:
        self.run.put_updates(self.numbers, value)

    @property
    def updates(self) -> "int | Ints":
        """The number of updates so far; one per layer if these differ."""
        found = self.run.updates(self.numbers)
        return int(found.flat[0]) if (found == found.flat[0]).all() else found

    @property
    def skipped(self) -> Ints:
        """The number of updates that each layer has skipped."""
        return self.run.skipped(self.numbers)

    def skip(self, left: Left) -> None:
        """Count a skipped step of the layers that are left out."""
        if self.layers in left:
            self.run.count(self.first + np.flatnonzero(left[self.layers]), skipped=True)

    def take(self, array: Array) -> None:
        """Use another array as the parameter, or the same one after its memory has moved."""
        self.array = array
        self.run.arrays += 1

    def put(self, slot: str | None, value: Array) -> None:
        """Write to a slot, or to the parameter (None). If the array cannot be written, replace it."""
        old = self.array if slot is None else self.slots[slot]
        with on_its_device(old):
            new = store(old, value)
        if new is not old:
            self.run.arrays += 1
        if slot is None:
            self.array = new
        else:
            self.slots[slot] = new


def explain_state(tensors: Iterable[Tensor]) -> list[str]:
    """Describe which slots are stored in 8 bits, and the bytes of state per parameter of this process."""
    state = parameters = 0
    codes = dict[str, None]()
    for tensor in tensors:
        parameters += size(tensor.array)
        for x in tensor.slots.values():
            state += size(x) * item_size(dtype_name(x))
        for slot in narrowed(tensor.slots):
            root = ", the root" if dtype_name(tensor.slots[slot]) == "uint8" else ""
            codes[f"{slot} ({dtype_name(tensor.slots[slot])}{root})"] = None
    scales = f"with a scale in bfloat16 for each {BLOCK} elements"
    lines = [f"state in 8 bits: {', '.join(codes)}; {scales}"] if codes else []
    return [*lines, *([f"state: {state / parameters:.4g} bytes per parameter"] if parameters else [])]


def explain_wide(rule: Rule, tensors: Iterable[Tensor]) -> list[str]:
    """Describe which slots keep their precision despite `state_dtype`: a line for each reason."""
    slots = dict[str, dict[str, None]]()
    for rank, dtype in dict.fromkeys((x.array.ndim - rule.stacked, dtype_name(x.array)) for x in tensors):
        for slot, why in why_wide(rule, rank, dtype).items():
            slots.setdefault(why, {})[slot] = None
    return [f"    keep their precision: {', '.join(names)} ({why})" for why, names in slots.items()]
