"""Prints what `make test-oldest` installs: each dependency at the oldest version that pyproject.toml states.

Of NVIDIA's compilers, which tests alone use, it is the newest of the oldest minor version.
"""

import tomllib
from pathlib import Path

STATED = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

USED = ("cpu", "cuda12", "mpi", "checkpoint", "demo", "verify", "diagnose", "test", "cuda-check")
"""The extras that are taken. Where two state a version of one package, that of the first is."""

TOOLS = ("ruff", "mypy", "arrayopt")
"""What the tests do not import, and the package's own extras."""


def oldest():
    """The requirements, one for each package."""
    found = {}
    extras = [line for extra in USED for line in STATED["optional-dependencies"][extra]]
    for line in [*STATED["dependencies"], *extras]:
        name = line.partition(">")[0].partition("=")[0].partition("[")[0]
        if name not in TOOLS:
            pinned = line.replace(">=", "==")
            found.setdefault(name, pinned.replace(";", ".*;") if name.startswith("nvidia-") else pinned)
    return list(found.values())


if __name__ == "__main__":
    print("\n".join(oldest()))
