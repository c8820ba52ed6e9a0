"""The package as a whole: what an import brings in, what is public, and that all of it is documented."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import arrayopt
from tests.oldest import oldest

ROOT = Path(arrayopt.__file__).parent
PRIVATE = {"arrayopt.__main__"}  # runs the command line when imported
MODULES = sorted(
    {"arrayopt"} | {m.name for m in pkgutil.walk_packages([str(ROOT)], "arrayopt.") if m.name not in PRIVATE}
)
OPTIONAL = (
    "cupy",
    "torch",
    "jax",
    "numba",
    "matplotlib",
    "sklearn",
    "rich",
    "dask",
    "array_api_strict",
    "ml_dtypes",
    "safetensors",
)


def module(name):
    """The module, or a skip where it needs what is not installed."""
    return pytest.importorskip(name, reason=f"{name} needs a package that is not installed", exc_type=ImportError)


def source(name):
    path = ROOT.joinpath(*name.split(".")[1:])
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


# ---- imports --------------------------------------------------------------------------------------------------------


def fresh(code):
    """What a fresh interpreter, with warnings as errors, prints."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, cwd=ROOT.parent
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


USES = {
    "imported": "import arrayopt",
    "used": (
        "import numpy as np, arrayopt as ao\n"
        "w = np.ones((3, 2))\n"
        "opt = ao.Optimizer({'w': w}, ao.LAMB(lr=ao.schedules.Cosine(0.1, 5)), engine='array_api', clip_norm=1.0)\n"
        "opt.step({'w': w}); opt.explain(); repr(opt); opt.load_state_dict(opt.state_dict())"
    ),
}


@pytest.mark.parametrize("code", USES.values(), ids=USES)
def test_no_optional_package_is_imported(code):
    found = fresh(f"{code}\nimport sys\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))").split()
    assert {"arrayopt", "numpy", "array_api_compat"} <= set(found)
    assert not set(found) & set(OPTIONAL)


@pytest.mark.skipif(not hasattr(np, "unstack"), reason="NumPy before 2.1 has too little of the array API")
def test_a_first_step_does_not_import_all_of_numpy():
    """`array_api_compat.numpy` does, which takes as long as the rest of a first step."""
    code = "import arrayopt as ao, numpy as np\nopt = ao.Optimizer(np.ones(2), ao.LAMB(lr=0.1), engine='numpy')\n"
    code += "opt.step(np.ones(2))\nao.minimize(lambda x: (float(x @ x), 2 * x), np.ones(2))\n"
    assert fresh(f"{code}import sys\nprint('numpy.f2py' in sys.modules)").split() == ["False"]


def test_only_declared_dependencies_are_imported():
    before = "import sys, numpy, array_api_compat; before = set(sys.modules)\n"
    after = "import arrayopt\nprint(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    extra = set(fresh(before + after).split()) - {"arrayopt"} - set(sys.stdlib_module_names)
    assert extra == set()


def test_the_oldest_stated_versions_are_those_that_are_tested():
    found = {line.partition("==")[0].partition("[")[0]: line for line in oldest()}
    assert {"numpy", "array-api-compat", "numba", "cupy-cuda12x", "mpi4py", "safetensors", "jax", "optax"} <= set(found)
    assert all("==" in line or line.startswith("nvidia-") for line in found.values())


def test_imports_point_one_way():
    """The lower room never imports the upper one, at the top of a module."""
    rooms = ["arrays", "rules", "groups", "engines", "optimizer"]
    for name in MODULES:
        room = name.split(".")[1] if "." in name else None
        if room not in rooms:
            continue
        imported = {
            node.module.split(".")[1]
            for node in ast.parse(source(name)).body
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("arrayopt.")
        }
        assert not imported & set(rooms[rooms.index(room) + 1 :]), name


def test_the_package_is_typed_and_has_a_version():
    assert (ROOT / "py.typed").is_file()
    assert re.fullmatch(r"\d+\.\d+\.\d+", arrayopt.__version__)


# ---- what is public -------------------------------------------------------------------------------------------------


HOMES = ("", ".optax", ".projections", ".ranks", ".rules", ".schedules", ".testing", ".torch")
"""Where users find names: in `__all__`. Other modules offer each name without an underscore."""


@pytest.mark.parametrize("name", [f"arrayopt{home}" for home in HOMES])
def test_all_is_there_and_sorted_and_right(name):
    found = module(name)
    names = found.__all__
    assert isinstance(names, list)
    assert names == sorted(names, key=isort_key)
    assert len(set(names)) == len(names)
    for public in names:
        assert not public.startswith("_")
        getattr(found, public)
    exec(f"from {name} import *", space := {})
    assert set(space) - {"__builtins__"} == set(names)


def isort_key(name):
    """CONSTANTS, then Classes, then functions: the order that ruff keeps."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_what_stands_at_the_top():
    expected = {"Optimizer", "Rule", "Hyper", "init", "update", "real", "flag", "choice", "schedules"}
    expected |= {"LAMB", "LANS", "CAME", "LARS", "AdamW", "Adam", "SGD", "Adafactor"}
    expected |= {
        "Lion",
        "RMSprop",
        "NAdam",
        "RAdam",
        "Adan",
        "AdEMAMix",
        "ScheduleFreeAdamW",
        "AdamH",
        "FISTA",
        "AdaBelief",
        "Sophia",
        "Prodigy",
    }
    expected |= {"Muon", "NorMuon", "MuonH", "SOAP"}
    assert expected <= set(arrayopt.__all__)
    assert set(dir(arrayopt)) >= set(arrayopt.__all__)
    for rule in (getattr(arrayopt, name) for name in arrayopt.__all__):
        if isinstance(rule, type) and issubclass(rule, arrayopt.Rule) and rule is not arrayopt.Rule:
            assert getattr(rule, "__final__", False), f"{rule} is not final"


# ---- docstrings -----------------------------------------------------------------------------------------------------

PUBLIC = {
    f"{home}.{public}": getattr(sys.modules[home] if home in sys.modules else importlib.import_module(home), public)
    for home in ("arrayopt", "arrayopt.schedules", "arrayopt.testing")
    for public in importlib.import_module(home).__all__
}
DOCUMENTED = {name: x for name, x in PUBLIC.items() if inspect.isfunction(x) or inspect.isclass(x)}
METHODS = {
    f"{name}.{key}": value
    for name, owner in DOCUMENTED.items()
    if inspect.isclass(owner)
    for key, value in vars(owner).items()
    if not key.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
}


def section(doc, title):
    """The text of a section of a NumPy-style docstring, or None."""
    found = re.search(rf"^{title}\n-+\n(.*?)(?=^\w[\w ]*\n-+\n|\Z)", doc, re.MULTILINE | re.DOTALL)
    return found and found[1]


def described(doc):
    """The names that a Parameters section describes."""
    lines = (section(doc, "Parameters") or "").splitlines()
    return {n.strip("* ") for line in lines if line and not line[0].isspace() for n in line.split(" : ")[0].split(",")}


def parameters_of(x):
    """The names that a caller can give."""
    if dataclasses.is_dataclass(x):
        return {f.name for f in dataclasses.fields(x) if f.init}
    try:
        signature = inspect.signature(x.__init__ if inspect.isclass(x) and "__init__" in vars(x) else x)
    except ValueError:
        return set()
    return {p for p in signature.parameters if p not in ("self", "_", "given")}  # the last two take nothing


def raises_something(x):
    """Whether a function's text raises; a class whose making checks its arguments does."""
    if hasattr(x, "__post_init__") or dataclasses.is_dataclass(x):
        return hasattr(x, "__post_init__")
    return "raise " in inspect.getsource(x.__init__ if inspect.isclass(x) else x)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for(name):
    doc = ast.get_docstring(ast.parse(source(name)))
    assert doc
    assert doc.splitlines()[0].endswith((".", ":")) or len(doc.splitlines()) > 1
    for node in ast.parse(source(name)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if "overload" in map(ast.unparse, node.decorator_list):
                continue  # the function itself has it
            assert ast.get_docstring(node), f"{name}.{node.name} has no docstring"


@pytest.mark.parametrize("name", DOCUMENTED)
def test_public_objects_are_documented(name):
    x = DOCUMENTED[name]
    doc = inspect.cleandoc(x.__doc__)
    assert doc.splitlines()[0].endswith(".")
    if inspect.isclass(x) and inspect.isabstract(x) and not dataclasses.is_dataclass(x):
        return  # nobody calls it
    if inspect.isclass(x) and issubclass(x, Exception):
        return  # nobody makes one
    if name in ("arrayopt.schedules.Product", "arrayopt.schedules.Sum"):
        return  # made by * and +, which have looked at what they are given
    given = parameters_of(x) - {"args", "kwargs"}
    if given:
        # what every rule has is described where it is: in Rule
        is_rule = inspect.isclass(x) and issubclass(x, arrayopt.Rule) and x is not arrayopt.Rule
        common = parameters_of(arrayopt.Rule) if is_rule else set()
        assert described(doc) >= given - common, f"not described: {sorted(given - common - described(doc))}"
        assert described(doc) <= given, f"described, but not there: {sorted(described(doc) - given)}"
    if inspect.isfunction(x) and inspect.signature(x).return_annotation is not None:
        assert section(doc, "Returns"), "no Returns"
    if inspect.isclass(x) and issubclass(x, arrayopt.Rule):
        for title in ("Notes", "References", "Examples"):
            assert section(doc, title) or x is arrayopt.Rule, f"no {title}"
        assert ".. math::" in doc or x is arrayopt.Rule
    family = x.__mro__ if inspect.isclass(x) else [x]  # what all of a family raise may stand where it is checked
    assert raises_something(x) <= any(section(inspect.cleandoc(y.__doc__ or ""), "Raises") for y in family), "no Raises"


@pytest.mark.parametrize("name", METHODS)
def test_public_methods_are_documented(name):
    x = METHODS[name]
    owner = DOCUMENTED[name.rpartition(".")[0]]
    key = name.rpartition(".")[2]
    doc = x.__doc__ or next(
        (vars(b)[key].__doc__ for b in owner.__mro__ if key in vars(b) and vars(b)[key].__doc__), None
    )
    assert doc, "no docstring, nor at what it overrides"
    if isinstance(x, property) or not x.__doc__:
        return
    doc = inspect.cleandoc(doc)
    assert doc.splitlines()[0].rstrip().endswith((".", ":"))
    hooks = {"before_step", "after_step"}  # their argument is in the sentence
    if described(doc):
        assert described(doc) == parameters_of(x), "Parameters are not the function's"
    elif parameters_of(x) and name.startswith("arrayopt.Optimizer.") and x.__name__ not in hooks:
        pytest.fail("no Parameters")
    if name.startswith("arrayopt.Optimizer."):
        assert ("raise " in inspect.getsource(x)) <= bool(section(doc, "Raises")), "no Raises"


@pytest.mark.parametrize("name", ["params", "groups", "rule", "state", "stats", "step_count", "loss_scale"])
def test_what_an_optimizer_has_is_documented(name):
    assert getattr(arrayopt.Optimizer, name).__doc__
    getattr(arrayopt.Optimizer(np.ones(2), arrayopt.LAMB()), name)
