"""A stand-in for CuPy, for tests: arrays in host memory that behave as on a GPU, and kernels run by `tests.cudacpu`.

::

    with standin.installed() as cupy:  # `import cupy` finds it, and array-api-compat takes its arrays for CuPy's
        x = cupy.asarray(np.ones(3, np.float32))
        kernel = cupy.RawModule(code=text).get_function("scale")
        with standin.forbidden("allocation", "sync", "device-to-host", "pageable"):
            kernel((1,), (32,), (x, np.float32(2), np.int64(3)))

It is strict where CuPy is: nothing is converted to NumPy or from it unasked; arguments are packed as CuPy packs them;
an array belongs to a device. And it is strict where a GPU is merely slow, or wrong now and then: work waits in its
stream until something waits for it, a copy reads pinned memory no sooner than that, memory starts uninitialised, and
all launches are checked (`checking`). Within `any_order` a seed chooses what is done when, in any way that CUDA allows.
It cannot show that CuPy takes the same calls: test_cupy_names.py looks at that.
"""

import gc
import sys
from contextlib import contextmanager
from importlib.machinery import PathFinder

from tests.cudacpu.standin import heads, queues
from tests.cudacpu.standin.clocks import Race, racing
from tests.cudacpu.standin.kernels import checking
from tests.cudacpu.standin.memory import Forbidden, counts, forbidden, reused
from tests.cudacpu.standin.namespace import modules
from tests.cudacpu.standin.queues import any_order

__all__ = [
    "Forbidden",
    "Race",
    "any_order",
    "checking",
    "counts",
    "forbidden",
    "install",
    "installed",
    "racing",
    "reused",
    "uninstall",
]

_away = {}  # the modules that are not in sys.modules now: ours, or those that ours took the place of


BOUND = "arrayopt.engines.cuda."
"""Where modules have imported CuPy by name, and must do so again."""


def _ours(name):
    names = name.split(".")[0] in ("cupy", "cupyx", "cupy_backends") or name.startswith("array_api_compat.cupy")
    return names or name.startswith(BOUND)


def _exchange(incoming):
    """Put modules in sys.modules, and return those that had their names."""
    outgoing = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
    sys.modules.update(incoming)
    for name in {*outgoing, *incoming}:  # a package has its modules as attributes, too
        parent, _, own = name.rpartition(".")
        if parent in sys.modules and not _ours(parent):
            if name in incoming:
                setattr(sys.modules[parent], own, incoming[name])
            elif hasattr(sys.modules[parent], own):
                delattr(sys.modules[parent], own)
    return outgoing


def install():
    """Have ``import cupy`` find the stand-in, and return it."""
    if sys.modules.get("cupy") is not modules()["cupy"]:
        _away["real"] = _exchange(_away.pop("ours", None) or modules())
        heads.known()
    return sys.modules["cupy"]


def uninstall():
    """Have ``import cupy`` find what it found before."""
    if "real" in _away:
        if PathFinder.find_spec("cupy") is None:
            gc.collect()  # finalizers import CuPy, of which nothing is left afterwards
        queues.forget()
        heads.unknown()
        _away["ours"] = _exchange(_away.pop("real"))


@contextmanager
def installed():
    """`install` for a while."""
    already = "real" in _away
    try:
        yield install()
    finally:
        if not already:
            uninstall()
