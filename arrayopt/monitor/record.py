"""The record of a step that a monitor keeps, and its quantities."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Record:
    """The quantities of each tensor in one step. They are arrays on the device until `read` is called."""

    step: int
    reports: dict[str, dict[str, Any]]
    is_read: bool = False

    def read(self) -> dict[str, dict[str, float]]:
        """Return the quantities as floats, and free the arrays on the device."""
        if not self.is_read:
            self.reports, self.is_read = {name: _floats(report) for name, report in self.reports.items()}, True
        return self.reports


def _floats(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the quantities of a tensor as floats, with ``update_ratio``."""
    found = {key: float(x) for key, x in report.items()}
    if "update_norm" in found and "param_norm" in found:
        update, param = found["update_norm"], found["param_norm"]
        found["update_ratio"] = update / param if param else math.inf if update > 0 else math.nan
    return found


def rates_of(group: Any, step: int) -> Iterable[tuple[str, dict[str, Any]]]:
    """The learning rate of each tensor of a group, if its rule has one."""
    rate = group.rule.at(step).get("lr")
    return [] if rate is None else [(name, {"lr": rate}) for name in group.names]


def quantities_of(rows: list[dict[str, Any]]) -> list[str]:
    """The quantities in the rows, each once, in order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row if key not in ("step", "tensor")))
