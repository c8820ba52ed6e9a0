"""A step on a device has one commit point, as on the host."""

import numpy as np
import pytest

import arrayopt as ao
from tests.cudacpu import standin
from tests.step.test_commit import OPTIONS, made, rules
from tests.support.entered import check
from tests.support.slow import PROFILE, marked

# a fault in a generator that is being closed reaches nobody
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


EACH = [(rule, options, every) for rule in rules() for options in OPTIONS for every in (1, 3)]


@pytest.mark.parametrize(
    ("rule", "options", "every"),
    marked(EACH, lambda rule, options, every: rule == "LAMB" and options == "all" and every == 3),
)
def test_a_fault_at_any_call(cupy, rule, options, every):
    with standin.checking(check=False):
        found = check(
            lambda: made("auto", rules()[rule], OPTIONS[options], every, cupy), 12 if PROFILE == "quick" else 25
        )
    assert found == {False, True}


def test_what_a_failed_step_has_measured_is_not_taken_for_the_last_ones(cupy, monkeypatch):
    """The global norm stays what it was; the norms of single tensors are gone, and that is said."""
    opt = ao.Optimizer({"w": cupy.ones(4, np.float32)}, ao.SGD(lr=0.1), clip_norm=1.0)
    opt.step({"w": cupy.full(4, 2.0, np.float32)})
    assert float(opt.stats.global_norm) == 4.0
    assert opt.nonfinite() == []

    def fail(*_, **__):
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(type(opt._step), "_prepare", fail)
        with pytest.raises(MemoryError, match="no room"):
            opt.step({"w": cupy.full(4, np.nan, np.float32)})
    assert float(opt.stats.global_norm) == 4.0
    with pytest.raises(RuntimeError, match="because a later step failed after measuring"):
        opt.nonfinite()
    opt.step({"w": cupy.full(4, 3.0, np.float32)})
    assert float(opt.stats.global_norm) == 6.0
    assert opt.nonfinite() == []
