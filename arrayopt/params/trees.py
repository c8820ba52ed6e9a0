"""Trees of dict, list, tuple and namedtuple with arrays as leaves, each leaf named by its path."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from arrayopt.arrays import Ints
from arrayopt.params.headers import WORD, object_addresses, word_index, words

LONE = "param"
"""The name of a tree that is a single leaf."""


def flatten(tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with their names, in order.

    A tree consists of dicts, lists, tuples and namedtuples. Everything else is a leaf, None too. A
    name is the path of keys and positions, joined by dots. A lone leaf is ``param``.

    Examples
    --------
    >>> flatten({"w": 1, "blocks": [{"b": 2}, {"b": 3}]})
    [('w', 1), ('blocks.0.b', 2), ('blocks.1.b', 3)]
    """
    if _children(tree) is None:
        return [(LONE, tree)]
    found: list[tuple[str, Any]] = []
    _visit("", _children(tree) or (), found)
    return found


def _visit(prefix: str, children: Iterable[tuple[Any, Any]], found: list[tuple[str, Any]]) -> None:
    """Append the leaves below a node.

    It is no nested function, which would keep leaves until garbage is collected.
    """
    for key, child in children:
        below = _children(child)
        if below is None:
            found.append((f"{prefix}{key}", child))
        else:
            _visit(f"{prefix}{key}.", below, found)


Template = Any
"""The containers of a tree without its leaves.

None for a leaf; else keys, fields or a length, and the templates below.
"""


def template(tree: Any) -> Template:
    """Return the template of a tree; nothing fits if a key is not a string."""
    children = _children(tree)
    if children is None:
        return None
    nodes = list(children)
    below = [template(node) for _, node in nodes]
    keys = list(tree) if isinstance(tree, dict) else getattr(tree, "_fields", len(nodes))
    if isinstance(keys, list) and not all(isinstance(key, str) for key in keys):
        return [object()], None  # 1 and True are equal keys, but two names: nothing has such
    return keys, below if any(x is not None for x in below) else None


def leaves(made: Template, tree: Any, found: list[Any] | None = None) -> list[Any] | None:
    """Return the leaves of a tree with these containers, in order; None if it has others.

    They are put into `found`, an empty list, if it is given.
    """
    found = [] if found is None else found
    return found if _collect(made, tree, found) else None


def _collect(made: Template, node: Any, found: list[Any]) -> bool:
    """Append a node's leaves, if it has the containers of the template."""
    if made is None:
        found.append(node)
        return True
    keys, below = made
    if isinstance(keys, list):
        if not isinstance(node, dict) or len(node) != len(keys):
            return False
        if list(node) != keys:
            if node.keys() != set(keys):
                return False
            node = {key: node[key] for key in keys}
        values: Iterable[Any] = node.values()
    else:
        if not isinstance(node, list | tuple) or getattr(node, "_fields", len(node)) != keys:
            return False
        values = node
    if below is None:
        found.extend(values)
        return True
    return all(_collect(x, child, found) for x, child in zip(below, values, strict=True))


def rebuild(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a tree of the same containers, with `leaf(old)` in place of each leaf."""
    if isinstance(tree, dict):
        made = copy.copy(tree)  # keeps the kind of dict: OrderedDict, defaultdict, ...
        made.update({key: rebuild(child, leaf) for key, child in tree.items()})
        return made
    if isinstance(tree, list):
        return [rebuild(child, leaf) for child in tree]
    if isinstance(tree, tuple):
        children = [rebuild(child, leaf) for child in tree]
        return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
    return leaf(tree)


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the children of a container with their keys, or None for a leaf."""
    if isinstance(node, dict):
        return node.items()
    if not isinstance(node, list | tuple):
        return None
    return zip(node._fields, node, strict=True) if hasattr(node, "_fields") else enumerate(node)


def _contents(tree: Any) -> Ints | None:
    """Return the memory of what a list or dict holds; None where it is not as expected.

    It stays the same while nothing is put in or taken out, if all that was in it is kept alive.
    """
    memory = words()
    if type(tree) is list:
        return object_addresses(tree)
    if type(tree) is not dict or memory is None:
        return None
    kind, count, _, keys, values = memory[word_index(id(tree)) :][:5].tolist()
    if (kind, count, values) != (id(dict), len(tree), 0):  # values are apart
        return None
    length = (dict.__sizeof__(tree) - dict.__basicsize__) // WORD
    return memory[word_index(keys) - 1 :][:length]  # type: ignore[no-any-return]


class Held:
    """The leaves of a tree, kept alive, and whether it still has them."""

    def __init__(self, found: list[Any]) -> None:
        self.leaves, self._objects = found, object_addresses(found).tobytes()
        self._memory: bytes | None = None
        self._keys: Any = None  # kept alive, too

    def same(self, made: Template, tree: Any) -> bool:
        """Return whether a tree with the containers of a template has the same leaves."""
        memory = _contents(tree) if made is not None and made[1] is None else None
        now = None if memory is None else memory.tobytes()
        if memory is not None and now == self._memory:
            return True
        found = leaves(made, tree) or [leaf for _, leaf in flatten(tree)]
        same = object_addresses(found).tobytes() == self._objects
        if same and memory is not None and id(found[-1]) in memory:
            self._memory, self._keys = now, list(tree)
        return same

    def __reduce__(self) -> Any:
        return Held, (self.leaves,)
