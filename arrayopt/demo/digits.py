"""The digits demo: the data, the training loop and the comparison of rules under equal conditions.

Every rule starts from the same weights, gets the same batches in the same order, makes the same number of steps with
the same schedule (a linear warm-up, then a cosine down to zero) and has its own peak learning rate. Gains and biases
are a group without weight decay. Trust ratios are not applied to them, because a step proportional to a bias near zero
would hardly change it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import arrayopt as ao
from arrayopt.demo import network
from arrayopt.libraries import Library

Array = Any
Schedule = Callable[[int], float]

BACKENDS = ("numpy", "cupy", "torch")
"""The array libraries that the demo supports."""
SIZES = (64, 128, 128, 64, 10)
EPOCHS = 20
BATCHES = (128, 512, 1347)
"""The batch sizes. The last is the whole training set, so that an epoch is one step."""
RATIOS = 50  # record at least this many trust ratios of each tensor, or one in each step


@dataclass(frozen=True)
class Contender:
    """A rule to compare, its peak learning rate for each batch size, and its weight decay.

    If the rule is for matrices only, the rule `rest` updates gains and biases, with the peak learning rate `rest_lr`.
    """

    rule: Callable[..., ao.Rule]
    lrs: dict[int, float]
    weight_decay: float = 0.01
    rest: Callable[..., ao.Rule] | None = None
    rest_lr: float = 0.0

    def lr(self, batch: int) -> float:
        """The learning rate for the batch size with the ratio nearest to 1 to `batch`."""
        return self.lrs[min(self.lrs, key=lambda known: max(known, batch) / min(known, batch))]


# Chosen by the mean accuracy of five seeds on the validation part, `load(validation=True)`, for batches of 128,
# 505 and 1010 images over 20 epochs, without the test images. Learning rates tried: 0.002 to 0.032 for AdamW, 0.005
# to 0.16 for LAMB, 0.0025 to 0.08 for LANS, 0.05 to 0.8 for SGD, 0.005 to 0.64 for Muon, 0.00025 to 0.032 for CAME, in
# factors of two. The smallest learning rate with an accuracy within 0.1 % of the best was chosen.
CONTENDERS = {
    "LAMB": Contender(ao.LAMB, {128: 0.01, 512: 0.04, 1347: 0.08}),
    "LANS": Contender(ao.LANS, {128: 0.01, 512: 0.04, 1347: 0.04}),
    "CAME": Contender(ao.CAME, {128: 0.001, 512: 0.00025, 1347: 0.0005}),
    "Muon": Contender(ao.Muon, {128: 0.02, 512: 0.32, 1347: 0.32}, rest=ao.AdamW, rest_lr=0.01),
    "AdamW": Contender(ao.AdamW, {128: 0.016, 512: 0.016, 1347: 0.008}),
    "SGD": Contender(partial(ao.SGD, momentum=0.9), {128: 0.4, 512: 0.2, 1347: 0.2}, weight_decay=0.0001),
}


@dataclass(frozen=True)
class Digits:
    """Images, as rows of 64 numbers in [0, 1], and their labels, as NumPy arrays."""

    train_x: np.ndarray
    train_labels: np.ndarray
    test_x: np.ndarray
    test_labels: np.ndarray


@dataclass(frozen=True)
class Run:
    """The results of training with one rule."""

    rule: str
    lr: float
    weight_decay: float
    batch: int
    losses: list[float]
    """Loss of the batch of each step."""
    accuracy: float
    """Share of the test images that are classified correctly after the last step."""
    trust_ratios: dict[str, tuple[list[int], list[float]]]
    """For each weight matrix, recorded steps and the trust ratios in them; empty for a rule without trust ratios."""
    final_loss: float
    """Loss over the whole training set after the last step."""
    engine: str
    """Which engine ran, and why."""
    state_bytes: float
    """Bytes of state per parameter."""


def load(*, validation: bool = False) -> Digits:
    """Load scikit-learn's 1,797 scanned digits. A stratified quarter of them are the test images.

    With `validation`, the test images are left out, and a quarter of the training images replaces them. Learning rates
    were chosen with these.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

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


def compare(
    rules: Sequence[str],
    *,
    data: Digits,
    backend: Library,
    steps: int,
    batch: int,
    seed: int,
    dtype: str = "float32",
    on_step: Callable[[str, int], object] = lambda rule, step: None,
) -> list[Run]:
    """Train the same network once with each rule.

    Parameters
    ----------
    rules : sequence of str
        Keys of `CONTENDERS`.
    data : Digits
        From `load`.
    backend : Library
        From `arrayopt.libraries.open_library`.
    steps, batch : int
        The number of updates, and of images per update, at most that of the training images.
    seed : int
        The seed of the initial weights and of the order of images.
    dtype : str
        The dtype of parameters, activations and gradients: ``"float32"``, or ``"float16"`` with a dynamic loss scale
        and masters.
    on_step : callable
        Called as ``on_step(rule, steps_done)`` after each step.

    Returns
    -------
    list of Run
        In the order of `rules`.
    """
    with one_thread(backend):
        return [_train(rule, data, backend, steps, batch, seed, dtype, on_step) for rule in rules]


@contextmanager
def one_thread(backend: Library) -> Iterator[None]:
    """Let NumPy multiply matrices in the calling thread only.

    For such small matrices, more threads gain little, and lose time if cores are busy. They would also make the order
    of sums, and so the results, depend on the number of cores.
    """
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    with threadpool_limits(1, user_api="blas" if backend.name == "numpy" else None):
        yield


def _train(
    name: str,
    data: Digits,
    backend: Library,
    steps: int,
    batch: int,
    seed: int,
    dtype: str,
    on_step: Callable[[str, int], object],
) -> Run:
    xp, contender = backend.xp, CONTENDERS[name]
    x, targets = xp.asarray(data.train_x), xp.asarray(_one_hot(data.train_labels))
    test_x, test_labels = xp.asarray(data.test_x), xp.asarray(data.test_labels)
    opt = _optimizer(name, backend, steps, batch, seed, dtype)
    adapts = hasattr(opt.rule, "adapt")
    monitor = ao.Monitor(opt, every=max(1, steps // RATIOS)) if adapts else None
    params = opt.params
    losses = []
    with np.errstate(over="ignore", invalid="ignore"):  # the loss scale handles overflows of float16
        for step, rows in enumerate(_batches(len(data.train_x), batch, steps, seed), start=1):
            chosen = xp.asarray(rows)
            images, wanted = xp.take(x, chosen, axis=0), xp.take(targets, chosen, axis=0)
            loss, grads = network.loss_and_grads(params, images, wanted, scale=opt.loss_scale)
            params = opt.step(grads)
            losses.append(loss)  # an array on the device, because reading it would wait for the step
            on_step(name, step)
        final_loss = float(network.loss_and_grads(params, x, targets)[0])
        hits = xp.argmax(network.scores(params, test_x), axis=1) == test_labels
    ratios = {} if monitor is None else monitor.series("trust_ratio")
    lines = opt.explain().splitlines()
    return Run(
        rule=name,
        lr=contender.lr(batch),
        weight_decay=contender.weight_decay,
        batch=batch,
        losses=[float(loss) for loss in losses],
        accuracy=float(xp.mean(xp.astype(hits, xp.float32))),
        trust_ratios={tensor: series for tensor, series in ratios.items() if tensor.endswith(".weight")},
        final_loss=final_loss,
        engine=next(line.strip() for line in lines if line.startswith("  engine ")),
        state_bytes=float(lines[-1].split()[1]),
    )


def _optimizer(name: str, backend: Library, steps: int, batch: int, seed: int, dtype: str) -> ao.Optimizer:
    """The optimizer of new parameters under a contender's rule and groups."""
    contender = CONTENDERS[name]
    rule = contender.rule(lr=_schedule(contender.lr(batch), steps), weight_decay=contender.weight_decay)
    params = network.init_params(backend.xp, SIZES, seed=seed, dtype=dtype)
    scale = ao.LossScale() if dtype == "float16" else None
    plain: dict[str, Any] = {"weight_decay": 0.0} | ({"adapt": False} if hasattr(rule, "adapt") else {})
    if contender.rest is not None:
        plain["rule"] = contender.rest(lr=_schedule(contender.rest_lr, steps))
    groups: dict[Any, Any] = {"*.gain": plain, "*.bias": plain}
    return ao.Optimizer(params, rule, groups=groups, loss_scale=scale)


def steps_of(data: Digits, batch: int, epochs: int = EPOCHS) -> int:
    """The number of steps in `epochs` passes over the training images."""
    return epochs * (len(data.train_x) // batch)


def time_step(name: str, data: Digits, backend: Library, *, dtype: str = "float32", repeats: int = 100) -> float:
    """The median time of `Optimizer.step` alone in seconds, with one rule, after three steps to warm up."""
    xp, batch = backend.xp, BATCHES[0]
    opt = _optimizer(name, backend, 3 + repeats, batch, 0, dtype)
    x, targets = xp.asarray(data.train_x[:batch]), xp.asarray(_one_hot(data.train_labels[:batch]))
    _, grads = network.loss_and_grads(opt.params, x, targets)
    times = []
    for _ in range(3 + repeats):
        backend.synchronize()
        begin = time.perf_counter()
        opt.step(grads)
        backend.synchronize()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[3:]))


def _schedule(peak: float, steps: int) -> Schedule:
    """Return a schedule: a linear warm-up in a tenth of the steps, then a cosine down to zero."""
    warmup = max(1, steps // 10)
    return ao.schedules.Join(
        [ao.schedules.Warmup(peak, warmup), ao.schedules.Cosine(peak, max(1, steps - warmup))], [warmup]
    )


def _batches(images: int, batch: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the row numbers of each step's batch. Each epoch has a new order, and drops a last short batch."""
    rng = np.random.default_rng(seed)
    done = 0
    while True:
        order = rng.permutation(images)
        for start in range(0, images - batch + 1, batch):
            if done == steps:
                return
            yield order[start : start + batch]
            done += 1


def _one_hot(labels: np.ndarray) -> np.ndarray:
    one_hot: np.ndarray = np.eye(SIZES[-1], dtype=np.float32)[labels]
    return one_hot
