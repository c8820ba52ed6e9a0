"""Declaring hyper-parameters, and rules as a user writes them."""

import copy
import dataclasses
import math
import pickle
from dataclasses import dataclass
from typing import ClassVar, final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arrayopt as ao
from tests.support.engines import CHOICES, SLOW
from tests.support.slow import marked
from tests.support.tolerances import TOLERANCES

# ---- declaring fields -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", ["", "0, 1", "[0 1]", "[a, b]", "[0]", "[0, 1, 2]", "[1, 0]", "[nan, 1]", 5, None])
def test_a_malformed_interval_shows_where_it_is_written(interval):
    with pytest.raises(ValueError, match=r"real: `interval` must be a string such as '\[0, 1\)'"):
        ao.real(interval)


@pytest.mark.parametrize("interval", ["[0, inf)", "[0,inf)", " [ 0 ,inf ) "])
def test_an_interval_may_be_spaced_in_any_way(interval):
    assert ao.real(interval).metadata["interval"] == "[0, inf)"


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
    with pytest.raises(ValueError, match=r"plain_switch cannot change like this while training"):
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
    averaging: bool = True

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p), "v": xp.sum(p) * 0}

    def update(self, xp, p, g, s, h):
        g2 = xp.sum(g * g)
        v = xp.where(s["v"] == 0, g2, h.beta2 * s["v"] + (1 - h.beta2) * g2)
        m = h.beta1 * s["m"] + (1 - h.beta1 if self.averaging else 1) * g / (xp.sqrt(v) + 1e-8)
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
    share = 1 - h["beta1"] if h["averaging"] else 1
    m = s.get("m", [0.0] * len(p))
    s["m"] = [h["beta1"] * a + share * b / (math.sqrt(s["v"]) + 1e-8) for a, b in zip(m, g, strict=True)]
    return [x - h["lr"] * a for x, a in zip(p, s["m"], strict=True)]


OWN = {
    "Lion": (lion, Lion(lr=0.1, weight_decay=0.5), {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.5}),
    "NovoGrad": (novograd, NovoGrad(), {"lr": 0.01, "beta1": 0.95, "beta2": 0.98, "averaging": True}),
    "NovoGrad sums": (
        novograd,
        NovoGrad(beta1=0.5, averaging=False),
        {"lr": 0.01, "beta1": 0.5, "beta2": 0.98, "averaging": False},
    ),
}
P, GRADS = np.random.default_rng(0).standard_normal(6), np.random.default_rng(1).standard_normal((4, 6))
NEAR = TOLERANCES["float64"].relative


def by_hand(plain, h, grads=GRADS):
    p, s = list(P), {}
    for g in grads:
        p = plain(h, p, list(g), s)
    return p


@pytest.mark.parametrize(
    ("backend", "name"),
    marked(
        ((place, name) for name in OWN for place in CHOICES),
        lambda place, name: place.partition(":")[2] not in SLOW,
    ),
    indirect=["backend"],
)
def test_a_rule_of_ones_own_runs_on_every_library(backend, name):
    plain, rule, h = OWN[name]
    opt = ao.Optimizer(backend.array(P.reshape(2, 3), "float64"), rule, stats=True)
    for g in GRADS:
        opt.step(backend.array(g.reshape(2, 3), "float64"))
    np.testing.assert_allclose(np.ravel(backend.numpy(opt.params)), by_hand(plain, h), rtol=NEAR, atol=NEAR)
    assert set(opt.stats["param"]) == {"param_norm", "grad_norm", "update_norm"} | (
        {"second_moment"} if "v" in opt.state["param"] else set()
    )


@pytest.mark.usefixtures("auto")
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


def test_a_switch_between_words_is_a_choice():
    @dataclass(frozen=True, kw_only=True)
    class Said(ao.SGD):
        mode: str = "a"

    with pytest.raises(
        TypeError, match=r"Said: `mode` has text .*; declare .* mode: str = arrayopt.choice\('a', ...\)"
    ):
        Said(lr=1.0)

    @dataclass(frozen=True, kw_only=True)
    class Chosen(ao.SGD):
        mode: str = ao.choice("a", "b")

    assert Chosen(lr=1.0, mode="b").mode == "b"
    with pytest.raises(ValueError, match="`mode` must be 'a' or 'b'; got 'c'"):
        Chosen(lr=1.0, mode="c")
