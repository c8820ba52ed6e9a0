"""Tensors that are updated one by one, each as its gradient is there."""

import copy
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.params import grads as matching
from arrayopt.step.ready import Ready
from tests.conftest import BACKENDS
from tests.support.engines import each_engine, each_fused

SHAPES = {"w": (6, 40), "b": (40,), "k": (4, 3, 3, 3), "s": (), "e": (0, 3)}


def gradients(seed):
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape)).astype("float32") for name, shape in SHAPES.items()}


def held(opt):
    """All that an optimizer holds, as bytes."""
    found = {name: np.asarray(x).tobytes() for name, x in opt.params.items()}
    for name, state in opt.state.items():
        found |= {(name, slot): x if slot == "t" else np.asarray(x).tobytes() for slot, x in state.items()}
    return found


RULES = {
    "LAMB": ao.LAMB(lr=ao.schedules.Cosine(0.1, 10), state_dtype="int8"),
    "CAME": ao.CAME(lr=0.1),
    "AdamW": ao.AdamW(lr=0.1, ema_decay=0.9),
}


@pytest.mark.parametrize("name", RULES)
@each_engine
def test_it_is_the_step_that_all_gradients_make_together(engine, name):
    groups = {"b": {"weight_decay": 0.0}}
    one, other = (ao.Optimizer(gradients(0), RULES[name], groups=groups, engine=engine) for _ in range(2))
    for k in range(4):
        grads = gradients(10 + k)
        if k == 2:
            grads["w"] = None
        one.step(grads)
        order = [name for name in SHAPES if grads[name] is not None]
        np.random.default_rng(k).shuffle(order)
        for tensor in order:
            other.give(tensor, grads[tensor])
        assert other.step() is other.params
    assert held(one) == held(other)
    assert one.step_count == other.step_count == 4


@pytest.mark.parametrize("name", RULES)
@each_engine
def test_gradients_are_accumulated_one_by_one(engine, name):
    one, other = (ao.Optimizer(gradients(0), RULES[name], engine=engine, accumulate=3) for _ in range(2))
    for k in range(9):
        grads = gradients(10 + k)
        if k != 4:
            grads["w"] = None  # in no micro-step of the first step and of the third
        if k in (2, 7):
            grads["b"] = None  # in other micro-steps than the last, and in the last
        one.step(grads)
        for tensor in reversed(SHAPES):
            if grads[tensor] is not None:
                other.give(tensor, grads[tensor])
        assert other.step() is other.params
        assert held(one) == held(other)
        assert one.step_count == other.step_count == (k + 1) // 3


@pytest.mark.parametrize("accumulate", [1, 2])
@each_engine
def test_steps_of_all_gradients_and_of_one_after_the_other_take_turns(engine, accumulate):
    """Each kind counts the updates that the other has made."""
    options = {"rule": RULES["AdamW"], "engine": engine, "accumulate": accumulate}
    one, other = (ao.Optimizer(gradients(0), **options) for _ in range(2))
    for k, all_at_once in enumerate([True, False, False, True, True, False, True, False]):
        grads = gradients(10 + k)
        one.step(grads)
        if all_at_once:
            other.step(grads)
            continue
        for tensor in reversed(SHAPES):
            other.give(tensor, grads[tensor])
        other.step()
        assert held(one) == held(other)


TREES = {
    "dict": lambda a, b: {"a": a, "b": b},
    "list": lambda a, b: [a, b],
    "nested": lambda a, b: {"x": {"a": a}, "y": [b]},
}


@pytest.mark.parametrize("kind", TREES)
def test_a_parameter_that_is_replaced_in_the_middle_of_a_step_gets_its_update(kind):
    opt = ao.Optimizer(TREES[kind](np.ones(2), np.ones(3)), ao.SGD(lr=0.5))
    first, second = opt.state
    for _ in range(2):
        opt.give(first, np.ones(2))
        new = np.full(3, 5.0)
        tree = opt.params
        if kind == "nested":
            tree["y"][0] = new
        else:
            tree[second if kind == "dict" else 1] = new
        opt.give(second, np.ones(3))
        opt.step()
        assert new.tolist() == [4.5] * 3


@each_fused
@pytest.mark.parametrize("options", [{"stacked": True}, {"blocks": (1, 3, 2)}], ids=str)
def test_layers_of_a_parameter_that_was_replaced_get_their_updates(engine, options):
    opt = ao.Optimizer({"w": np.ones((6, 2))}, ao.SGD(lr=0.5, momentum=0.0, **options), engine=engine)
    for new in (opt.params["w"], np.ones((6, 2)), np.ones((12, 2))[::2]):
        opt.params["w"] = new
        opt.give("w", np.ones((6, 2)))
        opt.step()
        assert (new == 0.5).all()


def test_sums_of_scaled_gradients_need_all_gradients():
    opt = ao.Optimizer({"w": np.ones(3)}, ao.SGD(lr=0.1), accumulate=2)
    opt.step({"w": np.ones(3)}, loss_scale=2.0)
    with pytest.raises(ValueError, match=r"Optimizer.give: with a loss scale, a step needs all gradients"):
        opt.give("w", np.ones(3))


def test_a_sum_of_a_tensor_whose_gradient_was_refused_is_dropped_with_it():
    opt = ao.Optimizer({"w": np.ones(3), "b": np.ones(2)}, ao.SGD(lr=0.1), accumulate=2)
    opt.step({"w": np.ones(3), "b": np.ones(2)})
    opt.give("w", np.ones(3))
    with pytest.raises(ValueError, match="b"):
        opt.give("b", np.ones(3))
    with pytest.raises(RuntimeError, match="the gradient of 'b' was refused"):
        opt.step()
    assert opt.step_count == 0
    opt.step(incomplete=True)
    assert opt.step_count == 1
    assert opt.params["b"].tolist() == [1.0, 1.0]
    assert opt.params["w"].tolist() == [0.9] * 3
    for _ in range(2):
        opt.step({"w": np.zeros(3), "b": np.ones(2)})
    assert opt.params["b"].tolist() == [0.9, 0.9]


def test_a_sum_is_kept_if_the_end_of_the_step_fails(monkeypatch):
    """It was dropped before the step could fail: the gradient, given again, was then the only one."""
    ones = {name: np.ones(2) for name in "abc"}
    one, other = (ao.Optimizer({name: np.ones(2) for name in ones}, ao.SGD(lr=0.1), accumulate=2) for _ in range(2))
    for opt in (one, other):
        opt.step(ones)
        opt.give("a", np.ones(2))
    with pytest.raises(ValueError, match="b"):
        one.give("b", np.ones(3))
    with monkeypatch.context() as patch:
        patch.setattr(Ready, "__init__", raising)
        with pytest.raises(MemoryError):
            one.step(incomplete=True)  # `c` is updated with its sum
    for opt in (one, other):
        opt.give("b", np.ones(2))
        opt.step()
    assert held(one) == held(other)


def raising(*args, **given):
    raise MemoryError


def test_arrays_that_cannot_be_written_are_replaced():
    jax = BACKENDS["jax"]
    one, other = (
        ao.Optimizer({name: jax.array(x) for name, x in gradients(0).items()}, ao.LAMB(lr=0.1)) for _ in range(2)
    )
    grads = {name: jax.array(x) for name, x in gradients(1).items()}
    one.step(grads)
    for name, g in grads.items():
        other.give(name, g)
    other.step()
    assert held(one) == held(other)


def test_a_gradient_that_is_refused_changes_nothing_and_can_be_given_again():
    opt = ao.Optimizer(gradients(0), ao.AdamW(lr=0.1))
    grads = gradients(1)
    opt.give("w", grads["w"])
    before = held(opt)
    with pytest.raises(ValueError, match=r"^Optimizer\.give: grads do not match params: shape \(3,\) at 'b'"):
        opt.give("b", np.ones(3, "float32"))
    assert held(opt) == before
    with pytest.raises(RuntimeError, match=r"the gradient of 'b' was refused .*, and this step has 1 gradient so far"):
        opt.step()
    assert opt.step_count == 0
    opt.give("b", grads["b"])
    opt.step()
    assert opt.step_count == 1
    with pytest.raises(ValueError, match="b"):
        opt.give("b", np.ones(3, "float32"))
    opt.step(incomplete=True)
    assert (opt.step_count, opt.state["b"]["t"]) == (2, 1)


def test_what_cannot_be_given():
    opt = ao.Optimizer(gradients(0), ao.AdamW(lr=0.1))
    with pytest.raises(ValueError, match=r"Optimizer.give: there is no tensor 'x'; the tensors are w, b, k, s, e"):
        opt.give("x", np.ones(3))
    with pytest.raises(TypeError, match=r"Optimizer.step: pass the gradients, or call `give` for each of them first"):
        opt.step()
    opt.give("b", gradients(1)["b"])
    with pytest.raises(ValueError, match=r"'b' was already given in this step; call step\(\) before"):
        opt.give("b", gradients(1)["b"])


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"clip_norm": 1.0}, "`clip_norm`"),
        ({"loss_scale": 2.0**10}, "a loss scale"),
        ({"skip_nonfinite": True}, "`skip_nonfinite`"),
        ({"stats": True}, "`stats`"),
    ],
)
def test_what_needs_all_gradients_refuses(options, what):
    opt = ao.Optimizer(gradients(0), ao.AdamW(lr=0.1), **options)
    with pytest.raises(ValueError, match=f"Optimizer.give: with {what}, a step needs all gradients"):
        opt.give("b", gradients(1)["b"])
    opt.step(gradients(1))


def test_in_the_middle_of_a_step_nothing_is_saved(tmp_path):
    opt = ao.Optimizer(gradients(0), ao.AdamW(lr=0.1))
    opt.save(tmp_path / "x")
    opt.give("b", gradients(1)["b"])
    calls = {
        "Optimizer.save": lambda: opt.save(tmp_path / "y"),
        "Optimizer.state_dict": opt.state_dict,
        "Optimizer.advance": opt.advance,
        "Optimizer.add_group": lambda: opt.add_group({"n": np.ones(2, "float32")}),
        "Optimizer.step, with gradients": lambda: opt.step(gradients(1)),
    }
    for who, call in calls.items():
        with pytest.raises(RuntimeError, match=f"{who}: an unfinished step has 1 gradient "):
            call()
    opt.load(tmp_path / "x")
    opt.step(gradients(1))
    assert opt.step_count == 1


def test_hooks_after_a_step_are_called_once():
    opt, calls = ao.Optimizer(gradients(0), ao.AdamW(lr=0.1)), []
    opt.after_step(calls.append)
    for name, g in gradients(1).items():
        opt.give(name, g)
    opt.step()
    assert calls == [opt]
    opt.before_step(lambda opt, grads: None)
    with pytest.raises(ValueError, match="with hooks before a step, a step needs all gradients"):
        opt.give("b", gradients(1)["b"])


def test_a_copy_goes_on_in_the_middle():
    opt = ao.Optimizer(gradients(0), ao.AdamW(lr=0.1))
    grads = gradients(1)
    opt.give("w", grads["w"])
    other = copy.deepcopy(opt)
    for each in (opt, other):
        each.give("b", grads["b"])
        each.step()
    assert held(opt) == held(other)


@pytest.mark.parametrize("change", ["lr", "group", "switch"])
def test_settings_do_not_change_in_the_middle_of_a_step(change):
    params = {"a": np.ones(2), "b": np.ones(2)}
    opt = ao.Optimizer(params, ao.SGD(lr=0.1, momentum=0.9), groups={"b": {"lr": 0.2}})
    opt.give("a", np.ones(2))
    if change == "lr":
        opt.lr = 0.3
    elif change == "group":
        opt.groups[0].lr = 0.3
    else:
        opt.nesterov = True
    with pytest.raises(RuntimeError, match=r"Optimizer.give: settings changed during a step"):
        opt.give("b", np.ones(2))
    assert params["b"].tolist() == [1.0, 1.0]
    opt.lr, opt.groups[0].lr, opt.nesterov = 0.1, 0.2, False
    opt.give("b", np.ones(2))
    opt.step()
    opt.lr = 0.3
    opt.give("a", np.ones(2))
    opt.lr = 0.1
    with pytest.raises(RuntimeError, match=r"Optimizer.step: settings changed during a step"):
        opt.step()
    opt.lr = 0.3
    opt.step()
    assert opt.step_count == 2


def test_each_gradient_is_checked_by_itself(monkeypatch):
    """So that `give` does not take longer, the more tensors there are."""
    asked = []
    refusal = matching.refusal
    monkeypatch.setattr(matching, "refusal", lambda grad, **options: asked.append(grad) or refusal(grad, **options))
    opt = ao.Optimizer({str(i): np.ones(3) for i in range(50)}, ao.SGD(lr=0.1))
    for _ in range(2):
        for name in opt.params:
            opt.give(name, np.ones(3))
        opt.step()
    assert len(asked) == 100


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
@each_engine
def test_a_tensor_is_updated_without_a_look_at_others(engine, options):
    """The lines of Python that run are as many for a tensor of 60 as for one of 4; each turn of a loop is one more."""

    def lines(count):
        opt = ao.Optimizer({str(i): np.ones(3) for i in range(count)}, ao.AdamW(), engine=engine, **options)
        grad = np.ones(3)
        for _ in range(3):
            for name in opt.params:
                opt.give(name, grad)
            opt.step()
        found = 0

        def count_one(frame, event, argument):
            nonlocal found
            found += event == "line"
            return count_one

        before = sys.gettrace()
        sys.settrace(count_one)
        try:
            opt.give("2", grad)
        finally:
            sys.settrace(before)
        return found

    few, many = lines(4), lines(60)
    assert few > 0
    assert abs(many - few) < 56, (few, many)


def test_a_gradient_that_is_given_may_not_be_where_others_are_written():
    room = np.ones(8)
    opt = ao.Optimizer({"a": room[:4], "b": room[4:]}, ao.SGD(lr=0.1, momentum=0.9))
    opt.give("a", room[:4])  # its own parameter
    with pytest.raises(ValueError, match="the gradient of 'b' does with 'a'"):
        opt.give("b", room[2:6])
    with pytest.raises(ValueError, match="the gradient of 'b' does with slot"):
        opt.give("b", opt.state["a"]["buf"])
    opt.give("b", np.ones(4))
    opt.step()


def test_a_gradient_that_was_interrupted_is_not_left_out_silently():
    stop = [True]

    def lr(step):
        if stop and stop.pop():
            raise KeyboardInterrupt
        return 0.5

    opt = ao.Optimizer({"w": np.zeros(2), "b": np.zeros(2)}, ao.SGD(lr=lr), engine="numpy")
    with pytest.raises(KeyboardInterrupt):
        opt.give("w", np.ones(2))
    opt.give("b", np.ones(2))
    with pytest.raises(RuntimeError, match="the gradient of 'w' was refused"):
        opt.step()
    opt.give("w", np.ones(2))
    assert np.array_equal(opt.step()["w"], [-0.5, -0.5])


@each_fused
def test_after_one_was_given_alone_counts_are_of_each(engine):
    """Of several tensors with different numbers of updates, in the steps after that."""
    rule = ao.AdamW(lr=0.1, weight_decay=0.0)
    opts = [ao.Optimizer({"a": np.ones(2), "b": np.ones(2)}, rule, engine=x) for x in ("array_api", engine)]
    for opt in opts:
        opt.step({"a": np.ones(2), "b": np.ones(2)})
        opt.give("a", np.ones(2))
        opt.step()
        for k in range(3):
            opt.step({"a": np.full(2, 1.0 + k), "b": np.full(2, 2.0 - k)})
    for name in "ab":
        np.testing.assert_allclose(opts[1].params[name], opts[0].params[name], rtol=1e-12)


def test_what_is_put_in_the_place_of_another_tensor_is_kept():
    """Arrays that cannot be written are replaced in each update, and with them the tree."""
    opt = ao.Optimizer({"w": jnp.ones(2), "v": jnp.ones(2)}, ao.SGD(lr=0.5))
    opt.params["v"] = jnp.full(2, 5.0)
    for name in "wv":
        opt.give(name, jnp.ones(2))
    opt.step()
    assert [opt.params[name].tolist() for name in "wv"] == [[0.5, 0.5], [4.5, 4.5]]


def test_a_sum_is_applied_to_what_was_put_there():
    opt = ao.Optimizer({"w": np.ones(2), "v": np.ones(2)}, ao.SGD(lr=0.5), accumulate=2)
    for name in "wv":
        opt.give(name, np.ones(2))
    opt.step()
    opt.params["w"] = np.full(2, 5.0)
    opt.give("v", np.ones(2))
    opt.step()
    assert [opt.params[name].tolist() for name in "wv"] == [[4.75, 4.75], [0.5, 0.5]]


def test_a_gradient_that_an_option_refuses_in_the_middle_of_a_step_is_not_left_out_silently():
    opt = ao.Optimizer({"w": np.ones(2), "b": np.ones(2)}, ao.SGD(lr=0.1))
    opt.give("w", np.ones(2))
    opt.clip_norm = 1.0
    with pytest.raises(ValueError, match="with `clip_norm`, a step needs all gradients"):
        opt.give("b", np.ones(2))
    with pytest.raises(RuntimeError, match="the gradient of 'b' was refused"):
        opt.step()
    opt.clip_norm = None
    opt.give("b", np.ones(2))
    assert opt.step()["b"].tolist() == [0.9, 0.9]


@pytest.mark.parametrize("engine", ["array_api", "numpy"])
def test_what_was_prepared_for_a_launch_does_not_outlive_a_load(engine):
    """The update would have the settings and the number of the step of another run, and be counted in no step."""
    opt, grads = ao.Optimizer({"w": np.ones(2)}, ao.SGD(lr=0.1), engine=engine), {"w": np.ones(2)}
    saved = opt.state_dict()
    opt.lr = 0.5
    opt.advance()
    opt.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="call `advance` first, and again after a load"):
        opt.launch(grads)
    opt.advance()
    opt.give("w", np.ones(2))
    with pytest.raises(RuntimeError, match=r"Optimizer.launch: an unfinished step has 1 gradient "):
        opt.launch(grads)


@pytest.mark.parametrize("late", ["value", "loss_scale"])
def test_what_comes_after_the_updates_is_refused(late):
    opt = ao.Optimizer({"w": np.ones(3)}, ao.SGD(lr=0.1))
    opt.give("w", np.ones(3))
    with pytest.raises(ValueError, match=f"`{late}` needs gradients; tensors passed to `give` are already updated"):
        opt.step(**{late: 2.0})
    assert opt.step()["w"].tolist() == [0.9] * 3
