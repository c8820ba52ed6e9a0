"""The examples of `minimize`, in a small form."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tests.support.slow import marked

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


backends = pytest.mark.parametrize(
    "backend", marked([("numpy",), ("torch",), ("cupy",)], lambda backend: backend != "cupy")
)


@pytest.fixture(autouse=True)
def standin(request, backend):
    """The stand-in for CuPy, in its place."""
    if backend == "cupy":
        request.getfixturevalue("cupy")


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@backends
def test_peaks_are_fitted_in_three_ways(backend, tmp_path):
    peaks = example("peaks")
    counts, found = peaks.run(backend, 12)
    above = peaks.excess(found)
    assert above["ao.minimize"].max() < 1e-6
    np.testing.assert_allclose(found["ao.Adam"].params, found["Adam by hand"].params, rtol=1e-6)
    assert np.median(above["ao.Adam"]) < 1e-3
    if backend == "numpy":
        pytest.importorskip("matplotlib", reason="matplotlib draws")
        peaks.draw(counts, found, tmp_path / "peaks.png")
        assert (tmp_path / "peaks.png").stat().st_size > 1000


@backends
def test_phases_are_found_in_three_ways(backend, tmp_path):
    phase = example("phase")
    truth, found = phase.run(backend, 16, 3)
    np.testing.assert_allclose(found["ao.Adam"].misfit, found["Adam by hand"].misfit, rtol=1e-4)
    assert found["ao.minimize"].misfit.min() < 1.01 * found["ao.Adam"].misfit.min()
    for x in found.values():
        assert not x.field[truth == 0].any()
    if backend == "numpy":
        pytest.importorskip("matplotlib", reason="matplotlib draws")
        phase.draw(truth, found, tmp_path / "phase.png")
        assert (tmp_path / "phase.png").stat().st_size > 1000


@backends
def test_brightness_is_found_in_four_ways(backend, tmp_path):
    filaments = example("filaments")
    truth, recorded, found = filaments.run(backend, 40)
    np.testing.assert_allclose(found["ao.Adam"].picture, found["Adam by hand"].picture, rtol=1e-5, atol=1e-5)
    for x in found.values():
        assert x.picture.min() >= 0
        assert x.deviance[-1] < 0
        assert filaments.error(x.picture, truth) < filaments.error(recorded, truth)
    if backend == "numpy":
        pytest.importorskip("matplotlib", reason="matplotlib draws")
        filaments.draw(truth, recorded, found, tmp_path / "filaments.png")
        assert (tmp_path / "filaments.png").stat().st_size > 1000
