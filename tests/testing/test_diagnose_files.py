"""What a diagnosis becomes: a page, JSON, the command's status; and trajectories in files, checked from there."""

import html.parser
import json
import sys
import types

import numpy as np
import pytest

import arrayopt as ao
from arrayopt import cli
from arrayopt.testing import Trajectory, check, diagnose, record
from arrayopt.testing.diagnosis.diagnosis import page
from arrayopt.testing.diagnosis.trajectory import parameters
from arrayopt.testing.fixtures import recorded as recorded
from tests.support.slow import marked
from tests.testing.faulty import sgd


@pytest.fixture(scope="module")
def right():
    return diagnose(sgd(), depth=0)


@pytest.fixture(scope="module")
def wrong():
    def step(params, grads):
        return {name: p - 0.1 * np.abs(grads[name]) for name, p in params.items()}

    step.__qualname__ = "<mine>"
    return diagnose(step, depth=0)


class Page(html.parser.HTMLParser):
    """Reads a page: tags must be closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href", "onclick"} & set(dict(attrs))
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)


def test_the_page_is_whole_and_needs_nothing_else(right, wrong, tmp_path):
    for found in (right, wrong):
        found.to_html(tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text("utf-8")
        assert text == page(found)
        read = Page(text)
        assert not set(read.tags) & {"script", "link", "img", "iframe"}
        assert read.tags.count("polyline") == 4
        assert read.tags.count("circle") == 4 * 12
        for word in ("http:", "https:", "url(", "@import", "<mine>"):
            assert word not in text
    assert "&lt;mine&gt; follows no rule" in text


def test_json_holds_everything(right, wrong):
    plain = json.loads(right.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert plain["as_documented"] is True
    assert plain["name"] == "SGD"
    assert plain["rule"] == repr(right.rule)
    assert plain["hypers"]["momentum"] == 0.9
    plain = json.loads(wrong.to_json())
    assert plain["explained"] is False
    assert plain["first"]["step"] == wrong.first.step
    assert set(plain["by_step"]) == set(parameters())


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_keeps_every_bit(tmp_path):
    params = {"w": np.array([[1 / 3, -0.0, 1e-310]]), "b": np.array(2.0)}
    grads = [
        {"w": np.array([[0.1, np.inf, 0.2]]), "b": None},
        {"w": np.array([[0.1, 0.1, np.nan]]), "b": np.array(1.0)},
    ]
    made = record(tmp_path / "run.json", ao.SGD(lr=0.1, momentum=0.9), params, grads)
    kept = Trajectory.load(tmp_path / "run.json")
    assert kept.dtypes == made.dtypes == {"w": "float64", "b": "float64"}
    for mine, theirs in zip(made.params, kept.params, strict=True):
        for name, x in mine.items():
            assert np.array_equal(x, theirs[name], equal_nan=True)
            assert np.array_equal(np.signbit(x[~np.isnan(x)]), np.signbit(theirs[name][~np.isnan(x)]))
    assert kept.grads[0]["b"] is None
    assert np.array_equal(kept.grads[1]["w"], made.grads[1]["w"], equal_nan=True)
    check(tmp_path / "run.json", ao.SGD(lr=0.1, momentum=0.9), params, max_ulp=0)


def test_what_changed_is_found(tmp_path):
    path = tmp_path / "run.json"
    record(path, sgd(), steps=5)
    check(path, sgd(), max_ulp=0)
    check(path, ao.Optimizer(parameters(), ao.SGD(lr=0.1, momentum=0.9, weight_decay=0.01), engine="numpy"))
    with pytest.raises(
        AssertionError, match=r"sgd.step does not match '.*run.json': .* ULPs at .*step 1: .*the limit is 64"
    ):
        check(path, sgd(momentum=0.91))
    with pytest.raises(ValueError, match="must be those that were recorded"):
        check(path, sgd(), {"w": np.ones(3)})
    with pytest.raises(ValueError, match="`max_ulp` must be a number of at least 0; got -1"):
        check(path, sgd(), max_ulp=-1)
    with pytest.raises(ValueError, match="record: `steps` must be at least 1; got 0"):
        record(path, sgd(), steps=0)


def test_other_libraries_are_checked_from_the_same_file(tmp_path):
    torch = pytest.importorskip("torch")
    start = {name: x.astype("float32") for name, x in parameters().items()}
    record(tmp_path / "run.json", ao.SGD(lr=0.1, momentum=0.9), start)
    named = [(name, torch.nn.Parameter(torch.zeros(x.shape))) for name, x in start.items()]
    check(tmp_path / "run.json", torch.optim.SGD(named, lr=0.1, momentum=0.9))
    assert all(not x.any() for _, x in named)


def test_names_that_pytorch_does_not_have_are_asked_for(tmp_path):
    torch = pytest.importorskip("torch")
    start = {"w": np.ones((2, 3), "float32"), "b": np.ones(3, "float32")}
    record(tmp_path / "run.json", ao.SGD(lr=0.1), start, steps=2)
    unnamed = [torch.nn.Parameter(torch.zeros(x.shape)) for x in start.values()]
    with pytest.raises(ValueError, match=r"must be those that were recorded.*model\.named_parameters"):
        check(tmp_path / "run.json", torch.optim.SGD(unnamed, lr=0.1))
    with pytest.raises(ValueError, match=r"must be those that were recorded[^`]*$"):
        check(tmp_path / "run.json", torch.optim.SGD(unnamed[:1], lr=0.1))


@pytest.mark.parametrize("text", ["", "{}", '{"format": "other"}'])
def test_files_of_something_else_are_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match="is not a recorded trajectory"):
        check(tmp_path / "run.json", sgd())


def test_the_fixture_writes_and_checks(recorded, request, tmp_path, monkeypatch):
    monkeypatch.setattr(request.node, "path", tmp_path / "test_mine.py")
    with pytest.raises(pytest.fail.Exception, match="ARRAYOPT_RECORD=1"):
        recorded(sgd(), name="sgd run")
    monkeypatch.setenv("ARRAYOPT_RECORD", "1")
    recorded(sgd(), name="sgd run")
    assert (tmp_path / "recorded" / "sgd-run.json").is_file()
    monkeypatch.delenv("ARRAYOPT_RECORD")
    recorded(sgd(), name="sgd run")
    with pytest.raises(AssertionError, match="does not match"):
        recorded(sgd(lr=0.2), name="sgd run")


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("mine")
    made.step = lambda params, grads: {name: p - 0.5 * grads[name] for name, p in params.items()}
    made.factory = lambda: sgd()
    made.pair = lambda: (ao.SGD(lr=0.25), {"w": np.ones((3, 2))})
    made.of = lambda params: ao.Optimizer(params, ao.SGD(lr=0.125), engine="array_api")
    made.odd = lambda params, grads: {name: p - 0.5 * np.abs(grads[name]) for name, p in params.items()}

    def raises(*given):
        raise RuntimeError("out of\ncoffee")

    def factory():
        return raises()

    def loud(params, grads):
        print("loud")
        return made.odd(params, grads)

    made.raises, made.raising, made.loud = raises, lambda params, grads: raises(), loud
    made.broken = factory
    monkeypatch.setitem(sys.modules, "mine", made)


@pytest.mark.parametrize(
    ("name", "said"),
    marked(
        [("step", "lr=0.5"), ("factory", "momentum=0.9"), ("pair", "lr=0.25"), ("of", "lr=0.125")],
        lambda name, said: name == "pair",
    ),
)
def test_the_command_takes_what_gives_an_optimizer(module, capsys, name, said):
    assert cli.main(["diagnose", f"mine:{name}", "--depth", "1"]) == 0
    out = capsys.readouterr().out
    assert "follows SGD as documented" in out
    assert said in out


def test_the_command_writes_and_its_status_tells(module, capsys, tmp_path):
    paths = [str(tmp_path / "x.html"), str(tmp_path / "x.json")]
    given = ["diagnose", "mine:odd", "--depth", "0", "--steps", "3", "--html", paths[0], "--json", paths[1]]
    assert cli.main(given) == 1
    assert "follows no rule" in capsys.readouterr().out
    assert json.loads((tmp_path / "x.json").read_text("utf-8"))["explained"] is False
    assert (tmp_path / "x.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    record(tmp_path / "run.json", sgd())
    assert cli.main(["diagnose", str(tmp_path / "run.json"), "--known", "lr=0.1"]) == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["nothing"], "must be MODULE:NAME or a recorded trajectory"),
        (["missing.json"], "does not exist"),
        (["mine:nothing"], "cannot be imported"),
        (["no_such_module:x"], "cannot be imported"),
        (["mine:step", "--known", "lr"], "NAME=VALUE"),
        (["mine:step", "--known", "lr=None"], "`known` must be"),
        (["mine:step", "--known", "lrr=0.1"], "did you mean `lr`?"),
        (["mine:step", "--seconds", "-1"], "must be a number of at least 0"),
        (["mine:broken"], "diagnose: raised by mine:broken: RuntimeError: out of coffee"),
        (["mine:raising"], "in step 0: RuntimeError: out of coffee"),
    ],
)
def test_mistakes_are_one_line_and_status_2(module, capsys, given, words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["diagnose", *given])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_what_the_subject_prints_and_the_progress_go_elsewhere(module, capsys, monkeypatch):
    given = ["diagnose", "mine:loud", "--depth", "0", "--steps", "2", "--seconds", "0"]
    assert cli.main(given) == 1
    out, err = capsys.readouterr()
    assert "loud\n" in err
    assert "tried" not in err
    assert "loud\n" not in out
    assert "the time was over" in out
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(given) == 1
    assert "0 s, 1 tried, now " in capsys.readouterr().err


def test_help_is_there(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(["diagnose", "--help"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for word in ("--known", "--steps", "--seconds", "--html", "--json", "exit status", "MODULE:NAME"):
        assert word in out
