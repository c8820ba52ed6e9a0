"""A rule whose author edits it, as in a notebook: optimizers that are made then run the new code, fused too."""

from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import arrayopt as ao

DECAY = 0.5


def mean(m, g):
    return DECAY * m + g


class Sizes:
    """An object that a rule names, with an attribute that only its methods read."""

    half = 0.5

    def __call__(self):
        return self.half

    @staticmethod
    def third():
        return 0.3

    @property
    def quarter(self):
        return 0.5 * self.half


def defined():
    """A rule class, by functions and constants of a namespace of its own, which can be edited."""
    source = """
def update(self, xp, p, g, s, h):
    m = mean(s["m"], g)
    named = FACTORS[0] + TABLE["a"] + module.factor() + sizes() + sizes.third() + sizes.quarter
    return p - h.lr * m * self.SCALE * self.PAIR[1] * (named + part() + kept() + float(array[1])), {"m": m}
"""
    module = ModuleType("helpers_of_a_rule")
    exec("def factor(): return 1.5", vars(module))
    sizes = type("Sizes", (Sizes,), {})()
    names = {"mean": mean, "DECAY": DECAY, "FACTORS": (1.0, 2.0), "TABLE": {"a": 1.0}, "module": module, "sizes": sizes}
    names |= {"part": partial(float, 2.0), "kept": lru_cache(lambda: 2.0), "array": np.ones(2)}
    exec(source, names)
    names["mean"] = type(mean)(mean.__code__, names)

    class Edited(ao.Rule):
        SCALE = 1.0
        PAIR = (1.0, 1.0)
        lr: float = 0.1

        def slots(self, xp, p):
            return {"m": xp.zeros_like(p)}

        update = names["update"]

    return SimpleNamespace(kind=dataclass(frozen=True)(Edited), names=names)


def _other(self, xp, p, g, s, h):
    return p - 2 * h.lr * g, {"m": s["m"]}


def _doubled(m, g):
    return DECAY * m + 2 * g


EDITS = {
    "a method is another": lambda it: setattr(it.kind, "update", _other),
    "a method has other code": lambda it: setattr(it.kind.update, "__code__", _other.__code__),
    "a function is another": lambda it: it.names.update(mean=lambda m, g: m - g),
    "a function has other code": lambda it: setattr(it.names["mean"], "__code__", _doubled.__code__),
    "a constant": lambda it: it.names.update(DECAY=0.25),
    "a constant of the class": lambda it: setattr(it.kind, "SCALE", 3.0),
    "a tuple of the class": lambda it: setattr(it.kind, "PAIR", (1.0, 3.0)),
    "a tuple": lambda it: it.names.update(FACTORS=(3.0, 2.0)),
    "an item": lambda it: it.names["TABLE"].update(a=3.0),
    "an element": lambda it: it.names["array"].put(1, 3.0),
    "a function of a module": lambda it: exec("def factor(): return 3.5", vars(it.names["module"])),
    "an attribute": lambda it: setattr(it.names["sizes"], "half", 3.5),
    "a static method": lambda it: setattr(type(it.names["sizes"]), "third", staticmethod(lambda: 3.5)),
    "a partial function": lambda it: it.names.update(part=partial(float, 3.5)),
    "a kept function": lambda it: it.names.update(kept=lru_cache(lambda: 3.5)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_rule_that_is_edited_is_traced_again(edit):
    it, found = defined(), []

    def run(engine):
        opt = ao.Optimizer(np.zeros(2), it.kind(), engine=engine)
        for _ in range(2):
            opt.step(np.ones(2))
        return float(opt.params[0])

    for _ in range(2):
        found.append(run("numpy"))
        np.testing.assert_allclose(found[-1], run("array_api"), rtol=1e-12)
        edit(it)
    assert found[0] != found[1]
