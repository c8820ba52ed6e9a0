"""Heads of arrays that are read from memory: they say what the arrays say, or nothing is read."""

import numpy as np
import pytest

from arrayopt.params import heads
from arrayopt.params.watch import Watch

cupy = pytest.importorskip("cupy")


def array(shape=(3, 5), dtype="f4", at=1 << 20, device=0, strides=None, kind=cupy.ndarray):
    """An array of CuPy whose memory is not there."""
    room = cupy.cuda.UnownedMemory(at, 1 << 16, None, device)
    return kind(shape, np.dtype(dtype), memptr=cupy.cuda.MemoryPointer(room, 0), strides=strides)


def form(x):
    return x.dtype, x.shape, x.data.device_id


class Kind(cupy.ndarray):
    """Another kind of array."""


SOME = [((3, 5), "f4", 1 << 20, 0), ((), "f8", 1 << 21, 1), ((7,), "f2", 1 << 22, 0), ((0, 2), "c8", 1 << 23, 3)]


def test_objects_are_where_a_list_says():
    some = [object() for _ in range(100)]
    assert heads.heads(some).tolist() == heads.index(np.array(list(map(id, some)))).tolist()
    assert heads.heads(tuple(some)).tolist() == heads.heads(some).tolist()
    assert heads.heads([]).size == 0


def test_where_arrays_lie_and_how():
    some = [array(*x) for x in SOME] * 30
    assert heads.cupy_words(cupy.ndarray) is not None, "this CuPy's heads are not known: each array is asked"
    found, whole = heads.located(some)
    assert found.tolist() == [x.data.ptr for x in some]
    assert whole
    assert not heads.located([*some, array(strides=(4, 12))])[1]
    assert heads.dtypes(some) == {x.dtype for x in some}
    assert heads.dtypes(some[::4]) == heads.dtypes(some[:1] * 100) == {np.dtype("f4")}
    with pytest.raises(AttributeError):
        heads.dtypes([*some, None])


@pytest.mark.parametrize(
    "other",
    [array((5, 3)), array((15,)), array(dtype="i4"), array(device=1), array(kind=Kind), np.ones((3, 5), "f4"), 1.0],
    ids=["shape", "rank", "dtype", "device", "kind", "library", "number"],
)
def test_what_does_not_fit_is_seen(other):
    some = [array(*x) for x in SOME]
    fits = heads.checker(cupy.ndarray, [form(x) for x in some])
    assert fits(some)
    assert fits([array(*x[:2], 99 << 20, x[3]) for x in SOME]), "where it lies is free"
    assert not fits([other, *some[1:]])
    assert fits([None, *some[1:]])
    assert fits([None] * 4)
    assert not fits([None, some[1], other, some[3]])


def test_nothing_fits_what_was_never_seen():
    some = [array(), array()]
    fits = heads.checker(cupy.ndarray, [form(some[0]), None])
    assert fits([some[0], None])
    assert not fits(some)


def test_other_arrays_are_asked(monkeypatch):
    assert heads.cupy_words(np.ndarray) is None
    assert heads.checker(np.ndarray, []) is None
    monkeypatch.setattr(heads, "cupy_words", lambda kind: None)
    some = [array(*x) for x in SOME]
    assert heads.located(some)[0].tolist() == [x.data.ptr for x in some]
    assert heads.dtypes(some * 30) == {x.dtype for x in some}


@pytest.mark.parametrize("shape", [(5, 3), (15,), (1, 3, 5)])
def test_a_shape_that_is_set_is_noticed(shape):
    some = [array() for _ in range(3)]
    watch = Watch(some)
    assert watch.changed() == []
    some[1].shape = shape
    assert 1 in watch.changed()
