"""The table of what numbers are stored as: sizes, rounding, and that a row is all that a form of storage takes."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.arrays import dtype_name, like, memory, to_host
from arrayopt.codecs import CODECS, STORED, Codec
from arrayopt.engines.numba.emit import emit
from arrayopt.fusion.plans import plan_for
from arrayopt.rules import storage

X = np.array([0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3e38, 1e-40, np.inf, -np.inf], np.float32)


@pytest.mark.parametrize("name", CODECS)
def test_a_row_says_what_the_dtype_is(name):
    codec = CODECS[name]
    dtype = np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
    assert codec.itemsize == dtype.itemsize
    assert codec.rounds == (name != codec.working)
    real = np.dtype(codec.working)
    stored = np.zeros(X.size, dtype)
    with np.errstate(over="ignore"):
        codec.store(stored, X)
        assert codec.load(stored, real).dtype == real
        np.testing.assert_array_equal(codec.load(stored, real), X.astype(dtype).astype(real))


def test_another_way_to_round_is_another_row(monkeypatch):
    """Toward zero: what is stored in bfloat16 has the low bits cut off."""

    def cut(into, x):
        into[...] = (np.asarray(x, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)

    def stepped():
        p = np.zeros(X.size, ml_dtypes.bfloat16)
        return ao.Optimizer(p, ao.SGD(lr=1.0, state_dtype=None), engine="numpy").step((-X).astype(np.float32))

    assert float(stepped()[4]) == 1.015625
    monkeypatch.setitem(STORED, "bfloat16", replace(STORED["bfloat16"], store=cut, numba_store="cut({0})"))
    assert "= cut(" in emit(plan_for(ao.SGD(lr=1.0), 1, "bfloat16"), "bfloat16")
    from arrayopt.engines.numpy.making import pass_function

    pass_function.cache_clear()
    assert float(stepped()[4]) == 1.0078125
    pass_function.cache_clear()


@pytest.mark.parametrize("form", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_a_format_of_slots_is_a_row(form, monkeypatch):
    """Of 8 bits, a dtype that NumPy lacks; parameters are not stored in it."""
    name = "float8_e5m2"
    monkeypatch.setitem(STORED, name, Codec(1, "float32", "Float8", True))
    monkeypatch.setattr(storage, "STORAGES", (name,))

    def started():
        return ao.Optimizer(form([1.0]), ao.SGD(lr=0.5, momentum=0.5, state_dtype=name), engine="array_api")

    opt, again = started(), started()
    opt.step(form([1.2]))  # of which 1.25 is stored
    again.load_state_dict(opt.state_dict())
    slot = again.state["param"]["buf"]
    assert dtype_name(slot) == name
    assert to_host(slot).astype(np.float64) == [1.25]
    assert to_host(like(slot, np.array([0.4], np.float32))).astype(np.float64) == [0.375]
    assert memory(slot).dtype.itemsize == 1
    assert "state: 1 bytes" in again.explain()
    assert again.step(form([0.0]))[0] == 1.0 - 0.5 * 0.625
    with pytest.raises(TypeError, match="must be of a floating-point dtype"):
        ao.Optimizer(slot, ao.SGD(lr=0.5))
