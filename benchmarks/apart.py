"""Tables that come from processes of their own: with other threads, other environment variables, or several ranks."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Timer

from benchmarks.results import Sheet, markdown

__all__ = ["run", "sheets", "tell"]

ROOT = Path(__file__).parents[1]
MARK = "sheet: "


def tell(sheet: Sheet, *, data: bool) -> None:
    """Print a table: as `data` for the process that started this one, or in Markdown for a reader."""
    if data:
        text = f"{MARK}{json.dumps(asdict(sheet))}"
    else:
        text = "\n\n".join(["", f"## {sheet.title}", markdown(sheet), *sheet.notes])
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(
    arguments: Sequence[str], env: Mapping[str, str] | None = None, launcher: Sequence[str] = (), seconds: float = 900.0
) -> Iterator[str]:
    """The lines that ``python -m ARGUMENTS`` prints, as they come.

    Raises
    ------
    RuntimeError
        If it fails or takes longer than `seconds`, with the last line of what it says.
    """
    command = [*launcher, sys.executable, "-m", *arguments]
    inherited = {name: x for name, x in os.environ.items() if name != "ARRAYOPT_NUM_THREADS"}
    env = {**inherited, **(env or {})}
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdout is not None
        timer = Timer(seconds, process.terminate)
        timer.start()
        try:
            yield from process.stdout
            process.wait()
        finally:
            timer.cancel()
            process.terminate()
        if process.returncode:
            said.seek(0)
            last = (said.read().strip() or f"exit status {process.returncode}").splitlines()[-1]
            raise RuntimeError(last)


def sheets(
    arguments: Sequence[str], env: Mapping[str, str] | None = None, launcher: Sequence[str] = ()
) -> Iterator[Sheet]:
    """The tables that such a process tells, as they come."""
    for line in run(arguments, env, launcher):
        if line.startswith(MARK):
            told = json.loads(line.removeprefix(MARK))
            lines = [tuple(cells) for cells in told["lines"]]
            yield Sheet(**told | {"columns": tuple(told["columns"]), "lines": lines, "notes": tuple(told["notes"])})
