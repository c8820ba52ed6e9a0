"""``arrayopt diagnose``: find out which rule an optimizer follows."""

import argparse
import contextlib
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from arrayopt.cli.arguments import amount, assignment, from_module, natural, output_path, positive


def add(commands: Any) -> None:
    """Add the parser of the command."""
    diagnose = commands.add_parser(
        "diagnose",
        help="find out which rule an optimizer follows, and where it differs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run an optimizer on chosen gradients, and tell which rule, switches and\n"
        "hyper-parameters it follows, and to how many ULPs; or the nearest.",
        epilog="exit status: 0 for a rule as documented, 1 for anything else,\n"
        "2 for wrong arguments and where the optimizer raises\n\n"
        "examples:\n  arrayopt diagnose mymodule:make_optimizer --html report.html\n"
        "  arrayopt diagnose mymodule:step --known lr=0.01\n"
        "  arrayopt diagnose recorded.json",
    )
    diagnose.add_argument(
        "what",
        metavar="MODULE:NAME",
        help="a function that gives an optimizer, or a pair of it and its parameters, and takes nothing or the"
        " parameters; an optimizer; step(params, grads) itself; or the path of a recorded trajectory, *.json",
    )
    diagnose.add_argument("--steps", type=positive, default=12, metavar="N", help="updates (default: %(default)s)")
    diagnose.add_argument(
        "--known", type=assignment, action="append", default=[], metavar="NAME=VALUE", help="a known hyper-parameter"
    )
    diagnose.add_argument(
        "--depth", type=natural, default=3, metavar="N", help="changes tried at once (default: %(default)s)"
    )
    diagnose.add_argument(
        "--seconds",
        type=amount,
        metavar="S",
        help="how long to search; then the nearest so far is told (default: to the end)",
    )
    diagnose.add_argument("--json", type=output_path(".json"), metavar="PATH", help="write everything as JSON")
    diagnose.add_argument("--html", type=output_path(".html", ".htm"), metavar="PATH", help="write a page to look at")
    diagnose.set_defaults(run=run, parser=diagnose)


def run(given: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    from arrayopt.testing.diagnosis import diagnose

    try:
        with contextlib.redirect_stdout(sys.stderr), _progress() as on_try:  # stdout is for the diagnosis
            step, params = _subject(given.what)
            known = dict(given.known)
            options = {"steps": given.steps, "depth": given.depth, "seconds": given.seconds}
            found = diagnose(step, params, known=known, **options, on_try=on_try)
    except Exception as error:
        notes, mistakes = getattr(error, "__notes__", []), (ImportError, OSError, TypeError, ValueError)
        if not notes and not isinstance(error, (argparse.ArgumentTypeError, *mistakes)):
            raise
        raised = [*notes, type(error).__name__] if notes else []
        given.parser.error(" ".join(": ".join([*raised, str(error)]).split()))
    print(found)  # noqa: T201 - the output of the command
    if given.json:
        given.json.write_text(found.to_json(), encoding="utf-8")
    if given.html:
        found.to_html(given.html)
    return 0 if found.as_documented else 1


def _subject(text: str) -> tuple[Any, Any]:
    """Return what to diagnose, and its parameters or None."""
    from arrayopt.testing.diagnosis import Trajectory
    from arrayopt.testing.diagnosis.trajectory import parameters

    if text.endswith(".json"):
        if not Path(text).is_file():
            raise argparse.ArgumentTypeError(f"file {text!r} does not exist")
        return Trajectory.load(text), None
    if ":" not in text:
        raise argparse.ArgumentTypeError(f"must be MODULE:NAME or a recorded trajectory; got {text!r}")
    with _raised_by(text):
        made, params = from_module(text), None
    if inspect.isfunction(made):
        needed = [x for x in inspect.signature(made).parameters.values() if x.default is inspect.Parameter.empty]
        if len(needed) == 1:
            params = parameters()
        if len(needed) < 2:
            with _raised_by(text):
                made = made() if params is None else made(params)
    if isinstance(made, tuple) and len(made) == 2 and not hasattr(made, "init"):
        made, params = made
    owner = hasattr(made, "param_groups") or hasattr(made, "step_count")
    return made, None if owner else params


@contextlib.contextmanager
def _raised_by(what: str) -> Iterator[None]:
    """Add a note with the source to errors that the user's code raises in a block."""
    try:
        yield
    except argparse.ArgumentTypeError:
        raise
    except Exception as error:
        error.add_note(f"diagnose: raised by {what}")
        raise


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Any], object]]:
    """Yield a function to call with each hypothesis. It shows the progress on a terminal."""
    if not sys.stderr.isatty():
        yield lambda hypothesis: None
        return
    tried, begun = 0, time.monotonic()

    def show(hypothesis: Any) -> None:
        nonlocal tried
        tried += 1
        said = f"{time.monotonic() - begun:.0f} s, {tried} tried, now {hypothesis.kind.__name__}"
        sys.stderr.write(f"\r{said:<60}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write(f"\r{'':<60}\r" if tried else "")
