"""`transformation`: makes an optax transformation from a rule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from arrayopt import functional
from arrayopt.hyper import Listed, concrete
from arrayopt.optax.form import Form, Leaf, ViewedProjection
from arrayopt.params.groups import Groups
from arrayopt.rules.base import Rule
from arrayopt.rules.named import check_rule
from arrayopt.state.quantized import scales
from arrayopt.state.slots import advising, new_slots


class State(NamedTuple):
    """The state of a transformation.

    Attributes
    ----------
    count : 0-d array
        The number of updates.
    slots : dict of str to tree
        The rule's slots, each as a tree like the parameters; those without the slot have ``zeros(1)``.

    Notes
    -----
    Each rule has its own subclass, such as `LAMBState`. The update of another rule raises an error for it.
    """

    count: Any
    slots: dict[str, Any]

    def __reduce__(self) -> Any:
        return _remade, (getattr(self, "rule", None), *self)


@cache
def state_of(rule: type[Rule]) -> type[State]:
    """The subclass of `State` for a rule."""
    return type(f"{rule.__name__}State", (State,), {"__slots__": (), "__module__": __name__, "rule": rule})


def _remade(rule: type[Rule] | None, count: Any, slots: dict[str, Any]) -> State:
    """Make a state from its parts, for pickle and copy."""
    return (State if rule is None else state_of(rule))(count, slots)


def transformation(rule: Rule, *, mask: Any = None) -> optax.GradientTransformationExtraArgs:
    """Make an optax transformation from a rule.

    Parameters
    ----------
    rule : Rule
        The rule. Its schedules get the number of updates so far.
    mask : tree of bool, or callable, optional
        Which parameters decay: a tree like the parameters, or a prefix of it, or a function of the parameters that
        returns one. The others use the same rule with ``weight_decay=0``.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        `init(params)` returns a `State`. `update(grads, state, params)` returns the difference between the new
        parameters and `params`, for `optax.apply_updates`, and the new state.

    Raises
    ------
    TypeError
        If `rule` is not a Rule, or `mask` is given and the rule has no weight decay.

    Notes
    -----
    A sequence that has run out raises a ValueError; in a traced update, as under `jax.jit`, its value is NaN.

    ``params + update`` is rounded once more, so its last bit may differ from the new parameter's. Masters and averages
    of parameters are those of `arrayopt.update`. If an element of the parameter is not the rounded master, as after a
    later transformation or a write from outside, the master is set to the parameter in that element.

    Examples
    --------
    >>> import jax.numpy as jnp, optax, arrayopt as ao
    >>> from arrayopt.optax import transformation
    >>> tx, params = transformation(ao.SGD(lr=0.5)), {"w": jnp.ones(2)}
    >>> updates, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
    >>> optax.apply_updates(params, updates)["w"].tolist(), int(state.count)
    ([0.5, 0.5], 1)
    """
    check_rule("transformation", rule, Rule)
    if mask is not None and "weight_decay" not in {f.name for f in fields(rule)}:
        raise TypeError(f"transformation: `mask` selects what decays, but {type(rule).__name__} has no weight decay")
    return transform(Form(rule, masked(rule, [("mask", mask, {"weight_decay": 0.0})])))


def masked(rule: Rule, masks: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> Callable[[Any], list[Leaf]]:
    """Return `Form.leaves` for a rule. `masks` has the name, the mask, and the fields to change where it is False."""

    def leaves(params: Any) -> list[Leaf]:
        made = [rule] * len(jax.tree.leaves(params))
        for name, mask, changes in masks:
            if mask is not None:
                kept, off = _flags(f"{type(rule).__name__}: `{name}`", mask, params), dict[int, Rule]()
                for i, own in enumerate(made):
                    if not kept[i]:
                        made[i] = off.setdefault(id(own), replace(own, **changes))
        return [(own, None) for own in made]

    return leaves


def _flags(who: str, mask: Any, params: Any) -> list[bool]:
    """The value of a mask for each leaf of the parameters. Raise TypeError if one is not a bool."""
    found = jax.tree.leaves(mask)
    called = bool(found) and all(callable(x) for x in found)
    flags = spread(who, mask(params) if called else mask, params)
    if not all(isinstance(x, bool | np.bool_) for x in flags):
        raise TypeError(
            f"{who} must be a tree of bools, or a function of the parameters that returns one; got {mask!r}"
        )
    return flags


def spread(who: str, prefix: Any, params: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The value in `prefix`, a tree like the parameters or a prefix of it, for each leaf of the parameters."""
    outline: Any
    values, outline = jax.tree.flatten(prefix, is_leaf=is_leaf)
    try:
        parts = outline.flatten_up_to(params)
    except ValueError as error:
        raise ValueError(f"{who} must be a tree like the parameters, or a prefix of it: {error}") from error
    return [value for value, part in zip(values, parts, strict=True) for _ in jax.tree.leaves(part)]


def transform(form: Form) -> optax.GradientTransformationExtraArgs:
    """The transformation of a form."""
    rule, who = form.rule, type(form.rule).__name__
    own = state_of(type(rule))
    listed = any(isinstance(value, Listed) for value in vars(rule).values())
    last = _slots_of_rules((rule, *form.also))  # of the last `init`; optax also calls it without parameters
    slots_of: dict[Any, tuple[str, ...]] = {}

    def init(params: Any) -> State:
        names, tree = _named(_jax(params))
        leaves = _leaves(form, names, params)
        tensors: dict[str, dict[str, Any]] = {}
        with advising("give it another rule, by optax.multi_transform"):
            if names:
                tensors = functional.init(rule, _views(names, leaves), groups=_groups(rule, leaves))["tensors"]
        for slots in tensors.values():
            slots.update({slot: slots[slot].astype(dtype) for slot, dtype in form.stored.items() if slot in slots})
        if names:
            last.clear()
            last.update(_slots_of_rules((rule, *form.also)))
            last.update(dict.fromkeys(slot for slots in tensors.values() for slot in slots if slot != "t"))
        return own(jnp.zeros((), jnp.int32), _trees(last, names, tensors, leaves, tree))

    def update(grads: Any, state: State, params: Any = None, **extra: Any) -> tuple[Any, State]:
        if not isinstance(state, State) or getattr(state, "rule", type(rule)) is not type(rule):
            raise TypeError(
                f"{who}: `state` must be what init or update of this rule returned; got"
                f" {type(state).__name__}. Make one with tx.init(params)"
            )
        grads, state, params = _jax(grads), _jax(state), _jax(params)
        step = concrete(state.count)
        if listed and step is not None:
            rule.at(int(step))  # raises ValueError if a sequence has run out; a traced step cannot raise
        if params is None:
            raise ValueError(f"{who}: an update needs the parameters: tx.update(grads, state, params)")
        names, tree = _named(params)
        count: Any = optax.safe_increment(state.count)
        if not names:
            return grads, type(state)(count, state.slots)
        leaves = _leaves(form, names, params)
        each = {slot: _leaves_like(f"{who}: the slots of state", names, tree, x) for slot, x in state.slots.items()}
        given = dict(zip(names, _leaves_like(f"{who}: grads", names, tree, grads), strict=True))
        viewed, tensors = _views(names, leaves), dict[str, dict[str, Any]]()
        for i, (name, p) in enumerate(names.items()):
            own_rule, view = leaves[name]
            if view is not None and given[name] is not None and given[name].shape == p.shape:
                given[name] = view.apply(given[name])
            tensors[name] = {"t": state.count}
            look = (own_rule.structure, viewed[name].shape, viewed[name].dtype)
            if look not in slots_of:
                slots_of[look] = _slots_of(own_rule, name, viewed[name])
            for slot in slots_of[look]:
                x = each[slot][i] if slot in each else None
                if x is not None:
                    tensors[name][slot] = view.apply(x) if view is not None and x.shape == p.shape else x
        old = {"step": state.count, "tensors": tensors}
        new, made = functional.update(rule, viewed, given, old, groups=_groups(rule, leaves), value=extra.get("value"))
        difference = []
        for name, p in names.items():
            view = leaves[name][1]
            difference.append((new[name] if view is None else view.invert(new[name], p.shape)) - p)
        slots = _trees(state.slots, names, made["tensors"], leaves, tree)
        return tree.unflatten(difference), type(state)(count, slots)

    return optax.GradientTransformationExtraArgs(init, update)


def _jax(tree: Any) -> Any:
    """Convert the NumPy arrays in a tree to JAX arrays, since restored checkpoints may contain them."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x, tree)


def _leaves(form: Form, names: dict[str, Any], params: Any) -> dict[str, Leaf]:
    """The rule and the view of each tensor, by name."""
    made = dict(zip(names, form.leaves(params), strict=True)) if names else {}
    for name, (own, view) in made.items():
        if view is not None and own.project is not None:
            made[name] = replace(own, project=ViewedProjection(own.project, view, tuple(names[name].shape))), view
    return made


def _views(names: dict[str, Any], leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """The views of the parameters, or the parameters without a view."""
    return {name: p if (view := leaves[name][1]) is None else view.apply(p) for name, p in names.items()}


def _groups(rule: Rule, leaves: Mapping[str, Leaf]) -> Groups | None:
    """Groups for the tensors with other rules than `rule`."""
    found: dict[int, tuple[Rule, set[str]]] = {}
    for name, (other, _) in leaves.items():
        if other is not rule:
            found.setdefault(id(other), (other, set()))[1].add(name)
    return [(lambda name, _, names=names: name in names, other) for other, names in found.values()] or None


def _slots_of_rules(rules: tuple[Rule, ...]) -> dict[str, None]:
    """The names of all slots that tensors of rank 0 to 4 have under these rules."""
    found: dict[str, None] = {}
    for rule in rules:
        for rank in range(5):
            one = np.zeros((1,) * rank)
            if not rule.refuses(np, one):
                found.update(dict.fromkeys([*rule.all_slots(np, one, "float32"), *scales(rule, one.ndim)]))
    return found


def _slots_of(rule: Rule, name: str, p: Any) -> tuple[str, ...]:
    """The names of the slots of a tensor."""
    return tuple(jax.eval_shape(lambda p: new_slots(rule, name, p), jax.ShapeDtypeStruct(p.shape, p.dtype)))  # type: ignore[no-untyped-call]


def _trees(
    every: Any, names: dict[str, Any], tensors: dict[str, dict[str, Any]], leaves: Mapping[str, Any], tree: Any
) -> dict[str, Any]:
    """A tree like the parameters for each slot, with ``zeros(1)`` for tensors without that slot.

    None cannot take their place, because optax maps functions over these trees together with the parameters.
    """
    made: dict[str, Any] = {}
    for slot in every:
        values = []
        for name, p in names.items():
            x, view = tensors[name].get(slot), leaves[name][1]
            if x is None:
                x = jnp.zeros(1, p.dtype)
            elif view is not None and x.shape == view.shape:
                x = view.invert(x, p.shape)
            values.append(x)
        made[slot] = tree.unflatten(values)
    return made


def _named(params: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of a tree by their paths (or by numbers, if paths are not unique), and the structure of the tree."""
    pairs, tree = jax.tree_util.tree_flatten_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "param" for path, _ in pairs]
    if len(set(names)) < len(names):
        names = [str(i) for i in range(len(names))]
    return dict(zip(names, (leaf for _, leaf in pairs), strict=True)), tree


def _leaves_like(what: str, named: dict[str, Any], tree: Any, given: Any) -> list[Any]:
    """The leaves of a tree like the parameters, including None. Raise ValueError, with the names that do not match."""
    try:
        leaves: list[Any] = tree.flatten_up_to(given)
    except ValueError as error:
        paths, _ = jax.tree_util.tree_flatten_with_path(given, is_leaf=lambda x: x is None)
        here = [jax.tree_util.keystr(path, simple=True, separator=".") or "param" for path, _ in paths]
        wrong = [f"missing {name!r}" for name in named if name not in here]
        wrong += [f"unexpected {name!r}" for name in here if name not in named]
        raise ValueError(f"{what} do not match params: {'; '.join(wrong) or error}") from error
    return leaves
