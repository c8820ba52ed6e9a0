"""Sums over columns: the bits of a column do not depend on how many columns lie beside it."""

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
