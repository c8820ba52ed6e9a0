"""The tests of the kernels are tested: each of many planted faults must be found."""

import os

import numpy as np
import pytest

import arrayopt as ao
from tests.cuda_faults import FAULTS, MATRIX_FAULTS
from tests.cudacpu import KernelError, standin

SHAPES = {
    "LAMB": [(37,), (3,), (4095,), (4097,), (40001,)],
    "CAME": [(2, 3, 70, 33), (5, 4, 3, 3), (1, 1, 129, 257), (2, 200, 1, 1), (1, 2, 9, 300), (1, 20, 20, 30)],
}
RULES = {"LAMB": ao.LAMB(lr=0.1), "CAME": ao.CAME(lr=0.01)}


def steps(cupy, name):
    """The largest error of parameters and state after three steps, relative; one parameter is not aligned."""
    r = np.random.default_rng(0)
    host = [r.standard_normal(shape).astype("f4") for shape in SHAPES[name]]
    there = [cupy.asarray(x) for x in host]
    room = cupy.zeros(host[0].size + 1, "f4")
    there[0] = room[1:].reshape(host[0].shape)
    there[0][...] = cupy.asarray(host[0])
    opts = [ao.Optimizer(p, RULES[name], engine=e) for p, e in ((host, "array_api"), (there, "cupy"))]
    for _ in range(3):
        grads = [r.standard_normal(shape).astype("f4") for shape in SHAPES[name]]
        opts[0].step(grads)
        opts[1].step([cupy.asarray(g) for g in grads])
    slots = [
        (x, opts[1].state[name][slot]) for name, s in opts[0].state.items() for slot, x in s.items() if slot != "t"
    ]
    pairs = [(x, y.get()) for x, y in [*zip(host, there, strict=True), *slots]]
    return max(float(np.abs(x - y).max() / (np.abs(x).max() + 1e-30)) for x, y in pairs)


def found(cupy, name, old, new, monkeypatch):
    """What finds a fault: the checks, or the numbers; nothing if it goes unseen. A wild write may end a process."""
    from arrayopt.engines import cupy as engine

    def broken(*args, **options):
        text = emit(*args, **options)
        if old in text and "struct Pass0" in text:
            changed.append(name)
            return text.replace(old, new)
        return text

    emit, changed = engine.emit, []
    monkeypatch.setattr(engine, "emit", broken)
    monkeypatch.setattr(engine, "_resident", lambda: 3)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            engine._kernels.cache_clear()
            with standin.checking(random=True, seed=1, workers=3):
                error = steps(cupy, name)
            said = "" if error < 1e-5 else f"an error of {error:.0e}"
        except KernelError as error:
            said = str(error)
        except Exception as error:
            said = repr(error)
        os.write(write, (said if changed or old == new else "the text to break is not there").encode()[:4000] or b"-")
        os._exit(0)
    os.close(write)
    status = os.waitpid(child, 0)[1]
    said = os.read(read, 5000).decode()
    os.close(read)
    return "the process ended" if status else said.removeprefix("-")


@pytest.mark.parametrize("name", ["LAMB", "CAME"])
def test_without_a_fault_nothing_is_found(cupy, name, monkeypatch):
    assert found(cupy, name, "", "", monkeypatch) == ""


@pytest.mark.parametrize(("what", "old", "new"), FAULTS, ids=[what for what, *_ in FAULTS])
def test_faults_in_the_pass_over_elements_are_found(cupy, what, old, new, monkeypatch):
    said = found(cupy, "LAMB", old, new, monkeypatch)
    assert said, "not found"
    assert said != "the text to break is not there"


@pytest.mark.parametrize(("what", "old", "new"), MATRIX_FAULTS, ids=[what for what, *_ in MATRIX_FAULTS])
def test_faults_in_rows_and_columns_are_found(cupy, what, old, new, monkeypatch):
    said = found(cupy, "CAME", old, new, monkeypatch)
    assert said, "not found"
    assert said != "the text to break is not there"
