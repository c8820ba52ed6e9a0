"""The kernel `judge`, with more norms than a block has threads, compared with the same in Python."""

import numpy as np
import pytest

from arrayopt.engines.base import Criteria
from arrayopt.engines.cuda.emit_judge import STATE, VERDICT, emit_judge
from tests.cudacpu import Module

COUNT, LAYERS = 700, 300


@pytest.fixture(scope="module")
def judge():
    text = emit_judge(Criteria(None, None, True, True))
    return Module(code=text, names=["judge"]).get_function("judge")


def decided(judge, norms, layer, limit=1e9):
    """Run the kernel with all flags set; return the verdict, and the flags."""
    addresses = np.array([norms.ctypes.data + 8 * i for i in range(len(norms))], np.int64)
    given, state = np.array([1.0, limit]), np.array([1.0, 0.0, 0.0, 1.0])
    verdict, skip = np.zeros(len(VERDICT)), np.full(1 + LAYERS, 7, np.int32)
    assert len(state) == len(STATE)
    judge((1,), (256,), (addresses, np.int32(len(norms)), layer, np.int32(LAYERS), given, state, verdict, skip))
    return dict(zip(VERDICT, verdict.tolist(), strict=True)), skip


def expected(norms, layer):
    """The layers that are skipped, whether the whole step is, and the global norm of the rest."""
    wrong = ~np.isfinite(norms)
    bad = {*layer[wrong & (layer > 0)].tolist()}
    left = np.array([i == 0 or i not in bad for i in layer.tolist()])
    alone = left.any() and not (wrong & (layer == 0)).any()
    return bad, bool(wrong.any() and not alone), np.sqrt((norms[left] ** 2).sum())


CASES = {
    "nothing is wrong": ([], 0),
    "layers": ([3, 290, 299, 560], 0),
    "one that is no layer": ([5, 699], 0),
    "one that is no layer, and another of its thread is right": ([10], 0),
    "all layers, and there is nothing else": (range(COUNT), 1),
    "all layers but one": (range(COUNT), 1),
}
LEFT = 101
"""The layer that is left then: no thread looks at one of its two norms last."""


@pytest.mark.parametrize("what", CASES)
def test_what_is_left_out(judge, what):
    places, begin = CASES[what]
    layer = np.zeros(COUNT, np.int32)
    layer[:600] = np.arange(600) % LAYERS + 1
    if begin:
        layer = np.arange(COUNT, dtype=np.int32) % LAYERS + 1
    if "no layer" in what:
        layer[[10, 699]] = 0
    norms = np.random.default_rng(0).random(COUNT) + 0.5
    norms[list(places)] = np.inf
    if what == "all layers but one":
        norms[layer == LEFT] = 1.0
    bad, skipped, norm = expected(norms, layer)
    verdict, skip = decided(judge, norms, layer)
    assert set((np.flatnonzero(skip[1:]) + 1).tolist()) == bad
    assert bool(skip[0]) == skipped
    if not skipped:
        assert verdict["norm"] == pytest.approx(norm, rel=1e-12)


def test_without_layers_all_is_skipped(judge):
    norms = np.ones(COUNT)
    verdict, _ = decided(judge, norms, None, limit=2.0)
    assert verdict["norm"] == pytest.approx(np.sqrt(COUNT))
    assert verdict["factor"] == pytest.approx(2.0 / np.sqrt(COUNT), rel=1e-5)
    norms[600] = np.nan
    assert decided(judge, norms, None)[1][0] == 1
