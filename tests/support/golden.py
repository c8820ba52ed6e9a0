"""What a golden trajectory is reproduced by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import arrayopt as ao


@dataclass(frozen=True)
class Golden:
    """How a file is reproduced.

    `groups` is what the Optimizer takes, or a list of (names, overrides), which makes params a list of group dicts,
    with `order_params` where the file has an order; `loss_scale` divides the gradients first; `tolerance` is a dtype
    whose tolerance is taken in place of the file's own.
    """

    rule: ao.Rule
    groups: Mapping[Any, dict[str, Any]] | list[tuple[Any, dict[str, Any]]] | None = None
    loss_scale: float | None = None
    tolerance: str | None = None


@dataclass(frozen=True)
class LeftOut:
    """Tensors of a file that are not compared, and what the original does differently; all must indeed differ.

    Where that is all tensors (None), the file is not in GOLDENS; `nearest` is then what one would take for it.
    """

    tensors: tuple[str, ...] | None
    why: str
    nearest: Golden | None = None
