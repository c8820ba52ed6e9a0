"""The table of times with state in 8 bits, over tiny shapes."""

import numpy as np
import pytest

from arrayopt.exchange.eight_bits import dynamic_map
from benchmarks import memory
from benchmarks.problems import Problem

TINY = Problem("tiny", "Tiny", ((6, 64), (5,)))


def test_the_table_of_times_has_all_storages_and_the_peer(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(memory, "TIMED", ("AdamW",))
    times = memory.raced(TINY, rounds=2)
    assert times.left_out == {}
    sheet = memory.times_table(times, TINY)
    assert [line[0] for line in sheet.lines] == times.names
    assert (times.names[0], sheet.lines[0][2]) == (memory.PEER, "1.00")
    assert len(sheet.lines) == 1 + len(memory.HELD)


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_of_the_map_of_bitsandbytes_stay(signed):
    table = dynamic_map(signed=signed).numpy()
    x = np.concatenate([table * 3.0, table[::-1] * 1e-6])  # two blocks, each of which has its own scale
    np.testing.assert_allclose(memory._dynamic(x, "int8" if signed else "uint8"), x, rtol=1e-6)


def test_the_table_of_accuracy_has_a_line_for_each_storage(monkeypatch, capsys):
    monkeypatch.setattr(memory, "SEEDS", (0,))
    monkeypatch.setattr(memory, "STORAGES", {"int8": memory.STORAGES["int8"]})
    monkeypatch.setattr(memory, "CONTROLS", dict(list(memory.CONTROLS.items())[:1]))
    memory.accuracy_table(2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        [f"| {rule}", state] for rule in ("AdamW", "LAMB") for state in ("int8", next(iter(memory.CONTROLS)))
    ]
