"""A fixture for pytest: ``from arrayopt.testing.fixtures import backend`` in a ``conftest.py`` or a test module.

It is imported by those who want it and is no plugin, so that nothing is added to the test runs of those who do not.
"""

from typing import Any

import pytest

from arrayopt.libraries import UnavailableError
from arrayopt.testing.backends import Backend, backend_names, choose

__all__ = ["backend"]


@pytest.fixture(params=backend_names())
def backend(request: Any) -> Backend:
    """Run a test on each backend in turn; those that cannot be used here are skipped, with the reason."""
    try:
        (chosen,) = choose([request.param])
    except UnavailableError as error:
        pytest.skip(str(error))
    return chosen
