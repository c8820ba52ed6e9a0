"""SOAP: what is the same in every library, when the basis changes, and which updates are fused."""

from types import SimpleNamespace

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.arrays import array_namespace
from arrayopt.engines import fused_step
from arrayopt.engines.array_api import apply
from arrayopt.engines.registry import FUSED as CHOSEN
from arrayopt.fusion.plans import plan_for
from arrayopt.rules import bases
from arrayopt.testing.diagnosis.hypothesis import plain
from tests.support.engines import COMPILED, FUSED, SLOW
from tests.support.slow import marked

RULE = ao.SOAP(lr=0.1, precondition_frequency=2)
SIDES = {"l": "ql", "r": "qr"}


def run(rule, params, steps=8, zero=0, engine="array_api", size=1.0):
    """An optimizer after some steps with normal gradients, the first few of them zero."""
    rng = np.random.default_rng(1)
    opt = ao.Optimizer(params, rule, engine=engine)
    for t in range(steps):
        opt.step({n: rng.standard_normal(p.shape) * (t >= zero) * size for n, p in params.items()})
    return opt


def drawn(**shapes):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def noisy(function, size=2e-16):
    """A function of matrices, with roundings of its own."""
    rng = np.random.default_rng(2)

    def changed(x, **options):
        return function(x * (1 + size * rng.standard_normal(x.shape)), **options)

    return changed


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("frequency", [1, 3])
def test_rounding_errors_decide_nothing_where_gradients_have_no_direction_yet(frequency, zero, monkeypatch):
    """Of wide and tall matrices; each one's basis would else be that of a library's rounding errors."""
    rule = ao.SOAP(lr=0.1, precondition_frequency=frequency)
    shapes = {"wide": (2, 9), "tall": (9, 2), "column": (7, 1)}
    straight = run(rule, drawn(**shapes), zero=zero)
    monkeypatch.setattr(np.linalg, "eigh", noisy(np.linalg.eigh))
    monkeypatch.setattr(np.linalg, "qr", noisy(np.linalg.qr))
    other = run(rule, drawn(**shapes), zero=zero)
    assert any((other.params[n] != straight.params[n]).any() for n in shapes)
    for n in shapes:
        np.testing.assert_allclose(other.params[n], straight.params[n], rtol=0, atol=1e-11, err_msg=n)
        for slot, x in straight.state[n].items():
            np.testing.assert_allclose(other.state[n][slot], x, rtol=0, atol=1e-11, err_msg=f"{n}.{slot}")


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e6])
def test_bases_are_orthogonal_and_hold_eigenvectors(size):
    opt = run(RULE, drawn(wide=(3, 7), square=(5, 5)), steps=1, size=size)
    for n in opt.state:
        for side, q in SIDES.items():
            a, q = opt.state[n][side], opt.state[n][q]
            np.testing.assert_allclose(q.T @ q, np.eye(len(q)), rtol=0, atol=1e-14)
            turned = q.T @ a @ q
            np.testing.assert_allclose(turned, np.diag(np.diag(turned)), rtol=0, atol=1e-14 * abs(a).max())
            assert (np.diff(np.diag(turned)) <= 1e-14 * abs(a).max()).all()
            assert ((q / np.arange(1, len(q) + 1)[:, None]).sum(0) >= 0).all()


def test_power_iteration_comes_to_the_eigenvectors():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((5, 5)))[0]
    a, q = basis @ np.diag([5.0, 3.0, 2.0, 1.0, 0.0]) @ basis.T, np.eye(5)
    xp = array_namespace(np.ones(1))
    for _ in range(200):
        q, _ = bases.next_basis(xp, a, q)
    np.testing.assert_allclose(abs(q), abs(basis), rtol=0, atol=1e-12)


def test_the_order_goes_with_the_columns():
    a, xp = np.diag([1.0, 4.0, 0.0, 9.0]), array_namespace(np.ones(1))
    q, order = bases.next_basis(xp, a, np.eye(4))
    assert order.tolist() == [3, 1, 0, 2]
    np.testing.assert_allclose(q, np.eye(4)[:, order], atol=1e-15)


def test_a_basis_of_full_rank_takes_one_qr_and_is_the_same_as_with_two(monkeypatch):
    rng, xp = np.random.default_rng(0), array_namespace(np.ones(1))
    x = rng.standard_normal((3, 6, 6))
    a, q = x @ x.mT, np.linalg.qr(rng.standard_normal((3, 6, 6)))[0]
    calls, real = [], np.linalg.qr
    monkeypatch.setattr(np.linalg, "qr", lambda y, **how: calls.append(None) or real(y, **how))
    once = bases.next_basis(xp, a, q)
    assert len(calls) == 1
    monkeypatch.setattr(bases, "np", SimpleNamespace(ndarray=(), finfo=np.finfo))  # no array is known as NumPy's
    twice = bases.next_basis(xp, a, q)
    assert len(calls) == 3
    assert all(np.array_equal(one, other) for one, other in zip(once, twice, strict=True))


def test_eigenvectors_are_taken_in_the_steps_that_need_them_alone(monkeypatch):
    """The host knows the step."""
    calls = []
    for name in ("eigh", "qr"):
        real = getattr(np.linalg, name)
        monkeypatch.setattr(
            np.linalg, name, lambda x, real=real, name=name, **how: calls.append(name) or real(x, **how)
        )
    found, params, rng = [], drawn(w=(3, 4)), np.random.default_rng(0)
    opt = ao.Optimizer(params, ao.SOAP(precondition_frequency=3), engine="numpy")
    for _ in range(8):
        calls.clear()
        opt.step({"w": rng.standard_normal((3, 4))})
        found.append((calls.count("eigh"), calls.count("qr")))
    none, changed = (0, 0), (0, 2)  # one for each side, which is of full rank
    assert found == [(2, 2), none, none, changed, none, none, changed, none]


def test_the_first_update_moves_nothing_and_each_tensor_counts_its_own():
    opt = ao.Optimizer(drawn(a=(2, 3), b=(4,)), RULE, engine="numpy")
    start = {n: p.copy() for n, p in opt.params.items()}
    opt.step({"a": np.ones((2, 3)), "b": None})
    assert all((opt.params[n] == start[n]).all() for n in start)
    opt.step({"a": np.ones((2, 3)), "b": np.ones(4)})
    assert (opt.params["a"] != start["a"]).all()
    assert (opt.params["b"] == start["b"]).all()


def test_a_side_that_is_too_long_keeps_the_identity_and_a_vector_gets_adam():
    params = drawn(wide=(3, 5), tall=(5, 3), both=(4, 6), vector=(5,), one=())
    opt = run(ao.SOAP(lr=0.1, max_precondition_dim=3, weight_decay=0.0), params, steps=5)
    slots = {n: set(x) - {"t", "m", "v"} for n, x in opt.state.items()}
    assert slots == {"wide": {"l", "ql"}, "tall": {"r", "qr"}, "both": set(), "vector": set(), "one": set()}
    rng, start = np.random.default_rng(1), drawn(wide=(3, 5), tall=(5, 3), both=(4, 6), vector=(5,), one=())
    grads = [{n: rng.standard_normal(p.shape) for n, p in start.items()} for _ in range(5)]
    rule = ao.Adam(lr=0.1, beta1=0.95, beta2=0.95, eps=lambda s: 1e-8 / np.sqrt(1 - 0.95 ** (s + 1)))
    adam = ao.Optimizer({n: start[n] for n in ("both", "vector", "one")}, rule, engine="array_api")
    for g in grads[1:]:
        adam.step({n: g[n] for n in adam.params})
    for n, p in adam.params.items():
        np.testing.assert_allclose(opt.params[n], p, rtol=0, atol=1e-14, err_msg=n)


def test_a_gradient_that_is_not_finite_reaches_the_parameter_and_raises_nothing():
    for bad in (np.nan, np.inf):
        for first in (True, False):
            opt = ao.Optimizer({"w": np.ones((3, 4))}, RULE, engine="numpy")
            g = np.random.default_rng(0).standard_normal((3, 4))
            wrong = g.copy()
            wrong[1, 2] = bad
            for x in [wrong, g, g] if first else [g, wrong, g, g]:
                p = opt.step({"w": x})["w"]
            assert np.isnan(p).any(), (bad, first)


def test_zeros_stand_still_and_stacked_layers_are_the_layers():
    opt = ao.Optimizer({"w": np.ones((3, 4))}, ao.SOAP(weight_decay=0.0, precondition_frequency=1), engine="numpy")
    for _ in range(4):
        assert (opt.step({"w": np.zeros((3, 4))})["w"] == 1).all()
    rng = np.random.default_rng(3)
    p, grads = rng.standard_normal((2, 3, 4)), rng.standard_normal((5, 2, 3, 4))
    whole = ao.Optimizer({"w": p.copy()}, ao.SOAP(lr=0.1, stacked=True, precondition_frequency=2), engine="numpy")
    each = ao.Optimizer({str(i): p[i].copy() for i in range(2)}, RULE, engine="numpy")
    for g in grads:
        whole.step({"w": g})
        each.step({str(i): g[i] for i in range(2)})
    assert whole.params["w"].tobytes() == np.stack(list(each.params.values())).tobytes()


@pytest.mark.parametrize(
    ("rule", "shape"),
    [(ao.SOAP(lr=0.1, max_precondition_dim=3), (3, 4)), (ao.SOAP(lr=0.1, stacked=True), (3, 4)), (RULE, (2, 3, 2))],
)
def test_the_functional_form_knows_the_slots_of_each_shape(rule, shape):
    params, rng = drawn(w=shape), np.random.default_rng(4)
    opt, state = ao.Optimizer({"w": params["w"].copy()}, rule, engine="array_api"), rule.init(params)
    for _ in range(3):
        grads = {"w": rng.standard_normal(shape)}
        opt.step(grads)
        params, state = ao.update(rule, params, grads, state)
    assert set(state["tensors"]["w"]) == set(opt.state["w"])
    assert params["w"].tobytes() == opt.params["w"].tobytes()
    del state["tensors"]["w"]["v"]
    with pytest.raises(ValueError, match="update: the state of 'w' must hold"):
        ao.update(rule, params, grads, state)


# ---- engines, libraries and doors ------------------------------------------------------------------------------------

WHY = "SOAP runs some updates unfused, depending on the step number, which this engine counts on the device"


@pytest.mark.parametrize("frequency", [1, 2, 3])
def test_fused_engines_make_the_first_and_every_fth_update_as_it_is_written(frequency, monkeypatch):
    """Of each tensor by its own count."""
    made, real = [], apply.apply_one
    monkeypatch.setattr(apply, "apply_one", lambda *args, **how: made.append(args[0].name) or real(*args, **how))
    rule = ao.SOAP(lr=0.1, precondition_frequency=frequency)
    params, rng, found, late = drawn(a=(2, 3), b=(5, 2), late=(3, 3)), np.random.default_rng(1), [], 2
    fused, exact = (ao.Optimizer({n: p.copy() for n, p in params.items()}, rule, engine=e) for e in FUSED_AND_WRITTEN)
    for t in range(8):
        grads = {n: rng.standard_normal(p.shape) if n != "late" or t >= late else None for n, p in params.items()}
        made.clear()
        fused.step(grads)
        found.append(sorted(made))
        exact.step(grads)
    due = [t == 0 or t % frequency == 0 for t in range(8)]
    assert found == [[*"ab"] * due[t] + ["late"] * (t >= late and due[t - late]) for t in range(8)]
    for n, p in exact.params.items():
        np.testing.assert_allclose(fused.params[n], p, rtol=0, atol=1e-12)
    assert {n: s["t"] for n, s in fused.state.items()} == {"a": 8, "b": 8, "late": 6}


FUSED_AND_WRITTEN = ("numpy", "array_api")
KINDS = {
    "layers": (ao.SOAP(lr=0.1, stacked=True, precondition_frequency=3), {"w": (2, 3, 4)}),
    "kernels": (ao.SOAP(lr=0.1, precondition_frequency=3, ema_decay=0.5), {"w": (4, 2, 3), "b": (6,)}),
    "batches": (ao.SOAP(lr=0.1, precondition_frequency=3, matrix="last", max_precondition_dim=4), {"w": (2, 3, 4, 5)}),
    "wider than a band": (ao.SOAP(lr=0.1, precondition_frequency=3), {"w": (140, 20), "u": (5, 150)}),
    "half": (ao.SOAP(lr=0.1, precondition_frequency=3, state_dtype="bfloat16"), {"w": (3, 4)}),
}


@pytest.mark.parametrize(
    ("what", "engine"),
    marked(((k, e) for k in KINDS for e in FUSED), lambda what, engine: engine not in SLOW),
)
def test_fused_updates_are_those_of_the_rule_as_written(what, engine):
    rule, shapes = KINDS[what]
    found, exact = (run(rule, drawn(**shapes), engine=e, steps=6) for e in (engine, "array_api"))
    far = 2e-2 if what == "half" else 1e-10  # a state that is rounded may be rounded otherwise
    for n, state in exact.state.items():
        np.testing.assert_allclose(found.params[n], exact.params[n], rtol=0, atol=far, err_msg=n)
        for slot, x in state.items():
            y = found.state[n][slot]
            if slot != "t":
                np.testing.assert_allclose(np.asarray(y, float), np.asarray(x, float), rtol=0, atol=far, err_msg=slot)


@pytest.mark.parametrize("small", [True, False])
def test_over_small_tensors_blas_is_held_to_one_thread(small, monkeypatch):
    threadpoolctl = pytest.importorskip("threadpoolctl")
    seen, real = [], np.linalg.qr

    def counted(x, **how):
        seen.append({i["num_threads"] for i in threadpoolctl.threadpool_info() if i["user_api"] == "blas"})
        return real(x, **how)

    if not small:
        monkeypatch.setattr(fused_step, "SMALL_TENSOR", 11)
    monkeypatch.setattr(np.linalg, "qr", counted)
    with threadpoolctl.threadpool_limits(2, "blas"):
        run(RULE, drawn(w=(3, 4)), steps=3, engine="numpy")
    assert len(seen) == 2 + 2
    assert set(map(frozenset, seen)) == ({frozenset({1})} if small else {frozenset({2})})


def test_what_is_reported_is_the_same():
    reports = []
    for engine in FUSED_AND_WRITTEN:
        opt, rng = ao.Optimizer(drawn(w=(3, 4), b=(5,)), RULE, engine=engine, stats=True), np.random.default_rng(1)
        for _ in range(4):
            opt.step({n: rng.standard_normal(p.shape) for n, p in opt.params.items()})
            reports.append({n: {k: float(x) for k, x in one.items()} for n, one in opt.stats.read().items()})
    for one, other in zip(reports[:4], reports[4:], strict=True):
        assert {n: pytest.approx(x, rel=1e-9, abs=1e-12) for n, x in one.items()} == other


def test_a_plan_is_one_for_all_shapes_with_the_same_bases():
    rule = ao.SOAP(max_precondition_dim=6)
    both, other, tall, wide, none = (
        plan_for(rule, 2, "float32", shape=s) for s in ((3, 4), (6, 2), (7, 5), (5, 7), (9, 8))
    )
    assert both is other
    assert [set(x.slots) - {"m", "v"} for x in (both, tall, wide, none)] == [
        {"l", "ql", "r", "qr"}, {"r", "qr"}, {"l", "ql"}, set(),
    ]  # fmt: skip
    assert {x: both.slots[x] for x in ("m", "l", "qr")} == {"m": "RC", "l": "Rr", "qr": "Cc"}
    assert "ql" not in both.written
    assert (both.multiplies, none.multiplies) == (True, False)


def test_it_says_what_it_does():
    text = ao.Optimizer({"w": np.ones((2, 3))}, RULE).explain()
    assert f"engine {CHOSEN['numpy'][0]} (the fastest for numpy arrays)" in text
    assert "some updates of each tensor as they are written" in text
    assert "load l spill5; store l; reduce -; 24 B over Rr" in text
    for engine in COMPILED:
        assert "units_" in ao.source(RULE, engine=engine)


def test_on_a_gpu_it_runs_as_written(cupy):
    opt = ao.Optimizer({n: cupy.asarray(p) for n, p in drawn(w=(3, 4)).items()}, RULE)
    assert f"engine array_api (cupy: {WHY}" in opt.explain()
    rng = np.random.default_rng(1)
    for _ in range(4):
        opt.step({"w": cupy.asarray(rng.standard_normal((3, 4)))})
    straight = run(RULE, drawn(w=(3, 4)), steps=4)
    assert abs(opt.params["w"].get() - straight.params["w"]).max() < 1e-12


def test_a_library_without_eigenvectors_is_refused():
    da = pytest.importorskip("dask.array")
    with pytest.raises(ValueError, match=r"SOAP: 'w', of shape \(2, 3\), is of a library that has no linalg.eigh"):
        ao.Optimizer({"w": da.ones((2, 3))}, RULE)


@pytest.mark.parametrize(
    ("field", "wrong", "kind", "words"),
    [
        ("precondition_frequency", 0, ValueError, "must be at least 1; got 0"),
        ("precondition_frequency", 2.5, TypeError, "must be an integer; got 2.5"),
        ("max_precondition_dim", True, TypeError, "must be an integer; got True"),
        ("matrix", "first", ValueError, "must be 'flatten' or 'last'"),
        ("shampoo_beta", 1.0, ValueError, r"must be in \[0, 1\); got 1.0"),
    ],
)
def test_wrong_fields(field, wrong, kind, words):
    with pytest.raises(kind, match=f"SOAP: `{field}` {words}"):
        ao.SOAP(**{field: wrong})


@pytest.mark.parametrize("run_it", marked([(False,), (True,)], lambda run_it: not run_it))
def test_under_jit_xla_chooses(run_it):
    """One function for all steps: what is not chosen is not run."""
    jax = pytest.importorskip("jax")
    rule = ao.SOAP(lr=0.1, precondition_frequency=2)
    params = {"w": jax.numpy.asarray(drawn(w=(3, 4))["w"], "float32"), "b": jax.numpy.ones(3)}
    rng = np.random.default_rng(0)
    drawing = [{n: rng.standard_normal(p.shape) for n, p in params.items()} for _ in range(5)]
    grads = [{n: jax.numpy.asarray(g, "float32") for n, g in each.items()} for each in drawing]
    start = jax.tree.map(jax.numpy.asarray, rule.init(params))
    text = str(jax.make_jaxpr(lambda p, g, s: ao.update(rule, p, g, s))(params, grads[0], start))
    assert " cond[" in text
    assert "eigh[" in text
    if not run_it:
        return
    plain, state, traced, own = params, rule.init(params), params, start
    step = jax.jit(lambda p, g, s: ao.update(rule, p, g, s))
    for g in grads:
        plain, state = ao.update(rule, plain, g, state)
        traced, own = step(traced, g, own)
    for n, p in plain.items():
        np.testing.assert_allclose(traced[n], p, rtol=0, atol=2e-5)


def test_half_of_the_state_may_be_narrow():
    opt = run(ao.SOAP(state_dtype="float16", precondition_frequency=2), drawn(w=(3, 4)), steps=3)
    kinds = {slot: str(x.dtype) for slot, x in opt.state["w"].items() if slot != "t"}
    assert kinds == {"m": "float16", "v": "float16"} | dict.fromkeys(("l", "ql", "r", "qr"), "float64")


def test_diagnose_does_not_try_it():
    assert ao.SOAP not in {one.kind for one in plain([(3, 4)])}
