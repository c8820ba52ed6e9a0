"""What a device does between the passes, in few stages: see `arrayopt.fusion.staging`."""

from dataclasses import dataclass
from typing import final

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines.cuda.emit import emit
from arrayopt.fusion.layout import device_layout
from arrayopt.fusion.lower_stages import in_stages
from arrayopt.fusion.plans import plan_for
from tests.engines.cuda.test_cupy import compare, pair, step
from tests.support.cases import CASES, make
from tests.support.slow import marked

STAGES = {"CAME": 11, "Adafactor": 7, "LAMB": 3, "LANS": 5, "AdamW": 1, "NAdam": 2}
"""At most: a stage more is a barrier of the device more."""


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("name", STAGES)
def test_how_many_stages_a_step_has(name, rank):
    rule = getattr(ao, name)() if name == "Adafactor" else getattr(ao, name)(lr=0.1)
    plan = plan_for(rule, rank, "float32", shape=(3, 70, 260)[3 - rank :], lean=True)
    assert len(in_stages(plan).stages) <= STAGES[name]


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Old(ao.Rule):
    """Averages of rows, of columns and of all; what they held before is needed later on, each in another place.

    Of `rows` nothing is; the others are needed by another loop, in the next stage (`near`) or later, by a pass, and by
    what another slot keeps.
    """

    lr: ao.Hyper = ao.real("[0, inf)", 0.1)

    def slots(self, xp, p):
        rows, columns, zero = xp.sum(0.0 * p, axis=-1), xp.sum(0.0 * p, axis=-2), xp.sum(0.0 * p)
        whole = {"all": zero, "near": zero}
        return {"rows": rows, "late": rows, "columns": columns, "last": columns, "kept": rows, **whole}

    def update(self, xp, p, g, s, h):
        of_rows, of_columns = xp.mean(g * g, axis=-1), xp.mean(g * g, axis=-2) + xp.mean(xp.abs(g), axis=-2)
        rows, late = 0.5 * s["rows"] + of_rows, 0.25 * s["late"] + of_rows
        columns, whole = 0.5 * s["columns"] + of_columns, 0.5 * s["all"] + xp.sum(of_rows)
        scale = 1.0 + xp.mean(xp.sqrt(rows), axis=-1, keepdims=True)
        u = g / xp.expand_dims(scale + rows + s["near"], axis=-1) + 0.1 * xp.expand_dims(columns, axis=-2)
        u = u + g * xp.expand_dims(s["columns"], axis=-2)  # in the pass itself
        norm = 1.0 + xp.sqrt(xp.sum(u * u)) + s["all"]
        again = xp.mean(u * g, axis=-1) / norm + s["late"]  # after the second pass
        u = u / norm + xp.expand_dims(xp.sqrt(1.0 + again * again) * rows, axis=-1)
        new = {"rows": rows, "late": late, "columns": columns, "all": whole, "last": s["columns"], "kept": again}
        new["near"] = whole
        return p - h.lr * u, new


def at(stages, what):
    """In which stages something is done, by what a part's body says."""
    return [k for k, stage in enumerate(stages) if any(what(part.function.body) for part in (stage, *stage.siblings))]


OF_OLD = ("rows", "near", "late", "columns", "all")


def test_a_slot_is_written_where_it_is_made_unless_somebody_needs_what_it_held():
    plan = plan_for(Old(), 2, "float32", shape=(70, 260), lean=True)
    stages = in_stages(plan).stages
    writes = {slot: at(stages, lambda body, slot=slot: f"room='at_{slot}'" in str(body)) for slot in plan.small}
    last = max(k for k, stage in enumerate(stages) if stage.kind == "pass")
    assert [max(writes[slot]) < last for slot in OF_OLD] == [True, False, False, False, False]


SHAPES = {"w": (70, 260), "small": (5, 7), "rows": (700, 3), "columns": (3, 700), "none": (0, 4), "many": (600, 3, 3)}


@pytest.mark.parametrize("name", marked([("Old",), ("CAME",), ("Adafactor",)], lambda name: name == "Old"))
@pytest.mark.parametrize("seed", range(2))
def test_values_between_passes_are_those_of_the_rule(cupy, name, seed):
    """Parts of a stage of one piece each are a block's; of several they are those of many, in any order."""
    from tests.cudacpu import standin

    rule = Old() if name == "Old" else ao.CAME(lr=0.1) if name == "CAME" else ao.Adafactor()
    opts = pair(cupy, rule, SHAPES)
    with standin.checking(random=True, seed=seed, workers=3):
        for k in range(2):
            step(cupy, opts, SHAPES, seed=k)
    compare(opts, loose=4)
    assert np.isfinite(opts[1].params["w"].get()).all()


@pytest.mark.parametrize("name", ["CAME", "Adafactor"])
def test_a_device_has_room_only_for_vectors_that_are_written_and_read(name):
    plan = plan_for(make(name, CASES[name][0]), 2, "float32", shape=(30, 40), lean=True)
    text = emit(plan, "float32")
    columns = [f"t[VEC{i}]" for i in range(len(device_layout(plan).vectors))]
    assert columns
    assert [column for column in columns if text.count(column) < 2] == []
