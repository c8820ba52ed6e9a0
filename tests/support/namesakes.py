"""Comparison of our functions with the functions of that name in other libraries: signatures, and tested options."""

import inspect

__all__ = ["called", "lacking"]


def called(function, own=("fields",)):
    """The name, kind and default of each parameter, except `own`, the parameters that the other library lacks."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind.name, shown(p.default)) for p in parameters if p.name not in own]


def shown(default):
    """A default in a form that can be compared: the name of a class, and other values as they are."""
    return default.__name__ if isinstance(default, type) and default is not inspect.Parameter.empty else default


def lacking(theirs, rows, refused=()):
    """The optional parameters of their function that no row of options sets, and that we do not refuse."""
    optional = [name for name, _, default in called(theirs) if default is not inspect.Parameter.empty]
    return [name for name in optional if name not in refused and not any(name in row for row in rows)]
