"""The benchmark runs, on tiny shapes: each contestant has a row or a reason, and page and picture are written."""

import re
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import alone, apart, doors, loops, ours, page, peers_jax, peers_torch, picture, products, report
from benchmarks.contest import Contestant, Running, by_threads, race
from benchmarks.machine import look
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.results import Results, Sheet
from benchmarks.run import PARTS, QUICK, _only, measure
from tests.support.slow import marked

TEMPLATE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
TINY = Problem("tiny", "tiny shapes", ((7, 5), (5,), (1,)))
MATRICES = Problem("matrices", "tiny matrices", ((7, 5), (5, 7), (6, 6)))
DEEP = Problem("deep", "more axes", ((7, 5), (5,), (4, 3, 2, 2), (2, 3, 4), (1,)))
FEW = replace(
    QUICK,
    rules=("LAMB", "AdamW"),
    problems=(TINY,),
    rounds=2,
    seconds=0.0,
    copied=1 << 16,
    sizes=(60, 240),
    counts=(1, 10),
    total=240,
    weighed=(TINY,),
    more=("Lion",),
    model=TINY,
    products=(MATRICES,),
    doors=((3, 2),),
    little=0.0,
    patience=0.0,
    alone=(),
    first=(),
    minimize=(),
    ranks=0,
    weighs=False,
)


# no bias correction; no adaptation of vectors; differences times β2, not 1 - β2; the momentum of NAdam's first paper
DIFFERENT = {("LAMB", "pytorch_optimizer"), ("LARS", "pytorch_optimizer"), ("Adan", "optax"), ("NAdam", "optax")}
DIFFERENT |= {("LBFGS", "torch")}  # whose gradients are of another function: with constant ones it has less to do


def contestants(rule, problem):
    """Everyone who enters."""
    modules = [ours, *([loops] if rule in ours.RULES else []), peers_torch, peers_jax]
    return [c for module in modules for c in module.contestants(rule, problem)]


def test_what_is_measured_and_what_is_made_of_it(tmp_path):
    """One test, for measuring takes long."""
    results = measure(FEW, "the command")
    every_contestant_has_a_row_or_a_reason(results)
    rows_make_sense(results)
    the_page_has_every_table_and_keeps_what_explains_them(results, tmp_path)
    picture.draw_short(report.matters(results), tmp_path / "benchmarks-short.png")
    for name, rows in (("benchmarks", results.rows), ("benchmarks-more", results.more)):
        picture.draw(rows, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG"


def every_contestant_has_a_row_or_a_reason(results):
    for problem in FEW.problems:
        for rule in FEW.rules:
            entered = [c.name for c in contestants(rule, problem)]
            timed = [row.name for row in results.rows if (row.rule, row.problem) == (rule, problem.title)]
            left_out = [name for r, p, name in results.left_out if (r, p) == (rule, problem.title)]
            assert sorted(timed + left_out) == sorted(entered)
            assert {f"arrayopt {engine}" for engine in ours.FUSED} < set(timed)
            reasons = [results.left_out[rule, problem.title, name] for name in left_out]
            assert all("not installed" in why or "XLA takes about" in why for why in reasons)
    left_out = {(rule, name) for rule, problem, name in results.left_out if problem in (TINY.title, MATRICES.title)}
    timed = {(row.rule, row.name) for row in (*results.more, *results.products)}
    entered = {("Lion", c.name) for c in contestants("Lion", TINY) if c.name != "arrayopt array_api"}
    entered |= {(rule, c.name) for rule in products.RULES for c in products.contestants(rule, MATRICES)}
    assert entered <= timed | left_out
    assert ("Lion", "timm foreach") in timed | left_out
    assert {("MuonH", f"arrayopt {engine}") for engine in ours.FUSED} <= timed
    assert {row.name.removesuffix(doors.SCHEDULED) for row in results.doors} == {doors.BELOW, doors.DOOR}


def rows_make_sense(results):
    for row in (*results.rows, *results.more):
        assert row.ms > 0
        assert row.ratio == 1 if row.name == ours.REFERENCE else row.ratio > 0
        fused = row.name.removeprefix("arrayopt ") in ours.FUSED
        assert row.share > 0 if fused else row.moved is row.share is None
    assert next(r for r in results.rows if r.rule == "LAMB" and r.moved).moved == 40
    assert results.points["parameters"][0].growth == 1
    assert {x.engine for x in results.memory} == {*ours.FUSED, "array_api"}


def the_page_has_every_table_and_keeps_what_explains_them(results, tmp_path):
    path = tmp_path / "benchmarks.md"
    page.write(results, template=TEMPLATE, path=path)
    text = path.read_text("utf-8")
    assert text.startswith(TEMPLATE.read_text("utf-8").split(page.BEGIN)[0])
    sheets = list(report.sheets(results))
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == [*(sheet.title for sheet in sheets), "The machine"]
    assert text.count("\n| ") == 1 + len(results.machine.rows) + 1 + sum(len(x.lines) + 1 for x in sheets) + _rows(
        TEMPLATE
    )
    assert text.count(results.machine.stamp) == len(sheets)
    again = tmp_path / "again.md"
    page.write(results, template=path, path=again)
    assert again.read_text("utf-8") == text


def test_a_run_of_one_part_keeps_the_other_tables(tmp_path):
    path = tmp_path / "benchmarks.md"
    results = Results(look("the command"), sheets=[Sheet("A table", ("name", "number"), [("x", "1")])])
    page.write(results, template=TEMPLATE, path=path, keep=True)
    old, new = (x.read_text("utf-8").split("\n### ") for x in (TEMPLATE, path))
    assert next(part for part in new if part not in old).startswith("A table\n\n| name | number |")
    assert [part.split("\n")[0] for part in old] == [x.split("\n")[0] for x in new if not x.startswith("A table")]


def test_tables_come_back_from_other_processes(capfd):
    sheet = Sheet("A table", ("name", "number"), [("x", "1")])
    apart.tell(sheet, data=True)
    assert apart.sheets(capfd.readouterr().out) == [sheet]
    apart.tell(sheet, data=False)
    assert "| x | 1 |" in capfd.readouterr().out
    with pytest.raises(RuntimeError, match=r"No module named benchmarks\.absent"):
        apart.run(["benchmarks.absent"])


def test_first_and_later_steps_of_one_contestant():
    problem = PROBLEMS["2000x64"]
    assert alone.one("SGD", problem, "arrayopt numpy", 0)["first"] > 0
    told = alone.one("SGD", problem, "arrayopt numpy", 1)
    assert told["step"] > 0
    assert told["setting"] in by_threads()


def test_parts_of_a_run():
    for part, names in PARTS.items():
        only = _only(QUICK, [part])
        changed = {name for name in asdict(QUICK) if getattr(only, name) != getattr(QUICK, name)}
        assert changed == {name for other, x in PARTS.items() for name in x if other != part} - {"weighs"}
        assert all(getattr(only, name) == getattr(QUICK, name) for name in names)


def test_the_setting_that_is_faster_is_taken():
    slow = {"on": False}
    settings = {"slow": partial(slow.update, on=True), "fast": partial(slow.update, on=False)}
    made = race(
        [Contestant("one", lambda: Running(lambda: time.sleep(0.01 * slow["on"]), settings=settings))], rounds=2
    )
    assert made.settings == {"one": "fast"}
    assert max(times["one"] for times in made.rounds) < 0.01


def _rows(template):
    before, rest = template.read_text("utf-8").split(page.BEGIN)
    return (before + rest.split(page.END)[1]).count("\n| ")


EVERY = (*ours.RULES, *ours.MORE)


@pytest.mark.parametrize(
    "rule", marked(((rule,) for rule in EVERY), lambda rule: rule in ours.RULES and rule != "CAME")
)
def test_all_compute_what_ours_does(rule):
    """Three steps in float32: roundings of the parameter, and of the way that it goes."""
    reference = stepped(ours.running(rule, DEEP, "array_api"))
    for contestant in contestants(rule, DEEP):
        if contestant.left_out or (rule, contestant.name) in DIFFERENT:
            continue
        values = stepped(contestant.build())
        for x, y, first in zip(values, reference, DEEP.params(), strict=True):
            rounding = 4 * 2.0**-24 * np.abs(y).max() + 1e-5 * np.abs(y - first).max()
            np.testing.assert_allclose(x, y, rtol=0, atol=rounding, err_msg=contestant.name)


ROUNDED = {"torch": 0.05, "pytorch_optimizer": 0.05, "torch float32": 3e-4, "optax": 3e-4}
"""How near the peers of `benchmarks.products` are, as a share of the way: the first two multiply in bfloat16."""
PEERS = [("Muon", "torch"), ("Muon", "torch float32"), ("Muon", "optax"), ("NorMuon", "pytorch_optimizer")]
# not SOAP: where gradients stay the same, its steps are soon made of roundings; see `tests.rules.test_goldens`


@pytest.mark.parametrize(("rule", "name"), marked(PEERS, lambda rule, name: name == "torch float32"))
def test_rules_for_matrices_compute_what_ours_do(rule, name):
    made = {c.name: c for c in products.contestants(rule, MATRICES)}
    if made[name].left_out:
        pytest.skip(made[name].left_out)
    pairs = zip(stepped(made[name].build()), stepped(made["arrayopt numpy"].build()), MATRICES.params(), strict=True)
    for x, y, first in list(pairs)[2 if name == "optax" else 0 :]:  # its factor for rows is ours for columns
        assert np.linalg.norm(x - y) < ROUNDED[name] * np.linalg.norm(y - first)


def stepped(running):
    """The parameters after three steps."""
    for _ in range(3):
        running.before()
        running.step()
    return running.values()


def test_shapes_are_those_of_the_models():
    size = {name: (problem.elements, len(problem.shapes)) for name, problem in PROBLEMS.items()}
    assert size["bert-base"] == (109_482_240, 199)
    assert size["resnet-50"] == (25_557_032, 161)
    assert all(x.ctypes.data % 64 == 0 and x.flags.c_contiguous for x in TINY.grads)


def test_contestants_that_do_not_fit_into_memory_take_turns_with_the_first():
    seen = []

    def build(name):
        seen.append(name)
        return Running(lambda: None)

    names = ["first", "second", "third"]
    made = race([Contestant(x, lambda x=x: build(x), held=1e15) for x in names], rounds=2)
    assert seen == ["first", "second", "first", "third"]
    assert [sorted(times) for times in made.rounds] == [["first", "second"]] * 2 + [["first", "third"]] * 2


def test_a_contestant_that_fails_is_left_out_and_one_that_blows_up_is_an_error():
    def fail():
        raise RuntimeError("no such option")

    made = race([Contestant("first"), Contestant("second", fail)], rounds=2)
    assert made.names == ["first"]
    assert made.left_out == {"second": "RuntimeError: no such option"}
    broken = Contestant("broken", lambda: Running(lambda: None, lambda: [np.array([np.nan])]))
    with pytest.raises(FloatingPointError, match="broken no longer has finite parameters"):
        race([broken], rounds=2)


def test_the_doors_are_measured(capsys):
    doors.main(["--rules", "SGD", "--tensors", "2", "--rounds", "1", "--steps", "1", "--engine", "array_api"])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + 4 * len(doors.SHAPES)
    assert rows[2].startswith("| SGD | 2 of (64,) | arrayopt.Optimizer |")
    assert all(float(row.split("|")[-2]) > 0 for row in rows[2:])
