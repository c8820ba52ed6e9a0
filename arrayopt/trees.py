"""Trees of dict, list, tuple and namedtuple with arrays as leaves, each leaf named by its path."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["flatten", "rebuild"]

LONE = "param"
"""The name of a tree that is a single leaf."""


def flatten(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their names, in order.

    Parameters
    ----------
    tree : leaf, dict, list, tuple or namedtuple, nested at will
        Everything else is a leaf, None too.

    Returns
    -------
    list of (str, leaf)
        A name is the path of keys and positions, joined by dots: ``blocks.0.bias``. A lone leaf is ``param``.

    Examples
    --------
    >>> flatten({"w": 1, "blocks": [{"b": 2}, {"b": 3}]})
    [('w', 1), ('blocks.0.b', 2), ('blocks.1.b', 3)]
    """

    def visit(path: str, node: Any) -> Iterator[tuple[str, Any]]:
        children = _children(node)
        if children is None:
            yield path or LONE, node
        else:
            for key, child in children:
                yield from visit(f"{path}.{key}" if path else key, child)

    return list(visit("", tree))


def rebuild(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """A tree of the same containers, with `leaf(old)` in place of each leaf."""
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


def _children(node: Any) -> list[tuple[str, Any]] | None:
    """The named children of a container, or None for a leaf."""
    if isinstance(node, dict):
        return [(str(key), child) for key, child in node.items()]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, list | tuple):
        return [(str(i), child) for i, child in enumerate(node)]
    return None
