"""What it saves to send gradients during the backward pass, and to receive parameters during the forward pass.

python -m benchmarks.overlap                        # 2 and 4 processes over gloo, in about three minutes
python -m benchmarks.overlap --page                 # and puts the table on docs/ranks.md
python -m benchmarks.overlap --ranks 2 --rounds 9
mpiexec -n 2 python -m benchmarks.overlap --mpi

Passes are a sleep for each tensor, so they take no processor, as on a GPU. The forward pass takes half the time of the
backward pass. Each message takes some time more than it does here, which costs no processor either: see `late`. The
table has what a step adds to the passes, in milliseconds, and of this the wait after the backward pass.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

import arrayopt as ao
from benchmarks.late import late
from benchmarks.on_page import put

LAYER = {"w": (1024, 3072), "b": (3072,)}
SHAPES = {f"layer{i}.{name}": shape for i in range(8) for name, shape in LAYER.items()}
WAYS = ("step", "give", "wait=False")
HEAD = """\
| ranks | passes | latency | `step(grads)` | `give`, `step()` | ratio | `step(wait=False)`, `wait` | ratio |
|---|---:|---:|---:|---:|---:|---:|---:|
"""


def step(way, opt, grads, forward, backward):
    """One step: what it adds to the passes, and how long it takes from the end of the backward pass."""
    began = time.perf_counter()
    for name, seconds in forward.items():
        if way == "wait=False":
            opt.wait(name)
        time.sleep(seconds)
    for name, seconds in backward.items():
        time.sleep(seconds)
        if way != "step":
            opt.give(name, grads[name])
    after = time.perf_counter()
    if way == "step":
        opt.step(grads)
    else:
        opt.step(wait=way == "give")
    ended = time.perf_counter()
    return ended - began - sum(forward.values()) - sum(backward.values()), ended - after


def measure(comm, rank, rounds, seconds, latency, label, rows=os.devnull):
    """Steps made in each way, in turns."""
    rng = np.random.default_rng(rank)
    grads = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    total = sum(g.size for g in grads.values())
    backward = {name: seconds * grads[name].size / total for name in reversed(SHAPES)}
    forward = {name: backward[name] / 2 for name in SHAPES}
    there = ao.Ranks(comm, grads="mean", check=None)
    opts, times = {}, {way: [] for way in WAYS}
    for way in WAYS:
        params = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
        opts[way] = ao.Optimizer(params, ao.LAMB(), comm=there)
    for k in range(rounds + 2):
        for way, opt in opts.items():
            opt.wait()
            found = step(way, opt, grads, forward, backward)
            if k >= 2:
                times[way].append(found)
    if rank:
        return
    cells = [label, f"{1.5 * seconds:g} s", f"{1e3 * latency:g} ms"]
    for way in WAYS:
        added, after = (1e3 * statistics.median(x) for x in zip(*times[way], strict=True))
        cells.append(f"{added:.0f} ({after:.0f})")
        if way != "step":
            pairs = zip(times["step"], times[way], strict=True)
            cells.append(f"{statistics.median(b[0] / a[0] for a, b in pairs):.2f}")
    row = f"| {' | '.join(cells)} |\n"
    sys.stdout.write(row)
    sys.stdout.flush()
    with open(rows, "a", encoding="utf-8") as file:
        file.write(row)


def gloo(rank, ranks, folder, given):
    """One process of a group of gloo."""
    import torch
    import torch.distributed as dist

    from arrayopt.ranks import process_group

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    kind = process_group.ProcessGroup
    for latency in given.latency:
        process_group.ProcessGroup = late(kind, partial(_same, latency)) if latency else kind
        for seconds in given.backward:
            measure(dist.group.WORLD, rank, given.rounds, seconds, latency, f"{ranks}, gloo", f"{folder}/rows")
    dist.destroy_process_group()


def _same(latency, size):
    """The seconds that a message of any size takes more."""
    return latency


def main():
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mpi", action="store_true", help="over MPI; start it by mpiexec")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="how many processes of gloo are started")
    parser.add_argument("--rounds", type=int, default=3, help="how many steps are timed")
    parser.add_argument("--backward", type=float, nargs="+", default=[0.4, 1.2], help="seconds of a backward pass")
    parser.add_argument("--latency", type=float, nargs="+", default=[0.0, 0.01], help="seconds added to each message")
    parser.add_argument("--page", action="store_true", help="put the table on docs/ranks.md")
    given = parser.parse_args()
    os.environ.setdefault("ARRAYOPT_NUM_THREADS", "1")
    if given.mpi:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        sys.stdout.write(HEAD if not comm.rank else "")
        for seconds in given.backward:
            measure(comm, comm.rank, given.rounds, seconds, 0.0, f"{comm.size}, MPI")
        return
    from torch import multiprocessing

    sys.stdout.write(HEAD)
    sys.stdout.flush()
    table = HEAD
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(gloo, args=(ranks, folder, given), nprocs=ranks)
            table += Path(folder, "rows").read_text("utf-8")
    if given.page:
        put("overlap", table, "python -m benchmarks.overlap")


if __name__ == "__main__":
    main()
