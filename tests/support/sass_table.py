"""The table of passes in docs/cuda.md, from machine code: ``python -m tests.support.sass_table`` writes it."""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import arrayopt as ao
from arrayopt.codecs import STORED
from arrayopt.engines.cuda.emit import emit
from arrayopt.fusion.lower_stages import in_stages
from arrayopt.fusion.plans import plan_for
from arrayopt.rules.gradients import GradientNorms
from tests.cudacpu import nvrtc
from tests.support import sass

__all__ = ["ARCH", "MORE", "PAGE", "RULES", "compiler", "lines", "look", "table"]

PAGE = Path(__file__).parents[2] / "docs" / "cuda.md"
BEGIN, END = "<!-- passes -->", "<!-- end of passes -->"
ARCH = "sm_90"

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
    "LAMB, int8, split, bfloat16": (ao.LAMB(state_dtype="int8", master_weights="split"), 1),
    "LANS, int8, split, bfloat16": (ao.LANS(state_dtype="int8", master_weights="split"), 1),
}
"""Rules, with the rank of the tensors. `judging` measures gradients, for `clip_norm` and loss scales. In bfloat16 are
parameters and gradients; slots and masters are in float32, where nothing else is said."""

INT8 = {"state_dtype": "int8"}
FORMS = {
    "bfloat16": {},
    "stochastic, bfloat16": {"rounding": "stochastic"},
    "int8, split, bfloat16": INT8 | {"master_weights": "split"},
    "int8, stochastic, bfloat16": INT8 | {"rounding": "stochastic"},
}
KINDS = {"AdamW": (ao.AdamW, 1), "LAMB": (ao.LAMB, 1), "LANS": (ao.LANS, 1), "Adan": (ao.Adan, 1)}
KINDS["CAME"] = partial(ao.CAME, lr=0.1), 2

MORE = {"Adan": (ao.Adan(), 1), "CAME, int8": (ao.CAME(lr=0.1, **INT8), 2)}
for _name, (_kind, _rank) in KINDS.items():
    MORE |= {f"{_name}, {form}": (_kind(**fields), _rank) for form, fields in FORMS.items()}
MORE = {name: how for name, how in MORE.items() if name not in RULES}
"""Forms of rules that only the page on memory mentions; they are not in the table."""


@dataclass(frozen=True)
class Row:
    """A pass: the arrays that it reads and writes, and the facts about its code."""

    loads: tuple[str, ...]
    stores: tuple[str, ...]
    facts: sass.PassFacts
    narrow: int
    """The number of arrays read in 16 bits, in words of four elements (8 bytes)."""
    wide: int
    """The number of arrays read in more than 16 bits; codes have 8 bits."""
    words: int
    """The number of arrays written in more than 8 bits."""


@cache
def look(name, arch=ARCH):
    """Compile a rule's kernel; return it, and its passes."""
    rule, rank = (RULES | MORE)[name]
    dtype = "bfloat16" if name.endswith("bfloat16") else "float32"
    plan = plan_for(rule, rank, dtype, lean=True, stats=isinstance(rule, GradientNorms))
    kernel = sass.kernel(emit(plan, dtype), arch)
    at = [j for j, stage in enumerate(in_stages(plan).stages) if stage.kind == "pass"]
    made = []
    for j, p in zip(at, plan.passes, strict=True):
        sizes, written = ([STORED[plan.storage.get(x, dtype)].itemsize for x in some] for some in (p.loads, p.stores))
        facts, wide, words = sass.facts(kernel, j), sum(x > 2 for x in sizes), sum(x > 1 for x in written)
        made.append(Row(tuple(p.loads), tuple(p.stores), facts, sizes.count(2), wide, words))
    return kernel, made


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
        arrays = f"{', '.join(x.loads)} → {', '.join(x.stores) or '–'}"
        said.append(f"| {first} | {arrays} | {x.facts.in_flight >> 10} |")
    return said


def compiler():
    """The line of the page that names the compiler."""
    return f"Compiled by NVRTC {'.'.join(map(str, nvrtc.version()))}."


def table():
    """The whole table, with the line about the compiler."""
    head = ["rule", "registers", "blocks", "bytes spilled", "pass", "KB in flight"]
    rows = [f"| {' | '.join(head)} |", "|---|" + "---:|" * 3 + "---|---:|"]
    return [compiler(), "", *rows, *(line for name in RULES for line in lines(name))]


def main():
    """Write the table into the page."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text("\n\n".join([before + BEGIN, "\n".join(table()), END + after]), "utf-8")


if __name__ == "__main__":
    main()
