"""What `make test` leaves out is a part of what it runs; and `make test-all` in parts runs all."""

import pytest

from tests.engines.cuda.planted import PLANTED
from tests.support.costly import COSTLY
from tests.support.drawn import DRAWN, LIKE, MANY, left_out, shard


def test_each_slow_test_has_a_quick_sibling(cases):
    """Of each test at least one case is quick; of those that cost too much, one of another test of its folder."""
    quick = {_group(test) for test, slow in cases.items() if not all(slow.values())}
    without = [
        test for test, slow in cases.items() if all(slow.values()) and not (_costs(test) and _group(test) in quick)
    ]
    assert not without, f"only `make test-all` runs {', '.join(without)}"


def test_what_costs_is_there(cases):
    """A test that has another name by now would be one of each run again."""
    files = {_file(test) for test in cases}
    named = {f"{file}::{test}" for file, tests in COSTLY.items() if file in files for test in tests}
    found = {f"{_file(test)}::{test.rpartition('::')[2]}" for test in cases}
    assert named <= found, f"no longer there: {', '.join(named - found)}"


def test_what_finds_a_planted_fault_is_quick(cases):
    quick = {f"{test}[{case}" if case else test for test, which in cases.items() for case in which if not which[case]}
    files = {_file(test) for test in cases}
    wanted = {test for *_, test in PLANTED if _file(test) in files}
    assert not [test for test in wanted if not any(name.startswith(test) for name in quick)]


def test_what_is_drawn_is_there(cases):
    files = {_file(test) for test in cases}
    assert {test for test in DRAWN if _file(test) in files} <= set(cases)


def test_cases_of_numba_that_run_in_cpp_are_drawn():
    names = {f"x.py::test_y[{engine}-{i}]": engine == "numba" for engine in ("numba", "cpp") for i in range(50)}
    names |= {f"x.py::test_z[{i}-numba]": True for i in range(10)} | {"y.py::test_few[numba]": True}
    names |= {"y.py::test_few[cpp]": False, "x.py::test_quick[numba]": False, "x.py::test_quick[cpp]": False}
    first, again, other = (left_out(names, seed) for seed in ("1", "1", "2"))
    assert first == again != other
    assert all(name.startswith("x.py::test_y[numba-") for name in first | other)
    assert len(first) == len(other) == 50 - 50 // LIKE["numba", "cpp"]
    assert not left_out(names, "all")
    assert not left_out(names, "")


def test_of_many_cases_of_a_test_some_are_drawn():
    names = {f"x.py::test_many[{i}]": True for i in range(100)} | {f"x.py::test_few[{i}]": True for i in range(12)}
    names |= {f"x.py::test_quick[{i}]": False for i in range(100)}
    first, other = left_out(names, "1"), left_out(names, "2")
    assert first != other
    assert all(name.startswith("x.py::test_many[") for name in first | other)
    assert len(first) == len(other) == 100 - MANY - 15
    assert not left_out(names, "all")


def test_each_case_is_in_one_part():
    parts = [shard(f"{k}/3") for k in (1, 2, 3)]
    counts = [0, 0, 0]
    for i in range(300):
        of = [part(f"tests/test_x.py::test_y[{i}]") for part in parts]
        assert sum(of) == 1
        counts[of.index(True)] += 1
    assert min(counts) > 60
    assert shard("")("anything")


@pytest.mark.parametrize("text", ["0/4", "5/4", "4", "a/b", "1/", "-1/2", "1/2/3"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(pytest.UsageError, match="SHARD must be a part of a number of parts, such as 2/4; got"):
        shard(text)


def _group(test):
    """Its folder."""
    return _file(test).rpartition("/")[0]


def _file(test):
    return test.partition("::")[0]


def _costs(test):
    """Whether a test stands in the table as a whole."""
    return COSTLY.get(_file(test), {}).get(test.rpartition("::")[2]) == ""
