"""Every rule as a transformation of optax, under its name in small letters: ``arrayopt.optax.lamb(1e-3)``."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import optax
except ModuleNotFoundError as error:
    if error.name not in ("jax", "jaxlib", "optax"):
        raise
    words = f"arrayopt.optax needs JAX and optax, and {error.name} is not installed; pip install jax optax"
    raise ModuleNotFoundError(words, name=error.name) from None

from arrayopt import functional, rules
from arrayopt.arrays import NARROW, dtype_name
from arrayopt.foreign import OPTAX, RULE, unknown
from arrayopt.hyper import Listed, concrete
from arrayopt.params.groups import field_parameters, fields_of
from arrayopt.rules.base import Rule
from arrayopt.state.tensors import advising

__all__ = ["State", "transformation"]

_UNGIVEN: Any = object()

_INSTEAD = {
    "accumulate": "wrap it in optax.MultiSteps",
    "clip_norm": "clip before it: optax.chain(optax.clip_by_global_norm(1.0), ...)",
    "engine": "leave it out: JAX compiles the update",
    "fused": "leave it out: JAX compiles the update",
    "groups": "use optax.multi_transform, with a transformation for each label, or optax.masked",
    "loss_scale": "divide the gradients by the scale before it: optax.chain(optax.scale(1 / scale), ...)",
    "mask": "use optax.multi_transform, with a transformation for each label, or optax.masked",
    "params": "give the parameters to tx.init(params) and tx.update(grads, state, params)",
    "skip_nonfinite": "wrap it in optax.apply_if_finite",
    "stats": "arrayopt.update returns statistics",
}
"""What to do in an optax program instead of giving an option of `Optimizer`."""

_ADVICE = {
    name: next((words for option, words in _INSTEAD.items() if said == RULE[option]), said)
    for name, said in RULE.items()
}


class State(NamedTuple):
    """The state of a transformation.

    Attributes
    ----------
    count : 0-d array
        The number of updates.
    slots : dict of str to tree
        The rule's slots, each as a tree like the parameters, with None for those that do not have it.

    Notes
    -----
    A transformation makes a class of it for each rule, such as `LAMBState`, and refuses that of another rule.
    """

    count: Any
    slots: dict[str, Any]

    def __reduce__(self) -> Any:
        return _remade, (getattr(self, "rule", None), *self)


@cache
def _state_of(rule: type[Rule]) -> type[State]:
    """The class of a rule's states."""
    return type(f"{rule.__name__}State", (State,), {"__slots__": (), "__module__": __name__, "rule": rule})


def _remade(rule: type[Rule] | None, count: Any, slots: dict[str, Any]) -> State:
    """A state from its parts, as pickle and copy have them."""
    return (State if rule is None else _state_of(rule))(count, slots)


def transformation(rule: Rule) -> optax.GradientTransformationExtraArgs:
    """A rule as a transformation of optax.

    Parameters
    ----------
    rule : Rule
        The rule. Its schedules see the number of updates so far.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        `init(params)` returns a `State`. `update(grads, state, params)` returns the difference between the new
        parameters and `params`, for `optax.apply_updates`, and the new state.

    Raises
    ------
    TypeError
        If `rule` is not a Rule.

    Notes
    -----
    A sequence that has run out is a ValueError. A traced update, as under `jax.jit`, cannot raise: its value is NaN.

    ``params + update`` is rounded once more, so it may be another than the new parameter in the last bit where an
    update is large. Masters and averages of parameters, which are slots, are those of `arrayopt.update`; but where the
    parameter is not the master rounded, as after a later transformation that changed the update, or after a write from
    outside, the master begins anew as the parameter, in that element.

    Examples
    --------
    >>> import jax.numpy as jnp, optax, arrayopt as ao
    >>> from arrayopt.optax import transformation
    >>> tx, params = transformation(ao.SGD(lr=0.5)), {"w": jnp.ones(2)}
    >>> updates, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
    >>> optax.apply_updates(params, updates)["w"].tolist(), int(state.count)
    ([0.5, 0.5], 1)
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"transformation: `rule` must be a Rule such as LAMB(lr=1e-3); got {rule!r}")

    own = _state_of(type(rule))
    listed = any(isinstance(value, Listed) for value in vars(rule).values())

    def init(params: Any) -> State:
        named, tree = _named(params)
        with advising("give it another rule, by optax.multi_transform"):
            tensors = functional.init(rule, named)["tensors"] if named else {}
        return own(jnp.zeros((), jnp.int32), _slots(rule, tensors, tree))

    def update(grads: Any, state: State, params: Any = None, **extra: Any) -> tuple[Any, State]:
        if not isinstance(state, State) or getattr(state, "rule", type(rule)) is not type(rule):
            raise TypeError(
                f"{type(rule).__name__}: `state` must be what init or update of this rule returned; got"
                f" {type(state).__name__}. Make one with tx.init(params)"
            )
        step = concrete(state.count)
        if listed and step is not None:
            rule.at(int(step))  # a sequence that has run out is an error where that can be known
        if params is None:
            raise ValueError(f"{type(rule).__name__}: an update needs the parameters: tx.update(grads, state, params)")
        named, tree = _named(params)
        count: Any = optax.safe_increment(state.count)
        if not named:
            return grads, type(state)(count, state.slots)
        each = {
            slot: _along(f"{type(rule).__name__}: the slots of state", named, tree, x)
            for slot, x in state.slots.items()
        }
        tensors = {
            name: {"t": state.count, **{slot: x[i] for slot, x in each.items() if x[i] is not None}}
            for i, name in enumerate(named)
        }
        for name, p in named.items():
            if "master" in tensors[name]:
                tensors[name]["master"] = _current(tensors[name]["master"], p)
        given = dict(zip(named, _along(f"{type(rule).__name__}: grads", named, tree, grads), strict=True))
        new, made = functional.update(rule, named, given, {"step": state.count, "tensors": tensors})
        difference = [new[name] - p for name, p in named.items()]
        return tree.unflatten(difference), type(state)(count, _slots(rule, made["tensors"], tree))

    return optax.GradientTransformationExtraArgs(init, update)


def _current(master: Any, p: Any) -> Any:
    """A master that begins anew, as the parameter, in each element where the parameter is not the master rounded.

    Bits are compared: a compiler may leave out the rounding of numbers that it compares.
    """
    bits = [jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (master.astype(p.dtype), jnp.asarray(p))]
    return jnp.where(bits[0] == bits[1], master, p.astype(master.dtype))


def _named(params: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of a tree by their paths, or by number where paths are not different; and the tree without them."""
    pairs, tree = jax.tree_util.tree_flatten_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "param" for path, _ in pairs]
    if len(set(names)) < len(names):
        names = [str(i) for i in range(len(names))]
    return dict(zip(names, (leaf for _, leaf in pairs), strict=True)), tree


def _along(what: str, named: dict[str, Any], tree: Any, given: Any) -> list[Any]:
    """The leaves of a tree like the parameters, None among them; or raise, naming those that are not alike."""
    try:
        leaves: list[Any] = tree.flatten_up_to(given)
    except ValueError as error:
        paths, _ = jax.tree_util.tree_flatten_with_path(given, is_leaf=lambda x: x is None)
        here = [jax.tree_util.keystr(path, simple=True, separator=".") or "param" for path, _ in paths]
        wrong = [f"missing {name!r}" for name in named if name not in here]
        wrong += [f"unexpected {name!r}" for name in here if name not in named]
        raise ValueError(f"{what} do not match params: {'; '.join(wrong) or error}") from error
    return leaves


def _slots(rule: Rule, tensors: dict[str, dict[str, Any]], tree: Any) -> dict[str, Any]:
    """A tree for each slot that a tensor has; where there are no tensors, for those that matrices have."""
    every = dict.fromkeys(slot for own in tensors.values() for slot in own if slot != "t")
    if not tensors:
        every = dict.fromkeys(rule.all_slots(np, np.zeros((1, 1)), "float32"))
    return {slot: tree.unflatten([own.get(slot) for own in tensors.values()]) for slot in every}


class _Held(NamedTuple):
    """What optax is not to call as a schedule, or to make an array of."""

    value: Any


def _factory(rule: type[Rule]) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """The function that makes a rule's transformation."""
    fields, who = fields_of(rule), rule.__name__.lower()
    structural = [f.name for f in dataclasses.fields(rule) if "read" in f.metadata]  # such as `project` and `seed`

    def named(given: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """What is given, by the names of fields, beside `values` that are so already."""
        for name, value in given.items():
            field = OPTAX.get(name, name)
            field = field if field in fields else name
            if field not in fields:
                raise TypeError(unknown(who, fields, name, _ADVICE, value))
            if field in values:
                other = next((f"`{x}`" for x in given if x != name and OPTAX.get(x, x) == field), "the first argument")
                raise TypeError(f"{who}: `{field}` is given twice, as {other} and as `{name}`; give it once")
            values[field] = value
        return values

    def make(lr: Any = _UNGIVEN, **given: Any) -> optax.GradientTransformationExtraArgs:
        values = named(given, {} if lr is _UNGIVEN else {"lr": lr})
        values = {name: x.value if isinstance(x, _Held) else x for name, x in values.items()}
        try:
            return transformation(rule(**values))
        except ValueError as error:
            narrow = [dtype_name(x) for x in values.values() if isinstance(x, jax.Array) and dtype_name(x) in NARROW]
            if not narrow:
                raise
            raise ValueError(
                f"{error}. Numbers are rounded to {narrow[0]} here, as optax.inject_hyperparams does for parameters of"
                " that dtype; give it hyperparam_dtype=jnp.float32"
            ) from None

    class Taken(inspect.Signature):
        """The signature, as optax.inject_hyperparams binds it: by any name, and what shapes a rule as it is."""

        def bind(self, /, *args: Any, **given: Any) -> inspect.BoundArguments:
            values = named(given, {"lr": args[0]} if args else {})
            values |= {name: _Held(values.get(name, getattr(rule, name))) for name in structural}
            return super().bind(*args[1:], **values)

    make.__name__ = make.__qualname__ = who
    make.__doc__ = (
        f"`{rule.__name__}` as a transformation of optax; see there for the fields, and `transformation`.\n\n"
        "The learning rate may come first, without its name; `learning_rate`, `b1`, `b2` and `b3` are known, too."
    )
    make.__signature__ = Taken(field_parameters(rule))  # type: ignore[attr-defined]
    return make


_MADE = {name.lower(): _factory(getattr(rules, name)) for name in rules.__all__ if name != "Rule"}
globals().update(_MADE)
__all__ += sorted(_MADE)
__all__.sort(key=lambda name: (not name[0].isupper(), name))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., optax.GradientTransformationExtraArgs]:
        """What makes the transformation of a rule."""
