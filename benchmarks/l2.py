"""What the L2 cache holds from pass to pass, simulated: the queue of the `cupy` engine over a model of some devices.

``python benchmarks/l2.py`` prints a table, in some ten minutes. Nothing is measured.

The model. So many blocks as the engine launches take tickets in order. A ticket begins with a pause, of a length by
chance, then moves its bytes, 16 KiB of each array that it reads or writes. All blocks that move bytes share the
memory's bandwidth, up to what one block can have in flight; a byte that is in the cache costs a third. A block whose
ticket must wait for others moves nothing. The cache is associative over all of it, and what is written stays in it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # in place of this folder

import arrayopt as ao
from arrayopt.engines.cuda.pieces import CHUNK, pieces, tiles
from arrayopt.engines.cuda.queue import tickets
from arrayopt.fusion.layout import geometry
from arrayopt.fusion.lower_stages import in_stages
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.plans import plan_for
from benchmarks.problems import LARGE, PROBLEMS, Problem, Shape

__all__ = ["DEVICES", "LRU", "RANDOM", "Device", "Step", "simulate", "step"]

LRU, RANDOM = 0, 1
"""What a cache throws out: what was used longest ago, or anything."""

PAUSE, AT_ONCE, NEAR = 2e-6, 20e9, 1 / 3
"""Seconds before a ticket's first byte; bytes a second of one block; what a byte in the cache costs."""


@dataclass(frozen=True)
class Device:
    """A device.

    Attributes
    ----------
    name : str
        What it is called.
    blocks : int
        How many blocks work at once, three on each multiprocessor.
    cache : int
        Bytes of the L2 cache.
    bandwidth : float
        Bytes a second of its memory.
    """

    name: str
    blocks: int
    cache: int
    bandwidth: float


DEVICES = (
    Device("A100", 3 * 108, 40 << 20, 2.0e12),
    Device("H100", 3 * 132, 50 << 20, 3.35e12),
    Device("H200", 3 * 132, 50 << 20, 4.8e12),
    Device("RTX 4090", 3 * 128, 72 << 20, 1.0e12),
)


MODELS = (PROBLEMS["bert-base"], LARGE[0], PROBLEMS["resnet-50"], LARGE[1])
LONG = ("a launch for each pass", "lag of half")
"""Orders that are simulated of models with a billion parameters, too."""


class Step(NamedTuple):
    """What a step does.

    Attributes
    ----------
    hits : float
        The share of what passes after the first read that is in the cache.
    bytes : float
        What goes to and from memory, for each parameter.
    seconds : float
        How long it takes.
    """

    hits: float
    bytes: float
    seconds: float


def step(plan: Plan, shapes: tuple[Shape, ...], lag: int | None, device: Device, policy: int) -> Step:
    """Simulate a step of a plan over tensors, each seen as one row of elements, in float32.

    Parameters
    ----------
    plan : Plan
        The plan.
    shapes : tuple of tuple of int
        The tensors.
    lag : int or None
        See `arrayopt.engines.cuda.queue.tickets`.
    device : Device
        Where.
    policy : {LRU, RANDOM}
        What its cache throws out.
    """
    geo = geometry(list(shapes), plan.element)
    tiles(geo, plan.element)
    made = in_stages(plan).stages
    queue, ends = tickets(made, pieces(made, geo), np.arange(len(shapes)), lag)
    sizes = geo["SIZE"]
    units = -(-sizes // CHUNK)
    first, total = np.cumsum(units) - units, int(units.sum())
    lengths = np.full(total, 4 * CHUNK)
    lengths[first + units - 1] = 4 * (sizes - CHUNK * (units - 1))
    names = list(dict.fromkeys(name for p in plan.passes for name in (*p.loads, *p.stores)))
    touched = np.full((len(made), len(names), 2), -1)  # of each stage: which arrays it reads, and writes
    passes = [j for j, stage in enumerate(made) if stage.kind != "between"]
    for j, p in zip(passes, plan.passes, strict=True):
        for way, some in enumerate((p.loads, p.stores)):
            touched[j, : len(some), way] = [names.index(name) for name in some]
    later = np.array([j in passes[1:] for j in range(len(made))])
    columns = [np.ascontiguousarray(queue[name]).astype(np.int64) for name in ("tensor", "stage", "stop", "wait")]
    place = first[columns[0]] + queue["piece"]
    last = np.zeros(len(queue), np.int64)
    for i, j in pairwise([0, *ends]):
        last[i:j] = j
    seconds, read, again, hit, written = simulate(
        (*columns, place, last), touched, later, np.tile(lengths, len(names)), total, len(shapes),
        (device.blocks, device.cache, device.bandwidth, PAUSE, AT_ONCE, NEAR), policy,
    )  # fmt: skip
    return Step(hit / max(again, 1), (read + written) / int(sizes.sum()), seconds)


@numba.njit
def touch(ring: Any, held: Any, counts: Any, x: int, length: Any, room: int, policy: int) -> bool:
    """Use something; whether it was in the cache.

    Parameters
    ----------
    ring : array of int64, (2, n + 1)
        Of each of n things the one used before it and the one used after it; n is where the ring begins and ends.
    held, counts : array of int64
        What is in the cache, with the place of each, or -1, behind it; how many things and bytes these are.
    x : int
        What is used.
    length : array of int64
        The bytes of each thing.
    room : int
        Bytes of the cache.
    policy : {LRU, RANDOM}
        What is thrown out.
    """
    n = len(length)
    place = held[n:]
    found = place[x] >= 0
    if found:
        ring[0, ring[1, x]], ring[1, ring[0, x]] = ring[0, x], ring[1, x]
    else:
        while counts[1] + length[x] > room and counts[0] > 0:
            out = held[np.random.randint(counts[0])] if policy == RANDOM else ring[1, n]
            ring[0, ring[1, out]], ring[1, ring[0, out]] = ring[0, out], ring[1, out]
            counts[0] -= 1
            held[place[out]] = held[counts[0]]
            place[held[counts[0]]] = place[out]
            place[out] = -1
            counts[1] -= length[out]
        place[x], held[counts[0]] = counts[0], x
        counts[0] += 1
        counts[1] += length[x]
    before = ring[0, n]
    ring[1, before], ring[0, x], ring[1, x], ring[0, n] = x, before, n, x
    return found


IDLE, WAITING, PAUSING, MOVING = 0, 1, 2, 3


@numba.njit
def simulate(
    queue: Any, touched: Any, later: Any, length: Any, total: int, tensors: int, device: Any, policy: int
) -> tuple[float, int, int, int, int]:
    """Seconds of a step; bytes read from memory, read by later passes, and of these from the cache; bytes written.

    Parameters
    ----------
    queue : tuple of array
        Of each ticket the tensor, the first stage and the one after the last, how many it waits for, its place in each
        array, and where its launch ends.
    touched : array of int, (stages, arrays, 2)
        The arrays that each stage reads, and writes; -1 for no more.
    later : array of bool
        Which stages are passes after the first.
    length : array of int64
        Bytes of each place of each array.
    total, tensors : int
        Places of an array; tensors.
    device : tuple
        Blocks, bytes of the cache, bandwidth, pause, bandwidth of a block, what a byte from the cache costs.
    policy : {LRU, RANDOM}
        What the cache throws out.
    """
    tensor, stage, stop, wait, place, last = queue
    blocks, room, bandwidth, pause, at_once, near = device
    n = len(length)
    np.random.seed(1)
    ring = np.full((2, n + 1), n)
    held, counts = np.full(2 * n, -1), np.zeros(2, np.int64)
    done = np.zeros(tensors, np.int64)
    phase, ticket, rest = np.zeros(blocks, np.int64), np.zeros(blocks, np.int64), np.zeros(blocks)
    now, taken, busy = 0.0, 0, 0
    read = again = hit = written = 0
    while True:
        for w in range(blocks):
            if phase[w] == IDLE and taken < len(tensor) and (busy == 0 or last[taken] == last[taken - 1]):
                ticket[w], phase[w] = taken, WAITING
                taken += 1
                busy += 1
            if phase[w] == WAITING and done[tensor[ticket[w]]] >= wait[ticket[w]]:
                phase[w], rest[w] = PAUSING, 2.0 * pause * np.random.random()
        if busy == 0:
            return now, read, again, hit, written
        moving = 0
        for w in range(blocks):
            moving += phase[w] == MOVING
        rate = min(at_once, bandwidth / max(moving, 1))
        dt = 1e9
        for w in range(blocks):
            if phase[w] == PAUSING:
                dt = min(dt, rest[w])
            elif phase[w] == MOVING:
                dt = min(dt, rest[w] / rate)
        dt += 1e-8  # those that end at almost the same time end together
        now += dt
        for w in range(blocks):
            if phase[w] == PAUSING:
                rest[w] -= dt
                if rest[w] <= 0.0:
                    phase[w], rest[w] = MOVING, 0.0
                    t = ticket[w]
                    for j in range(stage[t], stop[t]):
                        for way in range(2):
                            for a in touched[j, :, way]:
                                if a < 0:
                                    break
                                x = a * total + place[t]
                                found = touch(ring, held, counts, x, length, room, policy)
                                near_by = found and way == 0
                                rest[w] += length[x] * (near if near_by else 1.0)
                                if way == 1:
                                    written += length[x]
                                elif not found:
                                    read += length[x]
                                if way == 0 and later[j]:
                                    again += length[x]
                                    hit += length[x] if found else 0
            elif phase[w] == MOVING:
                rest[w] -= dt * rate
                if rest[w] <= 0.0:
                    phase[w] = IDLE
                    busy -= 1
                    done[tensor[ticket[w]]] += 1


def orders(device: Device) -> dict[str, int | None]:
    """The orders that are compared: `tickets`' lag by what it is called."""
    return {"a launch for each pass": None, "lag 0": 0, "lag of half": device.blocks // 2, "lag of all": device.blocks}


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(models: Sequence[Problem] = MODELS, devices: Sequence[Device] = DEVICES) -> None:
    """Print the table, line by line: hits, bytes per parameter and time, each for LRU / RANDOM."""
    plan = plan_for(ao.LAMB(), 1, "float32", lean=True)
    names = list(orders(devices[0]))
    _say(f"| model | device | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for problem in models:
        for device in devices:
            cells = [problem.title, device.name]
            for name, lag in orders(device).items():
                if problem.elements > 1e9 and name not in LONG:
                    cells.append("")
                    continue
                found = [step(plan, problem.shapes, lag, device, policy) for policy in (LRU, RANDOM)]
                hits, moved = (
                    " / ".join(x) for x in zip(*((f"{100 * x.hits:.0f}", f"{x.bytes:.1f}") for x in found), strict=True)
                )
                times = " / ".join(f"{1e3 * x.seconds:.3g}" for x in found)
                cells.append(f"{hits} %, {moved} B, {times} ms")
            _say(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
