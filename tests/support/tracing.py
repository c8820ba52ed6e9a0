"""Rules made for the tests of tracing and planning."""

import linecache
from dataclasses import dataclass

import arrayopt as ao

__all__ = ["made", "of", "with_m", "words"]


def made(update, slots=lambda xp, p: {}, **extra):
    """A rule with that update of (xp, p, g, s, h) and those slots, and hyper-parameters lr and decay."""
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
    """Slots: one, ``m``."""
    return {"m": xp.zeros_like(p)}


def of(function):
    """A rule whose new parameter is a function of (xp, p, g)."""
    return made(lambda xp, p, g, s, h: (function(xp, p, g), {}))()


def words(error, function):
    """What an error says beside the line of a function that it quotes, in which the expected words may stand, too."""
    code = function.__code__
    return str(error).replace(linecache.getline(code.co_filename, code.co_firstlineno).strip(), "")
