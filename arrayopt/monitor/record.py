"""What a monitor keeps of a step, and what is in it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Record:
    """What was kept of a step: by tensor its quantities, as the device's arrays until they are read."""

    step: int
    reports: dict[str, dict[str, Any]]
    is_read: bool = False

    def read(self) -> dict[str, dict[str, float]]:
        """The quantities as floats; the device's arrays are let go."""
        if not self.is_read:
            self.reports, self.is_read = {name: _floats(report) for name, report in self.reports.items()}, True
        return self.reports


def _floats(report: Mapping[str, Any]) -> dict[str, float]:
    """A tensor's quantities as floats."""
    found = {key: float(x) for key, x in report.items()}
    if "update_norm" in found and "param_norm" in found:
        update, param = found["update_norm"], found["param_norm"]
        found["update_ratio"] = update / param if param else math.inf if update > 0 else math.nan
    return found


def rates_of(group: Any, step: int) -> Iterable[tuple[str, dict[str, Any]]]:
    """The learning rate of a group's tensors, if it has one."""
    rate = group.rule.at(step).get("lr")
    return [] if rate is None else [(name, {"lr": rate}) for name in group.names]


def quantities_of(rows: list[dict[str, Any]]) -> list[str]:
    """The quantities that rows have, each once, in the order in which they come."""
    return list(dict.fromkeys(key for row in rows for key in row if key not in ("step", "tensor")))
