"""Prodigy beside a witness in double precision, with the sums over all tensors; and beside prodigyopt's numbers."""

import math

import numpy as np
import pytest

import arrayopt as ao
from tests.support.engines import EVERY, STAND_IN, each_engine
from tests.support.slow import marked

SHAPES = {"w": (4, 3), "b": (5,), "t": (2, 2, 2)}
STEPS = 12
DEFAULTS = {"lr": 1.0, "beta1": 0.9, "beta2": 0.999, "beta3": None, "eps": 1e-8, "weight_decay": 0.0}
DEFAULTS |= {"d0": 1e-6, "d_coef": 1.0, "growth_rate": None, "decouple": True, "bias_correction": False}
DEFAULTS |= {"safeguard_warmup": False}
OPTIONS = [
    {},
    {"lr": 0.5, "d_coef": 2.0, "weight_decay": 0.1, "d0": 1e-3},
    {"growth_rate": 1.1, "bias_correction": True},
    {"lr": 0.3, "safeguard_warmup": True, "decouple": False, "weight_decay": 0.2, "beta3": 0.99, "d0": 1e-3},
    {"d0": 1e-2, "grad_centralization": True},  # whose means per row go on to what follows the sums
]


def start():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


def gradients(params):
    """Those of a sum of squares, each tensor with a scale and a goal of its own."""
    return {name: (x - i - 1) * (1 + i) for i, (name, x) in enumerate(params.items())}


class Witness:
    """Algorithm 4 of the paper with the authors' switches, over dicts of arrays in double precision."""

    def __init__(self, params, options):
        self.h = DEFAULTS | options
        self.p = {name: x.astype(np.float64) for name, x in params.items()}
        self.first = {name: x.copy() for name, x in self.p.items()}
        self.m, self.v, self.s = ({name: 0.0 * x for name, x in self.p.items()} for _ in range(3))
        self.num, self.t = dict.fromkeys(self.p, 0.0), dict.fromkeys(self.p, 0)
        self.d, self.most = dict.fromkeys(self.p, self.h["d0"]), dict.fromkeys(self.p, self.h["d0"])

    def step(self, grads):
        h, d0 = self.h, self.h["d0"]
        beta3 = math.sqrt(h["beta2"]) if h["beta3"] is None else h["beta3"]
        took = [name for name in self.p if grads[name] is not None]
        rates = {}
        for name in took:
            p, d = self.p[name], self.d[name]
            g = grads[name] + (0.0 if h["decouple"] else h["weight_decay"] * p)
            if h.get("grad_centralization") and g.ndim > 1:
                g = g - g.mean(axis=tuple(range(1, g.ndim)), keepdims=True)
            self.t[name] += 1
            rate = d * h["lr"]
            if h["bias_correction"]:
                rate *= math.sqrt(1 - h["beta2"] ** self.t[name]) / (1 - h["beta1"] ** self.t[name])
            rates[name] = rate
            self.num[name] = beta3 * self.num[name] + d / d0 * rate * float(np.sum(g * (self.first[name] - p)))
            weight = d / d0 * (d if h["safeguard_warmup"] else rate)
            self.s[name] = beta3 * self.s[name] + weight * g
            self.m[name] = h["beta1"] * self.m[name] + (1 - h["beta1"]) * d * g
            self.v[name] = h["beta2"] * self.v[name] + (1 - h["beta2"]) * (d * g) ** 2
        below = sum(float(np.abs(self.s[name]).sum()) for name in took)
        if not took or below == 0:
            return
        found = h["d_coef"] * sum(self.num[name] for name in took) / below
        largest = max(self.d[name] for name in took)
        most = max(found, *(self.most[name] for name in took))
        new = max(largest, found) if largest == d0 else largest
        new = most if h["growth_rate"] is None else min(most, new * h["growth_rate"])
        for name in took:
            u = self.m[name] / (np.sqrt(self.v[name]) + new * h["eps"])
            u = u + (h["weight_decay"] * self.p[name] if h["decouple"] else 0.0)
            self.p[name] = self.p[name] - rates[name] * u
            self.d[name], self.most[name] = new, most


@pytest.mark.parametrize(
    ("engine", "row"), marked([(e, i) for e in EVERY for i in range(len(OPTIONS))], lambda e, i: i == 1 or e == "numpy")
)
def test_engines_agree_with_the_witness(engine, row):
    options, params = OPTIONS[row], start()
    witness = Witness(params, options)
    opt = ao.Optimizer(params, ao.Prodigy(**options), engine=engine, stats=True)
    for k in range(STEPS):
        grads = gradients(witness.p)
        if k in (3, 4):
            grads["b"] = None
        opt.step(grads)
        witness.step(grads)
        assert float(opt.stats["w"]["d"]) == pytest.approx(witness.d["w"], rel=1e-9)
    for name, x in witness.p.items():
        np.testing.assert_allclose(params[name], x, rtol=1e-9, err_msg=name)
        assert float(opt.state[name]["num"]) == pytest.approx(witness.num[name], rel=1e-6)


PRODIGYOPT = {  # d after 12 steps of prodigyopt 1.1.2 on the same problem, in float64; and the first parameter's sum
    0: (0.025614969106411232, 1.0035992514782905),
    1: (1.4688724717913872, 13.028091546007444),
    2: (2.724268202103428e-06, 0.265040020613053),
    3: (0.005767294931349559, 0.5442866312592636),
}


@pytest.mark.parametrize("row", sorted(PRODIGYOPT))
def test_the_numbers_of_prodigyopt(row):
    params = start()
    opt = ao.Optimizer(params, ao.Prodigy(**OPTIONS[row]), engine="array_api", stats=True)
    for _ in range(STEPS):
        opt.step(gradients(params))
    d, total = PRODIGYOPT[row]
    assert float(opt.stats["w"]["d"]) == pytest.approx(d, rel=1e-9)
    assert float(params["w"].sum()) == pytest.approx(total, rel=1e-9)


def test_prodigyopt_itself():
    torch, theirs = pytest.importorskip("torch"), pytest.importorskip("prodigyopt").Prodigy
    params = start()
    tensors = [torch.nn.Parameter(torch.tensor(x)) for x in params.values()]
    opt, other = ao.Optimizer(params, ao.Prodigy()), theirs(tensors)
    for _ in range(STEPS):
        for x, g in zip(tensors, gradients(params).values(), strict=True):
            x.grad = torch.tensor(g)
        opt.step(gradients(params))
        other.step()
    for x, y in zip(params.values(), tensors, strict=True):
        np.testing.assert_allclose(x, y.detach().numpy(), rtol=1e-9)


@each_engine
def test_without_a_gradient_nothing_moves(engine):
    params = start()
    opt = ao.Optimizer(params, ao.Prodigy(), engine=engine)
    opt.step({name: np.zeros(shape) for name, shape in SHAPES.items()})
    for name, x in start().items():
        np.testing.assert_array_equal(params[name], x)
        assert float(opt.state[name]["ratio"]) == 1.0


def test_bytes_are_what_the_page_says():
    assert "48 bytes per float32 parameter" in ao.Optimizer(np.ones(3, "f4"), ao.Prodigy(), engine=STAND_IN).explain()
