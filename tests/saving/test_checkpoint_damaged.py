"""Checkpoints: a bad file is refused, and changes nothing."""

import json
import pickle
import random
import struct
import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import arrayopt as ao
from tests.support.checkpoints import S, contents, small
from tests.support.engines import each_engine


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
            refused(
                opt, tmp_path / "bad", f"Optimizer.load: {tmp_path / 'bad'}: the file is damaged or not a checkpoint: "
            )
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


def in_the_first_format(data):
    """A file as it was written when arrays had BLAKE2b's checksums."""
    header, tensors = parts(data)

    def change(node):
        if isinstance(node, dict) and node.pop("crc32", None):
            start, end = header[node["$array"]]["data_offsets"]
            node["blake2b"] = blake2b(tensors[start:end], digest_size=16).hexdigest()
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            change(child)

    def make(document, header):
        document["checkpoint"] = 1
        change(document)

    return forged(make)(data)


def test_files_of_the_first_format_are_read(tmp_path):
    source, opt = small(2.0), small()
    source.save(tmp_path / "x")
    old = in_the_first_format((tmp_path / "x").read_bytes())
    (tmp_path / "bad").write_bytes(old[:-1] + bytes([old[-1] ^ 1]))
    refused(opt, tmp_path / "bad", "the checksum of tensor")
    (tmp_path / "old").write_bytes(old)
    opt.load(tmp_path / "old")
    assert contents(opt) == contents(source)


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
    "a path as name": (in_header(lambda h: h.update({"../../x": h.pop("params/w")})), "'params/w' is missing"),
    "dtype in the header": (in_header(lambda h: h["params/w"].update(dtype="I64")), "('I64', [2, 3])"),
    "shape in the header": (in_header(lambda h: h["params/w"].update(shape=[3, 2])), "('F64', [3, 2])"),
    "tensors exchanged": (
        in_header(lambda h: h.update({"params/w": h[M_KEY], M_KEY: h["params/w"]})),
        "the checksum of tensor",
    ),
    "description": (
        in_header(lambda h: h["__metadata__"].update(arrayopt=h["__metadata__"]["arrayopt"].replace("0.1", "0.2"))),
        "the checksum of its description does not match",
    ),
    "no metadata": (in_header(lambda h: h.pop("__metadata__") and None), "has no 'arrayopt'"),
    "no checksum": (in_header(lambda h: h["__metadata__"].pop("blake2b") and None), "checksum"),
    "no JSON": (forged(lambda d, h: "{"), "is damaged"),
    "deep": (forged(lambda d, h: "[" * 10**5), "was written by another program"),
    "digits": (forged(lambda d, h: f'{{"checkpoint": {"9" * 10**5}}}'), "is damaged"),
    "a list": (forged(lambda d, h: "[]"), "was written by another program"),
    "a number": (forged(lambda d, h: "1"), "was written by another program"),
    "a later format": (state(["checkpoint"], 3), "format must be 1 or 2; got 3"),
    "another state format": (state(["state", "format"], 7), "format must be 1; got 7"),
    "no state": (state(["state"], DELETED), "KeyError('state')"),
    "state is a list": (state(["state"], []), "does not name its tensors"),
    "state without tensors": (state(["state", "tensors"], DELETED), "does not name"),
    "a tensor described twice": (forged(lambda d, h: d["params"].update(b=d["params"]["w"])), "named twice"),
    "a tensor that nobody describes": (state([*M], 1.0), "does not name its tensors 'state/tensors/w/slots/buf'"),
    "a shape": (state([*M, "shape"], [3, 2]), "must be ('F64', [3, 2])"),
    "a dtype": (state([*M, "dtype"], "int64"), "must be ('I64', [2, 3])"),
    "a dtype that there is not": (state([*M, "dtype"], "float128"), "KeyError('float128')"),
    "a checksum": (state([*M, "crc32"], None), "the checksum of tensor"),
    "a key": (state([*M, "$array"], ["x"]), "TypeError"),
    "shape of the parameter": (state([*T, "shape"], [3, 2]), "shape (3, 2) at 'w', expected (2, 3)"),
    "t negative": (state([*T, "t"], -1), "t of 'w' must be an integer of at least 0, below 2**53; got -1"),
    "t NaN": (state([*T, "t"], float("nan")), "got nan"),
    "t fraction": (state([*T, "t"], 1.5), "got 1.5"),
    "t true": (state([*T, "t"], True), "got True"),
    "t huge": (state([*T, "t"], 2**63), "must be an integer"),
    "t that cannot count on": (state([*T, "t"], 2**63 - 1), "t of 'w' must be an integer of at least 0, below 2**53"),
    "t beyond floats": (state([*T, "t"], 2**53), "t of 'w' must be an integer of at least 0, below 2**53"),
    "step beyond floats": (state(["state", "step"], 2**53), "step must be an integer of at least 0, below 2**53"),
    "step negative": (state(["state", "step"], -1), "step must be an integer of at least 0, below 2**53; got -1"),
    "step text": (state(["state", "step"], "3"), "step must be an integer of at least 0, below 2**53; got '3'"),
    "lr negative": (state([*HYPERS, "lr"], -1.0), "`lr` must be in [0, inf)"),
    "lr NaN": (state([*HYPERS, "lr"], float("nan")), "`lr` must be in [0, inf)"),
    "lr text": (state([*HYPERS, "lr"], "x"), "`lr` must be a number"),
    "lr a sequence with NaN": (state([*HYPERS, "lr"], {"$values": [0.1, float("nan")]}), "`lr`[1] must be in"),
    "lr an unknown schedule": (state([*HYPERS, "lr"], {"$schedule": "os.system"}), "no schedule 'os.system'"),
    "lr what is no schedule": (state([*HYPERS, "lr"], {"$schedule": "plot"}), "there is no schedule 'plot'"),
    "lr the base class": (state([*HYPERS, "lr"], {"$schedule": "Schedule"}), "TypeError"),
    "lr a bad schedule": (state([*HYPERS, "lr"], {"$schedule": "Constant", "value": float("inf")}), "must be finite"),
    "lr a function": (state([*HYPERS, "lr"], {"$function": "eval"}), "was the function eval, here 0.1"),
    "momentum off": (state([*HYPERS, "momentum"], 0.0), "must have the same switches"),
    "an unknown hyper-parameter": (state([*HYPERS, "nu"], 0.0), "SGD has no `nu`; "),
    "no hyper-parameters": (state([*HYPERS], {}), "does not fit"),
    "hyper-parameters as a list": (state([*HYPERS], []), "`state` must be the result of state_dict()"),
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
        "was written by another program",
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


EXTRA = ("state", "extra")
NUMBERS = {
    "scale infinite": (("loss_scale", "scale"), float("inf"), "the loss scale must be in [2**-126, 2**127]; got inf"),
    "scale NaN": (("loss_scale", "scale"), float("nan"), "the loss scale must be in [2**-126, 2**127]; got nan"),
    "scale zero": (("loss_scale", "scale"), 0.0, "the loss scale must be in [2**-126, 2**127]; got 0.0"),
    "scale huge": (("loss_scale", "scale"), 1e39, "the loss scale must be in [2**-126, 2**127]; got 1e+39"),
    "scale a huge integer": (("loss_scale", "scale"), 10**400, "the loss scale must be in [2**-126, 2**127]"),
    "scale text": (("loss_scale", "scale"), "1", "the loss scale must be in [2**-126, 2**127]; got '1'"),
    "good huge": (("loss_scale", "good"), 2**63 - 1, "good steps of the loss scale must be an integer of at least 0"),
    "good negative": (("loss_scale", "good"), -1, "good steps of the loss scale must be an integer of at least 0"),
    "skipped huge": (("skipped",), 2**53, "skipped steps must be an integer of at least 0, below 2**53"),
    "skipped a fraction": (("skipped",), 0.5, "skipped steps must be an integer of at least 0, below 2**53"),
    "micro-steps huge": (("micro_steps",), 2**53, "micro-steps must be an integer of at least 0, below 2**53"),
    "accumulate huge": (("accumulate",), 2**53, "`accumulate` must be an integer of at least 0, below 2**53"),
}


@pytest.mark.parametrize(("path", "value", "words"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_with_which_no_step_could_be_made_are_refused(path, value, words, tmp_path):
    opt = small(loss_scale=ao.LossScale())
    opt.save(tmp_path / "x")
    opt.load(tmp_path / "x")
    (tmp_path / "x").write_bytes(state([*EXTRA, *path], value)((tmp_path / "x").read_bytes()))
    refused(opt, tmp_path / "x", words)
    saved = opt.state_dict()
    *way, last = path
    node = saved["extra"]
    for key in way:
        node = node[key]
    node[last] = value
    with pytest.raises(ValueError, match="the state does not fit") as caught:
        opt.load_state_dict(saved)
    assert words in str(caught.value)


COUNTS = {
    "step": ["step"],
    "t": ["tensors", "w", "t"],
    "skipped": ["extra", "skipped"],
}


@each_engine
@pytest.mark.parametrize("which", COUNTS)
def test_every_number_that_a_step_reaches_can_be_loaded(which, engine, tmp_path):
    """And a step beyond the largest raises, and changes nothing."""
    made = [small(loss_scale=ao.LossScale(), engine=engine) for _ in "ab"]
    opt, most, grads = made[0], 2**53 - 1, {"w": np.ones((2, 3)), "b": np.ones(3)}
    if which == "skipped":
        grads = {name: g * np.nan for name, g in grads.items()}
    saved = opt.state_dict()
    node = saved
    for key in COUNTS[which][:-1]:
        node = node[key]
    node[COUNTS[which][-1]] = most - 2
    saved["extra"]["loss_scale"]["scale"] = 2.0**127
    opt.load_state_dict(saved)
    for _ in range(2):
        opt.step(grads)
    made[1].load_state_dict(opt.state_dict())
    opt.save(tmp_path / "x")
    made[1].load(tmp_path / "x")
    for one in made:
        before = [np.array(x) for x in (one.params["w"], one.state["w"]["buf"])]
        counts = (one.step_count, one.state["w"]["t"], one.loss_scale)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"Optimizer.step: numbers of steps and updates must stay below 2"):
                one.step(grads)
        after = one.params["w"], one.state["w"]["buf"]
        assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
        assert (one.step_count, one.state["w"]["t"], one.loss_scale) == counts
    if which == "step":
        opt.step_count = 7
        opt.step(grads)
        assert opt.step_count == 8


@pytest.mark.parametrize("which", ["step", "t"])
def test_the_functional_form_ends_where_the_optimizer_does(which):
    rule, params, grads = ao.LAMB(), {"w": np.ones(3)}, {"w": np.ones(3)}
    state = rule.init(params)
    (state if which == "step" else state["tensors"]["w"])[which] = 2**53 - 2
    params, state = ao.update(rule, params, grads, state)
    with pytest.raises(ValueError, match="update: numbers of steps and updates must stay below 2"):
        ao.update(rule, params, grads, state)


FOREIGN = {
    "missing": (lambda path: None, FileNotFoundError, "No such file"),
    "a folder": (Path.mkdir, IsADirectoryError, "Is a directory"),
    "empty": (Path.touch, ValueError, "is damaged or not a checkpoint"),
    "text": (lambda path: path.write_text("hello " * 100), ValueError, "is damaged or not a checkpoint"),
    "a pickle": (pickled, ValueError, "is damaged or not a checkpoint"),
    "PyTorch's": (lambda path: torch.save({"w": torch.ones(3)}, path), ValueError, "is damaged or not a checkpoint"),
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


def test_without_safetensors_saving_and_loading_say_what_to_install(tmp_path, monkeypatch):
    small().save(tmp_path / "x")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(small(), tmp_path / "x", "pip install 'arrayopt[checkpoint]'", error=ImportError)
    with pytest.raises(ImportError, match=r"Optimizer.save: needs safetensors; pip install 'arrayopt\[checkpoint\]'"):
        small().save(tmp_path / "y")
    assert not (tmp_path / "y").exists()
