"""Nothing slow in silence: where no fused engine runs a rule, and a user can change that, one warning says so."""

import copy
import dataclasses
import warnings

import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.engines import registry
from arrayopt.projections import support

MASK = np.arange(12).reshape(3, 4) % 2 == 0
OWN_ARRAYS = {"times": lambda xp, p, h: p * MASK, "where": lambda xp, p, h: xp.where(MASK, p, 0.0)}
UNTRACEABLE = {
    **OWN_ARRAYS,
    "value": lambda xp, p, h: p if float(xp.sum(p)) > 0 else -p,
    "flip": lambda xp, p, h: xp.flip(p, axis=(0, 1)),
}


def tree(library=np.asarray):
    return {"w": library(np.ones((3, 4))), "b": library(np.ones((3, 4)))}


def told(make):
    """What a call returns, and the warnings that it gives."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        made = make()
    assert {x.category for x in found} <= {ao.NotFusedWarning}
    assert {x.filename for x in found} <= {__file__}  # the user's line, and none of the package's
    return made, [str(x.message) for x in found]


@pytest.mark.parametrize(
    ("library", "name"),
    [*((np.asarray, name) for name in UNTRACEABLE), (torch.asarray, "value"), (torch.asarray, "flip")],
    ids=lambda x: x if isinstance(x, str) else x.__module__,
)
def test_a_rule_that_is_not_fused_says_so_once(library, name):
    rule = ao.SGD(lr=0.1, project=UNTRACEABLE[name])
    opt, (message,) = told(lambda: ao.Optimizer(tree(library), rule))
    assert message.startswith("Optimizer: SGD of 'w' and 1 more is not fused, and runs one operation at a time")
    assert "engine='array_api' silences this warning" in message
    assert ("projections.support(mask)" in message) == (name in OWN_ARRAYS)
    _, more = told(lambda: [opt.step(tree(library)), opt.explain(), opt.step(tree(library))])
    assert not more
    assert not told(lambda: ao.Optimizer(tree(library), rule, engine="array_api").step(tree(library)))[1]


def test_what_is_changed_later_says_so_at_the_next_step():
    opt, first = told(lambda: ao.Optimizer(tree(), ao.SGD(lr=0.1)))
    opt.project = UNTRACEABLE["flip"]
    _, second = told(lambda: opt.step(tree()))
    opt.project = None
    opt.groups[0].project = UNTRACEABLE["flip"]
    _, same = told(lambda: opt.step(tree()))
    opt.groups[0].project = UNTRACEABLE["value"]
    _, third = told(lambda: opt.step(tree()))
    assert [len(x) for x in (first, second, same, third)] == [0, 1, 0, 1]


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_norm": 1.0, "skip_nonfinite": True}], ids=repr)
def test_as_an_error_it_changes_nothing(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ao.NotFusedWarning):
            ao.Optimizer(tree(), ao.SGD(lr=0.1, project=UNTRACEABLE["flip"]), **options)
        opt = ao.Optimizer(tree(), ao.SGD(lr=0.1, momentum=0.9), **options)
        opt.step(tree())
        before = copy.deepcopy((opt.params, opt.state_dict()))
        opt.project = UNTRACEABLE["flip"]
        for _ in range(2):
            with pytest.raises(ao.NotFusedWarning):
                opt.step(tree())
        opt.project = None
        np.testing.assert_equal((opt.params, opt.state_dict()), before)
        opt.step(tree())


@pytest.mark.parametrize("broken", ["missing", "older"])
def test_a_package_that_is_missing_or_too_old_is_named(broken, monkeypatch, tmp_path):
    row = registry.ENGINES["numba"]
    if broken == "missing":
        row = dataclasses.replace(row, needs="no_such_package")
    else:
        (tmp_path / "too_old.py").write_text("raise ImportError('it needs NumPy 1 or less')")
        monkeypatch.syspath_prepend(tmp_path)
        row = dataclasses.replace(row, needs="too_old", path=("too_old", "Engine"))
    monkeypatch.setitem(registry.ENGINES, "numba", row)
    monkeypatch.setitem(registry.FUSED, "torch", ("numba",))
    _, (message,) = told(lambda: ao.Optimizer(tree(torch.asarray), ao.SGD(lr=0.1)))
    assert {"missing": "pip install 'arrayopt[cpu]'", "older": "it needs NumPy 1 or less"}[broken] in message
    _, none = told(lambda: ao.Optimizer(tree(), ao.SGD(lr=0.1)))  # the engine `numpy` is fused, too
    assert not none


def test_where_nothing_can_be_changed_nothing_is_said(cupy):
    import array_api_strict
    import jax.numpy

    for library in (jax.numpy.asarray, array_api_strict.asarray):
        assert not told(lambda library=library: ao.Optimizer(tree(library), ao.SGD(lr=0.1)))[1]
    opt, none = told(lambda: ao.Optimizer(tree(cupy.asarray), ao.SOAP(lr=0.1)))
    assert not none
    assert "engine array_api" in opt.explain()


def test_the_way_out_is_fused():
    opt, none = told(lambda: ao.Optimizer(tree(), ao.SGD(lr=0.1, project=support(MASK))))
    assert not none
    assert "engine array_api" not in opt.explain()


def test_numbers_of_numpy_are_fused():
    for number in (np.float32(0.5), np.float64(0.5), np.int64(2), np.array(0.5)):
        for project in (lambda xp, p, h, n=number: n * p, lambda xp, p, h, n=number: xp.minimum(p, n)):
            opt, none = told(lambda project=project: ao.Optimizer(tree(), ao.SGD(lr=0.0, project=project)))
            assert not none
            assert np.array_equal(opt.step(tree())["w"], project(np, np.ones((3, 4)), None))
