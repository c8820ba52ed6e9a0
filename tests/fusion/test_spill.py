"""Recompute or spill: what a later pass needs of an earlier one comes from wherever fewer bytes are moved."""

import dataclasses
import itertools
import tracemalloc

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion.plans import plan_for
from arrayopt.fusion.simplify import Graph
from arrayopt.fusion.work import cheapest
from tests.support.cases import ALL, QUICK_ROWS, make
from tests.support.engines import each_compiled, each_fused
from tests.support.planning import agree, check, fused_and_written, zeros
from tests.support.tracing import made

SHAPES = ((3, 4), (7,), (20011,), (), (300, 257))
FIVE = ("a", "b", "c", "d", "e")


def norm(xp, x):
    return xp.sqrt(xp.sum(xp.real(x) ** 2 + xp.imag(x) ** 2)) + 1.0


def of_five(xp, p, g, s, h):
    """A direction made of five slots, over its norm."""
    new = {name: (0.9 - 0.1 * i) * s[name] + g for i, name in enumerate(FIVE)}
    u = sum(new.values())
    return p - h.lr * u / norm(xp, u), new


def two_of_five(xp, p, g, s, h):
    """Two directions made of five slots, each over its norm."""
    new = {name: (0.9 - 0.1 * i) * s[name] + g for i, name in enumerate(FIVE)}
    u = sum(new.values())
    w = xp.sqrt(1.0 + sum(x * x for x in new.values()))
    return p - h.lr * (u / norm(xp, u) + w / norm(xp, w)), new


def of_three(xp, p, g, s, h):
    """As in LAMB: a direction made of parameter and slots, of which the parameter is read anyway."""
    m, v = 0.9 * s["m"] + g, 0.9 * s["v"] + g * g
    u = m / xp.sqrt(1.0 + v) + 0.1 * p
    return p - h.lr * u / norm(xp, u), {"m": m, "v": v}


def shared_by_two(xp, p, g, s, h):
    """What two later passes need, each of which alone would read as much to compute it again."""
    u = g * s["a"]
    w = u / norm(xp, u)
    return p - h.lr * (u / norm(xp, w * w + u)), {"a": s["a"]}


def old_values(xp, p, g, s, h):
    """A later pass needs what the slots held before, all of it in one value."""
    old = s["a"] * s["b"] * s["c"]
    new = {name: 0.9 * s[name] + g for name in "abc"}
    return p - h.lr * old / norm(xp, sum(new.values())), new


def new_parameter(xp, p, g, s, h):
    """A later pass needs the new parameter, made of five slots."""
    new = {name: (0.9 - 0.1 * i) * s[name] + g for i, name in enumerate(FIVE)}
    q = p - h.lr * sum(new.values())
    return q, new | {"m": q / norm(xp, q)}


def two_numbers(xp, p, g, s, h):
    """A later pass needs the new parameter, made of the old one and the gradient."""
    new = p - h.lr * g
    return new, {"m": new * norm(xp, new)}


RULES = {
    "of_five": (of_five, zeros(*FIVE)),
    "two_of_five": (two_of_five, zeros(*FIVE)),
    "of_three": (of_three, zeros("m", "v")),
    "shared_by_two": (shared_by_two, zeros("a")),
    "old_values": (old_values, zeros(*"abc")),
    "new_parameter": (new_parameter, zeros(*FIVE, "m")),
}
PLANS = {
    "of_five": """\
pass 0: load g a b c d e; store a b c d e spill0; reduce per tensor; 48 B
pass 1: load p spill0; store p; reduce -; 12 B
60 bytes per float32 parameter, with scratch memory for spill0""",
    "two_of_five": """\
pass 0: load g a b c d e; store a b c d e spill0 spill1; reduce per tensor; 52 B
pass 1: load p spill0 spill1; store p; reduce -; 16 B
68 bytes per float32 parameter, with scratch memory for spill0 spill1""",
    "of_three": """\
pass 0: load p g m v; store m v; reduce per tensor; 24 B
pass 1: load p m v; store p; reduce -; 16 B
40 bytes per float32 parameter""",
    "shared_by_two": """\
pass 0: load g a; store spill0; reduce per tensor; 12 B
pass 1: load spill0; store -; reduce per tensor; 4 B
pass 2: load p spill0; store p; reduce -; 12 B
28 bytes per float32 parameter, with scratch memory for spill0""",
    "old_values": """\
pass 0: load g a b c; store a b c spill0; reduce per tensor; 32 B
pass 1: load p spill0; store p; reduce -; 12 B
44 bytes per float32 parameter, with scratch memory for spill0""",
    "new_parameter": """\
pass 0: load p g a b c d e; store p a b c d e; reduce per tensor; 52 B
pass 1: load p; store m; reduce -; 8 B
60 bytes per float32 parameter""",
}


def rule_of(name):
    update, slots = RULES.get(name) or (two_numbers, zeros("m"))
    return made(update, slots, complex_ok=True)()


@pytest.mark.parametrize("name", RULES)
def test_what_moves_fewer_bytes(name):
    plan = plan_for(rule_of(name), 2, "float32")
    check(plan)
    assert str(plan) == PLANS[name]


def test_a_parameter_of_few_bits_is_spilled_or_recomputed():
    """What is stored in 16 bits is not what was computed: it is spilled if made of five slots, else recomputed."""
    for name, scratch, loads in (("new_parameter", ["spill0"], ["spill0"]), ("two_numbers", [], ["p", "g"])):
        plan = plan_for(dataclasses.replace(rule_of(name), master_weights=False), 2, "bfloat16")
        check(plan)
        assert (list(plan.spilled), list(plan.passes[-1].loads)) == (scratch, loads)
        assert list(plan_for(rule_of(name), 2, "float32").passes[-1].loads) == ["p"]


@pytest.mark.parametrize("row", QUICK_ROWS)
def test_no_rule_that_is_shipped_needs_scratch_memory(row):
    for rank, dtype in itertools.product((1, 2, 3, 4), ("float32", "bfloat16")):
        assert plan_for(make(*ALL[row]), rank, dtype, clip=True, stats=True).spilled == {}


@each_fused
def test_scratch_memory_is_complex_where_the_value_is(engine):
    def update(xp, p, g, s, h):
        new = {name: (0.9 - 0.1 * i) * s[name] + g for i, name in enumerate(FIVE)}
        u = sum(new.values())
        size = xp.sqrt(sum(xp.real(x) ** 2 for x in new.values()))
        return p - h.lr * (u / norm(xp, u) + size / norm(xp, size)), new

    rule = made(update, zeros(*FIVE), complex_ok=True)()
    plan = plan_for(rule, 2, "complex64")
    assert sorted(node.kind for node in plan.spilled.values()) == ["complex", "real"]
    agree(rule, SHAPES, engine, "complex64", relative=1e-5)


@pytest.mark.parametrize("name", [name for name in RULES if name != "of_three"])
def test_spilled_values_with_numpy(name):
    agree(rule_of(name), SHAPES, "numpy")


@each_compiled
@pytest.mark.parametrize("name", ["two_of_five", "old_values"])
def test_spilled_values_that_are_compiled(engine, name):
    agree(rule_of(name), SHAPES, engine)


@each_fused
def test_a_spilled_parameter_is_not_rounded(engine):
    found, exact = fused_and_written(rule_of("new_parameter"), SHAPES, engine, "bfloat16", steps=1)
    for name, x in exact.items():
        found[name], x = (np.asarray(v, dtype=float) for v in (found[name], x))
        np.testing.assert_allclose(found[name], x, rtol=1e-2 if name[-1] == "p" else 1e-4, atol=1e-5)


@each_fused
def test_spilled_values_by_any_number_of_threads(engine, monkeypatch):
    """A tensor that all threads share, several that are one thread's each, and some small ones."""
    rng = np.random.default_rng(0)
    shapes = [(1_500_000,), *[(60_000 + i,) for i in range(5)], (3, 4), (7,)]
    params = {str(i): rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    grads = [{k: rng.standard_normal(p.shape).astype(np.float32) for k, p in params.items()} for _ in range(2)]
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setenv("ARRAYOPT_NUM_THREADS", str(threads))
        opt = ao.Optimizer({k: p.copy() for k, p in params.items()}, rule_of("two_of_five"), engine=engine)
        opt.step(grads[0])
        opt.step(grads[1] | {"0": None, "3": None})
        results.append([opt.params[k].tobytes() for k in params])
    assert results[0] == results[1] == results[2]


@each_fused
def test_scratch_memory_is_kept_from_step_to_step(engine, monkeypatch):
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "1")
    params, grads = np.ones(1 << 20, np.float32), np.ones(1 << 20, np.float32)
    opt = ao.Optimizer(params, rule_of("of_five"), engine=engine)
    opt.step(grads)
    tracemalloc.start()
    opt.step(grads)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < params.nbytes / 2  # some blocks


# ---- the cut --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_is_the_cheapest_of_all(seed):
    rng = np.random.default_rng(seed)
    graph = Graph()
    nodes = [graph.make("input", axes="C", data=f"x{i}") for i in range(3)]
    for _ in range(7):
        nodes.append(graph.make("add", *(nodes[i] for i in rng.choice(len(nodes), 2, replace=False))))
    nodes = list(dict.fromkeys(nodes))
    prices = {n: int(rng.integers(1, 4)) for n in nodes if n.op == "input" or rng.random() < 0.6}
    roots = list(dict.fromkeys(nodes[-2:]))

    def follows(chosen):
        known = set(chosen)
        for n in nodes:
            if n.args and known.issuperset(n.args):
                known.add(n)
        return known.issuperset(roots)

    subsets = (x for k in range(len(prices) + 1) for x in itertools.combinations(prices, k))
    least = min(sum(prices[n] for n in x) for x in subsets if follows(x))
    found = cheapest(roots, {n: list(n.args) for n in nodes}, prices)
    assert follows(found)
    assert sum(prices[n] for n in found) == least


def test_of_cuts_that_cost_the_same_the_one_nearest_to_the_roots_is_taken():
    graph = Graph()
    x = graph.make("input", axes="C", data="x")
    middle = graph.make("neg", x)
    root = graph.make("sqrt", middle)
    everything_costs_one = {x: 1, middle: 1, root: 1}
    args = {n: list(n.args) for n in everything_costs_one}
    assert cheapest([root], args, everything_costs_one) == [root]
    assert cheapest([root], args, {x: 1, middle: 1}) == [middle]
    assert cheapest([], args, {}) == []
