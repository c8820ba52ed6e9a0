"""``arrayopt info``: show versions, libraries, devices and threads, and whether engines work here."""

import argparse
import os
import platform
import shlex
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

import arrayopt as ao
from arrayopt.engines.cpp.compiler import compiler
from arrayopt.engines.native.cache import usable_folder
from arrayopt.engines.threads import thread_source
from arrayopt.libraries import LIBRARIES, Library, UnavailableError, engines_for, open_library

PACKAGES = ("numpy", "array-api-compat", "numba", "torch", "jax", "array-api-strict", "ml_dtypes")


def add(commands: Any) -> None:
    """Add the parser of the command."""
    info = commands.add_parser(
        "info",
        help="show versions, libraries, devices and engines",
        description="Show what arrayopt finds here: versions, array libraries with their devices and engines,"
        " threads, and the folder of compiled code.",
    )
    info.set_defaults(run=run, parser=info)


def run(given: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    write = sys.stdout.write
    for name, number in versions().items():
        write(f"{name:<18}{number}\n")
    write("\nlibraries\n")
    for name in LIBRARIES:
        write(f"  {name:<18}{_describe(name)}\n")
    try:
        count, why = thread_source()
        write(f"\nthreads           {count}, {why}\n")
    except ValueError as error:
        write(f"\nthreads           {error}\n")
    write(f"C++ compiler      {_compiler()}\n")
    write(f"compiled code     {_cache()}\n")
    return 0


def versions() -> dict[str, str]:
    """The versions of installed packages, by name. Packages that are not installed are left out."""
    found = {"arrayopt": ao.__version__, "Python": platform.python_version(), "platform": platform.platform()}
    for package in (*PACKAGES, *(f"cupy-cuda{major}x" for major in (12, 13)), "cupy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _describe(name: str) -> str:
    """Describe a library: its devices, whether each engine works, and the default engine; or why it is unavailable."""
    try:
        library = open_library(name)
    except UnavailableError as error:
        return str(error).removeprefix(f"{name} ")
    engines = [f"{engine} {_trial(library, engine)}" for engine in engines_for(name)]
    return f"{_devices(library)}; engines: {', '.join(engines)}; 'auto' uses {_auto(library)}"


def _devices(library: Library) -> str:
    """The names of the devices that a library sees."""
    if library.name == "cupy":
        runtime = library.xp.cuda.runtime
        count = runtime.getDeviceCount()
        return ", ".join(f"{i}: {runtime.getDeviceProperties(i)['name'].decode()}" for i in range(count))
    if library.name == "torch":
        import torch

        return ", ".join(["cpu", *map(torch.cuda.get_device_name, range(torch.cuda.device_count()))])
    if library.name == "jax":
        import jax

        return ", ".join(map(str, jax.devices()))
    return "cpu"


def _trial(library: Library, engine: str) -> str:
    """Whether an engine can make a step, in words."""
    try:
        params = {"w": library.array(np.arange(6.0).reshape(2, 3))}
        ao.Optimizer(params, ao.LAMB(), engine=engine).step({"w": library.array(np.ones((2, 3)))})
    except Exception as error:  # any error of a driver or a compiler is part of the report
        return f"does not work ({' '.join(str(error).split())[:200]})"
    return "works"


def _auto(library: Library) -> str:
    """The engine that `LAMB` gets by default."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ao.NotFusedWarning)
            text = ao.Optimizer({"w": library.array(np.ones((2, 3)))}, ao.LAMB()).explain()
    except Exception as error:  # as in `_trial`
        return f"none ({' '.join(str(error).split())[:200]})"
    return next(line.split()[1] for line in text.splitlines() if line.strip().startswith("engine "))


def _compiler() -> str:
    """The compiler of the C++ engine with its flags for this processor, or why there is none."""
    try:
        found = compiler()
    except ValueError as error:
        return str(error)
    return f"{shlex.join([*found.command, *found.target])}: {found.version}"


def _cache() -> str:
    """The folder of compiled code, or why there is none."""
    try:
        folder = usable_folder()
    except OSError as error:
        return f"compiled anew in each process: {error}"
    return f"{folder}{', from ARRAYOPT_CACHE_DIR' if os.environ.get('ARRAYOPT_CACHE_DIR') else ''}"
