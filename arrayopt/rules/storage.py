"""Storage of slots: the values of `Rule.state_dtype`."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from arrayopt.arrays import plain_name
from arrayopt.codecs import PAIR
from arrayopt.rules.names import AROUND

STORAGES = ("float16", "bfloat16", "int8")
"""The dtypes that slots can be stored in."""


def read_storage(where: str, value: Any) -> Any:
    """Check `state_dtype`; return its stored form: None, a name, or pairs of a slot and a name."""
    if value is None or isinstance(value, str) or plain_name(value) is not None:
        return _checked(where, value)
    if isinstance(value, tuple):
        with suppress(TypeError, ValueError):
            value = dict(value)
    if not isinstance(value, Mapping):
        raise TypeError(f"{where} must be {_options()}; got {value!r}; to set it per slot, pass a mapping")
    pairs = []
    for slot, dtype in value.items():
        if not isinstance(slot, str):
            raise TypeError(f"{where} must map names of slots; got {slot!r}")
        pairs.append((slot, _checked(f"{where} of slot {slot!r}", dtype)))
    return tuple(sorted(pairs)) or None


def _options() -> str:
    return f"None, {', '.join(map(repr, STORAGES[:-1]))} or {STORAGES[-1]!r}"


def _checked(where: str, dtype: Any) -> str | None:
    """Check a dtype for slots, which may be one of a library, and return its name. Or raise TypeError or ValueError."""
    if dtype is None:
        return None
    name = dtype if isinstance(dtype, str) else plain_name(dtype)
    if name is None:
        raise TypeError(f"{where} must be {_options()}; got {dtype!r}")
    if name not in STORAGES:
        raise ValueError(f"{where} must be {_options()}; got {dtype!r}")
    return name


def storage_for(value: Any, slot: str) -> str | None:
    """The dtype that `state_dtype` sets for a slot; None if it sets none."""
    return dict(value).get(slot) if isinstance(value, tuple) else value


def code_of(dtype: str, *, unsigned: bool, pairs: bool) -> str:
    """The dtype of a slot's array: codes of roots are unsigned, and those of complex numbers are pairs."""
    if dtype != "int8":
        return dtype
    return PAIR if pairs else "uint8" if unsigned else dtype


def why_wide(rule: Any, rank: int, dtype: str) -> dict[str, str]:
    """For each slot that keeps its precision despite `state_dtype`, the reason."""
    if rule.state_dtype is None:
        return {}
    p, narrow = np.zeros((2,) * rank, complex if dtype.startswith("complex") else float), rule.storage(rank, dtype)
    found = dict[str, str]()
    for member, x in rule.all_slots(np, p, dtype).items():
        ring = member.rpartition("_")[0]
        slot = ring if ring in rule.rings else member
        asked = storage_for(rule.state_dtype, slot) is not None
        if not asked or member in narrow or member in rule.constants:
            continue
        if member in AROUND:
            if (member, rule.master_weights) != ("master", "split"):
                found[member] = "a copy of the parameter"
        elif x.shape != p.shape:
            found[slot] = "not one value for each element"
        else:
            found[slot] = "the rule needs its precision"
    return found
