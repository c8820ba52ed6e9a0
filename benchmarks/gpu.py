"""The benchmark on a GPU: ``python benchmarks/gpu.py --help``. It needs CuPy; peers are optional."""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of this folder

import arrayopt as ao  # noqa: E402
from arrayopt.fusion.plan import plan_for  # noqa: E402
from benchmarks.contest import Contestant, Race, Running, race  # noqa: E402
from benchmarks.ours import RULES  # noqa: E402

STEPS = 5
"""Steps that are timed together, so that the wait at their end does not count."""

COPY, OURS = "copy", "arrayopt cupy"
COPIED = 1 << 30


@dataclass(frozen=True)
class Case:
    """A model's tensors.

    Attributes
    ----------
    title : str
        What tables call it.
    shapes : tuple of tuple of int
        A shape for each tensor.
    dtype : str
        Of parameters and gradients.
    """

    title: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))


def _bert_large() -> tuple[tuple[int, ...], ...]:
    d, inner = 1024, 4096
    layer = (*((d, d), (d,)) * 4, (d,), (d,), (inner, d), (inner,), (d, inner), (d,), (d,), (d,))
    return ((30522, d), (512, d), (2, d), (d,), (d,), *layer * 24, (d, d), (d,))


def _llama(layers: int = 16, d: int = 2048, inner: int = 5632, words: int = 32000) -> tuple[tuple[int, ...], ...]:
    layer = ((d, d), (d // 4, d), (d // 4, d), (d, d), (inner, d), (inner, d), (d, inner), (d,), (d,))
    return ((words, d), *layer * layers, (d,), (words, d))


CASES = {
    "bert-large": Case("BERT-large", _bert_large()),
    "bert-large-mixed": Case("BERT-large, bfloat16 with masters", _bert_large(), "bfloat16"),
    "llama": Case("Llama-like, 0.8 B", _llama()),
    "tiny": Case("tiny", ((30, 70), (70,), (5, 4, 3, 3))),
}


def copying() -> Contestant:
    """A device-to-device copy, which moves twice its bytes."""

    def build() -> Running:
        import cupy

        source, target = (cupy.zeros(COPIED // 4, cupy.float32) for _ in range(2))
        return _waiting(lambda: target.__setitem__(..., source))

    return Contestant(COPY, build, held=2.0 * COPIED)


def _waiting(step: Callable[[], object], values: Callable[[], Any] = tuple) -> Running:
    """Several steps, and then a wait."""
    import cupy

    def steps() -> None:
        for _ in range(STEPS):
            step()
        cupy.cuda.runtime.deviceSynchronize()

    return Running(steps, values)


def _arrays(case: Case, scale: float, seed: int) -> list[Any]:
    """CuPy arrays of a case; PyTorch tensors where CuPy has no such dtype."""
    import cupy

    numbers = np.random.default_rng(seed).standard_normal(100_003, np.float32) * np.float32(scale)
    made = [cupy.asarray(np.resize(numbers, shape)) for shape in case.shapes]
    if case.dtype == "float32":
        return made
    import torch

    return [torch.from_dlpack(x).to(getattr(torch, case.dtype)) for x in made]


def ours(rule: str, case: Case) -> Contestant:
    """This library."""

    def build() -> Running:
        params, grads = _arrays(case, 3e-2, 1), _arrays(case, 1e-2, 2)
        opt = ao.Optimizer(params, RULES[rule], engine="cupy")
        return _waiting(lambda: opt.step(grads))

    return Contestant(OURS, build, held=20.0 * case.elements)


def _torch(make: Callable[[list[Any]], Any], case: Case, name: str, module: str) -> Contestant:
    def build() -> Running:
        import torch

        tensors = [torch.as_tensor(x, device="cuda").clone() for x in _arrays(case, 3e-2, 1)]
        grads = [torch.as_tensor(x, device="cuda").clone() for x in _arrays(case, 1e-2, 2)]
        for p, g in zip(tensors, grads, strict=True):
            p.requires_grad_().grad = g
        opt = make(tensors)
        return _waiting(opt.step)

    missing = "" if find_spec("torch") and find_spec(module) else f"{module} is not installed"
    return Contestant(name, build, held=24.0 * case.elements, left_out=missing)


def _compiled(rule: str, case: Case) -> Contestant:
    """The plain rule under torch.compile."""

    def build() -> Running:
        import torch

        made = RULES[rule]
        params, grads = ([torch.as_tensor(x, device="cuda") for x in _arrays(case, s, 1)] for s in (3e-2, 1e-2))
        held = [params, ao.init(made, params)]

        @torch.compile
        def step(params: Any, state: Any) -> Any:
            return ao.update(made, params, grads, state)

        def once() -> None:
            held[:] = step(*held)

        return _waiting(once)

    missing = "" if find_spec("torch") else "torch is not installed"
    return Contestant("torch.compile of the rule", build, held=32.0 * case.elements, left_out=missing)


def _optax(case: Case) -> Contestant:
    def build() -> Running:
        import jax
        import optax

        opt = optax.lamb(1e-3, weight_decay=0.01)
        params, grads = ([jax.dlpack.from_dlpack(x) for x in _arrays(case, s, 1)] for s in (3e-2, 1e-2))
        held = [params, opt.init(params)]

        def step(params: Any, state: Any) -> Any:
            updates, state = opt.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        run = jax.jit(step, donate_argnums=(0, 1))

        def steps() -> None:
            for _ in range(STEPS):
                held[:] = run(*held)
            jax.block_until_ready(held[0])

        return Running(steps)

    missing = "" if find_spec("jax") and find_spec("optax") else "JAX or optax is not installed"
    return Contestant("optax jit", build, held=32.0 * case.elements, left_out=missing)


def contestants(rule: str, case: Case) -> list[Contestant]:
    """Who runs: this library first, and everywhere PyTorch's fused AdamW."""
    from benchmarks.peers_torch import ADAMW, TIMM_LAMB, _of

    made = [
        ours(rule, case),
        _torch(_of("torch.optim", "AdamW", **ADAMW, fused=True), case, "torch fused AdamW", "torch"),
    ]
    if rule == "LAMB":
        made.append(_torch(_of("timm", "Lamb", **TIMM_LAMB, foreach=True), case, "timm foreach", "timm"))
        if case.dtype == "float32":
            made += [_optax(case), _compiled(rule, case)]
    return made


def bytes_per_parameter(rule: str, case: Case) -> float:
    """What the plans move, weighted by size."""
    moved = sum(math.prod(s) * plan_for(RULES[rule], len(s), case.dtype).bytes_per_parameter() for s in case.shapes)
    return moved / case.elements


def table(rule: str, case: Case, made: Race) -> list[str]:
    """One contest in Markdown."""
    bandwidth = 2.0 * COPIED * STEPS / made.seconds(COPY)
    lines = [f"### {rule}, {case.title} ({case.elements / 1e6:.0f} M parameters)", ""]
    lines += ["| contestant | ms | ratio | B/param at copy speed |", "|---|---:|---:|---:|"]
    for name in made.names:
        if name != COPY:
            seconds = made.seconds(name) / STEPS
            implied = seconds * bandwidth / case.elements
            lines.append(f"| {name} | {seconds * 1e3:.3f} | {made.ratio(name, OURS):.2f} | {implied:.1f} |")
    lines += [
        "",
        f"Copy: {bandwidth / 1e9:.0f} GB/s read and written. The plan moves {bytes_per_parameter(rule, case):.1f}",
    ]
    lines[-1] += " bytes per parameter."
    return [*lines, *(f"Left out: {name} ({why})." for name, why in made.left_out.items()), ""]


def draw(ratios: dict[str, dict[str, float]], path: Path) -> None:
    """Bars of time as multiples of ours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.9 + 1.1 * len(ratios)), dpi=150, layout="constrained")
    for axes, (title, bars) in zip(figure.subplots(len(ratios), 1, squeeze=False)[:, 0], ratios.items(), strict=True):
        axes.barh(list(bars), list(bars.values()), color=["#0072B2" if x == OURS else "#8C8C8C" for x in bars])
        axes.axvline(1.0, color="#666666", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=9)
    figure.supxlabel(f"time of a step ÷ that of {OURS}")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status is 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", default="LAMB,LANS,CAME,AdamW,SGD")
    parser.add_argument("--cases", default="bert-large,bert-large-mixed,llama")
    parser.add_argument("--seconds", type=float, default=12.0, help="for each rule and case (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("gpu"), help="folder of gpu.md and gpu.png")
    given = parser.parse_args(arguments)
    try:
        import cupy
    except ImportError:
        sys.stderr.write("benchmarks/gpu.py: CuPy is not installed\n")
        return 2
    if not cupy.cuda.is_available():
        sys.stderr.write("benchmarks/gpu.py: CuPy finds no CUDA device\n")
        return 2
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    lines, ratios = [f"# On {device}", "", f"CuPy {cupy.__version__}, medians of {STEPS} steps at a time.", ""], {}
    for case in (CASES[x] for x in given.cases.split(",")):
        if case.dtype != "float32" and find_spec("torch") is None:
            lines.append(f"{case.title}: left out, PyTorch is not installed.\n")
            continue
        for rule in given.rules.split(","):
            sys.stderr.write(f"{rule}, {case.title}\n")
            made = race(contestants(rule, case), rounds=15, warmup=1, seconds=given.seconds, always=[copying()])
            lines += table(rule, case, made)
            ratios[f"{rule}, {case.title}"] = {x: made.ratio(x, OURS) for x in made.names if x != COPY}
            cupy.get_default_memory_pool().free_all_blocks()
            sys.stdout.write("\n".join(table(rule, case, made)) + "\n")
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "gpu.md").write_text("\n".join(lines) + "\n", "utf-8")
    if find_spec("matplotlib"):
        draw(ratios, given.output / "gpu.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
