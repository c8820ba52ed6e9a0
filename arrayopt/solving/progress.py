"""The progress bar of `minimize`: on a terminal or in a notebook, and nowhere else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from arrayopt.arrays import to_host
from arrayopt.solving.result import Result

__all__ = ["progress"]


@contextmanager
def progress(total: int, call: Callable[[Result], Any] | None = None) -> Iterator[Any]:
    """Show a bar of `total` steps; yield what to call with each `Result`, which then calls `call`."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError as error:
        raise ImportError(
            "minimize: `progress` needs rich; install it with `pip install rich`"
        ) from error
    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield call
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("minimize", total=total)

        def show(result: Result) -> None:
            if isinstance(result.value, float):
                words = f"value {result.value:.6g}"
            else:
                converged = to_host(result.converged)
                words = f"{converged.sum()} of {converged.size} converged"
            steps = int(to_host(result.steps).max(initial=0))
            bar.update(task, completed=steps, description=words)
            if call is not None:
                call(result)

        yield show
