"""A step on a device has one commit point, as on the host."""

import pytest

from tests.cudacpu import standin
from tests.step.test_commit import OPTIONS, made, rules
from tests.support.entered import check, contents
from tests.support.slow import marked

# a fault in a generator that is being closed reaches nobody
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def stored(opt):
    """All that a step changes, but for the joint norm: that is what the device measured last."""
    return {key: x for key, x in contents(opt).items() if key != "norm"}


EACH = [(rule, options, every) for rule in rules() for options in OPTIONS for every in (1, 3)]


@pytest.mark.parametrize(
    ("rule", "options", "every"),
    marked(EACH, lambda rule, options, every: rule == "LAMB" and options == "all" and every == 3),
)
def test_a_fault_at_any_call(cupy, rule, options, every):
    with standin.checking(check=False):
        found = check(lambda: made("auto", rules()[rule], OPTIONS[options], every, cupy), 25, contents=stored)
    assert found == {False, True}
