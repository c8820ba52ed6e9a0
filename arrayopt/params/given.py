"""What a user gives as parameters: flattened, named and checked."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from numbers import Number
from typing import Any

from arrayopt.arrays import Array, is_array, kind, writable
from arrayopt.params.groups import Assigned
from arrayopt.params.kinds import refusal
from arrayopt.params.overlap import overlaps_itself, shared
from arrayopt.params.trees import flatten

SHOWN = 10
"""The number of pairs that an error lists."""


def as_tree(who: str, params: Any) -> Any:
    """Return what an iterator yields: a dict for pairs of names and arrays, else a list.

    ``named_parameters()`` yields such pairs. Two of the same name are a ValueError.
    """
    if not isinstance(params, Iterator):
        return params
    entries = list(params)
    if not entries or not all(map(_is_pair, entries)):
        return entries
    tree: dict[str, Any] = {}
    for name, leaf in entries:
        if name in tree:
            raise ValueError(f"{who}: two parameters are named {name!r}")
        tree[name] = leaf
    return tree


def as_params(who: str, params: Any) -> Any:
    """Return parameters as trees, also those that iterators yield in group dicts."""
    params = as_tree(who, params)
    if not is_group_list(params):
        return params
    groups = []
    for entry in params:
        group = dict(entry)
        for key in ("params", "order_params"):
            if key in group:
                group[key] = as_tree(who, group[key])
        groups.append(group)
    return groups


def _is_pair(entry: Any) -> bool:
    """Return whether this is a name with an array."""
    if not isinstance(entry, tuple) or len(entry) != 2:
        return False
    return isinstance(entry[0], str) and not isinstance(entry[1], str)


def named_params(
    params: Any, who: str = "Optimizer", *, functional: bool = False
) -> list[tuple[str, Array]]:
    """Return the parameters of a tree with their names, in order, without leaves that are None.

    With `functional`, they are not written, and may share memory. Raise TypeError for a leaf that
    is not an array of floating-point numbers, or of an unsupported kind; ValueError for a tree
    without arrays, and if two parameters have the same name or share memory.
    """
    named = [(name, leaf) for name, leaf in flatten(params) if leaf is not None]
    check_params(named, who, params, functional=functional)
    return named


def check_params(
    named: list[tuple[str, Array]], who: str, params: Any, *, functional: bool = False
) -> None:
    """Raise if these are not parameters; see `named_params`."""
    if not named:
        raise ValueError(f"{who}: params must hold at least one array; got {params!r}")
    names: set[str] = set()
    for name, leaf in named:
        _check_param(name, leaf, who, params, functional=functional)
        if name in names:
            raise ValueError(f"{who}: two parameters are named {name!r}")
        if not functional and overlaps_itself(leaf):
            raise ValueError(
                f"{who}: elements of {name!r} share memory (an expanded tensor); copy it first"
            )
        names.add(name)
    if functional:
        return
    arrays: dict[int, str] = {}
    for name, leaf in named:
        if arrays.setdefault(id(leaf), name) != name and writable(leaf):
            raise ValueError(f"{who}: {arrays[id(leaf)]!r} and {name!r} are the same array")
    pairs = shared(named)
    if pairs:
        listed = ", ".join(f"{first!r} and {second!r}" for first, second in pairs[:SHOWN])
        raise ValueError(
            f"{who}: parameters must not share memory; {listed} do; copy one of them, or pass only"
            " one"
        )


def _check_param(name: str, leaf: Any, who: str, params: Any, *, functional: bool) -> None:
    """Raise TypeError if a leaf is no parameter."""
    reason = refusal(leaf, parameter=True, functional=functional)
    if reason is not None:
        raise TypeError(f"{who}: {name!r} is {reason}")
    if not is_array(leaf):
        todo = ""
        if isinstance(params, list | tuple) and params and all(map(_is_pair, params)):
            todo = "; pass pairs of names and arrays as dict(params)"
        elif hasattr(leaf, "named_parameters"):
            todo = "; pass dict(model.named_parameters()), or use arrayopt.torch"
        elif isinstance(leaf, Number):
            todo = "; make arrays of numbers, such as numpy.asarray([1.0, 2.0])"
        elif dataclasses.is_dataclass(leaf):
            todo = "; pass a dict of its arrays, such as vars(x)"
        raise TypeError(
            f"{who}: params must be arrays, or dicts, lists and tuples of them;"
            f" got {type(leaf).__name__} at {name!r}{todo}"
        )
    if kind(leaf) not in ("real", "complex"):
        raise TypeError(
            f"{who}: parameters must be of a floating-point dtype; got {leaf.dtype} at {name!r}"
        )


def is_group_list(params: Any) -> bool:
    """Return whether params is a list of group dicts; TypeError if it mixes them with others."""
    if not isinstance(params, list):
        return False
    groups = [isinstance(x, dict) and ("params" in x or "order_params" in x) for x in params]
    if any(groups) and not all(groups):
        odd = params[groups.index(False)]
        raise TypeError(
            f"Optimizer: params must be all group dicts or none; got {type(odd).__name__} among"
            " group dicts"
        )
    return any(groups)


def parse_group_list(
    entries: list[dict[str, Any]],
) -> tuple[list[tuple[str, Array]], list[Assigned]]:
    """Return the named parameters of a list of group dicts, in order, and the groups.

    Raise as `named_params`; also for a group without parameters, and for `order_params` that come
    with other keys or are not exactly the parameters.
    """
    named: list[tuple[str, Array]] = []
    groups: list[Assigned] = []
    order: Any = None
    offset = 0
    for position, entry in enumerate(entries):
        if "order_params" in entry:
            if len(entry) > 1 or order is not None:
                raise ValueError(
                    "Optimizer: `order_params` must appear once, alone in its dict; got keys"
                    f" {list(entry)}"
                )
            order = entry["order_params"]
            if not isinstance(order, Iterable) or is_array(order):
                raise TypeError(
                    "Optimizer: `order_params` must be a list of parameters; got"
                    f" {type(order).__name__}"
                )
            order = list(order)
            continue
        members = entry["params"]
        members = as_tree("Optimizer", [members] if is_array(members) else members)
        leaves = named_params(members, f"Optimizer: group {position}")
        if isinstance(members, dict):
            offset += len(leaves)
        else:  # arrays without names are numbered over all groups
            leaves = [(_numbered(name, offset), leaf) for name, leaf in leaves]
            offset += len(members)
        overrides = {key: value for key, value in entry.items() if key != "params"}
        groups.append(Assigned(str(len(groups)), overrides, [name for name, _ in leaves]))
        named += leaves
    check_params(named, "Optimizer", entries)
    return (named if order is None else _ordered(named, order)), groups


def _numbered(path: str, offset: int) -> str:
    """Shift the position that a path begins with: the first array after three others is "3"."""
    first, dot, rest = path.partition(".")
    return f"{int(first) + offset if first.isdigit() else first}{dot}{rest}"


def _ordered(named: list[tuple[str, Array]], order: list[Any]) -> list[tuple[str, Array]]:
    """Return parameters in the order of `order_params`, which holds arrays or their names."""
    by_key: dict[Any, tuple[str, Array]] = {id(leaf): (name, leaf) for name, leaf in named}
    by_key |= {name: (name, leaf) for name, leaf in named}
    found = [by_key.get(entry if isinstance(entry, str) else id(entry)) for entry in order]
    strange = [i for i, pair in enumerate(found) if pair is None]
    ordered = [pair for pair in found if pair is not None]
    missing = [name for name, _ in named if name not in dict(ordered)]
    if strange or missing or len(ordered) != len(named):
        raise ValueError(
            "Optimizer: `order_params` must contain each parameter of the groups once; missing:"
            f" {missing}, not parameters: positions {strange}, got {len(order)} for"
            f" {len(named)}"
        )
    return ordered


def extend(
    who: str,
    tree: Any,
    params: Any,
    names: list[str],
    own: Callable[[Any], tuple[Any, Any]] | None = None,
) -> tuple[Any, list[tuple[str, Array]]]:
    """Return a tree with parameters added to those of `names`, and the new ones with names.

    `own`, if given, returns first what this rank has of the tree. Raise as `named_params`; also for
    names that are taken, and for a tree that is neither a dict nor a list.
    """
    if isinstance(tree, dict) and isinstance(params, dict):
        taken = [str(key) for key in params if key in tree]
        if taken:
            raise ValueError(f"{who}: there is already a parameter at {', '.join(taken)}")
        larger: Any = copy.copy(tree)
        larger.update(params)
    elif isinstance(tree, list) and not isinstance(params, dict):
        larger = [*tree, *(params if isinstance(params, list | tuple) else [params])]
    else:
        raise ValueError(
            f"{who}: params must be a dict if the parameters are a dict, and an array or a list if"
            f" they are a list; got {type(params).__name__} for {type(tree).__name__}"
        )
    named = named_params(larger if own is None else own(larger)[0], who)[len(names) :]
    taken = [repr(name) for name, _ in named if name in names]
    if taken:
        raise ValueError(f"{who}: there is already a parameter named {', '.join(taken)}")
    check_params(named, who, params)
    return larger, named
