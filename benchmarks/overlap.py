"""What it saves to give gradients one by one during the backward pass of several processes.

python -m benchmarks.overlap             # 2 processes over gloo
python -m benchmarks.overlap --ranks 4
mpiexec -n 2 python -m benchmarks.overlap --mpi

The backward pass is a sleep for each tensor, so that it takes no processor, as on a GPU. The table has the time from
its end to the end of the step.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

import numpy as np

import arrayopt as ao

SHAPES = {f"layer{i}.{name}": shape for i in range(8) for name, shape in {"w": (1024, 3072), "b": (3072,)}.items()}


def measure(comm, rank, rounds, seconds):
    """Steps with all gradients at once, and given one by one, in turns."""
    rng = np.random.default_rng(rank)
    grads = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    total = sum(g.size for g in grads.values())
    there = ao.Ranks(comm, grads="mean", check=None)
    opts = [
        ao.Optimizer({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}, ao.LAMB(), comm=there)
        for _ in range(2)
    ]
    times = {"at once": [], "one by one": []}
    for k in range(rounds + 2):
        for (label, found), opt in zip(times.items(), opts, strict=True):
            for name in reversed(SHAPES):
                time.sleep(seconds * grads[name].size / total)
                if label == "one by one":
                    opt.give(name, grads[name])
            began = time.perf_counter()
            opt.step() if label == "one by one" else opt.step(grads)
            if k >= 2:
                found.append(time.perf_counter() - began)
    if rank == 0:
        at_once, given = (statistics.median(x) for x in times.values())
        ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
        line = f"| {seconds:g} s | {1e3 * at_once:.0f} ms | {1e3 * given:.0f} ms | {ratio:.2f} |\n"
        sys.stdout.write(line)
        sys.stdout.flush()


def gloo(rank, ranks, folder, rounds, every):
    """One process of a group of gloo."""
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    for seconds in every:
        measure(dist.group.WORLD, rank, rounds, seconds)
    dist.destroy_process_group()


def main():
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mpi", action="store_true", help="over MPI; start it by mpiexec")
    parser.add_argument("--ranks", type=int, default=2, help="how many processes of gloo are started")
    parser.add_argument("--rounds", type=int, default=9, help="how many steps are timed")
    parser.add_argument("--backward", type=float, nargs="+", default=[0.1, 0.4, 1.6], help="seconds of a backward pass")
    given = parser.parse_args()
    os.environ.setdefault("ARRAYOPT_NUM_THREADS", "1")
    if given.mpi:
        from mpi4py import MPI

        for seconds in given.backward:
            measure(MPI.COMM_WORLD, MPI.COMM_WORLD.rank, given.rounds, seconds)
        return
    from torch import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        work = (given.ranks, folder, given.rounds, given.backward)
        multiprocessing.spawn(gloo, args=work, nprocs=given.ranks)


if __name__ == "__main__":
    main()
