"""What `arrayopt.testing` finds: differences of the right size at the right place, and none where there are none."""

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.libraries import LIBRARIES, UnavailableError, open_library, to_numpy
from arrayopt.testing import assert_equivalent, backend_names, compare
from arrayopt.testing.backends import choose, start
from arrayopt.testing.ulps import Scale, ulps
from tests.support.engines import EVERY, STAND_IN, TORCH

HOST = [f"numpy:{engine}" for engine in EVERY]


@dataclass(frozen=True, kw_only=True, repr=False)
class Sorted(ao.Rule):
    """Does what no tracer follows."""

    lr: ao.Hyper = ao.real("[0, inf)", 0.1)

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        return p - h.lr * xp.sort(g), {}


@dataclass(frozen=True, kw_only=True, repr=False)
class Faulty(ao.Rule):
    """SGD, until a library other than NumPy comes along: then one element is wrong from its third step on."""

    lr: ao.Hyper = ao.real("[0, inf)", 0.1)
    wrong: ao.Hyper = ao.real("[0, inf)", 1e-3)
    raises: bool = ao.flag(False)

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        new = p - h.lr * g
        if "strict" not in xp.__name__ or h.t < 3 or p.ndim != 2:
            return new, {}
        if self.raises:
            raise RuntimeError("no\nway")
        spot = xp.asarray(np.arange(p.shape[0] * p.shape[1]).reshape(p.shape) == 7)
        return xp.where(spot, new + h.wrong, new), {}


@dataclass(frozen=True, kw_only=True, repr=False)
class Writing(ao.Rule):
    """SGD with momentum that may write what it is given."""

    lr: ao.Hyper = ao.real("[0, inf)", 0.1)
    slot: bool = ao.flag(False)
    gradient: bool = ao.flag(False)
    parameter: bool = ao.flag(False)

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        m = s["m"]
        if self.slot:
            m *= 0.9
            m += g
        else:
            m = 0.9 * m + g
        if self.gradient:
            g *= 2.0
        if self.parameter:
            p -= h.lr * m
            return p, {"m": m}
        return p - h.lr * m, {"m": m}


def problem(dtype="float32"):
    rng = np.random.default_rng(0)
    return {"w": rng.standard_normal((4, 3)).astype(dtype), "b": np.zeros(5, dtype), "s": np.array(0.5, dtype)}


def noise(params, step):
    rng = np.random.default_rng(step)
    return {name: np.asarray(rng.standard_normal(p.shape)).astype(p.dtype) for name, p in params.items()}


# ---- ULPs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("value", [1.0, 1.5, 0.75, 3.0e-3, 1e-7])
def test_a_unit_is_the_spacing_of_the_dtype(dtype, value):
    x = np.array([value], dtype)
    above = np.nextafter(x, np.array(np.inf, dtype))
    got = ulps(np.float64(x), np.float64(above), np.abs(np.float64(x)), dtype)
    assert got == 1.0
    assert ulps(np.float64(x), np.float64(above), np.zeros(1), dtype) >= 1.0  # no smaller than the least there is


def test_complex_numbers_have_the_units_of_their_parts():
    x = np.array([1.0 + 0.0j])
    assert ulps(x, x + 2.0**-23 * 1j, np.abs(x), "complex64") == 1.0


def test_what_is_not_finite():
    nan, inf = np.nan, np.inf
    expected = np.array([nan, inf, -inf, inf, 1.0, 1.0, nan, 0.0])
    got = np.array([nan, inf, -inf, -inf, nan, inf, 1.0, -0.0])
    np.testing.assert_array_equal(ulps(expected, got, np.ones(8), "float32"), [0.0, 0.0, 0.0, inf, inf, inf, inf, 0.0])


def test_the_scale_is_the_largest_so_far():
    scale = Scale(np.array([4.0, 0.0, np.nan]))
    np.testing.assert_array_equal(scale.values, [4.0, 0.0, 0.0])
    scale.follow(np.array([1.0, 0.0, np.inf]))
    rms = np.sqrt(9.0 / 3)  # of the updates 3, 0 and one that is not finite
    np.testing.assert_allclose(scale.values, [4.0, rms, rms], rtol=1e-15)
    scale.follow(np.array([1.0, 0.0, 0.0]))
    np.testing.assert_allclose(scale.values, [4.0, rms, rms], rtol=1e-15)
    huge = Scale(np.zeros(2))
    huge.follow(np.array([1e200, 1e200]))  # whose squares are not finite
    np.testing.assert_allclose(huge.values, 1e200)
    assert Scale(np.zeros((0, 3))).follow(np.zeros((0, 3))) is None


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_every_backend_computes_the_same():
    found = assert_equivalent(ao.LAMB(lr=0.01), problem(), noise, steps=3)
    compared = {name for name, outcome in found.items() if outcome.difference is not None}
    expected = {*HOST[1:], "torch:array_api", "jax:array_api", "jax:jit"}
    assert compared >= expected | {"array_api_strict:array_api"}
    assert found["numpy:array_api"].difference.ulps == 0.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
def test_other_dtypes(dtype):
    params = {"w": open_library("numpy").array(np.linspace(-1.0, 1.0, 6), dtype)}
    found = assert_equivalent(ao.AdamW(lr=0.01), params, lambda params, step: params, steps=2)
    assert found["torch:array_api"].difference.ulps <= 4
    if dtype == "bfloat16":
        assert "array_api_strict has no bfloat16" in found["array_api_strict:array_api"].skipped


def test_a_wrong_element_is_found_at_its_place():
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(Faulty(wrong=1e-3), problem(), noise, engines=["array_api_strict", "torch"], steps=4)
    head, line = str(caught.value).splitlines()  # PyTorch is not among the wrong ones
    assert "Faulty(lr=0.1" in head
    assert "is not what arrayopt.update computes with numpy within 64 ULPs" in head
    assert "array_api_strict:array_api: " in line
    assert "ULPs at 'w' [2, 1], step " in line
    assert " for " in line
    found = compare(Faulty(wrong=1e-3), problem(), noise, engines=["array_api_strict"], steps=3)
    (outcome,) = found.values()
    difference = outcome.difference
    assert (difference.tensor, difference.index, difference.step) == ("w", (2, 1), 2)
    assert difference.got - difference.expected == pytest.approx(1e-3, rel=1e-3)
    unit = np.spacing(np.float32(1.0))  # values are near 1: units are this or some halves and doubles of it
    assert 1e-3 / unit / 8 < difference.ulps < 1e-3 / unit * 8


def test_the_limit_is_what_one_says():
    for limit, passes in ((1e9, True), (1.0, False)):
        if passes:
            assert_equivalent(Faulty(), problem(), noise, engines=["array_api_strict"], max_ulp=limit)
        else:
            with pytest.raises(AssertionError, match="within 1 ULPs"):
                assert_equivalent(Faulty(), problem(), noise, engines=["array_api_strict"], max_ulp=limit)


def test_gradients_that_are_not_finite_are_no_difference():
    def grads(params, step):
        made = noise(params, step)
        made["w"][0, 0], made["w"][1, 1] = np.nan, np.inf
        return made

    found = assert_equivalent(ao.SGD(lr=0.1, momentum=0.9), problem(), grads, engines=[*HOST, "torch"], steps=3)
    assert found["numpy:numpy"].difference.ulps == 0.0


def test_an_engine_that_errs_is_found(monkeypatch):
    from arrayopt.engines.numpy import engine

    run = engine.NumPy.batch.launch

    def spoiled(batch, rows, grads, threads):
        run(batch, rows, grads, threads)
        if batch.tensors[0].t == 1:  # in the second step
            batch.tensors[0].array.flat[4] = np.nan

    monkeypatch.setattr(engine.NumPy.batch, "launch", spoiled)
    params = {"w": np.ones((2, 3), np.float32)}
    outcome = compare(ao.SGD(lr=0.1), params, noise, engines=["numpy:numpy"], steps=3)["numpy:numpy"]
    assert (outcome.difference.tensor, outcome.difference.index, outcome.difference.step) == ("w", (1, 1), 1)
    assert outcome.difference.ulps == np.inf
    assert np.isnan(outcome.difference.got)
    assert not outcome.passes(1e30)


def test_a_backend_that_raises_is_found():
    with pytest.raises(AssertionError, match="array_api_strict:array_api: RuntimeError: no way"):
        assert_equivalent(Faulty(raises=True), problem(), noise, engines=["array_api_strict", "torch"], steps=4)


# ---- users' rules, parameters and gradients --------------------------------------------------------------------------


def test_a_rule_that_cannot_be_traced_is_compared_where_it_can_run():
    params = {"w": np.arange(5.0)}
    found = assert_equivalent(Sorted(), params, noise, engines=[STAND_IN, "numpy:numpy", "torch", "array_api_strict"])
    assert "cannot be traced" in found[f"numpy:{STAND_IN}"].skipped
    assert found["torch:array_api"].difference.ulps == 0.0
    with pytest.raises(ValueError, match=rf"nothing to compare Sorted with: numpy:{STAND_IN}: .*sort cannot be traced"):
        assert_equivalent(Sorted(), params, noise, engines=[STAND_IN])


def test_a_schedule_that_jax_cannot_trace_is_skipped():
    rule = ao.SGD(lr=lambda step: 0.1 if step < 2 else 0.01)
    found = assert_equivalent(rule, problem(), noise, engines=["jax"], steps=3)
    assert "cannot be traced" in found["jax:jit"].skipped
    assert found["jax:array_api"].difference is not None


def test_parameters_and_gradients_are_not_changed():
    params = {"blocks": [problem()], "none": None}
    kept = {name: p.copy() for name, p in params["blocks"][0].items()}
    seen = []

    def grads(now, step):  # a tree, which shares memory with what it is called with
        seen.append((now, step))
        assert now["blocks"][0]["w"] is not params["blocks"][0]["w"]
        return now

    assert_equivalent(ao.AdamW(), params, grads, engines=HOST, steps=2)
    assert [step for _, step in seen] == [0, 1]
    for name, p in kept.items():
        np.testing.assert_array_equal(params["blocks"][0][name], p)


def test_other_libraries_parameters_options_and_tensors_left_out():
    params = [torch.ones(3, dtype=torch.bfloat16), torch.zeros((2, 2), requires_grad=True)]
    found = assert_equivalent(
        ao.SGD(lr=0.1, momentum=0.9),
        params,
        lambda now, step: [torch.ones(3), None if step else torch.ones((2, 2))],
        engines=["torch", "numpy"],
        groups={"1": {"weight_decay": 0.0}},
        clip_norm=1.0,
        steps=3,
    )
    assert {name for name, outcome in found.items() if outcome.difference} == {
        *HOST,
        *(f"torch:{engine}" for engine in TORCH),
    }
    assert params[0].equal(torch.ones(3, dtype=torch.bfloat16))
    found = assert_equivalent(
        ao.SGD(lr=0.1, momentum=0.9), params, lambda now, step: [torch.ones(3), None], engines=["jax:jit", STAND_IN]
    )
    assert found["jax:jit"].difference is not None
    options = {"clip_norm": 1.0, "engines": ["jax:jit", STAND_IN]}
    found = assert_equivalent(ao.SGD(lr=0.1, momentum=0.9), params, lambda now, step: [torch.ones(3), None], **options)
    assert "no other options than groups" in found["jax:jit"].skipped


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"engines": ["abacus"]}, ValueError, "there is no backend 'abacus'; there are numpy:array_api"),
        ({"steps": 0}, ValueError, "`steps` must be at least 1; got 0"),
        ({"params": {"w": [1.0]}}, TypeError, "params must be arrays"),
        ({"rule": "LAMB"}, TypeError, "must be a Rule"),
        ({"grads_fn": lambda params, step: {}}, ValueError, "missing 'w'"),
        ({"speed": 3}, TypeError, "speed"),
    ],
)
def test_wrong_arguments(change, error, said):
    given = {"rule": ao.SGD(lr=0.1), "params": problem(), "grads_fn": noise, "engines": HOST} | change
    rule, params, grads_fn = (given.pop(name) for name in ("rule", "params", "grads_fn"))
    with pytest.raises(error, match=said):
        assert_equivalent(rule, params, grads_fn, **given)


# ---- backends --------------------------------------------------------------------------------------------------------


def test_names_stand_for_backends():
    assert backend_names()[0] == "numpy:array_api"
    assert [b.name for b in choose(["numpy"])] == HOST
    assert [b.name for b in choose(["numba", "jax:jit"])] == ["numpy:numba", "torch:numba", "jax:jit"]
    assert {b.name.partition(":")[0] for b in choose(["array_api"])} >= {"numpy", "torch", "jax", "array_api_strict"}


def test_a_library_that_is_named_must_be_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "array_api_strict", None)
    with pytest.raises(UnavailableError, match=r"array_api_strict cannot be used: .*pip install array-api-strict"):
        choose(["array_api_strict", "numpy"])
    assert "array_api_strict:array_api" not in {b.name for b in choose()}
    assert "array_api_strict:array_api" not in {b.name for b in choose(["array_api"])}


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name != "cupy"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex128"])
def test_values_go_in_and_come_out(name, dtype):
    library = open_library(name)
    if name == "array_api_strict" and dtype in ("float16", "bfloat16"):
        with pytest.raises(UnavailableError, match=f"has no {dtype}"):
            library.array([1.5], dtype)
        return
    x = library.array([[1.5, -2.25]], dtype)
    assert str(x.dtype).rpartition(".")[2] == dtype
    np.testing.assert_array_equal(to_numpy(x), [[1.5, -2.25]])
    assert to_numpy(x).dtype == ("complex128" if dtype == "complex128" else "float64")


def test_the_compiled_functional_form_makes_the_same_steps():
    (backend,) = choose(["jax:jit"])
    rule, w = ao.SGD(lr=0.1, momentum=0.9), backend.array([1.0, 2.0])
    run = start(backend, rule, {"w": w}, {})
    run.step({"w": w})
    got = run.step({"w": None})["w"]
    np.testing.assert_allclose(np.asarray(got), [0.9, 1.8], rtol=1e-6)


# ---- the fixture -----------------------------------------------------------------------------------------------------

USER_TEST = """
import numpy as np, arrayopt as ao
from arrayopt.testing.fixtures import backend

def test_a_step(backend):
    w = backend.array([1.0, 2.0], "float32")
    assert backend.xp.sum(w) == 3.0
    engine = "array_api" if backend.engine == "jit" else backend.engine
    w = ao.Optimizer(w, ao.SGD(lr=0.5), engine=engine).step(backend.array([1.0, 1.0]))
    assert np.all(backend.numpy(w) == [0.5, 1.5])
"""


def test_the_fixture_runs_a_test_on_every_backend(tmp_path):
    (tmp_path / "test_user.py").write_text(USER_TEST)
    few = "numpy or strict"  # the others take seconds to import
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
        "-k",
        few,
        tmp_path,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    chosen = len(HOST) + 1
    assert f"{chosen} passed, {len(backend_names()) - chosen} deselected" in ran.stdout


def test_the_fixture_skips_what_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "test_user.py").write_text("import sys\nsys.modules['array_api_strict'] = None\n" + USER_TEST)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
        "-k",
        "strict",
    ]
    ran = subprocess.run([*command, tmp_path], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 skipped" in ran.stdout
    assert "pip install array-api-strict" in ran.stdout


def test_pytest_is_imported_for_the_fixture_alone():
    code = "import sys, arrayopt.testing; print('pytest' in sys.modules, 'rich' in sys.modules, 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False"] * 3


# ---- rules that write ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda x: x, lambda x: torch.asarray(x)], ids=["numpy", "torch"])
@pytest.mark.parametrize(("field", "letter"), [("slot", "m"), ("gradient", "g"), ("parameter", "p")])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_rule_that_writes_what_it_is_given_is_found(field, letter, make, dtype):
    params = {name: make(p) for name, p in problem(dtype).items()}
    grads = {name: make(p) for name, p in noise(problem(dtype), 0).items()}
    others = ["numpy:array_api", "torch:array_api"]
    with pytest.raises(TypeError, match=f"Writing.update: a rule must not write .*; it writes to .*`{letter}`"):
        assert_equivalent(Writing(**{field: True}), params, lambda p, step: grads, engines=others, steps=2)
    found = assert_equivalent(Writing(), params, lambda p, step: grads, engines=others, steps=2)
    assert all(not outcome.error for outcome in found.values())
