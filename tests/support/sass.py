"""Facts about compiled kernels from their machine code (SASS), which NVIDIA's nvdisasm prints; no device is needed.

Kernels are compiled with line numbers, which change no instruction. These tell the pass of each instruction, and the
array of each load.
"""

import re
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.cudacpu import nvrtc

__all__ = ["Instruction", "Kernel", "PassFacts", "available", "facts", "kernel"]

THREADS = 256
REGISTERS, SHARED = 65536, 64 << 10
"""The 32-bit registers of a multiprocessor, and the bytes of shared memory of the smallest (compute capability 7.5)."""

GRID = 3
"""The number of blocks that a launch has per multiprocessor; see `arrayopt.engines.cuda.launches`."""


@cache
def _nvdisasm():
    """The path of the disassembler, or None."""
    root = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    return next((x for x in (root / "cu13/bin/nvdisasm", root / "cuda_nvdisasm/bin/nvdisasm") if x.exists()), None)


def available():
    """Whether the compiler and the disassembler are installed."""
    return nvrtc.available() and _nvdisasm() is not None


@dataclass(frozen=True)
class Instruction:
    """An instruction: its opcode with modifiers, as ``LDG.E.128``; its operands; its lines of the source.

    The first of the lines is the innermost: where a function was inlined, the line that calls it follows.
    """

    opcode: str
    operands: str
    lines: tuple[int, ...]
    label: bool

    @property
    def bits(self):
        """The width of a load or store in bits."""
        return int(found[1]) if (found := re.search(r"\.(64|128|256)\b", self.opcode)) else 32

    @property
    def registers(self):
        """The numbers of the registers among the operands."""
        return {int(x) for x in re.findall(r"\bR(\d+)\b", self.operands)}


@dataclass(frozen=True)
class Kernel:
    """A kernel's source, its instructions, and its use of registers and shared memory."""

    text: str
    code: tuple[Instruction, ...]
    usage: nvrtc.Usage

    @property
    def resident(self):
        """The number of blocks that a multiprocessor runs at once."""
        taken = -(-self.usage.registers // 8) * 8 * THREADS
        return min(GRID, REGISTERS // taken, SHARED // (self.usage.shared + 1024))

    def count(self, *opcodes):
        """The number of instructions with these opcodes, which are compared up to the first dot."""
        return sum(i.opcode.partition(".")[0] in opcodes for i in self.code)


@dataclass(frozen=True)
class PassFacts:
    """What a pass does.

    Attributes
    ----------
    in_flight : int
        Bytes that a multiprocessor's threads wait for at once, at most: of the arrays, in the path of aligned ones.
        Where a piece is asked for before the one before it is used, those of two pieces.
    ahead : int
        Of these, for a block, those of a piece that is asked for before the one before it is used; 0: none is.
    loads, stores : tuple of int
        Bits of each load and store that is wider than a number.
    doubles : int
        Conversions between double precision and float.
    """

    in_flight: int
    ahead: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]
    doubles: int


def kernel(text, arch, name="run"):
    """Compile a source for an architecture, and return one of its kernels."""
    code, _, log = nvrtc.compile(text, arch=arch, options=(*nvrtc.CUPY_OPTIONS, "--ptxas-options=-v", "-lineinfo"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        said = subprocess.run([_nvdisasm(), "-c", "-gi", file.name], capture_output=True, text=True, check=True).stdout
    section = re.search(rf"^\.text\.{name}:\n(.*?)(?=^//-----|\Z)", said, re.MULTILINE | re.DOTALL)[1]
    return Kernel(text, tuple(_instructions(section)), nvrtc.usage(log)[name])


def _instructions(section):
    """Yield the instructions of a section, each with the source lines that the listing has before it."""
    lines, fresh, label = [], True, False
    for row in section.splitlines():
        if row.lstrip().startswith("//##"):
            lines = [] if fresh else lines
            lines += [int(x) for x in re.findall(r"line (\d+)", row)]
            fresh = False
        elif re.match(r"\.L_\w+:", row):
            label = True
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", row):
            yield Instruction(found[1], found[2], tuple(dict.fromkeys(lines)), label)
            fresh, label = True, False


def _lines_of(text, j):
    """The numbers of the source lines (from 1) of the function of stage j, and of the pass that it calls.

    For inlined code the compiler may name only the pass, and not its caller.
    """
    rows = text.splitlines()

    def block(head, end):
        first = next(i for i, row in enumerate(rows) if head in row)
        return range(first + 1, rows.index(end, first) + 2)

    function = block(f" void stage{j}(", "}")
    called = re.search(r"^ +(Pass\d+) pass\(", "\n".join(rows[i - 1] for i in function), re.MULTILINE)
    return {*function, *(block(f"struct {called[1]} {{", "};") if called else ())}


def facts(made, j):
    """The `PassFacts` of stage j of a kernel, which must be a pass."""
    whole = _lines_of(made.text, j)
    own = [i if any(line in whole for line in i.lines) else None for i in made.code]
    rows = made.text.splitlines()
    line = next((n for n, row in enumerate(rows, 1) if "if (ahead) next.load(" in row), 0)
    ahead = [i if i and line in i.lines else None for i in own]
    carried = _waiting(made.code, ahead)
    wide = [i for i in own if i and i.bits > 32 and i.opcode.startswith(("LD.", "LDG.", "ST.", "STG."))]
    return PassFacts(
        max(_waiting(made.code, own), 2 * carried) * THREADS * made.resident,
        carried * THREADS,
        tuple(sorted(i.bits for i in wide if i.opcode.startswith("LD"))),
        tuple(sorted(i.bits for i in wide if i.opcode.startswith("ST"))),
        sum(i is not None and i.opcode.startswith("F2F") and "F64" in i.opcode for i in own),
    )


def _waiting(code, some):
    """The most bytes of a thread in flight: requested by wide loads among `some`, before one of these is used."""
    most, waiting = 0, set()
    for i, own in zip(code, some, strict=True):
        if i.label or i.registers & waiting:
            waiting = set()
        if own and i.bits > 32 and i.opcode.startswith(("LD.", "LDG.")):
            first = int(re.search(r"\bR(\d+)", i.operands)[1])
            waiting |= set(range(first, first + i.bits // 32))
            most = max(most, 4 * len(waiting))
    return most
