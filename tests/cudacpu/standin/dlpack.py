"""DLPack capsules, read and made by hand: their arrays say that they are on a CUDA device, and may be bfloat16.

The layout is that of ``DLManagedTensor`` in https://dmlc.github.io/dlpack/latest/c_api.html.
"""

import ctypes

import numpy as np

from tests.cudacpu.standin.memory import UnownedMemory

__all__ = ["CUDA", "export", "take"]

CUDA = 2
BFLOAT = 4
KINDS = {0: "i", 1: "u", 2: "f", 5: "c"}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _tensor(capsule):
    return _Tensor.from_address(_pointer(capsule, b"dltensor"))


def export(values, device):
    """A capsule of an array's memory. It lives as long as the capsule."""
    bfloat16 = values.dtype.name == "bfloat16"
    capsule = (values.view(np.uint16) if bfloat16 else values).__dlpack__()
    tensor = _tensor(capsule)
    tensor.device_type, tensor.device_id = device
    if bfloat16:
        tensor.code = BFLOAT
    return capsule


def take(capsule, owner, device_id):
    """The memory that a capsule tells of, and it as an array of NumPy's; both keep the capsule and its owner."""
    tensor = _tensor(capsule)
    if tensor.code == BFLOAT:
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16)
    elif tensor.code == 6:
        dtype = np.dtype(np.bool_)
    else:
        dtype = np.dtype(f"{KINDS[tensor.code]}{tensor.bits // 8}")
    shape = tensor.shape[: tensor.ndim]
    strides = [x * dtype.itemsize for x in tensor.strides[: tensor.ndim]] if tensor.strides else None
    steps = zip(shape, strides, strict=True) if strides else ()
    size = (
        sum((n - 1) * step for n, step in steps) + dtype.itemsize if strides else int(np.prod(shape)) * dtype.itemsize
    )
    size = 0 if 0 in shape else size
    memory = UnownedMemory((tensor.data or 0) + tensor.byte_offset, size, (capsule, owner), device_id)
    return memory, np.ndarray(shape, dtype, memory.view, strides=strides)
