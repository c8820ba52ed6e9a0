"""`function`: makes the functions of `arrayopt.optax`, with their signatures and errors for unknown arguments."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import optax

from arrayopt.arrays import NARROW, dtype_name
from arrayopt.foreign import check_names, counted
from arrayopt.foreign_names import RULE

_INSTEAD = {
    "accumulate": "wrap it in optax.MultiSteps",
    "clip_norm": "clip before it: optax.chain(optax.clip_by_global_norm(1.0), ...)",
    "engine": "leave it out: JAX compiles the update",
    "fused": "leave it out: JAX compiles the update",
    "groups": "use optax.multi_transform, with a transformation for each label",
    "loss_scale": "divide the gradients by the scale before it: optax.chain(optax.scale(1 / scale), ...)",
    "mask": "use optax.multi_transform, with a transformation for each label",
    "params": "pass the parameters to tx.init(params) and tx.update(grads, state, params)",
    "skip_nonfinite": "wrap it in optax.apply_if_finite",
    "stats": "arrayopt.update returns statistics",
}
"""For each option of `Optimizer`, what to do instead in a program that uses optax."""

_ADVICE = {
    name: next((words for option, words in _INSTEAD.items() if said == RULE[option]), said)
    for name, said in RULE.items()
}


class _Wrapped:
    """Wraps an argument so that optax.inject_hyperparams does not call it as a schedule or convert it to an array."""

    def __init__(self, value: Any) -> None:
        self.value = value


def function(
    who: str,
    doc: str,
    parameters: Sequence[inspect.Parameter],
    numbers: Collection[str],
    build: Callable[[dict[str, Any]], optax.GradientTransformationExtraArgs],
    more: Sequence[inspect.Parameter] = (),
    known_as: Mapping[str, str] | None = None,
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """A function that makes a transformation. Its parameters are `parameters`, and those in `more` by name.

    `known_as` maps other names of parameters to these. `numbers` are the names of parameters that optax may inject.
    `build` takes a dict of all arguments and returns the transformation.
    """
    names, aliases = [p.name for p in (*parameters, *more)], known_as or {}

    def values(args: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Any]:
        places = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        if len(args) > len(places):
            raise TypeError(f"{who} takes at most {counted(len(places), 'positional argument')}; got {len(args)}")
        found, said = dict(zip(places, args, strict=False)), dict.fromkeys(places, "by its place")
        keys = {name: name if name in names else aliases.get(name, name) for name in given}
        check_names(who, names, {name: given[name] for name, key in keys.items() if key not in names}, _ADVICE)
        for name, key in keys.items():
            if key in found:
                raise TypeError(f"{who}: `{key}` is given twice, {said[key]} and as `{name}`; pass it once")
            found[key], said[key] = given[name], f"as `{name}`"
        for p in parameters:
            if found.setdefault(p.name, p.default) is inspect.Parameter.empty:
                raise TypeError(f"{who}: `{p.name}` must be given")
        return found

    def make(*args: Any, **given: Any) -> optax.GradientTransformationExtraArgs:
        plain = {name: x.value if isinstance(x, _Wrapped) else x for name, x in values(args, given).items()}
        try:
            return build(dict(plain))
        except ValueError as error:
            narrow = [dtype_name(x) for x in plain.values() if isinstance(x, jax.Array) and dtype_name(x) in NARROW]
            if not narrow:
                raise
            raise ValueError(
                f"{error}. Numbers are rounded to {narrow[0]} here, as optax.inject_hyperparams does for parameters of"
                " that dtype; set hyperparam_dtype=jnp.float32"
            ) from None

    class Injectable(inspect.Signature):
        """A signature for optax.inject_hyperparams, which accepts other names and wraps what is not a number."""

        def bind(self, /, *args: Any, **given: Any) -> inspect.BoundArguments:
            wrapped = {name: x if name in numbers else _Wrapped(x) for name, x in values(args, given).items()}
            kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in wrapped]
            return inspect.Signature(kinds).bind(**wrapped)

    make.__name__ = make.__qualname__ = who
    make.__module__ = "arrayopt.optax"
    make.__doc__ = doc
    make.__signature__ = Injectable([*parameters, *more])  # type: ignore[attr-defined]
    return make
