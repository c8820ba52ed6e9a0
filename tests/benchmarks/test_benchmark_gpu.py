"""The benchmark for GPUs runs to its end, over the stand-in for CuPy; its figures mean nothing there."""

import json
import sys

from benchmarks import gpu


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
    text = (tmp_path / "gpu.md").read_text("utf-8")
    assert "### LAMB, tiny, float32" in text
    assert f"| {gpu.CAPTURED} |" in text
