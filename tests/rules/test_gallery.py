"""The gallery: its rules in all engines, beside NumPy formulas and pytorch_optimizer's numbers."""

import importlib.util
import inspect
import sys
from pathlib import Path

import numpy as np
import pytest

import arrayopt as ao
from tests.support.gallery import WITNESSES
from tests.support.recorded import recorded
from tests.support.slow import marked

FOLDER = Path(__file__).parents[2] / "docs" / "gallery"


def loaded(name):
    spec = importlib.util.spec_from_file_location(f"gallery_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # which `inspect` asks
    spec.loader.exec_module(module)
    return {k: x for k, x in vars(module).items() if isinstance(x, type) and k in WITNESSES}


RULES = loaded("adaptive") | loaded("plain")
OPTIONS = {
    "Yogi": {"lr": 0.01},
    "QHAdam": {"lr": 0.01, "nu1": 0.7, "nu2": 0.8},
    "Grams": {"lr": 0.01, "weight_decay": 0.1},
    "AdaBound": {"lr": 0.01, "final_lr": 0.02, "gamma": 0.5},
    "StableAdamW": {"lr": 0.01, "weight_decay": 0.1, "beta2": 0.9},
    "LaProp": {"lr": 0.01, "eps": 1e-14},
    "ADOPT": {"lr": 0.01, "beta2": 0.99},
    "AdaMod": {"lr": 0.01, "beta3": 0.9},
    "Signum": {"lr": 0.01, "weight_decay": 0.1},
    "SGDW": {"lr": 0.01, "weight_decay": 0.1},
    "NovoGrad": {"lr": 0.01},
    "Fromage": {"lr": 0.01},
}
THEIRS = {  # the name and the arguments there
    "Yogi": ("Yogi", {"initial_accumulator": 0.0}),
    "QHAdam": ("QHAdam", {"betas": (0.995, 0.999), "nus": (0.7, 0.8)}),
    "Grams": ("Grams", {"weight_decay": 0.1, "weight_decouple": True, "eps": 1e-8}),
    "AdaBound": ("AdaBound", {"final_lr": 0.02, "gamma": 0.5}),
    "StableAdamW": ("StableAdamW", {"weight_decay": 0.1, "betas": (0.9, 0.9), "eps": 1e-8}),
    "LaProp": ("LaProp", {"betas": (0.9, 0.999), "eps": 1e-14}),
    "ADOPT": ("ADOPT", {"betas": (0.9, 0.99), "clip_lambda": lambda step: (step - 1) ** 0.25}),
    "AdaMod": ("AdaMod", {"betas": (0.9, 0.999, 0.9), "eps": 1e-8, "weight_decay": 0.0}),
    "Signum": ("SignSGD", {"weight_decay": 0.1, "weight_decouple": True}),
    "SGDW": ("SGDW", {"momentum": 0.9, "weight_decay": 0.1, "weight_decouple": True}),
    "NovoGrad": ("NovoGrad", {"betas": (0.95, 0.98), "grad_averaging": False}),
    "Fromage": ("Fromage", {}),
}
SHAPES = {"w": (6, 5), "b": (7,), "stack": (2, 3, 4)}
STEPS = 10


def drawn(k):
    rng = np.random.default_rng((7, k))
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


def expected(name):
    """Of the witness."""
    h = {**{k: x for k, x in vars(RULES[name]()).items() if isinstance(x, float)}, **OPTIONS[name]}
    params, states = drawn(0), {name: {} for name in SHAPES}
    for t in range(1, STEPS + 1):
        for tensor, g in drawn(t).items():
            params[tensor], states[tensor] = WITNESSES[name](h, params[tensor], g, states[tensor], t)
    return params


def test_the_gallery_has_twelve_rules_of_at_most_25_lines():
    assert set(RULES) == set(WITNESSES) == set(OPTIONS)
    assert len(RULES) == 12
    assert not set(RULES) & set(ao.rules.__all__)
    for rule in RULES.values():
        assert len(inspect.getsource(rule).splitlines()) <= 25
        assert rule.__name__ in (FOLDER / "index.md").read_text("utf-8")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("engine", ["array_api", "numpy", "numba", "auto"])
@pytest.mark.parametrize("name", RULES)
def test_each_rule_equals_its_formula_in_each_engine(name, engine, dtype):
    params = {tensor: x.astype(dtype) for tensor, x in drawn(0).items()}
    opt = ao.Optimizer(params, RULES[name](**OPTIONS[name]), engine=engine)
    for t in range(1, STEPS + 1):
        opt.step({tensor: g.astype(dtype) for tensor, g in drawn(t).items()})
    for tensor, x in expected(name).items():
        tolerance = {"rtol": 1e-9, "atol": 1e-12} if dtype == "float64" else {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(opt.params[tensor], x, **tolerance, err_msg=tensor)


@pytest.mark.parametrize("name", RULES)
def test_zeros_train_or_stand_still(name):
    for g in (0.0, 1.0):
        opt = ao.Optimizer(np.zeros(5), RULES[name](**OPTIONS[name]), engine="numpy")
        for _ in range(3):
            opt.step(np.full(5, g))
        assert np.isfinite(opt.params).all()


def of_pytorch_optimizer(name):
    """The parameters that it makes."""
    torch, theirs = pytest.importorskip("torch"), pytest.importorskip("pytorch_optimizer")
    title, options = THEIRS[name]
    tensors = {tensor: torch.tensor(x, requires_grad=True) for tensor, x in drawn(0).items()}
    opt = getattr(theirs, title)(list(tensors.values()), lr=0.01, foreach=False, **options)
    for t in range(1, STEPS + 1):
        for tensor, g in drawn(t).items():
            tensors[tensor].grad = torch.tensor(g)
        opt.step()
    return {tensor: x.detach().numpy() for tensor, x in tensors.items()}


@pytest.mark.parametrize("name", RULES)
def test_each_rule_equals_that_of_pytorch_optimizer(name):
    made = recorded("pytorch_optimizer", f"gallery {name}", lambda: of_pytorch_optimizer(name))
    for tensor, x in expected(name).items():
        np.testing.assert_allclose(made[tensor], x, rtol=1e-6, atol=1e-8, err_msg=tensor)


@pytest.mark.parametrize("name", marked([(name,) for name in RULES], lambda name: name == "NovoGrad"))
def test_each_rule_equals_its_formula_on_a_device(name, cupy):
    opt = ao.Optimizer({tensor: cupy.asarray(x) for tensor, x in drawn(0).items()}, RULES[name](**OPTIONS[name]))
    for t in range(1, STEPS + 1):
        opt.step({tensor: cupy.asarray(g) for tensor, g in drawn(t).items()})
    for tensor, x in expected(name).items():
        np.testing.assert_allclose(opt.params[tensor].get(), x, rtol=1e-9, atol=1e-12, err_msg=tensor)
