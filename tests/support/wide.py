"""JAX in double precision."""

import importlib


def wide_numbers():
    """A section in which JAX has float64; older versions have it in another module."""
    jax = importlib.import_module("jax")
    found = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
    return found.enable_x64(True)
