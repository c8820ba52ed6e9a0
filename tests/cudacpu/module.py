"""A kernel's text as a shared library."""

import ctypes
import platform
import re
from functools import cache
from pathlib import Path

from tests.cudacpu.build import KernelError, build, run, runtime
from tests.cudacpu.launch import Kernel

__all__ = ["Module"]

DYNAMIC_BYTES = 49152
DYNAMIC = re.compile(r"extern\s+__shared__\s+(__align__\(\w+\)\s+|alignas\(\w+\)\s+)?([\w:\s]+?)\s+(\w+)\s*\[\s*\]")


@cache
def _machine_flags():
    """Fused multiply-add in hardware, where there is one, as on a GPU."""
    if platform.machine() != "x86_64":
        return []
    known = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return ["-mfma", "-mavx2"] if known and {"fma", "avx2"} <= set(known[1].split()) else []


class Module:
    """CUDA C++, compiled for the CPU.

    Parameters
    ----------
    code : str, optional
        The text.
    path : path, optional
        The file that holds it, instead; reports name it.
    names : sequence of str
        The kernels, as C++ names them: ``"scale"``, ``"scale<float, 256>"``.
    options : sequence of str
        For g++, such as ``"-DCHUNK=512"``, or ``"-ffp-contract=off"`` to have no multiplication join an addition.
    check : bool
        Whether launches look for faults.
    """

    def __init__(self, code=None, path=None, names=(), options=(), check=False):
        text = Path(path).read_text() if code is None else code
        self.check, self.file = check, str(path or "kernel.cu")
        self.library, self.path = _load(text, self.file, tuple(names), tuple(options), check)
        self.kernels = {name: Kernel(self, number, name) for number, name in enumerate(names)}

    def get_function(self, name):
        """The kernel of that name, one of `names`."""
        return self.kernels[name]

    def where(self, offset):
        """The file and line of the text that an instruction of the library comes from."""
        frames = run("addr2line", "-i", "-e", self.path, hex(offset - 1)).split("\n")
        outer = next(frame for frame in frames if "/cudacpu/include/" not in frame)
        return f"{self.file}:{outer.rpartition(':')[2].split(' ')[0]}"

    def shared_variables(self):
        """Offset and size of each variable in thread-local storage, which shared memory is in."""
        return _shared_variables(self.path)


@cache
def _shared_variables(path):
    """See `Module.shared_variables`."""
    rows = [line.split() for line in run("readelf", "-sW", path).splitlines()]
    found = {(int(row[1], 16), int(row[2], 0)) for row in rows if len(row) > 7 and row[3] == "TLS" and row[6] != "UND"}
    return sorted(found)


@cache
def _load(text, file, names, options, check):
    """The library of a text, loaded, and its path."""
    # -O2 would compile for half as long again; multiplications join additions as they do there
    flags = ["-O1", "-fexpensive-optimizations", "-g1", "-fvisibility=hidden", "-w", "-ffp-contract=fast"]
    flags += ["-fno-math-errno", *_machine_flags()]
    # Plain loads cannot be seen; those of volatile variables can, and have to be where a loop may wait for one.
    if check or re.search(r"(?<!asm )\bvolatile\b", text):
        flags += [
            "-fsanitize=thread",
            "--param=tsan-instrument-func-entry-exit=0",
            "--param=tsan-distinguish-volatile=1",
        ]
    if check:
        flags += ["-fsanitize=alignment"]  # a vector's load may be cut into parts, each of which is aligned
        flags += ["-fno-optimize-sibling-calls"]  # so that a call returns to the line that it is in, for reports
    path = build("kernel", [*flags, *options], [_translation(text, file, names)], [runtime().path])
    return ctypes.CDLL(str(path)), path


def _translation(text, file, names):
    """What g++ is given: headers, the text as it is but for dynamic shared arrays, and a way in for each kernel."""
    arrays = {found[3]: found for found in DYNAMIC.finditer(text)}
    if len(arrays) > 1:
        raise KernelError(f"a text can have one dynamic shared array; got {', '.join(arrays)}")
    head, tail = ['#include "cudacpu.h"'], []
    for name, found in arrays.items():
        head.append(f"alignas(16) __thread {found[2]} {name}[{DYNAMIC_BYTES} / sizeof({found[2]})];")
        tail.append(f"CUDACPU_VISIBLE char* cudacpu_dynamic(size_t* n) {{ *n = sizeof {name}; return (char*){name}; }}")
    body = re.sub(r"extern\s+__shared__", "extern __thread", text)
    tail += [f"CUDACPU_EXPORT({number}, {name})" for number, name in enumerate(names)]
    return "\n".join([*head, f'#line 1 "{file}"', body, '#line 1 "exports"', *tail])
