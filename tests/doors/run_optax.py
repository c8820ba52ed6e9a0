"""optax's own tests of its optimizers, out of the installed package, with `arrayopt.optax` in their place.

``python -m tests.doors.run_optax`` prints what fails; ``--theirs`` runs them over optax. Arguments after that are
pytest's. docs/optax.md says why each failure is one.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

import optax
import pytest

import arrayopt.optax as door

TESTS = ("_src/alias_test.py", "contrib/_common_test.py", "contrib/_muon_test.py")
"""Files of the installed package."""


def put_in_place() -> list[str]:
    """Have optax's functions of our names be ours, wherever its tests look for them. Returns the names."""
    places = [optax, importlib.import_module("optax._src.alias"), importlib.import_module("optax.contrib")]
    taken = set[str]()
    for place in places:
        for name in door.__all__:
            if callable(getattr(place, name, None)):
                setattr(place, name, getattr(door, name))
                taken.add(name)
    return sorted(taken)


def main(arguments: list[str]) -> int:
    """Run the tests; the exit status is pytest's."""
    if "--theirs" in arguments:
        arguments = [word for word in arguments if word != "--theirs"]
    else:
        print("ours:", ", ".join(put_in_place()))
    root = Path(optax.__file__).parent
    files = [str(root / name) for name in TESTS if (root / name).exists()]
    options = ["-p", "no:cacheprovider", "-q", "--tb=line", "-o", "filterwarnings=", "--noconftest"]
    return int(pytest.main([*files, *options, f"--rootdir={root}", "-c", "/dev/null", *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
