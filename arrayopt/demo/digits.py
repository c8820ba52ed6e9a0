"""The digits demo: data, training loop and the comparison of rules, all on equal terms.

Every rule starts from the same weights, sees the same batches in the same order, takes the same number of steps under the same
shape of schedule (a linear warmup, then a cosine down to zero) and has its own peak learning rate. Gains and biases have no
weight decay, and rules with a trust ratio do not adapt them: a layer's gain of norm 10 beside its weight of the same norm says
nothing about how far either may move.
"""

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import array_api_compat
import numpy as np

import arrayopt as ao
from arrayopt.demo import network

__all__ = [
    "BACKENDS",
    "CONTENDERS",
    "Backend",
    "Contender",
    "Digits",
    "Run",
    "Unavailable",
    "compare",
    "load",
    "open_backend",
]

Array = Any
Schedule = Callable[[int], float]

BACKENDS = ("numpy", "cupy", "torch")
SIZES = (64, 256, 128, 64, 10)
EVALUATIONS = 100


class Unavailable(Exception):
    """Something that the demo needs is not installed, or not there; the message says what to do."""


@dataclass(frozen=True)
class Contender:
    """A rule that takes part: how it is made from a schedule, and the peak of that schedule."""

    make: Callable[[Schedule], Any]
    lr: float


# Peak learning rates and decays were chosen on a validation part, `load(validation=True)`, never on the test images.
CONTENDERS = {
    "LAMB": Contender(lambda lr: ao.LAMB(lr=lr, weight_decay=0.01), 0.03),
    "LANS": Contender(lambda lr: ao.LANS(lr=lr, weight_decay=0.01), 0.03),
    "CAME": Contender(lambda lr: ao.CAME(lr=lr, weight_decay=0.01), 0.003),
    "AdamW": Contender(lambda lr: ao.AdamW(lr=lr, weight_decay=0.01), 0.003),
    "SGD": Contender(lambda lr: ao.SGD(lr=lr, momentum=0.9, weight_decay=1e-4), 0.3),
}


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 numbers in [0, 1], and what they show; on the host."""

    train_x: np.ndarray
    train_labels: np.ndarray
    test_x: np.ndarray
    test_labels: np.ndarray


@dataclass(frozen=True)
class Backend:
    """An array library, and the two things that the array API does not say."""

    name: str
    xp: Any
    to_host: Callable[[Array], np.ndarray]
    synchronize: Callable[[], object]


@dataclass(frozen=True)
class Run:
    """What one rule did."""

    rule: str
    lr: float
    losses: list[float]
    """Loss of each step's batch."""
    evaluated: list[int]
    """Steps after which the test images were looked at."""
    accuracies: list[float]
    trust_ratios: dict[str, list[float]]
    """For each adapted tensor, its trust ratio after the steps in `evaluated`; empty for a rule without one."""
    final_loss: float
    """Loss over the whole training set after the last step."""
    seconds: float
    step_seconds: float
    """Median time of `Optimizer.step` alone."""


def load(*, validation: bool = False) -> Digits:
    """Load scikit-learn's 1,797 scanned digits, a quarter of them, stratified, for the test.

    With `validation`, the test images are left out altogether and a quarter of the training images stand in for them:
    that is the part on which learning rates may be chosen.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

    x, labels = load_digits(return_X_y=True)
    x = (x / 16.0).astype(np.float32)
    train_x, test_x, train_labels, test_labels = train_test_split(
        x, labels, test_size=0.25, stratify=labels, random_state=0
    )
    if validation:
        train_x, test_x, train_labels, test_labels = train_test_split(
            train_x, train_labels, test_size=0.25, stratify=train_labels, random_state=0
        )
    return Digits(train_x, train_labels, test_x, test_labels)


def open_backend(name: str) -> Backend:
    """Import an array library and make sure that it can compute.

    Raises
    ------
    Unavailable
        If the library is not installed, or CuPy finds no GPU.
    """
    try:
        xp = importlib.import_module(f"array_api_compat.{name}")
    except ImportError as error:
        raise Unavailable(f"backend {name} cannot be imported: {error}") from error
    if name == "cupy":
        try:
            xp.zeros(1)
        except Exception as error:  # CuPy's own error types differ by what is missing: driver, device, runtime library
            raise Unavailable(f"backend cupy finds no usable GPU: {error}") from error
        return Backend(name, xp, lambda a: a.get(), lambda: xp.cuda.get_current_stream().synchronize())
    return Backend(name, xp, np.asarray, lambda: None)


def compare(
    rules: Sequence[str],
    *,
    data: Digits,
    backend: Backend,
    steps: int,
    batch: int,
    seed: int,
    on_step: Callable[[str, int], object] = lambda rule, step: None,
) -> list[Run]:
    """Train the same network once with each rule.

    Parameters
    ----------
    rules : sequence of str
        Keys of `CONTENDERS`.
    data : Digits
        From `load`.
    backend : Backend
        From `open_backend`.
    steps, batch : int
        Updates, and images per update, at most the number of training images.
    seed : int
        For the initial weights and the order of the images.
    on_step : callable
        Called as ``on_step(rule, steps_done)`` after each step.

    Returns
    -------
    list of Run
        In the order of `rules`.
    """
    return [_train(rule, data, backend, steps, batch, seed, on_step) for rule in rules]


def _train(
    name: str, data: Digits, backend: Backend, steps: int, batch: int, seed: int, on_step: Callable[[str, int], object]
) -> Run:
    xp, contender = backend.xp, CONTENDERS[name]
    rule = contender.make(_schedule(contender.lr, steps))
    x, targets = xp.asarray(data.train_x), xp.asarray(_one_hot(data.train_labels))
    test_x, test_labels = xp.asarray(data.test_x), xp.asarray(data.test_labels)
    adapts = "adapt" in {field.name for field in fields(rule)}
    every = max(1, steps // EVALUATIONS)

    def optimizer(stats: bool) -> ao.Optimizer:
        params = network.init_params(xp, SIZES, seed=seed)
        plain = {"weight_decay": 0.0} | ({"adapt": False} if adapts else {})
        return ao.Optimizer(params, rule, groups={"*.gain": plain, "*.bias": plain}, stats=stats)

    step_seconds = _time_step(optimizer(stats=False), x, targets, backend)
    opt = optimizer(stats=adapts)
    params = opt.params
    losses, evaluated, accuracies = [], [], []
    trust_ratios: dict[str, list[float]] = {}
    begin = time.perf_counter()
    for step, rows in enumerate(_batches(len(data.train_x), batch, steps, seed), start=1):
        chosen = xp.asarray(rows)
        loss, grads = network.loss_and_grads(params, xp.take(x, chosen, axis=0), xp.take(targets, chosen, axis=0))
        params = opt.step(grads)
        losses.append(loss)  # kept on the device: reading it here would wait for the step
        if step % every == 0 or step == steps:
            evaluated.append(step)
            hits = xp.argmax(network.scores(params, test_x), axis=1) == test_labels
            accuracies.append(xp.mean(xp.astype(hits, xp.float32)))
            if adapts:
                for tensor, numbers in opt.stats.read().items():
                    if tensor.endswith(".weight"):
                        trust_ratios.setdefault(tensor, []).append(numbers["trust_ratio"])
        on_step(name, step)
    final_loss = float(network.loss_and_grads(params, x, targets)[0])
    seconds = time.perf_counter() - begin
    return Run(
        rule=name,
        lr=contender.lr,
        losses=[float(loss) for loss in losses],
        evaluated=evaluated,
        accuracies=[float(accuracy) for accuracy in accuracies],
        trust_ratios=trust_ratios,
        final_loss=final_loss,
        seconds=seconds,
        step_seconds=step_seconds,
    )


def _schedule(peak: float, steps: int) -> Schedule:
    """A tenth of the steps up to the peak, the rest down to zero along a cosine."""
    warmup = max(1, steps // 10)
    return ao.schedules.Join(
        [ao.schedules.Warmup(peak, warmup), ao.schedules.Cosine(peak, max(1, steps - warmup))], [warmup]
    )


def _batches(images: int, batch: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Rows of each step's batch: epoch after epoch in a new order, a last short batch left out."""
    rng = np.random.default_rng(seed)
    done = 0
    while True:
        order = rng.permutation(images)
        for start in range(0, images - batch + 1, batch):
            if done == steps:
                return
            yield order[start : start + batch]
            done += 1


def _time_step(opt: ao.Optimizer, x: Array, targets: Array, backend: Backend, repeats: int = 30) -> float:
    """Median seconds of one update, after three that compile and warm up."""
    _, grads = network.loss_and_grads(opt.params, x, targets)
    times = []
    for _ in range(3 + repeats):
        backend.synchronize()
        begin = time.perf_counter()
        opt.step(grads)
        backend.synchronize()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[3:]))


def _one_hot(labels: np.ndarray) -> np.ndarray:
    return (labels[:, None] == np.arange(SIZES[-1])).astype(np.float32)
