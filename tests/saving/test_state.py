"""The Optimizer: saving and loading its state."""

import copy
import math
import pickle

import array_api_compat
import numpy as np
import pytest

import arrayopt as ao
from tests.conftest import BACKENDS
from tests.support.optimizing import GRADS, P, more, ones, values

pytestmark = pytest.mark.usefixtures("auto")


def trained(array=np.asarray, dtype="float64", steps=2, rule=None, groups=None, **options):
    """An optimizer over two tensors that has made some steps, the second tensor one fewer."""
    opt = ao.Optimizer(
        {"w": array(P.astype(dtype)), "b": array(P[0].astype(dtype))},
        rule or ao.AdamW(lr=ao.schedules.Constant(0.1), amsgrad=True),
        groups={"b": {"lr": [0.1, 0.2, 0.3, 0.4], "weight_decay": 0.0}} if groups is None else groups,
        **options,
    )
    for s in range(steps):
        more(opt, array, s)
    return opt


def same_dtype(backend):
    """What makes arrays of a library of NumPy's, dtype and all."""
    return lambda x: backend.array(x, x.dtype)


def assert_same(one, other):
    np.testing.assert_equal(values(one), values(other))


def test_a_loaded_optimizer_goes_on_as_the_saved_one_would(backend):
    array = same_dtype(backend)
    opt = trained(array, clip_norm=0.5)
    saved = pickle.loads(pickle.dumps(opt.state_dict())) if backend.name != "array_api_strict" else opt.state_dict()
    params = {name: array(backend.numpy(x)) for name, x in opt.params.items()}
    other = ao.Optimizer(params, ao.AdamW(amsgrad=True), groups={"b": {}})  # other numbers, the same structure
    other.load_state_dict(saved)
    assert (other.step_count, other.state["w"]["t"], other.state["b"]["t"], other.clip_norm) == (2, 2, 1, 0.5)
    assert (other.rule, [g.rule for g in other.groups]) == (opt.rule, [g.rule for g in opt.groups])
    assert [g.overridden for g in other.groups] == [g.overridden for g in opt.groups] == [{"lr", "weight_decay"}, set()]
    for s in (2, 3):
        more(opt, array, s)
        more(other, array, s)
    assert_same(opt, other)


def test_a_snapshot_is_a_copy_both_ways():
    opt = trained()
    saved = opt.state_dict()
    kept = copy.deepcopy(saved)
    more(opt)
    np.testing.assert_equal(saved["tensors"], kept["tensors"])
    other = trained(steps=0)
    other.load_state_dict(saved)
    more(other)
    np.testing.assert_equal(saved["tensors"], kept["tensors"])
    saved["tensors"]["w"]["slots"]["m"][:] = math.nan
    assert np.isfinite(other.state["w"]["m"]).all()
    assert saved["step"] == 2


def test_a_snapshot_is_plain_data():
    saved = trained().state_dict()

    def visit(node):
        if isinstance(node, dict):
            assert all(type(key) is str for key in node)
            return [x for child in node.values() for x in visit(child)]
        return [x for child in node for x in visit(child)] if isinstance(node, list | tuple) else [type(node)]

    plain = {int, float, str, bool, type(None), np.ndarray}
    assert set(visit(saved)) - plain <= {ao.schedules.Constant, type(ao.SGD(lr=[1.0]).lr)}
    assert saved["step"] == 2
    assert saved["tensors"]["b"]["t"] == 1
    assert list(saved["tensors"]["w"]["slots"]) == ["m", "v", "v_max"]


@pytest.mark.parametrize(
    "made", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["deepcopy", "pickle"]
)
def test_an_optimizer_can_be_copied_and_pickled(made):
    opt = trained(clip_norm=1.0, stats=True)
    twin = made(opt)
    assert_same(opt, twin)
    assert repr(twin) == repr(opt)
    assert (twin.clip_norm, twin.groups[0].lr, twin.stats.read()) == (1.0, opt.groups[0].lr, opt.stats.read())
    before = values(opt)
    more(twin)
    np.testing.assert_equal(values(opt), before)
    more(opt)
    assert_same(opt, twin)
    twin.lr = 5.0
    assert (twin.groups[1].lr, opt.groups[1].lr) == (5.0, opt.lr)
    assert twin.params["w"] is next(iter(twin.step({"w": GRADS[0], "b": GRADS[0][0]}).values()))


@pytest.mark.parametrize(
    "made", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_what_is_shown_as_state_is_plain(made):
    opt = trained()
    opt.lr = lambda step: 0.1  # which cannot be pickled
    shown, expected = made(opt.state), opt.state_dict()["tensors"]
    more(opt)
    assert type(shown) is type(shown["w"]) is type(made(opt.state["w"])) is dict
    for name, about in expected.items():
        np.testing.assert_equal(shown[name], {"t": about["t"], **about["slots"]})


def test_a_group_can_be_copied_and_pickled():
    group = trained().groups[0]
    for twin in (copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert (twin.label, twin.names, twin.rule, twin.overridden) == (
            group.label,
            group.names,
            group.rule,
            group.overridden,
        )


@pytest.mark.parametrize("source", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
def test_state_goes_from_library_to_library(source, target):
    out, into = same_dtype(BACKENDS[source]), same_dtype(BACKENDS[target])
    opt = trained(out, "float32")
    other = ao.Optimizer({k: into(np.asarray(x)) for k, x in opt.params.items()}, opt.rule, groups={"b": {}})
    other.load_state_dict(opt.state_dict())
    np.testing.assert_equal(values(other), values(opt))
    for name, slots in other.state.items():
        for slot in ("m", "v", "v_max"):
            assert array_api_compat.array_namespace(slots[slot]) is array_api_compat.array_namespace(other.params[name])
    more(opt, out)
    more(other, into)
    np.testing.assert_allclose(np.asarray(other.params["w"]), np.asarray(opt.params["w"]), rtol=2e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_dtypes_of_state_are_kept(dtype):
    opt, other = (ao.Optimizer({"w": BACKENDS["numpy"].array([1.0, 2.0], dtype)}, ao.LAMB()) for _ in range(2))
    opt.step({"w": opt.params["w"] * 1})
    other.load_state_dict(pickle.loads(pickle.dumps(opt.state_dict())))
    expected = {"float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)
    assert other.state["w"]["m"].dtype == expected
    assert other.state["w"]["v"].dtype == {"complex64": "float32", "complex128": "float64"}.get(dtype, expected)
    np.testing.assert_array_equal(other.state["w"]["m"], opt.state["w"]["m"])
    assert other.state_dict()["tensors"]["w"]["dtype"] == dtype


# what is different in the optimizer that loads, and every word that the refusal must have
MISFITS = {
    "rule": (
        {"rule": ao.LAMB()},
        ["rule was AdamW, here LAMB", "group 'b' was AdamW, here LAMB", "slots ['m', 'v', 'v_max'] at 'w'", "at 'b'"],
    ),
    "switches": (
        {"rule": ao.AdamW(lr=0.1, bias_correction=False)},
        ["rule had bias_correction=True, here False", "had amsgrad=True, here False", "slots"],
    ),
    "switch of a group": (
        {"groups": {"b": {"bias_correction": False}}},
        ["group 'b' had bias_correction=True, here False"],
    ),
    "groups": ({"groups": {}}, ["saved 2 groups, here 1", "group 'all' held ['b'], here ['w', 'b']"]),
    "groups the other way": (
        {"groups": {"w": {}}},
        ["group 'w' held ['b'], here ['w']", "group 'rest' held ['w'], here ['b']"],
    ),
    "names": (
        {"params": {"w": P.copy(), "bias": P[0].copy()}, "groups": {"bias": {}}},
        ["missing 'bias'", "unexpected 'b'", "group 'bias' held ['b']"],
    ),
    "shapes": (
        {"params": {"w": P.T.copy(), "b": P.copy()}},
        ["shape (4, 3) at 'w', expected (3, 4)", "shape (3,) at 'b', expected (4, 3)", "m of 'w'", "v_max of 'b'"],
    ),
    "dtypes": (
        {"params": {"w": P.astype("float32"), "b": P[0].astype("float16")}},
        [
            "dtype float64 at 'w', expected float32",
            "dtype float64 at 'b', expected float16",
            "'v_max', 'master']",
            "v of 'w' is float64",
        ],
    ),
    "everything": (
        {"rule": ao.SGD(lr=1, momentum=0.5), "params": {"v": P.copy(), "b": P[:2].copy()}, "groups": {}},
        [
            "rule was AdamW, here SGD",
            "saved 2 groups, here 1",
            "missing 'v'",
            "unexpected 'w'",
            "shape (3,) at 'b'",
            "slots ['m', 'v', 'v_max'] at 'b', expected ['buf']",
        ],
    ),
}


@pytest.mark.parametrize(("given", "words"), MISFITS.values(), ids=MISFITS)
def test_state_that_does_not_fit_is_refused_with_every_mismatch(given, words):
    saved = trained().state_dict()
    given = {"params": {"w": P.copy(), "b": P[0].copy()}, "rule": trained().rule, "groups": {"b": {}}, **given}
    opt = ao.Optimizer(given.pop("params"), given.pop("rule"), **given)
    opt.step({name: x * 0 + 1 for name, x in opt.params.items()})
    before, rules = values(opt), (opt.rule, [(g.rule, g.overridden) for g in opt.groups])
    before = copy.deepcopy(before)
    with pytest.raises(ValueError, match=r"^Optimizer\.load_state_dict: the state does not fit: ") as caught:
        opt.load_state_dict(saved)
    for word in words:
        assert word in str(caught.value)
    np.testing.assert_equal(values(opt), before)
    assert (opt.rule, [(g.rule, g.overridden) for g in opt.groups]) == rules


def test_a_hyper_parameter_that_was_off_does_not_fit_one_that_is_on():
    saved = ao.Optimizer(ones(), ao.LAMB(max_ratio=1.0)).state_dict()
    with pytest.raises(ValueError, match=r"had max_ratio=1\.0, here None"):
        ao.Optimizer(ones(), ao.LAMB(min_norm=1.0)).load_state_dict(saved)


def test_a_shallow_copy_is_refused():
    with pytest.raises(TypeError, match=r"use copy\.deepcopy"):
        copy.copy(ao.Optimizer(np.ones(2), ao.SGD(lr=0.1)))
