"""All layers of a stacked tensor at once: a namespace that leaves the first axis alone."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from arrayopt.arrays import Array, array_namespace, is_array, place
from arrayopt.fusion.ops import OPS
from arrayopt.rules.draws import Drawn


class NotLayerwiseError(Exception):
    """A rule does what is not known of all layers at once."""


ELEMENTWISE = frozenset({"clip", "square", "reciprocal"}).union(*(op.api for op in OPS.values()))
"""Functions of each element by itself."""

REDUCING = frozenset({"sum", "mean", "prod", "max", "min", "any", "all", "std", "var"})
"""Functions over all axes, or some of them."""

ALONG = frozenset(
    {"flip", "cumulative_sum", "sort", "argsort", "take_along_axis", "expand_dims", "squeeze"}
)
"""Functions along one axis, which they are given."""

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
    """One array of all layers, which its first axis counts: a rule takes it for that of a layer."""

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
        """A number as PyTorch's array, the same for all layers."""
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
    """Random numbers for all layers: those of the whole stack."""

    of: Drawn

    @property
    def stored(self) -> str:
        """See `Draws.stored`."""
        return self.of.stored

    def __call__(self, stream: int | str) -> Layerwise:
        if self.of.first is None:  # these are some of the layers
            raise NotLayerwiseError
        return Layerwise(self.of(stream))


def over_layers(function: Callable[..., Any], xp: Any, *args: Any) -> Any:
    """What a function of one layer's arrays makes of all layers.

    It is called with a namespace that knows `Layerwise` arrays, and with arrays of all layers, or
    dicts of these. So are what it returns; a number is the same for each layer.
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
    """The arrays of some values, such that their elements meet as those of one layer would."""
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
    """The namespace of `Layerwise` arrays of a library, made once for each."""
    return Namespace(xp)


class Namespace:
    """A library's functions, of all layers at once."""

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
    """A function of a library, of all layers."""
    if not any(isinstance(a, Layerwise | list | tuple) for a in (*args, *options.values())):
        # of numbers, or of arrays that are the same for all layers
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
    """Where an axis of a layer is among those of all layers."""
    return axis % rank + 1


def _reduced(
    function: Callable[..., Any], lanes: Layerwise, *, axis: Any = None, **options: Any
) -> Layerwise:
    """A reduction of each layer."""
    axes = range(lanes.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    over = tuple(_after(a, lanes.ndim) for a in axes)
    if over:
        return Layerwise(function(lanes.x, axis=over, **options))
    # of one value
    return Layerwise(function(array_namespace(lanes.x).expand_dims(lanes.x, axis=-1), axis=-1))
