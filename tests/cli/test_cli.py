"""The command line: help reads well, mistakes are one line and status 2, nothing optional is imported early."""

import subprocess
import sys
import types

import numpy as np
import pytest

import arrayopt as ao
from arrayopt import cli
from arrayopt.cli import arguments
from tests.support.engines import EVERY


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
    for given, words in (
        (["--help"], ["demo", "verify", "info", "explain", "--version"]),
        (["verify", "--help"], ["--rules", "--backends", "--engines", "--max-ulp", "--json", "--html", "exit status"]),
        (["explain", "--help"], ["--shapes", "--dtype", "--engine", "--set", "--source", "module:Class"]),
        (["info", "--help"], ["threads"]),
        (
            ["demo", "--help"],
            ["--backend", "cupy", "--rules", "LAMB", "--epochs", "--seed", "--output", "default"],
        ),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(given)
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
        (["demo", "--rules", ","], "must be one of LAMB"),
        (["demo", "--epochs", "0"], "'0'"),
        (["demo", "--seed", "-1"], "'-1'"),
        (["demo", "--output", "figure.doc"], "must end in .png"),
        (["demo", "--output", "no/such/directory/figure.png"], "does not exist"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(arguments, said, capsys):
    assert said in fails(arguments, capsys)


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


def test_names_are_found_in_any_case_and_once():
    assert arguments.listed(arguments.named(["LAMB", "AdamW"]))("lamb, ADAMW,lamb") == ("LAMB", "AdamW")


def test_breaking_off_is_no_traceback(capsys, monkeypatch):
    def broken_off(given):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.demo, "run", broken_off)
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


def test_a_reader_that_has_seen_enough_is_no_error():
    code = "import sys; from arrayopt.cli import main; sys.stdin.read(); sys.exit(main(['explain', 'LAMB']))"
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    run.stdout.close()
    run.stdin.close()
    with run.stderr:
        assert run.stderr.read() == b""
    assert run.wait() == 141


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "arrayopt", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"arrayopt {ao.__version__}\n"


# ---- info and explain ------------------------------------------------------------------------------------------------


def test_info_says_what_is_here(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "3")
    monkeypatch.setenv("ARRAYOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "array_api_strict", None)
    assert cli.main(["info"]) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: line for line in said.splitlines() if line}
    assert ao.__version__ in lines["arrayopt"]
    assert ", ".join(f"{engine} works" for engine in EVERY) in said
    assert "; 'auto' uses " in lines["numpy"]
    assert lines["C++"].startswith("C++ compiler      ")
    assert "engines: array_api works" in lines["jax"] or "engines: array_api works" in said
    assert "cannot be used" in lines["array_api_strict"]
    assert "pip install array-api-strict" in lines["array_api_strict"]
    assert lines["threads"].endswith("3, from ARRAYOPT_NUM_THREADS")
    assert str(tmp_path) in lines["compiled"]
    assert lines["compiled"].endswith("from ARRAYOPT_CACHE_DIR")


def test_info_says_what_does_not_work(capsys, monkeypatch):
    from arrayopt.engines.numba.engine import Numba

    def broken(self, bucket):
        raise OSError("no compiler\nhere")

    monkeypatch.setattr(Numba, "check", broken)
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "none")
    monkeypatch.delenv("ARRAYOPT_CACHE_DIR", raising=False)
    assert cli.main(["info"]) == 0
    said = capsys.readouterr().out
    assert "numpy does not work (ARRAYOPT_NUM_THREADS must be" in said
    assert "numba does not work (no compiler here)" in said
    assert "threads           ARRAYOPT_NUM_THREADS must be a positive integer; got 'none'" in said


def test_explain_says_what_an_optimizer_would(capsys):
    shapes = {"0": (96, 32), "1": (32,), "2": ()}
    opt = ao.Optimizer({k: np.zeros(x, np.float32) for k, x in shapes.items()}, ao.LAMB(weight_decay=0.1, adapt=False))
    arguments = ["explain", "lamb", "--shapes", "96x32,32,scalar", "--set", "weight_decay=0.1", "adapt=False"]
    assert cli.main(arguments) == 0
    steps, _, state = opt.explain().rpartition("\n")
    assert state == "state: 8 bytes per parameter"
    assert capsys.readouterr().out == f"{steps}\n"


def test_explain_says_why_a_slot_is_wide(capsys):
    assert cli.main(["explain", "CAME", "--shapes", "8x8,8", "--set", "lr=0.1", "state_dtype=int8"]) == 0
    assert "\n    keep their precision: r, c, ir, ic (not one value for each element)\n" in capsys.readouterr().out


@pytest.mark.parametrize("field", [{"stacked": True}, {"blocks": 4}, {"blocks": (4, 8)}], ids=str)
def test_explain_knows_layers_and_blocks(field, capsys):
    ((name, value),) = field.items()
    opt = ao.Optimizer({"0": np.zeros((12, 8), np.float32)}, ao.LAMB(**field))
    assert cli.main(["explain", "LAMB", "--shapes", "12x8", "--set", f"{name}={value}"]) == 0
    assert capsys.readouterr().out == f"{opt.explain().rpartition(chr(10))[0]}\n"


def test_explain_allocates_nothing_of_the_tensors_size(capsys):
    assert cli.main(["explain", "CAME", "--set", "lr=0.1", "--shapes", "1000000x1000000", "--dtype", "bfloat16"]) == 0
    assert "1 tensor, 1000000000000 parameters, bfloat16, numpy on cpu" in capsys.readouterr().out


def test_explain_shows_the_source_of_each_rank(capsys):
    assert cli.main(["explain", "SGD", "--shapes", "2x3,4x5,7", "--source"]) == 0
    said = capsys.readouterr().out
    for rank in (1, 2):
        assert said.count(ao.source(ao.SGD(lr=0.1), rank=rank).strip()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain"], "RULE"),
        (["explain", "LAMP"], "got LAMP"),
        (["explain", "LAMB", "--set", "wd=1"], "LAMB has no `wd`; pass weight_decay=1"),
        (["explain", "LAMB", "--set", "lr"], "must be NAME=VALUE"),
        (["explain", "LAMB", "--set", "lr=fast"], "`lr` must be a number"),
        (["explain", "LAMB", "--set", "beta1=2"], "`beta1` must be in [0, 1); got 2.0"),
        (["explain", "LAMB", "--dtype", "int8"], "int8"),
        (["explain", "LAMB", "--engine", "abacus"], "abacus"),
        (["explain", "LAMB", "--shapes", "3*4"], "must be a shape such as 768x3072"),
        (["explain", "LAMB", "--engine", "numpy", "--source"], "`engine` must be"),
    ],
)
def test_wrong_arguments_of_explain(arguments, said, capsys):
    assert said in fails(arguments, capsys)
