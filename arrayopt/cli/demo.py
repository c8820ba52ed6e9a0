"""``arrayopt demo``: train a small network with several rules and compare them."""

import argparse
import importlib
from pathlib import Path
from typing import Any

from arrayopt.cli.arguments import listed, named, natural, output_path, positive

FIGURES = (".png", ".pdf", ".svg")
SEEDS = 3


def add(commands: Any) -> None:
    """Add the parser of the command."""
    from arrayopt.demo.digits import BACKENDS, CONTENDERS, EPOCHS

    demo = commands.add_parser(
        "demo",
        help="train a small network with several rules and compare them",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train a small network on scikit-learn's scanned digits, with each rule, in small\n"
        "and large batches: same initial weights, same images, same number of epochs.\n"
        "Prints test accuracy, memory and time, and draws them. Takes seconds, and\n"
        "downloads nothing.",
        epilog="examples:\n  arrayopt demo --rules lamb,adamw --epochs 10\n  arrayopt demo --backend cupy",
    )
    demo.add_argument(
        "--backend", choices=BACKENDS, default="numpy", help="array library; cupy needs a GPU (default: %(default)s)"
    )
    demo.add_argument(
        "--rules",
        type=listed(named(list(CONTENDERS))),
        default=tuple(CONTENDERS),
        metavar="RULE,...",
        help=f"rules to compare, of {', '.join(CONTENDERS)} (default: all)",
    )
    demo.add_argument(
        "--epochs", type=positive, default=EPOCHS, metavar="N", help="passes over the images (default: %(default)s)"
    )
    demo.add_argument(
        "--seed",
        type=natural,
        default=0,
        metavar="N",
        help="the first of three, of weights and batches (default: %(default)s)",
    )
    demo.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="of parameters and gradients; float16 with masters and a dynamic loss scale (default: %(default)s)",
    )
    demo.add_argument(
        "--output",
        type=output_path(*FIGURES),
        default=Path("arrayopt-demo.png"),
        metavar="PATH",
        help=f"figure: {', '.join(FIGURES)} (default: %(default)s)",
    )
    demo.set_defaults(run=run, parser=demo)


def run(given: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    from arrayopt.demo import digits
    from arrayopt.libraries import UnavailableError, open_library

    try:
        for module in ("sklearn", "matplotlib", "rich"):
            importlib.import_module(module)
    except ImportError as error:
        given.parser.error(f"{error}; the demo needs scikit-learn, matplotlib and rich: pip install 'arrayopt[demo]'")
    from arrayopt.demo import report

    data = digits.load()
    try:
        backend = open_library(given.backend)
    except UnavailableError as error:
        given.parser.error(f"backend {error}")
    seeds = range(given.seed, given.seed + SEEDS)
    report.show(given.rules, data, backend, given.epochs, seeds, given.output, dtype=given.dtype)
    return 0
