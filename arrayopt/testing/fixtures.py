"""Fixtures for pytest: ``from arrayopt.testing.fixtures import backend`` in a ``conftest.py`` or a test module.

They are not a pytest plugin: only test suites that import them have them.
"""

import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from arrayopt.libraries import UnavailableError
from arrayopt.testing.backends import Backend, backend_names, choose
from arrayopt.testing.diagnosis import Trajectory, check, record
from arrayopt.testing.diagnosis.trajectory import STEPS


@pytest.fixture(params=backend_names())
def backend(request: Any) -> Backend:
    """Run a test on each backend in turn. Backends that are not available are skipped, with the reason."""
    try:
        (chosen,) = choose([request.param])
    except UnavailableError as error:
        pytest.skip(str(error))
    return chosen


@pytest.fixture
def recorded(request: Any) -> Callable[..., Trajectory]:
    """Check an optimizer against a file beside the test: ``recorded(step, params)``.

    The file is ``recorded/MODULE-TEST.json``, or ``recorded/NAME.json`` with ``name=``. If ``ARRAYOPT_RECORD=1`` is in
    the environment, `arrayopt.testing.record` writes it; otherwise `arrayopt.testing.check` reads it. If the file does
    not exist, the test fails and says how to write it. `grads` and `steps` are those of `record`, `max_ulp` of `check`.
    """

    def run(
        step: Any,
        params: Any = None,
        *,
        name: str | None = None,
        grads: Any = None,
        steps: int = STEPS,
        max_ulp: float | None = None,
    ) -> Trajectory:
        plain = re.sub(r"[^\w.-]+", "-", name or f"{request.path.stem}-{request.node.name}").strip("-")
        path = request.path.parent / "recorded" / f"{plain}.json"
        if os.environ.get("ARRAYOPT_RECORD"):
            path.parent.mkdir(exist_ok=True)
            return record(path, step, params, grads, steps=steps)
        if not path.is_file():
            pytest.fail(f"{path} does not exist; run with ARRAYOPT_RECORD=1 to write it", pytrace=False)
        return check(path, step, params, max_ulp=max_ulp)

    return run
