"""The command line: ``python -m arrayopt COMMAND``.

Each command is a function here that adds its parser and names, as ``run``, the function that does the work. Nothing
optional is imported before that function is called.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import arrayopt as ao

__all__ = ["main"]

FIGURES = (".png", ".pdf", ".svg")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Without the program's name; by default those of the process.

    Returns
    -------
    int
        0, or 130 where the user broke off. Wrong arguments, and things that are missing, end the process with a line on
        stderr and status 2.
    """
    parser = _Parser(prog="arrayopt", description="Large-batch optimizers for arrays of any array-API library.")
    parser.add_argument("--version", action="version", version=f"arrayopt {ao.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped\n")
        return 130
    return 0


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _add_demo(commands: Any) -> None:
    from arrayopt.demo.digits import BACKENDS, CONTENDERS

    demo = commands.add_parser(
        "demo",
        help="train a small network with several rules and compare them",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train a small network on scikit-learn's scanned digits, once with each rule:\n"
        "same initial weights, same batches, same number of steps. Prints a table and\n"
        "draws loss, accuracy and trust ratios. Takes seconds, and downloads nothing.",
        epilog="examples:\n  arrayopt demo --rules lamb,adamw --steps 600\n  arrayopt demo --backend cupy",
    )
    demo.add_argument(
        "--backend", choices=BACKENDS, default="numpy", help="array library; cupy needs a GPU (default: %(default)s)"
    )
    demo.add_argument(
        "--rules",
        type=_rules,
        default=tuple(CONTENDERS),
        metavar="RULE,...",
        help=f"rules to compare, of {', '.join(CONTENDERS)} (default: all)",
    )
    demo.add_argument(
        "--steps", type=_positive, default=300, metavar="N", help="updates of each rule (default: %(default)s)"
    )
    demo.add_argument(
        "--batch", type=_positive, default=512, metavar="N", help="images per update (default: %(default)s)"
    )
    demo.add_argument(
        "--seed", type=_natural, default=0, metavar="N", help="of initial weights and batches (default: %(default)s)"
    )
    demo.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="of parameters and gradients; float16 with masters and a dynamic loss scale (default: %(default)s)",
    )
    demo.add_argument(
        "--output",
        type=_figure_path,
        default=Path("arrayopt-demo.png"),
        metavar="PATH",
        help=f"figure: {', '.join(FIGURES)} (default: %(default)s)",
    )
    demo.set_defaults(run=_run_demo, parser=demo)


def _run_demo(given: argparse.Namespace) -> None:
    from arrayopt.demo import digits

    try:
        for module in ("sklearn", "matplotlib", "rich"):
            importlib.import_module(module)
    except ImportError as error:
        given.parser.error(f"{error}; the demo needs scikit-learn, matplotlib and rich: pip install 'arrayopt[demo]'")
    from arrayopt.demo import report

    data = digits.load()
    if given.batch > len(data.train_x):
        given.parser.error(
            f"argument --batch: must be at most {len(data.train_x)}, the training images; got {given.batch}"
        )
    try:
        backend = digits.open_backend(given.backend)
    except digits.UnavailableError as error:
        given.parser.error(str(error))
    report.show(given.rules, data, backend, given.steps, given.batch, given.seed, given.output, dtype=given.dtype)


def _rules(text: str) -> tuple[str, ...]:
    """Names of rules from ``lamb,sgd``, in any case."""
    from arrayopt.demo.digits import CONTENDERS

    known = {name.lower(): name for name in CONTENDERS}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name.lower() not in known]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"must name rules of {', '.join(CONTENDERS)}; got {', '.join(unknown) or repr(text)}"
        )
    return tuple(dict.fromkeys(known[name.lower()] for name in names))


def _positive(text: str) -> int:
    return _integer(text, least=1)


def _natural(text: str) -> int:
    return _integer(text, least=0)


def _integer(text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}; got {text!r}")
    return value


def _figure_path(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in FIGURES:
        raise argparse.ArgumentTypeError(f"must end in {', '.join(FIGURES)}; got {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"directory {str(path.parent)!r} does not exist")
    return path


COMMANDS = (_add_demo,)
