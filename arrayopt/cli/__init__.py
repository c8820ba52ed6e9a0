"""The command line: ``python -m arrayopt COMMAND``.

Each command is a module of this package. Its function `add` adds the command's parser. Its function `run` does the work
and returns the exit status. Optional packages are imported only in `run`.
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
        The exit status: 0; 1 if ``verify`` found a difference, or ``diagnose`` no rule that is followed as documented;
        130 if the user interrupted it; 141 if the output was closed. Wrong arguments, missing packages or devices, and
        an optimizer that raises an error in ``diagnose`` end the process with a line on stderr and status 2.
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
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class _Parser(argparse.ArgumentParser):
    """A parser that prints an error as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
