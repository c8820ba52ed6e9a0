"""The headers in ``kernels/``, which generated C++ and CUDA sources contain."""

from functools import cache
from pathlib import Path

__all__ = ["header"]


@cache
def _folder() -> Path:
    """Where the headers lie: beside the package in a source tree, in it where it is installed."""
    package = Path(__file__).resolve().parents[1]
    beside = package.parent / "kernels"
    in_tree = (package.parent / "pyproject.toml").exists() and beside.is_dir()
    return beside if in_tree else package / "_kernels"


@cache
def header(name: str) -> str:
    """The text of a header of ``kernels/``."""
    return (_folder() / name).read_text()
