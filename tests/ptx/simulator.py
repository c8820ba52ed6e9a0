"""Kernels run as PTX by GPGPU-Sim: for numbers, block by block, or for cycles and bytes by its timing model."""

import ctypes
import os
import re
import tempfile
import weakref
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.cudacpu import nvrtc
from tests.ptx.build import built, checkout

__all__ = ["Machine", "Seen", "Simulator", "loaded"]

ARCH = "75"
"""The oldest compute capability that NVRTC compiles for; the simulator is told that it is 7.0."""

PAUSE = (
    "{ .reg .f32 %fz; .reg .pred %pz; mov.f32 %fz, 0f3F800000; sin.approx.f32 %fz, %fz;"
    " setp.gt.f32 %pz, %fz, 0f40000000; }"
)
"""About 100 cycles, in the place of ``nanosleep``: what waits for the special unit."""


ANY = (
    "{ .reg .u32 %gz; bar.sync 0; st.shared.u32 [gathered], 0; bar.sync 0; @GIVEN st.shared.u32 [gathered], 1;"
    " bar.sync 0; ld.shared.u32 %gz, [gathered]; setp.ne.u32 MADE, %gz, 0; }"
)
"""In the place of ``bar.red.or``, which the simulator ends before all threads have come."""


class Machine(NamedTuple):
    """A part of a QV100: multiprocessors, channels of memory, and KiB of L2 cache, which it has 80, 32 and 6144 of."""

    cores: int = 20
    channels: int = 8
    cache: int = 1536

    def config(self):
        """The text of its gpgpusim.config."""
        text = (checkout() / "configs/tested-cfgs/SM7_QV100/gpgpusim.config").read_text()
        ways = self.cache * 1024 // (self.channels * 2 * 32 * 128)  # of 32 sets in each half of a channel
        change = {
            "gpgpu_n_clusters": self.cores,
            "gpgpu_n_mem": self.channels,
            "gpgpu_cache:dl2": f"S:32:128:{ways},L:B:m:L:P,A:192:4,32:0,32",
            "gpgpu_memory_partition_indexing": 2 if self.channels in (8, 16, 32) else 0,  # hashed, where it has a hash
            "gpgpu_kernel_launch_latency": 0,
            "gpgpu_memlatency_stat": 0,
            "enable_ptx_file_line_stats": 0,
            "gpgpu_runtime_stat": 1000000,
        }
        for name, value in change.items():
            text, found = re.subn(rf"^-{name} .*$", f"-{name} {value}", text, flags=re.M)
            if not found:
                text += f"\n-{name} {value}\n"
        return text


class Seen(NamedTuple):
    """A launch: the kernel, the grid, and, by the timing model, cycles and the bytes of memory."""

    name: str
    grid: int
    cycles: int | None = None
    read: int = 0
    written: int = 0


def _of_64_bits(found):
    """An instruction with an integer that the parser cuts to 32 bits, if it is longer: with one in a register."""
    low, high = np.array([int(found[2]) % 2**64], np.uint64).view(np.int32).tolist()
    if high == low >> 31:
        return found[0]
    parts = f"mov.b32 low, {low}; mov.b32 high, {high}; mov.b64 both, {{low, high}};"
    return f"{{ .reg .b32 low, high; .reg .b64 both; {parts} {found[1]}both{found[3]} }}"


def _copied_sign(found):
    """The magnitude of the third number with the sign of the second, by their bits."""
    made, sign, size = found.groups()
    return f"""{{
    .reg .b64 %sign, %size;
    mov.b64 %sign, {sign};
    mov.b64 %size, {size};
    shr.u64 %sign, %sign, 63;
    shl.b64 %sign, %sign, 63;
    shl.b64 %size, %size, 1;
    shr.u64 %size, %size, 1;
    or.b64 %size, %size, %sign;
    mov.b64 {made}, %size;
    }}"""


def _funnel(found):
    """A word of two that are shifted together, to the left or right: by a shift of 64 bits."""
    way, made, low, high, by = found.groups()
    shift, words = ("shl.b64", f"{{%rest, {made}}}") if way == "l" else ("shr.u64", f"{{{made}, %rest}}")
    return f"""{{
    .reg .b64 %both;
    .reg .b32 %by, %rest;
    and.b32 %by, {by}, 31;
    mov.b64 %both, {{{low}, {high}}};
    {shift} %both, %both, %by;
    mov.b64 {words}, %both;
    }}"""


def simulable(ptx, sleep):
    """PTX as the parser of 2020 takes it: shuffles of whole warps, and nothing that came later."""
    given = r"(shfl)\.sync\.(\w+)\.b32(\s+)(%r\d+)(?:\|%p\d+)?, (%r\d+), ([%\w]+), ([%\w]+), [^;]+;"
    ptx = re.sub(given, r"\1.\2.b32\3\4, \5, \6, \7;", ptx)
    ptx = re.sub(r"nanosleep\.u32[^;]*;", PAUSE if sleep else "", ptx)
    ptx = re.sub(
        r"bar\.red\.or\.pred\s+(%p\d+), 0, (%p\d+);", lambda x: ANY.replace("MADE", x[1]).replace("GIVEN", x[2]), ptx
    )
    ptx = re.sub(r"^\.address_size 64$", r"\g<0>\n.shared .u32 gathered;", ptx, flags=re.M)
    ptx = re.sub(r"copysign\.f64\s+(%fd\d+), (%fd\d+), (%fd\d+);", _copied_sign, ptx)
    ptx = re.sub(r"shf\.([lr])\.wrap\.b32\s+(%r\d+), (%r\d+), (%r\d+), ([%\w]+);", _funnel, ptx)
    ptx = re.sub(r"bar\.warp\.sync[^;]*;", "", ptx)  # a warp's threads go on together
    ptx = re.sub(r"^\s+(\w[^;{}\[]*, )(-?\d{10,20})(;)$", _of_64_bits, ptx, flags=re.M)
    ptx = re.sub(r"^\.minnctapersm.*$", "", ptx, flags=re.M)
    ptx = re.sub(r"^\.version .*$", ".version 6.3", ptx, flags=re.M)
    ptx = re.sub(r"^\.target .*$", ".target sm_70", ptx, flags=re.M)
    return re.sub(r"//[^\n]*", "", ptx)


def _own_constants(ptx, number):
    """PTX whose constants are not where those of modules before are.

    The simulator has one list of names for all modules, and places each module's constants from the same address on.
    """
    names = re.findall(r"^\.const .*?(\w+)\[", ptx, flags=re.M)
    for name in names:
        ptx = re.sub(rf"\b{name}\b", f"{name}_of_{number}", ptx)
    before = f".const .align 8 .b8 before_{number}[{8 + 4096 * number}];\n"
    return re.sub(r"^\.const", f"{before}.const", ptx, count=1, flags=re.M)


class Simulator:
    """The one simulator of this process.

    Attributes
    ----------
    cores : int
        Its multiprocessors.
    log : list of Seen
        What was launched.
    timing : bool
        Whether launches take the timing model, which is slow.
    most : int
        The cycles after which a launch is given up; 0: none.
    """

    def __init__(self, machine):
        self.machine, self.log, self.timing, self.most, self.modules = machine, [], False, 0, {}
        self.wrong = ""
        self.folder = tempfile.TemporaryDirectory()
        (Path(self.folder.name) / "gpgpusim.config").write_text(machine.config())
        self.library = ctypes.CDLL(str(built()))
        self.library.sim_launch.restype = ctypes.c_longlong
        self.library.sim_arena.restype = ctypes.c_void_p
        size = ctypes.c_size_t()
        self.base = self.library.sim_arena(ctypes.byref(size))
        if not self.base:
            raise RuntimeError("GPGPU-Sim: the addresses of its memory are taken in this process; start another")
        self.size, self.used, self.free, self.total = size.value, 0, {}, [0, 0]
        with self._told():
            self.cores = self.library.sim_init()

    @contextmanager
    def _told(self):
        """In the simulator's own folder, where all that it says goes into a file."""
        here, out = os.getcwd(), os.dup(1)
        os.chdir(self.folder.name)
        with open("said", "wb") as said:
            os.dup2(said.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(out, 1)
            os.close(out)
            os.chdir(here)

    def room(self, size):
        """Bytes of device memory, at a multiple of 512 as CuPy's; free again when nobody has them."""
        size = -(-max(size, 1) // 512) * 512
        rooms = self.free.setdefault(size, [])
        if not rooms:
            if self.used + size > self.size:
                raise MemoryError(f"GPGPU-Sim: its memory of {self.size} bytes is full")
            rooms.append(self.base + self.used)
            self.used += size
        at = rooms.pop()
        owner = (ctypes.c_uint8 * size).from_address(at)
        weakref.finalize(owner, rooms.append, at).atexit = False
        return np.frombuffer(owner, np.uint8)

    def array(self, x):
        """A copy of an array in device memory."""
        x = np.ascontiguousarray(x)
        to = self.room(x.nbytes)[: x.nbytes].view(x.dtype).reshape(x.shape)
        to[...] = x
        return to

    def load(self, text, options=()):
        """A module of CUDA C++; its number. It takes memory of the simulator for good, and is loaded once."""
        key = text, options, self.timing
        if key not in self.modules:
            self.modules[key] = self._loaded(text, (*nvrtc.CUPY_OPTIONS, *options))
        return self.modules[key]

    def _loaded(self, text, options):
        """See `load`."""
        if self.wrong:
            raise ValueError(self.wrong)
        ptx = nvrtc.compile(text, f"compute_{ARCH}", options=options)[0].rstrip(b"\0").decode()
        words = nvrtc.compile(text, f"sm_{ARCH}", options=(*options, "--ptxas-options=-v"))[2]
        with self._told():
            Path("module.ptx").write_text(_own_constants(simulable(ptx, self.timing), len(self.modules)))
            number = self.library.sim_load(b"module.ptx")
            wrong = re.search(r"module\.ptx:\d+ Syntax error:\s+(.*)", Path("said").read_text(errors="replace"))
        if wrong:
            self.wrong = (
                f"GPGPU-Sim: does not know '{' '.join(wrong[1].split())}', and can read no more in this process"
            )
            raise ValueError(self.wrong)
        for name, use in nvrtc.usage(words).items():
            if self.library.sim_takes(number, name.encode(), use.registers, use.shared):
                raise ValueError(f"GPGPU-Sim has not found the kernel {name}")
        return number

    def launch(self, number, name, grid, block, packed):
        """Run a kernel; arguments are bytes."""
        buffers = [ctypes.create_string_buffer(x + b"\0" * 16, len(x) + 16) for x in packed]
        pointers = (ctypes.c_void_p * len(packed))(*map(ctypes.addressof, buffers))
        given = (
            number,
            name.encode(),
            grid,
            block,
            len(packed),
            pointers,
            (ctypes.c_int * len(packed))(*map(len, packed)),
        )
        with self._told():
            if not self.timing:
                self.library.sim_run(*given)
                self.log.append(Seen(name, grid))
                return
            cycles = self.library.sim_launch(*given, 1, ctypes.c_longlong(self.most))
            said = Path("said").read_text(errors="replace")
        if cycles < 0:
            raise RuntimeError(f"GPGPU-Sim: {name} has not ended after {self.most} cycles")
        self.log.append(Seen(name, grid, cycles, *self._bytes(said)))

    def _bytes(self, said):
        """The bytes that memory was read and written in the last launch: the simulator counts words of 32 on and on."""
        total = []
        for kinds in (("Read", "L2_Alloc"), ("Write", "L2_WB")):
            found = re.findall(rf"^(?:{'|'.join(kinds)}) = (\d+)", said, flags=re.M)
            total.append(32 * sum(map(int, found)))
        before, self.total = self.total, total
        return [now - then for now, then in zip(total, before, strict=True)]


@cache
def loaded(machine):
    """The simulator of this process; it can have one machine."""
    return Simulator(machine)
