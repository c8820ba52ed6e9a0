"""Arrays that the user puts in the place of parameters: checked together, then taken up together."""

from typing import Any

from arrayopt.arrays import Array, array_namespace, dtype_name, is_array, library, place
from arrayopt.params.given import check_params
from arrayopt.state.tensors import Tensor

__all__ = ["exchange"]


def exchange(who: str, tensors: list[Tensor], given: list[tuple[str, Any]]) -> None:
    """Have tensors go on from the arrays of their names.

    Slots stay as they are, but for masters, which begin anew as the values of the new arrays.

    Raises
    ------
    ValueError
        Listing every mismatch of names, shapes, dtypes, libraries and devices; for arrays that share memory. Nothing
        has been changed then.
    """
    arrays, mine = dict(given), {tensor.name: tensor for tensor in tensors}
    wrong = [f"missing {name!r}" for name in mine if name not in arrays]
    wrong += [f"unexpected {name!r}" for name in arrays if name not in mine]
    for name, array in arrays.items():
        if name in mine and array is not mine[name].array:
            wrong += [
                f"{what} at {name!r}, expected {expected}" for what, expected in _differences(mine[name].array, array)
            ]
    if wrong:
        raise ValueError(
            f"{who}: the parameters must keep their names, shapes, dtypes, libraries and devices: {'; '.join(wrong)};"
            " put arrays there that fit, or make a new Optimizer"
        )
    check_params(given, who, arrays)
    for name, array in arrays.items():
        if array is not mine[name].array:
            mine[name].take(array)


def _differences(was: Array, array: Any) -> list[tuple[str, Any]]:
    """In what an array differs from the parameter that it is to replace: (what came, what was expected)."""
    if not is_array(array):
        return [(type(array).__name__, "an array")]
    if array_namespace(array) is not array_namespace(was):
        return [(f"{library(array)} array", f"{library(was)} array")]
    found: list[tuple[str, Any]] = []
    if tuple(array.shape) != tuple(was.shape):
        found.append((f"shape {tuple(array.shape)}", tuple(was.shape)))
    if dtype_name(array) != dtype_name(was):
        found.append((f"dtype {array.dtype}", was.dtype))
    if str(place(array)[1]) != str(place(was)[1]):
        found.append((f"device {place(array)[1]}", place(was)[1]))
    return found
