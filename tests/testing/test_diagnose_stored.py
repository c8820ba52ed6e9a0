"""`diagnose` on optimizers whose state is stored in 8 or 16 bits: the rule, its numbers and the storage are found."""

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.testing import diagnose
from arrayopt.testing.diagnosis.entry import run
from arrayopt.testing.diagnosis.hypothesis import Hypothesis
from arrayopt.testing.diagnosis.model import Model
from arrayopt.testing.diagnosis.search import attempt
from arrayopt.testing.diagnosis.subjects import as_subject
from arrayopt.testing.diagnosis.trajectory import Observed, parameters
from tests.support.slow import marked


def start(dtype="float32"):
    return {name: x.astype(dtype) for name, x in parameters().items()}


def unknown(rule):
    """A function that does what an optimizer does, and tells nothing of it."""
    opt = ao.Optimizer(start(), rule, engine="numpy")

    def step(params, grads):
        for name, x in opt.params.items():
            x[...] = params[name]
        opt.step(grads)
        return {name: x.copy() for name, x in opt.params.items()}

    return diagnose(step, start())


RULES = [
    ("AdamW", {"lr": 0.003, "beta2": 0.97}, "int8"),
    ("LAMB", {"lr": 0.01}, "int8"),
    ("SGD", {"lr": 0.01, "momentum": 0.9}, "int8"),
    ("CAME", {"lr": 0.01}, "int8"),
    ("AdamW", {"lr": 0.01, "beta2": 0.99}, "bfloat16"),
    ("AdamW", {"lr": 0.01}, "float16"),
]


@pytest.mark.parametrize(
    ("name", "numbers", "stored"), marked(RULES, lambda name, _, stored: (name, stored) == ("AdamW", "int8"))
)
def test_the_storage_of_an_optimizer_is_told(name, numbers, stored):
    rule = getattr(ao, name)(**numbers, state_dtype=stored)
    found = diagnose(ao.Optimizer(start(), rule, engine="numpy"))
    assert found.as_documented, str(found)
    assert found.rule == rule
    assert found.switches["state_dtype"] == stored
    assert found.others == ()


UNUSUAL = ("Adam", {"lr": 0.002, "beta1": 0.8, "beta2": 0.93}, "int8")


@pytest.mark.parametrize(("beta1", "beta2"), [(0.8, 0.93), (0.87, 0.965)])
def test_codes_tell_unusual_betas(beta1, beta2):
    """Small changes of a beta change few codes, so least squares alone does not find it."""
    opt = ao.Optimizer(start(), ao.Adam(lr=0.003, beta1=beta1, beta2=beta2, state_dtype="int8"), engine="numpy")
    seen = Observed(run(as_subject(opt, None, "test"), None, 12, "test"))
    found = attempt(Model(Hypothesis(ao.Adam, (("state_dtype", "int8"),)), seen, {}), {})
    assert found.passes
    assert (found.values["beta1"], found.values["beta2"]) == pytest.approx((beta1, beta2))


@pytest.mark.parametrize(
    ("name", "numbers", "stored"),
    marked(
        [x for x in RULES if x[0] != "CAME"] + [UNUSUAL], lambda name, _, stored: (name, stored) == ("LAMB", "int8")
    ),
)
def test_numbers_are_found_as_well(name, numbers, stored):
    rule = getattr(ao, name)(**numbers, state_dtype=stored)
    found = unknown(rule)
    assert found.name == name, str(found)
    assert found.switches["state_dtype"] == stored
    assert all(np.isclose(found.hypers[key], getattr(rule, key)) for key in ("lr", *numbers))


def test_it_is_said_in_words():
    found = diagnose(ao.Optimizer(start(), ao.SGD(lr=0.1, momentum=0.5, state_dtype="int8"), engine="numpy"))
    assert "with: the state is stored in 8 bits: state_dtype='int8'" in str(found)


def test_a_state_that_is_wide_is_not_told_to_be_stored():
    found = diagnose(ao.Optimizer(start(), ao.SGD(lr=0.1, momentum=0.5), engine="numpy"))
    assert found.as_documented
    assert "state_dtype" not in found.switches
