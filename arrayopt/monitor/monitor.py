"""`Monitor` records trust ratios, norms and learning rates of each layer, and reads, writes and draws them."""

import csv
import json
import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Never

from arrayopt.arrays import Array
from arrayopt.engines.layers import stack_of
from arrayopt.foreign import check_names
from arrayopt.hyper import listed, whole
from arrayopt.monitor.files import replacing_text
from arrayopt.monitor.record import Record, quantities_of, rates_of
from arrayopt.optimizer import Optimizer
from arrayopt.saving.paths import checked_path, refuse_others


class Monitor:
    """Records the statistics of each tensor at some steps of an optimizer.

    Parameters
    ----------
    opt : Optimizer
        The optimizer to watch. It does not need ``stats=True``: statistics are collected only at the chosen steps, and
        `Optimizer.stats` is the same as without a monitor.
    every : int, default 1
        Record one step in `every`, starting with the first. At least 1.
    steps : callable, optional
        Instead of `every`: ``steps(step)`` says whether to record a step. Steps count from 0.
    keep : int, optional
        How many steps to keep, at least 1; the oldest are dropped. By default all.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described above.

    Notes
    -----
    The optimizer holds no reference to the monitor. If you keep none either, the recording ends.

    A recorded step leaves a few 0-d arrays for each tensor on the parameters' device. Nothing waits for the device
    until you call `read`, `series`, `send`, `to_csv`, `to_jsonl` or `plot`.

    The quantities are ``lr``, ``param_norm``, ``grad_norm``, ``update_norm``, ``trust_ratio`` and other values that the
    rule reports (see `Optimizer.stats`), and ``update_ratio``, which is update_norm / param_norm: NaN if both are zero,
    infinite if only param_norm is zero. A quantity that a tensor does not have is left out.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> opt = ao.Optimizer({"w": np.ones((2, 2)), "b": np.zeros(2)}, ao.LAMB(lr=0.1))
    >>> monitor = ao.Monitor(opt, every=2)
    >>> for _ in range(4):
    ...     params = opt.step({"w": np.ones((2, 2)), "b": np.ones(2)})
    >>> [(row["step"], row["tensor"], round(row["update_ratio"], 2)) for row in monitor.read()]
    [(0, 'w', 0.1), (0, 'b', inf), (2, 'w', 0.1), (2, 'b', 0.1)]
    """

    def __init__(
        self,
        opt: Optimizer,
        *,
        every: int = 1,
        steps: Callable[[int], bool] | None = None,
        keep: int | None = None,
        **kwargs: Never,
    ) -> None:
        check_names("Monitor", ["every", "steps", "keep"], kwargs, {})
        if not isinstance(opt, Optimizer):
            inner = "; pass opt.inner" if isinstance(getattr(opt, "inner", None), Optimizer) else ""
            raise TypeError(f"Monitor: `opt` must be an Optimizer; got {type(opt).__name__}{inner}")
        if steps is not None and not callable(steps):
            raise TypeError(f"Monitor: `steps` must be a function of the step; got {steps!r}")
        self._every = whole("Monitor: `every`", every, first=1)
        self._steps = steps
        most = None if keep is None else min(whole("Monitor: `keep`", keep, first=1), sys.maxsize)
        self._records: deque[Record] = deque(maxlen=most)
        self._unsent: deque[Record] = deque(maxlen=self._records.maxlen)
        self._coming: Any = None  # the step to record: its number, groups and tensor names
        self._streams = opt._run.streams
        self._remove = opt.before_step(_Watching(self))

    def close(self) -> None:
        """Stop recording. The records are kept."""
        self._remove()
        self._coming = None

    def __len__(self) -> int:
        """The number of recorded steps."""
        return len(self._records)

    # ---- while training ---------------------------------------------------------------------------------------------

    def before(self, opt: Optimizer) -> None:
        """Request the reports of this step, if it is to be recorded."""
        step, self._coming, self._streams = opt.step_count, None, opt._run.streams
        if self._steps(step) if self._steps is not None else step % self._every == 0:
            self._coming = step, opt.groups, {name: i for i, name in enumerate(opt.state)}
            opt.stats.request(self._keep)

    def _keep(self, reports: Mapping[str, Mapping[str, Array]]) -> None:
        """Record the reports of a step with its learning rates."""
        if self._coming is None:  # `close` was called after the request, for example between micro-steps
            return
        (step, groups, names), self._coming = self._coming, None
        rates = {name: rate for group in groups for name, rate in rates_of(group, step)}
        tensor_of = {name: name if name in names else stack_of(name) for name in reports}
        ordered = sorted(reports, key=lambda name: names[tensor_of[name]])
        kept = {name: {**rates.get(tensor_of[name], {}), **reports[name]} for name in ordered}
        record = Record(step, kept)
        self._records.append(record)
        self._unsent.append(record)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read(self) -> list[dict[str, Any]]:
        """Return the records as plain values. This waits for the device.

        Returns
        -------
        list of dict
            A row for each step and tensor, in that order: ``step``, which counts from 0, ``tensor``, and the quantities
            as floats.
        """
        self._streams.meet("Monitor.read")
        return [
            {"step": record.step, "tensor": name, **x} for record in self._records for name, x in record.read().items()
        ]

    def series(self, quantity: str) -> dict[str, tuple[list[int], list[float]]]:
        """Return one quantity of each tensor over the steps. This waits for the device.

        Parameters
        ----------
        quantity : str
            The name of a quantity, such as ``"trust_ratio"``.

        Returns
        -------
        dict of str to (list of int, list of float)
            For each tensor name, the steps and the values.

        Raises
        ------
        TypeError, ValueError
            If `quantity` is not a string, or no tensor has it.
        """
        if not isinstance(quantity, str):
            raise TypeError(f"Monitor: a quantity must be a string; got {quantity!r}")
        rows = self.read()
        found: dict[str, tuple[list[int], list[float]]] = {}
        for row in rows:
            if quantity in row:
                steps, values = found.setdefault(row["tensor"], ([], []))
                steps.append(row["step"])
                values.append(row[quantity])
        if not found or quantity in ("step", "tensor"):
            raise ValueError(
                f"Monitor: there is no quantity {quantity!r}; there are {', '.join(quantities_of(rows)) or 'none'}"
            )
        return found

    # ---- writing, sending and drawing -------------------------------------------------------------------------------

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the records as a table: step, tensor and a column for each quantity, empty if there is no value.

        Parameters
        ----------
        path : path-like
            The file, which is replaced. Numbers can be read back without loss; ``nan`` and ``inf`` are written as such.

        Raises
        ------
        TypeError, ValueError, OSError
            If `path` is no path, is not that of a regular file, or cannot be written. An existing file is then
            unchanged.
        """
        path, rows = checked_path("Monitor.to_csv", path), self.read()
        with replacing_text("Monitor.to_csv", path, newline="") as file:
            writer = csv.DictWriter(file, ["step", "tensor", *quantities_of(rows)])
            writer.writeheader()
            writer.writerows(rows)

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write the records as JSON: one object in each line, for each row of `read`.

        Parameters
        ----------
        path : path-like
            The file, which is replaced. Values that are not finite are null, because JSON has no such numbers.

        Raises
        ------
        TypeError, ValueError, OSError
            If `path` is no path, is not that of a regular file, or cannot be written. An existing file is then
            unchanged.
        """
        path, rows = checked_path("Monitor.to_jsonl", path), self.read()
        with replacing_text("Monitor.to_jsonl", path) as file:
            for row in rows:
                finite = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in row.items()}
                file.write(json.dumps(finite, allow_nan=False) + "\n")

    def send(self, sink: Callable[[int, dict[str, float]], object]) -> None:
        """Send the records that were not sent before to a logger. This waits for the device.

        Parameters
        ----------
        sink : callable
            Called as ``sink(step, {"layer/trust_ratio": value, ...})``, with the tensor's name for ``layer``.

        Raises
        ------
        TypeError
            If `sink` is not a function.
        """
        if not callable(sink):
            raise TypeError(f"Monitor.send: `sink` must be a function; got {sink!r}")
        self._streams.meet("Monitor.send")
        while self._unsent:
            record = self._unsent[0]
            reports = record.read().items()
            sink(record.step, {f"{name}/{key}": value for name, x in reports for key, value in x.items()})
            self._unsent.popleft()

    def plot(self, quantities: str | Iterable[str] | None = None, *, path: Any = None) -> Any:
        """Draw a heat map of each quantity, with layers as rows and steps as columns. This waits for the device.

        Parameters
        ----------
        quantities : str or iterable of str, optional
            The quantities to draw; by default all.
        path : path-like, optional
            The file to save the figure to. Its suffix determines the format.

        Returns
        -------
        matplotlib.figure.Figure
            The figure. Colours are logarithmic if values are positive and span more than a factor of ten.

        Raises
        ------
        ImportError
            If Matplotlib is missing.
        TypeError, ValueError
            If there are no values of a quantity, or a name or the path is not valid.
        """
        from arrayopt.monitor.figure import heat_maps

        if path is not None:
            path = checked_path("Monitor.plot", path)
            refuse_others("Monitor.plot", path)
        given = quantities_of(self.read()) if quantities is None else quantities
        chosen = [given] if isinstance(given, str) else listed("Monitor.plot: `quantities`", given)
        if not chosen:
            raise ValueError("Monitor.plot: no step has been recorded yet")
        figure = heat_maps({name: self.series(name) for name in chosen})
        if path is not None:
            figure.savefig(path)
        return figure


class _Watching:
    """A hook of the optimizer with a weak reference to its monitor, so that the optimizer does not keep this alive."""

    def __init__(self, monitor: Monitor) -> None:
        self.__setstate__((monitor,))

    def __call__(self, opt: Optimizer, grads: Any) -> None:
        monitor = self._monitor()
        if monitor is not None:
            monitor.before(opt)

    def __getstate__(self) -> tuple[Monitor | None]:
        return (self._monitor(),)

    def __setstate__(self, state: tuple[Monitor | None]) -> None:
        self._monitor: Callable[[], Monitor | None] = _nobody if state[0] is None else weakref.ref(state[0])


def _nobody() -> None:
    """Return None, in place of a monitor that was deleted."""
