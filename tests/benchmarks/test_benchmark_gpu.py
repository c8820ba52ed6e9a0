"""The benchmark for GPUs runs to its end, over the stand-in for CuPy; its figures mean nothing there."""

import sys

import pytest

from benchmarks import gpu


def test_it_says_that_there_is_no_device(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert gpu.main([]) == 2
    assert "CuPy is not installed" in capsys.readouterr().err


def test_every_table_is_written_and_who_cannot_run_is_left_out(cupy, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(gpu, "COPIED", 1 << 12)
    monkeypatch.setattr(gpu, "STEPS", 1)
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda i: {"name": b"none"}, raising=False)
    assert gpu.main(["--cases", "tiny", "--rules", "LAMB,AdamW", "--seconds", "0", "--output", str(tmp_path)]) == 0
    text = (tmp_path / "gpu.md").read_text("utf-8")
    assert "### LAMB, tiny" in text
    assert "### AdamW, tiny" in text
    assert text.count("| arrayopt cupy |") == 2
    assert "Left out: torch fused AdamW" in text
    assert (tmp_path / "gpu.png").stat().st_size > 1000
