"""The benchmark runs, on tiny shapes: each contestant has a row or a reason, and page and picture are written."""

import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import alone, apart, doors, loops, options, ours, page, peers_jax, peers_torch, products, run, tables
from benchmarks.contest import Contestant, Running, by_threads, race
from benchmarks.machine import look
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.results import Sheet
from tests.support.slow import marked

TEMPLATE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
TINY = Problem("tiny", "tiny shapes", ((7, 5), (5,), (1,)))
MATRICES = Problem("matrices", "tiny matrices", ((7, 5), (5, 7), (6, 6)))
DEEP = Problem("deep", "more axes", ((7, 5), (5,), (4, 3, 2, 2), (2, 3, 4), (1,)))
FEW = replace(
    run.QUICK,
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
    jitted=((3, 2),),
    little=0.0,
    patience=0.0,
    weighs=False,
)
HERE = {"contest", "more", "products", "small", "doors", "scaling", "memory"}
"""The parts that this process measures."""


# no bias correction; no adaptation of vectors; differences times β2, not 1 - β2; the momentum of NAdam's first paper
DIFFERENT = {("LAMB", "pytorch_optimizer"), ("LARS", "pytorch_optimizer"), ("Adan", "optax"), ("NAdam", "optax")}
DIFFERENT |= {("LBFGS", "torch")}  # whose gradients are of another function: with constant ones it has less to do


def contestants(rule, problem):
    """Everyone who enters."""
    modules = [ours, *([loops] if rule in ours.RULES else []), peers_torch, peers_jax]
    return [c for module in modules for c in module.contestants(rule, problem)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a run, its exit status and its tables, by title: measuring takes long."""
    path = tmp_path_factory.mktemp("run") / "benchmarks.md"
    page.empty(TEMPLATE, path)
    status = run._measured(FEW, HERE, "the command", path)
    return path, status, {sheet.title: sheet for sheet in page.read(path)}


def test_every_contestant_has_a_line_or_a_reason(made):
    path, status, sheets = made
    assert status == 0
    text = path.read_text("utf-8")
    entered = [(TINY.title, rule, c.name, "of") for rule in FEW.rules for c in contestants(rule, TINY)]
    entered += [(f"{tables.MORE}{TINY.title}", "Lion", c.name, "of") for c in contestants("Lion", TINY)]
    entered = [x for x in entered if x[1:3] != ("Lion", "arrayopt array_api")]
    for rule in products.RULES:
        case = f"{rule}, {MATRICES.title}"
        entered += [("Products of matrices", case, c.name, "with") for c in products.contestants(rule, MATRICES)]
    for title, rule, name, word in entered:
        timed = any(line[0] == rule and line[1].partition(", ")[0] == name for line in sheets[title].lines)
        said = f"{rule} of {name}" if word == "of" else f"{name} with {rule}"
        reason = re.search(rf"^Not measured: {re.escape(said)}, because (.*)\.$", text, re.MULTILINE)
        assert timed != bool(reason), (title, rule, name)
        assert timed or "not installed" in reason[1] or "XLA takes about" in reason[1]
        assert timed or name.removeprefix("arrayopt ") not in ours.FUSED


def test_the_lines_make_sense(made):
    _, _, sheets = made
    for title in (TINY.title, f"{tables.MORE}{TINY.title}"):
        for _, contestant, ms, ratio, moved, share in sheets[title].lines:
            name = contestant.partition(", ")[0]
            assert float(ms) >= 0
            assert float(ratio) == 1 if name == ours.REFERENCE else float(ratio) >= 0
            fused = name.removeprefix("arrayopt ") in ours.FUSED
            assert bool(share) == bool(moved) == fused
    assert next(line for line in sheets[TINY.title].lines if line[4])[4] == "40"
    assert sheets["Scaling with the number of parameters"].lines[0][3] == "1.00"
    assert sheets["Memory that a step allocates"].columns[2:] == ours.ENGINES
    through = {line[1].removesuffix(doors.SCHEDULED) for line in sheets["Steps through arrayopt.torch"].lines}
    assert through == {doors.BELOW, doors.DOOR}
    assert {line[1] for line in sheets["Steps through arrayopt.optax"].lines} == {"arrayopt.optax", "optax"}


def test_the_page_keeps_its_text_and_each_table_its_stamp(made):
    path, _, sheets = made
    text, template = path.read_text("utf-8"), TEMPLATE.read_text("utf-8")
    assert [text.split(page.BEGIN)[0], text.split(page.END)[1]] == [
        template.split(page.BEGIN)[0],
        template.split(page.END)[1],
    ]
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == [page.IN_SHORT, *sheets, page.MACHINE]
    assert len(re.findall(r"^Commit .* UTC\.$", text, re.MULTILINE)) == 1 + len(sheets)
    for name in ("benchmarks", "benchmarks-more", "benchmarks-short"):
        assert path.with_name(f"{name}.png").read_bytes()[1:4] == b"PNG"


def test_one_table_leaves_the_others_and_is_counted_in_short(tmp_path):
    path = tmp_path / "benchmarks.md"
    path.write_text(TEMPLATE.read_text("utf-8"), "utf-8")
    before = page.read(path)
    lines = [("AdamW", "arrayopt cpp, 1 thread", "1.0", "1.00"), ("AdamW", "a peer", "0.5", "0.50")]
    lines = [("2 tensors of 64", *line[1:]) for line in lines]
    sheet = Sheet("Small steps: AdamW", ("shapes", "contestant", "µs", "ratio"), lines, 2, ("A note.",))
    machine = look("the command")
    page.put(path, sheet, machine)
    page.put(path, replace(sheet, title="Another table"), machine)
    after = {x.title: x for x in page.read(path)}
    assert list(after) == [*(x.title for x in before), "Another table"]
    assert all(after[x.title] == x for x in before if x.title != sheet.title)
    assert after[sheet.title] == replace(sheet, notes=())
    text = path.read_text("utf-8")
    assert "| AdamW | 2 tensors of 64 | a peer | a peer | 0.50 |" in text
    assert text.split("### In short")[1].split("###")[0].count(machine.stamp) == 1
    page.prune(path, ["Another table", sheet.title])
    assert [x.title for x in page.read(path)] == ["Another table", sheet.title]


def test_the_page_shows_in_short_what_its_tables_say():
    _, parts, _ = page._split(TEMPLATE)
    short = tables.in_short(page.read(TEMPLATE))
    assert len(short.lines) == len(tables.MATTER)
    assert parts[page.IN_SHORT].startswith(f"{page.markdown(short)}\n\n{page.SHORT_PICTURE}")


def test_a_part_that_fails_stops_no_other_and_is_told(tmp_path, monkeypatch, capsys):
    def breaks():
        yield Sheet("First", ("name", "number"), [("x", "1")])
        raise OSError("no such program")

    def works():
        return [Sheet("Last", ("name", "number"), [("y", "2")])]

    listed = [run.Job("more", "the first", breaks), run.Job("small", "the last", works)]
    monkeypatch.setattr(run, "jobs", lambda settings, say: listed)
    path = tmp_path / "benchmarks.md"
    path.write_text(TEMPLATE.read_text("utf-8"), "utf-8")
    kept = page.read(path)
    assert run._measured(FEW, run.PARTS, "the command", path) == 1
    assert "failed: the first (--parts more): OSError: no such program" in capsys.readouterr().out
    assert [x.title for x in page.read(path)] == [*(x.title for x in kept), "First", "Last"]
    listed[0] = run.Job("more", "the first", works)
    assert run._measured(FEW, run.PARTS, "the command", path) == 0
    assert [x.title for x in page.read(path)] == ["Last"]


def test_tables_come_back_from_other_processes(capfd, monkeypatch):
    sheet = Sheet("A table", ("name", "number"), [("x", "1")])
    apart.tell(sheet, data=True)
    monkeypatch.setattr(apart, "run", lambda *given: capfd.readouterr().out.splitlines())
    assert list(apart.sheets([])) == [sheet]
    monkeypatch.undo()
    apart.tell(sheet, data=False)
    assert "| x | 1 |" in capfd.readouterr().out
    with pytest.raises(RuntimeError, match=r"No module named benchmarks\.absent"):
        list(apart.run(["benchmarks.absent"]))


def test_first_and_later_steps_of_one_contestant():
    problem = PROBLEMS["2000x64"]
    assert alone.one("SGD", problem, "arrayopt numpy", 0)["first"] > 0
    told = alone.one("SGD", problem, "arrayopt numpy", 1)
    assert told["step"] > 0
    assert told["setting"] in by_threads()


def test_what_an_option_costs_has_a_line_for_each():
    sheet = options.costs(["AdamW"], TINY, ["numpy"], lambda line: None, rounds=1, warmup=1)
    assert [line[:2] for line in sheet.lines] == [("AdamW", name) for name in options.OPTIONS]
    assert sheet.lines[0][2].endswith(" (1.00)")
    assert sheet.columns == ("rule", "with", "numpy, ns")


def test_every_part_has_jobs():
    assert {job.part for job in run.jobs(run.FULL)} == set(run.PARTS)


def test_the_setting_that_is_faster_is_taken():
    slow = {"on": False}
    settings = {"slow": partial(slow.update, on=True), "fast": partial(slow.update, on=False)}
    made = race(
        [Contestant("one", lambda: Running(lambda: time.sleep(0.01 * slow["on"]), settings=settings))], rounds=2
    )
    assert made.settings == {"one": "fast"}
    assert max(times["one"] for times in made.rounds) < 0.01


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


ROUNDED = {
    "arrayopt array_api bfloat16": 0.05,
    "torch": 0.05,
    "pytorch_optimizer": 0.05,
    "torch float32": 3e-4,
    "optax": 3e-4,
}
"""How near contestants of `benchmarks.products` are, as a share of the way: the first three multiply in bfloat16."""
PEERS = [
    ("Muon", "arrayopt array_api bfloat16"),
    ("Muon", "torch"),
    ("Muon", "torch float32"),
    ("Muon", "optax"),
    ("NorMuon", "pytorch_optimizer"),
]
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
