"""What `make test` leaves out is a part of what it runs: of each test at least one case is quick."""


def test_each_slow_test_has_a_quick_sibling(cases):
    without = [test for test, slow in cases.items() if all(slow)]
    assert not without, f"only `make test-all` runs {', '.join(without)}"
