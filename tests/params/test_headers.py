"""Headers of arrays that are read from memory: they say what the arrays say, or nothing is read."""

import numpy as np
import pytest

from arrayopt.params import headers
from arrayopt.params.located import LocatedGrads, dtypes, locations_of
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
    assert headers.object_addresses(some).tolist() == list(map(id, some))
    assert headers.header_indices(some).tolist() == headers.word_index(np.array(list(map(id, some)))).tolist()
    assert headers.header_indices(tuple(some)).tolist() == headers.header_indices(some).tolist()
    assert headers.header_indices([]).size == 0


def test_where_arrays_lie_and_how():
    some = [array(*x) for x in SOME] * 30
    assert headers.cupy_words(cupy.ndarray) is not None, "this CuPy's heads are not known: each array is asked"
    found, whole = headers.cupy_locations(some)
    assert found.tolist() == [x.data.ptr for x in some]
    assert whole
    assert not headers.cupy_locations([*some, array(strides=(4, 12))])[1]
    every = {x.dtype for x in some}
    assert dtypes(some) == (every, True)
    assert dtypes(some[::4]) == dtypes(some[:1] * 100) == ({np.dtype("f4")}, True)
    assert dtypes([*some, None]) == dtypes([None, *some]) == (every, False)


@pytest.mark.parametrize(
    "other",
    [array((5, 3)), array((15,)), array(dtype="i4"), array(device=1), array(kind=Kind), np.ones((3, 5), "f4"), 1.0],
    ids=["shape", "rank", "dtype", "device", "kind", "library", "number"],
)
def test_what_does_not_fit_is_seen(other):
    some = [array(*x) for x in SOME]
    fits = headers.form_checker(cupy.ndarray, [form(x) for x in some])
    assert fits(some) is not None
    moved = fits([array(*x[:2], 99 << 20, x[3]) for x in SOME])
    assert moved.addresses.tolist() == [99 << 20] * 4, "where it lies is free"
    assert fits([other, *some[1:]]) is None
    assert fits([None, *some[1:]]) is not None
    assert fits([None] * 4) is not None
    assert fits([None, some[1], other, some[3]]) is None


def test_what_fits_is_said_to_lie_where_it_does():
    some = [array(at=1 << 20), array(at=1 << 21), array(strides=(4, 12))]
    fits = headers.form_checker(cupy.ndarray, [form(x) for x in some])
    for given in (some, [None, *some[1:]], [some[0], None, some[2]], [None] * 3):
        found, there = fits(given), [x for x in given if x is not None]
        assert found.addresses.tolist() == [x.data.ptr for x in there]
        assert found.contiguous.tolist() == [x.flags.c_contiguous for x in there]
        assert found.complete == (len(there) == 3)
        assert locations_of(LocatedGrads(given, found), len(there)) is found
        assert locations_of(LocatedGrads(given, found), 4) is None
        assert locations_of(given, len(there)) is None


def moved(some):
    """Another array, of the same form elsewhere."""
    some[1] = array(at=9 << 20)


def reshaped(some):
    some[1].shape = 5, 3


def dropped(some):
    some[1] = None


@pytest.mark.parametrize(("change", "at"), [(moved, [1, 9, 1]), (reshaped, None), (dropped, [1, 1])])
def test_arrays_that_come_again_are_compared_with_what_they_were(change, at):
    some = [array() for _ in range(3)]
    alive, fits = list(some), headers.form_checker(cupy.ndarray, [form(x) for x in some])
    found = [fits(list(some)) for _ in range(4)]
    assert found[3] is found[2] is found[1]
    assert found[1] is not found[0]
    change(some)
    last = fits(some)
    assert (last and [x >> 20 for x in last.addresses.tolist()]) == at
    assert alive


def test_nothing_fits_what_was_never_seen():
    some = [array(), array()]
    fits = headers.form_checker(cupy.ndarray, [form(some[0]), None])
    assert fits([some[0], None]) is not None
    assert fits(some) is None


def test_other_arrays_are_asked(monkeypatch):
    assert headers.cupy_words(np.ndarray) is None
    assert headers.form_checker(np.ndarray, []) is None
    monkeypatch.setattr(headers, "cupy_words", lambda kind: None)
    some = [array(*x) for x in SOME]
    assert headers.cupy_locations(some)[0].tolist() == [x.data.ptr for x in some]
    assert dtypes(some * 30) == ({x.dtype for x in some}, True)


@pytest.mark.parametrize("shape", [(5, 3), (15,), (1, 3, 5)])
def test_a_shape_that_is_set_is_noticed(shape):
    some = [array() for _ in range(3)]
    watch = Watch(some)
    assert watch.changed() == []
    some[1].shape = shape
    assert 1 in watch.changed()
