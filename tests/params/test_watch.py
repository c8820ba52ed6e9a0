"""Arrays that become others under their object are noticed before anything is written."""

import warnings

import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.params import watch
from tests.support.engines import each_engine, each_of_torch
from tests.support.refusals import raises


@pytest.fixture(params=[True, False], ids=["heads", "attributes"])
def way(request, monkeypatch):
    """Arrays watched by their heads, and, where heads are not known, by their attributes."""
    if not request.param:
        monkeypatch.setattr(watch, "numpy_words", lambda: None)
        monkeypatch.setattr(watch, "torch_unchanged", lambda tensors: None)
    else:
        assert watch.numpy_words() is not None
        assert watch.torch_unchanged([torch.ones(1)]) is not None


pytestmark = pytest.mark.filterwarnings("ignore:Setting the .* on a NumPy array:DeprecationWarning")  # of NumPy 2.5


def grown(x):
    """Other memory, and back to the old shape: what the old address holds is anybody's now."""
    shape = x.shape
    x.resize((1 << 20,), refcheck=False)
    x.resize(shape, refcheck=False)


def reshaped(x):
    x.shape = x.shape[::-1]


def retyped(x):
    x.dtype = np.int64


def larger(x):
    x.resize((6, 4), refcheck=False)


def turned(x):
    x.strides = (8, 16)


FORMS = {"shape": (reshaped, "shape (3, 2) at 'w'"), "dtype": (retyped, "dtype int64 at 'w'")}
FORMS["resize"] = (larger, "shape (6, 4) at 'w'")


@each_engine
@pytest.mark.parametrize(("change", "words"), FORMS.values(), ids=FORMS)
def test_numpy_arrays_that_become_others_are_refused_by_name(way, engine, change, words):
    w, b = np.ones((2, 3)), np.ones(4)
    opt = ao.Optimizer({"b": b, "w": w}, ao.AdamW(lr=0.5), engine=engine)
    grads = {"w": np.ones((2, 3)), "b": np.ones(4)}
    opt.step(grads)
    change(w)
    was = b.tolist()
    for call in (lambda: opt.step(grads), opt.advance, opt.state_dict, opt.averaged):
        raises(
            call,
            ValueError,
            "Optimizer: 'w' must keep shape, dtype, library and device: ",
            words,
            "make a new Optimizer",
        )
    assert b.tolist() == was
    assert opt.step_count == 1


@each_engine
def test_numpy_arrays_that_become_others_before_the_first_step_begin_anew(way, engine):
    w = np.ones((2, 3))
    opt = ao.Optimizer({"w": w}, ao.SGD(lr=0.5, momentum=0.5), engine=engine)
    larger(w)
    w[...] = 2.0
    opt.step({"w": np.ones((6, 4))})
    assert w.tolist() == [[1.5] * 4] * 6
    assert opt.state["w"]["buf"].tolist() == [[1.0] * 4] * 6


@each_engine
def test_numpy_arrays_that_moved_are_followed(way, engine):
    w, b = np.ones((2, 3)), np.ones((5, 5))
    opt = ao.Optimizer({"w": w, "b": b}, ao.SGD(lr=0.5, momentum=0.5), engine=engine)
    opt.step({"w": np.ones((2, 3)), "b": np.ones((5, 5))})
    grown(w)
    w[...] = 8.0
    others = [np.full((2, 3), 3.0) for _ in range(100)]
    assert opt.step({"w": np.ones((2, 3)), "b": np.ones((5, 5))})["w"].tolist() == [[7.25] * 3] * 2
    assert all((x == 3.0).all() for x in others)
    assert b.tolist() == [[-0.25] * 5] * 5


@each_engine
def test_numpy_arrays_that_are_turned_are_followed(engine):
    w = np.arange(4.0).reshape(2, 2)
    opt = ao.Optimizer(w, ao.SGD(lr=0.5), engine=engine)
    g = np.array([[2.0, 4.0], [6.0, 8.0]])
    opt.step(g)
    with warnings.catch_warnings(action="ignore"):
        turned(w)
    assert w.tolist() == [[-1.0, -1.0], [-1.0, -1.0]]
    assert opt.step(g).tolist() == [[-2.0, -3.0], [-4.0, -5.0]]


@each_engine
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
@pytest.mark.parametrize("steps", [0, 1])
def test_arrays_that_become_read_only_are_replaced(way, engine, dtype, steps):
    w, b = np.ones(4, dtype), np.ones(4, dtype)
    opt = ao.Optimizer({"w": w, "b": b}, ao.SGD(lr=0.5, momentum=0.5), engine=engine)
    grads = {"w": np.ones(4, dtype), "b": np.ones(4, dtype)}
    for _ in range(steps):
        opt.step(grads)
    was = w.tolist()
    w.flags.writeable = False
    p = opt.step(grads)
    assert w.tolist() == was
    assert p["w"] is not w
    assert p["b"] is b
    assert p["w"].tolist() == b.tolist() == [[0.5] * 4, [-0.25] * 4][steps]
    assert opt.step(grads)["w"].tolist() == b.tolist()
    assert opt.params["w"].tolist() == b.tolist()


@each_engine
def test_slots_are_watched_once_the_user_has_them(way, engine):
    opt = ao.Optimizer({"w": np.ones((2, 3))}, ao.SGD(lr=0.5, momentum=0.5), engine=engine)
    g = {"w": np.ones((2, 3))}
    opt.step(g)
    buf = opt.state["w"]["buf"]
    buf.flags.writeable = False
    was = buf.tolist()
    assert opt.step(g)["w"].tolist() == [[-0.25] * 3] * 2
    assert buf.tolist() == was
    buf = opt.state["w"]["buf"]
    buf.flags.writeable = True
    if buf.flags.owndata:  # what `numpy` puts there is a view
        grown(buf)
    buf[...] = 0.0
    assert opt.step(g)["w"].tolist() == [[-0.75] * 3] * 2
    buf.shape = (3, 2)
    raises(lambda: opt.step(g), ValueError, "shape (3, 2) in slot 'buf' of 'w', expected (2, 3)")
    buf.shape = (2, 3)
    assert opt.step(g)["w"].tolist() == [[-1.5] * 3] * 2


def double(m):
    m.double()


def half(m):
    m.half()


def other_data(m):
    m.weight.data = torch.zeros(60, 60)


TURNS = {"double": (double, "dtype torch.float64 at 'weight'"), "half": (half, "dtype torch.float16 at 'weight'")}
TURNS["data"] = (other_data, "shape (60, 60) at 'weight', expected (30, 30)")


def gradients(m):
    return {name: torch.ones_like(x) for name, x in m.named_parameters()}


@each_of_torch
@pytest.mark.parametrize(("turn", "words"), TURNS.values(), ids=TURNS)
def test_modules_that_are_converted_after_a_step_are_refused_by_name(engine, turn, words):
    m = torch.nn.Linear(30, 30)
    opt = ao.Optimizer(dict(m.named_parameters()), ao.AdamW(lr=0.1), engine=engine)
    opt.step(gradients(m))
    turn(m)
    was = [x.detach().clone() for x in m.parameters()]
    raises(
        lambda: opt.step(gradients(m)),
        ValueError,
        "must keep shape, dtype, library and device",
        words,
        "make a new Optimizer",
    )
    assert all(map(torch.equal, was, m.parameters()))


@each_of_torch
@pytest.mark.parametrize("turn", [double, half, other_data], ids=["double", "half", "data"])
@pytest.mark.parametrize("looked", [False, True])
def test_modules_that_are_converted_before_the_first_step_begin_anew(engine, turn, looked):
    torch.manual_seed(0)
    m = torch.nn.Linear(30, 30)
    groups = {"bias": {"lr": 0.01}}
    opt = ao.Optimizer(dict(m.named_parameters()), ao.AdamW(lr=0.1), groups=groups, engine=engine, clip_norm=5.0)
    if looked:
        opt.state["weight"]
    turn(m)
    start = {name: x.detach().clone() for name, x in m.named_parameters()}
    fresh = ao.Optimizer(start, ao.AdamW(lr=0.1), groups=groups, engine=engine, clip_norm=5.0)
    for _ in range(3):
        opt.step(gradients(m))
        fresh.step(gradients(m))
    for name, x in m.named_parameters():
        assert torch.equal(x, start[name])
        for slot, y in fresh.state[name].items():
            assert slot == "t" or (torch.equal(opt.state[name][slot], y) and opt.state[name][slot].dtype == y.dtype)


def test_what_cannot_have_state_is_refused_before_the_first_step_too():
    m = torch.nn.Linear(3, 3)
    opt = ao.Optimizer(dict(m.named_parameters()), ao.SGD(lr=0.1, momentum=0.5, state_dtype="float16"))
    m.weight.data = torch.ones(3, 3, dtype=torch.complex64)
    raises(lambda: opt.step(gradients(m)), ValueError, "SGD: `state_dtype` of complex parameters must be")
    m.weight.data = torch.ones(3, 3)
    assert torch.equal(opt.step(gradients(m))["weight"], torch.full((3, 3), 0.9))


@each_of_torch
def test_no_state_is_lost_that_there_is(engine):
    m = torch.nn.Linear(3, 3)
    opt = ao.Optimizer(dict(m.named_parameters()), ao.SGD(lr=0.1), engine=engine, accumulate=3)
    opt.step(gradients(m))  # a micro-step
    m.double()
    raises(lambda: opt.step(gradients(m)), ValueError, "must keep shape, dtype, library and device")
    m = torch.nn.Linear(3, 3)
    opt = ao.Optimizer(dict(m.named_parameters()), ao.SGD(lr=0.1), engine=engine)
    opt.load_state_dict(opt.state_dict())
    m.double()
    raises(lambda: opt.step(gradients(m)), ValueError, "must keep shape, dtype, library and device")
    m = torch.nn.Linear(3, 3)
    opt = ao.Optimizer(dict(m.named_parameters()), ao.SGD(lr=0.1), engine=engine)
    opt.advance()
    m.double()
    raises(lambda: opt.launch(gradients(m)), ValueError, "must keep shape, dtype, library and device")


@each_of_torch
def test_masters_of_data_that_is_set_begin_anew(engine):
    p = torch.ones(3, dtype=torch.bfloat16)
    opt = ao.Optimizer(p, ao.SGD(lr=2.0**-12), engine=engine)
    opt.step(torch.ones(3, dtype=torch.bfloat16))
    p.data = p.data.clone()  # the same values elsewhere: the master is as fine as it was
    assert opt.state["param"]["master"].tolist() == [1 - 2.0**-12] * 3
    p.data = torch.full((3,), 4.0, dtype=torch.bfloat16)
    opt.step(torch.ones(3, dtype=torch.bfloat16))
    assert opt.state["param"]["master"].tolist() == [4 - 2.0**-12] * 3
    assert p.tolist() == [4.0] * 3
