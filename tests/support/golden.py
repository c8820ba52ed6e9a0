"""Records of how golden trajectories (runs of published optimizers) are reproduced, or why not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import arrayopt as ao


@dataclass(frozen=True)
class Golden:
    """The rule and options that reproduce a file.

    `groups` is the Optimizer's argument, or a list of (names, overrides) for params as a list of group dicts, with
    `order_params` if the file has an order. Gradients are divided by `loss_scale` first. `tolerance` is the dtype whose
    tolerance replaces that of the file's dtype.
    """

    rule: ao.Rule
    groups: Mapping[Any, dict[str, Any]] | list[tuple[Any, dict[str, Any]]] | None = None
    loss_scale: float | None = None
    tolerance: str | None = None


@dataclass(frozen=True)
class LeftOut:
    """Tensors of a file that are not compared, and what the original does differently. A test checks that they differ.

    None stands for all tensors. The file is then not in GOLDENS, and `nearest` is the most similar rule.
    """

    tensors: tuple[str, ...] | None
    why: str
    nearest: Golden | None = None
