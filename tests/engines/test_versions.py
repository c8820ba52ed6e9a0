"""PyTorch is told of each write: what autograd has saved of a parameter is refused after a step has changed it."""

import pytest
import torch

import arrayopt as ao
from tests.support.engines import each_of_torch


def made(engine, **options):
    """A parameter, and an optimizer of it."""
    w = torch.nn.Parameter(torch.arange(1.0, 5.0))
    return w, ao.Optimizer({"w": w}, ao.AdamW(lr=0.1), engine=engine, **options)


@each_of_torch
def test_a_backward_pass_through_a_graph_made_before_a_step_is_refused(engine):
    w, opt = made(engine)
    loss = (w**3).sum()
    opt.step({"w": torch.ones(4)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each_of_torch
def test_a_version_moves_with_each_write_and_with_no_other_call(engine):
    w, opt = made(engine, skip_nonfinite=True, clip_norm=1.0)
    before = w._version
    opt.step({"w": torch.full((4,), torch.inf)})
    assert w._version == before
    opt.step({"w": None})
    assert w._version == before
    opt.step({"w": torch.ones(4)})
    assert w._version > before
    (w**3).sum().backward()
