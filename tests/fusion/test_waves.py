"""Many numbers of a tensor between two passes are made in waves: see `arrayopt.fusion.waves`."""

import re
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion import lower_between
from arrayopt.fusion.lower import lowered
from arrayopt.fusion.lower_waves import Waving
from arrayopt.fusion.waves import MANY
from tests.support.slow import marked

COUNT = 18


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Numbers(ao.Rule):
    """A rule with a ring of numbers, which it mixes by every kind of operation."""

    rings: ClassVar[tuple[str, ...]] = ("n",)
    wide: ClassVar[tuple[str, ...]] = ("n", "last", "before")

    lr: ao.Hyper = ao.real("[0, inf)", 0.1)

    def slots(self, xp, p):
        zero = xp.sum(0.0 * p)
        return {"n": ao.ring(xp, zero, COUNT), "last": zero, "before": zero}

    def update(self, xp, p, g, s, h):
        """Numbers that follow from each other, and some that change places."""
        n, size = s["n"], xp.sqrt(xp.sum(g * g))
        grows, new, left = size > s["last"], [], xp.where(s["last"] > 0.0, s["last"], np.inf)
        for i in range(COUNT):
            x = xp.where(grows & (n[i] <= size), n[i] / 2.0 + size * h.lr, n[i - 1] - h.lr)
            x = xp.where(xp.isfinite(x) | grows, xp.minimum(x, left), xp.floor(x) % 3.0)
            new.append(x + (new[-1] if i % 3 else 0.0))
        new[0], new[1] = n[1], n[0] + 1.0
        changed = n
        for i, x in enumerate(new):
            changed = ao.put(changed, float(i), x)
        scale = sum(new) / (1.0 + xp.max(xp.abs(g)))
        return p - h.lr * (g + 1e-3 * scale * p), {"n": changed, "last": size, "before": s["last"]}


ENGINES = [("cpp", "float64"), ("cpp", "float32"), ("numba", "float32"), ("cupy", "float64"), ("cupy", "float32")]
QUICK = ("cpp", "float32"), ("cupy", "float64")


def run(engine, dtype, to, back):
    """Parameters and slots after some steps."""
    rng = np.random.default_rng(1)
    start = {name: rng.normal(size=size).astype(dtype) for name, size in (("a", 5), ("b", 3000), ("c", ()))}
    opt = ao.Optimizer({name: to(x) for name, x in start.items()}, Numbers(), engine=engine)
    for _ in range(6):
        opt.step({name: to(rng.normal(size=x.shape).astype(dtype)) for name, x in start.items()})
    found = {name: back(opt.params[name]) for name in start}
    for name in start:
        found |= {(name, slot): back(x) for slot, x in opt.state[name].items() if slot != "t"}
    return found


@pytest.mark.parametrize(("engine", "dtype"), marked(ENGINES, lambda *case: case in QUICK))
def test_numbers_in_waves_are_those_of_the_rule_as_it_is_written(engine, dtype, monkeypatch, request):
    made = []
    monkeypatch.setattr(lower_between.LoopsBetween, "many", MANY)
    monkeypatch.setattr(Waving, "make", lambda self, nodes, make=Waving.make: make(self, made.append(0) or nodes))
    lowered.cache_clear()
    of_numpy = {"to": np.asarray, "back": np.asarray}
    if engine == "cupy":
        cupy = request.getfixturevalue("cupy")
        found = run(engine, dtype, cupy.asarray, cupy.asnumpy)
    else:
        found = run(engine, dtype, **of_numpy)
    assert made
    lowered.cache_clear()
    expected = run("array_api", dtype, **of_numpy)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        close = 1e-12 if dtype == "float64" else 2e-5
        np.testing.assert_allclose(found[name], x, rtol=close, atol=close / 10, err_msg=str(name))


@pytest.mark.parametrize("joint", [False, True])
def test_code_does_not_grow_with_the_memory_of_lbfgs(joint):
    """Tables do, and what follows from the totals of a step alone."""
    lines = []
    for memory in (9, 17):
        rule = ao.LBFGS(memory=memory, joint=joint)
        text = ao.source(rule, engine="cupy", rank=1)
        text = text[text.rindex("// Fused kernels") :]  # what is done after the totals
        text = re.sub(r"(?m)^ {4}(const \w+ s|working\[)\d.*\n", "", text)
        lines.append(text.count("\n"))
    assert max(lines) < 1.02 * min(lines)
