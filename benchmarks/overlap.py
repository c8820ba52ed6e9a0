"""What it saves to send gradients during the backward pass, and to receive parameters during the forward pass.

python -m benchmarks.overlap                        # 2 and 4 processes over gloo, in about three minutes
python -m benchmarks.overlap --latency 0.03 --layers 16 --columns 256 --bucket 2097152    # little but latency
python -m benchmarks.overlap --page                 # and puts the table on docs/benchmarks.md
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
from arrayopt.ranks import layout
from benchmarks.late import late
from benchmarks.on_page import put

WAYS = ("step", "give", "wait=False")
HEAD = """\
| ranks | passes | latency | `step(grads)` | `give`, `step()` | ratio | `step(wait=False)`, `wait` | ratio |
|---|---:|---:|---:|---:|---:|---:|---:|
"""


def step(way, opt, grads, forward, backward):
    """One step: what it adds to the passes, and how long it takes from the end of the backward pass."""
    began, passed = time.perf_counter(), 0.0
    for name, seconds in forward.items():
        if way == "wait=False":
            opt.wait(name)
        passed += slept(seconds)
    for name, seconds in backward.items():
        passed += slept(seconds)
        if way != "step":
            opt.give(name, grads[name])
    after = time.perf_counter()
    if way == "step":
        opt.step(grads)
    else:
        opt.step(wait=way == "give")
    ended = time.perf_counter()
    return ended - began - passed, ended - after


def slept(seconds):
    """Sleep; return for how long, for a loaded machine wakes late."""
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began


def measure(comm, rank, given, seconds, latency, label, rows=os.devnull):
    """Steps made in each way, in turns."""
    rng = np.random.default_rng(rank)
    shapes = {}
    for i in range(given.layers):
        shapes |= {f"layer{i}.w": (1024, given.columns), f"layer{i}.b": (given.columns,)}
    layout.ROUND = given.bucket
    grads = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    total = sum(g.size for g in grads.values())
    backward = {name: seconds * grads[name].size / total for name in reversed(shapes)}
    forward = {name: backward[name] / 2 for name in shapes}
    there = ao.Ranks(comm, grads="mean", check=None)
    opts, times = {}, {way: [] for way in WAYS}
    for way in WAYS:
        params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        opts[way] = ao.Optimizer(params, ao.LAMB(), comm=there)
    for k in range(given.rounds + 2):
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
            measure(dist.group.WORLD, rank, given, seconds, latency, f"{ranks}, gloo", f"{folder}/rows")
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
    parser.add_argument("--layers", type=int, default=8, help="how many layers the model has")
    parser.add_argument("--columns", type=int, default=3072, help="the columns of a layer, of 1,024 rows")
    parser.add_argument("--bucket", type=int, default=layout.ROUND, help="bytes of a bucket")
    parser.add_argument("--page", action="store_true", help="put the table on docs/benchmarks.md")
    given = parser.parse_args()
    os.environ.setdefault("ARRAYOPT_NUM_THREADS", "1")
    if given.mpi:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        sys.stdout.write(HEAD if not comm.rank else "")
        for seconds in given.backward:
            measure(comm, comm.rank, given, seconds, 0.0, f"{comm.size}, MPI")
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
