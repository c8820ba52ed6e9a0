"""Makes rules from functions, for tests of tracing and planning."""

import linecache
from dataclasses import dataclass

import arrayopt as ao

__all__ = ["made", "of", "with_m", "words"]


def made(update, slots=lambda xp, p: {}, **extra):
    """A rule with this `update(xp, p, g, s, h)` and these slots, and the hyper-parameters lr and decay."""
    body = {
        "update": lambda self, *args: update(*args),
        "slots": lambda self, xp, p: slots(xp, p),
        "lr": ao.real("[0, inf)", 0.1),
        "decay": ao.real("[0, inf)", None),
        "twice": ao.flag(False),
        "__annotations__": {"lr": ao.Hyper, "decay": ao.Hyper | None, "twice": bool},
        **extra,
    }
    return dataclass(frozen=True, kw_only=True, repr=False)(type("Made", (ao.Rule,), body))


def with_m(xp, p):
    """A `slots` function with one slot, ``m``."""
    return {"m": xp.zeros_like(p)}


def of(function):
    """A rule without slots whose new parameter is `function(xp, p, g)`."""
    return made(lambda xp, p, g, s, h: (function(xp, p, g), {}))()


def words(error, function):
    """The message of an error without the line of code that it quotes, which may contain the expected words."""
    code = function.__code__
    return str(error).replace(linecache.getline(code.co_filename, code.co_firstlineno).strip(), "")
