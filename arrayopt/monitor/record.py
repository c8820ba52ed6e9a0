"""What a monitor keeps of a step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Record"]


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
