"""PyTorch's tensors on the stand-in's devices, for a PyTorch without CUDA: they say that they are there.

Their memory is the host's, known to the stand-in as a device's. An operation waits for PyTorch's current stream of the
device, in which it has its place; so whoever uses the same memory on another stream, with no order, is found. As on a
device, memory that nobody has may be used by work that was given before, tensors of two devices do not meet, and NumPy
reads none of them unasked.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tests.cudacpu.standin import clocks, dlpack
from tests.cudacpu.standin.memory import UnownedMemory, allocated, written
from tests.cudacpu.standin.streams import ordered, recording

__all__ = ["Streams", "There", "copied"]

NAMES = """
__get__ __set__ __len__ as_subclass data_ptr detach dim element_size expand is_complex is_conj
is_contiguous is_floating_point is_inference is_neg numel requires_grad_ reshape resolve_conj resolve_neg size stride
storage_offset untyped_storage view view_as_real _is_view
"""
LOOKS = set(NAMES.split())
"""What looks at no elements."""

WAITS = {"__bool__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist"}
"""What the host waits for."""

COPIES = "copy_", "__setitem__"
"""What takes tensors of other devices, too."""


class Streams:
    """PyTorch's streams of the stand-in's devices, each with the stand-in's stream of that pointer: `torch.cuda`."""

    def __init__(self, cupy):
        self.cupy, self.now = cupy, {}
        for device in range(2):
            with cupy.cuda.Device(device):
                self.now[device] = self.wrapped(cupy.cuda.Stream(non_blocking=True))

    def wrapped(self, stream):
        def wait_stream(other):
            with self.cupy.cuda.Device(stream.device_id):
                stream.wait_event(other.it.record())

        return SimpleNamespace(it=stream, cuda_stream=stream.ptr, wait_stream=wait_stream)

    def current_stream(self, device=None):
        return self.now[self.cupy.cuda.Device().id if device is None else getattr(device, "index", device)]

    @contextlib.contextmanager
    def stream(self, stream):
        device = stream.it.device_id
        before, self.now[device] = self.now[device], stream
        with self.cupy.cuda.Device(device):
            yield
        self.now[device] = before

    def is_current_stream_capturing(self):
        return self.current_stream().it.is_capturing()

    @contextlib.contextmanager
    def turn(self, number, what, *, waits=False):
        """For what PyTorch does at once, and on a device when its current stream comes to it."""
        with self.cupy.cuda.Device(number), self.now[number].it:
            if recording():
                raise NotImplementedError(f"PyTorch's {what} while a stream is captured")
            with ordered(f"PyTorch's {what}", waits=waits):
                yield

    def from_dlpack(self, x):
        """`torch.utils.dlpack.from_dlpack` of an array of the stand-in's."""
        kind, number = x.__dlpack_device__()
        assert kind == dlpack.CUDA
        with self.cupy.cuda.Device(number):
            x.__dlpack__(stream=self.now[number].cuda_stream)
        made = torch.from_numpy(x._a.view(np.uint16) if x.dtype.name == "bfloat16" else x._a)
        return There.of(made.view(torch.bfloat16) if x.dtype.name == "bfloat16" else made, number, x._memory)

    def installed(self, monkeypatch):
        """PyTorch has these streams until the end of the test; return itself."""
        for name in ("current_stream", "stream", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", self.from_dlpack)
        monkeypatch.setattr(There, "streams", self)
        return self


def copied(x, number=0):
    """A copy of a NumPy array as a tensor on a device."""
    return There.of(torch.from_numpy(x.copy()), number)


class There(torch.Tensor):
    """A tensor that says on which GPU it is."""

    number, memory, streams = 0, None, None
    device = property(lambda self: torch.device("cuda", self.number))
    is_cuda = property(lambda self: True)

    @classmethod
    def of(cls, x, number, memory=None):
        """A tensor on a device, of the memory of one on the host; `memory` is what the stand-in knows of it."""
        made = x.as_subclass(cls)
        made.number = number
        storage, made.memory = torch.Tensor.untyped_storage(made), memory
        if memory is None:
            made.memory = UnownedMemory(storage.data_ptr(), storage.nbytes(), storage, number)
            if storage.nbytes() and made.memory.ptr == storage.data_ptr():
                allocated(made.memory)
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__
        given = [x for x in _flat((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = [x for x in given if isinstance(x, cls)]
        numbers = {x.number for x in there}
        if name in LOOKS:
            return _like(there, super().__torch_function__(func, types, args, kwargs), there[0].number)
        away = len(numbers) > 1 or any(not isinstance(x, cls) and x.ndim for x in given)
        if away and name not in COPIES:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        to = kwargs.get("device", args[1] if name == "to" and len(args) > 1 else None)
        home = name in WAITS or (to is not None and "cpu" in str(to))
        if name == "numpy" and not kwargs.get("force"):
            raise TypeError(f"can't convert {there[0].device} device type tensor to numpy. Use Tensor.cpu() first.")
        number = there[0].number
        with cls.streams.turn(number, name, waits=home):
            for x in there[name in COPIES :]:
                _used(x)
            made = super().__torch_function__(func, types, args, {k: v for k, v in kwargs.items() if k != "device"})
            if (name.endswith("_") and name[-2:] != "__") or name in COPIES or name.startswith("__i"):
                _used(there[0], writes=True)
            if home:
                made = made.clone().as_subclass(torch.Tensor) if isinstance(made, cls) else made
                return made.copy() if isinstance(made, np.ndarray) else made
            return _like(there, made, number, new=True)

    def __array__(self, *_, **__):
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    @property
    def __cuda_array_interface__(self):
        """As PyTorch has it: version 2, which orders no streams."""
        if self.requires_grad:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")
        found = torch.Tensor.numpy(self.as_subclass(torch.Tensor))
        return {
            "shape": tuple(self.shape),
            "typestr": found.dtype.str,
            "strides": None if self.is_contiguous() else found.strides,
            "data": (self.data_ptr() if self.numel() else 0, False),
            "version": 2,
        }


There.__module__ = "torch"  # tensors of other kinds have a meaning of their own


def _flat(x):
    """All that is in tuples, lists and dicts."""
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (tuple, list)):
        return [x]
    return [y for each in x for y in _flat(each)]


def _used(x, *, writes=False):
    """Tell the checks that the work in hand uses a tensor."""
    if x.numel():
        steps = zip(x.shape, x.stride(), strict=True)
        low, size = x.data_ptr(), (sum((n - 1) * step for n, step in steps) + 1) * x.element_size()
        written(low, size) if writes else clocks.used(low, low + size, writes=False)


def _like(there, made, number=0, *, new=False):
    """A result as on its device: with the memory of the tensor of which it is a view, or memory of its own."""
    if isinstance(made, (tuple, list)):
        return type(made)(_like(there, x, number, new=new) for x in made)
    if not isinstance(made, There) or made.memory is not None:
        return made
    start = torch.Tensor.untyped_storage(made).data_ptr()
    for x in there:
        if torch.Tensor.untyped_storage(x).data_ptr() == start:
            made.number, made.memory = x.number, x.memory
            return made
    made = There.of(made, number)
    if new:
        _used(made, writes=True)
    return made


class Factories(TorchFunctionMode):
    """Within it, what makes tensors makes them there where it is told so. It is of one thread."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if any(issubclass(x, There) for x in types) or device is None or "cuda" not in str(device):
            return func(*args, **kwargs)
        number = torch.device(device).index or 0
        with There.streams.turn(number, func.__name__):
            made = There.of(func(*args, **{**kwargs, "device": "cpu"}), number)
            _used(made, writes=True)
            return made
