"""The time of a checkpoint of ranks: rank 0 alone, each rank its part, and in the background.

python -m benchmarks.saving              # 1 GB on 4 ranks of MPI, in about a minute
python -m benchmarks.saving --page       # and puts the table on docs/benchmarks.md

"Rank 0 writes all" is how checkpoints were written before ranks wrote together; it is still so where ranks do not see
the file of rank 0. Of `wait=False`, the first time is that of the call, and the second until the file is on disk.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import arrayopt as ao
from arrayopt.saving import writing
from benchmarks.on_page import put

HEAD = """| checkpoint | ranks | rank 0 writes all | each rank writes | `wait=False`: the call | until it is on disk |
|---:|---:|---:|---:|---:|---:|
"""


def timed(comm, call):
    """How long the slowest rank takes."""
    comm.Barrier()
    began = time.perf_counter()
    call()
    return max(comm.allgather(time.perf_counter() - began))


def measure(size, rounds, folder):
    """One row of the table; all ranks call it."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    count = round(size * 2**30 / 12 / 16)  # parameters, m and v in float32, of 16 tensors
    params = {f"w{i}": np.full((count // 1024, 1024), 0.5, np.float32) for i in range(16)}
    opt = ao.Optimizer(params, ao.AdamW(), comm=ao.Ranks(comm, check=None), engine="numpy")
    opt.step(dict(params))
    path = Path(folder) / "run"
    joined = writing._joined
    times = {"one": [], "all": [], "call": [], "behind": []}
    for k in range(rounds + 1):
        found = {}
        writing._joined = lambda name: open(os.devnull)  # noqa: SIM115 - another file than that of rank 0
        found["one"] = timed(comm, lambda: opt.save(path))
        writing._joined = joined
        found["all"] = timed(comm, lambda: opt.save(path))
        later = []
        began = time.perf_counter()
        found["call"] = timed(comm, lambda later=later: later.append(opt.save(path, wait=False)))
        later[0].result()
        found["behind"] = max(comm.allgather(time.perf_counter() - began))
        for label, seconds in found.items() if k else ():
            times[label].append(seconds)
    if not comm.rank:
        stored = path.stat().st_size / 2**30
        cells = [f"{statistics.median(x):.2f} s" for x in times.values()]
        sys.stdout.write(f"| {stored:.2f} GiB | {comm.size} | {' | '.join(cells)} |\n")


def main():
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=float, default=1.0, help="GiB of the checkpoint")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], help="how many processes of MPI are started")
    parser.add_argument("--rounds", type=int, default=3, help="how many checkpoints are timed")
    parser.add_argument("--folder", help="where to write; a temporary folder where it is left out")
    parser.add_argument("--page", action="store_true", help="put the table on docs/benchmarks.md")
    parser.add_argument("--rank", action="store_true", help="one of the processes, as mpiexec starts them")
    given = parser.parse_args()
    if given.rank:
        measure(given.size, given.rounds, given.folder)
        return
    env = {**os.environ, "ARRAYOPT_NUM_THREADS": "1"}
    table = HEAD
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for ranks in given.ranks:
            command = [Path(sys.executable).parent / "mpiexec", "-n", ranks, sys.executable, "-m", "benchmarks.saving"]
            command += ["--rank", "--size", given.size, "--rounds", given.rounds, "--folder", folder]
            table += subprocess.run(
                list(map(str, command)), env=env, stdout=subprocess.PIPE, text=True, check=True
            ).stdout
    sys.stdout.write(table)
    if given.page:
        put("saving", table, "python -m benchmarks.saving")


if __name__ == "__main__":
    main()
