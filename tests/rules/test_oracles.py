"""AdaBelief, Sophia, caution and MARS beside published code: optax, timm and pytorch_optimizer."""

import numpy as np
import pytest

import arrayopt as ao
from tests.support.engines import NOW
from tests.support.recorded import recorded
from tests.support.timms import timms
from tests.support.wide import wide_numbers

SHAPES = {"w": (5, 7), "b": (11,)}
STEPS = 12


def drawn(k):
    rng = np.random.default_rng(k)
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


def ours(rule, start, hess=None):
    """The parameters after some steps; `hess` is given before each."""
    opt = ao.Optimizer({name: x.copy() for name, x in start.items()}, rule)
    for k in range(STEPS):
        if hess is not None:
            for name in SHAPES:
                opt.state[name]["hess"] = hess(k)[name]
        opt.step(drawn(k + 1))
    return opt.params


def of_torch(make, start):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in start.items()}
    opt = make(list(tensors.values()))
    for k in range(STEPS):
        for name, g in drawn(k + 1).items():
            tensors[name].grad = torch.tensor(g)
        opt.step()
    return {name: x.detach().numpy() for name, x in tensors.items()}


def of_optax(make, start):
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    with wide_numbers():
        tx, params = make(optax), {name: jax.numpy.asarray(x) for name, x in start.items()}
        state = tx.init(params)
        for k in range(STEPS):
            updates, state = tx.update({n: jax.numpy.asarray(g) for n, g in drawn(k + 1).items()}, state, params)
            params = optax.apply_updates(params, updates)
        return {name: np.asarray(x) for name, x in params.items()}


def same(mine, theirs, rtol=1e-9):
    for name in SHAPES:
        np.testing.assert_allclose(mine[name], theirs[name], rtol=rtol, err_msg=name)


@pytest.mark.parametrize("nesterov", [False, True])
def test_adabelief_of_optax(nesterov):
    rule = ao.AdaBelief(lr=0.01, nesterov=nesterov)
    same(ours(rule, drawn(0)), of_optax(lambda o: o.adabelief(0.01, nesterov=nesterov), drawn(0)))


@pytest.mark.parametrize("decoupled", [False, True])
def test_adabelief_of_timm(decoupled):
    options = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-12}
    rule = ao.AdaBelief(**options, eps_root=1e-12, decoupled=decoupled)

    def theirs():
        kind = timms("adabelief").AdaBelief
        return of_torch(lambda p: kind(p, **options, rectify=False, decoupled_decay=decoupled), drawn(0))

    made = recorded("timm", f"AdaBelief decoupled={decoupled}", theirs)
    same(ours(rule, drawn(0)), made, 1e-7 if decoupled else 1e-9)  # which decays before, not after


def test_sophia_of_optax_with_the_same_hessian():
    """optax updates its average of Hessians after the step, so a step sees that of the one before."""
    pytest.importorskip("optax.contrib")
    jnp = pytest.importorskip("jax.numpy")

    def estimates(k):
        return {name: np.abs(x) for name, x in drawn(100 + k).items()}

    def given(optax):
        def update(grads, state, params=None, **_):
            every = {name: jnp.stack([estimates(k)[name] for k in range(STEPS)]) for name in SHAPES}
            return {name: x[state] for name, x in every.items()}, state + 1

        return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)

    def make(optax):
        more = {"hessian_diagonal_fn": given(optax), "update_interval": 1, "gamma": 2.0, "clip_threshold": 0.7}
        return optax.contrib.sophia(0.01, weight_decay=0.1, b2=0.9, **more)

    average = [dict.fromkeys(SHAPES, 0.0)]
    for k in range(STEPS):
        average.append({name: 0.9 * average[-1][name] + 0.1 * x for name, x in estimates(k).items()})
    hess = [{name: x + np.zeros(SHAPES[name]) for name, x in one.items()} for one in average]
    rule = ao.Sophia(lr=0.01, gamma=2.0, clip_update=0.7, weight_decay=0.1)
    same(ours(rule, drawn(0), hess.__getitem__), of_optax(make, drawn(0)))


CAUTIOUS = {
    "lamb": ("Lamb", ao.LAMB(lr=0.01, weight_decay=0.1, caution=True), {"max_grad_norm": None}),
    "adamw": ("AdamWLegacy", ao.AdamW(lr=0.01, weight_decay=0.1, caution=True), {}),
    "lion": ("Lion", ao.Lion(lr=0.01, weight_decay=0.1, caution=True), {}),
    "adan": ("Adan", ao.Adan(lr=0.01, weight_decay=0.1, caution=True), {}),
}


@pytest.mark.parametrize("name", CAUTIOUS)
def test_caution_of_timm(name):
    title, rule, options = CAUTIOUS[name]
    options = {"lr": 0.01, "weight_decay": 0.1, "caution": True, "foreach": False, **options}

    def theirs():
        kind = getattr(timms(name), title)
        return of_torch(lambda p: kind(p, **options), drawn(0))

    made = recorded("timm", f"cautious {name}", theirs)
    same(ours(rule, drawn(0)), made, 1e-6 if name == "adamw" else 1e-9)


@pytest.mark.parametrize("engine", ["array_api", "numpy", "cpp"])
def test_caution_beside_zeros_and_nan(engine):
    """No gradient counts as against an update, but an update that is not a number stays."""
    opt = ao.Optimizer(np.zeros(32, "f4"), ao.Lion(lr=1.0, caution=True), engine=engine)
    opt.state["param"]["m"] = np.tile(np.float32([1, -1, -1, 1, 1, -1, 1e-30, -1e-30]), 4)
    opt.step(np.tile(np.float32([0.01, -0.01, 0.01, -0.01, 0, 0, 1e-32, -1e-32]), 4))
    share = 4 / 8
    np.testing.assert_allclose(opt.params, np.tile(np.array([-1, 1, 0, 0, 0, 0, -1, 1]) / share, 4), rtol=1e-6)
    opt.state["param"]["m"][...] = np.nan
    opt.step(np.zeros(32, "f4"))
    assert np.isnan(opt.params).all()


@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_mars_of_pytorch_optimizer(kind):
    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.95, 0.99), "gamma": 0.05, "optimize_1d": True}

    def theirs():
        mars = pytest.importorskip("pytorch_optimizer").MARS
        return of_torch(lambda p: mars(p, mars_type=kind, eps=1e-12, **options), drawn(0))

    made = recorded("pytorch_optimizer", f"MARS {kind}", theirs)
    more = {"lr": 0.01, "weight_decay": 0.1, "beta1": 0.95, "mars": 0.05}
    rule = ao.AdamW(**more, beta2=0.99, eps=1e-12) if kind == "adamw" else ao.Lion(**more, beta2=0.95)
    same(ours(rule, drawn(0)), made, 1e-6)


@pytest.mark.parametrize("shape", [(6, 3, 3, 3), (4, 3, 5, 2), (8, 2, 1, 1), (5, 2, 7, 3)])
def test_muon_for_convolutions_as_jordans_code_has_it(shape):
    """The factor is of the last two axes of the gradient as it lies, and not of the matrix."""
    start, grads = np.zeros(shape), [np.random.default_rng(k).standard_normal(shape) for k in range(3)]
    p, m = start.copy(), 0.0
    for g in grads:
        m = 0.95 * m + 0.05 * g
        x = (0.95 * m + 0.05 * g).reshape(shape[0], -1)
        x = x / np.linalg.norm(x)
        turned = x.shape[0] > x.shape[1]
        x = x.T if turned else x
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        x = (x.T if turned else x).reshape(shape)
        p = p - 0.1 * max(1.0, shape[-2] / shape[-1]) ** 0.5 * x
    for engine in ("array_api", *NOW):
        opt = ao.Optimizer(start.copy(), ao.Muon(lr=0.1, weight_decay=0.0, scale="last"), engine=engine)
        for g in grads:
            mine = opt.step(g)
        np.testing.assert_allclose(mine, p, rtol=1e-9, atol=1e-12)
