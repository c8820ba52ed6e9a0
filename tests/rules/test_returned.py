"""What a rule's functions return that no engine can use: the same words everywhere, and nothing has changed."""

import re
import subprocess
import sys

import numpy as np
import pytest

import arrayopt as ao
from tests.support.engines import EVERY, FUSED
from tests.support.slow import marked
from tests.support.tracing import made

ENGINES = ("auto", *EVERY)


def zeros(xp, p):
    return {"m": xp.zeros_like(p)}


def total(xp, p):
    return {"n": xp.sum(xp.zeros_like(p))}


SLOTS = {
    "nothing": (lambda xp, p: None, TypeError, "Made.slots must return a dict of arrays, such as"),
    "a list": (lambda xp, p: [xp.zeros_like(p)], TypeError, "or an empty one; got a list of an array"),
    "an array": (lambda xp, p: xp.zeros_like(p), TypeError, "or an empty one; got an array"),
    "a number": (
        lambda xp, p: {"m": 0.0},
        TypeError,
        "Made.slots must return arrays; 'm' is 0.0: for a slot with one number",
    ),
    "no value": (lambda xp, p: {"m": None}, TypeError, "Made.slots must return arrays; 'm' is None"),
    "a name that is no string": (lambda xp, p: {1: xp.zeros_like(p)}, ValueError, "a slot's name must be a letter"),
}

UPDATES = {
    "no dict": (
        lambda xp, p, g, s, h: p - g,
        "must return the new parameter and a dict of the new slots, as in return p",
    ),
    "nothing": (lambda xp, p, g, s, h: None, "as in return p, {'m': m}; got None"),
    "no slots": (lambda xp, p, g, s, h: (p - g, None), "as in return p, {'m': m}; got a tuple of an array, None"),
    "three": (lambda xp, p, g, s, h: (p - g, s, 1), "got a tuple of an array, a dict, 1"),
    "the other way round": (lambda xp, p, g, s, h: (s, p - g), "got a tuple of a dict, an array"),
    "too few slots": (lambda xp, p, g, s, h: (p - g, {"M": g}), "Made.update must return every slot; missing m"),
    "names that are no strings": (lambda xp, p, g, s, h: (p, {**s, 3: xp.sum(g)}), "whose keys are strings; got 3"),
    "a bool parameter": (lambda xp, p, g, s, h: (p > g, s), "must return real numbers as the parameter; got bools"),
    "a bool slot": (lambda xp, p, g, s, h: (p, {"m": p > g}), "must return real numbers as slot 'm'; got bools"),
    "no parameter": (lambda xp, p, g, s, h: (None, s), "Made.update must return arrays; the parameter is None"),
    "a list as a slot": (lambda xp, p, g, s, h: (p, {"m": [1, 2]}), "arrays; slot 'm' is a list of 1, 2"),
    "a text as a slot": (lambda xp, p, g, s, h: (p, {"m": "m"}), "arrays; slot 'm' is 'm'"),
}

ONLY_WHOLE = {
    "integers": (lambda xp, p, g, s, h: (xp.astype(p, xp.int32), s), "real numbers as the parameter; got integers"),
    "complex numbers": (lambda xp, p, g, s, h: (p * 1j, s), "real numbers as the parameter; got complex numbers"),
    "a complex slot": (lambda xp, p, g, s, h: (p, {"m": g * 1j}), "real numbers as slot 'm'; got complex numbers"),
    "another shape": (lambda xp, p, g, s, h: (xp.sum(p, axis=-1), s), "must keep shapes; "),
    "a number": (lambda xp, p, g, s, h: (1.0, s), "must keep shapes; "),
    "a slot of another shape": (lambda xp, p, g, s, h: (p, {"m": xp.sum(g)}), "must keep shapes; "),
    "more than there is": (
        lambda xp, p, g, s, h: (p, {**s, "v": g}),
        "v must be among the names that `slots` returns",
    ),
}
"""What engines find that run rules as they are; those that trace refuse it, if not all in these words."""


def params():
    return {"first": np.ones((2, 3)), "w": np.ones((2, 3))}


def refused(call, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        call()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", SLOTS)
def test_slots_that_are_none(case, engine):
    slots, kind, words = SLOTS[case]
    rule, mine = made(lambda xp, p, g, s, h: (p, s), slots)(), params()
    refused(lambda: ao.Optimizer(mine, rule, engine=engine), kind, words)
    refused(lambda: rule.init(mine), kind, words)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", UPDATES)
def test_updates_that_no_engine_can_use(case, engine):
    update, words = UPDATES[case]
    rule, mine = made(update, zeros)(), params()
    state = rule.init(mine)
    refused(lambda: ao.update(rule, mine, params(), state), TypeError, words)

    def run():
        ao.Optimizer(mine, rule, engine=engine).step(params())

    refused(run, TypeError, words)
    assert all(np.array_equal(p, np.ones((2, 3))) for p in mine.values())


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
@pytest.mark.parametrize("engine", ["auto", "array_api"])
@pytest.mark.parametrize("case", ONLY_WHOLE)
def test_updates_that_change_what_arrays_are(case, engine):
    update, words = ONLY_WHOLE[case]
    rule, mine = made(update, zeros)(), params()
    refused(lambda: ao.update(rule, mine, params(), rule.init(mine)), (TypeError, ValueError), words)
    refused(lambda: ao.Optimizer(mine, rule, engine=engine).step(params()), (TypeError, ValueError), words)
    assert all(np.array_equal(p, np.ones((2, 3))) for p in mine.values())
    for fused in FUSED:
        with pytest.raises(ValueError, match="Made"):
            ao.Optimizer(mine, rule, engine=fused)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_of_another_library(library):
    xp = pytest.importorskip("torch" if library == "torch" else "jax.numpy")
    rule = made(lambda xp_, p, g, s, h: (p, s), lambda xp_, p: {"m": xp.zeros((2, 3))})()
    refused(lambda: rule.init(params()), TypeError, "Made.slots must return arrays that `xp` made; 'm' is of")
    rule = made(lambda xp_, p, g, s, h: (p, {"m": xp.zeros((2, 3))}), zeros)()
    opt = ao.Optimizer(params(), rule, engine="array_api")
    refused(lambda: opt.step(params()), TypeError, "must return arrays that `xp` made; slot 'm' is of")


@pytest.mark.parametrize("engine", marked([(e,) for e in ENGINES], lambda engine: engine in ("array_api", "numpy")))
def test_numbers_of_python_are_values_of_slots_of_one_number(engine):
    rule = made(lambda xp, p, g, s, h: (p - h.lr * g, {"n": h.lr * h.t}), total)(lr=0.5)
    opt = ao.Optimizer(np.ones((2, 3)), rule, engine=engine)
    for _ in range(3):
        opt.step(np.ones((2, 3)))
    assert opt.state["param"]["n"].shape == ()
    assert opt.state["param"]["n"] == 1.5


DOORS = {
    "torch": ("torch", "arrayopt.torch needs PyTorch, which is not installed; pip install torch"),
    "jax": ("optax", "arrayopt.optax needs JAX and optax, and jax is not installed; pip install jax optax"),
    "optax": ("optax", "arrayopt.optax needs JAX and optax, and optax is not installed; pip install jax optax"),
}


def test_doors_without_their_library_say_what_to_install():
    script = [
        "import importlib, sys",
        f"for lacking, (door, words) in {DOORS!r}.items():",
        "    before, sys.modules[lacking] = sys.modules.get(lacking), None",
        "    try:",
        "        importlib.import_module(f'arrayopt.{door}')",
        "    except ModuleNotFoundError as error:",
        "        assert (str(error), error.name) == (words, lacking), error",
        "    else:",
        "        raise AssertionError(lacking)",
        "    del sys.modules[lacking]",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(script)], check=True)
