"""Tables that come from processes of their own: with other threads, other environment variables, or several ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.results import Sheet

__all__ = ["run", "sheets", "tell"]

ROOT = Path(__file__).parents[1]
MARK = "sheet: "


def tell(sheet: Sheet, *, data: bool) -> None:
    """Print a table: as `data` for the process that started this one, or in Markdown for a reader."""
    if data:
        text = f"{MARK}{json.dumps(asdict(sheet))}"
    else:
        rule = "|".join("---" if i < sheet.names else "---:" for i in range(len(sheet.columns)))
        rows = [sheet.columns, *sheet.lines]
        cells = [f"| {' | '.join(row)} |" for row in rows]
        text = "\n".join([f"\n## {sheet.title}\n", cells[0], f"|{rule}|", *cells[1:]])
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(
    arguments: Sequence[str], env: Mapping[str, str] | None = None, launcher: Sequence[str] = (), seconds: float = 600.0
) -> str:
    """What ``python -m ARGUMENTS`` prints.

    Raises
    ------
    RuntimeError
        If it fails or takes too long, with the last line of what it says.
    """
    command = [*launcher, sys.executable, "-m", *arguments]
    inherited = {name: x for name, x in os.environ.items() if name != "ARRAYOPT_NUM_THREADS"}
    try:
        done = subprocess.run(
            command, env={**inherited, **(env or {})}, cwd=ROOT, capture_output=True, text=True, timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from error
    if done.returncode:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise RuntimeError(last)
    return done.stdout


def sheets(printed: str) -> list[Sheet]:
    """The tables that a process told."""
    made = []
    for line in printed.splitlines():
        if line.startswith(MARK):
            told = json.loads(line.removeprefix(MARK))
            lines = [tuple(cells) for cells in told.pop("lines")]
            made.append(Sheet(**told | {"columns": tuple(told["columns"]), "lines": lines}))
    return made
