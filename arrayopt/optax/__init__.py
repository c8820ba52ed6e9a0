"""Optax transformations: optax's own functions, computed by rules, and a function for every other rule."""

from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter
from typing import Any

try:
    import optax
except ModuleNotFoundError as error:
    if error.name not in ("jax", "jaxlib", "optax"):
        raise
    words = f"arrayopt.optax needs JAX and optax, and {error.name} is not installed; pip install jax optax"
    raise ModuleNotFoundError(words, name=error.name) from None

from arrayopt import rules
from arrayopt.foreign import no_attribute
from arrayopt.foreign_names import OPTAX
from arrayopt.optax.functions import function
from arrayopt.optax.same import SAME, same_function
from arrayopt.optax.transformation import State, transformation
from arrayopt.params.groups import field_parameters
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers

__all__ = ["State", "transformation"]


def _of_rule(rule: type[Rule]) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """The function for a rule that optax lacks: it takes the rule's fields, and a mask if there is a weight decay."""
    parameters = list(field_parameters(rule))
    if "weight_decay" in {f.name for f in fields(rule)}:
        parameters.append(Parameter("mask", Parameter.KEYWORD_ONLY, default=None))
    doc = f"`{rule.__name__}` as a transformation of optax; see there for the fields, and `transformation`."

    def build(values: dict[str, Any]) -> optax.GradientTransformationExtraArgs:
        mask = values.pop("mask", None)
        return transformation(rule(**values), mask=mask)

    return function(rule.__name__.lower(), doc, parameters, hypers(rule), build, known_as=OPTAX)


_MADE = {
    name: same_function(name, SAME[name]) if name in SAME else _of_rule(getattr(rules, title))
    for title in rules.__all__
    if title != "Rule"
    for name in [title.lower()]
}
globals().update(_MADE)
__all__ += sorted(_MADE)
__all__.sort(key=lambda name: (not name[0].isupper(), name))


def __dir__() -> list[str]:
    """The names for tab completion."""
    return __all__


def __getattr__(name: str) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """Raise AttributeError, and say what to use instead."""
    if name.upper() in rules.SOLVERS:
        raise AttributeError(
            f"arrayopt.optax has no {name}, a rule for whole functions; use"
            f" arrayopt.optax.transformation(arrayopt.{name.upper()}()), with `value` given to its update, or"
            " arrayopt.minimize",
            name=name,
        )
    raise no_attribute(__name__, __all__, name, optax)
