"""What random problems found, each in its smallest form."""

import copy
import pickle

import numpy as np
import pytest

import arrayopt as ao
from arrayopt import arrays, schedules
from arrayopt.fusion.plans import plan_for
from arrayopt.rules.gradients import GradientNorms
from tests.support.engines import each_engine
from tests.test_random import frozen


def test_a_rule_that_stores_nothing_has_a_plan():
    assert plan_for(GradientNorms(master_weights=False), 1, "float32", stats=True).passes


@each_engine
def test_small_tensors_take_micro_steps_together(engine):
    """A plan that loads the gradient and nothing else."""
    opt = ao.Optimizer({"a": np.ones(2), "b": np.ones(())}, ao.SGD(lr=1.0), engine=engine, accumulate=2)
    for factor in (1.0, 3.0):
        opt.step({"a": np.full(2, factor), "b": np.asarray(factor)})
    assert opt.params["a"].tolist() == [-1.0, -1.0]
    assert opt.params["b"] == -1.0


@each_engine
def test_a_group_may_come_before_the_last_micro_step(engine):
    opt = ao.Optimizer({"a": np.ones(2)}, ao.SGD(lr=1.0), engine=engine, accumulate=2)
    opt.step({"a": np.ones(2)})
    opt.add_group({"b": np.ones(3)})
    opt.step({"a": np.full(2, 3.0), "b": np.full(3, 4.0)})
    assert opt.params["a"].tolist() == [-1.0] * 2
    assert opt.params["b"].tolist() == [-1.0] * 3


@each_engine
def test_small_tensors_with_counts_of_their_own(engine):
    """What is due for one tensor and not for another is a truth value of each."""
    rule = ao.SGD(lr=1.0, lookahead_steps=2)
    opt = ao.Optimizer({"a": np.ones(2), "b": np.ones(3)}, rule, engine=engine)
    opt.step({"a": np.ones(2), "b": None})
    opt.step({"a": np.ones(2), "b": np.ones(3)})
    assert opt.params["a"].tolist() == [0.0, 0.0]  # half of the way from 1 to -1
    assert opt.params["b"].tolist() == [0.0] * 3


@each_engine
@pytest.mark.parametrize("shape", [(0,), (3,)])
def test_a_joint_norm_of_zero_is_not_divided_by(engine, shape):
    opt = ao.Optimizer(np.ones(shape), ao.SGD(lr=1.0), engine=engine, clip_norm=0.5)
    assert np.all(opt.step(np.zeros(shape)) == 1.0)


@pytest.mark.parametrize("rule", [ao.SGD(lr=0.5), ao.SGD(lr=0.5, ema_decay=0.5, lookahead_steps=2)])
def test_a_parameter_that_became_a_numpy_scalar_can_be_loaded(rule, tmp_path):
    """np.float64 is a float too, and was written as a number."""
    p = np.asarray(1.0)
    p.flags.writeable = False
    opt, other = (ao.Optimizer({"p": p}, rule, engine="array_api") for _ in range(2))
    opt.step({"p": np.asarray(1.0)})
    opt.save(tmp_path / "x")
    other.load(tmp_path / "x")
    assert frozen(other) == frozen(opt)


@pytest.mark.parametrize(
    "call",
    [
        lambda huge: ao.SGD(lr=huge),
        lambda huge: ao.SGD(lr=[0.1, huge]),
        lambda huge: ao.SGD(lr=lambda step: huge).at(0),
        lambda huge: ao.LossScale(init=huge),
        lambda huge: schedules.Constant(huge),
        lambda huge: schedules.Warmup(1.0, huge),
        lambda huge: schedules.Constant(1.0)(huge),
        lambda huge: ao.source(ao.SGD(lr=0.1), rank=huge),
    ],
)
def test_a_number_that_no_float_holds_is_out_of_range(call):
    with pytest.raises(ValueError, match=r"must be (in|finite|below|at most)"):
        call(10**400)


@pytest.mark.parametrize("value", [1.5, True, "1", None, -1, 2**63])
def test_the_step_count_is_a_whole_number(value):
    opt = ao.Optimizer(np.ones(2), ao.SGD(lr=0.1))
    with pytest.raises(
        (TypeError, ValueError), match=r"Optimizer: `step_count` must be (an integer|at least 0|below 2\*\*53); got"
    ):
        opt.step_count = value
    assert opt.step_count == 0
    opt.step_count = 7
    assert opt.step_count == 7


@each_engine
@pytest.mark.parametrize("done", [0, 1])
def test_sums_that_were_begun_give_way_to_those_that_are_loaded(engine, done):
    """A snapshot of before, loaded in the middle of a step: what was added since is gone, and sums are those saved."""
    opt, straight = (ao.Optimizer({"w": np.zeros(2)}, ao.SGD(lr=1.0), engine=engine, accumulate=3) for _ in range(2))
    grads = [{"w": np.full(2, value)} for value in (3.0, 6.0, 12.0)]
    for g in grads[:done]:
        opt.step(g)
    saved = opt.state_dict()
    opt.step({"w": np.full(2, 99.0)})
    opt.load_state_dict(saved)
    for g in grads[done:]:
        opt.step(g)
    for g in grads:
        straight.step(g)
    assert frozen(opt) == frozen(straight)
    assert opt.params["w"].tolist() == [-7.0, -7.0]


@each_engine
def test_a_snapshot_holds_sums_of_its_own(engine):
    """Micro-steps add to them in place."""
    opt = ao.Optimizer({"w": np.zeros(2)}, ao.SGD(lr=1.0), engine=engine, accumulate=3)
    opt.step({"w": np.full(2, 3.0)})
    saved = opt.state_dict()["tensors"]["w"]["slots"]["accumulated"]
    opt.step({"w": np.full(2, 6.0)})
    assert saved.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_an_optimizer_over_arrays_of_jax_is_copied(copied):
    """Their devices cannot be."""
    jnp = pytest.importorskip("jax.numpy")
    opt = ao.Optimizer({"w": jnp.ones(2)}, ao.SGD(lr=1.0, momentum=0.5))
    opt.step({"w": jnp.ones(2)})
    other = copied(opt)
    for one in (opt, other):
        assert one.step({"w": jnp.ones(2)})["w"].tolist() == [-1.5, -1.5]


@pytest.mark.parametrize("first", [0, 1])
def test_dtypes_of_two_libraries_are_not_compared(first):
    """array-api-strict warns of it, and has the hashes of NumPy's."""
    strict = pytest.importorskip("array_api_strict")
    arrays._named.cache_clear()
    for x in (np.ones(1), strict.ones(1))[:: 1 - 2 * first]:
        assert arrays.dtype_name(x) == "float64"


@pytest.mark.parametrize("shape", [(0, 0, 0), (3, 0, 4), (0, 3, 4)])
@pytest.mark.parametrize("rule", [ao.SOAP(lr=0.1, matrix="flatten"), ao.NorMuon(lr=0.1, matrix="flatten")])
def test_empty_kernels_as_matrices(shape, rule):
    opt = ao.Optimizer({"k": np.zeros(shape)}, rule)
    assert opt.step({"k": np.zeros(shape)})["k"].shape == shape


def test_a_monitor_that_is_closed_between_micro_steps():
    """It has asked for a step's reports, of which it knows other tensors."""
    opt = ao.Optimizer({"a": np.ones(2)}, ao.SGD(lr=0.1), accumulate=2)
    monitor = ao.Monitor(opt)
    opt.step({"a": np.ones(2)})
    monitor.close()
    opt.add_group({"b": np.ones(2)})
    opt.step({"a": np.ones(2), "b": np.ones(2)})
    assert (opt.step_count, len(monitor)) == (1, 0)
