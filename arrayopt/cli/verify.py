"""``arrayopt verify``: compare rules on all backends, for people and for continuous integration."""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from arrayopt.arrays import WORKING
from arrayopt.cli.arguments import amount, listed, make_rule, named, natural, output_path, positive, rule_class, shape
from arrayopt.cli.info import versions


def add(commands: Any) -> None:
    """Add the parser of the command."""
    verify = commands.add_parser(
        "verify",
        help="compare rules on all engines and array libraries that are installed",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run rules on all backends with the same parameters and gradients, and say how\n"
        "far each comes from the rule as it is written, run by NumPy, in ULPs of the\n"
        "update. A backend is library:engine, such as numpy:numba; a library's or an\n"
        "engine's name alone stands for all that have it.",
        epilog="exit status: 0 within the limit, 1 beyond it, 2 for wrong arguments\n\n"
        "examples:\n  arrayopt verify --html report.html\n"
        "  arrayopt verify --rules LAMB,mymodule:MyRule --backends numba,torch",
    )
    verify.add_argument(
        "--rules", type=listed(str), metavar="RULE,...", help="names, or yours as module:Class (default: all)"
    )
    verify.add_argument(
        "--backends", "--engines", type=listed(str), metavar="NAME,...", help="default: all that are installed"
    )
    verify.add_argument(
        "--dtypes",
        type=listed(named(list(WORKING))),
        default=("float32", "float64"),
        metavar="DTYPE,...",
        help="of parameters (default: float32,float64)",
    )
    verify.add_argument(
        "--shapes",
        type=listed(shape),
        metavar="SHAPE,...",
        help="such as 64x33,1000,scalar (default: some of each kind)",
    )
    verify.add_argument("--steps", type=positive, default=10, metavar="N", help="updates (default: %(default)s)")
    verify.add_argument(
        "--seed", type=natural, default=0, metavar="N", help="of parameters and gradients (default: %(default)s)"
    )
    verify.add_argument(
        "--max-ulp", type=amount, metavar="X", help="the limit (default: 64, and 4 for float16 and bfloat16)"
    )
    verify.add_argument("--json", type=output_path(".json"), metavar="PATH", help="write everything as JSON")
    verify.add_argument("--html", type=output_path(".html", ".htm"), metavar="PATH", help="write a page to look at")
    verify.set_defaults(run=run, parser=verify)


def run(given: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    try:
        from rich.console import Console
    except ImportError as error:
        given.parser.error(f"{error}; verify needs rich: pip install 'arrayopt[verify]'")
    os.environ.setdefault("JAX_ENABLE_X64", "1")  # JAX reads it when it is imported, and has no float64 without it
    from arrayopt.libraries import UnavailableError
    from arrayopt.testing import backends as known
    from arrayopt.testing import report, verify

    try:
        rules = verify.RULES | verify.STORED if given.rules is None else dict(map(_rule, given.rules))
        backends = known.choose(given.backends)
        shapes = verify.SHAPES if given.shapes is None else given.shapes
        settings = verify.Settings(shapes, given.dtypes, given.steps, given.seed, given.max_ulp)
        console = Console(highlight=False)
        with _progress(console, len(rules) * len(given.dtypes)) as on_row:
            found = verify.verify(rules, backends, settings, versions=versions(), on_row=on_row)
    except (argparse.ArgumentTypeError, TypeError, ValueError, UnavailableError) as error:
        given.parser.error(" ".join(str(error).split()))
    if found.passed and not found.differences:
        skipped = [x.skipped for row in found.rows for x in row.outcomes.values()]
        why = skipped or ["name more backends" if found.rows else "these rules do not support complex parameters"]
        given.parser.error(f"there is nothing to compare: {why[0]}")
    report.show(found, console)
    if given.json:
        given.json.write_text(found.to_json(), encoding="utf-8")
    if given.html:
        given.html.write_text(report.page(found), encoding="utf-8")
    return 0 if found.passed else 1


def _rule(text: str) -> tuple[str, Any]:
    """Return the name of a rule, and the rule."""
    from arrayopt.testing.verify import RULES, STORED

    if text in STORED:
        return text, STORED[text]
    kind = rule_class(text)
    return kind.__name__, RULES[kind.__name__] if ":" not in text else make_rule(kind, {})


@contextmanager
def _progress(console: Any, total: int) -> Iterator[Callable[[Any], object]]:
    """Yield a function to call after each row. It shows the progress on a terminal."""
    if not console.is_terminal:
        yield lambda row: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("comparing", total=total)
        yield lambda row: bar.update(task, advance=1, description=f"{row.rule} {row.dtype}")
