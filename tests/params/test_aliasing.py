"""A gradient that shares memory with what a step writes is refused, with both names, before anything is written."""

import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.fusion.plans import plan_for
from arrayopt.params import aliasing, located, watch
from arrayopt.params.aliasing import WrittenMemory
from arrayopt.state.tensors import Tensor
from tests.support.cases import CASES, MATRICES
from tests.support.cases import make as rule_of
from tests.support.engines import EVERY, SLOW, TORCH, each_engine, each_of_torch
from tests.support.refusals import raises
from tests.support.tracing import made as made_rule

MAKES = {"numpy": lambda n: np.ones(n), "torch": lambda n: torch.ones(n, dtype=torch.float64)}
each_make = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
WORDS = "Optimizer.step: a gradient must not share memory with what the step writes; "


def holds(opt):
    """All numbers of an optimizer."""
    slots = [x for state in opt.state.values() for name, x in state.items() if name != "t"]
    return [opt.step_count, *(x.tolist() for x in [*opt.params.values(), *slots])]


def refused(opt, grads, *words):
    before = holds(opt)
    raises(lambda: opt.step(grads), ValueError, WORDS, *words)
    assert holds(opt) == before


def made(make, engine, count=2):
    """An optimizer whose parameters lie in one room, two elements apart; and that room."""
    if engine not in TORCH and make is MAKES["torch"]:
        pytest.skip("the engine does not take tensors of PyTorch")
    room = make(8 * count)
    params = {f"w{i}": room[8 * i : 8 * i + 6] for i in range(count)}
    return ao.Optimizer(params, ao.SGD(lr=0.5, momentum=0.5), engine=engine), room


@each_make
@each_engine
def test_a_gradient_in_a_parameter(make, engine):
    opt, room = made(make, engine)
    good = {"w0": make(6), "w1": make(6)}
    refused(opt, good | {"w1": room[:6]}, "the gradient of 'w1' does with 'w0'; ")
    opt.step(good)
    refused(opt, good | {"w0": room[3:9]}, "'w0' does with 'w0', the gradient of 'w0' does with 'w1'")
    refused(opt, good | {"w0": None, "w1": room[5:11]}, "'w1' does with 'w0', the gradient of 'w1' does with 'w1'")
    opt.step(good)
    assert opt.step_count == 2


@each_of_torch
def test_a_gradient_of_many_whose_storage_was_freed(engine):
    opt, _ = made(MAKES["torch"], engine, 20)
    good = {name: torch.ones(6, dtype=torch.float64) for name in opt.params}
    opt.step(good)
    gone = torch.ones(8, dtype=torch.float64)[1:7]
    gone.untyped_storage().resize_(0)
    before = holds(opt)
    raises(lambda: opt.step(good | {"w1": gone}), ValueError, "Optimizer.step: ", "'w1' is a tensor without memory")
    assert holds(opt) == before


def _early(xp, p, g, s, h):
    """The new parameter is known before all else that the gradient is read for, in the first pass and in the last."""
    return p - h.lr * g, {"k": 0.9 * s["k"] + g, "m": 0.9 * s["m"] + g / xp.sqrt(xp.sum(g * g))}


SEVERAL = {name: rule_of(name, rows[0]) for name, rows in CASES.items()} | {
    "a projection": ao.AdamW(lr=0.1, project=ao.projections.ball(1.0)),
    "lookahead": ao.SGD(lr=0.1, momentum=0.9, lookahead_steps=2, ema_decay=0.5),
    "early": made_rule(_early, lambda xp, p: {"k": xp.zeros_like(p), "m": xp.zeros_like(p)})(),
}


@pytest.mark.parametrize(
    ("rule", "engine"),
    [
        pytest.param(x, e, id=f"{n}-{e}", marks=pytest.mark.slow if e in SLOW else ())
        for n, x in SEVERAL.items()
        for e in EVERY
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_gradient_may_be_its_own_parameter(rule, engine, dtype):
    """As that of p² / 2 is."""
    opts = [ao.Optimizer(np.linspace(-1, 1, 24).reshape(4, 6).astype(dtype), rule, engine=engine) for _ in range(2)]
    for _ in range(3):
        opts[0].step(opts[0].params)
        opts[1].step(opts[1].params.copy())
    near = {"rtol": 1e-6 if dtype == "float32" else 0}
    np.testing.assert_allclose(*(x.params.astype(float) for x in opts), **near)
    for slot in opts[0].state["param"]:
        np.testing.assert_allclose(*(np.asarray(x.state["param"][slot], float) for x in opts), **near, err_msg=slot)


def test_no_pass_reads_a_gradient_after_one_that_writes_the_parameter():
    """Else a gradient could not be its own parameter."""
    for name, rows in (CASES | MATRICES).items():
        for row in rows:
            for stats in (False, True):
                plan = plan_for(rule_of(name, row), 2, "float32", shape=(4, 6), stats=stats)
                writes = [k for k, p in enumerate(plan.passes) if "p" in p.stores]
                assert all("g" not in p.loads for k in writes for p in plan.passes[k + 1 :])


@each_make
@each_engine
def test_gradients_that_are_absent_now_and_then(make, engine):
    """Those of one step are compared anew in the next, where others are there."""
    opt, room = made(make, engine)
    good = {"w0": make(6), "w1": make(6)}
    opt.step(good)
    for absent, there in (("w0", "w1"), ("w1", "w0")) * 2:
        opt.step(good | {absent: None})
        refused(opt, good | {absent: None, there: room[3:9]}, f"the gradient of '{there}' does with 'w0'")
        opt.step(good | {absent: None})
    refused(opt, good | {"w1": room[:6]}, "the gradient of 'w1' does with 'w0'; ")
    opt.step(good)
    assert opt.step_count == 10


@pytest.mark.parametrize("count", [2, 40])
def test_a_gradient_that_is_its_own_parameter_turned(count):
    """It lies in the same place, in one piece."""
    params = {f"w{i}": np.linspace(1, 2, 9).reshape(3, 3) for i in range(count)}
    opt = ao.Optimizer(params, ao.SGD(lr=0.5), engine="numpy")
    for _ in range(2):
        opt.step(params)
    refused(opt, params | {"w1": params["w1"].T}, "the gradient of 'w1' does with 'w1'; ")
    refused(opt, params | {"w0": None, "w1": params["w1"].T}, "the gradient of 'w1' does with 'w1'; ")
    opt.step(params)


@pytest.mark.parametrize("count", [20, aliasing.FEW])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_what_is_known_of_each_gradient_holds_whichever_are_absent(make, count):
    opt, room = made(make, "array_api", count)
    good, free = {f"w{i}": make(6) for i in range(count)}, make(12)
    opt.step(good)
    for k in range(count):
        without = {f"w{k}": None}
        last = f"w{(k + 1) % count}"
        opt.step(good | without)
        refused(opt, good | without | {last: room[2:8]}, f"the gradient of {last!r} does with 'w0'")
        opt.step(good | without | {last: free[::2]})
        refused(opt, good | without | {last: room[:12:2]}, f"the gradient of {last!r} does with 'w0'")
        opt.step(good | without | {last: make(6)})
    opt.step(good)


@each_make
@each_engine
def test_a_gradient_in_a_slot(make, engine):
    opt, _ = made(make, engine)
    good = {"w0": make(6), "w1": make(6)}
    (slot,) = [x for x in opt.state["w0"] if x != "t"]
    refused(opt, good | {"w1": opt.state["w0"][slot]}, f"the gradient of 'w1' does with slot {slot!r} of 'w0'")
    opt.step(good)


@each_make
@each_engine
def test_what_lies_beside_and_between_is_apart(make, engine):
    room = make(48)
    opt = ao.Optimizer({"a": room[:24:2], "b": room[24::2]}, ao.SGD(lr=1.0), engine="array_api")
    opt.step({"a": room[1:24:2], "b": room[25::2]})
    opt.step({"a": room[1:24:2], "b": room[1:24:2]})  # gradients may share memory with each other
    refused(opt, {"a": room[1:24:2], "b": room[:12]}, "'b' does with 'a'")
    assert room.tolist() == [-1.0, 1.0] * 24


@each_make
@pytest.mark.parametrize("count", [2, aliasing.FEW, aliasing.FEW + 1, 40])
def test_gradients_that_lie_elsewhere_in_each_step(make, count):
    opt, room = made(make, "array_api", count)
    for i in range(4):
        grads = {f"w{j}": make(6) for j in range(count)}
        opt.step(grads)
        opt.step(grads)
        bad = f"w{i % count}"
        refused(opt, grads | {bad: room[6:12]}, f"the gradient of {bad!r} does with 'w1'; ")
        refused(opt, grads | {bad: room[12:6:-1] if make is MAKES["numpy"] else room[1:13:2]}, repr(bad))
        opt.step(grads)


@pytest.mark.parametrize("count", [1, 20])
def test_the_same_arrays_that_lie_elsewhere(count):
    opt, room = made(MAKES["torch"], "array_api", count)
    grads = {f"w{j}": torch.ones(6, dtype=torch.float64) for j in range(count)}
    opt.step(grads)
    grads["w0"].data = room[1:7]
    refused(opt, grads, "'w0' does with 'w0'")
    grads["w0"].data = room.new_ones(6)
    opt.step(grads)


@pytest.mark.parametrize("count", [1, 20])
def test_parameters_that_lie_elsewhere(count):
    opt, _ = made(MAKES["numpy"], "numpy", count)
    grads = {f"w{j}": np.ones(6) for j in range(count)}
    opt.step(grads)
    opt.params["w0"] = grads["w0"]
    refused(opt, grads | {"w0": grads["w0"][::-1]}, "'w0' does with 'w0'")
    opt.step(grads | {"w0": np.ones(6)})
    more = np.ones(3)
    opt.add_group({"more": more})
    refused(opt, grads | {"w0": np.ones(6), "more": more[::-1]}, "'more' does with 'more'")
    opt.load_state_dict(opt.state_dict())
    refused(opt, grads | {"w0": opt.state["w0"]["buf"], "more": np.ones(3)}, "slot 'buf' of 'w0'")


def test_what_is_not_written_may_be_shared():
    w = np.ones(6)
    w.flags.writeable = False
    assert ao.Optimizer(w, ao.SGD(lr=0.5), engine="array_api").step(w).tolist() == [0.5] * 6
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.ones(6)
    opt = ao.Optimizer(x, ao.SGD(lr=0.5))
    assert opt.step(x).tolist() == [0.5] * 6
    known = opt._parameters._matcher._written
    assert opt.step(x).tolist() == [0.0] * 6
    assert opt._parameters._matcher._written is known  # though there are other arrays now
    w = np.ones(6)
    w.flags.writeable = False
    opt = ao.Optimizer(w, ao.SGD(lr=0.5), engine="array_api")
    w = opt.step(w)
    raises(lambda: opt.step(w[::-1]), ValueError, WORDS)


def test_libraries_share_memory_too():
    w, t = np.ones(4), torch.ones(4, dtype=torch.float64)
    opt = ao.Optimizer({"a": w, "b": t}, ao.SGD(lr=1.0), engine="array_api")
    refused(opt, {"a": t.numpy(), "b": torch.ones_like(t)}, "'a' does with 'b'")
    refused(opt, {"a": np.ones(4), "b": torch.from_numpy(w)}, "'b' does with 'a'")
    opt.step({"a": np.ones(4), "b": torch.ones_like(t)})


def test_masters_and_launch():
    w = torch.ones(4, dtype=torch.bfloat16)
    opt = ao.Optimizer({"w": w, "x": torch.ones(4)}, ao.SGD(lr=1.0), engine="array_api")
    opt.advance()
    g = torch.ones(4, dtype=torch.bfloat16)
    for at in (opt.launch, opt.step):
        raises(lambda at=at: at({"w": g, "x": opt.state["w"]["master"]}), ValueError, WORDS, "slot 'master' of 'w'")
    opt.launch({"w": g, "x": torch.ones(4)})
    assert w.tolist() == [0.0] * 4


def test_on_a_device(cupy):
    room = cupy.ones(12)
    opt = ao.Optimizer({"a": room[:6], "b": room[6:]}, ao.SGD(lr=1.0), engine="array_api")
    for grads in ([room[3:9], cupy.ones(6)], [cupy.ones(6), room[1::2]]):
        raises(lambda grads=grads: opt.step(dict(zip("ab", grads, strict=True))), ValueError, WORDS, "'a'", "'b'")
    opt.step({"a": cupy.ones(6), "b": cupy.ones(6)})


def test_a_library_without_addresses_and_a_python_without_known_heads(monkeypatch):
    monkeypatch.setattr(located, "numpy_words", lambda: None)
    for count in (2, 20):
        test_gradients_that_lie_elsewhere_in_each_step(MAKES["numpy"], count)
    opt = ao.Optimizer([np.float32(1.0), np.ones(2, np.float32)], ao.SGD(lr=1.0), engine="array_api")
    opt.step([np.float32(1.0), np.ones(2, np.float32)])


def test_heads_are_known_here():
    assert watch.numpy_words() is not None


@pytest.mark.parametrize("count", [3, 12])
def test_all_that_counting_elements_finds(count):
    rng = np.random.default_rng(0)
    room = np.arange(400.0)
    some = 0
    for _ in range(60):
        tensors = [Tensor(str(i), room[30 * i : 30 * i + 20 : 2]) for i in range(count)]
        found = WrittenMemory(tensors)
        written = set().union(*(x.array.tolist() for x in tensors))
        for _ in range(4):
            grads = []
            for _ in range(count):
                stride, at = 2 * int(rng.integers(-2, 3)), 2 * int(rng.integers(20, 175)) + 1  # where nothing lies
                if rng.random() < 0.5 / count:
                    stride, at = int(rng.integers(-4, 5)), int(rng.integers(40, 350))
                grads.append(np.lib.stride_tricks.as_strided(room[at:], (10,), (8 * stride,)))
            shares = any(written & set(g.tolist()) for g in grads)
            some += shares
            for alike in (True, True, False):
                if shares:
                    with pytest.raises(ValueError, match="share memory"):
                        found.check(grads, alike=alike, complete=True)
                else:
                    found.check(grads, alike=alike, complete=True)
    assert 0 < some < 240
