"""The table of what passes do, as their machine code says: ``python -m tests.support.sass_table`` writes it.

The model: a block works a ticket off in rounds. In each it asks for as many bytes as it waits for at once, and has
them after the latency of memory; then it adds up. Before the first round it reads tables, and the last one ends with a
fence, while this block asks for nothing. All blocks of the device together get no more than a copy does. The model
knows nothing of the L2 cache and of arithmetic.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import arrayopt as ao
from arrayopt.codecs import STORED
from arrayopt.engines.cuda.emit import emit
from arrayopt.engines.cuda.launches import LONGEST as MOST
from arrayopt.engines.cuda.stages import CHUNK, LONGEST
from arrayopt.fusion.lower_stages import in_stages
from arrayopt.fusion.plans import plan_for
from arrayopt.rules.gradients import GradientNorms
from tests.cudacpu import nvrtc
from tests.support import sass

__all__ = ["ARCH", "PAGE", "RULES", "compiler", "lines", "look", "seconds", "table"]

PAGE = Path(__file__).parents[2] / "docs" / "cuda.md"
BEGIN, END = "<!-- passes -->", "<!-- end of passes -->"
ARCH = "sm_90"

LATENCY, START, FOLD, FENCE, COPY = 700e-9, 800e-9, 200e-9, 500e-9, 0.92
"""Assumptions: seconds from asking for bytes until they are there while memory is busy; from the end of a ticket to
the first loads of the next one (three barriers, and two reads of tables, the second by the first, that the L2 cache
has); of a fold of the block; of a fence of the device. And what share of the maker's bandwidth a copy gets: 89 % of an
A800 and 92 % of a B200 are published."""

DEVICES = {"H200": (132, 4.8e12), "A100": (108, 2.0e12)}
"""Multiprocessors, and bytes per second, as the maker gives them."""

RULES = {
    "AdamW": (ao.AdamW(), 1),
    "AdamW, int8": (ao.AdamW(state_dtype="int8"), 1),
    "SGD": (ao.SGD(lr=0.1, momentum=0.9), 1),
    "LAMB": (ao.LAMB(), 1),
    "LAMB, int8": (ao.LAMB(state_dtype="int8"), 1),
    "LANS": (ao.LANS(), 1),
    "LARS": (ao.LARS(lr=0.1), 1),
    "judging": (GradientNorms(master_weights=False), 1),
    "CAME": (ao.CAME(lr=0.1), 2),
    "Adafactor": (ao.Adafactor(), 2),
    "AdamW, bfloat16": (ao.AdamW(), 1),
    "LAMB, bfloat16": (ao.LAMB(), 1),
    "LANS, bfloat16": (ao.LANS(), 1),
    "CAME, bfloat16": (ao.CAME(lr=0.1), 2),
}
"""Rules, with the rank of the tensors. `judging` measures gradients, for `clip_norm` and loss scales. In bfloat16 are
parameters and gradients; slots and masters are in float32."""


@dataclass(frozen=True)
class Row:
    """A pass: the arrays that it reads and writes, the bytes for each parameter, and what its code does.

    Attributes
    ----------
    blocks : int
        Blocks that a multiprocessor works on at once.
    read : int
        Of the bytes for each parameter those that it reads.
    elements, pieces : int
        Elements of a piece, and pieces of a ticket, where tensors are large and passes follow each other closely.
    sums, alone : bool
        Whether a piece ends with a fold; whether the rule has no other pass.
    """

    loads: tuple[str, ...]
    stores: tuple[str, ...]
    moved: int
    facts: sass.PassFacts
    blocks: int = 3
    read: int = 0
    elements: int = 4096
    pieces: int = 1
    sums: bool = True
    alone: bool = False
    narrow: int = 0
    """How many of the arrays that it reads have 16 bits: four elements are a word of 8 bytes."""


@cache
def look(name, arch=ARCH):
    """The compiled kernel of a rule, and its passes."""
    rule, rank = RULES[name]
    dtype = "bfloat16" if name.endswith("bfloat16") else "float32"
    plan = plan_for(rule, rank, dtype, lean=True, stats=isinstance(rule, GradientNorms))
    kernel = sass.kernel(emit(plan, dtype), arch)
    at = [j for j, stage in enumerate(in_stages(plan).stages) if stage.kind == "pass"]
    made, most = [], max(plan.bytes_of(p) for p in plan.passes)
    alone = len(plan.passes) == 1
    sums = any(p.reductions for p in plan.passes)
    elements = LONGEST if not sums and rank == 1 else CHUNK if rank == 1 else 64 * 128
    for j, p in zip(at, plan.passes, strict=True):
        narrow = sum(plan.storage.get(x, dtype) == "bfloat16" for x in p.loads)
        storage = {"g": plan.storage["p"], **plan.storage}
        read = sum(STORED[storage[x]].moved for x in p.loads)
        pieces = min(MOST, int(most / plan.bytes_of(p) * (MOST if alone else 1)))
        moved, facts = plan.bytes_of(p), sass.facts(kernel, j)
        row = tuple(p.loads), tuple(p.stores), moved, facts, kernel.resident, read, elements, pieces
        made.append(Row(*row, bool(p.reductions), alone, narrow))
    return kernel, made


def seconds(x, device):
    """The time that a device takes for one parameter of a pass."""
    multiprocessors, bandwidth = DEVICES[device]
    ahead = x.facts.ahead * x.blocks
    rounds = -(-x.read * x.elements * x.blocks // (ahead or x.facts.in_flight))
    piece = max(rounds * LATENCY, FOLD) if ahead else rounds * LATENCY + FOLD * x.sums
    ticket = START + x.pieces * piece + FENCE * (not x.alone)
    return max(ticket / (x.pieces * x.elements * x.blocks * multiprocessors), x.moved / (COPY * bandwidth))


def bound(passes, device):
    """How much of a copy's speed a rule can have, by the model: each pass takes its bytes' time."""
    least = sum(x.moved for x in passes) / (COPY * DEVICES[device][1])
    return least / sum(seconds(x, device) for x in passes)


def lines(name):
    """The rows of the table for a rule."""
    kernel, passes = look(name)
    said = []
    for k, x in enumerate(passes):
        first = (
            f"{name} | {kernel.usage.registers} | {kernel.resident} | {kernel.usage.spill_stores}"
            if k == 0
            else "| | |"
        )
        shares = " | ".join(f"{100 * bound(passes, device):.0f} %" for device in DEVICES) if k == 0 else "|"
        arrays = f"{', '.join(x.loads)} → {', '.join(x.stores) or '–'}"
        said.append(f"| {first} | {arrays} | {x.facts.in_flight >> 10} | {shares} |")
    return said


def compiler():
    """Which compiler the page says that the table is of."""
    return f"Compiled by NVRTC {'.'.join(map(str, nvrtc.version()))}."


def table():
    """The whole table, and what it was compiled by."""
    head = ["rule", "registers", "blocks", "bytes spilled", "pass", "KB in flight", *(f"model: {x}" for x in DEVICES)]
    rows = [f"| {' | '.join(head)} |", "|---|" + "---:|" * 3 + "---|" + "---:|" * (1 + len(DEVICES))]
    return [compiler(), "", *rows, *(line for name in RULES for line in lines(name))]


def main():
    """Write the table to its place."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text("\n\n".join([before + BEGIN, "\n".join(table()), END + after]), "utf-8")


if __name__ == "__main__":
    main()
