"""What `minimize` returns."""

from dataclasses import dataclass
from typing import Any

from arrayopt.arrays import size, to_host
from arrayopt.foreign import unknown
from arrayopt.html import table
from arrayopt.params.trees import flatten


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """The result of `minimize`. With `stacked`, numbers are arrays with one entry per problem.

    Parameters
    ----------
    params : tree of arrays
        The best point that was evaluated, in the structure that was given.
    value : float or array
        The value of the function at this point.
    grad_norm : float or array
        The largest magnitude in the gradient; with `project`, in ``project(p - g) - p``. If `tol` is
        within the rounding error of p, a longer step is taken, and divided by its length.
    steps : int or array
        The number of accepted steps.
    evaluations : int or array
        The number of evaluations of the function.
    converged : bool or array
        Whether `grad_norm` is at most `tol`.
    message : str
        The reason for stopping.
    """

    params: Any
    value: Any
    grad_norm: Any
    steps: Any
    evaluations: Any
    converged: Any
    message: str

    def __getattr__(self, name: str) -> Any:
        fields = list(type(self).__dataclass_fields__)
        raise AttributeError(unknown("Result", fields, name, {}), name=name)

    def __repr__(self) -> str:
        return "\n".join(
            f"{name}: {shown}" for name, shown in [("message", self.message), *self._rows()]
        )

    def _repr_html_(self) -> str:
        return table(self.message, ("", ""), self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        """The rows of the printed table: names and texts."""
        numbers = ("converged", "value", "grad_norm", "steps", "evaluations")
        arrays = [(f"params {name}", _array(x)) for name, x in flatten(self.params)]
        return [(name, _shown(getattr(self, name))) for name in numbers] + arrays


def _array(x: Any) -> str:
    """Show a short array in full, a long one by its shape."""
    return str(x) if x is None or size(x) <= 8 else f"array of shape {tuple(x.shape)}"


def _shown(x: Any) -> str:
    """Show a number, or the smallest, the median and the largest of several."""
    if not hasattr(x, "shape"):
        return f"{x:.6g}" if isinstance(x, float) else str(x)
    host = to_host(x)
    if host.size == 0:
        return "of no problem"
    if host.dtype == bool:
        return f"{int(host.sum())} of {host.size}"
    ordered = sorted(host.tolist())
    return f"{ordered[0]:.6g} to {ordered[-1]:.6g}, median {ordered[len(ordered) // 2]:.6g}"
