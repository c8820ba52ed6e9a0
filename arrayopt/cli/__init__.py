"""The command line: ``python -m arrayopt COMMAND``.

Each command is a module here with a function `add`, which adds its parser and names, as ``run``, the function that does
the work and returns the exit status. Nothing optional is imported before that function is called.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import arrayopt as ao
from arrayopt.cli import demo, diagnose, explain, info, verify

__all__ = ["main"]

COMMANDS = (demo, verify, diagnose, info, explain)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Without the program's name; by default those of the process.

    Returns
    -------
    int
        0; 1 where ``verify`` found a difference, or ``diagnose`` no rule that is followed as documented; 130 where the
        user broke off, 141 where nobody reads the output any more. Wrong arguments, things that are missing, and
        an optimizer that raises in ``diagnose`` end the process with a line on stderr and status 2.
    """
    parser = _Parser(prog="arrayopt", description="Large-batch optimizers for arrays of any array-API library.")
    parser.add_argument("--version", action="version", version=f"arrayopt {ao.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    given = parser.parse_args(arguments)
    try:
        status = int(given.run(given))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped\n")
        return 130
    except BrokenPipeError:  # whoever read has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
