"""Functions that make transformations: how they are called, and what they say to names that they do not know."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from arrayopt.arrays import NARROW, dtype_name
from arrayopt.foreign import RULE, unknown

__all__ = ["Call", "function"]

_INSTEAD = {
    "accumulate": "wrap it in optax.MultiSteps",
    "clip_norm": "clip before it: optax.chain(optax.clip_by_global_norm(1.0), ...)",
    "engine": "leave it out: JAX compiles the update",
    "fused": "leave it out: JAX compiles the update",
    "groups": "use optax.multi_transform, with a transformation for each label",
    "loss_scale": "divide the gradients by the scale before it: optax.chain(optax.scale(1 / scale), ...)",
    "mask": "use optax.multi_transform, with a transformation for each label",
    "params": "give the parameters to tx.init(params) and tx.update(grads, state, params)",
    "skip_nonfinite": "wrap it in optax.apply_if_finite",
    "stats": "arrayopt.update returns statistics",
}
"""What to do in an optax program instead of giving an option of `Optimizer`."""

_ADVICE = {
    name: next((words for option, words in _INSTEAD.items() if said == RULE[option]), said)
    for name, said in RULE.items()
}


class _Held:
    """What optax is not to call as a schedule, or to make an array of."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class Call:
    """How a function is called.

    `parameters` are those of its signature, `more` the names that it takes beside them. `known_as` maps other names to
    these. `numbers` are those whose values optax may inject; `build` takes all values, by name.
    """

    who: str
    parameters: Sequence[inspect.Parameter]
    numbers: Collection[str]
    build: Callable[[dict[str, Any]], optax.GradientTransformationExtraArgs]
    more: Collection[str] = ()
    known_as: Mapping[str, str] = field(default_factory=dict)

    def values(self, args: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Any]:
        """What is given, by name, beside defaults; TypeError for what is not taken, given twice or missing."""
        places = [p.name for p in self.parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        if len(args) > len(places):
            raise TypeError(f"{self.who} takes {len(places)} values without names, {', '.join(places)}; got {len(args)}")
        values = dict(zip(places, args, strict=False))
        taken = [*(p.name for p in self.parameters), *self.more]
        for name, value in given.items():
            key = name if name in taken else self.known_as.get(name, name)
            if key not in taken:
                raise TypeError(unknown(self.who, taken, name, _ADVICE, value))
            if key in values:
                other = next((f"`{x}`" for x in given if x != name and x in (key, self.known_as)), "by its place")
                raise TypeError(f"{self.who}: `{key}` is given twice, as {other} and as `{name}`; give it once")
            values[key] = value
        defaults = {p.name: p.default for p in self.parameters if p.name not in values}
        missing = [f"`{name}`" for name, value in defaults.items() if value is inspect.Parameter.empty]
        if missing:
            raise TypeError(f"{self.who}: {', '.join(missing)} must be given")
        return {**values, **defaults}


class _Taken(inspect.Signature):
    """The signature, as optax.inject_hyperparams binds it: by any name, and what shapes a rule as it is."""

    call: Call

    def bind(self, /, *args: Any, **given: Any) -> inspect.BoundArguments:
        values = self.call.values(args, given)
        held = {name: x if name in self.call.numbers else _Held(x) for name, x in values.items()}
        kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in held]
        return inspect.Signature(kinds).bind(**held)


def function(call: Call, doc: str) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """The function that is called so."""

    def make(*args: Any, **given: Any) -> optax.GradientTransformationExtraArgs:
        values = call.values(args, given)
        values = {name: x.value if isinstance(x, _Held) else x for name, x in values.items()}
        try:
            return call.build(values)
        except ValueError as error:
            narrow = [dtype_name(x) for x in values.values() if isinstance(x, jax.Array) and dtype_name(x) in NARROW]
            if not narrow:
                raise
            raise ValueError(
                f"{error}. Numbers are rounded to {narrow[0]} here, as optax.inject_hyperparams does for parameters of"
                " that dtype; give it hyperparam_dtype=jnp.float32"
            ) from None

    last = [inspect.Parameter("fields", inspect.Parameter.VAR_KEYWORD)] if call.more else []
    signature = _Taken([*call.parameters, *last])
    signature.call = call
    make.__name__ = make.__qualname__ = call.who
    make.__doc__ = doc
    make.__signature__ = signature  # type: ignore[attr-defined]
    return make
