"""The Optimizer: trees of parameters and their names, gradients, and PyTorch's modules."""

import copy
import gc
import weakref
from collections import OrderedDict, defaultdict

import array_api_compat
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.params.trees import flatten
from tests.conftest import BACKENDS
from tests.support.optimizing import EXACT, HALF, Layer, by_witness, drawn, ones

TREES = {
    "lone array": (lambda a: a, ["param"]),
    "list": (lambda a: [a, a + 1], ["0", "1"]),
    "tuple": (lambda a: (a, a + 1), ["0", "1"]),
    "namedtuple": (lambda a: Layer(a, a + 1), ["weight", "bias"]),
    "ordered dict": (lambda a: OrderedDict(z=a, a=a + 1), ["z", "a"]),
    "default dict": (lambda a: defaultdict(list, w=[a]), ["w.0"]),
    "keys that are no strings": (lambda a: {0: a, (1, 2): a + 1}, ["0", "(1, 2)"]),
    "keys with dots": (lambda a: {"blocks.0.bias": a, "head": a + 1}, ["blocks.0.bias", "head"]),
    "nested": (
        lambda a: {"embed": a, "blocks": [Layer(a + 1, (a + 2,)), {"bias": a + 3}], "none": {}},
        ["embed", "blocks.0.weight", "blocks.0.bias.0", "blocks.1.bias"],
    ),
    "None leaves": (lambda a: {"w": None, "b": [None, a], "c": (a + 1, None)}, ["b.1", "c.0"]),
}


def shape_of(tree):
    """The containers of a tree, with leaves as ...; its arrays in order."""
    if isinstance(tree, dict):
        made = [(key, *shape_of(child)) for key, child in tree.items()]
        return (type(tree), [(key, s) for key, s, _ in made]), [x for *_, leaves in made for x in leaves]
    if isinstance(tree, list | tuple):
        made = [shape_of(child) for child in tree]
        return (type(tree), [s for s, _ in made]), [x for _, leaves in made for x in leaves]
    return (None, []) if tree is None else (..., [tree])


@pytest.mark.parametrize(("build", "names"), TREES.values(), ids=TREES)
def test_a_tree_keeps_its_structure_and_its_arrays_get_names(backend, build, names):
    params = build(backend.array([2.0, 4.0]))
    grads = build(backend.array([2.0, 2.0]))
    structure, before = shape_of(params)
    expected = [backend.numpy(p) - backend.numpy(g) / 2 for p, g in zip(before, shape_of(grads)[1], strict=True)]
    originals = [np.array(backend.numpy(x)) for x in before]

    opt = ao.Optimizer(params, HALF)
    assert list(opt.state) == names
    assert opt.params is params
    result = opt.step(grads)

    assert opt.params is result
    assert shape_of(result)[0] == structure
    for x, old, was, new in zip(shape_of(result)[1], before, originals, expected, strict=True):
        assert array_api_compat.array_namespace(x) is array_api_compat.array_namespace(old)
        np.testing.assert_array_equal(backend.numpy(x), new, strict=True)
        np.testing.assert_array_equal(backend.numpy(old), was if backend.name == "jax" else new)
    assert (result is params) == (backend.name != "jax")


def test_a_generator_of_arrays_becomes_a_list_and_gradients_may_come_from_one(backend):
    arrays = [backend.array([1.0]), backend.array([[2.0]])]
    opt = ao.Optimizer((x for x in arrays), HALF)
    assert list(opt.state) == ["0", "1"]
    result = opt.step(x * 2 for x in arrays)
    assert isinstance(result, list)
    assert [backend.numpy(x).tolist() for x in result] == [[0.0], [[0.0]]]


def test_read_only_numpy_arrays_are_replaced():
    w, b = ones(), ones()
    w.flags.writeable = False
    params = {"w": w, "b": b}
    result = ao.Optimizer(params, HALF).step({"w": ones(), "b": ones()})
    assert result is not params
    assert result["b"] is b
    assert w.tolist() == [1, 1]
    assert result["w"].tolist() == result["b"].tolist() == [0.5, 0.5]
    scalars = ao.Optimizer({"s": np.float32(3)}, HALF).step({"s": np.float32(2)})
    assert (scalars["s"], scalars["s"].dtype) == (2, np.float32)


def test_the_same_array_twice_is_fine_only_where_it_is_replaced():
    x = jnp.ones(2)
    result = ao.Optimizer({"a": x, "b": x}, HALF).step({"a": x, "b": 2 * x})
    assert (result["a"].tolist(), result["b"].tolist()) == ([0.5, 0.5], [0, 0])
    y = ones()
    with pytest.raises(ValueError, match="'a' and 'b' are the same array"):
        ao.Optimizer({"a": y, "b": y}, HALF)


@pytest.mark.parametrize(
    "grads",
    [
        {"blocks": [{"w": ones(value=2), "b": None}], "head": ones(value=4)},
        {"blocks.0.w": ones(value=2), "blocks.0.b": None, "head": ones(value=4)},
        {"head": ones(value=4), "blocks.0.b": None, "blocks.0": {"w": ones(value=2)}},
        {"head": ones(value=4), "blocks": ({"b": None, "w": ones(value=2)},), "absent": None},
    ],
    ids=["structure", "flat mapping", "other order", "other containers, and None for what is not there"],
)
def test_gradients_are_matched_by_name(grads):
    params = {"blocks": [{"w": ones(), "b": ones()}], "head": ones()}
    opt = ao.Optimizer(params, HALF)
    opt.step(grads)
    assert params["blocks"][0]["w"].tolist() == [0, 0]
    assert params["blocks"][0]["b"].tolist() == [1, 1]
    assert params["head"].tolist() == [-1, -1]
    assert [(name, slots["t"]) for name, slots in opt.state.items()] == [
        ("blocks.0.w", 1),
        ("blocks.0.b", 0),
        ("head", 1),
    ]


def test_a_tensor_without_a_gradient_keeps_its_own_count(backend):
    masks = {"every": [1, 1, 1, 1, 1], "late": [0, 0, 1, 1, 1], "gaps": [1, 0, 1, 0, 1], "never": [0] * 5}
    start = {name: drawn((3, 2), i) for i, name in enumerate(masks)}
    grads = {
        name: [g if there else None for g, there in zip(drawn((3, 2), *range(9, 14)), mask, strict=True)]
        for name, mask in masks.items()
    }
    opt = ao.Optimizer({name: backend.array(p, "float64") for name, p in start.items()}, ao.LAMB(lr=0.1))
    for s in range(5):
        opt.step({name: None if g[s] is None else backend.array(g[s], "float64") for name, g in grads.items()})
    assert opt.step_count == 5
    for name, p in start.items():
        counts = []
        expected = by_witness("LAMB", {"lr": 0.1}, p, grads[name], counts)
        np.testing.assert_allclose(backend.numpy(opt.params[name]), expected, rtol=EXACT, atol=EXACT)
        assert [opt.state[name]["t"]] == counts


def test_schedules_go_by_the_steps_of_the_optimizer_not_by_updates_of_the_tensor():
    opt = ao.Optimizer({"a": ones((1,)), "b": ones((1,))}, ao.SGD(lr=[1.0, 10.0]))
    opt.step({"a": ones((1,)), "b": None})
    opt.step({"a": None, "b": ones((1,))})
    assert (opt.params["a"].item(), opt.params["b"].item()) == (0, -9)


def test_a_step_without_any_gradient_counts_and_changes_nothing():
    opt = ao.Optimizer([ones(), ones()], ao.LAMB(), clip_norm=1.0, stats=True)
    opt.step([None, None])
    assert (opt.step_count, opt.state["0"]["t"], opt.params[0].tolist(), dict(opt.stats)) == (1, 0, [1, 1], {})


def test_gradients_may_have_another_real_dtype(backend):
    for p, g in [("float32", "float64"), ("float64", "float32")]:
        result = ao.Optimizer(backend.array([2.0, 4.0], p), HALF).step(backend.array([2.0, 1.0], g))
        np.testing.assert_array_equal(backend.numpy(result), np.asarray([1.0, 3.5], p), strict=True)


TORCH = {
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1), ao.AdamW(lr=0.05, weight_decay=0.1)),
    "AdamW amsgrad": (
        lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.5), amsgrad=True),
        ao.AdamW(lr=0.05, beta1=0.8, beta2=0.5, amsgrad=True),
    ),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05), ao.SGD(lr=0.05)),
    "SGD momentum": (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
        ao.SGD(lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    ),
    "SGD Nesterov": (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        ao.SGD(lr=0.05, momentum=0.9, nesterov=True),
    ),
}


@pytest.mark.parametrize(("theirs", "rule"), TORCH.values(), ids=TORCH)
def test_a_pytorch_module_trains_as_with_its_own_optimizer(theirs, rule):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 5, generator=generator, dtype=torch.float64)
    y = torch.tanh(x @ torch.randn(5, 1, generator=generator, dtype=torch.float64))
    one = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for p in one.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.4)
    one = one.double()
    two = copy.deepcopy(one)
    named = dict(two.named_parameters())
    reference, opt = theirs(one.parameters()), ao.Optimizer(named, rule)
    losses = []
    for _ in range(20):
        for model in (one, two):
            model.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
        reference.step()
        assert opt.step({name: p.grad for name, p in named.items()}) is named
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    for p, (name, q) in zip(one.parameters(), two.named_parameters(), strict=True):
        assert q is named[name]
        assert (q.requires_grad, q.is_leaf, q.grad_fn) == (True, True, None)
        torch.testing.assert_close(q, p, rtol=1e-10, atol=1e-12)


def test_pytorch_parameters_as_a_generator_with_some_frozen():
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    bias, weight = model.bias.clone(), model.weight.detach().clone()
    opt = ao.Optimizer(model.parameters(), HALF)
    model(torch.ones(1, 3)).sum().backward()
    opt.step(p.grad for p in model.parameters())
    assert torch.equal(model.weight.detach(), weight - 0.5)
    assert torch.equal(model.bias, bias)


def test_dtypes_and_libraries_may_be_mixed(auto):
    made = {
        "numpy": np.full(2, 2.0),
        "float16": np.full(2, 2.0, "float16"),
        "bfloat16": np.full(2, 2.0, ml_dtypes.bfloat16),
        "torch": torch.full((2,), 2.0, requires_grad=True),
        "torch16": torch.full((2,), 2.0, dtype=torch.bfloat16),
        "jax": jnp.full((2,), 2.0, dtype="float32"),
        "jax64": jnp.full((2,), 2.0),
        "strict": BACKENDS["array_api_strict"].array([2.0, 2.0]),
        "complex": np.full(2, 2.0 + 2.0j),
        "scalar": np.asarray(2.0, "float32"),
    }
    rule = ao.AdamW(lr=0.25, weight_decay=0.0, eps=1e-30)  # p - lr·sign(g) at first
    opt = ao.Optimizer(made, rule, stats=True)
    result = opt.step({name: x.detach() * 3 if name == "torch" else x * 3 for name, x in made.items()})
    for name, x in made.items():
        assert (type(result[name]), result[name].dtype, result[name].shape) == (type(x), x.dtype, x.shape)
        assert (result[name] is x) == (not isinstance(x, jax.Array))
        step = 0.25 * (1 + 1j) / 2**0.5 if name == "complex" else 0.25
        start = 2 + 2j if name == "complex" else 2
        host = result[name].detach().to(torch.float64).numpy() if name.startswith("torch") else np.asarray(result[name])
        np.testing.assert_allclose(host.astype("complex128"), start - step, rtol=1e-6)
        slot = str(opt.state[name]["m"].dtype).rsplit(".", 1)[-1]
        assert slot == {"numpy": "float64", "jax64": "float64", "complex": "complex128"}.get(name, "float32")
    assert set(opt.stats.read()) == set(made)


def test_flatten_keeps_no_leaf():
    class Leaf:
        pass

    leaf = Leaf()
    gone = weakref.ref(leaf)
    gc.disable()
    try:
        assert flatten({"a": [leaf]}) == [("a.0", leaf)]
        del leaf
        assert gone() is None
    finally:
        gc.enable()
