"""Functions on arrays that the array API standard lacks: names of dtypes, dtypes of arithmetic, writing, copying."""

import importlib
import math
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, lru_cache
from itertools import repeat
from types import ModuleType
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.codecs import CODECS

Array = Any
"""An array of any array-API library."""

Grads = Sequence[Array | None]
"""A gradient for each of several tensors; None if a tensor has no gradient."""

Ints = np.ndarray[Any, np.dtype[np.int64]]
"""An array of integers on the host: sizes, positions, counts."""

WORKING = {name: codec.working for name, codec in CODECS.items()}
"""The dtype of arithmetic for each storage dtype."""

NARROW = tuple(name for name, codec in CODECS.items() if codec.rounds)
"""Storage dtypes in which nothing is computed."""

REAL = {"complex64": "float32", "complex128": "float64"}
"""The real counterparts of complex dtypes."""

_OF_NUMPY = (np.ndarray, np.generic, complex, float, int, type(None))
"""Arrays of NumPy, and what does not matter among arrays; a tuple, because it is asked in each step."""

WRAPPED = {"arange", "argsort", "ceil", "clip", "count_nonzero", "cumulative_prod", "cumulative_sum", "eye", "fft"}
WRAPPED |= {"floor", "linalg", "linspace", "nonzero", "sign", "sort", "std", "take_along_axis", "tensordot", "trunc"}
WRAPPED |= {"unique_all", "unique_counts", "unique_inverse", "unique_values", "var"}
"""Functions that NumPy has in another form than the array API, and that few steps need."""


class _NumPy(ModuleType):
    """The array API's namespace for NumPy: functions of NumPy itself, and for `WRAPPED` of `array_api_compat.numpy`.

    That is imported when one of them is used, because it imports all of NumPy's modules, which takes as long as the
    rest of a first step. Before NumPy 2.1, all functions are of the wrapper.
    """

    def __getattr__(self, name: str) -> Any:
        own = name not in WRAPPED and hasattr(np, "unstack")
        found = getattr(np if own else importlib.import_module(self.__name__), name)
        setattr(self, name, found)
        return found

    @staticmethod
    def finfo(x: Any) -> Any:
        """`numpy.finfo` of a dtype, or of an array's."""
        return np.finfo(x.dtype if isinstance(x, np.ndarray | np.generic) else x)

    @staticmethod
    def iinfo(x: Any) -> Any:
        """`numpy.iinfo` of a dtype, or of an array's."""
        return np.iinfo(x.dtype if isinstance(x, np.ndarray | np.generic) else x)


NUMPY = _NumPy("array_api_compat.numpy")


def array_namespace(*xs: Any) -> Any:
    """The array API's namespace for arrays. Numbers and None among them do not matter."""
    own = bool(xs) and all(map(isinstance, xs, repeat(_OF_NUMPY)))
    if own and isinstance(xs[0], np.ndarray | np.generic) and xs[0].dtype.kind != "V":  # JAX's zero gradients are of V
        return NUMPY
    found = array_api_compat.array_namespace(*xs, use_compat=False if own else None)
    return NUMPY if found is np else found


def is_array(x: Any) -> bool:
    """Whether x is an array of an array-API library, and not masked, or a NumPy scalar (which is not writable)."""
    if isinstance(x, np.ndarray):
        return not isinstance(x, np.ma.MaskedArray)
    return bool(array_api_compat.is_array_api_obj(x))


def is_captured(x: Array) -> bool:
    """Whether operations on an array are now being captured in a CUDA graph."""
    if array_api_compat.is_cupy_array(x):
        return bool(sys.modules["cupy"].cuda.get_current_stream().is_capturing())
    if array_api_compat.is_torch_array(x) and x.device.type == "cuda":
        return bool(sys.modules["torch"].cuda.is_current_stream_capturing())
    return False


def dtype_name(x: Array) -> str:
    """The dtype's plain name, such as ``"bfloat16"``, the same in every library."""
    return _named(x.dtype)


@lru_cache(maxsize=256, typed=True)  # typed, since dtypes of array-api-strict warn if compared with NumPy's
def _named(dtype: Any) -> str:
    return str(dtype).rsplit(".", 1)[-1]


def plain_name(dtype: Any) -> str | None:
    """The plain name of a library's dtype, such as ``torch.bfloat16`` or ``numpy.int8``; None of anything else."""
    if isinstance(dtype, type):  # a scalar type of NumPy or JAX
        dtype = np.dtype(dtype) if issubclass(dtype, np.generic) else getattr(dtype, "dtype", None)
    return _named(dtype) if isinstance(dtype, np.dtype) or type(dtype).__name__ == "dtype" else None


def dtype_of(xp: Any, name: str) -> Any:
    """A library's dtype with this plain name. Raise ValueError if the library lacks it."""
    who = xp.__name__.removeprefix("array_api_compat.")
    if hasattr(xp, name):
        return getattr(xp, name)
    if who in ("numpy", "cupy"):
        with suppress(ImportError):
            import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy
        if name in np.sctypeDict:
            return np.dtype(name)
    raise ValueError(f"{who} has no dtype {name}{'; pip install ml_dtypes, which has it' if who == 'numpy' else ''}")


def kind(x: Array) -> str:
    """``"real"`` or ``"complex"``, or the name of a dtype that has no arithmetic here, such as ``"bool"``."""
    name = dtype_name(x)
    return name if name not in WORKING else "complex" if name.startswith("complex") else "real"


def real_dtype(stored: str) -> str:
    """The dtype of real arithmetic for arrays of a storage dtype."""
    return REAL.get(WORKING[stored], WORKING[stored])


def working_dtype(xp: Any, x: Array, *, real: bool = False) -> Any:
    """The dtype of arithmetic on x, at least float32; with `real`, its real counterpart."""
    name = dtype_name(x)
    return getattr(xp, real_dtype(name) if real else WORKING[name])


def place(x: Array) -> tuple[Any, Any]:
    """The library and the device of an array."""
    return array_namespace(x), array_api_compat.device(x)


def beside(x: Array) -> dict[str, Any]:
    """Keyword arguments for a function that makes an array on the device of x. JAX, which traces, decides itself."""
    return {} if array_api_compat.is_jax_array(x) else {"device": array_api_compat.device(x)}


def library(x: Array) -> str:
    """The plain name of an array's library: ``"numpy"``, ``"torch"``, ``"jax.numpy"``, ..."""
    name: str = array_namespace(x).__name__
    return name.removeprefix("array_api_compat.")


def size(x: Array) -> int:
    """The number of elements."""
    return math.prod(x.shape)


def writable(x: Array) -> bool:
    """Whether an array can be written in place."""
    return bool(array_api_compat.is_writeable_array(x))


def holder(x: Array) -> Any:
    """An identifier of the memory block that contains an array, the same for all its views; None if it is unknown."""
    if isinstance(x, np.ndarray) or array_api_compat.is_cupy_array(x):
        while hasattr(x.base, "base"):
            x = x.base
    elif array_api_compat.is_torch_array(x):
        try:
            return x.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):  # tensors that torch.func traces
            return None
    elif array_api_compat.is_writeable_array(x):
        return None
    return id(x)


def holds_alone(x: Array) -> bool:
    """Whether a writable array takes up the whole block of memory that contains it."""
    if isinstance(x, np.ndarray | np.generic):
        return x.base is None and x.flags.writeable
    if array_api_compat.is_torch_array(x):
        return holder(x) is not None and bool(x.untyped_storage().nbytes() == x.nbytes)
    return not array_api_compat.is_cupy_array(x) or x.base is None


def copied(x: Array) -> Array:
    """A differentiable copy, as `as_array`."""
    return np.array(x) if isinstance(x, np.ndarray | np.generic) else array_namespace(x).astype(x, x.dtype, copy=True)


def as_array(x: Array) -> Array:
    """x as a plain array: NumPy's scalars, which operations on arrays without axes return, and memmaps become one."""
    return np.asarray(x) if isinstance(x, np.generic | np.memmap) else x


def detached(x: Array) -> Array:
    """The same memory without PyTorch's gradient recording. Arrays of other libraries are returned as they are."""
    return x.detach() if array_api_compat.is_torch_array(x) else x


def store(target: Array, value: Array) -> Array:
    """Write `value` into `target` and return `target`, if it is writable; else return `value`, of the same dtype."""
    if value is target:
        return target
    if writable(target):
        detached(target)[...] = value
        return target
    return value


def look(kind: type) -> Callable[[Array], tuple[Any, ...]]:
    """A function from arrays of one type to (dtype, shape, and the device and layout if the library has several)."""
    return _look(kind.__module__.partition(".")[0])


@cache
def _look(package: str) -> Callable[[Array], tuple[Any, ...]]:
    attributes = {"numpy": (), "dask": (), "cupy": ("data.device_id",), "torch": ("device", "layout")}
    return operator.attrgetter("dtype", "shape", *attributes.get(package, ("device",)))


def on_its_device(x: Array) -> AbstractContextManager[Any]:
    """A context in which CuPy makes new arrays on the device of x, and PyTorch's autocast is off."""
    made: AbstractContextManager[Any] = x.device if array_api_compat.is_cupy_array(x) else nullcontext()
    if array_api_compat.is_torch_array(x):
        torch = sys.modules["torch"]
        if torch.is_autocast_enabled(x.device.type):
            made = torch.autocast(x.device.type, enabled=False)
    return made


def sharded_like(like: Callable[[], Any], f: Callable[..., Any], *args: Any) -> Any:
    """Return f(*args), and let JAX choose the sharding of intermediate values, even on a mesh with explicit axes.

    On such a mesh, JAX otherwise needs the sharding of each matrix product. `like` returns a tree, or a prefix of the
    results' tree: results are sharded as its arrays, and not sharded if it has None.
    """
    jax: Any = sys.modules.get("jax") if array_api_compat.is_jax_array(args[0]) else None
    if not hasattr(jax, "typeof"):
        return f(*args)
    mesh = jax.typeof(args[0]).sharding.mesh
    if not any("Explicit" in str(kind) for kind in getattr(mesh, "axis_types", ())):
        return f(*args)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    out = jax.tree.map(lambda x: whole if x is None else jax.typeof(x).sharding, like(), is_leaf=lambda x: x is None)
    return jax.sharding.auto_axes(f, out_sharding=out)(*args)


def is_on_host(x: Array) -> bool:
    """Whether x is a NumPy array or a PyTorch tensor on the CPU, so that `memory` accepts it."""
    return isinstance(x, np.ndarray) or (bool(array_api_compat.is_torch_array(x)) and x.device.type == "cpu")


def memory(x: Array) -> "np.ndarray[Any, Any]":
    """A NumPy view of a NumPy array or a PyTorch tensor on the CPU, of integers if NumPy lacks the tensor's dtype."""
    if isinstance(x, np.ndarray) or not array_api_compat.is_torch_array(x):
        return np.asarray(x)
    return np.asarray(_readable(x).numpy())


@cache
def _numpy_has(dtype: str) -> bool:
    """Whether NumPy has a dtype without `ml_dtypes`."""
    return dtype == "bool" or hasattr(np, dtype)


def _readable(x: Any) -> Any:
    """A PyTorch tensor that NumPy can read: a view as integers, if NumPy lacks the dtype."""
    if _numpy_has(dtype_name(x)):
        return x.detach()
    return x.detach().view(getattr(array_namespace(x), f"int{8 * x.element_size()}"))


def to_host(x: Array) -> "np.ndarray[Any, Any]":
    """Wait for the values, and return them as NumPy's, without a copy if possible. `ml_dtypes` has what NumPy lacks."""
    if array_api_compat.is_torch_array(x):
        name = dtype_name(x)
        if _numpy_has(name):
            return np.asarray(x.numpy(force=True))
        return np.asarray(_readable(x.resolve_neg()).numpy(force=True)).view(dtype_of(np, name))
    return np.asarray(x.get() if array_api_compat.is_cupy_array(x) else x)


def of_host(model: Array, values: "np.ndarray[Any, Any]") -> Array:
    """Copy NumPy's values to a new array of the model's library, dtype and device."""
    xp, device = place(model)
    values = np.array(values)  # a copy, because libraries may share the memory of an array that they get
    name = dtype_name(values)
    if array_api_compat.is_torch_array(model) and not _numpy_has(name):
        bits = xp.asarray(values.view(f"int{8 * values.itemsize}"), device=device)
        return bits.view(getattr(xp, name)).to(model.dtype)
    return xp.asarray(values, dtype=model.dtype, device=device)


def zeros_in_place_of(x: Array) -> Array:
    """Zeros of x's shape, dtype, library and device, broadcast from a single zero."""
    if isinstance(x, np.ndarray):
        return _zeros(x.shape, x.dtype)
    xp, device = place(x)
    with on_its_device(x):
        return xp.broadcast_to(xp.zeros((), dtype=x.dtype, device=device), tuple(x.shape))


@lru_cache(maxsize=4096)
def _zeros(shape: tuple[int, ...], dtype: Any) -> "np.ndarray[Any, Any]":
    return np.ndarray(shape, dtype, bytes(dtype.itemsize), strides=(0,) * len(shape))


def like(model: Array, x: Array) -> Array:
    """Copy x, which has the model's shape and dtype, to a new array of the model's library, device and layout."""
    xp, device = place(model)
    if place(x) != (xp, device):
        x = of_host(model, to_host(x))
    with on_its_device(model):
        return store(xp.empty_like(detached(model)), detached(x))
