"""All names that the package uses from CuPy, and those of the tests' stand-in, exist in CuPy.

CuPy can be imported without a GPU. A new process does so, because in this one the stand-in has its name.
"""

import ast
import inspect
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import arrayopt
from tests.cudacpu import standin

PACKAGE = Path(arrayopt.__file__).parent
ASK = """
import importlib, inspect, json, sys, warnings
warnings.simplefilter("ignore")
import cupy

def signature(x):
    # Of compiled functions the docstring's first line tells, where CuPy was built to tell.
    try:
        return str(inspect.signature(x))
    except (TypeError, ValueError):
        return (getattr(x, "__doc__", None) or "").strip().partition("\\n\\n")[0]

answers = {}
for name in json.load(sys.stdin):
    found = cupy
    try:
        for part in name.split(".")[1:]:
            found = getattr(found, part)
    except AttributeError:
        try:
            found = importlib.import_module(name)
        except ImportError:
            answers[name] = None
            continue
    answers[name] = signature(found) if callable(found) else ""
print(json.dumps(answers))
"""


def ask(names, environment=None):
    """For each name None if CuPy lacks it, else its signature, or an empty string if that is unknown."""
    options = {"capture_output": True, "text": True, "check": True, "env": environment}
    ran = subprocess.run([sys.executable, "-c", ASK], input=json.dumps(sorted(names)), **options)
    return json.loads(ran.stdout)


def names_used(text):
    """The dotted names below ``cupy`` that a Python source uses, by whatever name it imported them."""
    aliases, used = {}, {}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "cupy":
                    used[each.name] = node.lineno
                    aliases[each.asname or "cupy"] = each.name if each.asname else "cupy"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cupy":
            for each in node.names:
                used[f"{node.module}.{each.name}"] = node.lineno
                aliases[each.asname or each.name] = f"{node.module}.{each.name}"
    for node in ast.walk(tree):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in aliases:
            used[".".join([aliases[inner.id], *reversed(parts)])] = node.lineno
    return used


def test_names_are_found_in_a_text():
    text = "import cupy\nimport cupy as cp\nfrom cupy import cuda\nfrom cupy.cuda import Stream as S\nimport numpy\n"
    text += "def f(x):\n    cupy.RawModule(code=x)\n    cp.cuda.runtime.memcpyAsync(x.data)\n    cuda.Device(0).use()\n"
    text += "    S.null.synchronize()\n    numpy.zeros(3)\n"
    expected = {"cupy", "cupy.cuda", "cupy.cuda.Stream", "cupy.RawModule", "cupy.cuda.runtime.memcpyAsync"}
    expected |= {"cupy.cuda.runtime", "cupy.cuda.Device", "cupy.cuda.Stream.null", "cupy.cuda.Stream.null.synchronize"}
    assert set(names_used(text)) == expected


needs_cupy = pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed")


@needs_cupy
def test_names_that_the_package_uses_exist():
    used = {}
    for path in PACKAGE.rglob("*.py"):
        for name, line in names_used(path.read_text()).items():
            used.setdefault(name, f"{path.relative_to(PACKAGE.parent)}:{line}")
    assert "cupy.cuda" in used
    answers = ask(used)
    missing = [f"{place}: {name}" for name, place in sorted(used.items()) if answers[name] is None]
    assert not missing
    with standin.installed() as cupy:  # or the tests could not run it
        for name in used:
            found = cupy
            for part in () if name.startswith("cupy.cuda.nccl") else name.split(".")[1:]:  # tests/ranks has another
                found = getattr(found, part)


@needs_cupy
def test_cupy_s_module_for_cublas_is_linked_with_it():
    """The engine asks this module for cuBLAS; where there is no GPU it cannot be imported, but read."""
    folder = Path(find_spec("cupy").origin).parents[1] / "cupy_backends" / "cuda" / "libs"
    (module,) = folder.glob("cublas.*")
    assert b"libcublas.so." in module.read_bytes()
    assert b"cublasGemmStridedBatchedEx" in module.read_bytes()


def offered(cupy):
    """The stand-in's own functions and classes with their methods, by the names that CuPy has for them."""
    modules = {"cupy": cupy, "cupy.cuda": cupy.cuda, "cupy.cuda.runtime": cupy.cuda.runtime}
    for prefix, module in modules.items():
        for name, value in vars(module).items():
            own = value is cupy.ndarray or getattr(value, "__module__", "").startswith("tests.cudacpu")
            if not own or hasattr(value, "__wrapped__"):
                continue
            yield f"{prefix}.{name}", value
            if isinstance(value, type) and not issubclass(value, Exception):
                for method, what in inspect.getmembers(value):
                    if not method.startswith("_"):
                        yield f"{prefix}.{name}.{method}", what


@needs_cupy
def test_the_stand_in_offers_nothing_that_cupy_has_not():
    with standin.installed() as cupy:
        ours = dict(offered(cupy))
    assert {"cupy.ndarray.get", "cupy.cuda.Stream.begin_capture", "cupy.cuda.runtime.memcpyAsync"} <= set(ours)
    answers = ask(ours)
    assert [name for name in ours if answers[name] is None] == []
    compared = 0
    for name, what in ours.items():
        theirs = answers[name]
        own = inspect.isfunction(what) or (isinstance(what, type) and not issubclass(what, Exception))
        if not own or hasattr(what, "__wrapped__") or "(" not in theirs or "*args" in theirs:
            continue
        for parameter in inspect.signature(what).parameters.values():
            if parameter.name != "self" and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                assert re.search(rf"\b{parameter.name}\b", theirs), f"{name}: CuPy's signature is {theirs}"
                compared += 1
    assert compared > 50
