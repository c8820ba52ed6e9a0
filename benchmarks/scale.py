"""Steps of many ranks, computed by a model of a network: how much of the messages the computation hides.

python -m benchmarks.scale
python -m benchmarks.scale --python    # measured: the processor's time of a step of one of 256 ranks

But for `--python`, nothing is measured. The messages are the real ones: tensors are cut, and buckets filled, by the
code that runs them. Times follow from the numbers of `Machine`. Other systems are in the same model, each as its
documentation describes it:
ZeRO-1 (all-reduce during the backward pass, then parameters are gathered), ZeRO-2 (reduce-scatter in place of
all-reduce), and FSDP2 (each layer is gathered before its forward and its backward pass, one layer ahead).

A rank posts its messages one after the other, and its link carries their bytes one after the other. A message is there
one latency after its last byte. So of messages that are posted together, by any of these systems, the latencies pass
side by side. Where one message must wait for another one to arrive, its latency comes on top.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np

import arrayopt as ao
from arrayopt.params.groups import Group
from arrayopt.ranks import Ranks, gather, threads
from arrayopt.ranks.comm import Comm
from arrayopt.ranks.layout import layout
from arrayopt.ranks.partition import divide
from arrayopt.state.tensors import Tensor
from benchmarks.ranks import count, models

RULE = ao.LAMB()
RANKS = (8, 64, 256, 1024)
ITEM = 4
"""Bytes of a gradient and of a parameter."""


@dataclass(frozen=True)
class Machine:
    """What the model knows of a rank.

    Attributes
    ----------
    latency, post : float
        Seconds until a message arrives, and that it takes to post one.
    link : float
        Bytes per second, in each direction at once.
    memory : float
        Bytes per second that an update moves.
    compute : float
        Floating-point operations per second of a forward and backward pass.
    """

    latency: float = 10e-6
    post: float = 1e-6
    link: float = 50e9
    memory: float = 2.7e12
    compute: float = 400e12


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step: how many tokens, and the share of the parameters that each token uses."""

    tokens: int
    active: float = 1.0


WORK = {"BERT-large": Work(8192), "Llama 7 B": Work(8192), "MoE 16 B": Work(8192, 2.8 / 16.4)}


class Messages:
    """The messages of one model among a number of ranks.

    Attributes
    ----------
    sizes : array
        The number of elements of each tensor.
    reductions : list of (array, int, int, int)
        For each bucket of gradients which tensors it has parts of, its bytes, the most bytes of sums that one rank
        gets once it is added up, and the most messages of sums that it gets.
    gathers : list of (list, int, int)
        For each bucket the tensors that it completes, the number of ranks that send, and its bytes.
    sums : int
        The bytes of partial sums.
    fullest : int
        The number of elements of the fullest rank.
    """

    def __init__(self, shapes, ranks):
        self.ranks, self.shapes = ranks, shapes
        self.sizes = np.array([math.prod(shape) for shape in shapes])
        tensors = [Tensor(str(i), np.broadcast_to(np.float32(0), shape), place=i) for i, shape in enumerate(shapes)]
        divide([Group("all", RULE, {}, tensors)], "cpp", 0, ranks)
        backward = range(len(tensors))[::-1]
        comm = SimpleNamespace(size=ranks, rank=0, on_device=False)
        self.reductions = []
        received, messages = Counter(), Counter()  # by each rank, of sums that are sent together
        for bucket in layout(comm, tensors, ["float32"] * len(tensors), backward).buckets:
            places = np.array(sorted({piece.index for piece in bucket.pieces}))
            tops, at, sums = np.cumsum([0, *bucket.parts]), 0, Counter()
            for piece in bucket.pieces:
                sums[piece.rank] += piece.end - piece.first
            for owner in sorted(sums):  # the sums of a rank lie together, and each part of them has one adder
                first, last = np.searchsorted(tops, [at, at + sums[owner] - 1], "right")
                messages[owner] += int(last - first)
                received[owner] += sums[owner] * ITEM
                at += sums[owner]
            most = 0, 0
            if bucket.sends:
                most = max(received.values(), default=0), max(messages.values(), default=0)
                received, messages = Counter(), Counter()
            self.reductions.append((places, bucket.size * ITEM, *most))
        self.gathers = []
        with_memory, gather.GatherBuffer = gather.GatherBuffer, _Sized
        try:
            later = gather.Gather(comm, tensors, packed=False, processes=[])
        finally:
            gather.GatherBuffer = with_memory
        places = [[] for _ in later.broadcasts]
        for place, number in later.last.items():
            places[number].append(place)
        for own, pieces in zip(places, later.broadcasts, strict=True):
            self.gathers.append((own, len({rank for rank, _ in pieces}), sum(piece.size for _, piece in pieces)))
        fullest, _, self.rounds, self.sums, _, _ = count(shapes, RULE, ranks)
        self.fullest = fullest * self.sizes.sum() / ranks


class _Sized(gather.GatherBuffer):
    """A parameter's size in bytes."""

    def __init__(self, tensor, *, on_device):
        self.tensor, self.item, self.copy = tensor, ITEM, None
        self.bytes = np.broadcast_to(np.uint8(0), tensor.array.size * ITEM)


class Step:
    """Seconds of a step of one model, by the ways in which its messages travel."""

    def __init__(self, machine, messages, work):
        self.machine, self.messages = machine, messages
        sizes, ranks = messages.sizes, messages.ranks
        self.hops = math.ceil(math.log2(ranks)) * machine.latency
        self.others = (ranks - 1) / ranks
        forward = 2 * sizes * work.active * work.tokens / machine.compute  # of each tensor
        self.forward, self.backward = forward, 2 * forward
        self.alone = float(3 * forward.sum())
        # when each gradient is there, counted from the beginning of the backward pass
        self.arrival = np.cumsum(self.backward[::-1])[::-1]
        self.update = messages.fullest * 28 / machine.memory

    def on_link(self, size, messages=0):
        """Seconds that a rank's link is busy with its part of a collective call of this many bytes."""
        return size * self.others / self.machine.link + messages * self.machine.post

    def met(self):
        """Seconds of a step's vote and of its exchange of partial sums."""
        return self.hops + (self.hops + self.on_link(self.messages.sums) if self.messages.sums else 0.0)

    def ours(self, *, overlapped, ordered):
        """Seconds that a step takes beyond its forward and backward passes."""
        end, latency = self.backward.sum(), self.machine.latency
        # in the order of ranks, each rank sends its part to each other one; else a tree adds
        others, arrives = (self.messages.ranks - 1, latency) if ordered else (0, self.hops)
        link, arrived, sums = 0.0, 0.0, 0.0
        for places, size, most, messages in self.messages.reductions:
            ready = self.arrival[places].max() if overlapped else end
            link = max(link, ready, arrived) + self.on_link(size, others)  # one bucket is on its way at a time
            arrived = link + arrives
            link += sums  # of the buckets before
            sums = messages * self.machine.post + most / self.machine.link
        link = max(link, arrived) + sums
        link = max(link + latency, end) + self.met() + self.update
        computed = link
        for places, pieces, size in self.messages.gathers:  # all are posted together
            link += self.on_link(size, pieces)
            if overlapped:  # the forward pass waits for what it needs
                computed = max(computed, link + self.hops) + self.forward[places].sum()
        end_of_all = computed if overlapped else link + self.hops + self.forward.sum()
        return end_of_all - self.alone

    def zero(self, *, stage):
        """The same of ZeRO-1 or ZeRO-2, with buckets of 25 MB."""
        link, filled, ways = 0.0, 0, 2 if stage == 1 else 1
        for size, ready in zip(self.messages.sizes[::-1] * ITEM, self.arrival[::-1], strict=True):
            filled += size
            if filled >= 25e6:
                link, filled = max(link, ready) + ways * self.on_link(filled), 0
        link = max(link, self.backward.sum()) + ways * (self.on_link(filled) + self.hops)
        link += self.messages.sizes.sum() / self.messages.ranks * 28 / self.machine.memory
        gathered = self.on_link(self.messages.sizes.sum() * ITEM) + self.hops
        return link + gathered + self.forward.sum() - self.alone

    def fsdp2(self, layers):
        """The same of FSDP2; `layers` are lists of tensors that are gathered together."""
        bytes_of = [self.messages.sizes[layer].sum() * ITEM for layer in layers]
        link = computed = 0.0
        for layer, size in zip(layers, bytes_of, strict=True):
            link += self.on_link(size)
            computed = max(computed, link + self.hops) + self.forward[layer].sum()
        link = max(link, computed - self.forward[layers[-1]].sum())
        sent = 0.0
        for layer, size in zip(layers[::-1], bytes_of[::-1], strict=True):
            link += self.on_link(size)
            computed = max(computed, link + self.hops) + self.backward[layer].sum()
            if sent:
                link += self.on_link(sent)  # the gradients of the layer before, while this one computes
            sent = size
        link = max(link, computed) + self.on_link(sent) + self.hops
        return link + self.update - self.alone


def layers_of(shapes, blocks):
    """Tensors in so many equal blocks, after the first and before the last two of the model."""
    inner = np.array_split(np.arange(1, len(shapes) - 2), blocks)
    return [np.array([0]), *inner, np.arange(len(shapes) - 2, len(shapes))]


BLOCKS = {"BERT-large": 24, "Llama 7 B": 32, "MoE 16 B": 28}


def seconds(name, ranks, machine=None):
    """What each way adds to the passes of a model, and how long these take alone."""
    shapes = models()[name]
    step = Step(machine or Machine(), Messages(shapes, ranks), WORK[name])
    return step.alone, {
        "at once": step.ours(overlapped=False, ordered=True),
        "overlapped": step.ours(overlapped=True, ordered=True),
        "overlapped, fast": step.ours(overlapped=True, ordered=False),
        "ZeRO-1": step.zero(stage=1),
        "ZeRO-2": step.zero(stage=2),
        "FSDP2": step.fsdp2(layers_of(shapes, BLOCKS[name])),
    }


class Silent(Comm):
    """Rank 0 of many, whose messages arrive at once and hold what it has said itself."""

    renews, processes, number = True, False, 1

    def __init__(self, size):
        self.rank, self.size, self.timeout = 0, size, 60.0

    def allgather(self, sent, counts):
        return lambda: [sent if len(sent) == n else np.zeros(n, np.uint8) for n in counts]

    def start_broadcast(self, pieces):
        return lambda: None

    start_rows = start_broadcast

    def start_alltoall(self, sent, counts, room, received):
        room[:] = 0
        return lambda: None

    def tell(self, said):
        return [said] * self.size


def _silent(shape, tensors, ranks, **options):
    """An optimizer of rank 0 of many over equal tensors, whose messages cost nothing."""
    params = {f"layers.{i // 194}.experts.{i % 194}": np.zeros(shape, np.float32) for i in range(tensors)}
    opening, Ranks.open = Ranks.open, lambda self: Silent(ranks)
    try:
        return ao.Optimizer(params, ao.AdamW(), comm=Ranks(threads(1)[0], check=None, **options))
    finally:
        Ranks.open = opening


def _milliseconds(call, times):
    """The median of the processor's time of a call."""
    found = []
    for _ in range(times + 3):
        began = time.process_time()
        call()
        found.append(1e3 * (time.process_time() - began))
    return statistics.median(found[3:])


def python_part(tensors=5433, ranks=256, steps=20):
    """Milliseconds of the processor: a step of one rank; of a process that has that rank's tensors alone; and, for
    small tensors, of a step whose gradients are added up: all at once, and given one by one.

    The library's own time for messages is not in it. Parameters are 256 x 256, and most of their memory is not touched.
    The small ones are 8 x 8: each gradient is copied.
    """
    os.environ["ARRAYOPT_NUM_THREADS"] = "1"
    shape = (256, 256)
    many = _silent(shape, tensors, ranks)
    mine = [x.name for x in many._parameters.all if x.kind != "none"]
    one = ao.Optimizer({name: np.zeros(shape, np.float32) for name in mine}, ao.AdamW())
    found = []
    for opt in (many, one):
        grads = dict.fromkeys(opt.params, np.zeros(shape, np.float32))
        found.append(_milliseconds(partial(opt.step, grads), steps))
    small = _silent((8, 8), tensors, ranks, grads="mean")
    grads = dict.fromkeys(small.params, np.zeros((8, 8), np.float32))

    def give():
        for name, grad in grads.items():
            small.give(name, grad)
        small.step()

    return *found, _milliseconds(partial(small.step, grads), steps), _milliseconds(give, steps)


def main():
    """A table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--python", action="store_true", help="measure the processor's time of a step of one rank")
    given = parser.parse_args()
    if given.python:
        many, one, summed, given = python_part()
        sys.stdout.write(
            f"a step of one of 256 ranks over 5,433 tensors: {many:.1f} ms, with its tensors alone {one:.1f};"
            f" with sums of small gradients {summed:.1f}, given one by one {given:.1f}\n"
        )
        return
    head = None
    for name in given.models:
        for ranks in given.ranks:
            alone, found = seconds(name, ranks)
            if head is None:
                head = ["model", "ranks", "passes", *found]
                sys.stdout.write(f"| {' | '.join(head)} |\n|---|{'---:|' * (len(head) - 1)}\n")
            cells = [name, f"{ranks:,}", *(f"{1e3 * x:,.0f}" for x in (alone, *found.values()))]
            sys.stdout.write(f"| {' | '.join(cells)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
