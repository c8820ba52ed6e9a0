"""Parts of larger tensors with state in 8 bits: their blocks are those of the whole tensors."""

import numpy as np
import pytest

import arrayopt as ao
from tests.rules.test_quantized import kept
from tests.support.engines import each_compiled
from tests.support.ranks import gradients, parameters

SHAPES = {"rows": (6, 64), "columns": (5, 192), "ragged": (64, 33), "vector": (100,), "one": (3, 5)}
CUTS = {
    "rows": [((0, 0), (2, 64)), ((2, 0), (4, 64))],
    "columns": [((0, 0), (5, 64)), ((0, 64), (5, 128))],
    "ragged": [((0, 0), (32, 33)), ((32, 0), (32, 33))],  # a stretch of whole blocks, in rows that are none
    "vector": [((0,), (64,)), ((64,), (36,))],
    "one": [((0, 0), (0, 5)), ((0, 0), (3, 5))],
}


def taken(name, x, rank):
    return x[tuple(slice(a, a + n) for a, n in zip(*CUTS[name][rank], strict=True))].copy()


@each_compiled
@pytest.mark.parametrize(
    "rule",
    [
        kept(),
        ao.LAMB(lr=0.01, state_dtype="int8"),
        ao.LAMB(lr=0.01, state_dtype={"m": "bfloat16", "v": "int8"}),
        ao.CAME(lr=0.01, state_dtype="int8"),
    ],
)
def test_parts_have_the_blocks_of_whole_tensors(engine, rule, tmp_path):
    one = ao.Optimizer(parameters(SHAPES), rule, engine=engine)
    for k in range(3):
        one.step(gradients(k, SHAPES))
    saved = one.state_dict()["tensors"]

    def rank(comm):
        mine = {
            name: ao.Part(taken(name, x, comm.rank), CUTS[name][comm.rank][0], SHAPES[name])
            for name, x in parameters(SHAPES).items()
        }
        opt = ao.Optimizer(mine, rule, comm=comm, engine=engine)
        for k in range(3):
            opt.step({name: taken(name, g, comm.rank) for name, g in gradients(k, SHAPES).items()})
        opt.save(tmp_path / "x")
        new = ao.Optimizer(mine, rule, comm=comm, engine=engine)
        new.load(tmp_path / "x")
        for name in SHAPES:
            for slot, x in opt.state[name].items():
                assert np.asarray(new.state[name][slot]).tobytes() == np.asarray(x).tobytes(), (name, slot)
        return {name: x.array for name, x in mine.items()}, opt.state_dict()["tensors"]

    for r, (mine, state) in enumerate(ao.ranks.run(2, rank)):
        for name, x in mine.items():
            np.testing.assert_allclose(x, taken(name, one.params[name], r), rtol=1e-3, atol=1e-4)
            for slot, y in saved[name]["slots"].items():
                there = state[name]["slots"][slot]
                assert there.shape == y.shape
                if slot in ("m", "v") and y.dtype in ("int8", "uint8"):
                    apart = np.abs(there.astype(int) - y.astype(int))
                    assert apart.max(initial=0) <= (0 if rule == kept() else 1), (name, slot)
                elif rule == kept():
                    assert there.tobytes() == y.tobytes(), (name, slot)
    loaded = ao.Optimizer(parameters(SHAPES), rule, engine=engine)  # one process reads the file
    loaded.load(tmp_path / "x")
    shapes = {x.shape for slot, x in loaded.state["columns"].items() if slot.startswith("scale_")}
    assert shapes == {(30,)}


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((6, 33), [((0, 0), (3, 33)), ((3, 0), (3, 33))]),
        ((4, 96), [((0, 0), (4, 48)), ((0, 48), (4, 48))]),
        ((4, 66), [((0, 0), (4, 32)), ((0, 32), (4, 34))]),
        ((10,), [((0,), (5,)), ((5,), (5,))]),
    ],
)
def test_parts_that_cut_blocks_are_refused(shape, cuts):
    def rank(comm):
        offset, own = cuts[comm.rank]
        part = ao.Part(np.ones(own, "float32"), offset, shape)
        with pytest.raises(
            ValueError, match=r"'w' has state_dtype='int8', so its parts must start and end at multiples"
        ):
            ao.Optimizer({"w": part}, ao.AdamW(state_dtype="int8"), comm=comm)
        groups = {"w": {"state_dtype": "bfloat16"}}
        ao.Optimizer({"w": part}, ao.AdamW(state_dtype="int8"), groups=groups, comm=comm)

    ao.ranks.run(2, rank)


@pytest.mark.parametrize(
    "rule", [kept(), pytest.param(ao.CAME(lr=0.01, state_dtype="int8"), marks=pytest.mark.slow(reason="compiles"))]
)
def test_on_cuda_parts_have_the_blocks_of_whole_tensors(cupy, rule):
    one = ao.Optimizer(parameters(SHAPES), rule, engine="array_api")
    for k in range(2):
        one.step(gradients(k, SHAPES))

    def rank(comm):
        mine = {
            name: ao.Part(cupy.asarray(taken(name, x, comm.rank)), CUTS[name][comm.rank][0], SHAPES[name])
            for name, x in parameters(SHAPES).items()
        }
        opt = ao.Optimizer(mine, rule, comm=comm, engine="cupy")
        for k in range(2):
            opt.step({name: cupy.asarray(taken(name, g, comm.rank)) for name, g in gradients(k, SHAPES).items()})
        return opt.state_dict()["tensors"]

    for state in ao.ranks.run(2, rank):
        for name in SHAPES:
            there, here = state[name]["slots"]["m"].get(), one.state[name]["m"]
            assert np.abs(there.astype(int) - here.astype(int)).max() <= (0 if rule == kept() else 1), name
