"""Messages about unknown names: what the name means in other libraries, or which known name is similar."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

from arrayopt.foreign_names import ABSENT, RULE, SAME, SPREAD, STORED

_UNKNOWN = object()


def unknown(who: str, fields: Iterable[str], name: str, advice: Mapping[str, str], value: Any = _UNKNOWN) -> str:
    """The message about a name that is not a field.

    Parameters
    ----------
    who : str
        The class or function that lacks it, such as "LAMB".
    fields : iterable of str
        The names that it has.
    name : str
        The name that was passed.
    advice : mapping of str to str
        `RULE`, `SCHEDULE` or `OPTIMIZER`: advice for names that do not stand for a field.
    value : optional
        The value that was passed.
    """
    has = list(fields)
    return f"{who} has no `{name}`; {_instead(has, name, advice, value)}"


def spread(fields: Sequence[str], name: str) -> list[tuple[str, ...]]:
    """The lists of fields that a name such as ``betas`` may stand for, likeliest first; none if it is a field."""
    every = () if name in fields else SPREAD.get(name, ())
    return [parts for parts in every if all(part in fields for part in parts)]


def _instead(has: list[str], name: str, advice: Mapping[str, str], value: Any) -> str:
    """What to pass instead of a name."""
    several = list(value) if isinstance(value, tuple | list) else None
    for parts in spread(has, name):
        if several is None or len(several) == len(parts):
            return _given(parts, several)
    same = alias(has, name)
    if same is not None:
        return _given([same], None if value is _UNKNOWN else [value])
    if name in advice:
        return advice[name]
    close = close_to(has, name)
    return f"it has {', '.join(has)}" if close is None else f"did you mean `{close}`?"


def alias(fields: Sequence[str], name: str) -> str | None:
    """The field that has this name in another library, if there is one."""
    return next((field for field in SAME.get(name, ()) if field in fields), None)


def close_to(fields: Sequence[str], name: str) -> str | None:
    """The field with a similar name, if there is one."""
    folded = {field.lower().replace("_", ""): field for field in fields}
    close = difflib.get_close_matches(str(name).lower().replace("_", ""), folded, n=1, cutoff=0.75)
    return folded[close[0]] if close else None


def _given(fields: Sequence[str], values: list[Any] | None) -> str:
    """What to pass: fields, with their values if these are short; without values, only the names of fields."""
    if values is None:
        return f"it is {' and '.join(f'`{field}`' for field in fields)} here"
    short = all(x is None or isinstance(x, Number | str) for x in values)
    shown = [repr(x) if short else "..." for x in values]
    return f"pass {', '.join(f'{field}={x}' for field, x in zip(fields, shown, strict=True))}"


def counted(n: int, what: str) -> str:
    """A number of things, such as ``1 tensor`` or ``2 tensors``."""
    return f"{n} {what}{'s' * (n != 1)}"


def got(value: Any) -> str:
    """A value as errors show it. For a class instead of an instance, also how to make one."""
    said = repr(value)
    if isinstance(value, type):
        return f"{said}; create an instance: {value.__name__}(...)"
    return said if len(said) <= 200 else f"{said[:200]}..."


def takes(call: Any, count: int) -> bool:
    """Whether a function takes `count` positional arguments, as far as is known."""
    try:
        inspect.signature(call).bind(*range(count))
    except ValueError:  # a function in C may have no signature
        return True
    except TypeError:
        return False
    return True


def listed_names(names: Iterable[str]) -> str:
    """The names of the first tensors, for errors about unknown ones."""
    return f"the tensors are {', '.join(list(names)[:10])}"


def no_attribute(module: str, names: Sequence[str], name: str, other: Any = None) -> AttributeError:
    """The error for a name that a module does not have, with what to use instead.

    Parameters
    ----------
    module : str
        The module.
    names : sequence of str
        The names that it has.
    name : str
        The name that was looked up.
    other : module, optional
        The library that the module replaces.
    """
    known = {x.rpartition(".")[2].lower().replace("_", ""): x for x in reversed(names)}
    folded = name.lower().replace("_", "")
    same, (base, bits) = known.get(folded), STORED.fullmatch(folded).groups()  # type: ignore[union-attr]
    close = same or (None if folded in ABSENT else close_to(names, name))
    said = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):
        todo = ""
    elif same is None and hasattr(other, name):
        todo = f"; use {other.__name__}.{name}, which has no counterpart here"
    elif same is None and folded in ABSENT:
        todo = f"; use {ABSENT[folded]}"
    elif same is None and base != folded and base in known:
        todo = f"; use {known[base]}" + (' with state_dtype="int8"' if bits else "")
    elif close is not None:
        todo = f"; did you mean `{close}`?"
    else:
        part = [x for key, x in known.items() if len(key) > 3 and (folded.startswith(key) or folded.endswith(key))]
        todo = f"; did you mean `{'` or `'.join(part)}`?" if part else f"; dir({module}) lists what it has"
    return AttributeError(f"{said}{todo}", name=name)


def check_options(cls: Any, given: Mapping[str, Any], rule: str, fields: Sequence[str]) -> None:
    """Raise TypeError for an unknown option of an optimizer. `fields` are those of its rule."""
    taken = inspect.signature(cls.__init__).parameters.values()
    if not any(x.kind is inspect.Parameter.VAR_KEYWORD for x in taken):
        for name in set(given) - {x.name for x in taken}:
            said = _given([name], [given[name]]) if name in fields else _instead(list(fields), name, {}, given[name])
            if name in fields or (name not in RULE and (alias(fields, name) or spread(fields, name))):
                raise TypeError(f"{cls.__name__} has no `{name}`; set it on the rule, {rule}(...): {said}")
            options = [x.name for x in taken if x.kind is inspect.Parameter.KEYWORD_ONLY]
            raise TypeError(unknown(cls.__name__, options, name, RULE, given[name]))


def check_call(cls: Any, args: tuple[Any, ...], given: Mapping[str, Any], advice: Mapping[str, str]) -> None:
    """Raise TypeError if a dataclass is called with an unknown name, or with positional arguments that it lacks."""
    fields = [f.name for f in dataclasses.fields(cls) if f.init]
    if not args and set(given) <= set(fields):
        return
    taken = list(inspect.signature(cls.__init__).parameters.values())[1:]
    kinds = [x.kind for x in taken]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for name in set(given) - {x.name for x in taken}:
            raise TypeError(unknown(cls.__name__, fields, name, advice, given[name]))
    if args and all(kind is inspect.Parameter.KEYWORD_ONLY for kind in kinds):
        raise TypeError(
            f"{cls.__name__} takes keyword arguments only: pass fields by name, such as lr=0.1, and parameters to the"
            f" optimizer: Optimizer(params, {cls.__name__}(...))"
        )


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """The names of a function's arguments, without `*args` and `**kwargs`."""
    every = inspect.signature(function).parameters.values()
    return [x.name for x in every if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]


def check_names(who: str, names: Sequence[str], given: Mapping[str, Any], advice: Mapping[str, str]) -> None:
    """Raise TypeError for a name that is not an argument of a function."""
    for name in given:
        if name not in names:
            raise TypeError(unknown(who, names, name, advice, given[name]))
