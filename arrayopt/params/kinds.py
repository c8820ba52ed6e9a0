"""Arrays that are not plain: subclasses, parts of larger tensors, arrays without elements."""

import sys
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import Array

OWN_MEMORY = "cpu", "cuda"
"""PyTorch's devices on which a tensor with elements has an address."""

NO_MEMORY = (
    "a tensor without memory, whose storage was freed or never made; pass a copy of existing values"
)


def refusal(array: Any, *, parameter: bool = False, functional: bool = False) -> str | None:
    """Return why a parameter or a gradient is unsupported, and what to do; None if it is supported.

    A `parameter` is written. With `functional`, nothing is, and the array's own library does all.
    """
    if isinstance(array, np.ndarray | np.generic):
        return _refused_by_numpy(array)
    if array_api_compat.is_torch_array(array) and not functional:
        return _refused_by_torch(array, parameter)
    if array_api_compat.is_jax_array(array) and not functional:
        traced = isinstance(array, sys.modules["jax"].core.Tracer)
        return "an array that JAX traces; use arrayopt.update or arrayopt.optax" if traced else None
    return None


def _refused_by_numpy(array: Any) -> str | None:
    if isinstance(array, np.ma.MaskedArray):
        return "a masked array, whose mask has no meaning here; pass x.filled(0), or x.data"
    if isinstance(array, np.ndarray) and type(array) not in (np.ndarray, np.memmap):
        return f"a {_name(array)}, a kind of array with a meaning of its own; pass np.asarray(x)"
    if not array.dtype.isnative:
        return "in another byte order than this machine's; pass x.astype(x.dtype.newbyteorder('='))"
    return None


def _refused_by_torch(tensor: Any, parameter: bool) -> str | None:
    torch = sys.modules["torch"]  # private names are not in the compatible namespace
    if getattr(tensor, "_fsdp_flattened", False):
        return "a piece of FSDP's flat parameter, without shape and norm; use FSDP2, or torch.optim"
    names = [kind.__name__ for kind in type(tensor).__mro__]
    if "DTensor" in names:
        return (
            "a DTensor, of which this process holds a part; pass x.to_local(), if a part has a"
            " meaning of its own"
        )
    is_parameter = (type(tensor).__module__, names[0]) == ("torch.nn.parameter", "Parameter")
    if type(tensor).__module__ != "torch" and not is_parameter:
        name = _name(tensor)
        return f"a {name}, a kind of tensor with a meaning of its own; pass a plain torch.Tensor"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}, and not a dense one; pass x.to_dense()"
    if tensor.is_nested:
        return "a nested tensor, whose rows have several lengths; pass them as tensors, x.unbind()"
    if tensor.is_quantized:
        return "a quantized tensor; pass x.dequantize()"
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(
        tensor
    ):
        return (
            "a tensor that torch.func or torch.compile traces, which has no memory; use"
            " arrayopt.update"
        )
    if tensor.device.type in OWN_MEMORY and tensor.numel() and not tensor.data_ptr():
        return NO_MEMORY
    if not parameter:
        return "a parameter, and no gradient; pass p.grad" if is_parameter else None
    if tensor.is_meta:
        return "a tensor on the meta device, which has no elements; call module.to_empty first"
    if tensor.is_inference():
        return (
            "a tensor made in torch.inference_mode, which cannot be written outside; pass x.clone()"
        )
    if tensor.is_conj() or tensor.is_neg():
        return (
            "a view that shows the conjugate or negative of its memory; give"
            " x.resolve_conj().resolve_neg()"
        )
    return None


def _name(x: Any) -> str:
    """Return the full name of an array's class."""
    return f"{type(x).__module__}.{type(x).__name__}"


def resolved(grads: list[Array | None], real: bool = False) -> list[Array | None]:
    """Return gradients, or `real` ones, whose memory has their values: no lazy views of PyTorch."""
    if "torch" not in sys.modules:
        return grads
    kind: Any = sys.modules["torch"].Tensor
    some = [x for x in grads if isinstance(x, kind)]
    if not any(map(kind.is_neg, some)) and (real or not any(map(kind.is_conj, some))):
        return grads
    return [x.resolve_conj().resolve_neg() if isinstance(x, kind) else x for x in grads]
