"""A user's program passes strict type checkers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_a_user_program_is_well_typed(checker, tmp_path):
    pytest.importorskip(checker, reason="not installed")
    program = shutil.copy(ROOT / "tests" / "user_program.py", tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "standard", "extraPaths": [str(ROOT)], "pythonVersion": "3.11"})
    )
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\n[mypy-arrayopt.*]\nignore_errors = True\n[mypy-optax]\nignore_missing_imports = True\n"
    )
    options = {
        "mypy": ["--no-incremental", "--config-file", str(tmp_path / "mypy.ini")],
        "basedpyright": ["--pythonpath", sys.executable, "--project", str(tmp_path)],
    }
    ran = subprocess.run(
        [sys.executable, "-m", checker, *options[checker], program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
