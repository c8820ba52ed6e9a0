"""State in 8 bits of complex parameters: two codes for each number, in an integer of 16 bits."""

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.state.quantized import dequantized, quantized
from tests.conftest import BACKENDS
from tests.ranks.test_exact import both
from tests.rules.test_quantized import awkward, kept, there, witness
from tests.support.engines import EVERY, SLOW, STAND_IN, each_engine
from tests.support.slow import marked

SHAPES = {"rows": (24, 64), "ragged": (7, 45), "short": (31,), "one": (1,), "scalar": (), "empty": (0, 3)}


def complex_awkward(n, dtype="complex64"):
    return (awkward(n, positive=False) + 1j * awkward(n, positive=False)[::-1]).astype(dtype)


def of_definition(x):
    """Codes and values of complex numbers: blocks of 32 of them, which are 64 real numbers."""
    codes, values = [], []
    for first in range(0, x.size, 32):
        block = x[first : first + 32]
        parts = np.concatenate([block.real, block.imag])
        largest = np.abs(parts).max(initial=0)
        for part in (block.real, block.imag):  # each beside the largest of both
            of_part = witness(np.concatenate([part[:31], [largest]]), 127)
            rest = witness(np.concatenate([part[31:], [largest]]), 127)
            codes += [*of_part[0][: part[:31].size], *rest[0][: part[31:].size]]
            values += [*of_part[2][: part[:31].size], *rest[2][: part[31:].size]]
    return codes, values


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 200])
def test_codes_are_those_of_the_definition(n, library):
    x, backend = complex_awkward(n), BACKENDS[library]
    codes, scale = quantized(backend.array(x, "complex64"), "int16")
    found = backend.numpy(codes).astype(int)
    low, high = (found + 128) % 256 - 128, found >> 8
    read = backend.numpy(dequantized(codes, scale))
    expected, values = of_definition(x)
    mine, numbers = [], []
    for first in range(0, n, 32):
        some = slice(first, first + 32)
        mine += [*low[some], *high[some]]
        numbers += [*read[some].real, *read[some].imag]
    assert mine == expected
    assert numbers == values
    assert scale.shape == (-(-n // 32),)


@pytest.mark.parametrize("bad", [np.nan, np.inf * 1j, complex(0, np.nan)])
def test_what_is_no_number_never_becomes_one(bad):
    x = np.ones(70, np.complex64)
    x[40] = bad
    read = dequantized(*quantized(x, "int16"))
    assert np.isnan(read[32:64]).all()
    assert (read[:32] == 1).all()
    assert (read[64:] == 1).all()


def run(rule, engine, dtype, steps=3, array=np.asarray, **options):
    rng = np.random.default_rng(4)
    params = {name: array(np.asarray(rng.standard_normal(shape) + 1j).astype(dtype)) for name, shape in SHAPES.items()}
    opt = ao.Optimizer(params, rule, engine=engine, **options)
    for _ in range(steps):
        parts = {name: rng.standard_normal((2, *shape)) for name, shape in SHAPES.items()}
        opt.step({name: array(np.asarray(x[0] + 1j * x[1]).astype(dtype)) for name, x in parts.items()})
    return opt


class Kept(type(kept())):
    """As of real numbers: the gradient, and the square of its magnitude."""

    complex_ok = True

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p), "v": xp.zeros_like(xp.real(p))}

    def update(self, xp, p, g, s, h):
        return p + s["m"] - s["v"], {"m": g, "v": xp.real(g) ** 2 + xp.imag(g) ** 2}


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("engine", marked([(e,) for e in EVERY if e != "array_api"], lambda e: e not in SLOW))
def test_engines_make_the_same_codes_of_the_same_numbers(engine, dtype):
    one, other = (run(Kept(state_dtype="int8"), e, dtype) for e in ("array_api", engine))
    for name in SHAPES:
        assert [str(x.dtype) for k, x in one.state[name].items() if k != "t"] == [
            "int16",
            "bfloat16",
            "uint8",
            "bfloat16",
        ]
        assert there(one, name) == there(other, name)


@pytest.mark.parametrize("rule", [ao.AdamW, ao.LAMB, ao.CAME, ao.Adan], ids=lambda x: x.__name__)
@each_engine
def test_engines_agree(engine, rule):
    options = {"lr": 0.01}
    one, other = (run(rule(**options, state_dtype="int8"), e, "complex64") for e in ("array_api", engine))
    wide = run(rule(**options), engine, "complex64")
    for name in SHAPES:
        np.testing.assert_allclose(one.params[name], other.params[name], rtol=2e-3, atol=2e-4)
        np.testing.assert_allclose(wide.params[name], other.params[name], rtol=0.05, atol=0.02)


def test_on_cuda_they_are_widened_before_a_step(cupy):
    one = run(Kept(state_dtype="int8"), "array_api", "complex64")
    other = run(Kept(state_dtype="int8"), "cupy", "complex64", array=cupy.asarray)
    for name in SHAPES:
        assert there(one, name) == there(other, name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_same_bytes(ranks):
    found, _ = both(ao.LAMB(lr=0.01, state_dtype="int8"), ranks, np.complex64, engine=STAND_IN)
    assert found == [[]] * ranks


def test_a_run_goes_on_in_another_storage_and_from_a_file(tmp_path):
    opt = run(ao.LAMB(lr=0.01), "numpy", "complex64")
    wide = opt.state["rows"]["m"].copy()
    opt.state_dtype = "int8"
    assert opt.state["rows"]["m"].dtype == "int16"
    opt.save(tmp_path / "x.safetensors")
    new = run(ao.LAMB(lr=0.01, state_dtype="int8"), "numpy", "complex64", steps=0)
    new.load(tmp_path / "x.safetensors")
    assert all(there(new, name) == there(opt, name) for name in SHAPES)
    new.state_dtype = None
    assert new.state["rows"]["m"].dtype == "complex64"
    assert new.state["rows"]["v"].dtype == "float32"
    np.testing.assert_allclose(new.state["rows"]["m"], wide, atol=np.abs(wide).max() / 100)


def test_halves_are_for_real_parameters():
    with pytest.raises(ValueError, match=r"of complex parameters must be None or 'int8'; got 'bfloat16', and 'param'"):
        ao.Optimizer(np.ones(3, "complex64"), ao.AdamW(state_dtype="bfloat16"))
