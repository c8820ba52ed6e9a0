"""Whether a rule writes what it is given: its first updates are looked at, as tracing does not see every write."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from arrayopt.arrays import Array, copied, detached, dtype_name, is_array, is_captured, store, to_host, writable
from arrayopt.rules.returned import Given, WritesError

MOST = 1024
"""So many structures are remembered: a rule may hold a function that is made anew each time."""

_LOOKED_AT: set[Any] = set()
"""The structures of rules, with the kinds of arrays, that were seen to write nothing."""


@contextmanager
def unwritten(rule: Any, given: Mapping[str, Array], t: Any) -> Iterator[None]:
    """Restore what is written of the arrays within, and raise WritesError, in the first updates of each kind.

    `given` is what the update of the rule within is given, by name; rules of this package are not looked at. Updates
    that are not the first of a tensor (t = 1) are looked at by themselves: what a rule writes may change nothing while
    its slots are zero.
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
    """The arrays that can be written, each with a copy; none that is traced or captured, whose values are not known."""
    found = {}
    with suppress(Exception):
        for name, x in given.items():
            if not isinstance(x, Given) and writable(x) and not is_captured(x):
                x = detached(x)
                to_host(x)
                found[name] = x, copied(x)
    return found
