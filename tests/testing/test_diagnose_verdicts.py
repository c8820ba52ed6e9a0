"""What `diagnose` says of odd subjects, what it does not claim, and when it stops; on tiny trajectories."""

import json

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.testing import Trajectory, diagnose
from arrayopt.testing.diagnosis.diagnosis import page
from arrayopt.testing.diagnosis.entry import run
from arrayopt.testing.diagnosis.hypothesis import Hypothesis
from arrayopt.testing.diagnosis.model import Model
from arrayopt.testing.diagnosis.search import Search, Watch, attempt
from arrayopt.testing.diagnosis.subjects import as_subject, is_stateless
from arrayopt.testing.diagnosis.trajectory import Observed
from arrayopt.testing.diagnosis.words import diagnosis_of
from tests.testing.faulty import adam, lars, sgd

START = {"w": np.array([-1.0, -0.25, 0.5, 2.0]), "b": np.array([0.3, 0.1])}
SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}


def plain(params, grads):
    return {name: p - 0.1 * grads[name] for name, p in params.items()}


def recorded(step, steps=4):
    return run(as_subject(step, START, "test"), None, steps, "test")


def searched(hypothesis, seen, known, search=None):
    """What a search finds that begins there, and changes nothing."""
    search = search or Search(seen, known, Watch(lambda h: None))
    return search.run(0, attempt(Model(hypothesis, seen, known), {}))


def told(made, kind, **known):
    """The diagnosis with a rule alone."""
    return diagnosis_of(searched(Hypothesis(kind), Observed(made), known), known)


# ---- what follows nothing --------------------------------------------------------------------------------------------

NOTHING = [
    (lambda p, g: {k: x * np.nan for k, x in p.items()}, "from step 0 on, all tensors hold values that are no finite"),
    (lambda p, g: p, "the parameters never move"),
    (
        lambda p, g: {k: x + np.random.standard_normal(x.shape) for k, x in p.items()},
        "two runs of the first step differ",
    ),
]


@pytest.mark.parametrize(("step", "words"), NOTHING, ids=["nan", "still", "random"])
def test_what_cannot_follow_a_rule_is_not_searched(step, words):
    found = diagnose(step, START, on_try=lambda hypothesis: pytest.fail("it is searched"))
    assert str(found).endswith(f"follows no rule: {words}{str(found).partition(words)[2]}")
    assert (found.name, found.explained, found.as_documented, found.rule, found.others) == ("", False, False, None, ())
    assert json.loads(found.to_json())["as_documented"] is False
    assert words in page(found)


def test_values_that_become_no_numbers_are_no_match():
    made = recorded(plain)
    for p in made.params[3:]:
        p["w"][1] = np.nan
    found = told(made, ao.SGD, **SGD)
    assert not found.explained
    assert not found.as_documented
    assert found.rule is None
    assert "follows no rule: from step 2 on, w holds values that are no finite numbers. The nearest is SGD." in str(
        found
    )
    assert "what is finite follows this, to 0 ULPs" in str(found)
    assert (found.first.step, found.first.tensor, found.first.index) == (2, "w", (1,))
    assert found.agreeing == ("b",)
    assert found.by_step["w"] == [0.0, 0.0, np.inf, 0.0]


def test_a_trajectory_without_gradients_tells_nothing():
    made = recorded(plain)
    none = Trajectory(made.dtypes, made.params, [dict.fromkeys(made.names)] * made.steps)
    assert diagnose(none).reason == "no tensor has a gradient"


# ---- which functions may be called once more -------------------------------------------------------------------------

COUNT = [0]
RATE = 0.1


def test_functions_that_keep_something_are_not_called_again():
    kept, calls = {}, 0

    def closure(p, g):
        kept["m"] = g
        return plain(p, g)

    def counting(p, g):
        nonlocal calls
        calls += 1
        return plain(p, g)

    def through(p, g):
        return closure(p, g)

    def in_a_comprehension(p, g):
        return {k: x - COUNT[0] * g[k] for k, x in p.items()}

    def default(p, g, m={}):  # noqa: B006 - as people do
        return plain(p, g)

    def pure(p, g):
        return {k: x - RATE * np.sign(g[k]) for k, x in plain(p, g).items()}

    rng = np.random.default_rng(0)
    assert is_stateless(pure)
    assert is_stateless(lambda p, g: rng.standard_normal(3))
    executed = {"np": np}
    exec("def step(p, g):\n    return np.add(p, g)", executed)  # in no module
    assert is_stateless(executed["step"])
    assert not any(is_stateless(f) for f in (closure, counting, through, in_a_comprehension, default, adam()))
    assert diagnose(counting, START, steps=2, seconds=0).name
    assert calls == 2


# ---- what does not exist, and what is the same -----------------------------------------------------------------------


def test_rules_that_cannot_be_made_are_refused():
    nesterov = Hypothesis(ao.SGD, (("momentum", None), ("nesterov", True)))
    assert nesterov.exists({"lr": 0.1, "momentum": 0.9})
    assert not nesterov.exists({"lr": 0.1, "momentum": 0.0})
    assert not Hypothesis(ao.RAdam).exists({"beta2": -3e63})
    assert Hypothesis(ao.SGD, varying=(("lr", "step"),)).exists({"lr": np.array([[0.1], [0.0]])})
    assert not Hypothesis(ao.SGD, varying=(("lr", "step"),)).exists({"lr": np.array([[0.1], [-0.1]])})
    seen = Observed(recorded(plain))
    found = attempt(Model(nesterov, seen, SGD), {})
    assert found.refused
    assert not found.passes
    assert attempt(Model(Hypothesis(ao.SGD), seen, SGD), {}).passes
    below = attempt(Model(Hypothesis(ao.SGD), seen, {**SGD, "weight_decay": -1e-18}), {})
    assert below.passes
    assert below.values["weight_decay"] == 0.0


def test_a_rule_that_is_the_same_there_is_named_too(monkeypatch):
    """Adam without decay is AdamW without decay, also where least squares have missed one of both."""
    made = recorded(adam())
    seen, known = Observed(made), {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    off = attempt(Model(Hypothesis(ao.Adam), seen, {**known, "lr": 0.5}), {})
    assert not off.passes
    assert set(off.model.names) == {"lr", *known}
    search = Search(seen, {**known, "lr": 0.003}, Watch(lambda h: None))
    search.tried[off.hypothesis] = off
    found = searched(Hypothesis(ao.AdamW), seen, {**known, "lr": 0.003}, search)
    assert [x.hypothesis.kind for x in found] == [ao.Adam, ao.AdamW]
    told_of = diagnosis_of(found, known)
    assert told_of.name == "Adam"
    assert [other.partition(" ")[0] for other in told_of.others] == ["AdamW"]


def test_a_twist_that_is_the_same_there_is_named_too():
    """SGD's decay that is not multiplied by lr is a decoupled one of another size."""
    made = run(as_subject(sgd(momentum=0.0, fault="decoupled"), None, "test"), None, 6, "test")
    known = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0}
    found = searched(Hypothesis(ao.SGD, (), "decay without lr"), Observed(made), known)
    numbers = {x.hypothesis.twist: x.values["weight_decay"] for x in found}
    assert numbers["decay without lr"] == 0.001
    assert numbers["decoupled"] == 0.01


def test_numbers_that_make_up_for_each_other_are_told():
    made = recorded(lars())
    others = {"momentum": 0.9, "weight_decay": 0.01, "eps": 0.0}
    found = told(made, ao.LARS, **others)
    assert found.explained
    assert found.made_up == (("lr", "trust_coefficient"),)
    assert "Of lr and trust_coefficient only their product shows: both could be others." in str(found)
    assert json.loads(found.to_json())["made_up"] == [["lr", "trust_coefficient"]]
    assert told(made, ao.LARS, **others, lr=0.1).made_up == ()
    assert Model(Hypothesis(ao.SGD), Observed(made), {}).names  # a rule without such numbers
    assert told(recorded(plain), ao.SGD, **SGD).made_up == ()


def test_many_tensors_may_have_rates_of_their_own():
    """The optimizer tells the rate of each. A few tensors are searched first, and theirs are not those of all."""
    params = {f"w{i}": np.random.default_rng(i).standard_normal(4) for i in range(7)}
    opt = ao.Optimizer(params, ao.SGD(lr=0.1), groups={"w[0246]": {"lr": 0.2}}, engine="array_api")
    found = diagnose(opt, depth=0, steps=3)
    assert found.as_documented, str(found)
    assert found.hypers["lr"].tolist() == [[0.2, 0.1] * 3 + [0.2]]


# ---- time, and mistakes ----------------------------------------------------------------------------------------------


def test_the_nearest_so_far_is_told_when_the_time_is_over():
    tried = []
    found = diagnose(recorded(plain), known=SGD, seconds=0, on_try=tried.append)
    assert len(tried) == 1
    assert not found.complete
    assert str(found).endswith("Note: the time was over before all was tried.")
    assert json.loads(found.to_json())["complete"] is False
    whole = Watch(tried.append, None)
    assert not whole.expired
    assert not whole.stopped


REFUSED = [
    (lambda: diagnose(plain, known={"momentun": 0.9}), r"`known` has no `momentun`; did you mean `momentum`\?"),
    (lambda: diagnose(plain, known={"learning_rate": 0.9}), "it is `lr` here"),
    (lambda: diagnose(plain, seconds=-1), "`seconds` must be a number of at least 0; got -1"),
    (
        lambda: diagnose(lambda p, g: {k: x.astype("float32") for k, x in p.items()}, START),
        "must keep dtypes; 'w' was float64, is float32",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=["typo", "alias", "seconds", "dtype"])
def test_mistakes_get_clear_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_an_object_with_a_step_is_told_to_give_its_method():
    class Mine:
        def step(self, p, g):
            return plain(p, g)

    with pytest.raises(TypeError, match="pass its method `step`, bound to it"):
        diagnose(Mine())
    with pytest.raises(TypeError, match=r"create an instance: Mine\(...\)$"):
        diagnose(Mine)
    assert as_subject(Mine().step, START, "test").name.endswith("step")
