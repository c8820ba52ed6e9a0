"""`total`: sums over all tensors of a step for rules, and their interface to engines."""

from collections.abc import Callable
from typing import Any

from arrayopt.arrays import Array, kind
from arrayopt.rules.returned import ReturnedError

TOTALS = "_totals"
"""The name in `h` of the engine's function that takes a tensor's numbers; fields cannot have this name."""

HOW = ("sum", "max")
"""The kinds of totals."""


PREFIX = ":total"
"""The first characters of the names of totals, in the scalars and the reports of a tensor."""


def of_total(j: int) -> str:
    """The name of the j-th total of an update."""
    return f"{PREFIX}{j}"


def totals_in(report: dict[str, Any]) -> list[int]:
    """The numbers of the totals in a report, or among scalars."""
    return [int(name.removeprefix(PREFIX)) for name in report if name.startswith(PREFIX)]


def unforeseen(rule: type[Any]) -> ReturnedError:
    """The error for an update that asks for other totals than in a test update of ones."""
    return ReturnedError(
        f"{rule.__name__}.update asks for other totals of this tensor than of one of ones; it must"
        " ask for the same ones of each tensor"
    )


def total(h: Any, x: Any, how: str = "sum") -> Array:
    """Return the sum of one number per tensor, over all tensors of this step with the same class of rule.

    The sum includes all tensors of the class that have a gradient in this step, of any dtype, group, device and rank.
    Numbers are added in the order of the parameters, in double precision, and the sum is rounded once, to the dtype of
    the tensor's arithmetic. In a traced step without 64 bits, JAX adds in single precision. With `stacked`, a layer is
    added to the layers with the same index in tensors with the same number of layers.

    Parameters
    ----------
    h : namespace
        The `h` of `update`.
    x : number or 0-d array
        The tensor's number: real, or a boolean, which counts as 0 or 1.
    how : {"sum", "max"}
        Whether to add the numbers, or to return the largest.

    Returns
    -------
    array
        0-d, the same for all tensors.

    Raises
    ------
    TypeError, ValueError
        If `h` or `x` is of another type.

    Notes
    -----
    The update of every tensor of the class must call `total` equally often; a tensor with nothing to add passes 0.0. A
    fused engine ends a pass over all tensors where a total is used. Engines that do not fuse run the update again for
    each total that depends on another one. With ranks, independent totals share one exchange.

    Examples
    --------
    Inside `update`, the norm of all gradients::

        norm = xp.sqrt(ao.total(h, xp.sum(g * g)))
    """
    heard: Callable[[Any, str], Array] | None = vars(h).get(TOTALS) if hasattr(h, "__dict__") else None
    if heard is None:
        raise TypeError("total: the first argument must be the `h` of a rule's update, as in ao.total(h, x)")
    if how not in HOW:
        raise ValueError(f"total: `how` must be 'sum' or 'max'; got {how!r}")
    if getattr(x, "ndim", 0):
        raise ValueError(f"total: `x` must be one number for the tensor; got an array of rank {x.ndim}")
    if not isinstance(x, bool | int | float) and (not hasattr(x, "dtype") or kind(x) == "complex"):
        raise TypeError(f"total: `x` must be a real number or a 0-d array of one; got {x!r}")
    return heard(x, how)


class Heard:
    """Totals of an update that runs as written.

    `told` has the numbers of this tensor by the names of totals, and `how` the kind of each total. `given` converts
    totals that are `known` for the update. Unknown totals are 1, and the update must be run again.
    """

    def __init__(self, known: dict[str, Any], given: Callable[[Any], Array]) -> None:
        self._known, self._given = known, given
        self.told: dict[str, Any] = {}
        self.how: list[str] = []

    def __call__(self, x: Any, how: str) -> Array:
        name = of_total(len(self.how))
        self.how.append(how)
        self.told[name] = float(x) if isinstance(x, bool | int) else x
        return self._given(self._known.get(name, 1.0))
