"""Dequantization of the 8-bit state of other libraries' optimizers."""

from collections.abc import Mapping
from typing import Any

from arrayopt.arrays import array_namespace, size

NESTED = "__bnb_optimizer_quant_state__"
"""The key of bitsandbytes' codes and maps in a state, since version 0.44."""

BLOCKS = (256, 2048, 4096, 1024, 512, 128, 64)
"""Block sizes of all versions of bitsandbytes, in elements. Those of the present version come first."""


def dequantized(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the states of all parameters with floating-point numbers in place of codes.

    bitsandbytes stores an 8-bit code for each element, a map from codes to 256 numbers, and the largest magnitude of
    each block. torchao has its own tensor classes, with a method ``dequantize``.

    Raises
    ------
    ValueError
        If there is not one scale for each block, in blocks of a size that bitsandbytes uses.
    """
    found = {}
    for key, state in states.items():
        found[key] = state if isinstance(key, str) else _dequantized(state)
    return found


def _dequantized(state: Mapping[str, Any]) -> dict[str, Any]:
    """As `dequantized`, for the state of one parameter."""
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
    """The numbers that codes stand for: those of `table`, times the scale of the block, `largest`."""
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
