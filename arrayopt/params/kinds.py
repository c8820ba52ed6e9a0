"""Arrays that are not what they seem: subclasses, parts of larger tensors, arrays without elements of their own."""

import sys
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, dtype_name

__all__ = ["plain", "refusal"]


def refusal(x: Any, *, parameter: bool = False, functional: bool = False) -> str | None:
    """What an array is that cannot be served, and what to do; None for those that can.

    Parameters
    ----------
    x : array
        A parameter or a gradient.
    parameter : bool
        Whether it is to be written.
    functional : bool
        Whether nothing is written and all is done by the array's own library.
    """
    if isinstance(x, np.ndarray | np.generic):
        return _numpy(x)
    if array_api_compat.is_torch_array(x) and not functional:
        return _torch(x, parameter)
    return None


def _numpy(x: Any) -> str | None:
    """See `refusal`."""
    if isinstance(x, np.ma.MaskedArray):
        return "a masked array, whose masked elements have no meaning here; give x.filled(0), or x.data"
    if isinstance(x, np.ndarray) and type(x) not in (np.ndarray, np.memmap):
        return f"a {_name(x)}, a kind of array with a meaning of its own; give np.asarray(x)"
    if not x.dtype.isnative:
        return "in another byte order than this machine's; give x.astype(x.dtype.newbyteorder('='))"
    return None


def _torch(x: Any, parameter: bool) -> str | None:
    """See `refusal`."""
    torch = sys.modules[
        "torch"
    ]  # what private names are asked of, which the compatible namespace has not
    if getattr(x, "_fsdp_flattened", False):
        return "a piece of FSDP's flat parameter, without its shape and norm; use FSDP2, or a torch optimizer"
    names = [kind.__name__ for kind in type(x).__mro__]
    if "DTensor" in names:
        return "a DTensor, of which this process holds a part; give x.to_local(), if a part has a meaning of its own"
    if type(x).__module__ != "torch" and (type(x).__module__, names[0]) != (
        "torch.nn.parameter",
        "Parameter",
    ):
        return (
            f"a {_name(x)}, a kind of tensor with a meaning of its own; give a plain torch.Tensor"
        )
    if x.layout != torch.strided:
        return f"a tensor of layout {x.layout}, and not a dense one; give x.to_dense()"
    if x.is_quantized:
        return "a quantized tensor; give x.dequantize()"
    if torch._is_functional_tensor(x) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "a tensor that torch.func or torch.compile traces, which has no memory; use arrayopt.update"
    if not parameter:
        return None
    if x.is_meta:
        return "a tensor on the meta device, which has no elements; give it some first, as by module.to_empty"
    if x.is_inference():
        return (
            "a tensor made in torch.inference_mode, which cannot be written outside; give x.clone()"
        )
    if x.is_conj() or x.is_neg():
        return "a view that shows the conjugate or negative of its memory; give x.resolve_conj().resolve_neg()"
    return None


def _name(x: Any) -> str:
    """The full name of an array's class."""
    return f"{type(x).__module__}.{type(x).__name__}"


def plain(grads: list[Array | None]) -> list[Array | None]:
    """Gradients with elements that lie in memory as they are: conjugate and negative views of PyTorch are resolved."""
    first = next((g for g in grads if g is not None), None)
    if not array_api_compat.is_torch_array(first):
        return grads
    some = [g for g in grads if g is not None]
    views = any(map(type(first).is_neg, some))
    if not views and dtype_name(first).startswith("complex"):
        views = any(map(type(first).is_conj, some))
    return (
        [None if g is None else g.resolve_conj().resolve_neg() for g in grads] if views else grads
    )
