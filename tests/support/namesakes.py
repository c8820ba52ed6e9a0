"""Functions of ours with the name of one in another library: called as theirs are, and options that a test sets."""

import inspect

__all__ = ["called", "lacking"]


def called(function, own=("fields",)):
    """The name, kind and default of each parameter, but for `own`, which hold what the other library does not have."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind.name, shown(p.default)) for p in parameters if p.name not in own]


def shown(default):
    """A default as it compares by value: a class as its name, a missing one as itself."""
    return default.__name__ if isinstance(default, type) and default is not inspect.Parameter.empty else default


def lacking(theirs, rows, refused=()):
    """The optional parameters of a function of theirs that no row of options sets, and that are not refused."""
    optional = [name for name, _, default in called(theirs) if default is not inspect.Parameter.empty]
    return [name for name in optional if name not in refused and not any(name in row for row in rows)]
