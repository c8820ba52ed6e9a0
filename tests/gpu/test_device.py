"""What only a device shows: the kernels give the bits that they give on the CPU, and steps allocate nothing."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.params.headers import cupy_words, word_index, words
from tests.support.device import STANDIN, needs_a_device

pytestmark = pytest.mark.skipif(bool(needs_a_device()), reason=needs_a_device())

SHAPES = {"w": (40, 130), "b": (13001,), "k": (5, 4, 3, 3), "s": ()}
RULES = {
    "LAMB": ao.LAMB(),
    "LANS": ao.LANS(),
    "CAME": ao.CAME(lr=0.01),
    "AdamW": ao.AdamW(),
    "SGD": ao.SGD(lr=0.1, momentum=0.9),
}


def digest(cupy, rule):
    """What three steps leave, as one number."""
    r = np.random.default_rng(0)
    opt = ao.Optimizer({name: cupy.asarray(r.standard_normal(s).astype("f4")) for name, s in SHAPES.items()}, rule)
    for _ in range(3):
        opt.step({name: cupy.asarray(r.standard_normal(s).astype("f4")) for name, s in SHAPES.items()})
    arrays = [x for state in opt.state.values() for name, x in state.items() if name != "t"]
    return hashlib.sha256(b"".join(x.get().tobytes() for x in [*opt.params.values(), *arrays])).hexdigest()


def main(name):
    """The same over the stand-in, in a process of its own."""
    from tests.cudacpu import standin

    with standin.installed() as cupy, standin.checking(check=False):
        sys.stdout.write(digest(cupy, RULES[name]))


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ compiles the kernels for the CPU")
@pytest.mark.parametrize("name", ["LAMB"] if STANDIN else RULES)  # the stand-in is compared with itself
def test_the_bits_are_those_of_the_cpu(cupy, name):
    code = f"import tests.support.bundled; from tests.gpu.test_device import main; main({name!r})"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )
    assert digest(cupy, RULES[name]) == run.stdout


@pytest.mark.skipif(STANDIN, reason="the stand-in has no hooks; `standin.forbidden` sees its allocations")
@pytest.mark.parametrize("name", RULES)
def test_a_step_after_the_first_allocates_nothing(cupy, name):
    class Hook(cupy.cuda.MemoryHook):
        name = "no allocation"
        seen = 0

        def malloc_preprocess(self, **_):  # also of what the pool has
            self.seen += 1

    opt = ao.Optimizer({n: cupy.ones(s, cupy.float32) for n, s in SHAPES.items()}, RULES[name])
    grads = {n: cupy.ones(s, cupy.float32) for n, s in SHAPES.items()}
    for _ in range(2):
        opt.step(grads)
    with Hook() as hook:
        for _ in range(3):
            opt.step(grads)
    assert hook.seen == 0


@pytest.mark.skipif(STANDIN, reason="arrays of the stand-in have no headers")
def test_headers_of_arrays_are_read_at_once(cupy):
    """If CuPy's layout is not the expected one, each array is asked in each step, and the host takes several times as
    long: this shows what is where instead.
    """
    x = cupy.zeros((2, 3, 5), cupy.float32)
    memory = words()
    header = memory[word_index(id(x)) :][:24].tolist()
    pointer = memory[word_index(id(x.data)) :][:6].tolist()
    names = {id(type(x)): "type", id(x.dtype): "dtype", id(x.data): "data", x.data.ptr: "ptr", x.size: "size"}
    known = [[names.get(word, hex(word)) for word in found] for found in (header, pointer)]
    assert cupy_words(type(x)) is not None, f"the words of an array and of its data: {known}"
