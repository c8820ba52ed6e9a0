"""The table of times of docs/memory.md, over tiny shapes."""

import pytest

from benchmarks import memory
from benchmarks.machine import look
from benchmarks.problems import Problem

TINY = Problem("tiny", "Tiny", ((6, 64), (5,)))


def test_times_of_all_are_between_the_marks_of_the_page():
    pytest.importorskip("torch")
    times = memory.raced(TINY, rounds=2)
    assert times.left_out == {}
    sheet = memory.times_table(times, TINY)
    assert [line[0] for line in sheet.lines] == times.names
    assert (times.names[0], sheet.lines[0][2]) == (memory.PEER, "1.00")
    assert len(sheet.lines) == 1 + 2 * len(memory.TIMED)
    before = memory.PAGE.read_text("utf-8")
    page = memory.written(before, sheet, look("a test"))
    assert page.count("| LAMB, state in int8 | ") == 1
    assert "Tiny, 0 million float32 parameters; " in page
    assert memory.written(page, sheet, look("a test")).split(memory.END)[1] == before.split(memory.END)[1]
    with pytest.raises(ValueError, match="once each"):
        memory.written(page + memory.END, sheet, look("a test"))
