"""``arrayopt verify``: its report is right as numbers, table, JSON and page, and its exit status serves CI."""

import html.parser
import io
import json
import math
import sys

import numpy as np
import pytest

import arrayopt as ao
from arrayopt import cli
from arrayopt.testing.backends import choose
from arrayopt.testing.equivalence import Difference, Outcome
from arrayopt.testing.report import page
from arrayopt.testing.ulps import in_short
from arrayopt.testing.verify import RULES, STORED, Report, Row, Settings, verify

pytest.importorskip("rich", reason="verify prints with rich")
from rich.console import Console

from arrayopt.testing import report as terminal

QUICK = ["verify", "--rules", "SGD,lamb", "--backends", "numpy:numpy,array_api_strict", "--steps", "2"]
SMALL = ["--shapes", "3x2,scalar,0"]


def difference(ulps, **changes):
    given = {"tensor": "0: <w>", "index": (1, 2), "step": 3, "expected": 1.0, "got": 1.5} | changes
    return Outcome(Difference(ulps, **given))


def made_up():
    """A report with one of everything."""
    outcomes = {
        "numpy:numba": difference(0.0),
        "torch:array_api": difference(2.5, expected=math.nan, got=-math.inf),
        "jax:jit": Outcome(skipped="cannot & will not"),
        "cupy:array_api": Outcome(error="RuntimeError: <no device>"),
    }
    good = dict.fromkeys(outcomes, difference(1.0, got=1 + 2j))
    far = good | {"jax:jit": difference(math.inf)}
    rows = [Row("LAMB", "float32", 4.0, outcomes), Row("SGD", "complex64", 4.0, good), Row("Mine", "float64", 4.0, far)]
    return Report("numpy:array_api", list(outcomes), {"numpy": "2<3"}, Settings(shapes=((2, 3), ())), rows)


# ---- the report ------------------------------------------------------------------------------------------------------


def test_every_rule_of_the_package_is_in_the_table():
    rules = [x for x in map(ao.__dict__.get, ao.__all__) if isinstance(x, type) and issubclass(x, ao.Rule)]
    of_values = {"LBFGS", "CG", "SPG"}  # which ask for the value of a function
    assert {rule.__name__ for rule in rules} - {"Rule"} - of_values == set(RULES)
    assert {name: type(rule).__name__ for name, rule in RULES.items()} == {name: name for name in RULES}


def test_all_rules_agree_and_a_run_repeats():
    settings = Settings(shapes=((5, 3), (4,), ()), dtypes=("float64", "complex128"), steps=2)
    backends, seen = choose(["numpy:array_api", "numpy:numpy"]), []
    every, few = RULES | STORED, {name: RULES[name] for name in ("LAMB", "Adafactor")}
    first, second = (verify(rules, backends, settings, versions={}, on_row=seen.append) for rules in (every, few))
    assert first.passed
    assert first.backends == ["numpy:numpy"]
    assert seen == first.rows + second.rows
    assert [row for row in first.rows if row.rule in few] == second.rows
    by_key = {(row.rule, row.dtype): row.outcomes["numpy:numpy"] for row in first.rows}
    assert set(by_key) == {
        (name, dtype) for name, rule in every.items() for dtype in ("float64", "complex128")[: 1 + rule.complex_ok]
    }
    assert by_key["LAMB", "complex128"].difference is not None
    other = verify(few, backends, Settings(settings.shapes, settings.dtypes, 2, seed=1), versions={})
    assert other.rows != second.rows


def test_a_report_knows_what_passes():
    report = made_up()
    assert [row.passed for row in report.rows] == [False, True, False]
    assert not report.passed
    assert len(report.differences) == 2 + 4 + 4


def test_json_holds_everything_in_strict_json():
    plain = json.loads(made_up().to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert plain["passed"] is False
    assert [row["passed"] for row in plain["rows"]] == [False, True, False]
    first, second, third = (row["outcomes"] for row in plain["rows"])
    assert first["torch:array_api"]["difference"] == {
        "ulps": 2.5,
        "tensor": "0: <w>",
        "index": [1, 2],
        "step": 3,
        "expected": "nan",
        "got": "-inf",
    }
    assert first["jax:jit"] == {"difference": None, "skipped": "cannot & will not", "error": ""}
    assert second["jax:jit"]["difference"]["got"] == [1.0, 2.0]
    assert float(third["jax:jit"]["difference"]["ulps"]) == math.inf
    assert plain["settings"]["shapes"] == [[2, 3], []]


@pytest.mark.parametrize(
    ("value", "said"), [(0.0, "0"), (2e-6, "<0.01"), (0.25, "0.25"), (12.34, "12.3"), (math.inf, "inf")]
)
def test_numbers_are_short(value, said):
    assert in_short(value) == said


# ---- the page --------------------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Reads a page: tags must be closed in order, and cells of tables are kept."""

    EMPTY = ("meta", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.tags, self.titles = [], [], set(), []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        attrs = dict(attrs)
        assert not {"src", "href", "onclick"} & set(attrs)
        self.titles += [attrs["title"]] if "title" in attrs else []
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data


def test_the_page_is_whole_and_needs_nothing_else():
    text = page(made_up())
    read = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert not read.tags & {"script", "link", "img", "iframe"}
    for word in ("http:", "https:", "url(", "@import"):
        assert word not in text
    assert "2 of 3 rows are beyond the limit" in text
    assert "2&lt;3" in text
    assert "cannot &amp; will not" in text


def test_the_heat_map_has_a_cell_for_each_rule_and_backend():
    heads, *rows = Page(page(made_up())).tables[0]
    assert heads == ["rule", "dtype", "numpynumba", "torcharray_api", "jaxjit", "cupyarray_api", "limit"]
    assert rows == [
        ["LAMB", "float32", "0", "2.5", "–", "error", "4"],
        ["SGD", "complex64", "1", "1", "1", "1", "4"],
        ["Mine", "float64", "1", "1", "inf", "1", "4"],
    ]


def test_the_list_has_the_worst_first_and_leaves_out_what_is_the_same():
    _, *rows = Page(page(made_up())).tables[1]
    assert [row[:3] for row in rows[:2]] == [
        ["inf", "Mine, float64", "jax:jit"],
        ["2.5", "LAMB, float32", "torch:array_api"],
    ]
    assert rows[1][3:] == ["0: <w>", "[1, 2]", "3", "-inf", "nan"]
    assert len(rows) == 9


def test_colours_grow_darker_with_the_difference_and_texts_stay_readable():
    from arrayopt.testing.report import _look

    def brightness(colour):
        return float(np.dot([0.299, 0.587, 0.114], colour))

    looks = [_look(x, 64.0) for x in (0.0, 0.5, 1.0, 4.0, 16.0, 64.0, 1e9)]
    grounds = [[int(x) for x in look.split("rgb(")[1].split(")")[0].split(",")] for look in looks]
    shades = [brightness(ground) for ground in grounds]
    assert shades == sorted(shades, reverse=True)
    for look, shade in zip(looks, shades, strict=True):
        text = 255 if look.endswith("#fff") else 26
        assert abs(text - shade) > 75
    assert _look(0.0, 0.0).startswith("background:rgb(247")


def test_a_page_of_results_that_are_all_the_same():
    rows = [Row("SGD", "float32", 4.0, {"numpy:numpy": difference(0.0)})]
    text = page(Report("numpy:array_api", ["numpy:numpy"], {}, Settings(), rows))
    Page(text)
    assert "All backends agree" in text
    assert "bit for bit" in text


# ---- the terminal ----------------------------------------------------------------------------------------------------


def test_the_table_and_what_failed_are_printed():
    shown = io.StringIO()
    terminal.show(made_up(), Console(file=shown, width=100))
    text = shown.getvalue()
    lines = text.splitlines()
    assert any(line.split() == ["LAMB", "float32", "0", "2.5", "-", "error"] for line in lines)
    assert "FAILED LAMB float32 cupy:array_api: RuntimeError: <no device>" in lines
    assert "FAILED Mine float64 jax:jit: inf ULPs at '0: <w>' [1, 2], step 3: 1.5 for 1.0, above 4" in lines
    assert "jax:jit: not compared: cannot & will not" in lines
    assert lines[-1] == "failed"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_it_passes_and_writes_files(tmp_path, capsys):
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html")}
    options = [x for kind, path in files.items() for x in (f"--{kind}", str(path))]
    assert cli.main([*QUICK, *SMALL, "--dtypes", "float32", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[-1] == "passed"
    plain = json.loads(files["json"].read_text("utf-8"))
    assert plain["passed"] is True
    assert [row["rule"] for row in plain["rows"]] == ["SGD", "LAMB"]
    assert plain["backends"] == ["numpy:numpy", "array_api_strict:array_api"]
    assert plain["versions"]["arrayopt"] == ao.__version__
    Page(files["html"].read_text("utf-8"))


def test_a_difference_beyond_the_limit_is_status_1(monkeypatch, capsys):
    import array_api_strict

    sqrt = array_api_strict.sqrt
    monkeypatch.setattr(array_api_strict, "sqrt", lambda x: sqrt(x) * 1.01)
    assert cli.main([*QUICK, *SMALL, "--rules", "SGD,AdamW"]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert [line.split()[1:4] for line in failed] == [
        ["AdamW", dtype, "array_api_strict:array_api:"] for dtype in ("float32", "float64")
    ]  # SGD takes no root


def test_the_limit_can_be_set(capsys):
    assert cli.main([*QUICK, "--max-ulp", "0", "--backends", "numpy:numpy", "--shapes", "64x64", "--steps", "5"]) == 1
    assert "above 0" in capsys.readouterr().out


def test_on_a_terminal_there_is_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli.main([*QUICK, *SMALL]) == 0


def test_a_rule_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_rules.py").write_text(
        "from dataclasses import dataclass\nimport arrayopt as ao\n"
        "@dataclass(frozen=True, kw_only=True, repr=False)\nclass Plain(ao.Rule):\n"
        "    lr: ao.Hyper = ao.real('[0, inf)')\n"
        "    def slots(self, xp, p): return {}\n"
        "    def update(self, xp, p, g, s, h): return p - h.lr * g, {}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["verify", "--rules", "my_rules:Plain", "--backends", "numpy:numpy", "--shapes", "3", "--steps", "1"]
    assert cli.main(arguments) == 0
    assert "Plain" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rules", "lamp"], "must be one of CAME, CG, "),
        (["--rules", "no_such_module:Rule"], "cannot be imported"),
        (["--rules", "pathlib:Path"], "is not a class of rules"),
        (["--backends", "abacus"], "there is no backend 'abacus'"),
        (["--backends", "numpy:array_api", "--rules", "SGD"], "there is nothing to compare: name more"),
        (["--rules", "Prodigy", "--dtypes", "complex64"], "there is nothing to compare: these rules do not support"),
        (["--rules", "mymodule.Rule"], "Sophia, module:Class; got mymodule.Rule"),
        (["--dtypes", "int8"], "must be one of float16"),
        (["--shapes", "3xx"], "must be a shape such as"),
        (["--steps", "0"], "at least 1"),
        (["--max-ulp", "-1"], "at least 0"),
        (["--max-ulp", "many"], "at least 0"),
        (["--json", "report.txt"], "must end in .json"),
        (["--html", "no/such/folder/x.html"], "does not exist"),
    ],
)
def test_wrong_arguments_are_status_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["verify", *arguments])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_without_rich_it_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["verify"])
    assert stopped.value.code == 2
    assert "arrayopt[verify]" in capsys.readouterr().err
