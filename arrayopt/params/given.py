"""What a user gives as parameters and gradients: flattened, named and checked."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from arrayopt.arrays import Array, array_namespace, is_array, kind, library, place, writable
from arrayopt.params.kinds import refusal
from arrayopt.params.overlap import overlaps_itself, shared
from arrayopt.params.trees import flatten

__all__ = [
    "as_params",
    "as_tree",
    "check_params",
    "extend",
    "is_group_list",
    "match_grads",
    "named_params",
    "parse_group_list",
]


def as_tree(who: str, params: Any) -> Any:
    """What an iterator gives: a dict for pairs of names and arrays, as of ``named_parameters()``, else a list.

    Raises
    ------
    ValueError
        Where two have one name.
    """
    if not isinstance(params, Iterator):
        return params
    entries = list(params)
    if not entries or not all(map(_is_pair, entries)):
        return entries
    names = [name for name, _ in entries]
    twice = (
        [name for i, name in enumerate(names) if name in names[:i]]
        if len(set(names)) < len(names)
        else []
    )
    if twice:
        raise ValueError(f"{who}: two parameters are named {twice[0]!r}")
    return dict(entries)


def as_params(who: str, params: Any) -> Any:
    """Parameters as trees: what an iterator gives, as a whole or as the `params` of a group dict."""
    params = as_tree(who, params)
    if not is_group_list(params):
        return params
    return [
        {
            key: as_tree(who, x) if key in ("params", "order_params") else x
            for key, x in entry.items()
        }
        for entry in params
    ]


def _is_pair(entry: Any) -> bool:
    """Whether this is a name with an array."""
    return (
        isinstance(entry, tuple)
        and len(entry) == 2
        and isinstance(entry[0], str)
        and not isinstance(entry[1], str)
    )


def named_params(
    params: Any, who: str = "Optimizer", *, functional: bool = False
) -> list[tuple[str, Array]]:
    """The parameters of a tree with their names, in order; leaves that are None are left out.

    With `functional`, they are not to be written, and may share memory.

    Raises
    ------
    TypeError
        For a leaf that is not an array, an array of integers or booleans, or of a kind that cannot be served.
    ValueError
        For a tree without arrays, and where two parameters have one name or share memory.
    """
    named = [(name, leaf) for name, leaf in flatten(params) if leaf is not None]
    check_params(named, who, params, functional=functional)
    return named


def check_params(
    named: list[tuple[str, Array]], who: str, params: Any, *, functional: bool = False
) -> None:
    """Raise where these are not parameters; see `named_params`."""
    if not named:
        raise ValueError(f"{who}: params must hold at least one array; got {params!r}")
    names: set[str] = set()
    arrays: dict[int, str] = {}
    for name, leaf in named:
        reason = refusal(leaf, parameter=True, functional=functional)
        if reason is not None:
            raise TypeError(f"{who}: {name!r} is {reason}")
        if not is_array(leaf):
            todo = (
                "; give a dict of its arrays, such as vars(x)"
                if dataclasses.is_dataclass(leaf)
                else ""
            )
            if isinstance(params, list | tuple) and params and all(map(_is_pair, params)):
                todo = "; give pairs of names and arrays as dict(params)"
            raise TypeError(
                f"{who}: params must be arrays, or dicts, lists and tuples of them;"
                f" got {type(leaf).__name__} at {name!r}{todo}"
            )
        if kind(leaf) not in ("real", "complex"):
            raise TypeError(
                f"{who}: parameters must be of a floating-point dtype; got {leaf.dtype} at {name!r}"
            )
        if name in names:
            raise ValueError(f"{who}: two parameters are named {name!r}")
        if not functional and overlaps_itself(leaf):
            raise ValueError(
                f"{who}: elements of {name!r} lie in the same place (an expanded tensor); copy it first"
            )
        names.add(name)
    for name, leaf in [] if functional else named:
        if arrays.setdefault(id(leaf), name) != name and writable(leaf):
            raise ValueError(f"{who}: {arrays[id(leaf)]!r} and {name!r} are the same array")
    pairs = [] if functional else shared(named)
    if pairs:
        listed = ", ".join(f"{first!r} and {second!r}" for first, second in pairs[:10])
        raise ValueError(
            f"{who}: parameters must not share memory; {listed} do; copy one of them, or give just one"
        )


def is_group_list(params: Any) -> bool:
    """Whether params is a list of group dicts, and not a tree of parameters.

    Raises
    ------
    TypeError
        For a list that mixes group dicts with other things.
    """
    if not isinstance(params, list):
        return False
    groups = [
        isinstance(entry, dict) and ("params" in entry or "order_params" in entry)
        for entry in params
    ]
    if any(groups) and not all(groups):
        odd = params[groups.index(False)]
        raise TypeError(
            f"Optimizer: params must be all group dicts or none; got {type(odd).__name__} among group dicts"
        )
    return any(groups)


def parse_group_list(
    entries: list[dict[str, Any]],
) -> tuple[list[tuple[str, Array]], list[tuple[dict[str, Any], list[str]]]]:
    """Sort a list of group dicts out: the named parameters in order, and what each group is given, and names.

    Raises
    ------
    TypeError, ValueError
        As `named_params`; for a group without parameters, and for `order_params` that come with other keys or are not
        exactly the parameters.
    """
    named: list[tuple[str, Array]] = []
    groups: list[tuple[dict[str, Any], list[str]]] = []
    order: Any = None
    offset = 0
    for i, entry in enumerate(entries):
        if "order_params" in entry:
            if len(entry) > 1 or order is not None:
                raise ValueError(
                    f"Optimizer: `order_params` must stand once, alone in its dict; got keys {list(entry)}"
                )
            order = entry["order_params"]
            if not isinstance(order, Iterable) or is_array(order):
                raise TypeError(
                    f"Optimizer: `order_params` must be a list of parameters; got {type(order).__name__}"
                )
            order = list(order)
            continue
        members = entry["params"]
        members = as_tree("Optimizer", [members] if is_array(members) else members)
        leaves = named_params(members, f"Optimizer: group {i}")
        if not isinstance(
            members, dict
        ):  # arrays without names of their own are numbered over all groups
            leaves = [(_numbered(name, offset), leaf) for name, leaf in leaves]
        offset += len(leaves) if isinstance(members, dict) else len(members)
        groups.append(
            ({k: v for k, v in entry.items() if k != "params"}, [name for name, _ in leaves])
        )
        named += leaves
    check_params(named, "Optimizer", entries)
    return (named if order is None else _ordered(named, order)), groups


def _numbered(path: str, offset: int) -> str:
    """A path whose leading position is shifted: the first array after three others is "3", wherever it stands."""
    head, dot, rest = path.partition(".")
    return f"{int(head) + offset if head.isdigit() else head}{dot}{rest}"


def _ordered(named: list[tuple[str, Array]], order: list[Any]) -> list[tuple[str, Array]]:
    """Parameters in the order of `order_params`, which holds the arrays themselves or their names."""
    by_key: dict[Any, tuple[str, Array]] = {id(leaf): (name, leaf) for name, leaf in named}
    by_key |= {name: (name, leaf) for name, leaf in named}
    found = [by_key.get(entry if isinstance(entry, str) else id(entry)) for entry in order]
    strange = [i for i, pair in enumerate(found) if pair is None]
    ordered = [pair for pair in found if pair is not None]
    missing = [name for name, _ in named if name not in dict(ordered)]
    if strange or missing or len(ordered) != len(named):
        raise ValueError(
            f"Optimizer: `order_params` must be exactly the parameters of the groups, each once; missing: {missing},"
            f" not parameters: positions {strange}, got {len(order)} for {len(named)}"
        )
    return ordered


def extend(
    who: str,
    tree: Any,
    params: Any,
    names: list[str],
    own: Callable[[Any], tuple[Any, Any]] | None = None,
) -> tuple[Any, list[tuple[str, Array]]]:
    """A tree with more parameters in it than those of `names`, and the new ones with their names.

    With `own`, what is first of what it gives for the tree is what this rank has of it.

    Raises
    ------
    TypeError, ValueError
        As `named_params`; for names that are taken; for a tree that is neither a dict nor a list.
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
            f"{who}: params must be a dict where the parameters are a dict, an array or a list where they are a list;"
            f" got {type(params).__name__} for {type(tree).__name__}"
        )
    named = named_params(larger if own is None else own(larger)[0], who)[len(names) :]
    taken = [repr(name) for name, _ in named if name in names]
    if taken:
        raise ValueError(f"{who}: there is already a parameter named {', '.join(taken)}")
    check_params(named, who, params)
    return larger, named


def match_grads(
    who: str,
    params: list[tuple[str, Array]],
    grads: Any,
    *,
    by_position: bool = False,
    devices: bool = True,
) -> dict[str, Array | None]:
    """The gradient of each parameter by name (None where left out), once everything about them has been checked.

    With `by_position`, a list of gradients is taken in the order of the parameters, whatever their names.

    Raises
    ------
    ValueError
        Listing every mismatch of names, shapes, dtype kinds, libraries and devices.
    """
    grads = as_tree(who, grads)
    given, names = dict(flatten(grads)), dict(params)
    if by_position and not isinstance(grads, dict):
        if len(given) != len(params):
            raise ValueError(
                f"{who}: grads must hold {len(params)} gradients (or None); got {len(given)}"
            )
        given = dict(zip(names, given.values(), strict=True))
    wrong = [f"missing {name!r}" for name in names if name not in given]
    wrong += [
        f"unexpected {name!r}" for name, g in given.items() if name not in names and g is not None
    ]
    for name, p in params:
        g = given.get(name)
        reason = refusal(g, functional=not devices)
        if reason is not None:
            wrong.append(f"{name!r} is {reason}")
        elif g is not None:
            wrong += [
                f"{what} at {name!r}, expected {expected}"
                for what, expected in _differences(p, g, devices)
            ]
    if wrong:
        bare = isinstance(grads, list | tuple) and len(given) == len(params)
        todo = ""
        if bare and not given.keys() & names.keys():
            todo = "; give a dict by name: dict(zip(names, grads))"
        elif isinstance(grads, dict) and not by_position and all(name.isdigit() for name in names):
            todo = "; give a list in the order of the parameters"
        raise ValueError(f"{who}: grads do not match params: {'; '.join(wrong)}{todo}")
    return {name: given[name] for name in names}


def _differences(p: Array, g: Any, devices: bool) -> list[tuple[str, Any]]:
    """In what a gradient differs from its parameter: (what came, what was expected)."""
    if not is_array(g):
        return [(type(g).__name__, "an array or None")]
    if array_namespace(g) is not array_namespace(p):
        return [(f"{library(g)} array", f"{library(p)} array")]
    found: list[tuple[str, Any]] = []
    if tuple(g.shape) != tuple(p.shape):
        found.append((f"shape {tuple(g.shape)}", tuple(p.shape)))
    if kind(g) != kind(p):
        found.append((f"dtype {g.dtype}", f"a {kind(p)} floating dtype like {p.dtype}"))
    if devices and place(g)[1] != place(p)[1]:
        found.append((f"device {place(g)[1]}", place(p)[1]))
    return found
