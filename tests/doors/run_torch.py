"""PyTorch's own tests of its optimizers, out of a checkout, with `arrayopt.torch` in their place.

``PYTORCH=~/pytorch python -m tests.doors.run_torch`` prints what fails; ``--theirs`` runs them over PyTorch. Arguments
after that are pytest's. The checkout must be of the version that is installed. docs/torch.md says what differs.
"""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

import arrayopt.torch as door

TESTS = ("test_optim.py", "test_lrscheduler.py", "test_swa_utils.py", "test_muon.py")
"""Files in test/optim; those that the checkout lacks are left out."""


def put_in_place() -> list[str]:
    """Have PyTorch's classes of our names be ours, also in its table of cases. Returns the names."""
    table = importlib.import_module("torch.testing._internal.common_optimizers").optim_db
    names = [name for name in door.__all__ if isinstance(getattr(torch.optim, name, None), type)]
    taken = sorted(set(names) - {"Optimizer"})
    for name in taken:
        theirs, ours = getattr(torch.optim, name), getattr(door, name)
        setattr(torch.optim, name, ours)
        setattr(sys.modules[theirs.__module__], name, ours)
        for info in table:
            if info.optim_cls is theirs:
                info.optim_cls = ours
    return taken


def main(arguments: list[str]) -> int:
    """Run the tests; the exit status is pytest's, or 2 where there is no checkout."""
    root = Path(os.environ.get("PYTORCH", "")).expanduser() / "test"
    files = [str(root / "optim" / name) for name in TESTS if (root / "optim" / name).exists()]
    if not files:
        print("set PYTORCH to a checkout of PyTorch that has test/optim", file=sys.stderr)
        return 2
    if "--theirs" in arguments:
        arguments = [word for word in arguments if word != "--theirs"]
    else:
        print("ours:", ", ".join(put_in_place()))
    sys.path.insert(0, str(root))
    options = ["-p", "no:cacheprovider", "-q", "--tb=line", "--noconftest", f"--rootdir={root}", "-c", "/dev/null"]
    return int(pytest.main([*files, *options, *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
