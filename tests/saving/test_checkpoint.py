"""Checkpoints: what is saved comes back."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open

import arrayopt as ao
from arrayopt.ranks.alone import Alone
from arrayopt.saving import checkpoint, writing
from tests.conftest import BACKENDS
from tests.support.cases import RUN_IDS, RUNS, make
from tests.support.checkpoints import ROOT, SHAPES, START, S, contents, run, small, to_bytes
from tests.support.engines import EVERY, SLOW
from tests.support.slow import marked

# ---- going on bit for bit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), RUNS, ids=RUN_IDS)
def test_every_rule_goes_on_as_if_nothing_had_been(name, options, tmp_path):
    def new(values):
        params = {k: x.copy() for k, x in values.items()}
        groups = {"b": {"clip_value": 0.125}}
        return ao.Optimizer(params, make(name, options), groups=groups, engine="array_api", clip_norm=S.Linear(3, 2, 9))

    straight = run(new(START), np.copy, range(5))
    first = run(new(START), np.copy, range(3))
    first.save(tmp_path / "run.safetensors")
    second = new({k: np.zeros(shape) for k, shape in SHAPES.items()})
    params = second.load(tmp_path / "run.safetensors")
    assert params is second.params
    assert contents(second) == contents(first)
    assert contents(run(second, np.copy, range(3, 5))) == contents(straight)


NEW_PROCESS = """
import sys
from pathlib import Path
from tests.saving import test_checkpoint as t
for name, engine in t.PLACES[sys.argv[2]]:
    opt = t.fresh(name, engine)
    opt.load(Path(sys.argv[1]) / f"{name}-{engine}")
    t.run(opt, t.BACKENDS[name].array, range(2, 4)).save(Path(sys.argv[1]) / f"{name}-{engine}")
"""
PLACES = {
    "in place": [*(("numpy", engine) for engine in EVERY if engine not in SLOW), ("torch", "auto")],
    "slow": [("numpy", engine) for engine in SLOW],
    "jax": [("jax", "auto")],
}


def fresh(name, engine):
    """An optimizer with schedules, groups, and arrays of several layouts."""
    backend = BACKENDS[name]
    params = {name: backend.array(x) for name, x in START.items()}
    if backend.name in ("numpy", "torch"):
        params["w"] = backend.array(START["w"].T).T
        params["b"] = backend.array(np.repeat(START["b"], 2))[::2]
    rule = ao.LAMB(lr=S.Join([S.Warmup(0.1, 2), 0.5 * S.Cosine(0.2, 9)], [2]), beta1=[0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    return ao.Optimizer(params, rule, groups={"b": {"adapt": False}}, engine=engine, clip_norm=2.0)


@pytest.mark.parametrize("which", marked([(which,) for which in PLACES], lambda which: which == "in place"))
def test_a_new_process_goes_on_bit_for_bit(which, tmp_path):
    for name, engine in PLACES[which]:
        run(fresh(name, engine), BACKENDS[name].array, range(2)).save(tmp_path / f"{name}-{engine}")
    subprocess.run([sys.executable, "-c", NEW_PROCESS, tmp_path, which], check=True, cwd=ROOT, timeout=300)
    for name, engine in PLACES[which]:
        end = fresh(name, engine)
        end.load(tmp_path / f"{name}-{engine}")
        assert end.step_count == 4
        assert contents(end) == contents(run(fresh(name, engine), BACKENDS[name].array, range(4))), (name, engine)


# ---- what comes back ------------------------------------------------------------------------------------------------

DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize("source", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
def test_arrays_go_from_library_to_library(source, target, tmp_path):
    def new(backend):
        arrays = {f"{d}{i}": backend.array(x, d) for d in DTYPES for i, x in enumerate(([[1.5, -2.0]], 0.25, []))}
        return ao.Optimizer(arrays, ao.AdamW(lr=0.1))

    out, into = new(BACKENDS[source]), new(BACKENDS[target])
    out.step({name: x * 3 for name, x in out.params.items()})
    out.save(tmp_path / "x")
    into.step(dict(into.params))
    params = into.load(tmp_path / "x")
    assert contents(into)[0] == contents(out)[0]
    for name, state in into.state.items():
        for x in (params[name], state["m"], state["v"]):
            assert ao.arrays.library(x) == BACKENDS[target].xp.__name__.removeprefix("array_api_compat.")
        assert to_bytes(state["m"]) == to_bytes(out.state[name]["m"])
    into.step(dict(into.params))


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_views_and_layouts_are_written_where_they_are(name, tmp_path):
    backend = BACKENDS[name]

    def new(values):
        base = backend.array(np.zeros((6, 8)))
        view = base[::2, 1::2].T
        view[...] = backend.array(values)
        return base, ao.Optimizer({"w": view}, ao.LARS(lr=0.1))

    _, opt = new(np.arange(12.0).reshape(4, 3))
    opt.step({"w": backend.array(np.ones((4, 3)))})
    opt.save(tmp_path / "x")
    base, other = new(np.zeros((4, 3)))
    slot = other.state["w"]["buf"]
    view = other.params["w"]
    assert other.load(tmp_path / "x")["w"] is view
    assert contents(other) == contents(opt)
    host = backend.numpy(base)
    assert host[::2, 1::2].any()
    assert not host[1::2].any()
    assert not host[:, ::2].any()
    strides = (lambda x: x.strides) if name == "numpy" else (lambda x: x.stride())
    assert strides(other.state["w"]["buf"]) == strides(slot)


def test_what_is_loaded_is_no_ones_else(tmp_path):
    """Writing what was loaded into does not reach the file, and a second load brings the first values again."""
    for backend in (BACKENDS["numpy"], BACKENDS["torch"], BACKENDS["jax"]):
        opt = ao.Optimizer({"w": backend.array([1.0, 2.0])}, ao.SGD(lr=0.1, momentum=0.9))
        opt.step({"w": backend.array([1.0, 1.0])})
        opt.save(tmp_path / "x")
        before, data = contents(opt), (tmp_path / "x").read_bytes()
        for _ in range(2):
            opt.load(tmp_path / "x")
            assert contents(opt) == before
            opt.step({"w": backend.array([5.0, 5.0])})
        assert (tmp_path / "x").read_bytes() == data


class OnDevice(np.ndarray):
    """As CuPy's arrays are: `get` copies them to the host."""

    fetched = 0

    def get(self):
        OnDevice.fetched += 1
        return self.view(np.ndarray).copy()


def test_arrays_are_fetched_from_a_device_explicitly_and_once(monkeypatch, tmp_path):
    """There is no such device here: this stands for CuPy's arrays, as far as writing them goes."""
    opt = small()
    opt.save(tmp_path / "x", params=False)
    state = opt.state_dict()
    for about in state["tensors"].values():
        about["slots"] = {name: x.view(OnDevice) for name, x in about["slots"].items()}
    monkeypatch.setattr("array_api_compat.is_cupy_array", lambda x: isinstance(x, OnDevice))
    assert writing.File(tmp_path / "y", state, None).write(Alone()) is None
    assert (tmp_path / "y").read_bytes() == (tmp_path / "x").read_bytes()
    assert OnDevice.fetched == 2


def test_whatever_a_state_dict_holds_comes_back(tmp_path):
    """Plain values, arrays and schedules anywhere in it, in the order given."""
    extra = {"scale": 65536.0, "good": [3, None, True, "x"], "$array": {"$values": 1}, "lr": S.Constant(0.5)}
    given = {"z": 1, "extra": {**extra, "found": np.arange(3, dtype="int32"), "c": np.asarray(1j)}, "a": {}}
    assert writing.File(tmp_path / "x", given, None).write(Alone()) is None
    _, found, params, wrong, *_ = checkpoint.load(tmp_path / "x", {}, {})
    assert (params, wrong) == ({}, [])
    assert list(found) == ["z", "extra", "a"]
    assert {k: x for k, x in found["extra"].items() if k in extra} == extra
    assert (found["extra"]["found"].dtype, found["extra"]["c"].shape) == ("int32", ())
    assert (found["extra"]["found"].tolist(), found["extra"]["c"]) == ([0, 1, 2], 1j)


@pytest.mark.parametrize(("value", "words"), [(object(), "extra.0 is a object"), (np.zeros(1, "S3"), "of dtype |S3")])
def test_what_is_no_plain_value_cannot_be_saved(value, words, tmp_path):
    with pytest.raises(ValueError, match=re.escape(words)):
        writing.File(tmp_path / "x", {"extra": [value]}, None)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("auto")
def test_without_parameters(tmp_path):
    opt = ao.Optimizer({"w": np.ones(3)}, ao.LAMB())
    opt.step({"w": np.ones(3)})
    opt.save(tmp_path / "x", params=False)
    other = ao.Optimizer({"w": np.full(3, 7.0)}, ao.LAMB())
    assert (other.load(tmp_path / "x")["w"] == 7.0).all()
    assert contents(other)[1:] == contents(opt)[1:]
    with safe_open(tmp_path / "x", "numpy") as file:
        assert sorted(file.keys()) == ["state/tensors/w/slots/m", "state/tensors/w/slots/v"]


def test_read_only_arrays_are_replaced(tmp_path):
    opt = ao.Optimizer({"w": np.ones(3)}, ao.SGD(lr=0.1))
    opt.save(tmp_path / "x")
    opt.step({"w": np.ones(3)})
    held = opt.params["w"]
    held.flags.writeable = False
    params = opt.load(tmp_path / "x")
    assert (params["w"] == 1.0).all()
    assert (held == 0.9).all()


ODD_NAMES = [
    "$array",
    "$$",
    "$schedule",
    "a/b",
    "a~1b",
    "a~b",
    "..",
    "/etc/passwd",
    "__metadata__",
    "",
    "ä 🙂",
    'q"\\\n',
]


def test_any_name_can_be_saved(tmp_path, monkeypatch):
    """Names are never paths, and are never mistaken for something else in the file."""
    monkeypatch.chdir(tmp_path)
    params = {name: np.full(2, float(i)) for i, name in enumerate(ODD_NAMES)}
    opt = ao.Optimizer(params, ao.SGD(lr=0.1, momentum=0.5))
    opt.step({name: np.ones(2) for name in params})
    opt.save("x")
    other = ao.Optimizer({name: np.zeros(2) for name in params}, ao.SGD(lr=0.3, momentum=0.5))
    other.load("x")
    assert contents(other) == contents(opt)
    assert os.listdir(tmp_path) == ["x"]


def test_the_file_says_what_it_holds(tmp_path):
    """safetensors reads it, and the description is JSON."""
    rule = ao.LAMB(lr=S.Cosine(0.1, 7), weight_decay=[0.5, 0.25])
    opt = ao.Optimizer({"w": np.ones((2, 3), "float32"), "h": np.ones(3, "float16")}, rule, groups={"h": {"lr": 0.5}})
    opt.save(tmp_path / "x")
    with safe_open(tmp_path / "x", "numpy") as file:
        assert (file.get_tensor("params/w") == 1).all()
        document = json.loads(file.metadata()["arrayopt"])
    assert (document["checkpoint"], document["arrayopt"]) == (2, ao.__version__)
    state = document["state"]
    assert state["rule"]["hypers"]["lr"] == {
        "$schedule": "Cosine",
        "init_value": 0.1,
        "decay_steps": 7,
        "end_value": 0.0,
        "steps_per_epoch": 1,
    }
    assert state["rule"]["hypers"]["weight_decay"] == {"$values": [0.5, 0.25]}
    assert [(g["label"], g["own"], g["tensors"]) for g in state["groups"]] == [
        ("h", ["lr"], ["h"]),
        ("rest", [], ["w"]),
    ]
    about = state["tensors"]["h"]["slots"]["m"]
    assert (about["$array"], about["dtype"], about["shape"]) == ("state/tensors/h/slots/m", "float32", [3])


# ---- hyper-parameters -----------------------------------------------------------------------------------------------


def test_hyper_parameters_become_the_saved_ones(tmp_path):
    """Numbers, sequences, arrays and every schedule, whatever the optimizer that loads was made with."""
    lr = S.Sum(
        S.Product(S.OneCycle(0.1, 50), S.Exponential(1.0, 0.9, 10, staircase=True)), S.PiecewiseConstant([3], [0.1])
    )
    saved = ao.LAMB(lr=lr, beta1=torch.tensor(0.5), beta2=[0.1, 0.2], eps=S.CosineRestarts(0.1, 5, 2), max_norm=3.0)
    opt = ao.Optimizer(torch.ones(3), saved, clip_norm=S.InverseSqrt(1.0, 5))
    opt.save(tmp_path / "x")
    other = ao.Optimizer(torch.ones(3), ao.LAMB(max_norm=1.0))
    other.load(tmp_path / "x")
    assert (other.lr, other.eps, other.beta2, other.clip_norm) == (opt.lr, opt.eps, opt.beta2, opt.clip_norm)
    assert (other.beta1, other.max_norm) == (0.5, 3.0)


def halved(step):
    return 0.5**step


class Callable:
    def __call__(self, step):
        return 0.1


def test_functions_stay_those_of_the_optimizer_that_loads(tmp_path):
    def new(lr, weight_decay):
        return ao.Optimizer(
            {"w": np.ones(2), "b": np.ones(2)}, ao.SGD(lr=lr), groups={"b": {"weight_decay": weight_decay}}
        )

    live = Callable()
    new(halved * S.Constant(0.1), Callable()).save(tmp_path / "x")
    opt = new(halved * S.Constant(0.7), live)
    opt.load(tmp_path / "x")
    assert opt.lr == halved * S.Constant(0.1)
    assert opt.groups[0].weight_decay is live
    other = new(0.5, lambda step: 0.1)
    before = contents(other)
    with pytest.raises(ValueError, match="does not fit") as caught:
        other.load(tmp_path / "x")
    assert "rule.hypers.lr.b was the function halved, here None" in str(caught.value)
    assert "groups.0.hypers.weight_decay was the function Callable, here <function" in str(caught.value)
    assert contents(other) == before
