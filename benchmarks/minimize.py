"""`ao.minimize` beside SciPy, jaxopt, Optimistix and PyTorch: evaluations, and time.

Run it from the root of the repository, with one thread for BLAS: ``OPENBLAS_NUM_THREADS=1 python -m
benchmarks.minimize``. With more, SciPy's loop over small problems takes some 40 times as long. It takes some minutes.
Peers that are not installed are left out. Times of JAX are those of a second call; the first one, which compiles,
stands beside them.
"""

import argparse
import time
import tracemalloc
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from scipy import fft, optimize

import arrayopt as ao
from benchmarks.apart import tell
from benchmarks.results import Sheet
from tests.support.mgh import PROBLEMS, Function


def table(title: str, head: list[str], rows: list[list[Any]]) -> Sheet:
    """A table of names and numbers."""
    lines = [tuple(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row) for row in rows]
    return Sheet(title, tuple(head), lines)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and the seconds that it took."""
    start = time.perf_counter()
    found = call()
    return found, time.perf_counter() - start


# ---- evaluations ----------------------------------------------------------------------------------------------------


def collected() -> Sheet:
    """Moré, Garbow and Hillstrom's functions: minima that were found, and evaluations."""

    def scipys(method: str, **options: Any) -> Callable[[Function], float]:
        return lambda f: (
            optimize.minimize(
                f, f.start, jac=True, method=method, options={"gtol": 1e-6, "maxiter": 3000, **options}
            ).fun
        )

    solvers = {
        "ao.LBFGS": lambda f: ao.minimize(f, f.start, max_steps=3000).value,
        "SciPy L-BFGS-B": scipys("L-BFGS-B", ftol=0, maxfun=3000),
        "ao.CG": lambda f: ao.minimize(f, f.start, ao.CG(), max_steps=3000).value,
        "SciPy CG": scipys("CG"),
        "ao.SPG": lambda f: ao.minimize(f, f.start, ao.SPG(), max_steps=3000).value,
    }
    solved: dict[str, dict[str, int]] = {name: {} for name in solvers}
    for problem in PROBLEMS:
        for name, solve in solvers.items():
            f = Function(problem)
            if f.solved(solve(f)):
                solved[name][problem] = f.evaluations
    rows = []
    for name, mine in solved.items():
        theirs = solved["SciPy L-BFGS-B"]
        both = [mine[x] / theirs[x] for x in mine if x in theirs]
        rows.append([name, f"{len(mine)} of {len(PROBLEMS)}", float(np.median(both)), sum(mine.values())])
    head = ["solver", "solved", "evaluations, as a multiple of L-BFGS-B's, median", "in all of those"]
    return table("Minimize: test functions", head, rows)


# ---- many problems --------------------------------------------------------------------------------------------------


def logistic(count: int, xp: Any, rng: Any) -> tuple[Any, Any, Any]:
    """Logistic fits of 32 unknowns to 200 points: data, the loss of one problem's data, and starts."""
    a = rng.standard_normal((count, 200, 32))
    chance = 1 / (1 + np.exp(-np.einsum("nmd,nd->nm", a, rng.standard_normal((count, 32)))))
    signs = np.where(rng.random((count, 200)) < chance, 1.0, -1.0)
    return (
        (a * signs[:, :, None],),
        lambda w, a: xp.logaddexp(0.0, -(a @ w)).mean() + 5e-3 * (w @ w),
        np.zeros((count, 32)),
    )


ROUNDS = 5
"""In each round each solver solves all problems once; the table shows medians."""

BLOCK = 25


THREADS = 1
"""So many threads work on blocks of fits in the function of all logistic fits: `--threads`."""


def logistic_by_hand(data: Any) -> Callable[[Any], tuple[Any, Any]]:
    """The losses of all logistic fits and their gradients, in NumPy."""
    (a,) = data

    def one(w: Any) -> tuple[Any, Any]:
        """Of one fit, in a loop over SciPy: quicker than `several` by a tenth."""
        z = a @ w
        small = np.exp(-np.abs(z))
        value = (np.maximum(-z, 0) + np.log1p(small)).sum() / len(z) + 5e-3 * (w @ w)
        return value, 1e-2 * w - (np.where(z > 0, small, 1.0) / (1 + small) / len(z)) @ a

    def several(a: Any, w: Any) -> tuple[Any, Any]:
        z = np.matvec(a, w)
        small = np.exp(-np.abs(z))
        value = (np.maximum(-z, 0) + np.log1p(small)).mean(-1) + 5e-3 * np.vecdot(w, w)
        slope = np.where(z > 0, small, 1.0) / (1 + small) / z.shape[-1]
        return value, 1e-2 * w - np.vecmat(slope, a)

    def all_fits(w: Any) -> tuple[Any, Any]:
        # the data of some fits, and all that is made of them, stay in cache
        blocks = [slice(i, i + BLOCK) for i in range(0, len(w), BLOCK)]
        made = list(each(lambda block: several(a[block], w[block]), blocks))
        return tuple(np.concatenate(x) for x in zip(*made, strict=True))  # type: ignore[return-value]

    each = ThreadPoolExecutor(THREADS).map if THREADS > 1 else map
    return one if a.ndim == 2 else all_fits


T = np.linspace(-1.0, 1.0, 60)


def peaks(count: int, xp: Any, rng: Any) -> tuple[Any, Any, Any]:
    """Fits of a Gaussian peak with background to noisy counts, as `logistic`."""
    height, centre = rng.uniform(0.5, 1, count), rng.uniform(-0.5, 0.5, count)
    width, ground = np.log(rng.uniform(0.1, 0.3, count)), rng.uniform(0.5, 2, count)
    truth = np.stack([height, centre, width, ground], axis=-1)
    counts = rng.poisson(_peak(np, truth)).astype(float)
    start = [counts.max(1) / 100, T[counts.argmax(1)], np.full(count, np.log(0.2)), np.median(counts, 1) / 10]

    def loss(x: Any, counts: Any) -> Any:
        return 0.5 * ((_peak(xp, x) - counts) ** 2 / xp.maximum(counts, 1.0)).mean()

    return (counts,), loss, np.stack(start, axis=-1)


def _peak(xp: Any, x: Any) -> Any:
    """Counts from height / 100, centre, the logarithm of the width and background / 10."""
    height, centre, width, ground = (x[..., i, None] for i in range(4))
    return 10 * ground + 100 * height * xp.exp(-(((xp.asarray(T) - centre) * xp.exp(-width)) ** 2) / 2)


def peaks_by_hand(data: Any) -> Callable[[Any], tuple[Any, Any]]:
    """The losses of all peaks and their gradients, in NumPy."""
    (counts,) = data
    weight = 1 / np.maximum(counts, 1) / len(T)

    def f(x: Any) -> tuple[Any, Any]:
        height, centre, width, ground = (x[..., i, None] for i in range(4))
        narrow = np.exp(-width)
        u = (T - centre) * narrow
        shape = 100 * np.exp(-(u**2) / 2)
        wrong = 10 * ground + height * shape - counts
        pull = wrong * weight
        slopes = [shape, height * shape * u * narrow, height * shape * u**2, np.full_like(shape, 10.0)]
        return 0.5 * (wrong * pull).sum(-1), np.stack([(pull * s).sum(-1) for s in slopes], axis=-1)

    return f


def many(title: str, made: Any, by_hand: Any, count: int, steps: int) -> Sheet:
    """A thousand problems: each solver's time, and how many end at the least value that one has found."""
    data, _, start = made(count, np, np.random.default_rng(0))
    solvers: dict[str, Callable[[], tuple[Any, Any]]] = {}
    for engine in ("auto", "cpp"):

        def ours(engine: str = engine) -> tuple[Any, Any]:
            found = ao.minimize(by_hand(data), start, stacked=True, max_steps=steps, engine=engine)
            return found.value, found.evaluations

        solvers["ao.LBFGS" if engine == "auto" else f"ao.LBFGS, engine='{engine}'"] = ours

    def loop() -> tuple[Any, Any]:
        ends = []
        for i in range(count):
            f = by_hand([x[i] for x in data])
            options = {"gtol": 1e-6, "ftol": 0, "maxfun": steps}
            ends.append(optimize.minimize(f, start[i], jac=True, method="L-BFGS-B", options=options))
        return [end.fun for end in ends], [end.nfev for end in ends]

    solvers["SciPy L-BFGS-B, a loop"] = loop
    solvers |= _jax_solvers(made, count, steps)
    begun = {name: timed(solve)[1] for name, solve in solvers.items()}
    values, counted, seconds = {}, {}, {name: [] for name in solvers}
    for _ in range(ROUNDS):
        for name, solve in solvers.items():
            (values[name], counted[name]), spent = timed(solve)
            seconds[name].append(spent)
    least = np.min([np.asarray(x) for x in values.values()], axis=0)
    rows = []
    for name, mine in seconds.items():
        good = int((np.asarray(values[name]) <= least + 1e-6 * np.abs(least) + 1e-9).sum())
        evaluations = "" if counted[name] is None else float(np.median(counted[name]))
        ratio = float(np.median([x / ours for x, ours in zip(mine, seconds["ao.LBFGS"], strict=True)]))
        rows.append([name, float(np.median(mine)), begun[name], good, evaluations, ratio])
    head = ["solver", "s", "s, first call", "at the least value", "evaluations, median", "ratio"]
    return table(f"Minimize: {count:,} {title}", head, rows)


def _jax_solvers(made: Any, count: int, steps: int) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """jaxopt's and Optimistix's solvers under `jit` and `vmap`, where these are installed."""
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        return {}
    jax.config.update("jax_enable_x64", True)
    data, loss, start = made(count, jnp, np.random.default_rng(0))
    data, start = [jnp.asarray(x) for x in data], jnp.asarray(start)
    solvers: dict[str, Callable[[], tuple[Any, Any]]] = {}

    def batched(one: Any) -> Callable[[], tuple[Any, Any]]:
        run = jax.jit(jax.vmap(one))
        return lambda: (np.asarray(run(start, *data)), None)

    try:
        import jaxopt

        solver = jaxopt.LBFGS(loss, maxiter=steps, tol=1e-6)
        solvers["jaxopt.LBFGS, jit, vmap"] = batched(lambda x, *d: solver.run(x, *d).state.value)
    except (ImportError, AttributeError):
        pass
    try:
        import optimistix

        method = optimistix.LBFGS(rtol=1e-8, atol=1e-8)

        def solve(x: Any, *d: Any) -> Any:
            end = optimistix.minimise(lambda x, d: loss(x, *d), method, x, args=d, max_steps=steps, throw=False)
            return loss(end.value, *d)

        solvers["optimistix.LBFGS, jit, vmap"] = batched(solve)
    except (ImportError, AttributeError):
        pass
    return solvers


# ---- one large problem ----------------------------------------------------------------------------------------------


def blurred(side: int) -> tuple[Any, Any]:
    """A blur's transfer function, and a noisy picture seen through it."""
    rng, y = np.random.default_rng(0), np.minimum(np.arange(side), side - np.arange(side))
    kernel = np.exp(-0.5 * (y[:, None] ** 2 + y**2) / 9.0)
    known = fft.rfft2(kernel / kernel.sum())
    board = np.add.outer(np.arange(side) * 8 // side, np.arange(side) * 8 // side) % 2
    seen = fft.irfft2(known * fft.rfft2(board.astype(float)), s=(side, side))
    return known, seen + 0.01 * rng.standard_normal((side, side))


def deconvolution(side: int) -> tuple[Callable[[Any], tuple[float, Any]], Any]:
    """A blurred picture to be recovered, with total variation that is smoothed: function and start."""
    known, data = blurred(side)

    def through(u: Any, factor: Any) -> Any:
        return fft.irfft2(factor * fft.rfft2(u), s=(side, side))

    def f(u: Any) -> tuple[float, Any]:
        wrong = through(u, known) - data
        right, down = np.roll(u, -1, 1) - u, np.roll(u, -1, 0) - u
        size = np.sqrt(right**2 + down**2 + 1e-4)
        right, down = right / size, down / size
        back = np.roll(right, 1, 1) - right + np.roll(down, 1, 0) - down
        return float(0.5 * (wrong * wrong).sum() + 1e-3 * size.sum()), through(wrong, known.conj()) + 1e-3 * back

    return f, data


def large(side: int, evaluations: int) -> Sheet:
    """One large problem: seconds of each evaluation, with the function's and without, and memory.

    The solvers stop after about so many evaluations. Memory is traced while they run: they allocate few, large arrays.
    """
    function, start = deconvolution(side)
    spent: list[float] = []

    def f(u: Any) -> tuple[float, Any]:
        found, seconds = timed(lambda: function(u))
        spent.append(seconds)
        return found

    def ours(rule: Any) -> Callable[[], tuple[float, int]]:
        def run() -> tuple[float, int]:
            found = ao.minimize(f, start, rule, max_steps=evaluations - 1, tol=0)
            return found.value, found.evaluations

        ao.minimize(*deconvolution(300), rule, max_steps=2)  # planned and compiled
        return run

    def scipys() -> tuple[float, int]:
        def flat(x: Any) -> tuple[float, Any]:
            value, g = f(x.reshape(start.shape))
            return value, g.ravel()

        options = {"gtol": 0, "ftol": 0, "maxfun": evaluations - 1, "maxiter": evaluations}
        end = optimize.minimize(flat, start.ravel(), jac=True, method="L-BFGS-B", options=options)
        return end.fun, end.nfev

    runs = {"ao.LBFGS": ours(ao.LBFGS()), "ao.CG": ours(ao.CG()), "ao.SPG": ours(ao.SPG()), "SciPy L-BFGS-B": scipys}
    runs |= _torch(f, start, evaluations) | _optax(side, evaluations)
    rows = []
    for name, run in runs.items():
        spent.clear()
        tracemalloc.start()
        (value, made), seconds = timed(run)
        peak = tracemalloc.get_traced_memory()[1] / start.nbytes
        tracemalloc.stop()
        others = "PyTorch" in name or "optax" in name  # whose memory is not NumPy's
        without = (seconds - sum(spent)) / made if spent else ""  # JAX compiles the function into the step
        rows.append([name, seconds / made, without, made, f"{value:.4g}", "" if others else peak])
    head = [
        "solver",
        "s per evaluation",
        "s without the function",
        "evaluations",
        "value at the end",
        "peak memory, in arrays of unknowns",
    ]
    return table(f"Minimize: a deconvolution of {side:,} × {side:,} unknowns", head, rows)


def _torch(f: Any, start: Any, evaluations: int) -> dict[str, Callable[[], tuple[float, int]]]:
    """PyTorch's L-BFGS with its line search, where it is installed; the function stays in NumPy."""
    try:
        import torch
    except ImportError:
        return {}

    def run() -> tuple[float, int]:
        w = torch.nn.Parameter(torch.from_numpy(start.copy()))
        opt = torch.optim.LBFGS(
            [w],
            max_iter=evaluations,
            max_eval=evaluations,
            history_size=10,
            line_search_fn="strong_wolfe",
            tolerance_grad=0,
            tolerance_change=0,
        )
        values = []

        def closure() -> Any:
            value, g = f(w.detach().numpy())
            values.append(value)
            w.grad = torch.from_numpy(g)
            return torch.tensor(value, dtype=torch.float64)

        opt.step(closure)
        return float(min(values)), len(values)

    return {"PyTorch LBFGS": run}


def _optax(side: int, evaluations: int) -> dict[str, Callable[[], tuple[float, int]]]:
    """optax's L-BFGS with its line search, where it is installed; the same function in JAX, and its gradient by JAX.

    Its steps take as many evaluations as its line search needs: it ends when there were so many.
    """
    try:
        import jax
        import jax.numpy as jnp
        import optax
    except ImportError:
        return {}
    jax.config.update("jax_enable_x64", True)
    known, data = (jnp.asarray(x) for x in blurred(side))

    def f(u: Any) -> Any:
        wrong = jnp.fft.irfft2(known * jnp.fft.rfft2(u), s=(side, side)) - data
        right, down = jnp.roll(u, -1, 1) - u, jnp.roll(u, -1, 0) - u
        return 0.5 * (wrong * wrong).sum() + 1e-3 * jnp.sqrt(right**2 + down**2 + 1e-4).sum()

    opt = optax.lbfgs(memory_size=10)
    value_and_grad = optax.value_and_grad_from_state(f)

    @jax.jit
    def step(u: Any, state: Any) -> tuple[Any, Any]:
        value, grad = value_and_grad(u, state=state)
        updates, state = opt.update(grad, state, u, value=value, grad=grad, value_fn=f)
        return optax.apply_updates(u, updates), state

    step(data, opt.init(data))  # compiled

    def run() -> tuple[float, int]:
        u, state, spent = data, opt.init(data), 1
        while spent < evaluations:
            u, state = step(u, state)
            spent += int(optax.tree_utils.tree_get(state, "num_linesearch_steps", 1))
        return float(f(u)), spent

    return {"optax.lbfgs, jit": run}


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="problems side by side")
    parser.add_argument("--side", type=int, default=2000, help="pixels of the large problem, along a side")
    parser.add_argument("--only", choices=["collected", "many", "large"], help="one part")
    parser.add_argument("--threads", type=int, default=1, help="threads of the function of all logistic fits")
    parser.add_argument("--data", action="store_true", help="tables as JSON, for benchmarks/run.py")
    given = parser.parse_args()
    global THREADS
    THREADS = given.threads
    warnings.simplefilter("ignore")
    if given.only in (None, "collected"):
        tell(collected(), data=given.data)
    if given.only in (None, "many"):
        for made in (("logistic fits", logistic, logistic_by_hand), ("Gaussian peaks", peaks, peaks_by_hand)):
            tell(many(*made, given.count, 500 if made[1] is logistic else 100), data=given.data)
    if given.only in (None, "large"):
        tell(large(given.side, 20), data=given.data)


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()
