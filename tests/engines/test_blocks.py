"""Blocks: what the stretches of a tensor give one by one, in every engine, with everything around it."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import arrayopt as ao
import arrayopt.optax
import arrayopt.torch
from arrayopt import rules
from arrayopt.engines.array_api import apply
from arrayopt.engines.numpy.stacks import Ragged, Stack
from arrayopt.rules.fields import hypers
from arrayopt.state.blocks import Cut
from tests.support.engines import COMPILED, EVERY, SLOW, each_compiled, each_engine
from tests.support.optimizing import drawn
from tests.support.slow import PROFILE, settled

LENGTHS = (6, 6, 2, 4)
SHAPES = {"w": (18, 5), "b": (18,), "t": (18, 2, 3)}
RULES = {
    "LAMB": {"lr": 0.1},
    "CAME": {"lr": 0.1, "grad_centralization": True},
    "AdamW": {"lr": 0.1, "state_dtype": "int8", "ema_decay": 0.5},
    "SGD": {"lr": 0.1, "momentum": 0.9, "project": ao.projections.ball(1.5)},
}
MATRICES = {"Muon": {"lr": 0.1}, "SOAP": {"lr": 0.1, "precondition_frequency": 2}}
CALLS = 4


def arrays(seed=0, dtype="float64", shapes=SHAPES):
    return {name: drawn(shape, seed + i).astype(dtype) for i, (name, shape) in enumerate(shapes.items())}


def lengths(blocks, n):
    return blocks if isinstance(blocks, tuple) else (n // blocks,) * blocks


def apart(tree, blocks):
    """The blocks, each by itself."""
    found = {}
    for name, x in tree.items():
        ends = np.cumsum((0, *lengths(blocks, len(x)))).tolist()
        found |= {f"{name}[{i}]": np.array(x[lo:hi]) for i, (lo, hi) in enumerate(pairwise(ends))}
    return found


def both(kind, fields, blocks, *, dtype="float64", shapes=SHAPES, of=lambda g, call: g, **options):
    """A run with blocks, and one whose parameters are the blocks."""
    params = arrays(0, dtype, shapes)
    one = ao.Optimizer(params, kind(**fields, blocks=blocks), **options)
    other = ao.Optimizer(apart(params, blocks), kind(**fields), **options)
    for call in range(CALLS):
        grads = of(arrays(100 * call + 9, dtype, shapes), call)
        one.step(grads)
        split = {}
        for name, g in grads.items():
            parts = apart({name: params[name] if g is None else g}, blocks)
            split |= {key: None if g is None else x for key, x in parts.items()}
        other.step(split)
    return one, other


def same(one, other, blocks):
    """Whether parameters, slots and numbers of updates are, bit for bit."""
    for name, x in one.params.items():
        of_tensor = one.state[name]
        for i, part in enumerate(apart({name: x}, blocks).values()):
            own = other.state[f"{name}[{i}]"]
            assert np.array_equal(part, other.params[f"{name}[{i}]"])
            assert of_tensor["t"] == own["t"]
        for slot in set(of_tensor) - {"t"}:
            whole = [np.ravel(other.state[f"{name}[{i}]"][slot]) for i in range(len(lengths(blocks, len(x))))]
            assert np.array_equal(np.ravel(of_tensor[slot]), np.concatenate(whole)), slot


@each_engine
@pytest.mark.parametrize("blocks", [3, LENGTHS], ids=["equal", "unequal"])
@pytest.mark.parametrize("rule", RULES)
def test_as_the_blocks_one_by_one(rule, blocks, engine):
    def lacking(grads, call):
        return {**grads, "b": None} if call == 1 else grads

    options = {"engine": engine, "stats": True, "clip_norm": 2.0}
    one, other = both(getattr(ao, rule), RULES[rule], blocks, of=lacking, **options)
    same(one, other, blocks)
    assert one.stats.read() == other.stats.read()
    assert one.stats.global_norm == other.stats.global_norm
    assert all(one.state[name]["m" if rule != "SGD" else "buf"].shape == shape for name, shape in SHAPES.items())


@pytest.mark.parametrize("engine", ["array_api", "numpy"])
@pytest.mark.parametrize("rule", MATRICES)
def test_of_matrices(rule, engine):
    for blocks in (3, LENGTHS):
        same(*both(getattr(ao, rule), MATRICES[rule], blocks, shapes={"w": (18, 5)}, engine=engine), blocks)


@settled(12)
@given(
    name=st.sampled_from(sorted(set(rules.__all__) - {"Rule"})),
    cuts=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    engine=st.sampled_from([e for e in EVERY if e not in COMPILED or (PROFILE != "quick" and e not in SLOW)]),
    ranks=st.integers(1, 4),
    absent=st.none() | st.tuples(st.integers(0, 1), st.sampled_from(["w", "v"])),
    options=st.sampled_from([{}, {"accumulate": 2}, {"clip_norm": 0.3}, {"skip_nonfinite": True}]),
    dtype=st.sampled_from(["float32", "float64"]),
)
@example(name="CAME", cuts=[1, 1], engine="numpy", ranks=3, absent=None, options={}, dtype="float32")
@example(name="LAMB", cuts=[2, 1, 2, 2, 1], engine="array_api", ranks=2, absent=None, options={}, dtype="float64")
def test_any_rule_on_any_ranks(name, cuts, engine, ranks, absent, options, dtype):
    """Two calls that follow each other may lack the gradient of a tensor."""
    kind, blocks = getattr(ao, name), tuple(cuts)
    fields = {"lr": 0.1} if "lr" in hypers(kind) and name != "Adafactor" else {}
    shapes = {"w": (sum(cuts), 4), "v": (sum(cuts), 3)}

    def lacking(grads, call):
        return {key: None if (call // 2, key) == absent else g for key, g in grads.items()}

    options = {"engine": engine, "of": lacking, **options}

    def run(comm):
        one, other = both(kind, fields, blocks, dtype=dtype, shapes=shapes, comm=comm, **options)
        state = one.state_dict()
        for tensor, x in one.params.items():
            for i, part in enumerate(apart({tensor: x}, blocks).values()):
                assert np.array_equal(part, other.params[f"{tensor}[{i}]"])
        return {name: x.copy() for name, x in one.params.items()}, state["tensors"]["w"]["shape"]

    for params, shape in ao.ranks.run(ranks, run):
        assert shape == shapes["w"]
        for tensor, x in run(None)[0].items():
            assert np.array_equal(params[tensor], x)


def test_a_block_that_is_not_finite_skips_the_step_and_is_named():
    def bad(grads, call):
        if call == 2:
            grads["w"][7, 1] = np.nan
        return grads

    seen = []
    for blocks in (3, LENGTHS):
        params = arrays()
        opt = ao.Optimizer(params, ao.LAMB(lr=0.1, blocks=blocks), engine="numpy", skip_nonfinite=True)
        for call in range(3):
            opt.step(bad(arrays(9 + call), call))
        seen.append(opt.nonfinite())
        assert opt.stats.skipped == 1
        assert opt.state["w"]["t"] == 2
        assert opt.skipped_layers() == {}
    assert seen == [["w[1]"], ["w[1]"]]


def qkv(make, **fields):
    """A network's parameters, of which one is three matrices in one."""
    params = {"qkv": make(drawn((18, 5), 1)), "head": make(drawn((4, 5), 2))}
    grads = {"qkv": drawn((18, 5), 3), "head": drawn((4, 5), 4)}
    return params, grads


@pytest.fixture(scope="module")
def expected():
    params, grads = qkv(np.array)
    opt = ao.Optimizer(apart({"qkv": params["qkv"]}, LENGTHS), ao.LAMB(lr=0.1), engine="array_api")
    for _ in range(2):
        opt.step(apart({"qkv": grads["qkv"]}, LENGTHS))
    return np.concatenate(list(opt.params.values()))


def test_in_the_functional_form_under_jit_and_where_nothing_can_be_written(expected):
    rule, groups = ao.LAMB(lr=0.1), {"qkv": {"blocks": LENGTHS}}
    for make, call in ((np.asarray, lambda f: f), (jnp.asarray, jax.jit)):
        params, grads = qkv(make)
        state = rule.init(params, groups=groups)
        update = call(lambda p, g, s: ao.update(rule, p, g, s, groups=groups, stats=True))
        for _ in range(2):
            params, state, stats = update(params, {name: make(g) for name, g in grads.items()}, state)
        np.testing.assert_allclose(params["qkv"], expected, rtol=1e-6 if call is jax.jit else 1e-12)
        assert stats["qkv"]["trust_ratio"].shape == (4,)
        assert state["tensors"]["qkv"]["m"].shape == (18, 5)
    params, grads = qkv(np.array)
    params["qkv"].flags.writeable = False
    with pytest.warns(ao.NotFusedWarning, match="tensors with blocks only if they are writable in place"):
        opt = ao.Optimizer(params, rule, groups=groups, stats=True, skip_nonfinite=True)
    for _ in range(2):
        opt.step(grads)
    np.testing.assert_allclose(opt.params["qkv"], expected, rtol=1e-12)
    assert list(opt.stats) == ["qkv[0]", "qkv[1]", "qkv[2]", "qkv[3]", "head"]
    opt.step({**grads, "qkv": grads["qkv"] * np.where(np.arange(18) == 13, np.inf, 1.0)[:, None]})
    assert opt.nonfinite() == ["qkv[2]"]


def test_at_the_doors(expected):
    params, grads = qkv(lambda x: torch.nn.Parameter(torch.tensor(x)))
    groups = [
        {"params": [params["qkv"]], "rule": ao.LAMB, "lr": 0.1, "eps": 1e-6, "blocks": LENGTHS},
        {"params": [params["head"]]},
    ]
    opt = ao.torch.AdamW(groups)
    for _ in range(2):
        for name, p in params.items():
            p.grad = torch.tensor(grads[name])
        opt.step()
    np.testing.assert_allclose(params["qkv"].detach().numpy(), expected, rtol=1e-12)
    assert opt.state[params["qkv"]]["m"].shape == (18, 5)
    opt.param_groups[0]["blocks"] = 3
    with pytest.raises(ValueError, match="`blocks` cannot change while training: each layer or block has slots"):
        opt.step()

    made = ao.optax.transformation(ao.LAMB(lr=0.1, blocks=LENGTHS))
    p, g = (jnp.asarray(qkv(np.array)[i]["qkv"]) for i in range(2))
    state = made.init(p)
    for _ in range(2):
        changes, state = made.update(g, state, p)
        p = optax.apply_updates(p, changes)
    np.testing.assert_allclose(p, expected, rtol=1e-5)


def test_a_checkpoint_and_another_storage(tmp_path):
    """Of whole slots, whatever their shapes; the run goes on with the same bits."""
    for rule in (ao.CAME(lr=0.1, blocks=LENGTHS), ao.SOAP(lr=0.1, blocks=LENGTHS)):
        opts = [ao.Optimizer({"w": drawn((18, 5), 1)}, rule, engine=engine) for engine in ("numpy", "array_api")]
        opts[0].step({"w": drawn((18, 5), 2)})
        opts[0].save(tmp_path / "run.safetensors")
        opts[1].load(tmp_path / "run.safetensors")
        opts[1].params["w"][...] = opts[0].params["w"]
        for opt in opts:
            opt.step({"w": drawn((18, 5), 3)})
        np.testing.assert_allclose(opts[0].params["w"], opts[1].params["w"], rtol=1e-12)
        with pytest.raises(ValueError, match=r"rule had blocks=\[6, 6, 2, 4\], here 3"):
            ao.Optimizer({"w": drawn((18, 5), 1)}, type(rule)(lr=0.1, blocks=3)).load(tmp_path / "run.safetensors")
    opt = ao.Optimizer({"w": drawn((18, 5), 1)}, ao.AdamW(lr=0.1, blocks=LENGTHS), engine="numpy")
    alone = ao.Optimizer(apart({"w": drawn((18, 5), 1)}, LENGTHS), ao.AdamW(lr=0.1), engine="numpy")
    for storage in (None, "int8", "bfloat16", None):
        opt.state_dtype = alone.state_dtype = storage
        g = drawn((18, 5), 2)
        opt.step({"w": g})
        alone.step(apart({"w": g}, LENGTHS))
        same(opt, alone, LENGTHS)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (0, "LAMB: `blocks` must be at least 1; got 0"),
        ((3, 0), r"LAMB: `blocks`\[1\] must be at least 1; got 0"),
        ((), "`blocks` must be a number of blocks, or the length of each"),
        ("qkv", "`blocks` must be an integer; got 'qkv'"),
        (
            (7, 6),
            r"LAMB: `blocks=\(7, 6\)` cannot divide 'w', of shape \(12, 5\): it has 12 along .* add up to 13; use",
        ),
        (
            5,
            r"`blocks=5` cannot divide 'w', of shape \(12, 5\): it has 12 along the first axis, .* 5 does not divide",
        ),
    ],
)
def test_blocks_that_cannot_be(blocks, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ao.Optimizer({"w": np.ones((12, 5))}, ao.LAMB(blocks=blocks))


def test_tensors_that_have_no_blocks():
    with pytest.raises(ValueError, match=r"`blocks=3` cannot divide 'number', of shape \(\): it has no axis"):
        ao.Optimizer({"number": np.array(1.0)}, ao.LAMB(blocks=3))
    with pytest.raises(ValueError, match=r"Muon: a block of 'w', of shape \(4,\), is not a matrix"):
        ao.Optimizer({"w": np.ones(12)}, ao.Muon(lr=0.1, blocks=3))
    with pytest.raises(ValueError, match="`stacked` and `blocks` both define the first axis"):
        ao.LAMB(blocks=3, stacked=True)
    for name in ("array_api", "numpy"):
        empty = {"none": np.zeros((0, 3)), "empty": np.zeros((6, 0)), "w": np.ones((6, 2))}
        opt = ao.Optimizer(empty, ao.LAMB(lr=0.1, blocks=3), engine=name)
        opt.step({key: np.ones_like(x) for key, x in empty.items()})
        assert [opt.state[key]["t"] for key in empty] == [1, 1, 1]


def test_what_a_plan_says_of_blocks():
    opt = ao.Optimizer({"w": np.ones((18, 5)), "b": np.ones(18)}, ao.LAMB(lr=0.1, blocks=LENGTHS), engine="numpy")
    assert "2 tensors of 8 blocks, 108 parameters" in opt.explain()
    assert "blocks=(6, 6, 2, 4)" in opt.explain()


@each_compiled
def test_compiled_engines_are_told_where_blocks_lie(engine, monkeypatch):
    """They cut no gradient, which takes longer than the step if there are many blocks."""
    opt = ao.Optimizer(arrays(), ao.LAMB(lr=0.1, blocks=LENGTHS), engine=engine)
    opt.step(arrays(9))
    monkeypatch.setattr(Cut, "parameter", None)
    opt.step({**arrays(10), "b": None})
    assert [opt.state[name]["t"] for name in SHAPES] == [2, 1, 2]


def test_a_block_without_equals_beside_it_is_updated_as_a_tensor(monkeypatch):
    """That is quicker than as a stack of one."""
    seen, one = [], apply.apply_one

    def recorded(*args, together=False, **options):
        seen.append(together)
        return one(*args, together=together, **options)

    monkeypatch.setattr(apply, "apply_one", recorded)
    ao.Optimizer(np.ones(18), ao.LAMB(blocks=LENGTHS), engine="array_api").step(np.ones(18))
    assert seen == [True, False, False]
    seen.clear()
    ao.Optimizer(np.ones(18), ao.LAMB(blocks=(2, 3) * 3 + (3,)), engine="array_api").step(np.ones(18))
    assert seen == [True, True]  # those of one length at once, wherever they lie


def test_blocks_of_many_lengths_are_worked_through_together(monkeypatch):
    """As many tensors of these lengths are, and not one after the other."""
    lengths = tuple(3 + i % 3 for i in range(300))
    x = np.random.default_rng(0).standard_normal(sum(lengths))
    each = {str(i): part.copy() for i, part in enumerate(np.split(x, np.cumsum(lengths)[:-1]))}
    runs = []
    for kind in (Stack, Ragged):
        monkeypatch.setattr(kind, "run", lambda self, *args, run=kind.run: runs.append(self) or run(self, *args))

    def count(params, blocks):
        opt = ao.Optimizer(params, ao.LAMB(blocks=blocks), engine="numpy")
        runs.clear()
        opt.step({name: 2 * p for name, p in params.items()})
        return len({id(x) for x in runs}), np.concatenate([*opt.params.values()])

    (whole, made), (apart, expected) = count({"w": x.copy()}, lengths), count(each, None)
    assert whole <= apart <= 3
    np.testing.assert_array_equal(made, expected)
