"""Detects rules that write to their inputs, in their first updates, because tracing does not see every write."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from arrayopt.arrays import Array, copied, detached, dtype_name, is_array, is_captured, store, to_host, writable
from arrayopt.rules.returned import Given, WritesError

MOST = 1024
"""The number of structures that are remembered; it is limited because a rule may hold a new function each time."""

_LOOKED_AT: set[Any] = set()
"""The structures of rules, with kinds of arrays, that were checked."""


@contextmanager
def unwritten(rule: Any, given: Mapping[str, Array], t: Any) -> Iterator[None]:
    """A context for an update: restore inputs that it has written to, and raise WritesError. Only the first updates of
    each kind are checked, and not those of rules of this package.

    `given` has the inputs by name. First updates (t = 1) and later ones are different kinds, because a write may change
    nothing while slots are zero.
    """
    if type(rule).__module__.startswith("arrayopt.") or not all(map(is_array, given.values())):
        yield
        return
    kinds = tuple((name, type(x), x.ndim, dtype_name(x)) for name, x in given.items())
    key = rule.structure, isinstance(t, int) and t == 1, kinds
    before = {} if key in _LOOKED_AT else _copies(given)
    written = []
    try:
        yield
    finally:
        for name, (x, kept) in before.items():
            if to_host(x).tobytes() != to_host(kept).tobytes():
                written.append(name)
                store(x, kept)
    if written:
        raise WritesError(
            f"{type(rule).__name__}.update: a rule must not write to its inputs; it writes to"
            f" {', '.join(f'`{name}`' for name in written)}: make a new array, as in m = 0.9 * m instead of m *= 0.9"
        )
    if before:
        if len(_LOOKED_AT) >= MOST:
            _LOOKED_AT.clear()
        _LOOKED_AT.add(key)


def _copies(given: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """The arrays that can be written, each with a copy, except traced and captured ones, whose values are unknown."""
    found = {}
    with suppress(Exception):
        for name, x in given.items():
            if not isinstance(x, Given) and writable(x) and not is_captured(x):
                x = detached(x)
                to_host(x)
                found[name] = x, copied(x)
    return found
