"""The examples of `minimize`, in a small form."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", ["numpy", "torch"])
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
