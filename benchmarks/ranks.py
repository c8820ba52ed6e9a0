"""What it costs to share a step among ranks: counted from the real cuts, and measured with two processes.

python -m benchmarks.ranks                          # counts: memory, messages and bytes
mpiexec -n 2 python -m benchmarks.ranks --measure   # times, beside one process with as many threads in all
"""

import argparse
import os
import statistics
import sys
import time

import numpy as np

import arrayopt as ao
from arrayopt.engines.numba.engine import Numba
from arrayopt.fusion.layout import geometry, layout
from arrayopt.fusion.plans import plan_for
from arrayopt.params.groups import Group
from arrayopt.ranks.partition import divide
from arrayopt.state.tensors import Tensor
from benchmarks.apart import tell
from benchmarks.gpu import CASES
from benchmarks.problems import PROBLEMS
from benchmarks.results import Sheet

RULES = {"AdamW": ao.AdamW(lr=1e-3), "LAMB": ao.LAMB(lr=1e-3), "LANS": ao.LANS(lr=1e-3), "CAME": ao.CAME(lr=1e-3)}
RANKS = (2, 8, 64, 256)


def say(line):
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def models():
    """The shapes of the models."""
    d, inner, words = 4096, 11008, 32000
    layer = (*((d, d),) * 4, (inner, d), (inner, d), (d, inner), (d,), (d,))
    # DeepSeekMoE 16 B: 28 layers, the first without experts; 64 experts of three matrices, and two that all words use
    h, expert = 2048, 1408
    attention = (*((h, h),) * 4, (h,), (h,))
    experts = (
        *((expert, h), (expert, h), (h, expert)) * 64,
        (2 * expert, h),
        (2 * expert, h),
        (h, 2 * expert),
        (64, h),
    )
    first = ((10944, h), (10944, h), (h, 10944))
    return {
        "BERT-base": PROBLEMS["bert-base"].shapes,
        "BERT-large": CASES["bert-large"].shapes,
        "Llama 7 B": ((words, d), *layer * 32, (d,), (words, d)),
        "MoE 16 B": ((102400, h), *attention, *first, *(*attention, *experts) * 27, (h,), (102400, h)),
    }


def count(shapes, rule, ranks):
    """State of the fullest rank over the whole's R-th part; cut tensors; collectives and bytes of partial results; and
    the parts of parameters, of which each is sent once."""
    tensors = [Tensor(str(i), np.broadcast_to(np.float32(0), shape)) for i, shape in enumerate(shapes)]
    divide([Group("all", rule, {}, tensors)], "numba", 0, ranks)
    held = np.zeros(ranks)
    cut = pieces = sums = 0
    rounds = set()
    for tensor in tensors:
        held += np.diff(tensor.share.ends)
        pieces += len(tensor.share.holders)
        if tensor.share.kind != "cut":
            continue
        cut += 1
        plan = plan_for(rule, len(tensor.shape), "float32", lean=Numba.lean)
        where, geo = layout(plan), geometry([tensor.shape], plan.element)
        kinds = list(where.partials.values())
        lengths = where.lengths(geo)[0, len(where.vectors) :]
        sums += sum(int(n) * (4 if kind in ("row", "column") else 8) for n, kind in zip(lengths, kinds, strict=True))
        rounds |= {k for k, p in enumerate(plan.passes) if p.reductions}
    total = sum(int(np.prod(shape)) for shape in shapes)
    return held.max() * ranks / total, cut, len(rounds), sums, pieces, 4 * total


def print_counts():
    """A table in Markdown."""
    say("| model | rule | ranks | fullest rank | cut tensors | exchanges of sums | bytes of sums | parts |")
    say("|---|---|---|---|---|---|---|---|")
    for label, shapes in models().items():
        for name, rule in RULES.items():
            for ranks in RANKS:
                most, cut, rounds, sums, pieces, _ = count(shapes, rule, ranks)
                say(f"| {label} | {name} | {ranks} | {most:.2f} | {cut} | {rounds} | {sums:,} | {pieces:,} |")


def measure(rounds, data):
    """A step of two processes with one thread each, and of one process with two threads, in turns."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    shapes = PROBLEMS["bert-base"].shapes
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(s, np.float32) * np.float32(0.01) for s in shapes]
    lines = []
    for name, rule in RULES.items():
        alone = ao.Optimizer([np.ones(s, np.float32) for s in shapes], rule) if comm.rank == 0 else None
        arrays = [np.ones(s, np.float32) for s in shapes]
        shared = ao.Optimizer(ao.ranks.shared(arrays, comm), rule, comm=comm)
        ranks = ao.Optimizer(arrays, rule, comm=comm)
        times = {"one process": [], "ranks": [], "shared memory": []}
        for k in range(rounds + 2):
            os.environ["ARRAYOPT_NUM_THREADS"] = str(comm.size)
            wait(comm)
            began = time.perf_counter()
            if alone is not None:
                alone.step(grads)
            mid = time.perf_counter()
            wait(comm)
            os.environ["ARRAYOPT_NUM_THREADS"] = "1"
            if k >= 2:
                times["one process"].append(mid - began)
            for label, opt in (("ranks", ranks), ("shared memory", shared)):
                wait(comm)
                start = time.perf_counter()
                opt.step(grads)
                if k >= 2:
                    times[label].append(time.perf_counter() - start)
        one, many, common = (statistics.median(x or [1.0]) for x in times.values())
        lines.append((name, f"{1e3 * one:.1f}", f"{many / one:.2f}", f"{common / one:.2f}"))
        del alone, ranks, shared
    if comm.rank == 0:
        columns = ("rule", "ms, one process", "ratio, ranks", "ratio, ranks with shared memory")
        tell(Sheet(f"{comm.size} ranks on one machine: BERT-base", columns, lines), data=data)


def wait(comm):
    """All ranks are here; none has taken the others' time."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def main():
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="time steps; start it by mpiexec -n 2")
    parser.add_argument("--rounds", type=int, default=15, help="how many steps are timed")
    parser.add_argument("--data", action="store_true", help="the table as JSON, for benchmarks/run.py")
    given = parser.parse_args()
    measure(given.rounds, given.data) if given.measure else print_counts()


if __name__ == "__main__":
    main()
