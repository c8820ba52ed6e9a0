"""Array libraries by name: which can be used here, and conversions. A new library is a row of `LIBRARIES`."""

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import is_cupy_array, is_torch_array

from arrayopt.arrays import NUMPY, REAL, WORKING, Array, dtype_name, library
from arrayopt.engines.registry import FUSED

LIBRARIES = {
    "numpy": ("array_api_compat.numpy", "pip install numpy"),
    "cupy": ("array_api_compat.cupy", "an NVIDIA GPU and pip install 'arrayopt[cuda12]' or 'arrayopt[cuda13]'"),
    "torch": ("array_api_compat.torch", "pip install torch"),
    "jax": ("jax.numpy", "pip install jax"),
    "array_api_strict": ("array_api_strict", "pip install array-api-strict"),
}
"""For each library, its array-API namespace and what it needs."""


class UnavailableError(Exception):
    """A library, or a dtype of it, cannot be used here; the message says why."""


@dataclass(frozen=True)
class Library:
    """An array library that works here, with functions that the array API lacks.

    Attributes
    ----------
    name : str
        Its key in `LIBRARIES`.
    xp : namespace
        Its array-API namespace.
    """

    name: str
    xp: Any

    def array(self, values: Any, dtype: str = "float32") -> Array:
        """An array of the library, on its default device, that shares no memory with `values`.

        Raises
        ------
        UnavailableError
            If the library does not have the dtype, or NumPy needs ml_dtypes for it.
        """
        if self.name == "torch" and dtype == "bfloat16":
            return self.xp.asarray(np.array(values, np.float32)).to(self.xp.bfloat16)
        try:
            made = self.xp.asarray(np.array(values, numpy_dtype(dtype)))
        except TypeError as error:
            raise UnavailableError(f"{self.name} has no {dtype}: {error}") from error
        if dtype_name(made) != dtype:
            hint = "; set JAX_ENABLE_X64=1" if self.name == "jax" else ""
            raise UnavailableError(f"{self.name} makes {dtype_name(made)} of {dtype}{hint}")
        return made

    def synchronize(self) -> None:
        """Wait for all work on the library's device. JAX and others wait when a value is read."""
        if self.name == "cupy":
            self.xp.cuda.get_current_stream().synchronize()


def open_library(name: str) -> Library:
    """Import a library and check that it works.

    Raises
    ------
    UnavailableError
        If it is not installed, or finds no device.
    """
    module, needs = LIBRARIES[name]
    try:
        xp = NUMPY if name == "numpy" else importlib.import_module(module)
        xp.sum(xp.zeros(1))
    except Exception as error:  # CuPy has different errors for a missing library, driver, device or compiler
        lines = [line.strip() for line in str(error).splitlines() if any(map(str.isalnum, line))]
        reason = lines[0] if lines else type(error).__name__
        raise UnavailableError(f"{name} cannot be used: {reason}; it needs {needs}") from error
    return Library(name, xp)


def engines_for(name: str) -> tuple[str, ...]:
    """The engines for a library's arrays: ``"array_api"``, then the fused ones, the best one last."""
    return "array_api", *reversed(FUSED.get(_namespace(name), ()))


def library_name(x: Array) -> str:
    """The key in `LIBRARIES` of an array's library, or the library's plain name."""
    return next((name for name in LIBRARIES if _namespace(name) == library(x)), library(x))


def _namespace(name: str) -> str:
    """The plain name of a library's namespace, as `arrayopt.arrays.library` gives it."""
    return LIBRARIES[name][0].removeprefix("array_api_compat.")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype with the plain name of a floating dtype.

    Raises
    ------
    UnavailableError
        If it needs ml_dtypes, which is not installed.
    ValueError
        If parameters cannot have this dtype.
    """
    if name not in WORKING:
        raise ValueError(f"must be one of {', '.join(WORKING)}; got {name!r}")
    if name == "bfloat16":
        try:
            import ml_dtypes

            bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
            return bfloat16
        except ImportError as error:
            raise UnavailableError("numpy has no bfloat16 without ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(name)


def to_numpy(x: Array) -> np.ndarray[Any, Any]:
    """A copy of an array's values on the host, in float64 or complex128. This waits for the device."""
    wide = np.complex128 if dtype_name(x) in REAL else np.float64
    if is_torch_array(x):  # PyTorch cannot convert bfloat16 to NumPy
        x = (x.float() if dtype_name(x) == "bfloat16" else x).numpy(force=True)
    elif is_cupy_array(x):
        x = x.get()
    return np.array(x, dtype=wide)
