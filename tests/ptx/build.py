"""GPGPU-Sim as a library, built from a checkout of gpgpu-sim_distribution that the environment's ``GPGPUSIM`` names."""

import os
import shutil
from functools import cache
from pathlib import Path

from tests.cudacpu.build import CACHE, kept, run
from tests.ptx.edits import EDITS, edited

__all__ = ["built", "checkout"]

HERE = Path(__file__).parent


def checkout():
    """The folder of the checkout; None where nothing names one."""
    named = os.environ.get("GPGPUSIM")
    return Path(named) if named else None


@cache
def built():
    """The path of the library; the first time takes some minutes."""
    source = checkout()
    if not (source / "src" / "cuda-sim").is_dir():
        raise ValueError(f"GPGPUSIM: must be the folder of a checkout of gpgpu-sim_distribution; got {source}")

    def make(path):
        copy, out = path.parent / "gpgpusim", path.parent / "out"
        for name in ("src", "libcuda"):
            shutil.copytree(source / name, copy / name)
        shutil.copy(source / "version", copy)
        edited(copy)
        run("make", "-s", "-j", len(os.sched_getaffinity(0)), "-f", HERE / "Makefile", f"SRC={copy}", f"OUT={out}")
        shutil.copy(out / "libgpgpusim.so", path)

    CACHE.mkdir(mode=0o700, exist_ok=True)
    own = [(HERE / name).read_text() for name in ("Makefile", "driver.cc", "types.h")]
    return kept("gpgpusim.so", [source, *own, EDITS], make)
