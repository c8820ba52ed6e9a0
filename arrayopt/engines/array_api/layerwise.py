"""An array namespace that runs a rule's operations on all layers of a stacked tensor at once: it
leaves the first axis alone. `apply_one` passes it to rules, with arrays as `Layerwise`.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from arrayopt.arrays import Array, array_namespace, is_array, place
from arrayopt.fusion.ops import OPS
from arrayopt.rules.draws import Drawn


class NotLayerwiseError(Exception):
    """A rule uses an operation that is not supported on all layers at once."""


ELEMENTWISE = frozenset({"clip", "square", "reciprocal"}).union(*(op.api for op in OPS.values()))
"""Functions of single elements."""

REDUCING = frozenset({"sum", "mean", "prod", "max", "min", "any", "all", "std", "var"})
"""Functions that reduce all axes, or some."""

ALONG = frozenset(
    {"flip", "cumulative_sum", "sort", "argsort", "take_along_axis", "expand_dims", "squeeze"}
)
"""Functions along one axis, which is an argument."""

LIKE = frozenset({"zeros_like", "ones_like", "full_like", "empty_like", "astype"})
"""Functions of one array, and of numbers."""

LINEAR = frozenset(
    {"matmul", "matrix_transpose", "qr", "eigh", "svd", "inv", "cholesky", "diagonal"}
)
"""Functions of the last two axes."""

ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("and_", "or_", "xor", "lshift", "rshift"),
)
COMPARING = ("lt", "le", "gt", "ge", "eq", "ne")


class Layerwise:
    """An array of all layers, which looks to a rule like that of one layer: no first axis."""

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, x: Array) -> None:
        self.x = x

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    @property
    def ndim(self) -> int:
        return int(self.x.ndim) - 1

    @property
    def mT(self) -> "Layerwise":  # noqa: N802
        if self.ndim < 2:
            raise NotLayerwiseError
        return Layerwise(self.x.mT)

    @property
    def dtype(self) -> Any:
        return self.x.dtype

    @property
    def device(self) -> Any:
        return self.x.device

    def new_tensor(self, value: float, dtype: Any) -> Any:
        """Return a number as a PyTorch array, the same for all layers."""
        return self.x.new_tensor(value, dtype=dtype)

    def __array_namespace__(self, **_: Any) -> Any:
        return layerwise(array_namespace(self.x))

    def __neg__(self) -> "Layerwise":
        return Layerwise(-self.x)

    def __invert__(self) -> "Layerwise":
        return Layerwise(~self.x)

    def __abs__(self) -> "Layerwise":
        return Layerwise(abs(self.x))

    def __bool__(self) -> bool:
        raise NotLayerwiseError

    __float__ = __int__ = __index__ = __complex__ = __len__ = __iter__ = __array__ = __bool__

    def __getitem__(self, _: Any) -> Any:
        raise NotLayerwiseError


@dataclass(frozen=True)
class LayerwiseDraws:
    """The random numbers of all layers."""

    of: Drawn

    @property
    def stored(self) -> str:
        """See `Draws.stored`."""
        return self.of.stored

    def __call__(self, stream: int | str) -> Layerwise:
        if self.of.first is None:  # only some of the layers are here
            raise NotLayerwiseError
        return Layerwise(self.of(stream))


def over_layers(function: Callable[..., Any], xp: Any, *args: Any) -> Any:
    """Call a function of one layer's arrays for all layers at once, and return its results.

    It gets a namespace for `Layerwise` arrays, and arrays (or dicts of arrays) of all layers. Its
    results have all layers too; a number is the same for each.
    """
    like = args[0]

    def given(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: given(value) for name, value in x.items()}
        return Layerwise(x) if is_array(x) else x

    def found(one: Any) -> Any:
        if isinstance(one, dict):
            return {name: found(value) for name, value in one.items()}
        if isinstance(one, tuple):
            return tuple(map(found, one))
        if isinstance(one, Layerwise):
            return one.x
        if not isinstance(one, int | float):
            raise NotLayerwiseError
        library, device = place(like)
        return library.full((like.shape[0],), float(one), device=device)

    return found(function(xp, *map(given, args)))


def _operator(
    function: Callable[[Any, Any], Any], *, swapped: bool = False
) -> Callable[[Layerwise, Any], Layerwise]:
    def call(self: Layerwise, other: Any) -> Layerwise:
        if isinstance(other, Layerwise) and other.x.ndim == self.x.ndim:
            mine, its = self.x, other.x
        elif isinstance(other, float):
            mine, its = self.x, other
        else:
            mine, its = _aligned([self, other])
        return Layerwise(function(its, mine) if swapped else function(mine, its))

    return call


for _name in (*ARITHMETIC, *COMPARING):
    setattr(Layerwise, f"__{_name.rstrip('_')}__", _operator(getattr(operator, _name)))
for _name in ARITHMETIC:
    setattr(
        Layerwise, f"__r{_name.rstrip('_')}__", _operator(getattr(operator, _name), swapped=True)
    )


def _aligned(args: list[Any]) -> list[Any]:
    """Return values as arrays that broadcast as those of one layer would."""
    rank = max(getattr(a, "ndim", 0) for a in args)
    made = []
    for a in args:
        if isinstance(a, Layerwise) and a.ndim < rank:
            count, xp = a.x.shape[0], array_namespace(a.x)
            made.append(xp.reshape(a.x, (count, *(1,) * (rank - a.ndim), *a.shape)))
        else:
            made.append(a.x if isinstance(a, Layerwise) else a)
    return made


@cache
def layerwise(xp: Any) -> "Namespace":
    """Return the namespace of `Layerwise` arrays of a library; there is one for each."""
    return Namespace(xp)


class Namespace:
    """A library's functions, for `Layerwise` arrays."""

    def __init__(self, xp: Any) -> None:
        self._xp, self.__name__ = xp, xp.__name__

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._xp, name)
        made: Any = found
        if name == "linalg":
            made = Namespace(found)
        elif callable(found) and not isinstance(found, type):
            made = partial(_call, name, found)
        setattr(self, name, made)
        return made


def _call(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a library's function for all layers at once."""
    if not any(isinstance(a, Layerwise | list | tuple) for a in (*args, *options.values())):
        # all arguments are numbers, or arrays that are the same for all layers
        return function(*args, **options)
    if name in ELEMENTWISE:
        return Layerwise(function(*_aligned(list(args)), **options))
    first, *others = args
    if not isinstance(first, Layerwise):
        raise NotLayerwiseError(name)
    if name in REDUCING and not others:
        return _reduced(function, first, **options)
    if name == "reshape":
        return Layerwise(function(first.x, (first.x.shape[0], *others[0])))
    plain = [a.x if isinstance(a, Layerwise) else a for a in args]
    if name in ALONG and isinstance(options.get("axis"), int):
        axis = _after(options.pop("axis"), first.ndim + (name == "expand_dims"))
        return Layerwise(function(*plain, axis=axis, **options))
    if name in LIKE:
        return Layerwise(function(*plain, **options))
    if name in LINEAR and all(a.ndim >= 2 for a in args if isinstance(a, Layerwise)):
        made = function(*plain, **options)
        return tuple(map(Layerwise, made)) if isinstance(made, tuple) else Layerwise(made)
    raise NotLayerwiseError(name)


def _after(axis: int, rank: int) -> int:
    """Return the axis of a stacked array that is this axis of a layer."""
    return axis % rank + 1


def _reduced(
    function: Callable[..., Any], lanes: Layerwise, *, axis: Any = None, **options: Any
) -> Layerwise:
    """Reduce each layer."""
    axes = range(lanes.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    over = tuple(_after(a, lanes.ndim) for a in axes)
    if over:
        return Layerwise(function(lanes.x, axis=over, **options))
    # a layer has one value
    return Layerwise(function(array_namespace(lanes.x).expand_dims(lanes.x, axis=-1), axis=-1))
