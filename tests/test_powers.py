"""Powers cross: whatever is switched on together, engines agree, and what must change no bit changes none."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from arrayopt import randomness
from tests.support.engines import each_engine, each_fused
from tests.support.entered import bits
from tests.support.modes import MODES
from tests.support.powers import CALLS, CHANGES, DTYPES, MAKING, RULES, RUNS, STORAGES, Case
from tests.support.slow import settled

# a fault in a generator that is being closed reaches nobody
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SOME_CHANGES = st.lists(st.sampled_from(sorted(CHANGES)), unique=True, max_size=4)
SOME_MODES = st.lists(st.sampled_from(sorted(MODES)), unique=True, max_size=3)
SOME_CALLS = st.lists(st.sampled_from(sorted(CALLS)), unique=True, min_size=1, max_size=3)


def case_of(name, changes):
    """A case with these powers; some cannot be had together."""
    assume(all(sum(change in some for change in changes) <= 1 for some in (DTYPES, STORAGES)))
    assume(name != "Prodigy" or "centralized" not in changes)  # which engines that fuse refuse, in words
    assume(name != "LBFGS" or "project" not in changes)  # which it refuses
    assume("value" not in changes or (name == "LBFGS" and "schedule" not in changes))  # of which all groups have one
    assume("float64" not in changes or not {"state_dtype", "storage by slot"} & set(changes))
    case = Case(name)
    for change in changes:
        CHANGES[change](case)
    return case


def run(case, engine, where="alone", how=("straight",), seed=0):
    with tempfile.TemporaryDirectory() as folder:
        return RUNS[where](case, engine, list(how), Path(folder), seed)


@each_engine
@settled(24)
@given(
    name=st.sampled_from(sorted(RULES)),
    changes=SOME_CHANGES,
    where=st.sampled_from(sorted(RUNS)),
    how=SOME_CALLS,
    modes=SOME_MODES,
    seed=st.integers(0, 99),
)
def test_what_must_change_no_bit_changes_none(engine, name, changes, where, how, modes, seed):
    assume("inference_mode" not in modes or not set(MAKING) & set(how))
    if "turned" in changes and where == "own gradients":  # sums of ranks have another order in memory
        assume(name != "SOAP" and engine != "array_api")  # libraries add up in the order in memory
    case = case_of(name, changes)
    if where == "own gradients":
        case.calls = 6  # whole steps with `accumulate`, for sums of ranks are not to be seen
    (straight,) = map(bits, run(case, engine))
    case.modes = [MODES[mode] for mode in modes]
    for found in map(bits, run(case, engine, where, how, seed)):
        assert {key for key in straight if found.get(key) != straight[key]} == set()


@each_fused
@settled(24)
@given(name=st.sampled_from(sorted(RULES)), changes=SOME_CHANGES, modes=SOME_MODES)
def test_engines_agree(engine, name, changes, modes):
    assume(name != "SOAP" or "centralized" not in changes)  # what rounding leaves of zero, it divides by its own size
    case = case_of(name, changes)
    (found,) = run(case, engine)
    case.modes = [MODES[mode] for mode in modes]
    (expected,) = run(case, "array_api")
    assert list(found) == list(expected)
    coarse = case.dtype == "bfloat16" or set(STORAGES) & set(changes)
    for key, x in expected.items():
        if not isinstance(x, np.ndarray):
            assert found[key] == x, key
            continue
        assert (found[key].dtype, found[key].shape) == (x.dtype, x.shape), key
        x, y = (np.asarray(a, np.float64) for a in (x, found[key]))
        if key[1:] == ("master",) and "split" in changes:  # bits below the parameter's
            if set(STORAGES) & set(changes):
                continue  # they differ where narrow state is rounded the other way
            p = expected[key[0]]
            same = np.equal(p, found[key[0]])  # of other parameters they say nothing
            joined = getattr(randomness, f"joined_{case.dtype}")
            x, y = (joined(np, low, np.asarray(p, np.float32))[same] for low in (x, y))
            np.testing.assert_allclose(y, x, rtol=1e-3, err_msg=str(key))
            continue
        near = {"float64": 1e-9}.get(case.dtype, 0.1 if coarse else 1e-3) * max(1e-3, np.abs(x).max(initial=0))
        np.testing.assert_allclose(y, x, rtol=0, atol=near, err_msg=str(key))
