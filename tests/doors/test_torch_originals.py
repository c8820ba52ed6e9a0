"""`arrayopt.torch` under PyTorch's own table of cases for its optimizers: each passes, or stands here with a reason."""

import functools
import importlib
import warnings

import pytest
import torch

import arrayopt.torch as door

pytest.importorskip("expecttest", reason="PyTorch's own tests need expecttest: make test installs it")

SHARED = ("Adafactor", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD")

_FLAG = "how it is computed is PyTorch's own: any number may be a tensor here"
TAKEN = {
    (None, "lr as Tensor doesn't work with foreach & not capturable"): _FLAG,
    (None, r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True"): _FLAG,
    (None, "betas must be either both floats or both Tensors"): "each number may be a tensor here",
    ("Adafactor", "does not support complex parameters"): "it does here",
}
"""What works here."""


@functools.cache
def originals():
    """PyTorch's table. It takes seconds to import: only the process that runs these tests does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("torch.testing._internal.common_optimizers")


def infos():
    return {info.name: info for info in originals().optim_db if info.name in SHARED}


def inputs(name):
    return infos()[name].optim_inputs_func("cpu", torch.float64)


def wrong(name):
    return infos()[name].optim_error_inputs_func("cpu", torch.float32)


def of(table, name, desc):
    """What a table says of a case."""
    return table.get((name, desc), table.get((None, desc)))


@pytest.mark.parametrize("name", SHARED)
def test_inputs(name):
    for given in inputs(name):
        assert computes_the_same(name, given), given.desc


def computes_the_same(name, given):
    torch.manual_seed(0)
    shapes = ((4, 3), (5,), (2, 3, 2), ())
    a = [torch.nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in shapes]
    b = [torch.nn.Parameter(p.detach().clone()) for p in a]
    theirs = infos()[name].optim_cls(a, **given.kwargs)
    opt = getattr(door, name)(b, **given.kwargs, engine="array_api")
    for _ in range(5):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        theirs.step()
        opt.step()
    return all(
        torch.allclose(p, q, rtol=1e-9, atol=1e-9 if name == "NAdam" else 1e-14) for p, q in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("name", SHARED)
def test_error_inputs(name):
    for given in wrong(name):
        check_that_it_is_refused(name, given)


def check_that_it_is_refused(name, given):
    case = given.optimizer_error_input
    params = [torch.nn.Parameter(torch.randn(2, 3))] if case.params is None else case.params

    def call():
        opt = getattr(door, name)(params, **case.kwargs, engine="array_api")
        if given.error_on is originals().OptimizerErrorEnum.STEP_ERROR:
            opt.step()

    if of(TAKEN, name, case.desc):
        call()
    else:
        with pytest.raises(given.error_type) as caught:
            call()
        assert type(caught.value) is given.error_type, case.desc


def test_the_tables_speak_of_what_there_is():
    descs = {(name, x.desc) for name in SHARED for x in inputs(name)}
    descs |= {(name, x.optimizer_error_input.desc) for name in SHARED for x in wrong(name)}
    for key in TAKEN:
        assert key in descs or (key[0] is None and key[1] in {desc for _, desc in descs}), key
    assert set(infos()) == set(SHARED)
