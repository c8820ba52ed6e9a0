"""Compiled code from process to process, and steps beside each other: processes, forks and Python threads."""

import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines.native.cache import cache_folder
from tests.support.engines import FUSED, SLOW, each_fused
from tests.support.slow import marked

ROOT = Path(ao.__file__).parents[1]

STEPS = """
import json, sys
import numpy as np
import arrayopt as ao
import arrayopt.engines.numba.engine

{before}
params = {{"w": np.ones(4, "{dtype}")}}
opt = ao.Optimizer(params, ao.SGD(lr=0.5, momentum=0.5), engine="numba")
for _ in range(2):
    opt.step({{"w": np.arange(4).astype("{dtype}")}})
module, = (m for name, m in sys.modules.items() if name.startswith("arrayopt_fused_"))
stats = module.run.stats
found = {{"w": params["w"].tolist()}}
print(json.dumps(found | {{"hits": sum(stats.cache_hits.values()), "misses": sum(stats.cache_misses.values())}}))
"""
RIGHT = [1.0, -0.25, -1.5, -2.75]  # 1 - 0.5 g - 0.5 (0.5 g + g)


def start(code, **env):
    """Python running some code."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ARRAYOPT_NUM_THREADS": "2", **env}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        env={k: str(v) for k, v in env.items() if v is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    """What the process printed, once it has ended well."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def steps(folder, *, before="", dtype="float32", **env):
    """What two steps in a process of their own give."""
    code = STEPS.format(before=before, dtype=dtype)
    found = json.loads(ended(start(code, ARRAYOPT_CACHE_DIR=folder, **env)))
    assert found["w"] == RIGHT
    return found


def files(folder, ending):
    """What is kept, of one kind."""
    return sorted(folder.rglob(f"*{ending}"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that a process has filled."""
    folder = tmp_path_factory.mktemp("cache")
    found = steps(folder)
    assert (found["hits"], found["misses"]) == (0, 1)
    return folder


@pytest.fixture
def kept(filled, tmp_path):
    """A copy of it, to be damaged."""
    subprocess.run(["cp", "-a", f"{filled}/.", tmp_path / "cache"], check=True)
    return tmp_path / "cache"


@pytest.fixture
def nowhere(tmp_path):
    """A folder that cannot be made, by nobody: below a file."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "below"


# ---- what is kept ---------------------------------------------------------------------------------------------------


def test_a_second_process_compiles_nothing(filled):
    again = steps(filled)
    assert (again["hits"], again["misses"]) == (1, 0)
    assert [len(files(filled, ending)) for ending in (".code", "")] == [1, 2]  # and the folder


def test_the_folder_is_of_this_version(monkeypatch, tmp_path):
    version = ao.__version__
    monkeypatch.setenv("ARRAYOPT_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own" / version
    monkeypatch.delenv("ARRAYOPT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "arrayopt" / version
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "arrayopt" / version


def test_processes_that_fill_the_cache_at_once_are_all_right(tmp_path):
    code = STEPS.format(before="", dtype="float32")
    processes = [start(code, ARRAYOPT_CACHE_DIR=tmp_path) for _ in range(3)]
    assert [json.loads(ended(x))["w"] for x in processes] == [RIGHT] * 3
    again = steps(tmp_path)
    assert (again["hits"], again["misses"]) == (1, 0)
    assert [len(files(tmp_path, ending)) for ending in (".code", "")] == [1, 2]


def test_without_a_folder_to_write_nothing_is_kept(nowhere):
    found = steps(nowhere, HOME=nowhere, XDG_CACHE_HOME=None)
    assert (found["hits"], found["misses"]) == (0, 1)
    found = steps(None, HOME=nowhere, XDG_CACHE_HOME=None)
    assert (found["hits"], found["misses"]) == (0, 1)


NO_HOME = """
import os, pwd
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
os.environ.pop("HOME", None)
"""


@pytest.mark.parametrize("given", marked([("no folder",), ("own folder",)], lambda given: given == "no folder"))
def test_a_user_without_a_home(given, tmp_path):
    """As in a container that runs under any user id."""
    steps(tmp_path if given == "own folder" else None, before=NO_HOME, XDG_CACHE_HOME=None)


def test_compiled_code_that_was_damaged_is_compiled_again(kept):
    """As a full disk or a lost power supply leaves it. What was damaged is whole again then."""
    (code,) = files(kept, ".code")
    damaged = bytearray(code.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    code.write_bytes(damaged)
    assert steps(kept)["misses"] == 1
    assert steps(kept)["hits"] == 1


def test_code_for_another_processor_is_compiled_again(kept):
    assert steps(kept, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")["misses"] == 1


def test_float16_on_a_processor_without_instructions_for_it_is_refused(tmp_path):
    """LLVM would abort the process: it would call a function that is not there."""
    with pytest.raises(AssertionError, match="float16 needs a processor with F16C"):
        steps(tmp_path, dtype="float16", NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")


# ---- beside each other ----------------------------------------------------------------------------------------------

FORK = """
import os, sys
import numpy as np
import arrayopt as ao

params = {{"big": np.ones(600_011, "float32"), "small": np.ones((5, 7), "float32")}}
grads = {{name: np.full_like(p, 0.5) for name, p in params.items()}}
opt = ao.Optimizer(params, ao.LAMB(lr=0.1), engine="{engine}", stats=True)
opt.step(grads)
child = os.fork()
opt.step(grads)
expected = ao.Optimizer({{name: np.ones_like(p) for name, p in params.items()}}, ao.LAMB(lr=0.1), engine="array_api")
expected.step(grads)
expected.step(grads)
assert all(np.allclose(p, expected.params[name], rtol=1e-5) for name, p in params.items())
if child == 0:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
opt.step(grads)
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.parametrize(
    ("threads", "engine"),
    marked(((n, engine) for n in (1, 3) for engine in FUSED), lambda n, engine: n == 3 and engine not in SLOW),
)
def test_a_fork_after_a_step(engine, threads):
    code = "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n" + FORK.format(engine=engine)
    assert ended(start(code, ARRAYOPT_NUM_THREADS=threads)) == "done\n"


RACE = """
import threading
import numpy as np
import arrayopt as ao

together, right = threading.Barrier(4), []

def steps(rule):
    params = {"big": np.ones(600_011, "float32"), "small": np.ones((5, 7), "float32")}
    together.wait()
    opt = ao.Optimizer(params, rule, engine="numba")
    for _ in range(2):
        opt.step({name: np.full_like(p, 0.5) for name, p in params.items()})
    right.append(all(np.allclose(p, 0.8, rtol=1e-5) for p in params.values()))

rules = [ao.SGD(lr=0.2), ao.SGD(lr=0.2), ao.AdamW(lr=0.1, weight_decay=0.0), ao.AdamW(lr=0.1, weight_decay=0.0)]
threads = [threading.Thread(target=steps, args=(rule,)) for rule in rules]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(right)
"""


def test_python_threads_that_compile_the_same_at_once(tmp_path):
    assert ended(start(RACE, ARRAYOPT_CACHE_DIR=tmp_path)) == "[True, True, True, True]\n"


@each_fused
@pytest.mark.parametrize("threads", ["1", "3"])
def test_python_threads_with_an_optimizer_each(engine, threads, monkeypatch):
    """Small and shared tensors, of the same plan and of others: each gets what it gets alone."""
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", threads)
    rng = np.random.default_rng(0)
    shapes = {"shared": (300_007,), "matrix": (300, 257), "small": (13,), "tiny": ()}
    params = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    grads = [{name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()} for _ in range(3)]

    def run(rule):
        opt = ao.Optimizer({name: np.array(p) for name, p in params.items()}, rule, engine=engine)
        for g in grads:
            opt.step(g)
        return {name: p.tobytes() for name, p in opt.params.items()}

    rules = [ao.LAMB(lr=lr) for lr in (0.1, 0.2, 0.3)] + [
        ao.AdamW(lr=0.1),
        ao.CAME(lr=0.1),
        ao.SGD(lr=0.1, momentum=0.9),
    ]
    alone = [run(rule) for rule in rules]
    with concurrent.futures.ThreadPoolExecutor(len(rules)) as pool:
        for _ in range(3):
            assert list(pool.map(run, rules)) == alone
