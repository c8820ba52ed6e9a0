"""Bits of an element or a column do not depend on how many lie beside it: in whole vectors or after them."""

import dataclasses

import numpy as np

import arrayopt as ao
from tests.support.engines import each_compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns(ao.Rule):
    """A sum over columns of a product that is also stored, and so is rounded there."""

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        m = p * g
        return 0.0 * p + xp.sum(m, axis=-2, keepdims=True), {"m": m}


@each_compiled
def test_a_column_has_the_same_bits_in_a_vector_and_after_the_last(engine):
    p, g = np.random.default_rng(0).standard_normal((2, 50, 64)).astype("float32")
    widths = {f"w{n}": n for n in (15, 17, 40, 64)}
    opt = ao.Optimizer({name: p[:, :n].copy() for name, n in widths.items()}, Columns(), engine=engine)
    opt.step({name: g[:, :n].copy() for name, n in widths.items()})
    for name, n in widths.items():
        assert opt.params[name].tobytes() == opt.params["w64"][:, :n].tobytes(), name


@each_compiled
def test_an_element_has_the_same_bits_in_a_vector_and_after_the_last(engine):
    """Of this rule g++ by itself made fused operations in vectors only, for there are branches between."""
    rule = ao.RMSprop(lr=0.001, momentum=0.9, centered=True)
    sizes = {f"n{n}": n for n in (3, 15, 31, 36, 64)}
    p, *grads = np.random.default_rng(0).standard_normal((4, 64)).astype("float32") / 10
    opt = ao.Optimizer({name: p[:n].copy() for name, n in sizes.items()}, rule, engine=engine)
    for g in grads:
        opt.step({name: g[:n].copy() for name, n in sizes.items()})
    for name, n in sizes.items():
        assert opt.params[name].tobytes() == opt.params["n64"][:n].tobytes(), name
