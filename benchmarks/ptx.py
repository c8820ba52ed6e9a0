"""The engine's kernels beside others, in the timing model of GPGPU-Sim: cycles, and the bytes of memory.

``GPGPUSIM=<a checkout> python benchmarks/ptx.py`` prints a table; see ``tests/ptx``. It takes an hour
of a core; ``--only LAMB "LAMB, apex"`` makes some rows, ``--elements`` and ``--tensors`` change the sizes. Nothing runs
on a GPU: what is simulated is PTX for compute capability 7.5, on a sixteenth of a QV100 with its share of the L2 cache,
and with that of an H100 for as many multiprocessors.

Each row has a process of its own. The first step finds empty caches, the second what the first has left.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # in place of this folder

HERE = Path(__file__).parent
CACHES = {"QV100": 384, "H100": 1900}
"""KiB of L2 cache of a sixteenth of a QV100: its own share, and an H100's."""

RIVALS = ["copy", "AdamW, PyTorch's form", "LAMB, apex's form"]
OWN = ["AdamW", "LAMB", "LANS", "CAME"]
LEAST = {"copy": 8, "AdamW": 28, "LAMB": 28, "LANS": 28, "CAME": 28}
"""Bytes per element that no cache can save: each array is read once, and what changes is written once."""


def machine(cache: str) -> Any:
    """The simulator of this process."""
    from tests.ptx.simulator import Machine, loaded

    found = loaded(Machine(cores=5, channels=2, cache=CACHES[cache]))
    found.timing = True
    return found


def arrays(elements: int, tensors: int, seed: int) -> dict[str, Any]:
    """Values of some tensors by name."""
    r = np.random.default_rng(seed)
    return {f"w{i}": r.standard_normal(elements).astype("f4") for i in range(tensors)}


def own(simulator: Any, rule: str, elements: int, tensors: int) -> list[list[Any]]:
    """What two steps of a rule of ours launch; its numbers are checked."""
    import arrayopt as ao
    from tests.cudacpu import standin
    from tests.ptx.through import through

    with standin.installed() as cupy, standin.checking(check=False), through(simulator):
        side = 256 if rule == "CAME" else elements  # which has rows and columns
        params = {name: x.reshape(-1, side) for name, x in arrays(elements, tensors, 0).items()}
        there = {name: cupy.asarray(x) for name, x in params.items()}
        made = getattr(ao, rule)(lr=1e-2)
        opts = [ao.Optimizer(p, made, engine=e) for p, e in ((params, "numpy"), (there, "cupy"))]
        steps = []
        for k in (1, 2):
            grads = {name: x.reshape(-1, side) for name, x in arrays(elements, tensors, k).items()}
            given = {name: cupy.asarray(x) for name, x in grads.items()}
            cupy.cuda.Device().synchronize()
            opts[0].step(grads)
            simulator.log.clear()
            opts[1].step(given)
            cupy.cuda.Device().synchronize()
            steps.append(list(simulator.log))
        far = max(float(np.abs(x - there[name].get()).max()) for name, x in params.items())
    if far > 1e-5:
        raise ValueError(f"{rule}: parameters are wrong by {far}")
    return steps


def rival(simulator: Any, what: str, elements: int, tensors: int) -> list[list[Any]]:
    """What two steps of another kernel launch; its first numbers are checked."""
    module = simulator.load((HERE / "rivals.cu").read_text(), ("-fmad=true",))  # as they are compiled
    f = np.float32
    lr, decay, beta1, beta2, eps = 1e-2, 1e-2, 0.9, 0.999, 1e-6
    named = zip(arrays(elements, tensors, 0).values(), arrays(elements, tensors, 1).values(), strict=True)
    rows = [[simulator.array(x) for x in (p, g, 0 * p, 0 * p)] for p, g in named]
    before = [x.astype("f8") for x in rows[0][:2]]
    per = -(-elements // 4096)
    grid = tensors * per
    table = simulator.array(np.array([[*(x.ctypes.data for x in row), elements] for row in rows], np.int64))
    chunks = simulator.array(np.array([(i, j) for i in range(tensors) for j in range(per)], np.int32))
    partial, ratio = simulator.array(np.zeros(2 * grid, "f4")), simulator.array(np.zeros(tensors, "f4"))
    firsts = simulator.array(np.arange(tensors + 1, dtype=np.int32) * per)
    betas = f(beta1), f(beta2), f(eps)
    correction1, correction2 = 1 - beta1, 1 - beta2

    def go(name: str, blocks: int, threads: int, *args: Any) -> None:
        packed = [np.uint64(x.ctypes.data).tobytes() if x.ndim else x.tobytes() for x in args]
        simulator.launch(module, name, blocks, threads, packed)

    steps = []
    whole = [simulator.array(np.concatenate([row[1] for row in rows])), simulator.array(np.zeros(grid * 4096, "f4"))]
    for _ in range(2):
        simulator.log.clear()
        if what == "copy":
            go("copying", grid, 256, *whole, np.int32(whole[0].size // 4))
        elif what.startswith("AdamW"):
            scalars = f(lr), f(decay), *betas, f(correction1), f(np.sqrt(correction2))
            go("fused_adamw", grid, 512, table, chunks, *scalars)
        else:
            go("lamb_first", grid, 512, table, chunks, partial, f(decay), *betas, f(correction1), f(correction2))
            go("lamb_ratio", tensors, 512, firsts, partial, ratio)
            go("lamb_second", grid, 512, table, chunks, ratio, f(lr))
        if not steps and what != "copy":
            p, g = before
            u = g / (np.abs(g) + eps)
            if what.startswith("LAMB"):
                u = u + decay * p
                u *= np.linalg.norm(p) / np.linalg.norm(u)
            else:
                u = u + decay * p
            if np.abs(rows[0][0] - (p - lr * u)).max() > 1e-5:
                raise ValueError(f"{what}: parameters are wrong")
        steps.append(list(simulator.log))
    return steps


def measured(what: str, cache: str, elements: int, tensors: int) -> dict[str, Any]:
    """A row: cycles and bytes per element of the first step and the second."""
    simulator = machine(cache)
    steps = (own if what in OWN else rival)(simulator, what, elements, tensors)
    count = elements * tensors
    row: dict[str, Any] = {"what": what, "cache": cache, "elements": elements, "tensors": tensors}
    for name, launches in zip(("cold", "warm"), steps, strict=True):
        row[name] = {
            "cycles": sum(x.cycles for x in launches if x.name != "prepare"),
            "prepare": sum(x.cycles for x in launches if x.name == "prepare"),
            "read": sum(x.read for x in launches) / count,
            "written": sum(x.written for x in launches) / count,
        }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table; speeds are shares of the copy's, by the bytes that no cache can save."""
    lines = [
        "| kernels | L2 cache | step | cycles per 1,000 elements | bytes read, written per element | share of a copy |",
        "|---|---|---|---:|---:|---:|",
    ]
    copies = {row["cache"]: row for row in rows if row["what"] == "copy"}
    for row in rows:
        count = row["elements"] * row["tensors"]
        for step in ("cold", "warm"):
            seen = row[step]
            share = ""
            if row["cache"] in copies:
                copy = copies[row["cache"]]
                least = LEAST[row["what"].partition(",")[0]] / LEAST["copy"]
                mine, theirs = (x[step]["cycles"] / x["elements"] / x["tensors"] for x in (row, copy))
                share = f"{least * theirs / mine:.0%}"
            lines.append(
                f"| {row['what']} | {row['cache']} | {step} | {1000 * seen['cycles'] / count:.0f} |"
                f" {seen['read']:.1f}, {seen['written']:.1f} | {share} |"
            )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Make the rows, each in a process of its own, and print them as they come."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[*RIVALS, *OWN], choices=[*RIVALS, *OWN])
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=list(CACHES))
    parser.add_argument("--elements", type=int, default=32768, help="of each tensor")
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    from tests.ptx.needs import missing

    if why := missing():
        parser.error(why)
    if given.row:
        sys.stdout.write("ROW " + json.dumps(measured(*given.row, given.elements, given.tensors)) + "\n")
        return
    rows = []
    for cache in given.caches:
        for what in given.only:
            command = [sys.executable, str(Path(__file__)), "--row", what, cache]
            command += ["--elements", str(given.elements), "--tensors", str(given.tensors)]
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            rows.append(json.loads(next(line for line in said.splitlines() if line.startswith("ROW "))[4:]))
            sys.stderr.write(json.dumps(rows[-1]) + "\n")
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
