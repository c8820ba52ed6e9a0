"""Watching changes nothing in the CuPy engine: the update's kernels are the same, and run on what they would find."""

import itertools

import numpy as np
import pytest

import arrayopt as ao
from tests.engines.cuda.test_cupy import bits, compare, pair, trees, unchecked  # noqa: F401 - a fixture
from tests.engines.test_watching import LITTLE_TO_DO
from tests.support.engine_runs import same_reports
from tests.support.slow import marked

SHAPES = {"scalar": (), "more": (4097,), "empty": (0,), "matrix": (10, 40), "kernels": (6, 2, 3, 3)}
STEPS = 3


def run(cupy, rule, dtype="float32", *, monitor=False, shapes=SHAPES, **options):
    """Both optimizers after some steps, whose reports agree where there are any."""
    opts = pair(cupy, rule, shapes, dtype, **options)
    watching = ao.Monitor(opts[1], every=2) if monitor else None
    for k in range(STEPS):
        grads = trees(shapes, dtype, 10 * k)
        opts[0].step(grads)
        opts[1].step({name: cupy.asarray(g) for name, g in grads.items()})
        if options.get("stats") and dtype == "float32":
            same_reports(*(opt.stats.read() for opt in opts[::-1]))
    assert watching is None or len(watching.read()) > 0
    return opts


RULES = {"LAMB": ao.LAMB(lr=0.05), "CAME": ao.CAME(lr=0.01)}
EACH_RUN = (("LAMB", "bfloat16", "plain"), ("LAMB", "float32", "judged"))
OPTIONS = {"plain": {}, "judged": {"clip_norm": 0.5, "skip_nonfinite": True}}


@pytest.mark.parametrize(
    ("name", "dtype", "how"),
    marked(itertools.product(RULES, ("float32", "bfloat16"), OPTIONS), lambda *case: case in EACH_RUN),
)
def test_watching_changes_no_bit(cupy, name, dtype, how, unchecked):  # noqa: F811
    rule, options = RULES[name], OPTIONS[how]
    plain = bits(run(cupy, rule, dtype, **options)[1])
    assert bits(run(cupy, rule, dtype, stats=True, **options)[1]) == plain
    assert bits(run(cupy, rule, dtype, monitor=True, **options)[1]) == plain


@pytest.mark.parametrize("what", LITTLE_TO_DO)
@pytest.mark.parametrize("stats", [False, True])
def test_rules_with_little_to_do(cupy, what, stats):
    opts = run(cupy, LITTLE_TO_DO[what](), shapes={"w": (70, 3, 2)}, stats=stats)
    compare(opts)
    assert opts[1].state["w"]["t"] == STEPS


def test_reports_where_counts_differ(cupy):
    """A report follows the number of updates of its own tensor, which the device alone knows."""
    opts = pair(cupy, LITTLE_TO_DO["scalars of the step"](), {"a": (3,), "b": (2, 2)}, stats=True)
    for k in range(3):
        grads = {
            name: None if name == "a" and k == 1 else g
            for name, g in trees({"a": (3,), "b": (2, 2)}, "float32", k).items()
        }
        opts[0].step(grads)
        opts[1].step({name: g if g is None else cupy.asarray(g) for name, g in grads.items()})
    found, expected = (opt.stats.read() for opt in opts)
    same_reports(found, expected)
    assert np.isclose(found["a"]["step"] * 3, found["b"]["step"] * 2)
