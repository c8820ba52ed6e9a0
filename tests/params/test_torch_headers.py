"""PyTorch's tensors, read by their headers: each change of form or place is seen, and nothing else is one."""

import pytest
import torch

from arrayopt.params import torch_headers
from arrayopt.params.torch_headers import torch_unchanged
from arrayopt.params.watch import Watch


def elsewhere(x):
    x.data = x.data.clone()


def turned(x):
    x.data = x.data.mT.contiguous().mT


def shifted(x):
    x.data = torch.zeros(13)[1:].view(3, 4)


def within(x):
    x.set_(x.untyped_storage(), 4, (2, 2), (2, 1))


def retyped(x):
    x.data = x.data.to(torch.int32 if x.dtype == torch.float32 else torch.float32)


def of_another_kind(x):
    x.data = x.data.view(torch.int32)


def freed(x):
    x.untyped_storage().resize_(0)


def swapped(x):
    torch.utils.swap_tensors(x, torch.zeros(3, 4))


def deeper(x):
    x.data = torch.zeros(1, 1, 1, 1, 3, 4)


CHANGES = [elsewhere, turned, shifted, within, retyped, of_another_kind, freed, swapped, deeper]


def tensors():
    return [torch.zeros(7), torch.zeros(3, 4), torch.nn.Parameter(torch.zeros(2, 1, 3, 1, 2)), torch.tensor(1.0)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    some = tensors()
    same, watch = torch_unchanged(some), Watch(some)
    assert same()
    assert watch.changed() == []
    change(some[1])
    assert not same()
    assert watch.changed() == [1]


def test_what_is_no_change_is_none():
    some = tensors()
    same = torch_unchanged(some)
    some[0].add_(1.0)
    some[1].requires_grad_()
    (some[1] * 2.0).sum().backward()
    some[1].grad = None
    views = [some[2].detach()[0], some[0].numpy()]
    some[1].register_hook(print)
    assert same()
    assert views


def test_what_cannot_be_read_is_asked(monkeypatch):
    for odd in (torch.zeros(2, dtype=torch.complex64), torch.zeros((1,) * 6), torch.zeros(3).to_sparse()):
        assert torch_unchanged([torch.zeros(2), odd]) is None

    class Own(torch.Tensor):
        pass

    assert torch_unchanged([torch.zeros(2).as_subclass(Own)]) is None
    assert torch_unchanged([]) is not None
    torch_headers._layout.cache_clear()
    monkeypatch.setattr(torch_headers, "_DTYPE", 12)  # as if another version had its fields elsewhere
    assert torch_unchanged([torch.zeros(2)]) is None
    some = tensors()
    watch = Watch(some)
    elsewhere(some[1])
    assert watch.changed() == [1]
    torch_headers._layout.cache_clear()
