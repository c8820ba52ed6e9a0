"""The machine that figures are of: what it is, and how fast it copies."""

import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from arrayopt.engines.threads import run
from benchmarks.contest import THREADS, Contestant, Running

__all__ = ["COPY", "LIBRARIES", "Machine", "copying", "look"]

COPY = "copy"
LIBRARIES = ("arrayopt", "numpy", "numba", "torch", "jax", "optax", "timm", "pytorch_optimizer", "came-pytorch")
LIBRARIES += ("schedulefree", "prodigyopt")


def copying(size: int) -> Contestant:
    """Copying an array of so many bytes to another with all threads, as a contestant; it moves twice the bytes."""

    def build() -> Running:
        source, target = np.ones(size // 4, np.float32), np.zeros(size // 4, np.float32)
        pieces = zip(np.array_split(target, THREADS), np.array_split(source, THREADS), strict=True)
        tasks: list[Callable[[], None]] = [partial(np.copyto, *piece) for piece in pieces]
        return Running(lambda: run(tasks))

    return Contestant(COPY, build, held=2.0 * size)


@dataclass(frozen=True)
class Machine:
    """What a run was made on.

    Attributes
    ----------
    rows : dict of str to str
        What there is to say, by heading.
    """

    rows: dict[str, str]

    @property
    def stamp(self) -> str:
        """The commit and the date of the run, which stand below each table."""
        return f"Commit {self.rows['commit']}, {self.rows['date']}."


def look(command: str) -> Machine:
    """Look at the machine, before the run."""
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg()) if hasattr(os, "getloadavg") else "unknown"
    installed = {name: _version(name) for name in LIBRARIES}
    rows = {
        "processor": _processor(),
        "threads used": f"{THREADS} of {os.cpu_count()}",
        "memory": f"{_memory() / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "libraries": ", ".join(f"{name} {v}" for name, v in installed.items() if v),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load before the run": f"{load} (averages over 1, 5 and 15 minutes)",
        "command": f"`{command}`",
    }
    return Machine(rows)


def _version(name: str) -> str:
    if name == "arrayopt":
        import arrayopt

        return arrayopt.__version__
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit that is checked out; a plus says that files differ from it."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--abbrev=10",
        "--exclude=*",
        "--dirty=+",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _memory() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return float("nan")
