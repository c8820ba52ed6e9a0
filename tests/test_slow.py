"""What `make test` leaves out is a part of what it runs."""

from tests.support.costly import COSTLY


def test_each_slow_test_has_a_quick_sibling(cases):
    """Of each test at least one case is quick; of those that cost too much, one of another test of its folder."""
    quick = {_group(test) for test, slow in cases.items() if not all(slow)}
    without = [test for test, slow in cases.items() if all(slow) and not (_costs(test) and _group(test) in quick)]
    assert not without, f"only `make test-all` runs {', '.join(without)}"


def test_what_costs_is_there(cases):
    """A test that has another name by now would be one of each run again."""
    files = {_file(test) for test in cases}
    named = {f"{file}::{test}" for file, tests in COSTLY.items() if file in files for test in tests}
    found = {f"{_file(test)}::{test.rpartition('::')[2]}" for test in cases}
    assert named <= found, f"no longer there: {', '.join(named - found)}"


def _group(test):
    """Its folder."""
    return _file(test).rpartition("/")[0]


def _file(test):
    return test.partition("::")[0]


def _costs(test):
    """Whether a test stands in the table as a whole."""
    return COSTLY.get(_file(test), {}).get(test.rpartition("::")[2]) == ""
