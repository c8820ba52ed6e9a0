"""What state of 8 bits saves, and what it costs: bytes per parameter, memory of a process, time, accuracy on digits.

``python -m benchmarks.memory`` prints the table of docs/memory.md, and times and accuracies for docs/benchmarks.md.
"""

import argparse
import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console

import arrayopt as ao
from arrayopt.demo import digits
from arrayopt.exchange.eight_bits import dynamic_map
from arrayopt.libraries import open_library
from arrayopt.params.trees import flatten
from arrayopt.state.quantized import dequantized, quantized
from benchmarks import ours, peers_torch
from benchmarks.apart import tell
from benchmarks.contest import Contestant, Race, Running, by_threads, race
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.results import Sheet

CONSOLE = Console(soft_wrap=True, highlight=False)
RULES = ("SGD", "AdamW", "LAMB", "LANS", "CAME")
STORAGES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8"},
}
SEVEN_BYTES = {"master_weights": "split", "state_dtype": "int8"}
"""With these, a bfloat16 parameter has 7 bytes under a rule with two moments, its gradient included."""
SEEDS = range(5)
PARAMETERS = 100_000_000


def made(name: str, **options: Any) -> ao.Rule:
    """A rule with state, and with a learning rate where it needs one."""
    more = {"SGD": {"lr": 0.1, "momentum": 0.9}, "CAME": {"lr": 0.01}}.get(name, {})
    return getattr(ao, name)(**more, **options)  # type: ignore[no-any-return]


def bytes_per_parameter(name: str, dtype: Any, **options: Any) -> float:
    """The bytes of parameter, gradient and state, for each parameter of a matrix."""
    p = np.zeros((1024, 1024), dtype)
    opt = ao.Optimizer({"w": p}, made(name, **options))
    state = sum(x.nbytes for slot, x in opt.state["w"].items() if slot != "t")
    return (2 * p.nbytes + state) / p.size


def bytes_table() -> Sheet:
    """The bytes of each rule and storage."""
    kinds: list[tuple[str, Any, dict[str, Any]]] = [
        ("float32, state in float32", np.float32, {}),
        ("float32, state in int8", np.float32, {"state_dtype": "int8"}),
        ("bfloat16 with masters, state in float32", ml_dtypes.bfloat16, {}),
        ("bfloat16, split masters, state in int8", ml_dtypes.bfloat16, SEVEN_BYTES),
        (
            "bfloat16, stochastic rounding, state in int8",
            ml_dtypes.bfloat16,
            {"rounding": "stochastic", "state_dtype": "int8"},
        ),
    ]
    lines = []
    for title, dtype, options in kinds:
        lines.append((title, *(f"{bytes_per_parameter(name, dtype, **options):.2f}" for name in RULES)))
    return Sheet("Bytes per parameter, with its gradient and state", ("parameters and state", *RULES), lines)


# ---- accuracy -------------------------------------------------------------------------------------------------------


def _one_scale(x: Any, dtype: str) -> Any:
    """Codes with one scale for the whole tensor."""
    top = 127 if dtype == "int8" else 255
    scale = np.abs(x).max() or 1.0
    return (np.rint(x / scale * top) * (scale / top)).astype(x.dtype)


def _blocks(x: Any, dtype: str) -> Any:
    """Codes as the library makes them."""
    return dequantized(*quantized(x, dtype))


def _float8(x: Any, dtype: str) -> Any:
    """Blocks of 32 with scales in bfloat16, as the library's, of which each element is stored as float8_e4m3."""
    flat = np.pad(x.reshape(-1), (0, -x.size % 32)).reshape(-1, 32)
    scale = (np.abs(flat).max(axis=1, keepdims=True) / 448.0).astype(ml_dtypes.bfloat16).astype(x.dtype)
    codes = np.clip(flat / np.where(scale == 0, 1.0, scale), -448.0, 448.0).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(x.dtype) * scale).reshape(-1)[: x.size].reshape(x.shape)


def _dynamic(x: Any, dtype: str) -> Any:
    """Blocks of 256, each divided by its largest magnitude, of which elements are the nearest numbers of the map."""
    table = dynamic_map(signed=dtype == "int8").numpy()
    flat = np.pad(x.reshape(-1), (0, -x.size % 256)).reshape(-1, 256)
    scale = np.abs(flat).max(axis=1, keepdims=True)
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, flat / np.where(scale == 0, 1.0, scale))
    return (table[codes] * scale).astype(x.dtype).reshape(-1)[: x.size].reshape(x.shape)


CONTROLS: dict[str, tuple[Callable[[Any, str], Any], bool]] = {
    "map of bitsandbytes, in blocks of 256": (_dynamic, False),
    "float8_e4m3 in blocks": (_float8, True),
    "one scale per tensor": (_one_scale, True),
    "blocks, without roots": (_blocks, False),
}
"""What the library does not do: how a slot is rounded after each step, and whether of a second moment the root is."""


def _rounding(how: Callable[[Any, str], Any], roots: bool, opt: ao.Optimizer) -> None:
    """Round the state of an optimizer."""
    for state in opt.state.values():
        for slot, x in state.items():
            if slot == "m":
                x[...] = how(x, "int8")
            elif slot == "v":
                x[...] = how(np.sqrt(x), "uint8") ** 2 if roots else how(x, "uint8")


@contextlib.contextmanager
def _contender(name: str, after: Any = None, **options: Any) -> Iterator[None]:
    """A contender of the digits with other storage, or with its state rounded after each step."""
    old, optimizer = digits.CONTENDERS[name], ao.Optimizer

    def hooked(*args: Any, **given: Any) -> ao.Optimizer:
        opt = optimizer(*args, **given)
        opt.after_step(after)
        return opt

    digits.CONTENDERS[name] = digits.Contender(partial(old.rule, **options), {512: 0.01}, weight_decay=1.0)
    if after is not None:
        ao.Optimizer = hooked  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        digits.CONTENDERS[name], ao.Optimizer = old, optimizer  # type: ignore[misc]


def accuracy_table(steps: int) -> None:
    """Print final losses and accuracies on the digits, means and ranges over the seeds."""
    data, numpy = digits.load(), open_library("numpy")
    CONSOLE.print("| rule | state | final loss | accuracy, % |\n|---|---|---|---|")
    for name in ("AdamW", "LAMB"):
        variants: list[tuple[str, Any, dict[str, Any]]] = [(s, None, o) for s, o in STORAGES.items()]
        variants += [(title, partial(_rounding, *how), {}) for title, how in CONTROLS.items()]
        for title, after, options in variants:
            losses, accuracies = [], []
            with _contender(name, after, **options), np.errstate(all="ignore"):
                for seed in SEEDS:
                    (run,) = digits.compare([name], data=data, backend=numpy, steps=steps, batch=512, seed=seed)
                    losses.append(run.final_loss)
                    accuracies.append(100 * run.accuracy)
            loss = f"{np.mean(losses):.2e} ({min(losses):.1e} to {max(losses):.1e})"
            score = f"{np.mean(accuracies):.2f} ({min(accuracies):.2f} to {max(accuracies):.2f})"
            CONSOLE.print(f"| {name} | {title} | {loss} | {score} |")


# ---- the transformer ------------------------------------------------------------------------------------------------


def _example() -> Any:
    """The module of the example of docs/examples/transformer.md."""
    path = Path(__file__).parents[1] / "docs" / "examples" / "transformer.py"
    spec = importlib.util.spec_from_file_location("transformer_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ours(rule: ao.Rule, params: Any) -> Callable[[Any], object]:
    """What makes a step of one of our rules over NumPy arrays."""
    return ao.Optimizer(params, rule).step


def _theirs(make: Callable[[Any], Any], params: Any) -> Callable[[Any], object]:
    """What makes a step of an optimizer of PyTorch over NumPy arrays, in their memory."""
    import torch

    tensors = {name: torch.nn.Parameter(torch.from_numpy(x)) for name, x in flatten(params)}
    optimizer = make(tensors.values())

    def step(grads: Any) -> None:
        for name, g in flatten(grads):
            tensors[name].grad = torch.from_numpy(np.ascontiguousarray(g))
        optimizer.step()

    return step


def _peers() -> dict[str, Callable[[Any], Any]]:
    """AdamW with state in 8 bits of others, where they are installed."""
    found: dict[str, Callable[[Any], Any]] = {}
    with contextlib.suppress(ImportError):
        from bitsandbytes.optim import AdamW8bit as OfBitsandbytes

        found["bitsandbytes AdamW8bit"] = partial(OfBitsandbytes, lr=0.006, weight_decay=0.01)
    with contextlib.suppress(ImportError):
        from torchao.optim import AdamW8bit as OfTorchao

        found["torchao AdamW8bit"] = partial(OfTorchao, lr=0.006, weight_decay=0.01)
    return found


def transformer_table(steps: int) -> None:
    """Print losses of the transformer of the examples, means and ranges over the seeds."""
    example = _example()
    letters, vocabulary = example.text()
    held = len(letters) * 9 // 10

    def batch(rng: Any) -> Any:
        starts = rng.integers(0, held - example.LENGTH - 1, 16)
        return letters[starts[:, None] + np.arange(example.LENGTH + 1)]

    def run(start: Callable[[Any], Callable[[Any], object]], seed: int) -> tuple[float, float]:
        rng, params = np.random.default_rng(seed), example.init(np, vocabulary)
        step, losses = start(params), []
        for _ in range(steps):
            loss, grads = example.loss_and_grads(params, batch(rng))
            step(grads)
            losses.append(loss)
        return float(np.mean(losses[-50:])), float(example.unseen_loss(params))

    runs: list[tuple[str, str, Callable[[Any], Callable[[Any], object]]]] = []
    for name, lr in (("AdamW", 0.006), ("LAMB", 0.01)):
        for storage, options in STORAGES.items():
            runs.append((name, storage, partial(_ours, getattr(ao, name)(lr=lr, weight_decay=0.01, **options))))
    runs += [(title, "8 bits", partial(_theirs, make)) for title, make in _peers().items()]
    CONSOLE.print("| rule | state | loss of the last 50 steps | loss on unseen text |\n|---|---|---|---|")
    for name, storage, start in runs:
        found = np.array([run(start, seed) for seed in SEEDS])
        cells = [f"{x.mean():.3f} ({x.min():.3f} to {x.max():.3f})" for x in found.T]
        CONSOLE.print(f"| {name} | {storage} | {' | '.join(cells)} |")


# ---- memory of a process --------------------------------------------------------------------------------------------


def most_memory() -> int:
    """The most bytes that this process had. `ru_maxrss` would begin at what the process that started it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _grown() -> Any:
    """The transformer of the examples as PyTorch's modules in bfloat16, with about `PARAMETERS` parameters."""
    import torch

    width, vocabulary, length = 768, 96, 64
    torch.set_default_dtype(torch.bfloat16)
    layer = torch.nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.0, batch_first=True, norm_first=True)

    class Transformer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(vocabulary, width)
            self.places = torch.nn.Parameter(torch.zeros(length, width))
            self.blocks = torch.nn.TransformerEncoder(layer, 14, enable_nested_tensor=False)
            self.head = torch.nn.Linear(width, vocabulary)

        def forward(self, pieces: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(self.words(pieces) + self.places))

    return Transformer()


def train(storage: str, release: bool) -> None:
    """Three steps of that transformer, in a process of its own: it prints the most memory that it had, less that of
    PyTorch's and our imports, for each parameter.
    """
    import torch

    import arrayopt.torch as at

    torch.manual_seed(0)
    pieces = torch.randint(96, (2, 65))
    before = most_memory()
    options: dict[str, Any] = SEVEN_BYTES if storage == "int8" else {}
    net = _grown()
    optimizer = at.AdamW(net.parameters(), lr=1e-3, release=release, **options)
    for _ in range(3):
        logits = net(pieces[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    CONSOLE.print(f"{(most_memory() - before) / sum(p.numel() for p in net.parameters()):.2f}")


def memory_table() -> Sheet:
    """The most memory of processes that train with and without release."""
    lines = []
    for storage in ("float32", "int8"):
        cells = []
        for release in ("", "--release"):
            command = [sys.executable, "-m", "benchmarks.memory", "--train", storage, *([release] if release else [])]
            cells.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
        lines.append((f"bfloat16 parameters, state in {storage}", *cells))
    title = f"Peak memory of a process, in bytes per parameter: AdamW, a transformer of {PARAMETERS // 10**6} M"
    return Sheet(title, ("parameters and state", "gradients together", "gradients released"), lines)


# ---- time -----------------------------------------------------------------------------------------------------------


PEER = "AdamW of PyTorch, fused, state in float32"
TIMED = ("AdamW", "LAMB", "LANS", "CAME")
HELD: dict[str, dict[str, Any]] = {
    "state in float32": STORAGES["float32"],
    "state in int8": STORAGES["int8"],
    "bfloat16, split masters, state in int8": {"dtype": ml_dtypes.bfloat16, **SEVEN_BYTES},
}
"""How parameters and state are stored in the contest of times; float32 parameters where nothing else is said."""


def _timed(name: str, storage: str, problem: Problem) -> Contestant:
    """A rule with a storage, on this library's fastest engine."""
    held = 4.0 * problem.elements * (1 + ours.STATE[name] * (1.0 if storage == "state in float32" else 0.27))

    def build() -> Running:
        opt, grads = ours.optimizer(name, problem, ours.FUSED[0], **HELD[storage])
        return Running(lambda: opt.step(grads), lambda: list(opt.params.values()), settings=by_threads())

    return Contestant(f"{name}, {storage}", build, held=held)


def raced(problem: Problem, rounds: int) -> Race:
    """Times of rules with their state in float32 and in 8 bits, and of PyTorch's fused AdamW, in turns."""
    peers = [c for c in peers_torch.contestants("AdamW", problem) if c.name == "torch fused"]
    entered = [replace(c, name=PEER) for c in peers]
    for name in TIMED:
        entered += [_timed(name, storage, problem) for storage in HELD]
    return race(entered, rounds=rounds, warmup=2)


def times_table(times: Race, problem: Problem) -> Sheet:
    """The times of all, and as multiples of the peer's in the same round."""
    title = f"Times with state in 8 bits: {problem.title}, {problem.elements / 1e6:.0f} million parameters"
    lines = [(name, f"{1e3 * times.seconds(name):.1f}", f"{times.ratio(name, PEER):.2f}") for name in times.names]
    return Sheet(title, ("optimizer", "ms", "ratio"), lines)


def main() -> None:
    """Print all tables, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", choices=["float32", "int8"])
    parser.add_argument("--release", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--data", action="store_true", help="tables of bytes as JSON, for benchmarks/run.py")
    parser.add_argument("--digits", action="store_true", help="the table of the digits alone")
    parser.add_argument("--transformer", action="store_true", help="that table alone")
    parser.add_argument("--times", action="store_true", help="the times alone")
    parser.add_argument("--problem", choices=PROBLEMS, default="bert-base", help="the tensors that times are of")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    if given.train:
        train(given.train, given.release)
        return
    if given.digits:
        accuracy_table(given.steps)
        return
    if given.transformer:
        transformer_table(given.steps)
        return
    problem = PROBLEMS[given.problem]
    times = times_table(raced(problem, given.rounds), problem)
    tell(times, data=given.data)
    if given.times:
        return
    tell(bytes_table(), data=given.data)
    tell(memory_table(), data=given.data)
    if given.data:
        return
    CONSOLE.print()
    accuracy_table(given.steps)
    CONSOLE.print()
    transformer_table(given.steps)


if __name__ == "__main__":
    main()
