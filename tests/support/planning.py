"""Checks that a plan is consistent, and that it computes the same as its rule as written."""

import ml_dtypes
import numpy as np

import arrayopt as ao

__all__ = ["SEVERAL_TILES", "agree", "check", "fused_and_written", "zeros"]


def check(plan):
    """Go through a plan, and assert that each value is known, and each array has its contents, when it is used."""
    held = dict.fromkeys(("p", "g", *plan.slots, *plan.spilled), "old")
    known, stored, written = set(), {}, []

    def ready(n):
        return n in known or n.op == "const" or (n.on_host and n in plan.scalars) or small(n)

    def small(n):
        return n.op == "input" and n.axes != plan.element and n.data in plan.small

    for k, between in enumerate(plan.between):
        for n in between.nodes:
            assert n.axes != plan.element
            assert all(ready(a) for a in n.args), n
            known.add(n)
        if k == len(plan.passes):
            break
        p = plan.passes[k]
        here = set()
        for name, n in p.loads.items():
            assert n == stored[name] if held[name] == "new" else (n.op, n.data) == ("input", name)
            here.add(n)
        for n in p.nodes:
            assert all(a in here or ready(a) for a in n.args), n
            here.add(n)
        for s in p.reductions:
            assert s.args[0] in here or ready(s.args[0])
            known.add(s)
        for name, n in p.stores.items():
            assert n in here or ready(n)
            held[name], stored[name] = "new", n
            written.append(name)
        assert p.stores or p.reductions, "a pass without a purpose"
    assert len(written) == len(set(written))  # no array is written twice
    assert {*written, *plan.small} >= {*plan.touched} - {name for p in plan.passes for name in p.loads}
    assert all(ready(n) for n in [*plan.small.values(), *plan.reports.values()])


def zeros(*names, rows=(), columns=(), tensors=()):
    """A `slots` function that returns zeros: like the parameter, per row, per column, and per tensor."""

    def slots(xp, p):
        each = {name: xp.zeros_like(p) for name in names}
        each |= {name: xp.zeros_like(xp.sum(p, axis=-1)) for name in rows}
        each |= {name: xp.zeros_like(xp.sum(p, axis=-2)) for name in columns}
        return each | {name: xp.zeros_like(xp.sum(p)) for name in tensors}

    return slots


def fused_and_written(rule, shapes, engine, dtype="float32", steps=3):
    """Parameters and slots after some steps of an engine, and of the functional form, which is not fused."""
    rng = np.random.default_rng(0)

    def drawn(shape):
        x = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if "complex" in dtype else 0)
        return np.asarray(x).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    params = {str(i): drawn(shape) for i, shape in enumerate(shapes)}
    grads = [{name: drawn(p.shape) for name, p in params.items()} for _ in range(steps)]
    opt = ao.Optimizer({name: p.copy() for name, p in params.items()}, rule, engine=engine)
    state = rule.init(params)
    for g in grads:
        opt.step(g)
        params, state = ao.update(rule, params, g, state)
    found = {f"{name}.{k}": x for name in params for k, x in {"p": opt.params[name], **opt.state[name]}.items()}
    exact = {f"{name}.{k}": x for name in params for k, x in {"p": params[name], **state["tensors"][name]}.items()}
    return found, exact


def agree(rule, shapes, engine, dtype="float32", steps=3, relative=2e-6):
    found, exact = fused_and_written(rule, shapes, engine, dtype, steps)
    assert list(found) == list(exact)
    for name, x in exact.items():
        wide = [np.asarray(v, dtype=np.complex128 if dtype.startswith("complex") else float) for v in (found[name], x)]
        assert wide[0].shape == wide[1].shape, name
        np.testing.assert_allclose(
            *wide, rtol=10 * relative, atol=relative * max(1.0, abs(wide[1]).max()), err_msg=name
        )


SEVERAL_TILES = (
    (3, 4),
    (300, 257),
    (9, 9000),
    (2, 3, 5),
    (700, 5, 11),
    (5, 4, 3, 3),
    (3, 2, 210, 190),
    (2, 3, 2, 2, 4),
)
