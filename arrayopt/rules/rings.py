"""Rings: k arrays, such as the last k gradients, of which one per step is overwritten; and functions of them.

A ring consists of k slots of a tensor's shape, which a rule uses as one object. Members do not move: the rule keeps a
counter of the oldest one, and permutes coefficients.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arrayopt.arrays import Array, array_namespace, is_array
from arrayopt.rules.words import choose, dot


@dataclass(frozen=True, eq=False)
class Ring:
    """Arrays of one tensor's shape; ``ring[i]`` is member i, and ``len(ring)`` their number."""

    members: tuple[Array, ...]

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, i: int) -> Array:
        if not isinstance(i, int):
            raise TypeError(
                "a member's index must be a Python integer; for a number, use arrayopt.combined with the coefficients"
                " xp.where(i == j, 1.0, 0.0)"
            )
        return self.members[i]

    def __iter__(self) -> Iterator[Array]:
        return iter(self.members)


def ring(xp: Any, p: Array, k: int) -> Ring:
    """Return a ring of k arrays of zeros, for a name of the rule's `rings` in `Rule.slots`.

    Parameters
    ----------
    xp : namespace
        The namespace that `slots` was given.
    p : array
        The parameter, or another array with the shape and dtype of the members.
    k : int
        The number of members, at least 1.

    Returns
    -------
    Ring
        Its members are ``ring[0]`` to ``ring[k - 1]``.

    Raises
    ------
    TypeError, ValueError
        If `k` is not an integer, or is below 1.
    """
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(
            f"ring: `k` must be an integer; got {k!r}; declare a field for it with arrayopt.choice(3, 2, 4)"
        )
    if k < 1:
        raise ValueError(f"ring: `k` must be at least 1; got {k}")
    return Ring(tuple(xp.zeros_like(p) for _ in range(k)))


def dots(a: Ring | Array, b: Ring | Array) -> list[Any]:
    """Return the inner products of the members of a ring with an array, or with the members of another ring.

    For complex arrays, this is the sum over all real and imaginary parts: the real part of `numpy.vdot`.

    Parameters
    ----------
    a, b : Ring or array
        At least one must be a ring. An array must have the shape of a member.

    Returns
    -------
    list
        For a ring and an array, k 0-d arrays. For two rings, a list of such lists, one for each member of the first.

    Raises
    ------
    TypeError
        If neither argument is a ring.
    """
    if isinstance(a, Ring) and isinstance(b, Ring):
        if a is not b:
            return [dots(x, b) for x in a]
        lower = [[_dot(a[i], a[j]) for j in range(i + 1)] for i in range(len(a))]
        return [[lower[max(i, j)][min(i, j)] for j in range(len(a))] for i in range(len(a))]
    if not isinstance(a, Ring) and not isinstance(b, Ring):
        raise TypeError("dots: one of the two must be a ring; got two arrays, whose product is xp.sum(a * b)")
    return [_dot(x, b) for x in a] if isinstance(a, Ring) else [_dot(a, x) for x in b]


def combined(ring: Ring, coefficients: Sequence[Any]) -> Array:
    """Return the weighted sum of a ring's members.

    Parameters
    ----------
    ring : Ring
        A ring that `update` was given, or a `put` of it.
    coefficients : sequence of number or 0-d array
        One coefficient per member. A coefficient of zero does not hide infinity or NaN in a member.

    Returns
    -------
    array
        An array with the shape of a member.

    Raises
    ------
    TypeError, ValueError
        If `ring` is not a ring, or the number of coefficients is wrong.
    """
    _check("combined", ring)
    if len(coefficients) != len(ring):
        raise ValueError(f"combined: the number of coefficients must be {len(ring)}; got {len(coefficients)}")
    total = coefficients[0] * ring[0]
    for x, c in zip(ring.members[1:], coefficients[1:], strict=True):
        total = total + c * x
    return total


def put(ring: Ring, i: Any, x: Array) -> Ring:
    """Return the ring with member i replaced by x. If there is no member i, as for i = -1, the ring does not change.

    Parameters
    ----------
    ring : Ring
        A ring that `update` was given.
    i : number or 0-d array
        The index, a whole number, which may differ between tensors. Use `xp.where` to write nothing.
    x : array
        The new member.

    Returns
    -------
    Ring
        The new ring, to be returned by `update`.

    Raises
    ------
    TypeError
        If `ring` is not a ring, or `x` not an array.
    """
    _check("put", ring)
    if not is_array(x):
        raise TypeError(f"put: `x` must be an array like a member: put(ring, index, x); got {x!r:.40}")
    return Ring(tuple(choose(i == j, x, old) for j, old in enumerate(ring)))


def _dot(x: Array, y: Array) -> Any:
    """The inner product of two arrays."""
    return dot(array_namespace(x, y), x, y)


def _check(word: str, ring: Any) -> None:
    """Raise TypeError if `ring` is not a ring."""
    if not isinstance(ring, Ring):
        got = "an array" if is_array(ring) else f"a {type(ring).__name__}"
        raise TypeError(f"arrayopt.{word} needs a ring, a slot whose name is in the rule's `rings`; got {got}")


# ---- rings among slots ----------------------------------------------------------------------------------------------


def member_name(ring: str, i: int) -> str:
    """The name of the slot of member i of a ring."""
    return f"{ring}_{i}"


def expanded(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each ring among slots by its members."""
    made: dict[str, Any] = {}
    for name, x in slots.items():
        if isinstance(x, Ring):
            made.update((member_name(name, i), member) for i, member in enumerate(x))
        else:
            made[name] = x
    return made


def gathered(rings: Sequence[str], slots: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the members of each ring among slots by the ring."""
    made = dict(slots)
    for name in rings:
        members: list[Any] = []
        while member_name(name, len(members)) in made:
            members.append(made.pop(member_name(name, len(members))))
        if members:
            made[name] = Ring(tuple(members))
    return made
