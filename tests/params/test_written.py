"""What users write into parameters of 16 bits, by any way of writing, is what the next step goes on from."""

import copy

import ml_dtypes
import numpy as np
import pytest
import torch

import arrayopt as ao
import arrayopt.torch as door
from arrayopt import randomness
from tests.support import cases
from tests.support.engines import EVERY, SLOW, TORCH, each_engine
from tests.support.slow import marked

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SHAPE = (6, 5)


def with_dtypes(engines):
    """Engines with dtypes; those that are slow wait for `make test-all`."""
    rows = [(name, dtype) for name in engines for dtype in DTYPES]
    return pytest.mark.parametrize(("engine", "dtype"), marked(rows, lambda engine, dtype: engine not in SLOW))


of_numpy = with_dtypes(EVERY)


def drawn(seed, dtype, shape=SHAPE):
    return np.random.default_rng(seed).normal(size=shape).astype(DTYPES[dtype])


def expected_master(master, p):
    """The parameter where it is not the master rounded, by the casts of NumPy."""
    same = master.astype(p.dtype).view(np.uint16) == p.view(np.uint16)
    return np.where(same, master, p.astype(np.float32))


def check_next_step(opt, rule, p, g, engine):
    """The next step is that of an optimizer whose master was put right by hand."""
    state = copy.deepcopy(opt.state_dict())
    slots = state["tensors"]["param"]["slots"]
    slots["master"] = expected_master(slots["master"], p)
    twin_p = p.copy()
    twin = ao.Optimizer(twin_p, rule, engine=engine)
    twin.load_state_dict(state)
    opt.step(g)
    twin.step(g)
    assert np.array_equal(twin_p.view(np.uint16), p.view(np.uint16))
    for slot, x in twin.state["param"].items():
        assert np.array_equal(np.asarray(x), np.asarray(opt.state["param"][slot]), equal_nan=True), slot


def assign(p):
    p[1:3] = 0.75


def through_a_view(p):
    p.reshape(-1)[::7] *= -1


def clip(p):
    np.clip(p, -0.25, 0.25, out=p)


def one_unit_more(p):
    p.view(np.uint16)[2] += 1


def zeros_and_odd_values(p):
    p[0] = [0.0, -0.0, np.inf, -np.inf, np.nan]


WAYS = [assign, through_a_view, clip, one_unit_more, zeros_and_odd_values]


@of_numpy
@pytest.mark.parametrize("write", WAYS, ids=lambda write: write.__name__)
def test_arrays_of_numpy(write, engine, dtype):
    rule = ao.AdamW(lr=1e-3)
    p = drawn(0, dtype)
    opt = ao.Optimizer(p, rule, engine=engine)
    for k in range(3):
        opt.step(drawn(k + 1, dtype))
    write(p)
    check_next_step(opt, rule, p, drawn(9, dtype), engine)


@of_numpy
def test_signs_before_the_first_step(engine, dtype):
    """The master of 0.5 is 0.5 then, and -0.5 is as far from it as integers of 32 bits can be."""
    rule = ao.AdamW(lr=1e-3)
    p = drawn(0, dtype)
    opt = ao.Optimizer(p, rule, engine=engine)
    p *= np.asarray(-1.0, p.dtype)
    check_next_step(opt, rule, p, drawn(9, dtype), engine)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_beside_masters_of_every_kind(dtype):
    p = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    wide = p.astype(np.float32)
    half = 1 << (15 if dtype == "bfloat16" else 12)
    for off in (0, 1, half, half + 1, 2 * half, (1 << 31) - half, (1 << 31) - 1, 1 << 31):
        for bits in (wide.view(np.uint32) + np.uint32(off), wide.view(np.uint32) - np.uint32(off)):
            master = bits.view(np.float32)
            with np.errstate(all="ignore"):
                found = getattr(randomness, f"current_{dtype}")(np, master, wide)
                expected = np.where(master.astype(p.dtype) == p, master, wide)
            np.testing.assert_array_equal(found[wide != 0], expected[wide != 0])  # zeros may be of either sign


@pytest.mark.parametrize("name", cases.CASES)
def test_every_rule_with_lookahead_an_average_and_a_projection(name):
    rule = cases.make(name, cases.CASES[name][0])
    more = {"lookahead_steps": 2, "ema_decay": 0.5, "project": ao.projections.box(-3.0, 3.0)}
    rule = type(rule)(**{**cases.CASES[name][0], **more})
    p = drawn(0, "bfloat16")
    opt = ao.Optimizer(p, rule, engine="numpy")
    for k in range(3):
        opt.step(drawn(k + 1, "bfloat16"))
        assign(p)
        p *= np.asarray(1.5, p.dtype)
    check_next_step(opt, rule, p, drawn(9, "bfloat16"), "numpy")


@of_numpy
def test_nan_with_all_bits_is_reset(engine, dtype):
    """Its bits in float32 are next to those of zero, where integers wrap."""
    p = drawn(0, dtype)
    opt = ao.Optimizer(p, ao.SGD(lr=0.5), engine=engine)
    for zero in (0.0, -0.0):
        opt.step(np.full(SHAPE, -1, np.int32).view(np.float32))
        assert np.isnan(p).all()
        p[...] = zero
        opt.step(np.ones(SHAPE, p.dtype))
        assert (p == -0.5).all()


@of_numpy
def test_what_was_not_written_keeps_the_bits_below_its_own(engine, dtype):
    """A swap to other weights and back, with no step between, leaves no trace."""
    runs = []
    for swap in (False, True):
        p = drawn(0, dtype)
        opt = ao.Optimizer(p, ao.SGD(lr=1e-5, momentum=0.9), engine=engine)
        for k in range(12):
            if swap and k % 3 == 2:
                kept = p.copy()
                p[...] = drawn(k, dtype)
                opt.state_dict(), opt.averaged()
                p[...] = kept
            opt.step(drawn(k, dtype))
        runs.append(p.tobytes())
    assert runs[0] == runs[1]


def test_masters_are_what_averaged_starts_from():
    p = np.ones(3, np.float16)
    opt = ao.Optimizer(p, ao.ScheduleFreeAdamW(lr=1e-3), engine="numpy")
    opt.step(np.ones(3, np.float16))
    p[...] = opt.state["param"]["z"].astype(np.float16)
    p[0] = 8.0
    assert opt.averaged()[0] > 8.0


@each_engine
def test_ranks(engine):
    def rank(comm=None):
        p = {"a": drawn(0, "bfloat16", (300, 200)), "b": drawn(1, "bfloat16", (7,))}
        opt = ao.Optimizer(p, ao.LAMB(lr=0.01), comm=comm, engine=engine)
        for k in range(3):
            opt.step({"a": drawn(2 + k, "bfloat16", (300, 200)), "b": drawn(9 + k, "bfloat16", (7,))})
            p["a"][:: k + 2] = 0.5
            np.clip(p["b"], -0.1, 0.1, out=p["b"])
        opt.step({"a": drawn(20, "bfloat16", (300, 200)), "b": drawn(21, "bfloat16", (7,))})
        return p["a"].tobytes() + p["b"].tobytes()

    alone = rank()
    assert ao.ranks.run(2, rank) == [alone, alone]


def test_the_functional_form():
    rule, p = ao.SGD(lr=2.0**-12), np.ones(4, np.float16)
    state = rule.init(p)
    for _ in range(3):
        p, state = ao.update(rule, p, np.ones(4, np.float16), state)
    p = p.copy()
    p[1] = 4.0
    p, state = ao.update(rule, p, np.ones(4, np.float16), state)
    fine = 1 - 4 * 2.0**-12
    assert state["tensors"]["param"]["master"].tolist() == [fine, 4 - 2.0**-12, fine, fine]
    assert p[1] == 4.0


# ---- tensors of PyTorch, under `arrayopt.torch` --------------------------------------------------------------------


def no_grad(write):
    def written(model, p):
        with torch.no_grad():
            write(p)

    return written


def replace_data(model, p):
    p.data = torch.full_like(p, 0.3)


def from_a_vector(model, p):
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(vector * 2, model.parameters())


def swap(model, p):
    """To averaged weights, as of an EMA."""
    p.data.copy_(p.data * 0.5)


def load(model, p):
    model.load_state_dict({name: x * 3 for name, x in model.state_dict().items()})


TORCH_WAYS = {
    "data.clamp_": lambda model, p: p.data.clamp_(-0.1, 0.1),
    "data.copy_": swap,
    "data.view": lambda model, p: p.data.view(-1)[::2].zero_(),
    "detach": lambda model, p: p.detach().mul_(1.5),
    "data =": replace_data,
    "mul_": no_grad(lambda p: p.mul_(0.7)),
    "init": lambda model, p: torch.nn.init.constant_(p, 0.3),
    "vector_to_parameters": from_a_vector,
    "load_state_dict": load,
}


@with_dtypes(TORCH)
def test_tensors_of_pytorch(engine, dtype):
    """A step of zero gradients leaves them as they were written, in every way of writing."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 5).to(getattr(torch, dtype))
    opt = door.SGD(model.parameters(), lr=1e-3, engine=engine)
    for write in TORCH_WAYS.values():
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        opt.step()
        before = model.weight.detach().clone()
        write(model, model.weight)
        written = model.weight.detach().clone()
        assert not torch.equal(before, written)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        opt.step()
        assert torch.equal(model.weight, written)
        changed = written != before
        assert torch.equal(opt.state[model.weight]["master"][changed], written.float()[changed])
