"""A state dict of PyTorch's form, checked against the groups that are to go on from it."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from arrayopt.params.groups import fields_of
from arrayopt.rules.base import Rule
from arrayopt.torch.settings import RULE, defaults_of

__all__ = ["loaded_of"]

_SHARED = frozenset(fields_of(Rule)) - {"weight_decay"}
"""Fields of every rule: a group here has them, and none of another library's optimizer has."""

_BARE = {"params", "param_names"}
"""What a group has that says nothing of its optimizer."""


def loaded_of(
    who: str,
    rule: type[Rule],
    shared: Mapping[str, Any],
    mine: list[dict[str, Any]],
    slots: set[str],
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    """A state dict with the parameters themselves in it, in place of their numbers.

    Parameters
    ----------
    who : str
        What errors begin with.
    rule : type
        The rule of groups that have none of their own.
    shared : mapping
        The values of its fields where a group says nothing.
    mine : list of dict
        The groups here.
    slots : set of str
        The names of all slots here.
    saved : mapping
        What `Optimizer.state_dict` returned.

    Raises
    ------
    ValueError
        If it is of other rules, or of other groups.
    """
    theirs = saved["param_groups"]
    if saved.get("rule", rule.__name__) != rule.__name__:
        raise ValueError(f"{who}: the state is for {saved['rule']}, but the rule here is {rule.__name__}")
    if "rule" not in saved and not any(_SHARED & group.keys() or group.keys() <= _BARE for group in theirs):
        raise ValueError(
            f"{who}: the state is from an optimizer of PyTorch, or of another library; where it has the same rule, use"
            " arrayopt.load_torch(opt, state)"
        )
    sizes = [[len(group["params"]) for group in groups] for groups in (theirs, mine)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{who}: the state has groups of {sizes[0]} parameters, but the optimizer has groups of {sizes[1]}"
        )
    other = [f"group {i} is under {b[1]}, here {b[0]}" for i, b in enumerate(_rules(mine, theirs)) if b[0] != b[1]]
    if other:
        raise ValueError(f"{who}: the state is for other rules: {'; '.join(other)}")
    groups, home = [], dict[Any, Tensor]()
    for group, was in zip(mine, theirs, strict=True):
        home |= zip(was["params"], group["params"], strict=True)
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        own = {RULE: group[RULE]} if RULE in group else {}
        defaults = defaults_of(group[RULE], was) if own else shared
        groups.append({**defaults, **names, **was, **own, "params": group["params"]})
    strange = [key for key in saved["state"] if isinstance(key, int) and key not in home]
    if strange:
        raise ValueError(f"{who}: the state has {strange}, which are in no group")
    state = {home.get(key, key): entry for key, entry in saved["state"].items()}
    return {"state": state, "param_groups": groups, "step_count": saved.get("step_count")}


def _rules(mine: Iterable[Mapping[str, Any]], theirs: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Any, Any]]:
    """The names of the rules that groups here, and those of a state, have of their own."""
    for group, was in zip(mine, theirs, strict=True):
        yield getattr(group.get(RULE), "__name__", None), getattr(was.get(RULE), "__name__", was.get(RULE))
