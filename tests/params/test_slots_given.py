"""Slots that the user gives, and values that rules ask for: taken up in every engine, checked, and nothing lost."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.support.engines import STAND_IN

ENGINES = ("array_api", "numpy", "numba")


@dataclass(frozen=True, kw_only=True)
class Scaled(ao.Rule):
    """Steps by a slot that only the user writes."""

    lr: ao.Hyper = ao.real("[0, inf)", 1.0)

    def slots(self, xp, p):
        return {"hess": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        return p - h.lr * s["hess"] * g, {"hess": s["hess"]}


@dataclass(frozen=True, kw_only=True)
class Polyak(ao.Rule):
    """Polyak's step, of the value of the function and the norm of the gradient."""

    floor: ao.Hyper = ao.real("(-inf, inf)", 0.0)

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        return p - (h.value - h.floor) / xp.sum(g * g) * g, {}


def _scaled(dtype="float64", engine="numpy", **fields):
    return ao.Optimizer({"w": np.ones((3, 2), dtype)}, Scaled(**fields), engine=engine)


# ---- slots ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("early", [True, False])
def test_a_slot_that_is_given_is_taken_up_by_the_next_step(engine, early):
    opt, given = _scaled(engine=engine), np.arange(6.0).reshape(3, 2)
    start = np.ones((3, 2))
    if not early:
        opt.step({"w": np.ones((3, 2))})
    opt.state["w"]["hess"] = given
    given[:] = 7.0  # it was copied
    opt.step({"w": np.ones((3, 2))})
    np.testing.assert_array_equal(opt.params["w"], start - np.arange(6.0).reshape(3, 2))


@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
@pytest.mark.parametrize("options", [{}, {"stacked": True}, {"blocks": 3}])
def test_a_slot_is_given_in_any_order_of_memory(engine, options):
    given, p = np.arange(24.0).reshape(6, 4), np.asfortranarray(np.ones((6, 4)))
    opt = ao.Optimizer({"w": p}, Scaled(**options), engine=engine)
    for turned in (np.asfortranarray(given), np.repeat(given, 2, axis=1)[:, ::2], given[::-1].copy()[::-1]):
        p[...] = 1.0
        opt.state["w"]["hess"] = turned
        assert opt.step({"w": np.asfortranarray(np.ones((6, 4)))})["w"] is p
        np.testing.assert_array_equal(p, 1.0 - given)
    assert p.flags.f_contiguous


@pytest.mark.parametrize("engine", ["array_api", "auto"])
@pytest.mark.parametrize("make", [torch.asarray, jnp.asarray])
def test_other_libraries_slots_can_be_given(make, engine):
    opt = ao.Optimizer(make(np.ones(4, np.float32)), Scaled(), engine=engine)
    opt.state["param"]["hess"] = make(np.arange(4, dtype=np.float32))
    now = opt.step(make(np.ones(4, np.float32)))
    np.testing.assert_array_equal(np.asarray(now), [1.0, 0.0, -1.0, -2.0])
    np.testing.assert_array_equal(np.asarray(opt.state["param"]["hess"]), np.arange(4.0))


@pytest.mark.parametrize("engine", ENGINES)
def test_beside_masters_and_in_16_bits_a_slot_has_the_dtype_that_it_is_stored_in(engine):
    opt = _scaled(ml_dtypes.bfloat16, engine, state_dtype="bfloat16")
    with pytest.raises(TypeError, match=r"must be of dtype bfloat16; got float32"):
        opt.state["w"]["hess"] = np.ones((3, 2), np.float32)
    opt.state["w"]["hess"] = np.full((3, 2), 2.0**-12, ml_dtypes.bfloat16)
    opt.step({"w": np.ones((3, 2), ml_dtypes.bfloat16)})
    np.testing.assert_array_equal(opt.state["w"]["master"], np.full((3, 2), np.float32(1 - 2.0**-12)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stacked_slot_is_given_with_all_layers(engine):
    opt, given = _scaled(engine=engine, stacked=True), np.arange(6.0).reshape(3, 2)
    opt.state["w"]["hess"] = given
    opt.step({"w": np.ones((3, 2))})
    np.testing.assert_array_equal(opt.params["w"], 1.0 - given)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("whole", [True, False])
def test_ranks_give_their_part_or_the_whole(size, whole):
    shape, given = (300, 300), np.random.default_rng(0).standard_normal((300, 300))
    ones = {"w": np.ones(shape), "b": np.ones(3)}

    def made(comm):
        params = {name: x.copy() for name, x in ones.items()}
        return ao.Optimizer(params, Scaled(), comm=comm, engine="numpy")

    sizes = ao.ranks.run(size, lambda comm: made(comm).state["w"]["hess"].size)
    ends = np.cumsum([0, *sizes])
    assert ends[-1] == given.size

    def run(comm):
        opt = made(comm)
        part = given.ravel()[ends[comm.rank] : ends[comm.rank + 1]]
        opt.state["w"]["hess"] = given if whole else part.reshape(opt.state["w"]["hess"].shape)
        opt.state["b"]["hess"] = np.arange(3.0)  # which one rank has
        return opt.step(ones)

    for now in ao.ranks.run(size, run):
        np.testing.assert_array_equal(now["w"], 1.0 - given)
        np.testing.assert_array_equal(now["b"], [1.0, 0.0, -1.0])


WRONG = [
    ("hess", np.ones((2, 3)), ValueError, r"slot 'hess' of 'w' must have shape \(3, 2\); got \(2, 3\)"),
    ("hess", np.ones((3, 2), np.float32), TypeError, "must be of dtype float64; got float32"),
    ("hess", torch.ones((3, 2), dtype=torch.float64), TypeError, "must be a numpy array; got a torch array"),
    ("hess", [[1.0, 2.0]] * 3, TypeError, "must be a numpy array; got a list"),
    ("hess", np.full((3, 2), np.nan), ValueError, "must be finite"),
    ("hes", np.ones((3, 2)), ValueError, r"slot 'hes' of 'w' cannot be assigned: the tensor's slots are 'hess'"),
    ("t", 3, ValueError, "counts updates"),
]


@pytest.mark.parametrize(("slot", "value", "error", "match"), WRONG)
def test_what_does_not_fit_is_refused_and_nothing_is_lost(slot, value, error, match):
    opt = _scaled()
    opt.state["w"]["hess"] = np.full((3, 2), 0.5)
    with pytest.raises(error, match=match):
        opt.state["w"][slot] = value
    np.testing.assert_array_equal(opt.state["w"]["hess"], np.full((3, 2), 0.5))


def test_a_slot_given_before_the_first_step_is_not_made_anew():
    opt = _scaled()
    opt.state["w"]["hess"] = np.full((3, 2), 0.5)
    with pytest.raises(ValueError, match="must keep shape, dtype, library and device"):
        opt.params = {"w": np.ones((3, 2), np.float32)}


@pytest.mark.parametrize("engine", ["array_api", STAND_IN])
def test_slots_whose_memory_becomes_that_of_something_else_are_refused(engine):
    w = torch.ones(4)
    opt = ao.Optimizer({"w": w}, ao.AdamW(lr=0.1), engine=engine)
    slots, good = opt.state["w"], opt.state["w"]["m"].data
    for data, match in (
        (w.data, "'w' and slot 'm' of 'w' do"),
        (slots["v"].data, "slot 'm' of 'w' and slot 'v' of 'w' do"),
        (torch.ones(1).expand(4), "slot 'm' of 'w' is an expanded tensor"),
        (torch._neg_view(torch.ones(4)), "slot 'm' of 'w' is a view that shows the conjugate or negative"),
    ):
        slots["m"].data = data
        with pytest.raises(ValueError, match=match):
            opt.step({"w": torch.ones(4)})
    slots["m"].data = good
    opt.step({"w": torch.zeros(4)})
    assert slots["m"].tolist() == [0.0] * 4
    assert slots["t"] == 1


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", [2, 2.0, np.float32(2.0), np.asarray(2.0), torch.tensor(2.0, requires_grad=True)])
def test_a_rule_that_asks_gets_the_value(engine, value):
    opt = ao.Optimizer({"w": np.ones((3, 2)), "b": np.ones(2)}, Polyak(floor=0.5), engine=engine)
    now = opt.step({"w": np.ones((3, 2)), "b": np.ones(2)}, value=value)
    np.testing.assert_allclose(now["w"], 1.0 - 1.5 / 6.0)
    np.testing.assert_allclose(now["b"], 1.0 - 1.5 / 2.0)
    now = opt.step({"w": np.ones((3, 2)), "b": None}, value=0.5)
    np.testing.assert_allclose(now["w"], 1.0 - 1.5 / 6.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rule_that_asks_and_gets_none_says_so(engine):
    opt = ao.Optimizer({"w": np.ones(3)}, Polyak(), engine=engine)
    with pytest.raises(ValueError, match=r"the rule needs `h.value`.*opt.step\(grads, value=loss\)"):
        opt.step({"w": np.ones(3)})
    for wrong in ("2", np.ones(2), True, 1j):
        with pytest.raises(TypeError, match="`value` must be a number"):
            opt.step({"w": np.ones(3)}, value=wrong)
    assert opt.step_count == 0
    np.testing.assert_array_equal(opt.params["w"], np.ones(3))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rule_that_does_not_ask_ignores_the_value(engine):
    runs = [ao.Optimizer(np.ones(3), ao.LAMB(), engine=engine) for _ in range(2)]
    np.testing.assert_array_equal(runs[0].step(np.ones(3), value=3.0), runs[1].step(np.ones(3)))


def test_the_functional_form_takes_a_value_that_is_traced():
    rule, params = Polyak(), {"w": jnp.ones(4)}

    @jax.jit
    def made(params, state, value):
        return ao.update(rule, params, {"w": jnp.ones(4)}, state, value=value)[0]

    np.testing.assert_allclose(made(params, rule.init(params), 2.0)["w"], 0.5)
    with pytest.raises(ValueError, match=r"needs `h.value`"):
        ao.update(rule, params, {"w": jnp.ones(4)}, rule.init(params))


def test_ranks_agree_about_the_value():
    def run(comm, differ):
        opt = ao.Optimizer({"w": np.ones((3, 2))}, Polyak(), comm=comm, engine="numpy")
        value = 2.0 + differ * comm.rank
        return opt.step({"w": np.ones((3, 2))}, value=value)["w"]

    for now in ao.ranks.run(2, lambda comm: run(comm, 0.0)):
        np.testing.assert_allclose(now, 1.0 - 2.0 / 6.0)
    with pytest.raises(Exception, match=r"`value` of group .* is 2.0 on rank 0, 3.0 on rank 1"):
        ao.ranks.run(2, lambda comm: run(comm, 1.0))


def test_the_doors_give_the_value_that_they_have():
    import optax

    from arrayopt.optax import transformation

    tx, params = transformation(Polyak()), {"w": jnp.ones(4)}
    updates, _ = tx.update({"w": jnp.ones(4)}, tx.init(params), params, value=2.0)
    np.testing.assert_allclose(optax.apply_updates(params, updates)["w"], 0.5)


def test_slots_of_one_number_can_be_written_from_the_start():
    """NumPy's sums are scalars, which would be replaced in the first step, and all addresses looked up again."""
    opt = ao.Optimizer(np.ones(2), ao.LBFGS(memory=2), engine="numpy")
    slots = dict(opt._parameters.all[0].slots)
    opt.step(np.ones(2), value=1.0)
    for slot, x in opt._parameters.all[0].slots.items():
        assert x is slots[slot], slot
