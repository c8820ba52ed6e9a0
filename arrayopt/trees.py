"""Trees of dict, list, tuple and namedtuple with arrays as leaves, each leaf named by its path."""

import copy
from collections.abc import Callable, Iterable
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
    if _children(tree) is None:
        return [(LONE, tree)]
    leaves: list[tuple[str, Any]] = []

    def visit(prefix: str, children: Iterable[tuple[str, Any]]) -> None:
        for key, child in children:
            below = _children(child)
            if below is None:
                leaves.append((f"{prefix}{key}", child))
            else:
                visit(f"{prefix}{key}.", below)

    visit("", _children(tree) or ())
    return leaves


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


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """The children of a container with their keys, or None for a leaf."""
    if isinstance(node, dict):
        return node.items()
    if not isinstance(node, list | tuple):
        return None
    return zip(node._fields, node, strict=True) if hasattr(node, "_fields") else enumerate(node)
