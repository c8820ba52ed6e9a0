"""The stand-in for CuPy, whose kernels run in the simulator."""

import gc

import pytest


@pytest.fixture(scope="session")
def simulator():
    """The simulator of this process, of a quarter of a QV100."""
    from tests.ptx.simulator import Machine, loaded

    return loaded(Machine())


@pytest.fixture
def cupy(simulator):
    """The stand-in for CuPy, with the simulator's memory and kernels."""
    from tests.cudacpu import standin
    from tests.ptx.through import through

    gc.collect()  # arrays of tests before are there no more
    with standin.installed() as found, standin.checking(check=False), through(simulator):
        yield found
