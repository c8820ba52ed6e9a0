"""What is said to what newcomers write first, each as a class of mistakes."""

import warnings
from dataclasses import dataclass

import numpy as np
import pytest

import arrayopt as ao

torch = pytest.importorskip("torch")
from arrayopt import torch as door  # noqa: E402

THEIRS = {
    "Adam": torch.optim.Adam,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": torch.optim.LBFGS,
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("kind", ["LAMB", "SGD", "Adam"])
def test_a_state_of_another_librarys_optimizer_is_refused(kind, name, stepped):
    w = torch.nn.Parameter(torch.ones(2, 2))
    theirs = THEIRS[name]([w])
    if stepped:
        w.grad = torch.ones(2, 2)
        theirs.step(lambda: w.sum()) if name == "LBFGS" else theirs.step()
    ours = getattr(door, kind)([w], lr=0.5)
    way = r"use arrayopt.load_torch\(opt, state\)"
    with pytest.raises(ValueError, match=f"{kind}: the state is from an optimizer of PyTorch.*{way}"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.5


def test_keys_of_schedulers_and_users_stay_in_a_state_without_its_rule():
    w = torch.nn.Parameter(torch.ones(2))
    opt = door.LAMB([w], lr=0.5)
    torch.optim.lr_scheduler.StepLR(opt, 3)
    opt.param_groups[0]["mine"] = 7
    state = opt.state_dict()
    del state["rule"], state["step_count"]
    new = door.LAMB([w])
    new.load_state_dict(state)
    assert [new.param_groups[0][key] for key in ("initial_lr", "mine", "lr")] == [0.5, 7, 0.5]


@dataclass(frozen=True, kw_only=True, repr=False)
class Written(ao.Rule):
    lr: ao.Hyper = ao.real("[0, inf)", 0.1)

    def slots(self, xp, p):
        return {"buf": xp.zeros_like(p)}


class UnknownHyper(Written):
    def update(self, xp, p, g, s, h):
        return p - h.learning_rate * g, {"buf": s["buf"]}


class UnknownSlot(Written):
    def update(self, xp, p, g, s, h):
        return p - h.lr * s["velocity"], {"buf": s["buf"]}


class Drawn(Written):
    def update(self, xp, p, g, s, h):
        return p - h.lr * np.random.rand(*p.shape), {"buf": s["buf"]}


def test_the_line_is_that_of_the_rule_and_not_of_a_compiled_library():
    with pytest.warns(ao.NotFusedWarning, match=r"Drawn\.update, line \d+, .*np\.random\.rand"):
        ao.Optimizer(np.ones((3, 2)), Drawn()).step(np.ones((3, 2)))


@pytest.mark.parametrize("engine", ["auto", "numpy", "array_api"])
@pytest.mark.parametrize(
    ("rule", "error", "said"),
    [
        (UnknownHyper, AttributeError, "no hyper-parameter 'learning_rate'; it has .*lr, t; did you mean h.lr"),
        (UnknownSlot, KeyError, "the rule has no slot 'velocity'; it has buf"),
    ],
)
def test_an_unknown_name_in_a_rule_is_the_only_thing_said(rule, error, said, engine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error, match=said):
            ao.Optimizer(np.ones((3, 2)), rule(), engine=engine).step(np.ones((3, 2)))


def value(x):
    return (x**2).sum(), 2 * x


def optimizer():
    return ao.Optimizer({"w": np.ones(2), "b": np.ones(2)}, ao.SGD(lr=1.0))


LISTS = r"a list, tuple or dict at '{}', expected .*{}; make arrays of numbers, such as numpy.asarray"


def test_after_a_refused_gradient_every_call_says_why():
    opt = optimizer()
    with pytest.raises(ValueError, match="shape"):
        opt.give("w", np.ones(3))
    for call in (lambda: opt.step({"w": np.ones(2), "b": np.ones(2)}), opt.state_dict, opt.step):
        with pytest.raises(
            RuntimeError,
            match=r"the gradient of 'w' was refused .*shape.* this step has 0 gradients so far; give it again",
        ):
            call()
    opt.give("w", np.ones(2))
    opt.give("b", np.ones(2))
    assert (opt.step()["w"] == 0.0).all()


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: ao.Optimizer([1.0, 2.0], ao.Adam()), TypeError, r"numpy.asarray\(\[1.0, 2.0\]\)"),
        (lambda: ao.Optimizer(torch.nn.Linear(2, 2), ao.Adam()), TypeError, "named_parameters"),
        (lambda: ao.Optimizer(np.ones(2), ao.Adam), TypeError, r"create an instance: Adam\(...\)"),
        (lambda: ao.Optimizer(np.ones(2), ao.SGD(lr=1), groups={"*": ao.Adam}), TypeError, r"an instance: Adam\(...\)"),
        (
            lambda: ao.minimize(value, np.ones(2), engine="cuda"),
            ValueError,
            r"^minimize: .* got 'cuda'; for CUDA, use 'cupy'",
        ),
        (lambda: ao.minimize(value, np.ones(2), ao.Adam), TypeError, r"create an instance: Adam\(...\)"),
        (lambda: ao.Optimizer(np.ones(2), door.AdamW), TypeError, "got AdamW of PyTorch; use a rule of arrayopt"),
        (lambda: ao.Adam(lr=lambda: 0.1).at(0), TypeError, r"`lr`: a schedule is called with .* f\(step\): .* 0 pos"),
        (lambda: ao.minimize(lambda x: (None, x), np.ones(2)), TypeError, "one real number as the value; got None$"),
        (lambda: ao.Adam(lr=ao.schedules.Cosine), TypeError, r"create an instance: Cosine\(...\)"),
        (lambda: door.LAMB(torch.nn.Linear(2, 2)), TypeError, r"got Linear; pass model.parameters\(\)"),
        (lambda: door.LAMB([{"params": torch.nn.Linear(2, 2).parameters}]), TypeError, r"pass model.parameters\(\)"),
        (lambda: ao.minimize(value, np.ones(2), project=np.clip), TypeError, r"`project` is called .*f\(xp, p, h\)"),
        (lambda: ao.SGD(lr=0.1, project=np.maximum), TypeError, r"`project` is called .*f\(xp, p, h\)"),
        (lambda: optimizer().step({}, {}), TypeError, r"gradients alone, opt.step\(grads\)"),
        (lambda: optimizer().step({"w": [1, 2], "b": {"c": [3, 4]}}), ValueError, LISTS.format("w", "'b', .* None")),
        (
            lambda: optimizer().step({"w": [1.0, 2.0], "c": np.ones(2)}),
            ValueError,
            f"missing 'b'; unexpected 'c'; {LISTS[:20]}",
        ),
        (lambda: ao.Optimizer(np.ones(2), ao.SGD(lr=1)).step([1.0, 2.0]), ValueError, LISTS.format("param", "None")),
        (lambda: optimizer().give("w", [1.0, 2.0]), ValueError, LISTS.format("w", "None")),
        (lambda: ao.minimize(lambda x: (x.sum(), [1.0, 1.0]), np.ones(2)), ValueError, LISTS.format("param", "None")),
        (lambda: ao.adagrad, AttributeError, "use RMSprop or AdamW"),
        (lambda: ao.schedules.CosineAnnealingLR, AttributeError, r"use Cosine\(lr, decay_steps"),
        (lambda: ao.projections.positive, AttributeError, "use projections.nonnegative"),
        (lambda: ao.Adamw, AttributeError, "did you mean `AdamW`"),
        (lambda: door.lamb, AttributeError, "did you mean `LAMB`"),
        (lambda: door.Adagrad, AttributeError, "use torch.optim.Adagrad"),
        (lambda: ao.foo_bar, AttributeError, r"dir\(arrayopt\)"),
    ],
)
def test_what_newcomers_write_first(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_unknown_names_of_optax():
    pytest.importorskip("optax")
    from arrayopt import optax

    for name, said in {"adagrad": "use optax.adagrad", "AdamW": "did you mean `adamw`"}.items():
        with pytest.raises(AttributeError, match=said):
            getattr(optax, name)


def test_an_optimizer_inside_of_a_traced_function_is_refused():
    jax = pytest.importorskip("jax")
    opt = ao.Optimizer(jax.numpy.ones(2), ao.SGD(lr=0.1))
    for step in (lambda x: ao.Optimizer(x, ao.SGD(lr=0.1)).step(x), opt.step):
        with pytest.raises((TypeError, ValueError), match="an array that JAX traces; use arrayopt"):
            jax.jit(step)(jax.numpy.ones(2))
    assert opt.step_count == 0


@pytest.mark.parametrize("of", ["evaluated_from", "rings", "squares", "wide"])
def test_a_text_for_several_names_of_slots_is_refused(of):
    rule = type("Text", (UnknownSlot,), {of: "buf"})
    with pytest.raises(TypeError, match=f"Text: `{of}` must be a tuple of names of slots; got 'buf'"):
        rule()


def test_why_a_rule_refuses_is_a_text():
    rule = type("Flagged", (UnknownSlot,), {"refuses": lambda self, xp, p: p.ndim != 2})
    with pytest.raises(TypeError, match=r"Flagged.refuses must return a text, .*; got True"):
        ao.Optimizer(np.ones(3), rule())


SAID = {
    "a tensor": (lambda opt: opt.state["wieght"], KeyError, "'wieght'; the tensors are w, b"),
    "PyTorch's LBFGS": (lambda opt: ao.LBFGS(history_size=7), TypeError, "LBFGS has no `history_size`; pass memory=7"),
    "its limit": (lambda opt: ao.LBFGS(max_iter=7), TypeError, r"one update is one step; minimize\(f, params, LBFGS"),
    "an optimizer": (
        lambda opt: ao.load_torch(opt, torch.optim.AdamW([torch.ones(3)])),
        TypeError,
        r"load_torch: `state` must be a state_dict\(\) of .*; got AdamW; pass its state_dict\(\)",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_names_and_types_from_habit(name):
    call, error, said = SAID[name]
    with pytest.raises(error, match=said):
        call(ao.Optimizer({"w": np.ones(3), "b": np.ones(2)}, ao.AdamW(lr=0.1)))
