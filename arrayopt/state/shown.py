"""`TensorState`: the state of a tensor as users read and set it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from arrayopt.arrays import (
    Array,
    array_namespace,
    copied,
    detached,
    dtype_name,
    is_array,
    library,
    on_its_device,
    place,
)
from arrayopt.foreign import listed_names
from arrayopt.rules.base import PROJECT
from arrayopt.rules.rings import gathered, member_name
from arrayopt.state.tensors import Tensor


class TensorState(Mapping[str, Any]):
    """A tensor's state: its number of updates ``t`` and its slots.

    A slot can be set: ``opt.state["w"]["hess"] = x`` copies x into it. The array must be finite, and have the
    slot's library, device, dtype and shape. With ranks, pass this rank's part or the whole slot. A ring is
    returned as a copy, with its members along the first axis.
    """

    def __init__(
        self, tensor: Tensor, changing: Callable[[str], AbstractContextManager[Any]], rings: Sequence[str] = ()
    ) -> None:
        self._tensor, self._changing, self._rings = tensor, changing, rings

    def __getitem__(self, key: str) -> Any:
        self._tensor.run.streams.meet("Optimizer.state")
        if key in self._rings:
            members = self._gathered()[key]
            return array_namespace(members[0]).stack([detached(x) for x in members])
        if key != "t" and key not in self._tensor.slots:
            raise KeyError(f"{key!r}; the slots of {self._tensor.name!r} are {', '.join(self._gathered()) or 'none'}")
        return self._tensor.t if key == "t" else self._tensor.slots[key]

    def __setitem__(self, slot: str, value: Any) -> None:
        with self._changing("Optimizer.state"):
            given = {slot: value}
            if slot in self._rings:
                count = len(self._gathered()[slot])
                if not is_array(value) or value.ndim == 0 or value.shape[0] != count:
                    raise ValueError(
                        f"Optimizer.state: ring {slot!r} of {self._tensor.name!r} must be an array"
                        f" whose first axis has length {count}"
                    )
                given = {member_name(slot, i): value[i, ...] for i in range(count)}
            checked: dict[str, Array] = {}
            for name, x in given.items():
                said = slot if name == slot else f"{slot}[{len(checked)}]"
                checked[name] = _checked(self._tensor, name, x, said, self._gathered())
            for name, x in checked.items():
                self._tensor.put(name, x)

    def _gathered(self) -> dict[str, Any]:
        """The slots, with each ring in place of its members."""
        return gathered(self._rings, self._tensor.slots)

    def __iter__(self) -> Iterator[str]:
        return iter(("t", *self._gathered()))

    def __len__(self) -> int:
        return 1 + len(self._gathered())

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy is what is shown, without the optimizer


class States(Mapping[str, Mapping[str, Any]]):
    """The states of all tensors by name; a copy, also by pickle, is plain dicts."""

    def __init__(self, shown: Mapping[str, TensorState]) -> None:
        self._shown = shown

    def __getitem__(self, name: str) -> TensorState:
        if name in self._shown:
            return self._shown[name]
        raise KeyError(f"{name!r}; {listed_names(self._shown)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._shown)

    def __len__(self) -> int:
        return len(self._shown)

    def __repr__(self) -> str:
        return repr(self._shown)

    def __reduce__(self) -> Any:
        return dict, (dict(self._shown),)


def _checked(tensor: Tensor, slot: str, value: Any, said: str, known: Mapping[str, Any]) -> Array:
    """Check and copy a value for a slot. Errors call the slot `said` and list the slots in `known`."""
    who = f"Optimizer.state: slot {said!r} of {tensor.name!r}"
    if slot not in tensor.slots or slot.startswith(PROJECT):
        own = ", ".join(repr(name) for name in known if not name.startswith(PROJECT)) or "none"
        counted = "; `t` counts updates, and is not given" if slot == "t" else ""
        raise ValueError(f"{who} cannot be assigned: the tensor's slots are {own}{counted}")
    old = tensor.slots[slot]
    if not is_array(value) or array_namespace(value) is not array_namespace(old):
        got = f"a {library(value)} array" if is_array(value) else f"a {type(value).__name__}"
        raise TypeError(f"{who} must be a {library(old)} array; got {got}")
    whole, shape = tensor.whole.get(slot, tuple(old.shape)), tuple(value.shape)
    if shape not in (tuple(old.shape), whole):
        part = "" if whole == tuple(old.shape) else f" on this rank, of {whole} in whole; pass either"
        raise ValueError(f"{who} must have shape {tuple(old.shape)}{part}; got {shape}")
    if dtype_name(value) != dtype_name(old):
        raise TypeError(f"{who} must be of dtype {dtype_name(old)}; got {dtype_name(value)}; convert it")
    if place(value)[1] != place(old)[1]:
        raise ValueError(f"{who} must be on {place(old)[1]}; got one on {place(value)[1]}")
    xp, value = array_namespace(old), detached(value)
    with on_its_device(old):
        if "int" not in dtype_name(old) and not bool(xp.all(xp.isfinite(value))):
            raise ValueError(f"{who} must be finite; got NaN or infinity")
        return copied(value if shape == tuple(old.shape) else tensor.taken(slot, value))
