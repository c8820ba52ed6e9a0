"""`diagnose` names planted faults, follows what is as documented, and says where anything else leaves."""

import copy
import inspect
import sys

import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.testing import Trajectory, diagnose
from arrayopt.testing.diagnosis import fit
from arrayopt.testing.diagnosis.entry import run
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, plain
from arrayopt.testing.diagnosis.model import Model, one_set
from arrayopt.testing.diagnosis.simulate import rounded
from arrayopt.testing.diagnosis.subjects import as_subject
from arrayopt.testing.diagnosis.trajectory import Observed, gradients, parameters
from tests.support.slow import marked
from tests.testing.faulty import adam, lamb, lars, sgd

DEFAULTS = {"lr": 0.003, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}

# what is made, with what, its fault; the rule and some words that must be said
FAULTS = [
    (adam, {}, "no bias correction", "Adam", "no bias correction"),
    (adam, {}, "1 - beta", "Adam", "1-β, and not 1-β^t"),
    (adam, {}, "t + 1", "Adam", "t is too large by one"),
    (adam, {}, "t - 1", "Adam", "t is too small by one"),
    (adam, {}, "t per tensor", "Adam", "with each tensor, and not once in each step"),
    (adam, {}, "eps in root", "Adam", "eps stands inside the root"),
    (adam, {}, "eps early", "Adam", "before the bias correction of v"),
    (adam, {}, "no second correction", "Adam", "the second moment is not corrected"),
    (adam, {}, "both begin", "Adam", "both moments begin with the first gradient"),
    (adam, {}, "m begins", "Adam", "the first moment begins with the first gradient"),
    (adam, {}, "eps falling", "Adam", "eps is multiplied by √(1-β2^t)"),
    (adam, {}, "schedule late", "Adam", "lr is 0 in the first step: a schedule may be counted one step late"),
    (adam, {}, "no root", "Adam", "the root of v is left out"),
    (adam, {}, "not zeroed", "Adam", "gradients add up"),
    (adam, {}, "not unscaled", "Adam", "multiplied by 1024"),
    (adam, {}, "betas swapped", "Adam", "swapped"),
    (adam, {}, "uphill", "Adam", "the sign is wrong"),
    (adam, {}, "sign", "Adam", "only the sign of the gradient"),
    (adam, {}, "late", "Adam", "the gradient of the step before"),
    (adam, {}, "clipped by value", "Adam", "each element of the gradient is clipped to ±0.7"),
    (adam, {}, "clipped by norm", "Adam", "each tensor's gradient is clipped to the norm 0.7"),
    (adam, {}, "clipped by the global norm", "Adam", "to a global norm of 0.7"),
    (adam, {}, "state in float16", "Adam", "the state is stored in float16"),
    (adam, {"decay": 0.1}, "coupled", "Adam", "weight_decay=0.1"),
    (adam, {"decay": 0.1}, "decay without lr", "AdamW", "not be multiplied by lr"),
    (adam, {"decay": 0.1}, "decay uphill", "AdamW", "weight decay has the wrong sign"),
    (lamb, {}, "no second correction", "LAMB", "the second moment is not corrected"),
    (lamb, {}, "no first correction", "LAMB", "the first moment is not corrected"),
    (lamb, {}, "decay forgotten in the ratio", "LAMB", "the trust ratio forgets the weight decay"),
    (lamb, {}, "decay beside the ratio", "LAMB", "weight decay is decoupled"),
    (lamb, {}, "coupled", "LAMB", "weight decay is coupled"),
    (lamb, {}, "norms over all tensors", "LAMB", "norms are over all of them at once"),
    (lamb, {}, "ratio clamped", "LAMB", "the trust ratio is clamped to at most 0.6"),
    (lamb, {}, "ratio upside down", "LAMB", "the trust ratio is upside down"),
    (lamb, {}, "eps in root", "LAMB", "eps stands inside the root"),
    (lamb, {}, "means in place of norms", "LAMB", "the trust ratio is of mean magnitudes, and not of norms"),
    (lamb, {}, "clipped twice", "LAMB", "to a global norm of 1, by a factor that is applied twice"),
    (lars, {}, "decay forgotten in the ratio", "LARS", "the trust ratio forgets the weight decay"),
    (sgd, {}, "decoupled", "SGD", "weight decay is decoupled"),
]
QUICK = {("adam", "decay without lr"), ("sgd", "decoupled"), ("lamb", "no second correction")}


def said(found, kind):
    """All that is said; Adam and AdamW without decay are the same."""
    assert found.explained, str(found)
    kinds = {"Adam", "AdamW"} if kind == "Adam" else {kind}
    assert found.name in kinds, str(found)
    return "; ".join([str(found), *found.changes, *found.others, *found.remarks])


@pytest.mark.parametrize(
    ("make", "options", "fault", "kind", "words"),
    marked(
        FAULTS,
        lambda make, options, fault, kind, words: (make.__name__, fault) in QUICK,
        name=lambda x: getattr(x, "__name__", str(x)[:30]),
    ),
)
def test_planted_faults_are_named(make, options, fault, kind, words):
    assert words in said(diagnose(make(fault=fault, **options)), kind)


SWITCH = {
    "no bias correction": ("bias_correction", False),
    "clipped by value": ("clip_value", 0.7),
    "clipped by norm": ("clip_tensor_norm", 0.7),
    "ratio clamped": ("max_ratio", 0.6),
}
TWIST = {
    "1 - beta": "t = 1",
    "no first correction": "no c1",
    "no second correction": "no c2",
    "m begins": "m begun",
    "both begin": "begun",
    "betas swapped": "swapped",
    "coupled": "l2",
    "decay forgotten in the ratio": "ratio without decay",
    "decay beside the ratio": "decoupled",
    "norms over all tensors": "joined",
    "ratio upside down": "ratio inverted",
    "means in place of norms": "ratio of means",
    "clipped by the global norm": "joint clip",
    "clipped twice": "joint clip twice",
    "not unscaled": "scaled",
    "not zeroed": "added up",
    "state in float16": "float16 state",
}  # the others are called as the faults are
OWN = {
    "clipped by the global norm": {"clip_norm": 0.7},
    "clipped twice": {"clip_norm": 1.0},
    "not unscaled": {"grad_factor": 1024.0},
}
NAMES = {"decay": "weight_decay", "trust": "trust_coefficient"}


@pytest.mark.parametrize(
    ("make", "options", "fault"),
    [pytest.param(*x[:3], id=f"{x[0].__name__}-{x[2]}") for x in FAULTS if x[2] != "schedule late"],
)
def test_a_planted_fault_is_one_change_of_a_rule(make, options, fault):
    """No search: the hypothesis that is to be found follows the fault, and the plain rule does not."""
    given = {x.name: x.default for x in inspect.signature(make).parameters.values()} | options
    numbers = {NAMES.get(name, name): x for name, x in given.items()} | OWN.get(fault, {})
    kind = {adam: ao.AdamW, lamb: ao.LAMB, sgd: ao.SGD, lars: ao.LARS}[make]
    name, value = SWITCH.get(fault, ("momentum", None) if make is sgd else ("", None))
    numeric = isinstance(value, float)
    switches = ((name, None if numeric else value),) if name else ()
    numbers |= {name: value} if numeric else {}
    twist = "" if fault in SWITCH else TWIST.get(fault, fault)
    seen = Observed(recorded(make(fault=fault, **options)))
    for changes, right in ((switches, twist), True), ((switches if make is sgd else (), ""), False):
        model = Model(Hypothesis(kind, *changes), seen, {})
        rule = model.hypothesis.rule
        values = {n: numbers.get(n, getattr(rule, n, None)) for n in model.names}
        assert model.at(values)[0].passes == right


KNOWN = [
    (fault, words, DEFAULTS | {"weight_decay": options.get("decay", 0.0)})
    for make, options, fault, _, words in FAULTS
    if make is adam and fault not in ("decay without lr", "decay uphill")
]


@pytest.mark.parametrize(
    ("fault", "words", "known"),
    marked(KNOWN, lambda fault, words, known: fault == "not unscaled", name=lambda x: str(x)[:30]),
)
def test_they_are_named_where_numbers_are_known(fault, words, known):
    """There is nothing to fit then."""
    found = diagnose(adam(fault=fault, decay=known["weight_decay"]), known=known)
    assert words in said(found, "Adam")
    assert fault == "schedule late" or found.hypers["lr"] == 0.003


# ---- what is as documented -------------------------------------------------------------------------------------------


def of_torch(name, dtype="float32", **options):
    torch = pytest.importorskip("torch")
    made = [torch.nn.Parameter(torch.tensor(x, dtype=getattr(torch, dtype))) for x in parameters().values()]
    return getattr(torch.optim, name)(made, **options)


def of_optax(name, **options):
    return getattr(pytest.importorskip("optax"), name)(**options)


DOCUMENTED = [
    ("AdamW", lambda: of_torch("AdamW", lr=0.003, weight_decay=0.1), {"lr": 0.003, "beta2": 0.999}),
    ("Adam", lambda: of_torch("Adam", lr=0.003, amsgrad=True), {"lr": 0.003, "eps": 1e-8}),
    ("SGD", lambda: of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True), {"momentum": 0.9}),
    ("SGD", lambda: of_torch("SGD", "bfloat16", lr=0.1, momentum=0.9), {"momentum": 0.9}),
    ("LANS", lambda: ao.LANS(lr=0.02, beta1=0.8), {"lr": 0.02, "beta1": 0.8}),
    ("CAME", lambda: ao.CAME(lr=0.01, weight_decay=0.1), {"lr": 0.01, "weight_decay": 0.1}),
    ("Adafactor", lambda: ao.Adafactor(), {"decay_rate": 0.8}),
    ("LARS", lambda: ao.Optimizer(parameters(), ao.LARS(lr=0.1, weight_decay=0.01)), {"weight_decay": 0.01}),
    ("LAMB", lambda: lamb(), {"lr": 0.01, "weight_decay": 0.05}),
    ("LARS", lambda: lars(), {"lr": 0.1, "trust_coefficient": 0.001}),
    ("SGD", lambda: sgd(dampening=0.5), {"dampening": 0.5, "momentum": 0.9}),
    ("AdamW", lambda: of_optax("adamw", learning_rate=0.003), {"lr": 0.003, "weight_decay": 1e-4}),
    ("LAMB", lambda: of_optax("lamb", learning_rate=0.01, weight_decay=0.01), {"lr": 0.01}),
    ("LARS", lambda: of_optax("lars", learning_rate=0.1, weight_decay=0.01), {"weight_decay": 0.01}),
]


@pytest.mark.parametrize(
    ("name", "make", "hypers"),
    marked(DOCUMENTED, lambda name, make, hypers: "momentum" in hypers, name=lambda x: str(x)[:9]),
)
def test_what_is_right_is_said_to_be(name, make, hypers):
    found = diagnose(make())
    assert found.as_documented, str(found)
    assert found.name == name
    assert "as documented" in str(found)
    assert {key: found.hypers[key] for key in hypers} == pytest.approx(hypers, rel=1e-5)
    assert isinstance(found.rule, getattr(ao, name))
    assert found.first is None


def test_the_rule_that_is_found_does_the_same():
    found = diagnose(sgd(lr=0.05, momentum=0.8, nesterov=True))
    assert found.rule == ao.SGD(lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01)
    assert found.switches == {"momentum": 0.8, "nesterov": True}
    assert found.ulps < 4


# ---- what is neither -------------------------------------------------------------------------------------------------


def odd(params, grads):
    return {name: p - 0.01 * np.sign(grads[name]) * np.abs(grads[name]) ** 0.3 for name, p in params.items()}


@pytest.mark.parametrize("depth", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_what_follows_no_rule_is_said_to(depth):
    found = diagnose(odd, depth=depth)
    assert not found.explained
    assert found.rule is None
    assert found.error > 1e-3
    assert "follows no rule that is known here. The nearest is" in str(found)
    assert "They part first" in str(found)


def recorded(step, **options):
    return run(as_subject(step, None, "test"), None, 12, "test", **options)


def test_the_first_difference_has_its_place():
    made = recorded(sgd(momentum=0.5))
    params = [{k: x.copy() for k, x in p.items()} for p in made.params]
    for p in params[4:]:
        p["vector"][7] += 0.25  # from step 3 on
    known = {"lr": 0.1, "momentum": 0.5, "dampening": 0.0, "weight_decay": 0.01}
    found = diagnose(Trajectory(made.dtypes, params, made.grads, "mine"), known=known, depth=0)
    assert not found.explained
    assert found.name == "SGD"
    assert (found.first.step, found.first.tensor, found.first.index) == (3, "vector", (7,))
    assert found.first.got - found.first.expected == pytest.approx(0.25)
    assert found.agreeing == ("matrix", "small", "zeros")


def test_values_that_are_not_finite_are_told():
    made = recorded(sgd())
    for p in made.params[3:]:
        p["small"][1, 0] = np.nan
    found = diagnose(made, depth=0)
    assert "from step 2 on, small holds" in str(found)
    assert "what is finite follows this" in str(found)
    assert not found.explained


@pytest.mark.parametrize("hidden", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tensors_with_other_settings_are_told_apart(hidden):
    groups = {"zeros": {"weight_decay": 0.0}, "vector": {"weight_decay": 0.0}}
    opt = ao.Optimizer(parameters(), ao.AdamW(lr=0.01, weight_decay=0.1), groups=groups, engine="array_api")
    found = diagnose(recorded(opt) if hidden else opt)
    assert found.explained
    assert found.as_documented
    assert "weight_decay=[" in str(found) or "0.1 for matrix, small" in str(found) or found.parts


def test_what_cannot_be_seen_is_said():
    found = diagnose(sgd(momentum=0.0, decay=0.0), steps=1)
    assert "dampening" in found.unseen
    assert "Not to be seen in these gradients: " in str(found)


# ---- what it is made of ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hypothesis", plain(), ids=lambda h: f"{h.kind.__name__}{len(h.switches)}")
def test_simulated_rules_are_the_rules(hypothesis):
    """Every rule of the package, new ones too: evaluated for several numbers at once, they are what the engine does."""
    rule = hypothesis.rule
    made = recorded(rule)
    model = Model(hypothesis, Observed(made), {})
    values = {name: getattr(rule, name) for name in model.names}
    sets = {k: np.concatenate([x, 0.5 * x]) for k, x in one_set(values).items()}
    predicted = model.predict(sets)
    assert model.seen.distance(predicted[0]).max() < 16
    assert predicted.shape[0] == 2


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("matrix", "small"), id="matrices", marks=pytest.mark.slow),
        pytest.param(("vector", "zeros"), id="vectors"),
    ],
)
def test_every_change_of_a_rule_has_a_graph(names):
    """What cannot be traced could not be simulated."""
    seen = Observed(recorded(ao.SGD(lr=0.1))).only(names)
    for one in plain(seen.shapes):
        for hypothesis in one.neighbours(narrow=False, known=True):
            assert Model(hypothesis, seen, {}).simulation.blocks, hypothesis


MATRICES = {"wide": (3, 5), "tall": (5, 3), "square": (3, 3), "kernel": (2, 3, 2, 2), "row": (1, 4)}


@pytest.mark.parametrize("matrix", ["flatten", "last"])
@pytest.mark.parametrize("kind", [ao.Muon, ao.NorMuon, ao.MuonH], ids=lambda kind: kind.__name__)
def test_products_are_simulated_too(kind, matrix):
    """Whichever way a matrix lies; none runs as written, which would take long."""
    rng = np.random.default_rng(2)
    params = {name: rng.standard_normal(shape) for name, shape in MATRICES.items()}
    rule = kind(lr=0.1, matrix=matrix)
    made = run(as_subject(rule, params, "test"), None, 4, "test")
    model = Model(Hypothesis(kind, (("matrix", matrix),)), Observed(made), {})
    sets = one_set({name: getattr(rule, name) for name in model.names})
    predicted = model.predict({k: np.concatenate([x, 0.5 * x]) for k, x in sets.items()})
    assert model.seen.distance(predicted[0]).max() < 32


@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_matrices_may_follow_another_rule(depth):
    muon = {"rule": ao.Muon(lr=0.02)}
    groups = {"matrix": muon, "small": muon}
    opt = ao.Optimizer(parameters(), ao.AdamW(lr=0.01), groups=groups, engine="array_api")
    found = diagnose(recorded(opt) if depth else opt, depth=depth)
    assert found.as_documented, str(found)
    assert {part.name: names for names, part in found.parts} == {
        "Muon": ("matrix", "small"),
        "AdamW": ("vector", "zeros"),
    }


@pytest.mark.parametrize("depth", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_rules_for_matrices_are_found(depth):
    rng = np.random.default_rng(2)
    params = {name: rng.standard_normal(shape) for name, shape in MATRICES.items()}
    rule = ao.NorMuon(lr=0.02, beta2=0.9, **({"matrix": "last"} if depth else {}))
    found = diagnose(run(as_subject(rule, params, "test"), None, 6, "test") if depth else rule, params, depth=depth)
    assert found.rule == rule, str(found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounding_is_that_of_the_dtype(dtype):
    x = np.random.default_rng(0).standard_normal(500) * 10.0 ** np.linspace(-7, 4, 500)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    assert np.array_equal(rounded(x, dtype), x.astype("float32").astype(kind).astype(float))


def test_gradients_show_what_there_is():
    shapes, dtypes = {"a": (4, 5), "b": ()}, {"a": "float64", "b": "float64"}
    made = gradients(shapes, dtypes, 5)
    assert [{name: x.shape for name, x in row.items()} for row in made] == [shapes] * 5
    sizes = np.abs(np.stack([row["a"].ravel() for row in made]))
    assert (sizes == 0).all(axis=0).sum() == 1
    assert sizes.max() / sizes[sizes > 0].min() > 1e8


# ---- what it leaves as it is, and what it refuses --------------------------------------------------------------------


def test_nothing_of_the_users_is_written():
    torch = pytest.importorskip("torch")
    theirs = of_torch("SGD", lr=0.1)
    before = [x.detach().clone() for x in theirs.param_groups[0]["params"]]
    diagnose(theirs, depth=0)
    assert all(torch.equal(x, y) for x, y in zip(theirs.param_groups[0]["params"], before, strict=True))
    assert not theirs.state
    opt = ao.Optimizer(parameters(), ao.SGD(lr=0.1))
    diagnose(opt, depth=0)
    assert opt.step_count == 0
    assert all(np.array_equal(x, y) for x, y in zip(opt.params.values(), parameters().values(), strict=True))

    def in_place(params, grads):
        for name, p in params.items():
            p -= 0.1 * grads[name]

    mine = parameters()
    kept = copy.deepcopy(mine)
    assert diagnose(in_place, mine).rule == ao.SGD(lr=0.1)
    assert all(np.array_equal(mine[name], x) for name, x in kept.items())


def test_trees_lists_and_given_gradients_are_taken():
    params = [{"w": np.ones((3, 2), "float32")}, np.full(4, 2.0, "float32")]
    rng = np.random.default_rng(3)
    grads = [[{"w": rng.standard_normal((3, 2)).astype("float32")}, None] for _ in range(4)]
    grads[1][1] = np.ones(4, "float32")

    def step(p, g):
        return [{"w": p[0]["w"] - np.float32(0.5) * g[0]["w"]}, p[1] if g[1] is None else p[1] - np.float32(0.5) * g[1]]

    found = diagnose(step, params, grads)
    assert found.rule == ao.SGD(lr=0.5)
    assert list(found.by_step) == ["0.w", "1"]
    assert len(found.by_step["1"]) == 4


REFUSED = [
    (lambda: diagnose(3), TypeError, "`step` must be a function step"),
    (lambda: diagnose(ao.SGD), TypeError, "`step` must be a function step"),
    (lambda: diagnose(odd, {"w": np.ones(3, "complex64")}), TypeError, "must be real; got complex64 at 'w'"),
    (lambda: diagnose(odd, {"w": np.arange(3)}), TypeError, "must be of a floating-point dtype"),
    (lambda: diagnose(odd, {"w": np.ones(3)}, [{"w": np.ones(4)}]), ValueError, r"`grads\[0\]` must have the shapes"),
    (lambda: diagnose(odd, {"w": np.ones(3)}, []), ValueError, "at least one step"),
    (lambda: diagnose(odd, known={"lr": "fast"}), TypeError, "`known` must be a dict of names and numbers"),
    (lambda: diagnose(odd, steps=0), ValueError, "`steps` must be at least 1; got 0"),
    (lambda: diagnose(odd, depth=-1), ValueError, "`depth` must be at least 0; got -1"),
    (lambda: diagnose(ao.Optimizer(parameters(), ao.SGD(lr=0.1)), parameters()), ValueError, "leave `params` out"),
]


@pytest.mark.parametrize(("call", "exception", "words"), REFUSED)
def test_mistakes_get_clear_errors(call, exception, words):
    with pytest.raises(exception, match=words):
        call()


def test_what_a_step_raises_says_which_step():
    def step(params, grads):
        raise RuntimeError("out of coffee")

    with pytest.raises(RuntimeError, match="out of coffee") as caught:
        diagnose(step)
    assert "in step 0" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="must return the parameters"):
        diagnose(lambda params, grads: {"other": np.ones(2)})


def test_used_optimizers_are_refused():
    opt = ao.Optimizer({"w": np.ones(2)}, ao.SGD(lr=0.1))
    opt.step({"w": np.ones(2)})
    with pytest.raises(ValueError, match="must be fresh; it has made 1 step"):
        diagnose(opt)
    theirs = of_torch("SGD", lr=0.1, momentum=0.9)
    door = pytest.importorskip("arrayopt.torch")
    ours = door.SGD(copy.deepcopy(theirs.param_groups[0]["params"]), lr=0.1, momentum=0.9)
    for used in (theirs, ours):
        as_subject(used, None, "diagnose")  # which it is not yet, although ours has its slots at once
        for x in used.param_groups[0]["params"]:
            x.grad = x.detach().clone()
        used.step()
        with pytest.raises(ValueError, match="must be fresh"):
            diagnose(used)


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"pip install 'arrayopt\[diagnose\]'"):
        fit.least_squares()


def test_what_is_known_and_not_searched_is_said_to_be():
    found = diagnose(ao.SOAP(lr=0.003), on_try=lambda hypothesis: pytest.fail("it is searched"))
    assert str(found).endswith("SOAP is known, not searched.")
    assert not found.explained
    torch = pytest.importorskip("torch")
    p = torch.nn.Parameter(torch.tensor(parameters()["matrix"]))
    found = diagnose(torch.optim.Muon([p], lr=0.02), depth=0)
    assert found.name == "Muon"
    assert "Muon with products in bfloat16 is known, not searched." in str(found)


def test_a_lower_precision_inside_ends_the_search():
    """PyTorch's NAdam keeps a product of momenta in float32, whatever the parameters are in."""
    torch = pytest.importorskip("torch")
    p = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))
    found = diagnose(torch.optim.NAdam([p], lr=0.002), steps=4)
    assert (found.name, found.explained, found.complete, found.changes) == ("NAdam", False, True, ())
    assert "something may be computed in a lower precision" in str(found)
