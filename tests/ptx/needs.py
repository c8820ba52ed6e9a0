"""What the simulator needs that is not here."""

import shutil

from tests.cudacpu import nvrtc
from tests.ptx.build import checkout

__all__ = ["missing"]


def missing():
    """Why nothing can be simulated here, in words; an empty string where it can."""
    if checkout() is None:
        return "GPGPUSIM names no checkout of gpgpu-sim_distribution"
    tools = [name for name in ("g++", "make", "bison", "flex") if shutil.which(name) is None]
    if tools or not nvrtc.available():
        return f"{', '.join(tools) or 'NVRTC'} is not installed"
    return ""
