"""The Optimizer: hooks, statistics, and what it says of itself."""

import copy
import re
from dataclasses import dataclass
from itertools import pairwise

import array_api_compat
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.support.engines import CHOICES, SLOW
from tests.support.optimizing import BASE, GRADS, HALF, P, drawn, norm, ones
from tests.support.slow import marked

pytestmark = pytest.mark.usefixtures("auto")


def test_hooks_before_and_after_a_step():
    calls = []
    opt = ao.Optimizer({"w": ones()}, HALF)

    def doubled(o, grads):
        calls.append(("before", o.step_count, o.params["w"][0], grads["w"][0]))
        return {"w": grads["w"] * 2}

    remove = [
        opt.before_step(doubled),
        opt.before_step(lambda o, grads: calls.append(("second", grads["w"][0]))),  # None: the gradients stay
        opt.after_step(lambda o: calls.append(("after", o.step_count, o.params["w"][0]))),
    ]
    opt.step({"w": ones()})
    assert calls == [("before", 0, 1.0, 1.0), ("second", 2.0), ("after", 1, 0.0)]
    remove[0]()
    opt.step({"w": ones()})
    assert calls[3:] == [("second", 1.0), ("after", 2, -0.5)]
    for take_away in remove * 2:  # twice does no harm
        take_away()
    opt.step({"w": ones()})
    assert len(calls) == 5


def test_a_hook_given_twice_is_called_twice_and_removed_once_for_each():
    calls = []
    opt = ao.Optimizer(ones(), HALF)
    first = opt.after_step(calls.append)
    opt.after_step(calls.append)
    first()
    first()
    opt.step(ones())
    assert calls == [opt]


def test_a_hook_may_set_fields_remove_itself_and_veto():
    opt = ao.Optimizer(ones(), HALF)
    remove = opt.before_step(lambda o, grads: (setattr(o, "lr", 0.25), remove())[0])
    opt.step(ones())
    opt.lr = 1
    opt.step(ones())
    assert opt.params[0] == -0.25

    def veto(o, grads):
        raise ZeroDivisionError

    opt.before_step(veto)
    with pytest.raises(ZeroDivisionError):
        opt.step(ones())
    assert (opt.step_count, opt.params[0]) == (2, -0.25)


def test_stats_are_off_by_default():
    opt = ao.Optimizer({"w": ones()}, ao.LAMB())
    opt.step({"w": ones()})
    assert "off" in repr(opt.stats)
    for read in (opt.stats.read, lambda: opt.stats["w"], lambda: list(opt.stats), lambda: len(opt.stats)):
        with pytest.raises(RuntimeError, match="stats=True"):
            read()


@pytest.mark.parametrize(
    "backend", marked([(place,) for place in CHOICES], lambda place: place.partition(":")[2] not in SLOW), indirect=True
)
def test_stats_are_the_norms_and_ratios_of_the_last_step(backend):
    p, g = {"w": drawn((3, 2), 1), "b": drawn((3,), 2)}, {"w": drawn((3, 2), 3), "b": drawn((3,), 4)}
    opt = ao.Optimizer(
        {name: backend.array(x, "float64") for name, x in p.items()},
        ao.LAMB(lr=0.1, weight_decay=0.2),
        groups={"b": {"adapt": False}},
        stats=True,
    )
    assert (opt.stats.read(), len(opt.stats)) == ({}, 0)
    result = opt.step({name: backend.array(x, "float64") for name, x in g.items()})
    read = opt.stats.read()
    for name, x in p.items():
        # at t = 1 the corrected moments are g and g²
        u = g[name] / (np.abs(g[name]) + 1e-6) + 0.2 * x
        ratio = norm(x) / norm(u) if name == "w" else 1.0
        np.testing.assert_allclose(backend.numpy(result[name]), x - 0.1 * ratio * u, rtol=1e-12, atol=1e-12)
        expected = {"param_norm": norm(x), "grad_norm": norm(g[name]), "update_norm": 0.1 * ratio * norm(u)}
        assert read[name] == pytest.approx({"trust_ratio": ratio, **expected}, rel=1e-12)
        assert all(type(x) is float for x in read[name].values())
        assert array_api_compat.is_array_api_obj(opt.stats[name]["param_norm"])
        assert opt.stats[name]["param_norm"].shape == ()
    opt.step({"w": backend.array(g["w"], "float64"), "b": None})
    assert list(opt.stats) == ["w"]
    assert opt.stats.read()["w"]["param_norm"] == pytest.approx(norm(backend.numpy(result["w"])), rel=0.2)


RATIOS = {"LAMB": {"trust_ratio"}, "LANS": {"trust_ratio", "trust_ratio_grad"}, "LARS": {"trust_ratio"}}


@pytest.mark.parametrize("rule", BASE)
def test_every_rule_has_norms_and_those_that_adapt_their_ratios(rule, auto):
    opt = ao.Optimizer({"w": P.copy(), "empty": np.zeros((0, 3))}, getattr(ao, rule)(**BASE[rule]), stats=True)
    opt.step({"w": GRADS[0], "empty": np.zeros((0, 3))})
    assert {name: set(report) for name, report in opt.stats.read().items()} == {
        "w": {"param_norm", "grad_norm", "update_norm"} | RATIOS.get(rule, set())
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_reports_are_in_the_order_of_the_tensors(ranks):
    def train(comm):
        shapes = {"a": (2,), "b[0]": (), "stack": (3, 2), "c": (4,), "empty": (0,), "b": (2,)}
        dtypes = {"a": "f8", "c": "f8"}
        params = {name: np.ones(shape, dtypes.get(name, "f4")) for name, shape in shapes.items()}
        groups = {"stack": {"stacked": True}, "b": {"lr": 1.0, "momentum": 0.5}}
        opt = ao.Optimizer(params, ao.SGD(lr=0.1), groups=groups, stats=True, comm=comm)
        opt.step({name: np.ones_like(p) for name, p in params.items()})
        return list(opt.stats)

    found = [train(None)] if ranks == 1 else ao.ranks.run(ranks, train)
    assert found == [["a", "b[0]", "stack[0]", "stack[1]", "stack[2]", "c", "b"]] * ranks


def test_ratios_of_lars_and_lans_by_hand():
    p, g = np.asarray([3.0, 4.0]), np.asarray([0.6, 0.8])
    opt = ao.Optimizer(p.copy(), ao.LARS(lr=1.0, trust_coefficient=0.1, weight_decay=0.2), stats=True)
    opt.step(g)
    assert opt.stats.read()["param"]["trust_ratio"] == pytest.approx(0.1 * 5 / (1 + 0.2 * 5))
    opt = ao.Optimizer(p.copy(), ao.LANS(weight_decay=0.0, eps=1e-9, beta2=0.0), stats=True)
    opt.step(g)  # u_m = u_g = (1, 1)
    read = opt.stats.read()["param"]
    assert (read["trust_ratio"], read["trust_ratio_grad"]) == (pytest.approx(5 / 2**0.5), pytest.approx(5 / 2**0.5))
    opt = ao.Optimizer(np.zeros(2), ao.LARS(lr=1.0), stats=True)
    opt.step(g)
    assert opt.stats.read()["param"] == pytest.approx(
        {"trust_ratio": 1, "param_norm": 0, "grad_norm": 1, "update_norm": 1}
    )


def test_explain_tells_the_engine_and_the_tensors_of_each_bucket():
    params = {"w": ones((2, 3)), "b": ones((3,)), "half": np.ones(5, "float16"), "t": torch.ones(7), "u": ones((4,))}
    groups = {"b": {"lr": 0.25}, "u": {"adapt": False}}
    opt = ao.Optimizer(params, ao.LAMB(), groups=groups, engine="array_api")
    lines = [line.strip() for line in opt.explain().splitlines()]
    rules = [line.partition(": ")[::2] for line in lines if "LAMB(" in line]
    assert sorted(label for label, _ in rules) == ["b", "rest", "u"]  # each rule, once
    assert "lr=0.25" in dict(rules)["b"]
    assert "adapt=False" in dict(rules)["u"]
    buckets = {line: after for line, after in pairwise(lines) if re.match(r"\d+ tensors?, ", line)}
    assert set(buckets) == {
        "2 tensors, 9 parameters, float64, numpy on cpu, of b, rest",
        "1 tensor, 5 parameters, float16, numpy on cpu, of rest",
        "1 tensor, 7 parameters, float32, torch on cpu, of rest",
        "1 tensor, 4 parameters, float64, numpy on cpu, of u",
    }
    assert all(after.startswith("engine array_api (asked for): ") for after in buckets.values())
    assert "engine array_api (" in ao.Optimizer({"t": jnp.ones(2)}, ao.LAMB()).explain()


def test_repr_tells_the_rule_the_sizes_the_step_and_the_groups():
    opt = ao.Optimizer({"w": ones((2, 3)), "b": ones((3,))}, HALF)
    opt.step({"w": ones((2, 3)), "b": ones((3,))})
    assert repr(opt) == f"Optimizer({HALF!r}, 2 tensors, 9 parameters, step 1)"
    grouped = repr(ao.Optimizer({"w": ones((2, 3)), "b": ones((3,))}, HALF, groups={"b": {"lr": 1, "nesterov": False}}))
    assert grouped.splitlines()[1:] == [
        "  Group('b', 1 tensor, 3 parameters, lr=1.0, nesterov=False)",
        "  Group('rest', 1 tensor, 6 parameters)",
    ]


@pytest.mark.parametrize("engine", ["array_api", "auto"])
@pytest.mark.parametrize(("shape", "stacked"), [((2,), True), ((), False), ((2, 3), True), ((3, 2), False)])
def test_one_value_is_a_statistic_whatever_its_shape(engine, shape, stacked):
    @dataclass(frozen=True, kw_only=True)
    class Told(ao.Rule):
        def slots(self, xp, p):
            return {"n": xp.sum(xp.zeros_like(p))}

        def update(self, xp, p, g, s, h):
            return p - g, {"n": s["n"] + 1.0, "prev": s["n"], "kept": xp.sum(g, keepdims=True)}

    opt = ao.Optimizer({"w": np.ones(shape)}, Told(stacked=stacked), engine=engine, stats=True)
    for _ in range(2):
        opt.step({"w": np.ones(shape)})
    found = opt.stats.read()
    each = int(np.prod(shape[1:] if stacked else shape))
    assert found
    for one in found.values():
        assert (one["prev"], one["kept"]) == (1.0, each)


def test_skipped_steps_are_known_after_a_load():
    opt, other = (ao.Optimizer({"w": np.ones(2)}, ao.SGD(lr=0.1), skip_nonfinite=True) for _ in range(2))
    opt.step({"w": np.full(2, np.nan)})
    other.load_state_dict(opt.state_dict())
    assert other.stats.skipped == copy.deepcopy(other).stats.skipped == 1
