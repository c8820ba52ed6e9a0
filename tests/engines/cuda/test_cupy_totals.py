"""Totals on the CuPy engine: made on the device, captured, over ranks, with tensors and layers that are left out."""

from dataclasses import dataclass
from typing import final

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.arrays import to_host
from tests.cudacpu import standin
from tests.engines.cuda.test_cupy_ranks import held
from tests.engines.test_totals import Joint, Witness, drawn
from tests.support.ranks import differing
from tests.support.slow import marked

NO_W = 2
"""The call that has no gradient of ``w``."""


def there(cupy, arrays):
    return {name: x if x is None else cupy.asarray(x) for name, x in arrays.items()}


def grads_of(k, bad=False):
    grads = drawn((1, k))
    if k == NO_W:
        grads["w"] = None
    if bad and k == 1:
        grads["b"][0] = np.inf
    return grads


def made(cupy, calls=4, bad=False, comm=None, rule=None, **options):
    """An optimizer after some calls, the third without a gradient of ``w``."""
    opt = ao.Optimizer(there(cupy, drawn(0)), rule or Joint(), engine="cupy", comm=comm, **options)
    for k in range(calls):
        opt.step(there(cupy, grads_of(k, bad)))
    return opt


def close(opt, witness):
    for name, x in witness.p.items():
        np.testing.assert_allclose(opt.params[name].get(), x, rtol=3e-6, atol=3e-6, err_msg=name)
        assert float(opt.state[name]["far"]) == pytest.approx(witness.far[name], rel=1e-5), name


@pytest.mark.parametrize("bad", [False, True])
def test_it_agrees_with_the_witness(cupy, bad):
    opt = made(cupy, bad=bad, skip_nonfinite=True, groups={"b": {"lr": 0.3}}, stats=True)
    witness = Witness(drawn(0))
    for k in range(4):
        if not (bad and k == 1):
            witness.step(grads_of(k), {"b": 0.3})
    close(opt, witness)
    means = {report["mean"] for report in opt.stats.read().values() if "mean" in report}
    assert len({float(x) for x in means}) <= 1


EMPTIES = {"Joint": Joint(), "LBFGS": ao.LBFGS(memory=2, line_search=None), "Prodigy": ao.Prodigy()}


@pytest.mark.parametrize("name", EMPTIES)
def test_tensors_of_no_elements_are_in_no_total(cupy, name):
    """Nor are those without a gradient; tensors are in two buckets, of one there are only empty ones at times."""
    kinds = {"a": ((5,), "f4"), "none": ((0,), "f4"), "nought": ((0, 3), "f8"), "z": ((3, 4), "f8")}
    rng = np.random.default_rng(0)
    start = {key: rng.standard_normal(shape).astype(kind) for key, (shape, kind) in kinds.items()}
    opts = [
        ao.Optimizer({key: own(x) for key, x in start.items()}, EMPTIES[name], engine=engine)
        for engine, own in (("array_api", np.copy), ("cupy", cupy.asarray))
    ]
    for absent in ((), ("z",), ("a", "nought"), ("none",)):
        grads = {
            key: None if key in absent else rng.standard_normal(x.shape).astype(x.dtype) for key, x in start.items()
        }
        opts[0].step(grads)
        opts[1].step(there(cupy, grads))
    for key, x in opts[0].params.items():
        np.testing.assert_allclose(opts[1].params[key].get(), x, rtol=1e-5, atol=1e-5, err_msg=key)
        for slot, value in opts[0].state[key].items():
            np.testing.assert_allclose(
                to_host(opts[1].state[key][slot]), value, rtol=1e-5, atol=1e-5, err_msg=f"{key} {slot}"
            )


def test_no_number_comes_to_the_host(cupy, monkeypatch):
    opt = made(cupy, NO_W)
    grads = there(cupy, drawn(7))

    def refused(*_, **__):
        raise AssertionError("a number was fetched")

    with monkeypatch.context() as patch:
        patch.setattr(cupy.ndarray, "get", refused)
        opt.step(grads)


def test_a_captured_step_is_an_eager_one(cupy):
    opt, grads = made(cupy, 1), there(cupy, drawn((1, 1)))
    opt.step(grads)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        opt.advance()
        stream.begin_capture()
        opt.launch(grads)
        graph = stream.end_capture()
        for k in range(3):
            for name, g in drawn((5, k)).items():
                grads[name].set(g)
            if k:
                opt.advance()
            graph.launch(stream)
    stream.synchronize()
    other = made(cupy, 1)
    for key in ((1, 1), (5, 0), (5, 1), (5, 2)):
        other.step(there(cupy, drawn(key)))
    assert held(opt) == held(other)


def test_a_graph_finds_its_tables_however_many_others_there_were(cupy):
    """More sets of tensors than tables are kept for."""
    shapes = {f"p{i}": (3 + i,) for i in range(6)}
    rng = np.random.default_rng(0)
    start, grads = ({name: rng.standard_normal(n) for name, n in shapes.items()} for _ in range(2))
    sets = [{name: g if not k >> i & 1 else None for i, (name, g) in enumerate(grads.items())} for k in range(40)]
    opts = [ao.Optimizer(there(cupy, start), Joint(), engine="cupy") for _ in range(2)]
    own = there(cupy, grads)
    given = [{name: g if g is None else own[name] for name, g in x.items()} for x in sets]
    opts[0].step(own)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        opts[0].advance()
        stream.begin_capture()
        opts[0].launch(own)
        graph = stream.end_capture()
        graph.launch(stream)
        for some in given[1:]:
            opts[0].step(some)
        opts[0].advance()
        graph.launch(stream)
    stream.synchronize()
    for some in (own, own, *given[1:], own):
        opts[1].step(some)
    assert held(opts[0]) == held(opts[1])


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Valued(ao.Rule):
    """A step as long as the value."""

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        return p - h.value * g, {}


def test_the_host_s_value_follows_one_of_the_device(cupy):
    opt = ao.Optimizer({"w": cupy.zeros(5)}, Valued(), engine="cupy")
    for value in (1.0, cupy.asarray(2.0), 1.0):
        opt.step({"w": cupy.ones(5)}, value=value)
    assert (opt.params["w"].get() == -4).all()


@pytest.mark.parametrize("value", [2.0, np.nan])
def test_a_value_is_sent_once(cupy, value):
    opt = ao.Optimizer({"w": cupy.zeros(5)}, Valued(), engine="cupy")
    for k in range(2):
        with standin.forbidden(*["host-to-device"] * k):
            opt.step({"w": cupy.ones(5)}, value=float(value) + 0.0)


def test_each_layer_has_its_value(cupy):
    opt = ao.Optimizer({"w": cupy.zeros((3, 5))}, Valued(stacked=True), engine="cupy")
    opt.step({"w": cupy.ones((3, 5))}, value=cupy.asarray(np.arange(3.0)))
    assert (opt.params["w"].get().T == [0, -1, -2]).all()


@pytest.mark.parametrize("ranks", marked([(1,), (2,), (3,)], lambda n: n == 2))
def test_ranks_give_the_same_bits(cupy, ranks):
    expected = held(made(cupy, bad=True, skip_nonfinite=True))

    def rank(comm):
        return differing(expected, held(made(cupy, bad=True, comm=comm, skip_nonfinite=True)))

    assert not any(ao.ranks.run(ranks, rank))


def test_layers_meet_layers_and_one_is_left_out(cupy):
    rng = np.random.default_rng(0)
    params = {"a": rng.standard_normal((3, 5)), "b": rng.standard_normal((3, 2, 4)), "c": rng.standard_normal((2, 4))}
    grads = [{name: rng.standard_normal(x.shape) for name, x in params.items()} for _ in range(3)]
    grads[1]["a"][2, 0] = np.nan
    opts = []
    for engine, own in (("cpp", dict), ("cupy", lambda x: there(cupy, x))):
        start = own({name: x.copy() for name, x in params.items()})
        opts.append(ao.Optimizer(start, Joint(stacked=True), engine=engine, skip_nonfinite=True))
        for g in grads:
            opts[-1].step(own(g))
    for name, x in opts[0].params.items():
        assert not (x == params[name]).any()
        np.testing.assert_allclose(opts[1].params[name].get(), x, rtol=1e-9, err_msg=name)


def test_many_tensors_are_added_up_in_order(cupy):
    """More than the kernel has threads."""
    rng = np.random.default_rng(0)
    params = {f"{i:03}": rng.standard_normal((3, 4)) for i in range(600)}
    grads = {name: rng.standard_normal(x.shape) for name, x in params.items()}
    found = []
    for engine, own in (("cpp", lambda x: x), ("cupy", cupy.asarray)):
        start = {name: own(x.copy()) for name, x in params.items()}
        opt = ao.Optimizer(start, Joint(), engine=engine)
        opt.step({name: own(g) for name, g in grads.items()})
        found.append(np.stack([np.asarray(x if engine == "cpp" else x.get()) for x in opt.params.values()]))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)


def test_two_libraries_meet_on_the_host(cupy):
    """Parameters of the same rule under two engines."""
    start = drawn(0)
    opt = ao.Optimizer(
        {name: x if name == "b" else cupy.asarray(x) for name, x in start.items()}, Joint(), engine="auto"
    )
    for k in range(4):
        opt.step({name: g if name == "b" or g is None else cupy.asarray(g) for name, g in grads_of(k).items()})
    witness = Witness(drawn(0))
    for k in range(4):
        witness.step(grads_of(k))
    for name, x in witness.p.items():
        np.testing.assert_allclose(to_host(opt.params[name]), x, rtol=3e-6, atol=3e-6, err_msg=name)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Largest(ao.Rule):
    """A step to the sum of the gradient that is largest."""

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        return p + ao.total(h, xp.sum(g), "max"), {}


def test_the_largest_number_of_none(cupy):
    """NaN is the largest of all, wherever it is."""
    for name in "abc":
        grads = {x: np.full(3, np.nan if x == name else 1.0) for x in "abc"}
        opt = ao.Optimizer({x: cupy.zeros(3) for x in "abc"}, Largest(), engine="cupy")
        opt.step(there(cupy, grads))
        assert all(np.isnan(x.get()).all() for x in opt.params.values())


def test_the_largest_number_may_be_negative(cupy):
    opt = ao.Optimizer({x: cupy.zeros(3) for x in "abc"}, Largest(), engine="cupy")
    opt.step(there(cupy, {x: np.full(3, -1.0 - i) for i, x in enumerate("abc")}))
    assert all((x.get() == -3).all() for x in opt.params.values())
