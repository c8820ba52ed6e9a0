"""`Stats`: the last step's reports of each tensor, such as trust ratio and norms."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from arrayopt.arrays import Array
from arrayopt.foreign import counted
from arrayopt.html import number, table
from arrayopt.hyper import checked_bool


class Stats(Mapping[str, Mapping[str, Array]]):
    """Reports of the last step by tensor name: ``opt.stats["w"]["trust_ratio"]``, as 0-d arrays on
    their device.

    Looking up an array does not wait for the device; `read` does. The keys of a report:

    - ``param_norm``, ‖p‖ before the step;
    - ``grad_norm``, ‖g‖ after the global clip, before centralization and clipping by value;
    - ``update_norm``, ‖p_new - p‖;
    - ``trust_ratio`` of LAMB, LANS and LARS (1.0 without `adapt`), ``trust_ratio_grad`` of LANS.

    Tensors without elements or gradient have no report. If a GPU skips a step, values are NaN.
    ``stats.skipped``, the number of skipped steps, and with `clip_norm`, a loss scale or
    `skip_nonfinite` ``stats.global_norm``, the global norm before clipping, need no ``stats=True``.
    """

    def __init__(self, skipped: Callable[[], Any], *, enabled: bool) -> None:
        checked_bool("Optimizer: `stats`", enabled)
        self.enabled = enabled
        self._norm: Any = None
        self._skipped = skipped
        self._reports: dict[str, dict[str, Array]] = {}
        self._last: dict[str, dict[str, Array]] = {}  # not delivered yet
        self._requests: list[Callable[[dict[str, dict[str, Array]]], object]] = []

    @property
    def wanted(self) -> bool:
        """Whether the next step must collect reports."""
        return self.enabled or self.requested

    @property
    def requested(self) -> bool:
        """Whether a function waits for the next step's reports."""
        return bool(self._requests)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_norm": self.global_norm}

    def request(self, receive: Callable[[dict[str, dict[str, Array]]], object]) -> None:
        """Call `receive` once with the next step's reports, even if stats are off."""
        if receive not in self._requests:  # a step may fail and be tried again
            self._requests.append(receive)

    @property
    def global_norm(self) -> Any:
        return self._norm() if callable(self._norm) else self._norm

    @property
    def skipped(self) -> Any:
        return self._skipped()

    def replace(self, reports: dict[str, dict[str, Array]], norm: Any) -> None:
        """Replace the reports by those of a new step.

        `norm` may be a function that reads the global norm from a device when it is needed.
        """
        self._norm = norm
        self._last = {name: report for name, report in reports.items() if report} if reports else {}
        if self.enabled:
            self._reports = self._last

    def deliver(self) -> None:
        """Call the functions that have requested the last step's reports."""
        reports, self._last = self._last, {}
        while self._requests:
            self._requests.pop(0)(reports)

    def read(self) -> dict[str, dict[str, float]]:
        """Return all reports as Python floats, by tensor name. This waits for the device.

        Raises
        ------
        RuntimeError
            If the Optimizer was made without ``stats=True``.
        """
        found = {}
        for name, report in self._all().items():
            found[name] = {key: float(x) for key, x in report.items()}
        return found

    def _all(self) -> dict[str, dict[str, Array]]:
        if not self.enabled:
            raise RuntimeError(
                "Optimizer.stats: nothing is recorded; make the Optimizer with stats=True"
            )
        return self._reports

    def __getitem__(self, name: str) -> Mapping[str, Array]:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _repr_html_(self) -> str:
        found = self.read() if self.enabled else {}
        names: dict[str, None] = {}
        for report in found.values():
            names |= dict.fromkeys(report)
        rows = []
        for tensor, report in found.items():
            rows.append([tensor, *(number(report.get(name)) for name in names)])
        return table(repr(self), ("tensor", *names), rows)

    def __repr__(self) -> str:
        off = "off; make the Optimizer with stats=True"
        return f"Stats({counted(len(self._reports), 'tensor') if self.enabled else off})"
