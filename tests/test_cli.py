"""The command line: help reads well, mistakes are one line and status 2, nothing optional is imported early."""

import subprocess
import sys
import types

import pytest

import arrayopt as ao
from arrayopt import cli


def fails(arguments, capsys):
    """The only line that a failing command prints."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert "error: " in err
    return err


def test_help_names_commands_and_options(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for arguments, words in (
        (["--help"], ["demo", "--version"]),
        (
            ["demo", "--help"],
            ["--backend", "cupy", "--rules", "LAMB", "--steps", "--batch", "--seed", "--output", "default"],
        ),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        out, err = capsys.readouterr()
        assert stopped.value.code == 0
        assert err == ""
        for word in words:
            assert word in out
        assert max(map(len, out.splitlines())) <= 80


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"arrayopt {ao.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["demo", "--backend", "abacus"], "abacus"),
        (["demo", "--rules", "lamb,lamp"], "got lamp"),
        (["demo", "--rules", ","], "must name rules"),
        (["demo", "--steps", "0"], "'0'"),
        (["demo", "--batch", "many"], "'many'"),
        (["demo", "--seed", "-1"], "'-1'"),
        (["demo", "--output", "figure.doc"], "must end in .png"),
        (["demo", "--output", "no/such/directory/figure.png"], "does not exist"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(arguments, said, capsys):
    assert said in fails(arguments, capsys)


def test_a_batch_larger_than_the_data_is_refused(capsys):
    for library in ("sklearn", "matplotlib", "rich"):
        pytest.importorskip(library, reason="needed to come as far as the data")
    assert "at most 1347" in fails(["demo", "--batch", "2000"], capsys)


@pytest.mark.parametrize("missing", ["sklearn", "matplotlib", "rich"])
def test_a_missing_package_names_the_extra(missing, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    said = fails(["demo"], capsys)
    assert "arrayopt[demo]" in said


def test_a_missing_backend_is_said_in_one_line(capsys, monkeypatch):
    for library in ("sklearn", "matplotlib", "rich"):
        pytest.importorskip(library, reason="needed to come as far as the backend")
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "array_api_compat.cupy", raising=False)
    said = fails(["demo", "--backend", "cupy"], capsys)
    assert "backend cupy" in said
    assert "arrayopt[cuda" in said


def test_a_backend_that_imports_but_cannot_compute_is_said_in_one_line(capsys, monkeypatch):
    for library in ("sklearn", "matplotlib", "rich"):
        pytest.importorskip(library, reason="needed to come as far as the backend")

    def no_device(*args, **kwargs):
        raise RuntimeError("\n=====\nno CUDA-capable device is detected\nand more\n")

    library = types.SimpleNamespace(zeros=no_device, sum=sum)
    monkeypatch.setitem(sys.modules, "array_api_compat.cupy", library)
    said = fails(["demo", "--backend", "cupy"], capsys)
    assert "cannot be used: no CUDA-capable device is detected; it needs" in said


def test_rules_are_found_in_any_case_and_once():
    assert cli._rules("lamb, ADAMW,lamb") == ("LAMB", "AdamW")


def test_breaking_off_is_no_traceback(capsys, monkeypatch):
    def broken_off(given):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run_demo", broken_off)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "\nstopped\n"


def test_nothing_optional_is_imported_before_a_command_runs():
    code = (
        "import sys, contextlib, io, arrayopt.cli\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    arrayopt.cli.main(['demo', '--help'])\n"
        "print([m for m in ('sklearn', 'matplotlib', 'rich', 'torch', 'cupy', 'numba') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "arrayopt", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"arrayopt {ao.__version__}\n"
