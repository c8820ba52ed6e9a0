"""Hyper-parameters and their stored forms, rules as values, and rules as a user writes them."""

import copy
import dataclasses
import math
import pickle
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, final

import array_api_compat
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.hyper import Listed, coerce, evaluate
from tests.cases import ALL, IDS, make
from tests.tolerances import TOLERANCES

# ---- coerce: what is given, and what is kept ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [0.5, Fraction(1, 2), np.float64(0.5), np.float16(0.5), np.asarray(0.5), np.asarray(0.5, "float16")],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')}",
)
def test_numbers_are_kept_as_floats(given):
    kept = coerce("x", given, "[0, 1)", optional=False)
    assert (type(kept), kept) == (float, 0.5)


@pytest.mark.parametrize("given", [3, np.int64(3), np.uint8(3), np.asarray(3)])
def test_integers_are_numbers(given):
    kept = coerce("x", given, None, optional=False)
    assert (type(kept), kept) == (float, 3.0)


@pytest.mark.parametrize("given", [torch.tensor(0.5), jnp.asarray(0.5), torch.tensor(0.5, requires_grad=True)])
def test_scalars_of_other_libraries_are_kept_as_they_are_for_their_derivatives(given):
    assert coerce("x", given, "[0, 1)", optional=False) is given


@pytest.mark.parametrize(
    "given",
    [
        [0.5, 0.25],
        (0.5, 0.25),
        deque([0.5, 0.25]),
        (x for x in (0.5, 0.25)),
        [np.float32(0.5), np.asarray(0.25)],
        [torch.tensor(0.5), jnp.asarray(0.25)],
        np.asarray([0.5, 0.25], "float16"),
        torch.tensor([0.5, 0.25]),
        torch.tensor([0.5, 0.25], requires_grad=True),
        jnp.asarray([0.5, 0.25]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_sequences_become_schedules(given):
    kept = coerce("x", given, "[0, 1)", optional=False)
    assert kept == Listed((0.5, 0.25))
    assert [type(x) for x in kept.values] == [float, float]
    assert [kept(0), kept(1)] == [0.5, 0.25]


def test_integers_in_arrays_are_numbers_too():
    assert coerce("x", np.arange(3), None, optional=False) == Listed((0.0, 1.0, 2.0))


@pytest.mark.parametrize("given", [lambda s: 0.5, math.exp, ao.schedules.Constant(0.5), Listed((0.5,))])
def test_functions_are_kept_as_they_are(given):
    assert coerce("x", given, "[0, 1)", optional=False) is given


def test_none_is_kept_only_where_it_may_be():
    assert coerce("x", None, "[0, 1)", optional=True) is None
    with pytest.raises(
        TypeError, match=r"x must be a number, a schedule \(a function of the step\) or a sequence of numb"
    ):
        coerce("x", None, "[0, 1)", optional=False)
    with pytest.raises(TypeError, match="sequence of numbers, or None; got 'a'"):
        coerce("x", "a", "[0, 1)", optional=True)


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("[0, 1)", [0, 0.999], [-0.001, 1]),
        ("(0, 1]", [0.001, 1], [0, 1.001]),
        ("[-2, 2]", [-2, 2], [-2.001, 2.001]),
        ("(0, inf)", [5e-324, 1e308], [0, math.inf]),
        ("(-inf, inf)", [-1e308, 1e308], [math.inf, -math.inf, math.nan]),
        (None, [-1e308, 0, 1e308], [math.inf, -math.inf, math.nan]),
    ],
)
def test_intervals(interval, inside, outside):
    for x in inside:
        assert coerce("x", x, interval, optional=False) == x
    for x in outside:
        with pytest.raises(ValueError, match="x must be "):
            coerce("x", x, interval, optional=False)


def test_an_array_that_changes_later_changes_no_rule():
    lr = np.asarray(0.5)
    rule = ao.SGD(lr=lr)
    lr[...] = -1
    assert rule.lr == 0.5


# ---- evaluate and Listed --------------------------------------------------------------------------------------------


def test_evaluate():
    assert evaluate("x", None, 3, "[0, 1)") is None
    assert evaluate("x", 0.5, 3, "[0, 1)") == 0.5
    for made in (0.5, np.float32(0.5), np.asarray(0.5), torch.tensor(0.5), jnp.asarray(0.5), Fraction(1, 2)):
        value = evaluate("x", lambda s: made, 3, "[0, 1)")  # noqa: B023 - called at once
        assert (type(value), value) == (float, 0.5)
    assert evaluate("x", lambda s: s / 4, 3, "[0, 1)") == 0.75
    array = jnp.asarray(0.5)
    assert evaluate("x", array, 3, "[0, 1)") is array


def test_a_step_that_is_traced_gives_an_array_that_is_not_checked():
    found = jax.jit(lambda s: evaluate("x", lambda s: s * 0.5, s, "[0, 1)"))(6)
    assert isinstance(found, jax.Array)
    assert found == 3.0


@pytest.mark.parametrize(
    "make_step", [np.asarray, np.int64, torch.tensor, jnp.asarray], ids=["0-d", "scalar", "torch", "jax"]
)
def test_listed_of_an_array(make_step):
    listed = Listed((0.5, 0.25))
    for step, expected in [(0, 0.5), (1, 0.25), (2, math.nan), (99, math.nan)]:
        value = listed(make_step(step))
        assert array_api_compat.array_namespace(value) is array_api_compat.array_namespace(make_step(step))
        assert value.shape == ()
        np.testing.assert_array_equal(float(value), expected)


def test_listed_is_a_value():
    assert Listed((0.5,)) == Listed((0.5,)) != Listed((0.25,))
    assert hash(Listed((0.5,))) == hash(Listed((0.5,)))
    assert repr(Listed((0.5, 0.25))) == "Listed(values=(0.5, 0.25))"
    assert pickle.loads(pickle.dumps(Listed((0.5,)))) == Listed((0.5,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Listed((0.5,)).values = ()


# ---- rules as values ------------------------------------------------------------------------------------------------

each_rule = pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)


@each_rule
def test_rules_are_values(name, options):
    rule = make(name, options)
    assert eval(repr(rule), vars(ao)) == rule
    assert rule == make(name, options)
    assert hash(rule) == hash(make(name, options))
    for twin in (pickle.loads(pickle.dumps(rule)), copy.deepcopy(rule), dataclasses.replace(rule)):
        assert twin == rule
        assert type(twin) is type(rule)
    changed = dataclasses.replace(rule, weight_decay=0.375)
    assert changed.weight_decay == 0.375
    assert changed != rule
    assert dataclasses.replace(changed, weight_decay=rule.weight_decay) == rule
    with pytest.raises(ValueError, match=f"{name}: `weight_decay` must be in"):
        dataclasses.replace(rule, weight_decay=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.weight_decay = 0.0


def test_rules_of_other_classes_are_other_rules():
    made = [ao.LAMB(), ao.LANS(), ao.Adam(weight_decay=0.0), ao.AdamW(weight_decay=0.0), ao.SGD(lr=1), ao.LARS(lr=1)]
    assert len(set(made)) == len(made)


def test_the_forms_of_a_number_make_equal_rules():
    rule = ao.SGD(lr=0.5)
    for x in (np.float64(0.5), np.float32(0.5), np.asarray(0.5), Fraction(1, 2)):
        assert ao.SGD(lr=x) == rule
        assert hash(ao.SGD(lr=x)) == hash(rule)
    sequence = ao.SGD(lr=[0.5, 0.25])
    for x in ((0.5, 0.25), np.asarray([0.5, 0.25]), torch.tensor([0.5, 0.25])):
        assert ao.SGD(lr=x) == sequence != rule
        assert hash(ao.SGD(lr=x)) == hash(sequence)
    assert ao.SGD(lr=1) == ao.SGD(lr=1.0)
    assert pickle.loads(pickle.dumps(sequence)) == sequence


def test_repr_shows_what_is_on():
    assert repr(ao.SGD(lr=0.1)) == "SGD(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0)"
    assert repr(ao.SGD(lr=1, momentum=0.5, nesterov=True)) == (
        "SGD(lr=1.0, momentum=0.5, dampening=0.0, nesterov=True, weight_decay=0.0)"
    )
    shown = repr(ao.LAMB(lr=ao.schedules.Constant(0.1), max_ratio=10, adapt=False, grad_centralization=True))
    for words in ("lr=Constant(value=0.1)", "max_ratio=10.0", "adapt=False", "grad_centralization=True"):
        assert words in shown
    for words in ("min_ratio", "clip_value", "None"):
        assert words not in shown
    assert "lr=Listed(values=(0.1, 0.2))" in repr(ao.LAMB(lr=[0.1, 0.2]))


def test_at_evaluates_every_number():
    rule = ao.LAMB(lr=[0.1, 0.2], beta1=lambda s: s / 2, max_ratio=3)
    assert rule.at(1) == {
        "lr": 0.2, "beta1": 0.5, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01, "clip_value": None,
        "min_norm": None, "max_norm": None, "min_ratio": None, "max_ratio": 3.0, "clip_tensor_norm": None,
        "clip_unit_ratio": None, "lookahead_steps": None, "lookahead_alpha": 0.5, "ema_decay": None,
    }  # fmt: skip


# ---- declaring fields -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", ["", "0, 1", "[0 1]", "[a, b]", "[0]", "[0, 1, 2]"])
def test_a_malformed_interval_shows_where_it_is_written(interval):
    with pytest.raises(ValueError, match=r".+"):
        ao.real(interval)


@dataclass(frozen=True, kw_only=True, repr=False)
class Fields(ao.Rule):
    """One field of each kind."""

    required: ao.Hyper = ao.real("(0, 1]")
    ranged: ao.Hyper = ao.real("(0, 1]", 0.5)
    off: ao.Hyper | None = ao.real("(0, 1]", None)
    may_be_off: ao.Hyper | None = ao.real("(0, 1]", 0.5, optional=True)
    plain: float = 0.9
    plain_off: float | None = None
    bare: float
    switch: bool = ao.flag(False)
    plain_switch: bool = True
    shared: ClassVar[list] = []

    def check(self):
        if self.plain == self.ranged:
            raise ValueError("Fields: `plain` must differ from `ranged`")

    def slots(self, xp, p):
        return {"t0": xp.zeros_like(p)} if self.plain_switch else {}

    def update(self, xp, p, g, s, h):
        seen = {name: getattr(h, name, "absent") for name in ("plain", "plain_off", "bare", "switch", "shared", "t")}
        assert seen == {"plain": 0.25, "plain_off": None, "bare": 2.0, "switch": "absent", "shared": "absent", "t": 1}
        return p - h.plain * g, s


def test_defaults_and_what_must_be_given():
    rule = Fields(required=1, bare=2)
    assert repr(rule) == (
        "Fields(required=1.0, ranged=0.5, may_be_off=0.5, plain=0.9, bare=2.0, plain_switch=True)"
    )  # fmt: skip
    for lacking in ({"required": 1}, {"bare": 1}):
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument"):
            Fields(**lacking)


ACCEPTED = {
    "ranged": [1, np.float32(0.5), [0.5, 1.0], lambda s: 0.5],
    "off": [None, 1],
    "may_be_off": [None, 1],
    "plain": [-3, 1e9, [0.5, -1.0], np.asarray([1.0]), lambda s: s],
    "plain_off": [None, -3],
    "bare": [0, -1],
    "switch": [True],
    "plain_switch": [False],
}
REFUSED = {
    "required": [(0, ValueError), (None, TypeError), (True, TypeError)],
    "ranged": [(0, ValueError), (2, ValueError), ([0.5, 2], ValueError), (None, TypeError), ("1", TypeError)],
    "off": [(0, ValueError), (False, TypeError)],
    "may_be_off": [(0, ValueError), ("off", TypeError)],
    "plain": [(math.nan, ValueError), (math.inf, ValueError), (None, TypeError), (True, TypeError), ([], ValueError)],
    "plain_off": [(math.nan, ValueError), ("x", TypeError)],
    "bare": [(None, TypeError), (math.inf, ValueError)],
    "switch": [(1, TypeError), (None, TypeError), ("yes", TypeError)],
    "plain_switch": [(0, TypeError), (None, TypeError), (np.True_, TypeError)],
}


@pytest.mark.parametrize("field", REFUSED)
def test_fields_of_a_rule_of_ones_own_are_checked(field):
    given = {"required": 1, "bare": 2}
    for x in ACCEPTED.get(field, []):
        assert getattr(Fields(**given | {field: x}), field) is not ...
    for x, exception in REFUSED[field]:
        with pytest.raises(exception, match=f"Fields: `{field}`"):
            Fields(**given | {field: x})


def test_a_rule_of_ones_own_may_have_conditions_between_its_fields():
    with pytest.raises(ValueError, match="`plain` must differ from `ranged`"):
        Fields(required=1, bare=2, plain=0.5)
    with pytest.raises(ValueError, match="`plain` must differ from `ranged`"):
        ao.Optimizer(np.ones(2), Fields(required=1, bare=2), groups={"*": {"plain": 0.5}})


def test_fields_are_hyper_parameters_of_the_optimizer():
    params, groups = {"a": np.ones(2), "b": np.ones(2)}, {"b": {"plain": [0.25]}}
    opt = ao.Optimizer(params, Fields(required=1, bare=2), groups=groups, engine="array_api")  # `update` looks at h
    opt.plain = 0.25
    opt.step({"a": np.ones(2), "b": np.ones(2)})
    assert [x.tolist() for x in opt.params.values()] == [[0.75, 0.75]] * 2
    with pytest.raises(ValueError, match=r"plain_switch cannot change so while training"):
        opt.plain_switch = False


# ---- rules as a user writes them ------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Lion(ao.Rule):
    """Chen et al., arXiv:2302.06675, algorithm 2."""

    lr: ao.Hyper = ao.real("[0, inf)", 1e-4)
    beta1: ao.Hyper = ao.real("[0, 1)", 0.9)
    beta2: ao.Hyper = ao.real("[0, 1)", 0.99)
    weight_decay: ao.Hyper = ao.real("[0, inf)", 0.0)

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        u = xp.sign(h.beta1 * s["m"] + (1 - h.beta1) * g)
        return p - h.lr * (u + h.weight_decay * p), {"m": h.beta2 * s["m"] + (1 - h.beta2) * g}


@dataclass(frozen=True, kw_only=True)
class NovoGrad(ao.Rule):
    """Ginsburg et al., arXiv:1905.11286: one second moment for each tensor; declared without `real` and `flag`."""

    lr: ao.Hyper = 0.01
    beta1: float = 0.95
    beta2: float = 0.98
    averaged: bool = True

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p), "v": xp.sum(p) * 0}

    def update(self, xp, p, g, s, h):
        g2 = xp.sum(g * g)
        v = xp.where(s["v"] == 0, g2, h.beta2 * s["v"] + (1 - h.beta2) * g2)
        m = h.beta1 * s["m"] + (1 - h.beta1 if self.averaged else 1) * g / (xp.sqrt(v) + 1e-8)
        return p - h.lr * m, {"m": m, "v": v, "second_moment": v}


def lion(h, p, g, s):
    m = s.setdefault("m", [0.0] * len(p))
    sign = [
        math.copysign(1, x) if x else 0
        for x in (h["beta1"] * a + (1 - h["beta1"]) * b for a, b in zip(m, g, strict=True))
    ]
    s["m"] = [h["beta2"] * a + (1 - h["beta2"]) * b for a, b in zip(m, g, strict=True)]
    return [x - h["lr"] * (u + h["weight_decay"] * x) for x, u in zip(p, sign, strict=True)]


def novograd(h, p, g, s):
    g2 = sum(x * x for x in g)
    s["v"] = h["beta2"] * s["v"] + (1 - h["beta2"]) * g2 if "v" in s else g2
    share = 1 - h["beta1"] if h["averaged"] else 1
    m = s.get("m", [0.0] * len(p))
    s["m"] = [h["beta1"] * a + share * b / (math.sqrt(s["v"]) + 1e-8) for a, b in zip(m, g, strict=True)]
    return [x - h["lr"] * a for x, a in zip(p, s["m"], strict=True)]


OWN = {
    "Lion": (lion, Lion(lr=0.1, weight_decay=0.5), {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.5}),
    "NovoGrad": (novograd, NovoGrad(), {"lr": 0.01, "beta1": 0.95, "beta2": 0.98, "averaged": True}),
    "NovoGrad sums": (
        novograd,
        NovoGrad(beta1=0.5, averaged=False),
        {"lr": 0.01, "beta1": 0.5, "beta2": 0.98, "averaged": False},
    ),
}
P, GRADS = np.random.default_rng(0).standard_normal(6), np.random.default_rng(1).standard_normal((4, 6))
NEAR = TOLERANCES["float64"].relative


def by_hand(plain, h, grads=GRADS):
    p, s = list(P), {}
    for g in grads:
        p = plain(h, p, list(g), s)
    return p


@pytest.mark.parametrize(("plain", "rule", "h"), OWN.values(), ids=OWN)
def test_a_rule_of_ones_own_runs_on_every_library(backend, plain, rule, h):
    opt = ao.Optimizer(backend.array(P.reshape(2, 3), "float64"), rule, stats=True)
    for g in GRADS:
        opt.step(backend.array(g.reshape(2, 3), "float64"))
    np.testing.assert_allclose(np.ravel(backend.numpy(opt.params)), by_hand(plain, h), rtol=NEAR, atol=NEAR)
    assert set(opt.stats["param"]) == {"param_norm", "grad_norm", "update_norm"} | (
        {"second_moment"} if "v" in opt.state["param"] else set()
    )


@pytest.mark.parametrize(("plain", "rule", "h"), OWN.values(), ids=OWN)
def test_a_rule_of_ones_own_has_all_that_others_have(plain, rule, h):
    p, state = jnp.asarray(P), rule.init(jnp.asarray(P))
    step = jax.jit(lambda p, g, s: ao.update(rule, p, g, s))
    for g in GRADS:
        p, state = step(p, jnp.asarray(g), state)
    np.testing.assert_allclose(p, by_hand(plain, h), rtol=1e-11)

    groups = {"a": {"beta1": 0.25}, "c": {"grad_centralization": True}}
    opt = ao.Optimizer({x: P.copy() if x < "c" else P.reshape(2, 3).copy() for x in "abc"}, rule, groups=groups)
    for s, g in enumerate(GRADS):
        if s == 2:
            saved = pickle.loads(pickle.dumps(opt.state_dict()))
            opt = ao.Optimizer(opt.params, rule, groups={"a": {}, "c": {"grad_centralization": True}})
            opt.load_state_dict(saved)
        opt.step({"a": g, "b": g, "c": g.reshape(2, 3)})
    centred = [(g.reshape(2, 3) - g.reshape(2, 3).mean(1, keepdims=True)).ravel() for g in GRADS]
    for found, expected in [
        (opt.params["a"], by_hand(plain, h | {"beta1": 0.25})),
        (opt.params["b"], by_hand(plain, h)),
        (opt.params["c"].ravel(), by_hand(plain, h, centred)),
    ]:
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)

    assert pickle.loads(pickle.dumps(rule)) == rule
    assert hash(rule) == hash(copy.deepcopy(rule))
    assert dataclasses.replace(rule, beta1=0) != rule
    assert eval(repr(rule), globals()) == rule


def test_low_precision_and_left_out_tensors_need_nothing_of_a_rule():
    opt = ao.Optimizer({"w": np.ones(4, "float16"), "none": np.ones(2), "empty": np.ones((0, 2))}, Lion(lr=0.25))
    opt.step({"w": np.ones(4, "float16"), "none": None, "empty": np.ones((0, 2))})
    assert (opt.params["w"].dtype, opt.params["w"].tolist(), opt.state["w"]["m"].dtype) == (
        "float16",
        [0.75] * 4,
        "float32",
    )
    assert opt.params["none"].tolist() == [1, 1]


def test_complex_parameters_are_for_rules_that_say_so():
    @dataclass(frozen=True, kw_only=True, repr=False)
    class Descent(ao.Rule):
        complex_ok: ClassVar[bool] = True
        lr: ao.Hyper = ao.real("[0, inf)", 0.5)

        def slots(self, xp, p):
            return {}

        def update(self, xp, p, g, s, h):
            return p - h.lr * g, {}

    p = np.ones(2, complex)
    assert ao.Optimizer(p.copy(), Descent()).step(p * 1j).tolist() == [1 - 0.5j] * 2
    with pytest.raises(TypeError, match="Lion is not defined for complex parameters"):
        ao.Optimizer(p, Lion())


def test_what_is_no_rule_does_not_become_one():
    with pytest.raises(TypeError, match="abstract"):
        ao.Rule()

    @dataclass(frozen=True, kw_only=True, repr=False)
    class Half(ao.Rule):
        def slots(self, xp, p):
            return {}

    with pytest.raises(TypeError, match="abstract"):
        Half()
    with pytest.raises(TypeError, match="frozen"):

        @dataclass(kw_only=True)
        class Thawed(ao.Rule):
            pass
