"""The common tests of rules of matrices: rows of `MATRICES` and `BRANCHED` on every engine and library."""

import dataclasses

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines.registry import FUSED as CHOSEN
from tests.conftest import BACKENDS
from tests.support import witness
from tests.support.cases import BRANCHED, BRANCHED_ROWS, FAR, LARGE, MATRICES, ROWS, SMALL, make
from tests.support.engines import FUSED, SLOW
from tests.support.slow import marked

EVERY_RANK = SMALL | {"vector": (5,), "scalar": ()}
MAGNITUDES = {"still": 0.0, "huge": 1e6, "tiny": 1e-8}
STEPS = 4

# The steps multiply small singular values of d by 3.4445 five times, and with them the roundings of d: by up to 485.
every_row = pytest.mark.parametrize(("name", "row"), [*ROWS, *BRANCHED_ROWS])
of_matrices = pytest.mark.parametrize(("name", "row"), ROWS)
FUSED_ROWS = [(engine, *row) for engine in FUSED for row in ROWS]
each_fused = pytest.mark.parametrize(
    ("engine", "name", "row"), marked(FUSED_ROWS, lambda *case: case == ("numpy", "Muon", 0))
)
each_engine = pytest.mark.parametrize(
    ("engine", "name", "row"),
    marked(
        [*FUSED_ROWS, *((engine, *row) for engine in (*FUSED, "array_api") for row in BRANCHED_ROWS)],
        lambda *case: case in (("numpy", "Muon", 0), ("array_api", "SOAP", 1), ("numpy", "SOAP", 2)),
    ),
)


def rule_of(name, row):
    return make(name, (MATRICES | BRANCHED)[name][row])


def problem(shapes, dtype="float64", steps=STEPS):
    """Parameters, and the gradients of each step."""
    rng = np.random.default_rng(0)
    params = {n: (rng.standard_normal(s) * (n != "dead")).astype(dtype) for n, s in shapes.items()}
    grads = [
        {name: (rng.standard_normal(s) * MAGNITUDES.get(name, 1.0)).astype(dtype) for name, s in shapes.items()}
        for _ in range(steps)
    ]
    return params, grads


def made(rule, params, engine, **options):
    return ao.Optimizer({name: np.array(p) for name, p in params.items()}, rule, engine=engine, **options)


def contents(opt):
    """Copies of all parameters and slots."""
    return {f"{n}.{k}": np.array(x) for n in opt.state for k, x in {"p": opt.params[n], **opt.state[n]}.items()}


def run(rule, params, grads, engine, **options):
    opt = made(rule, params, engine, **options)
    for g in grads:
        opt.step(g)
    return contents(opt)


def same(a, b):
    assert list(a) == list(b)
    assert [key for key in a if a[key].tobytes() != b[key].tobytes()] == []


def near(a, b, relative):
    assert list(a) == list(b)
    for key, x in b.items():
        scale = max(1.0, float(np.abs(x).max(initial=0.0)))
        np.testing.assert_allclose(a[key].astype(float), x.astype(float), rtol=0, atol=relative * scale, err_msg=key)


# ---- against the witness, and against the rule as it is written ------------------------------------------------------

PLACES = [("array_api", library, dtype) for library in ("numpy", "array_api_strict", "torch", "jax") for dtype in FAR]
PLACES += [(engine, "numpy", dtype) for engine in FUSED for dtype in ("float64", "float32")]
PLACES = [x for x in PLACES if x[2] in ("float64", "float32") and BACKENDS[x[1]].has(x[2])]
EACH = [(*x, *y) for x in PLACES for y in ROWS]
EACH += [(*x, *y) for x in PLACES for y in BRANCHED_ROWS if x[1] != "jax" or y[1] == 1]


def in_each_run(engine, library, dtype, name, row):
    if engine in SLOW or library == "jax":
        return False
    if library != "numpy":
        return (dtype, name, row) in (("float64", "Muon", 0), ("float64", "SOAP", 1))
    return dtype == "float64" and (engine == "array_api" or row == 0)


@pytest.mark.parametrize(("engine", "library", "dtype", "name", "row"), marked(EACH, in_each_run))
def test_a_run_equals_the_witness(engine, library, dtype, name, row):
    backend, options = BACKENDS[library], (MATRICES | BRANCHED)[name][row]
    params, grads = problem(SMALL if name in MATRICES else EVERY_RANK, dtype)
    exact = {n: (p.astype(float).ravel().tolist(), {}) for n, p in params.items()}
    opt = ao.Optimizer({n: backend.array(p, dtype) for n, p in params.items()}, make(name, options), engine=engine)
    for t, g in enumerate(grads):
        found = opt.step({n: backend.array(x, dtype) for n, x in g.items()})
        exact = {
            n: witness.step(
                name, options, EVERY_RANK[n], *values[:1], g[n].astype(float).ravel().tolist(), values[1], t + 1
            )
            for n, values in exact.items()
        }
    for n, (p, slots) in exact.items():
        assert set(opt.state[n]) == {"t", *slots}
        for slot, x in {"p": p, **slots}.items():
            got = backend.numpy(found[n] if slot == "p" else opt.state[n][slot]).astype(float)
            scale = max(1.0, *map(abs, x)) if x else 1.0
            np.testing.assert_allclose(got.ravel(), x, rtol=0, atol=FAR[dtype] * scale, err_msg=f"{n}.{slot}")


@each_fused
def test_large_matrices_and_batches_are_those_of_the_rule_as_written(engine, name, row):
    rule = rule_of(name, row)
    for dtype in ("float32", "float64") if engine == "numpy" else ("float32",):
        params, grads = problem(LARGE, dtype, steps=2)
        near(run(rule, params, grads, engine), run(rule, params, grads, "array_api"), FAR[dtype])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@each_engine
def test_half_precision_has_masters(engine, name, row, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    shapes = {n: SMALL[n] for n in ("square", "wide", "tall", "kernel")}
    params, grads = problem(shapes, kind)
    rule = rule_of(name, row)
    found, exact = (run(rule, params, grads, e) for e in (engine, "array_api"))
    near(
        {k: x for k, x in found.items() if k.endswith("master")},
        {k: x for k, x in exact.items() if "master" in k},
        2e-4,
    )
    for n in shapes:
        assert found[f"{n}.p"].tobytes() == found[f"{n}.master"].astype(kind).tobytes()


# ---- what must change nothing ----------------------------------------------------------------------------------------


@each_engine
def test_the_number_of_threads_changes_no_bit(engine, name, row, monkeypatch):
    large = LARGE if name in MATRICES else {"many": LARGE["many"]}  # bases of long sides take their time
    rule, (params, grads) = rule_of(name, row), problem(large | SMALL, "float32", steps=2)
    found = []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("ARRAYOPT_NUM_THREADS", threads)
        found.append(run(rule, params, grads, engine))
    same(found[0], found[1])
    same(found[0], found[2])


@each_engine
def test_order_company_and_layout_change_no_bit(engine, name, row):
    rule, (params, grads) = rule_of(name, row), problem(SMALL)
    straight = run(rule, params, grads, engine)
    names = sorted(params, reverse=True)
    turned = {n: np.asfortranarray(params[n]) for n in names}
    opt = ao.Optimizer(turned, rule, engine=engine)
    for g in grads:
        out = opt.step({n: np.asfortranarray(g[n]) for n in names})
    assert all(out[n] is turned[n] for n in names if params[n].size)
    again = contents(opt)
    again = {key: again[key] for key in straight}
    if name in MATRICES:
        same(again, straight)
    else:  # a library multiplies what lies otherwise in another order
        near(again, straight, FAR["float64"])
    alone = run(rule, {"same": params["same"]}, [{"same": g["same"]} for g in grads], engine)
    same(alone, {key: x for key, x in straight.items() if key.startswith("same.")})


@each_engine
def test_a_missing_gradient_leaves_a_tensor_alone_and_a_run_can_be_resumed(engine, name, row, tmp_path):
    rule, (params, grads) = rule_of(name, row), problem(SMALL)
    grads[1]["wide"] = grads[2]["same"] = None
    opt = made(rule, params, engine)
    for k, g in enumerate(grads):
        before = contents(opt)
        opt.step(g)
        after = contents(opt)
        for left in [n for n, x in g.items() if x is None]:
            same(*({key: x for key, x in c.items() if key.startswith(f"{left}.")} for c in (before, after)))
        if k == 1:
            opt.save(tmp_path / "run.safetensors")
    other = made(rule, params, engine)
    other.load(tmp_path / "run.safetensors")
    for g in grads[2:]:
        other.step(g)
    same(contents(other), contents(opt))


@each_engine
def test_statistics_clipping_and_groups_are_those_of_the_rule_as_written(engine, name, row):
    rule, (params, grads) = rule_of(name, row), problem(SMALL)
    decay = "momentum" if name in MATRICES else "beta1"
    how = {"clip_norm": 3.0, "groups": {"wide": {"lr": 0.5}, "tall": {decay: 0.5}}}
    watched, plain, written = (
        made(rule, params, e, stats=stats, **how) for e, stats in ((engine, True), (engine, False), ("array_api", True))
    )
    for g in grads:
        for opt in (watched, plain, written):
            opt.step(g)
    same(contents(watched), contents(plain))
    near(contents(watched), contents(written), FAR["float64"])
    found, exact = watched.stats.read(), written.stats.read()
    assert {n: sorted(x) for n, x in found.items()} == {n: sorted(x) for n, x in exact.items()}
    for n, report in exact.items():
        for key, x in report.items():
            assert found[n][key] == pytest.approx(x, rel=1e-9, abs=1e-9), (n, key)


@pytest.mark.parametrize("ranks", [2, 3])
@each_engine
def test_each_matrix_is_one_ranks_and_their_number_changes_no_bit(engine, name, row, ranks):
    rule, (params, grads) = rule_of(name, row), problem(SMALL | {"large": (60, 50)}, steps=2)
    alone = run(rule, params, grads, engine)

    def main(comm):
        opt = made(rule, params, engine, comm=comm)
        for g in grads:
            opt.step(g)
        return {f"{n}.p": np.array(p) for n, p in opt.params.items()}

    for found in ao.ranks.run(ranks, main):
        same(found, {key: x for key, x in alone.items() if key.endswith(".p")})


@every_row
def test_the_functional_form_is_the_rule_as_written(name, row):
    rule, (params, grads) = rule_of(name, row), problem(SMALL)
    expected, state = run(rule, params, grads, "array_api"), rule.init(params)
    for g in grads:
        params, state = ao.update(rule, params, g, state)
    same({f"{n}.p": p for n, p in params.items()}, {k: x for k, x in expected.items() if k.endswith(".p")})


# ---- what is refused -------------------------------------------------------------------------------------------------


@of_matrices
def test_a_vector_is_refused_in_words(name, row):
    rule = rule_of(name, row)
    for shape in ((), (3,), (0,)):
        params = {"weight": np.ones((2, 2)), "bias": np.ones(shape)}
        for call in (lambda p: ao.Optimizer(p, rule), lambda p: ao.init(rule, p)):
            with pytest.raises(
                ValueError, match=rf"{name}: 'bias', of shape .* is not a matrix; use another rule for it"
            ):
                call(params)


@every_row
def test_complex_matrices_are_refused(name, row):
    with pytest.raises(TypeError, match="not defined for complex"):
        ao.Optimizer({"w": np.ones((2, 2), complex)}, rule_of(name, row))


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
@pytest.mark.parametrize("name", MATRICES)
def test_a_dtype_that_the_library_lacks_is_refused_and_torch_has_it(name):
    rule = dataclasses.replace(make(name, MATRICES[name][0]), ns_dtype="bfloat16")
    with pytest.raises(ValueError, match=f"{name}: 'w', of shape .* has no bfloat16; leave out `ns_dtype`"):
        ao.Optimizer({"w": np.ones((2, 2))}, rule)
    torch = BACKENDS["torch"]
    params, grads = problem({n: SMALL[n] for n in ("square", "wide", "tall")}, "float32", 1)
    opt = ao.Optimizer({n: torch.array(p) for n, p in params.items()}, rule)
    assert f"array_api ({', '.join(CHOSEN['torch'])}: arithmetic in bfloat16 is not fused" in opt.explain()
    found = opt.step({n: torch.array(g) for n, g in grads[0].items()})
    exact = run(make(name, MATRICES[name][0]), params, grads, "array_api")
    for n, p in params.items():  # a step is 0.02 times what is near to an orthogonal matrix, or to the norm of p
        far = 0.02 * 0.1 * max(1.0, float(np.linalg.norm(p)))
        np.testing.assert_allclose(torch.numpy(found[n]), exact[f"{n}.p"], rtol=0, atol=far)


@pytest.mark.parametrize("name", MATRICES)
def test_on_a_gpu_the_library_multiplies_too(name, cupy):
    """What comes of it: `tests.engines.cuda.test_cupy_products`."""
    text = ao.Optimizer({"w": cupy.asarray(np.ones((2, 3), "float32"))}, make(name, MATRICES[name][0])).explain()
    assert "engine cupy (the fastest for cupy arrays)" in text
    assert "MFLOPs in products, symmetric ones in full" in text


def test_the_radius_does_not_wander():
    rng, p = np.random.default_rng(0), np.random.default_rng(1).standard_normal((4, 6))
    start = np.linalg.norm(p)
    opt = ao.Optimizer(p, ao.MuonH(lr=0.1), engine="numpy")
    for _ in range(300):
        opt.step(rng.standard_normal(p.shape))
    assert abs(np.linalg.norm(p) - start) <= 4 * np.spacing(start)


KERNELS = {"square": (64, 3, 3, 3), "depthwise": (512, 1, 3, 3), "large": (16, 8, 7, 7), "wide": (4, 16, 5, 5)}


def test_muon_on_kernels_is_jordans_where_the_page_says_so():
    """His `muon.py`: the kernel as a matrix, and the factor from the kernel's last two axes."""
    rng, groups = np.random.default_rng(0), {"*": {"scale": "none"}}
    params = {name: rng.standard_normal(shape) for name, shape in KERNELS.items()}
    first = {name: p.copy() for name, p in params.items()}
    opt = ao.Optimizer(params, ao.Muon(lr=0.02, momentum=0.95, weight_decay=0.0), groups=groups, engine="array_api")
    momenta = {name: np.zeros(shape) for name, shape in KERNELS.items()}
    for _ in range(3):
        grads = {name: rng.standard_normal(shape) for name, shape in KERNELS.items()}
        opt.step(grads)
        for name, g in grads.items():
            momenta[name] = m = 0.95 * momenta[name] + 0.05 * g
            x = (0.95 * m + 0.05 * g).reshape(len(g), -1)
            x /= np.linalg.norm(x)
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
            rows, columns = g.shape[-2:]
            first[name] -= 0.02 * max(1.0, rows / columns) ** 0.5 * x.reshape(g.shape)
    for name, p in first.items():
        np.testing.assert_allclose(params[name], p, rtol=1e-9, atol=1e-11)
    ours = ao.Muon(lr=1.0, weight_decay=0.0)
    for name, factor in (("square", 1.54), ("depthwise", 7.54)):
        steps = [
            ao.Optimizer(np.zeros(KERNELS[name]), rule, engine="array_api").step(grads[name])
            for rule in (ours, dataclasses.replace(ours, scale="none"))
        ]
        assert np.linalg.norm(steps[0]) / np.linalg.norm(steps[1]) == pytest.approx(factor, abs=5e-3)
