"""Launching a kernel: its arguments, the memory that it may touch, and what was found wrong."""

import ctypes

import numpy as np

from tests.cudacpu.build import KernelError, runtime

__all__ = ["Kernel", "pack"]


class Options(ctypes.Structure):
    """`Options` of runtime/state.h."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("residents", "cooperative", "check", "random", "flush", "device")),
        ("seed", ctypes.c_uint),
        ("dynamic_bytes", ctypes.c_uint),
        ("shared_count", ctypes.c_size_t),
        ("shared_variables", ctypes.c_void_p),
        ("dynamic", ctypes.c_void_p),
        ("touch", ctypes.c_void_p),
    ]


def pack(value):
    """An argument's bytes: of an array its address, of all else its value, in CuPy's types."""
    if value is None:
        return np.uint64(0).tobytes()
    if isinstance(value, np.ndarray) and value.ndim:
        return np.uint64(value.ctypes.data).tobytes()
    if isinstance(value, (bool, int)) and not isinstance(value, np.generic):
        return (np.bool_ if isinstance(value, bool) else np.int64)(value).tobytes()
    return np.asarray(value).tobytes()


class Kernel:
    """A kernel of a `Module`, to be called."""

    def __init__(self, module, number, name):
        self.module, self.name = module, name
        self.entry = getattr(module.library, f"cudacpu_kernel_{number}")
        sizes = (ctypes.c_int * 256)()
        self.sizes = list(sizes[: getattr(module.library, f"cudacpu_sizes_{number}")(sizes)])

    def __call__(
        self, grid, block, args, shared_mem=0, *, coop=False, workers=4, random=False, seed=0, ftz=True, memory=(),
        device=-1,
    ):  # fmt: skip
        """Run the grid to its end.

        Parameters
        ----------
        grid, block : tuple of int
            Blocks, and threads in each.
        args : sequence
            Arrays are passed as pointers, NumPy scalars and 0-d arrays (structured ones too) as their bytes, Python's
            int, float and bool as long long, double and bool, None as a null pointer.
        shared_mem : int
            Bytes of dynamic shared memory.
        coop : bool
            A cooperative launch: all blocks are resident and may wait for the grid.
        workers : int
            How many blocks are resident at once otherwise, and take turns. With 1, a block that waits for a later one
            is a deadlock.
        random, seed : bool, int
            Whether threads and blocks go on in an order drawn from the seed.
        ftz : bool
            Whether subnormal numbers are zero, in float and, unlike on a GPU, in double.
        memory : sequence
            In check mode: the arrays that pointers in tables point to, each an array, or a tuple of it, its name and
            whether it is uninitialised. Arrays among the arguments need not be named.
        device : int
            In check mode: whose memory may be touched; -1 for that of all devices.

        Raises
        ------
        KernelError
            With a line for each fault, ``file:line: what``.
        TypeError, ValueError
            For arguments, a grid or a block that the kernel cannot be launched with.
        """
        library, check = self.module.library, self.module.check
        grid, block = ((*map(int, size), 1, 1)[:3] for size in (grid, block))
        if min(*grid, *block) < 1 or np.prod(block) > 1024:
            raise ValueError(f"{self.name}: a grid of {grid} blocks of {block} threads cannot be launched")
        buffers, pointers = self._arguments(args)
        variables = np.array(self.module.shared_variables() if check else [], np.uintp).reshape(-1)
        dynamic = getattr(library, "cudacpu_dynamic", None)
        options = Options(
            workers, coop, check, random, ftz, device, seed, shared_mem, len(variables) // 2, variables.ctypes.data,
            ctypes.cast(dynamic, ctypes.c_void_p) if dynamic else None,
            ctypes.cast(library.cudacpu_touch, ctypes.c_void_p),
        )  # fmt: skip
        known = _regions(args, memory) if check else []
        for low, high, name, written, writable in known:
            runtime().cudacpu_memory_add(
                ctypes.c_size_t(low), ctypes.c_size_t(high - low), written, writable, name.encode()
            )
        sizes = [(ctypes.c_uint * 3)(*size) for size in (grid, block)]
        failed = runtime().cudacpu_launch(self.entry, pointers, *sizes, ctypes.byref(options))
        for low, *_ in known:
            runtime().cudacpu_memory_remove(ctypes.c_size_t(low))
        del buffers
        faults = [self._fault(number) for number in range(runtime().cudacpu_reports())]
        if failed or faults:
            raise KernelError("\n".join(faults))

    def _arguments(self, args):
        """Buffers of the arguments' bytes, and the array of pointers to them that the kernel is called with."""
        if len(args) != len(self.sizes):
            raise TypeError(f"{self.name} takes {len(self.sizes)} arguments; got {len(args)}")
        buffers = []
        for number, (value, size) in enumerate(zip(args, self.sizes, strict=True)):
            packed = pack(value)
            if len(packed) != size:
                raise TypeError(
                    f"{self.name}: argument {number} must have {size} bytes; got {len(packed)} of {value!r}"
                )
            buffers.append((ctypes.c_double * (-(-size // 16) * 2 + 2))())  # aligned below
            offset = -ctypes.addressof(buffers[-1]) % 16
            ctypes.memmove(ctypes.addressof(buffers[-1]) + offset, packed, size)
        addresses = [ctypes.addressof(each) + -ctypes.addressof(each) % 16 for each in buffers]
        return buffers, (ctypes.c_void_p * max(1, len(args)))(*addresses)

    def _fault(self, number):
        """A report as ``file:line: what``."""
        offset, line = ctypes.c_size_t(), ctypes.c_int()
        text = runtime().cudacpu_report(number, ctypes.byref(offset), ctypes.byref(line)).decode()
        if offset.value:
            return f"{self.module.where(offset.value)}: {text}"
        return f"{self.module.file}:{line.value}: {text}" if line.value else f"{self.name}: {text}"


def _regions(args, memory):
    """The memory of a launch as (low, high, name, written, writable); arrays that overlap are one region."""
    named = [
        (value, f"argument {i}", False) for i, value in enumerate(args) if isinstance(value, np.ndarray) and value.ndim
    ]
    for i, entry in enumerate(memory):
        array, *rest = entry if isinstance(entry, tuple) else (entry,)
        named.append((array, *rest, *(f"memory[{i}]", False)[len(rest) :]))
    regions = []
    for array, name, unwritten in sorted(named, key=lambda entry: entry[0].ctypes.data):
        low, high = np.lib.array_utils.byte_bounds(array)
        if array.size == 0:
            continue
        if regions and low < regions[-1][1]:
            first, last, before, written, writable = regions[-1]
            also = before if name == before else f"{before}, {name}"
            regions[-1] = (first, max(last, high), also, written or not unwritten, writable or array.flags.writeable)
        else:
            regions.append((low, high, name, not unwritten, array.flags.writeable))
    return regions
