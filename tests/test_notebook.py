"""What a notebook shows: tables of optimizers and results, and the figure of a monitor."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest

import arrayopt as ao

NOTEBOOK = Path(__file__).parents[1] / "docs" / "examples" / "layers.ipynb"


def square(x):
    return (x**2).sum(), 2 * x


def test_objects_are_shown_as_tables():
    opt = ao.Optimizer({"w<0>": np.ones(3), "b": np.ones(2)}, ao.LAMB(), groups={"b": {"lr": 0.1}}, stats=True)
    opt.step({"w<0>": np.ones(3), "b": None})
    assert "<td>3</td><td>LAMB(" in opt._repr_html_()
    assert "step 1" in opt._repr_html_()
    assert "w&lt;0&gt;" in opt.stats._repr_html_()
    assert "<th>trust_ratio</th>" in opt.stats._repr_html_()
    assert opt.explain()._repr_html_().startswith("<pre>")
    assert "stats=True" in ao.Optimizer(np.ones(3), ao.LAMB()).stats._repr_html_()
    assert "<td>True</td>" in ao.minimize(square, np.ones(3))._repr_html_()


def test_minimize_has_a_bar_on_a_terminal_alone(capsys, monkeypatch):
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    console = pytest.importorskip("rich.console", reason="the bar is rich's")
    seen = []
    found = ao.minimize(square, np.ones(3), progress=True, callback=lambda result: seen.append(result.evaluations))
    assert found.converged
    assert seen
    assert capsys.readouterr() == ("", "")
    shown = io.StringIO()
    terminal = console.Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr(console, "Console", lambda **given: terminal)
    for x, stacked, words in ((np.ones(3), False, "value "), (np.ones((2, 3)), True, "2 of 2 converged")):
        ao.minimize(lambda x: ((x**2).sum(-1), 2 * x), x, stacked=stacked, progress=True)
        assert words in shown.getvalue()


def test_a_bar_without_rich_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match="pip install rich"):
        ao.minimize(square, np.ones(3), progress=True)
    with pytest.raises(TypeError, match="`progress` must be True or False"):
        ao.minimize(square, np.ones(3), progress=1)


def test_the_notebook_runs_and_shows_tables_and_a_figure():
    nbclient = pytest.importorskip("nbclient", reason="not installed")
    nbformat = pytest.importorskip("nbformat", reason="not installed")
    pytest.importorskip("ipykernel", reason="not installed")
    pytest.importorskip("matplotlib", reason="not installed")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120).execute()
    shown = [[kind for output in cell.outputs for kind in output.get("data", ())] for cell in notebook.cells[1:]]
    assert ["text/html" in kinds for kinds in shown] == [True, True, True, False, True]
    assert "image/png" in shown[3]
