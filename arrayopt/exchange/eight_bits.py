"""The 8-bit state of other libraries' optimizers, read and written."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arrayopt.arrays import array_namespace, size
from arrayopt.foreign import counted

if TYPE_CHECKING:
    import torch

NESTED = "__bnb_optimizer_quant_state__"
"""The key of bitsandbytes' codes and maps in a state, since version 0.44."""

BLOCKS = (256, 2048, 4096, 1024, 512, 128, 64)
"""Block sizes of all versions of bitsandbytes, in elements. Those of the present version come first."""

CODED = {NESTED, "qmap1", "qmap2", "absmax1", "absmax2"}
"""What bitsandbytes has in a state beside counts and slots."""

LEAST = 4096
"""The number of elements from which bitsandbytes and torchao store a tensor's state in codes."""


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
            f"load_torch: {counted(count, 'code')} cannot have {counted(size(largest), 'scale')}: the block sizes of"
            f" bitsandbytes are {', '.join(map(str, sorted(BLOCKS)))}"
        )
    flat = xp.astype(xp.reshape(codes, (-1,)), xp.int64)
    scales = xp.repeat(largest, fitting[0])[:count]
    return xp.reshape(xp.take(table, flat) * scales, tuple(codes.shape))


def dynamic_map(*, signed: bool) -> "torch.Tensor":
    """The 256 numbers of bitsandbytes and torchao (Dettmers et al., arXiv:2110.02861, section 2.2), in order.

    They are zero, one, and for each power of ten the middles of equal parts of its decade, twice as many as for the one
    below.
    """
    import torch

    found = [torch.tensor([0.0, 1.0])]
    for power in range(7):
        ends = torch.linspace(0.1, 1.0, 2 ** (power + (not signed)) + 1)
        middles = (ends[1:] + ends[:-1]) / 2.0 * 10.0 ** (power - 6)
        found += [middles, -middles] if signed else [middles]
    return torch.cat(found).sort().values


def in_codes(x: "torch.Tensor", *, signed: bool) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """The codes of the numbers of a tensor, the map that they refer to, and a scale for each block of 256.

    A scale makes the largest magnitude of its block a number of the map, which ends at less than one below zero. So
    numbers that were read from such codes get the same ones.
    """
    import torch

    table, block = dynamic_map(signed=signed), BLOCKS[0]
    flat = x.reshape(-1).to(torch.float32)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).reshape(-1, block)
    scales = blocks.amax(1)
    if signed:
        scales = torch.maximum(scales, blocks.amin(1) / table[0])
    parts = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    codes = torch.bucketize(parts, (table[1:] + table[:-1]) / 2.0).reshape(-1)[: len(flat)]
    return codes.to(torch.uint8).reshape(x.shape), table, scales


def put_codes(form: str, state: Mapping[str, Any]) -> None:
    """Convert a state dict of PyTorch's Adam or AdamW to the form of bitsandbytes or torchao."""
    import torch

    if form == "torchao":
        try:
            from torchao.optim.subclass_8bit import OptimState8bit
        except ImportError as error:
            raise ImportError("to_torch: form='torchao' needs torchao; pip install torchao") from error
        for group in state["param_groups"]:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
    for each in state["state"].values():
        slots = {name: x.to(torch.float32) for name, x in each.items() if name != "step"}
        for i, (name, x) in enumerate(slots.items(), start=1):
            signed = name == "exp_avg"
            if form == "torchao":
                if x.numel() >= LEAST and x.numel() % BLOCKS[0] == 0:
                    codes, table, scales = in_codes(x, signed=signed)
                    each[name] = OptimState8bit(codes, scales, table, signed, dtype=torch.float32)
                continue
            del each[name]
            each[f"state{i}"], each["step"] = x, int(each["step"])
            if x.numel() >= LEAST:
                each[f"state{i}"], each[f"qmap{i}"], each[f"absmax{i}"] = in_codes(x, signed=signed)
