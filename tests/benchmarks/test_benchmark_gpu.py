"""The benchmark for GPUs runs to its end, over the stand-in for CuPy; its figures mean nothing there."""

import json
import sys

import numpy as np
import pytest

import arrayopt as ao
from benchmarks import apex_form, gpu
from tests.support.slow import marked


def test_it_says_that_there_is_no_device(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert gpu.main([]) == 2
    assert "CuPy is not installed" in capsys.readouterr().err


def test_cases_fit_into_the_memory_of_the_device():
    assert gpu.chosen(140e9) == ["many", "bert-large", "llama"]
    assert gpu.chosen(15e9) == ["many", "bert-base"]
    assert gpu.chosen(1e9) == ["many"]


def test_every_table_is_written_and_who_cannot_run_is_left_out(cupy, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "STEPS", 1)
    assert gpu.main(["--cases", "tiny", "--rules", "LAMB", "--dtypes", "float32", "--output", str(tmp_path)]) == 0
    (made,) = json.loads((tmp_path / "gpu.json").read_text("utf-8"))["results"]
    assert set(made["times"]) >= {gpu.COPY, gpu.EAGER, gpu.CAPTURED}
    assert all(x["ms"] >= 0 and x["host_ms"] > 0 for x in made["times"].values())
    assert made["left_out"].keys() >= {"apex FusedLAMB"}
    assert "apex's form in CuPy" in made["times"]
    text = (tmp_path / "gpu.md").read_text("utf-8")
    assert "### LAMB, tiny, float32" in text
    assert f"| {gpu.CAPTURED} |" in text


def test_who_fails_is_left_out_and_the_others_go_on(cupy, tmp_path, monkeypatch):
    def fail(rule, *args):
        if rule == "LAMB":
            raise MemoryError("out of memory\nin all")
        return list

    monkeypatch.setattr(gpu, "eager", fail)
    monkeypatch.setattr(gpu, "captured", lambda *args, **how: list)
    monkeypatch.setattr(gpu, "peers", lambda *args: {"torch": lambda: 1 / 0})
    monkeypatch.setattr(gpu, "bytes_per_parameter", lambda rule, *args: 1.0 if rule != "SGD" else 1 / 0)
    there = ["--cases", "tiny", "--dtypes", "float32", "--output", str(tmp_path)]
    assert gpu.main([*there, "--rules", "LAMB,SGD,AdamW"]) == 0
    made = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert [(x["rule"], [*x["left_out"]]) for x in made["results"]] == [
        ("LAMB", [gpu.EAGER, "torch"]),
        ("AdamW", ["torch"]),
    ]
    assert made["left_out"] == ["SGD, tiny, float32: division by zero"]
    text = (tmp_path / "gpu.md").read_text("utf-8")
    assert f"Left out: {gpu.EAGER} (out of memory)." in text


def test_what_there_is_is_written_as_it_comes(tmp_path, monkeypatch, cupy):
    def race(rule, *args):
        if rule == "AdamW":
            raise KeyboardInterrupt
        return {"rule": rule}

    monkeypatch.setattr(gpu, "race", race)
    monkeypatch.setattr(gpu, "table", lambda result: [result["rule"]])
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--cases", "tiny", "--rules", "LAMB,AdamW", "--dtypes", "float32", "--output", str(tmp_path)])
    assert json.loads((tmp_path / "gpu.json").read_text("utf-8"))["results"] == [{"rule": "LAMB"}]
    assert (tmp_path / "gpu.md").read_text("utf-8").endswith("LAMB\n")


@pytest.mark.parametrize("name", marked([("AdamW",), ("LAMB",)], lambda name: name == "LAMB"))
def test_apexs_form_computes_what_the_rule_does(cupy, name):
    shapes, r = [(5,), (70, 30), (1024,), (3,)], np.random.default_rng(0)
    params, grads = ([r.standard_normal(s).astype("f4") * x for s in shapes] for x in (0.3, 1.0))
    known = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "decay": 0.1}
    rule = {"AdamW": ao.AdamW(lr=0.01, weight_decay=0.1), "LAMB": ao.LAMB(lr=0.01, weight_decay=0.1)}[name]
    known |= {"eps": 1e-8} if name == "AdamW" else {"eps": 1e-6, "most": 1.0}
    there = [[cupy.asarray(x) for x in values] for values in (params, grads)]
    step = (apex_form.adamw if name == "AdamW" else apex_form.lamb)(*there, chunk=1024, **known)
    opt = ao.Optimizer(params, rule, engine="numpy", clip_norm=None if name == "AdamW" else 1.0)
    for _ in range(3):
        opt.step(grads)
        step()
    for x, y in zip(params, there[0], strict=True):
        np.testing.assert_allclose(y.get(), x, rtol=1e-4, atol=1e-5)
