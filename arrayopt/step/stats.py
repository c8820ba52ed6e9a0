"""What the last step reported of each tensor: trust ratio and norms."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from arrayopt.arrays import Array
from arrayopt.html import number, table


class Stats(Mapping[str, Mapping[str, Array]]):
    """Reports of the last step by tensor name: ``opt.stats["w"]["trust_ratio"]``, as 0-d arrays on
    their device.

    Looking up an array does not wait for the device; `read` does. The keys of a report:

    - ``param_norm``, ‖p‖ before the step;
    - ``grad_norm``, ‖g‖ after the global clip, before centralization and clipping by value;
    - ``update_norm``, ‖p_new - p‖;
    - ``trust_ratio`` of LAMB, LANS and LARS (1.0 without `adapt`), ``trust_ratio_grad`` of LANS.

    Tensors without elements or gradient have no report. If a GPU skips a step, values are NaN.
    Without ``stats=True`` too, ``stats.skipped`` is the number of skipped steps; with `clip_norm`,
    a loss scale or `skip_nonfinite`, ``stats.global_norm`` is that of gradients before clipping.
    """

    def __init__(self, skipped: Callable[[], Any], *, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"Optimizer: `stats` must be True or False; got {enabled!r}")
        self.enabled = enabled
        self._norm: Any = None
        self._skipped = skipped
        self._reports: dict[str, dict[str, Array]] = {}
        self._last: dict[str, dict[str, Array]] = {}  # what has not been delivered yet
        self._requests: list[Callable[[dict[str, dict[str, Array]]], object]] = []

    @property
    def wanted(self) -> bool:
        """Whether the next step is to collect reports."""
        return self.enabled or self.requested

    @property
    def requested(self) -> bool:
        """Whether somebody is to be called with the next step's reports."""
        return bool(self._requests)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_norm": self.global_norm}

    def request(self, receive: Callable[[dict[str, dict[str, Array]]], object]) -> None:
        """Have `receive` called once, with the next step's reports, even if stats are off."""
        if receive not in self._requests:  # as when a step has failed and is tried again
            self._requests.append(receive)

    @property
    def global_norm(self) -> Any:
        return self._norm() if callable(self._norm) else self._norm

    @property
    def skipped(self) -> Any:
        return self._skipped()

    def replace(self, reports: dict[str, dict[str, Array]], norm: Any) -> None:
        """Put a new step's reports in the place of the last one's.

        What only a device knows is asked for by functions, when somebody looks.
        """
        self._norm = norm
        self._last = {name: report for name, report in reports.items() if report} if reports else {}
        if self.enabled:
            self._reports = self._last

    def deliver(self) -> None:
        """Give the last step's reports to those who asked for them."""
        reports, self._last = self._last, {}
        while self._requests:
            self._requests.pop(0)(reports)

    def read(self) -> dict[str, dict[str, float]]:
        """All reports as Python floats, by tensor name; waits for the device.

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
        return f"Stats({f'{len(self._reports)} tensors' if self.enabled else off})"
