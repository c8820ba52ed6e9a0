"""State of other libraries' optimizers in 8 bits, as numbers."""

from collections.abc import Mapping
from typing import Any

from arrayopt.arrays import array_namespace, size

NESTED = "__bnb_optimizer_quant_state__"
"""Under what word bitsandbytes keeps codes and maps, from version 0.44 on."""

BLOCKS = (256, 2048, 4096, 1024, 512, 128, 64)
"""The elements of a block in versions of bitsandbytes; those of the present version first."""


def widened(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """The states of all parameters, with numbers in place of codes.

    bitsandbytes keeps a code of 8 bits for each element, a map of 256 numbers, and the largest
    magnitude of each block; torchao has tensors of its own, which widen themselves.

    Raises
    ------
    ValueError
        If codes are not in blocks.
    """
    found = {}
    for key, state in states.items():
        found[key] = state if isinstance(key, str) else _widened(state)
    return found


def _widened(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter."""
    made = dict(state)
    made.update(made.pop(NESTED, {}))
    for name, x in state.items():
        if type(x).__module__.startswith("torchao."):
            made[name] = x.dequantize()
    for i in ("1", "2"):
        table, largest = made.pop(f"qmap{i}", None), made.pop(f"absmax{i}", None)
        if table is None:
            continue
        if largest is None:
            raise ValueError(
                "load_torch: cannot read an 8-bit state with one scale per tensor; create the bitsandbytes optimizer"
                " with block_wise=True or optim_bits=32"
            )
        made[f"state{i}"] = _numbers(made[f"state{i}"], table, largest)
    return made


def _numbers(codes: Any, table: Any, largest: Any) -> Any:
    """What codes stand for."""
    xp, count = array_namespace(codes), size(codes)
    fitting = [block for block in BLOCKS if -(-count // block) == size(largest)]
    if not fitting:
        raise ValueError(
            f"load_torch: {count} codes have {size(largest)} scales, which matches no block size of bitsandbytes;"
            f" these are {', '.join(map(str, sorted(BLOCKS)))}"
        )
    flat = xp.astype(xp.reshape(codes, (-1,)), xp.int64)
    scales = xp.repeat(largest, fitting[0])[:count]
    return xp.reshape(xp.take(table, flat) * scales, tuple(codes.shape))
