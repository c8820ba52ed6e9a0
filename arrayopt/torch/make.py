"""The classes of `arrayopt.torch`: one for each rule, made from its fields."""

import inspect
from functools import cache
from typing import Any

from arrayopt.params.groups import field_parameters, fields_of
from arrayopt.rules.base import Rule
from arrayopt.torch.base import Optimizer
from arrayopt.torch.settings import OPTIONS, Settings
from arrayopt.torch.spelled import more_of, otherwise_all, places

_DOC = """{first}

The `torch.optim.Optimizer` of the rule `{name}`, whose page has the formula. See also `arrayopt.torch`.

Parameters
----------
params : iterable of tensors, of (name, tensor), or of group dicts
    The parameters, as for PyTorch's optimizers.
{fields}
maximize : bool, default False
    Maximize instead of minimize. Groups may have their own values.
engine : str, default "auto"
    What runs the rule; see `arrayopt.Optimizer`.
clip_norm : number, schedule or sequence, optional
    The largest global norm of all gradients, in (0, inf).
skip_nonfinite : bool, default False
    Skip each step with a gradient that is not finite.
stats : bool, default False
    Collect ``inner.stats`` in each step.
release : bool or int, default False
    Update each parameter in the backward pass, as soon as its gradient is there, and free the gradient. `step` ends the
    step then. A number: in the last of so many backward passes. See `arrayopt.Optimizer.give`.
comm : communicator or Ranks, optional
    The processes that share the state; see `arrayopt.Ranks`. All of them make the same calls.
overlap : bool or int, default False
    With `comm`: send gradients during the backward pass and free them, and receive parameters during the next forward
    pass, for which modules wait. A bare communicator then means the mean of gradients. A number: in the last of so many
    backward passes.

Raises
------
TypeError, ValueError
    For values of the wrong kind or outside their intervals, and for parameters that cannot be used.
"""


@cache
def optimizer(rule: type[Rule]) -> type[Optimizer]:
    """The ``torch.optim.Optimizer`` of a rule.

    Parameters
    ----------
    rule : type
        A subclass of `arrayopt.Rule`.

    Returns
    -------
    type
        A subclass of `arrayopt.torch.Optimizer`, always the same one for a rule. It takes parameters and, by name, the
        rule's fields, `maximize`, `release`, `overlap`, and options of `arrayopt.Optimizer`: `engine`, `clip_norm`,
        `skip_nonfinite`, `stats`, `comm`. The learning rate may come second, without its name.

    Raises
    ------
    TypeError
        If `rule` is not a Rule class, or has a field with the name of an option.

    Examples
    --------
    >>> import torch, arrayopt as ao
    >>> from arrayopt.torch import optimizer
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> opt = optimizer(ao.LARS)([w], lr=0.1)
    >>> isinstance(opt, torch.optim.Optimizer), opt.param_groups[0]["momentum"]
    (True, 0.9)
    """
    if not (isinstance(rule, type) and issubclass(rule, Rule) and not inspect.isabstract(rule)):
        raise TypeError(f"arrayopt.torch.optimizer: `rule` must be a class of rules such as LAMB; got {rule!r}")
    taken = [name for name in fields_of(rule) if name in OPTIONS]
    if taken:
        raise TypeError(
            f"arrayopt.torch.optimizer: {rule.__name__} must not have a field {taken[0]!r}, which is an option of"
            " optimizers"
        )
    first, _, rest = inspect.cleandoc(rule.__doc__ or f"{rule.__name__}.").partition("\n")
    return type(
        rule.__name__,
        (Optimizer,),
        {
            "rule": rule,
            "__doc__": _DOC.format(first=first, name=rule.__name__, fields=_fields(rule, rest)),
            "__module__": "arrayopt.torch",
            "__signature__": _signature(rule),
            "__reduce__": _reduce,
        },
    )


def _fields(rule: type[Rule], doc: str) -> str:
    """The part of a rule's docstring that describes its fields, or their names and defaults if it has none."""
    _, _, after = doc.partition("\nParameters\n----------\n")
    text: str = after.partition("\n\n")[0]
    if text:
        return text
    return "\n".join(
        f"{name}, default {value.default!r}" for name, value in _signature(rule).parameters.items() if name
    )


def _signature(rule: type[Rule]) -> inspect.Signature:
    """The signature of a class: parameters, learning rate, PyTorch's positional arguments, and the rest by name."""
    base = inspect.signature(Optimizer.__init__).parameters
    differing = otherwise_all(rule, {})
    own = {x.name: x.replace(default=differing.get(x.name, x.default)) for x in field_parameters(rule)}
    defaults = Settings(rule, {name: x.default for name, x in own.items()})
    placed = [inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name in ("lr", *places(rule)):
        if name in defaults:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            placed.append(inspect.Parameter(name, kind, default=defaults[name]))
    by_name = [x for name, x in own.items() if name not in {x.name for x in placed}]
    by_name += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=differing[n]) for n in more_of(rule)]
    return inspect.Signature([*placed, *by_name, *(base[name] for name in OPTIONS)])


def _reduce(self: Optimizer) -> Any:
    """How an optimizer is pickled: its class by the rule, since the class may have no importable name."""
    made = type(self)
    return _bare, (self.rule if made is optimizer(self.rule) else made,), self.__getstate__()


def _bare(made: type[Any]) -> Optimizer:
    """An empty optimizer for unpickling; `made` is a rule, or a subclass that a user has defined."""
    bare: Optimizer = object.__new__(optimizer(made) if issubclass(made, Rule) else made)
    return bare
