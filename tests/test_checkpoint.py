"""Checkpoints: what is saved comes back; a killed writer leaves a whole file; a bad file changes nothing."""

import json
import os
import pickle
import random
import re
import resource
import struct
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

import arrayopt as ao
from arrayopt import checkpoint
from arrayopt.atomic import replacing
from tests.cases import ALL, IDS, make
from tests.conftest import BACKENDS

S = ao.schedules
ROOT = Path(__file__).parents[1]
RNG = np.random.default_rng(5)
SHAPES = {"w": (7, 5), "stack": (2, 3, 4), "b": (5,), "scalar": (), "empty": (0, 3)}
START = {name: RNG.normal(size=shape) for name, shape in SHAPES.items()}
GRADS = [{name: RNG.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(6)]


def run(opt, array, steps):
    """Steps with gradients of their own; in the second one, a tensor is left out."""
    for s in steps:
        opt.step({name: None if (s, name) == (1, "b") else array(g) for name, g in GRADS[s].items()})
    return opt


def contents(opt):
    """Everything that a step depends on, in bytes and words."""
    arrays = {
        name: [(k, x if k == "t" else (str(x.dtype), tuple(x.shape), to_bytes(x))) for k, x in state.items()]
        for name, state in opt.state.items()
    }
    params = [(name, to_bytes(x)) for name, x in ao.trees.flatten(opt.params)]
    rules = [(repr(g.rule), sorted(g.overridden), g.names) for g in opt.groups]
    return params, arrays, rules, repr(opt.rule), opt.step_count, repr(opt.clip_norm)


def to_bytes(x):
    return ao.arrays.to_host(x).tobytes()


# ---- going on bit for bit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)
def test_every_rule_goes_on_as_if_nothing_had_been(name, options, tmp_path):
    def new(values):
        params = {k: x.copy() for k, x in values.items()}
        groups = {"b": {"weight_decay": 0.125}}
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
from tests import test_checkpoint as t
for name, engine in t.PLACES:
    opt = t.fresh(name, engine)
    opt.load(Path(sys.argv[1]) / f"{name}-{engine}")
    t.run(opt, t.BACKENDS[name].array, range(2, 4)).save(Path(sys.argv[1]) / f"{name}-{engine}")
"""
PLACES = [("numpy", "array_api"), ("numpy", "numpy"), ("numpy", "numba"), ("torch", "auto"), ("jax", "auto")]


def fresh(name, engine):
    """An optimizer with schedules, groups, and arrays of several layouts."""
    backend = BACKENDS[name]
    params = {name: backend.array(x) for name, x in START.items()}
    if backend.name in ("numpy", "torch"):
        params["w"] = backend.array(START["w"].T).T
        params["b"] = backend.array(np.repeat(START["b"], 2))[::2]
    rule = ao.LAMB(lr=S.Join([S.Warmup(0.1, 2), 0.5 * S.Cosine(0.2, 9)], [2]), beta1=[0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    return ao.Optimizer(params, rule, groups={"b": {"adapt": False}}, engine=engine, clip_norm=2.0)


def test_a_new_process_goes_on_bit_for_bit(tmp_path):
    for name, engine in PLACES:
        run(fresh(name, engine), BACKENDS[name].array, range(2)).save(tmp_path / f"{name}-{engine}")
    subprocess.run([sys.executable, "-c", NEW_PROCESS, tmp_path], check=True, cwd=ROOT, timeout=300)
    for name, engine in PLACES:
        end = fresh(name, engine)
        end.load(tmp_path / f"{name}-{engine}")
        assert end.step_count == 4
        assert contents(end) == contents(run(fresh(name, engine), BACKENDS[name].array, range(4))), (name, engine)


# ---- what comes back ------------------------------------------------------------------------------------------------

DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


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
    checkpoint.save(tmp_path / "y", state, None)
    assert (tmp_path / "y").read_bytes() == (tmp_path / "x").read_bytes()
    assert OnDevice.fetched == 2


def test_whatever_a_state_dict_holds_comes_back(tmp_path):
    """Plain values, arrays and schedules anywhere in it, in the order given."""
    extra = {"scale": 65536.0, "good": [3, None, True, "x"], "$array": {"$values": 1}, "lr": S.Constant(0.5)}
    given = {"z": 1, "extra": {**extra, "found": np.arange(3, dtype="int32"), "c": np.asarray(1j)}, "a": {}}
    checkpoint.save(tmp_path / "x", given, None)
    found = {}
    checkpoint.load(tmp_path / "x", {}, [], lambda state, **options: found.update(state))
    assert list(found) == ["z", "extra", "a"]
    assert {k: x for k, x in found["extra"].items() if k in extra} == extra
    assert (found["extra"]["found"].dtype, found["extra"]["c"].shape) == ("int32", ())
    assert (found["extra"]["found"].tolist(), found["extra"]["c"]) == ([0, 1, 2], 1j)


@pytest.mark.parametrize(("value", "words"), [(object(), "extra.0 is a object"), (np.zeros(1, "S3"), "of dtype |S3")])
def test_what_is_no_plain_value_cannot_be_saved(value, words, tmp_path):
    with pytest.raises(ValueError, match=re.escape(words)):
        checkpoint.save(tmp_path / "x", {"extra": [value]}, None)
    assert os.listdir(tmp_path) == []


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
    assert (document["checkpoint"], document["arrayopt"]) == (1, ao.__version__)
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


# ---- writing --------------------------------------------------------------------------------------------------------


def small(value=1.0, **options):
    opt = ao.Optimizer({"w": np.full((2, 3), value), "b": np.ones(3)}, ao.SGD(lr=0.1, momentum=0.5), **options)
    opt.step({"w": np.ones((2, 3)), "b": np.ones(3)})
    return opt


@pytest.mark.parametrize(("name", "words"), [("\ud800", "surrogates"), ("n" * 2000, "must fit in 2000 bytes")])
def test_what_cannot_be_saved_is_refused_and_the_old_file_stays(name, words, tmp_path, monkeypatch):
    small().save(tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    monkeypatch.setattr(checkpoint, "LONGEST", 2000)
    with pytest.raises(ValueError, match=words):
        ao.Optimizer({name: np.ones(2)}, ao.SGD(lr=0.1)).save(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path):
    small().save(tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    big = ao.Optimizer(np.ones(100_000), ao.SGD(lr=0.1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            big.save(tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "x").read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]


def test_where_nothing_can_be_written(tmp_path):
    opt = small()
    with pytest.raises(FileNotFoundError):
        opt.save(tmp_path / "no" / "x")
    with pytest.raises(IsADirectoryError):
        opt.save(tmp_path)
    with pytest.raises(ValueError, match="not a regular file"):
        opt.save("/dev/null")
    with pytest.raises(TypeError):
        opt.save(None)
    assert os.listdir(tmp_path) == []


def test_the_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def synced(number):
        done.append(("fsync", os.readlink(f"/proc/self/fd/{number}")))
        fsync(number)

    def replaced(source, target):
        done.append(("replace", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    small().save(tmp_path / "x")
    (first, temporary), second, third = done
    assert first == "fsync"
    assert Path(temporary).parent == tmp_path
    assert [second, third] == [("replace", str(tmp_path / "x")), ("fsync", str(tmp_path))]


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "runs" / "x")
    small().save(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert os.listdir(tmp_path / "runs") == ["x"]


def test_what_dead_writers_left_is_cleared_and_nothing_else(tmp_path):
    target = tmp_path / "x"
    dead = tmp_path / f".x.{'0' * 16}.arrayopt-tmp"
    others = [f".x.{'0' * 15}g.arrayopt-tmp", f".y.{'0' * 16}.arrayopt-tmp", ".x.tmp", f"x.{'0' * 16}.arrayopt-tmp"]
    for name in (dead.name, *others):
        (tmp_path / name).write_bytes(b"?")
    with replacing(target) as first:
        first.write(b"first")
        with replacing(target) as second:  # the first one lives, and so do its files
            second.write(b"second")
        assert target.read_bytes() == b"second"
    assert target.read_bytes() == b"first"
    assert sorted(os.listdir(tmp_path)) == sorted(["x", *others])


KILLED = """
import os, random, signal, sys, time
import numpy as np
import arrayopt as ao

path, rng = sys.argv[1], random.Random(3)
make = lambda k: ao.Optimizer([np.full(50_000, k) for _ in range(4)], ao.SGD(lr=1.0, momentum=0.5))
opts = [make(1.0), make(2.0)]
opts[1].step_count = 1
began = time.perf_counter()
for opt in opts:
    opt.save(path)
took = time.perf_counter() - began
left = 0
for _ in range(40):
    pid = os.fork()
    if pid == 0:
        while True:
            for opt in opts:
                opt.save(path)
    time.sleep(rng.uniform(0, 2 * took))
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    left += len(os.listdir(os.path.dirname(path))) > 1
    found = make(0.0)
    params = found.load(path)
    assert all((p == 1.0 + found.step_count).all() for p in params), params
opts[0].save(path)
print(left, *os.listdir(os.path.dirname(path)))
"""


def test_40_of_40_kills_leave_a_whole_file(tmp_path):
    """A process that saves all the time is killed at random moments; the next save then clears what it left."""
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path / "x")]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=300)
    left, *files = ran.stdout.split()
    assert int(left) >= 5, "too few kills came while a file was being written"
    assert files == ["x"]


MEMORY = """
import re, sys
from pathlib import Path
import numpy as np
import arrayopt as ao

peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
opt = ao.Optimizer([np.ones((10, 128, 1024), "float32").T for _ in range(20)], ao.SGD(lr=1.0, momentum=0.5))
for state in opt.state.values():
    state["buf"][...] = 1.0
before = peak()
opt.save(sys.argv[1])
saved = peak()
opt.load(sys.argv[1])
print(before, saved - before, peak() - saved)
"""


def test_saving_needs_no_second_copy_of_the_state(tmp_path):
    """100 MiB of parameters and 100 MiB of state, in tensors of 5 MiB, transposed, so that each has to be copied.

    Loading has the new values beside the old ones, and besides maps the file, which the system can take back.
    """
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "x")]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=300)
    before, saving, loading = map(float, ran.stdout.split())
    assert before > 200
    assert saving < 20
    assert loading < 420


# ---- files that are not right ---------------------------------------------------------------------------------------


def refused(opt, path, *words, error=ValueError):
    """Loading fails with the words, and the optimizer is byte for byte as before."""
    before = contents(opt)
    with pytest.raises(error) as caught:
        opt.load(path)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
    assert contents(opt) == before


def mutated(data, rng):
    """A file with something wrong in it."""
    header = 8 + int.from_bytes(data[:8], "little")
    at = rng.choice([rng.randrange(8), rng.randrange(8, header), rng.randrange(header, len(data))])
    end = min(at + rng.randrange(1, 100), len(data))
    kinds = [
        lambda: data[:at],
        lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
        lambda: data[:at] + rng.randbytes(end - at) + data[end:],
        lambda: data[:at] + bytes(end - at) + data[end:],
        lambda: data[:at] + data[end:],
        lambda: data[:at] + rng.randbytes(end - at) + data[at:],
        lambda: data[:at] + data[at:end][::-1] + data[end:],
        lambda: data + rng.randbytes(end - at),
    ]
    return rng.choice(kinds)()


def test_200_damaged_files_are_refused(tmp_path):
    source, opt = small(2.0), small()
    source.lr = S.Cosine(0.5, 10)
    source.save(tmp_path / "x")
    data, rng, tried = (tmp_path / "x").read_bytes(), random.Random(11), 0
    opt.load(tmp_path / "x")
    opt.step({"w": np.ones((2, 3)), "b": np.ones(3)})
    while tried < 200:
        bad = mutated(data, rng)
        if bad != data:
            (tmp_path / "bad").write_bytes(bad)
            refused(opt, tmp_path / "bad", f"Optimizer.load: {tmp_path / 'bad'}: is damaged, or no checkpoint: ")
            tried += 1


def parts(data):
    """A file's header and data."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def whole(header, data):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack("<Q", len(text)) + text + data


def forged(change):
    """A file whose description has been changed, checksum and all."""

    def make_file(data):
        header, tensors = parts(data)
        document = json.loads(header["__metadata__"]["arrayopt"])
        text = change(document, header)
        text = text if isinstance(text, str) else json.dumps(document)
        header["__metadata__"] = {"arrayopt": text, "blake2b": blake2b(text.encode(), digest_size=16).hexdigest()}
        return whole(header, tensors)

    return make_file


def state(path, value):
    """A change of one place in the saved state."""

    def change(document, header):
        *way, last = path
        node = document
        for key in way:
            node = node[key]
        if value is DELETED:
            del node[last]
        else:
            node[last] = value

    return forged(change)


def in_header(change):
    """A file whose header has been changed outside of the description."""

    def make_file(data):
        header, tensors = parts(data)
        return whole(change(header) or header, tensors)

    return make_file


def twice(header):
    return json.dumps(header)[:-1].encode() + b', "params/w": {"dtype": "F64", "shape": [3], "data_offsets": [48, 72]}}'


DELETED = object()
M_KEY = "state/tensors/w/slots/buf"
T = ("state", "tensors", "w")
M = (*T, "slots", "buf")
HYPERS = ("state", "groups", 0, "hypers")
ALL_HYPERS = dict.fromkeys(["lr", "momentum", "dampening", "weight_decay"], 0.0)
TAMPERED = {
    "huge header": (lambda data: struct.pack("<Q", 2**63) + data[8:], "header too large"),
    "header longer than the file": (lambda data: struct.pack("<Q", 10**6) + data[8:], "is damaged"),
    "overlapping": (in_header(lambda h: h["params/w"].update(data_offsets=[0, 48], shape=[6])), "invalid offset"),
    "a name twice": (in_header(twice), "is damaged"),
    "a path as name": (in_header(lambda h: h.update({"../../x": h.pop("params/w")})), "'params/w' is not there"),
    "dtype in the header": (in_header(lambda h: h["params/w"].update(dtype="I64")), "('I64', [2, 3])"),
    "shape in the header": (in_header(lambda h: h["params/w"].update(shape=[3, 2])), "('F64', [3, 2])"),
    "tensors exchanged": (
        in_header(lambda h: h.update({"params/w": h[M_KEY], M_KEY: h["params/w"]})),
        "does not have the checksum",
    ),
    "description": (
        in_header(lambda h: h["__metadata__"].update(arrayopt=h["__metadata__"]["arrayopt"].replace("0.1", "0.2"))),
        "its description does not have the checksum",
    ),
    "no metadata": (in_header(lambda h: h.pop("__metadata__") and None), "has no 'arrayopt'"),
    "no checksum": (in_header(lambda h: h["__metadata__"].pop("blake2b") and None), "checksum"),
    "no JSON": (forged(lambda d, h: "{"), "is damaged"),
    "deep": (forged(lambda d, h: "[" * 10**5), "is made by another program"),
    "digits": (forged(lambda d, h: f'{{"checkpoint": {"9" * 10**5}}}'), "is damaged"),
    "a list": (forged(lambda d, h: "[]"), "is made by another program"),
    "a number": (forged(lambda d, h: "1"), "is made by another program"),
    "a later format": (state(["checkpoint"], 2), "format must be 1; got 2"),
    "another state format": (state(["state", "format"], 7), "format must be 1; got 7"),
    "no state": (state(["state"], DELETED), "KeyError('state')"),
    "state is a list": (state(["state"], []), "does not name its tensors"),
    "state without tensors": (state(["state", "tensors"], DELETED), "does not name"),
    "a tensor described twice": (forged(lambda d, h: d["params"].update(b=d["params"]["w"])), "named twice"),
    "a tensor that nobody describes": (state([*M], 1.0), "does not name its tensors 'state/tensors/w/slots/buf'"),
    "a shape": (state([*M, "shape"], [3, 2]), "should be ('F64', [3, 2])"),
    "a dtype": (state([*M, "dtype"], "int64"), "should be ('I64', [2, 3])"),
    "a dtype that there is not": (state([*M, "dtype"], "float128"), "KeyError('float128')"),
    "a checksum": (state([*M, "blake2b"], None), "does not have the checksum"),
    "a key": (state([*M, "$array"], ["x"]), "TypeError"),
    "shape of the parameter": (state([*T, "shape"], [3, 2]), "shape (3, 2) at 'w', expected (2, 3)"),
    "t negative": (state([*T, "t"], -1), "t of 'w' must be a whole number from 0; got -1"),
    "t NaN": (state([*T, "t"], float("nan")), "got nan"),
    "t fraction": (state([*T, "t"], 1.5), "got 1.5"),
    "t true": (state([*T, "t"], True), "got True"),
    "t huge": (state([*T, "t"], 2**63), "must be a whole number"),
    "step negative": (state(["state", "step"], -1), "step must be a whole number from 0; got -1"),
    "step text": (state(["state", "step"], "3"), "step must be a whole number from 0; got '3'"),
    "lr negative": (state([*HYPERS, "lr"], -1.0), "`lr` must be in [0, inf)"),
    "lr NaN": (state([*HYPERS, "lr"], float("nan")), "`lr` must be in [0, inf)"),
    "lr text": (state([*HYPERS, "lr"], "x"), "`lr` must be a number"),
    "lr a sequence with NaN": (state([*HYPERS, "lr"], {"$values": [0.1, float("nan")]}), "`lr`[1] must be in"),
    "lr an unknown schedule": (state([*HYPERS, "lr"], {"$schedule": "os.system"}), "no schedule 'os.system'"),
    "lr what is no schedule": (state([*HYPERS, "lr"], {"$schedule": "plot"}), "there is no schedule 'plot'"),
    "lr the base class": (state([*HYPERS, "lr"], {"$schedule": "Schedule"}), "TypeError"),
    "lr a bad schedule": (state([*HYPERS, "lr"], {"$schedule": "Constant", "value": float("inf")}), "must be finite"),
    "lr a function": (state([*HYPERS, "lr"], {"$function": "eval"}), "was the function eval, here 0.1"),
    "momentum off": (state([*HYPERS, "momentum"], 0.0), "what is off must stay off"),
    "an unknown hyper-parameter": (state([*HYPERS, "nu"], 0.0), "'nu' is not a hyper-parameter of SGD"),
    "no hyper-parameters": (state([*HYPERS], {}), "does not fit"),
    "hyper-parameters as a list": (state([*HYPERS], []), "needs what state_dict() returned"),
    "an unknown own field": (state(["state", "groups", 0, "own"], ["__class__"]), "set '__class__', which SGD has not"),
    "clip_norm": (state(["state", "clip_norm"], -1.0), "`clip_norm` must be in (0, inf)"),
    "another rule": (state(["state", "rule", "name"], "LAMB"), "rule was LAMB, here SGD"),
    "a group more": (
        forged(lambda d, h: d["state"]["groups"].append(d["state"]["groups"][0])),
        "saved 2 groups, here 1",
    ),
    "a slot renamed": (
        forged(
            lambda d, h: d["state"]["tensors"]["w"]["slots"].update(m=d["state"]["tensors"]["w"]["slots"].pop("buf"))
        ),
        "slots ['m'] at 'w', expected ['buf']",
    ),
    "a parameter renamed": (
        forged(lambda d, h: d["params"].update(v=d["params"].pop("w"))),
        "saved parameters ['b', 'v'], here ['w', 'b']",
    ),
    "parameters as a list": (
        forged(lambda d, h: d.update(params=[d["params"]["w"], d["params"]["b"]])),
        "is made by another program",
    ),
}


@pytest.mark.parametrize(("make_file", "words"), TAMPERED.values(), ids=TAMPERED)
def test_a_file_that_was_tampered_with_is_refused(make_file, words, tmp_path):
    small(2.0).save(tmp_path / "x")
    opt = small()
    opt.load(tmp_path / "x")
    opt.step({"w": np.ones((2, 3)), "b": np.ones(3)})
    (tmp_path / "x").write_bytes(make_file((tmp_path / "x").read_bytes()))
    refused(opt, tmp_path / "x", f"Optimizer.load: {tmp_path / 'x'}: ", words)


def pickled(path):
    path.write_bytes(pickle.dumps({"state": 1}))


def another_program(path):
    save_file({"w": np.ones(3)}, path, metadata={"format": "pt"})


def another_state(path):
    ao.Optimizer({"w": np.ones((2, 3), "float32")}, ao.SGD(lr=0.1)).save(path)


FOREIGN = {
    "missing": (lambda path: None, FileNotFoundError, "No such file"),
    "a folder": (Path.mkdir, IsADirectoryError, "Is a directory"),
    "empty": (Path.touch, ValueError, "is damaged, or no checkpoint"),
    "text": (lambda path: path.write_text("hello " * 100), ValueError, "is damaged, or no checkpoint"),
    "a pickle": (pickled, ValueError, "is damaged, or no checkpoint"),
    "PyTorch's": (lambda path: torch.save({"w": torch.ones(3)}, path), ValueError, "is damaged, or no checkpoint"),
    "another program's": (another_program, ValueError, "its metadata has no 'arrayopt'"),
    "another optimizer's": (
        another_state,
        ValueError,
        "saved parameters ['w'], here ['w', 'b']; parameter 'w' is float32 (2, 3), expected float64 (2, 3)",
    ),
}


@pytest.mark.parametrize(("make_file", "error", "words"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_refused(make_file, error, words, tmp_path):
    make_file(tmp_path / "x")
    refused(small(), tmp_path / "x", words, error=error)


def test_without_safetensors_loading_says_what_to_install(tmp_path, monkeypatch):
    small().save(tmp_path / "x")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(small(), tmp_path / "x", "pip install 'arrayopt[checkpoint]'", error=ImportError)
