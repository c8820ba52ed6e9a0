"""The dtype of gradients changes nothing but their numbers: equal ones give equal bits."""

import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from tests.support.cases import CASES
from tests.support.engines import FUSED, STAND_IN
from tests.support.entered import bits, held
from tests.support.slow import marked

# whole vectors, and what is left of them; matrices, and stacks of them
SHAPES = {"w": (13, 40), "b": (301,), "c": (13,), "k": (5, 2, 3), "empty": (0, 3), "number": ()}
RULES = {name: rows[0] for name, rows in CASES.items()}
RULES |= {"LBFGS": {"lr": 0.05, "memory": 3}, "Prodigy": {"d0": 0.01}}
OPTIONS = {"": {}, "int8": {"state_dtype": "int8"}, "master": {}}
QUICK = ("LAMB-", "CAME-master", "LANS-int8")


def cases():
    engines = list(FUSED)
    made = [(engine, f"{name}-{option}") for engine in engines for name in RULES for option in OPTIONS]
    return marked(made, lambda engine, row: engine == "numpy" or (engine == STAND_IN and row in QUICK))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("engine", "row"), cases())
def test_gradients_of_16_bits_give_the_bits_of_equal_ones_of_32(engine, row, dtype):
    name, option = row.split("-")
    kind = getattr(ao, name)
    options = RULES[name] | OPTIONS[option]

    def run(wide):
        rng, shapes = np.random.default_rng(0), SHAPES
        drawn = lambda: {x: np.asarray(rng.standard_normal(shape)).astype(dtype) for x, shape in shapes.items()}  # noqa: E731
        params = {x: p if option == "master" else p.astype(np.float32) for x, p in drawn().items()}
        opt = ao.Optimizer(params, kind(**options), engine=engine)
        for _ in range(4):
            opt.step({x: g.astype(np.float32) if wide else g for x, g in drawn().items()})
        return bits(held(opt))

    narrow, wide = run(wide=False), run(wide=True)
    assert {key for key in wide if narrow[key] != wide[key]} == set()


WIDE = [(engine, name) for engine in FUSED if engine != "numba" for name in ("LAMB", "LANS")]  # there LLVM orders sums


@pytest.mark.parametrize(("engine", "name"), marked(WIDE, lambda engine, name: name == "LAMB"))
def test_gradients_of_64_bits_give_the_bits_of_equal_ones_of_32(engine, name):
    """With them, sums in whole vectors could not be compiled."""

    def run(dtype):
        rng = np.random.default_rng(0)
        opt = ao.Optimizer({x: np.ones(s, np.float32) for x, s in SHAPES.items()}, getattr(ao, name)(), engine=engine)
        for _ in range(3):
            opt.step({x: np.asarray(rng.standard_normal(s), np.float32).astype(dtype) for x, s in SHAPES.items()})
        return bits(held(opt))

    assert run(np.float64) == run(np.float32)
