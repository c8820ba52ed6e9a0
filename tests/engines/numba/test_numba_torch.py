"""Gradients of PyTorch, whose addresses are taken from the tensors themselves."""

import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.support.optimizing import drawn


def misaligned(x):
    held = np.frombuffer(bytearray(x.nbytes + 1), x.dtype, x.size, 1).reshape(x.shape)
    held[...] = x
    return torch.from_numpy(held)


LAYOUTS = {
    "contiguous": torch.tensor,
    "transposed": lambda x: torch.tensor(x.T.copy()).T,
    "every other": lambda x: torch.tensor(np.repeat(x, 2, axis=-1))[..., ::2],
    "expanded": lambda x: torch.tensor(x[:1]).expand(*x.shape),
    "an offset": lambda x: torch.tensor(np.concatenate([x[:1], x]))[1:],
    "requires grad": lambda x: torch.tensor(x, requires_grad=True),
    "misaligned": misaligned,
}


@pytest.mark.parametrize("count", [1, 40])
def test_any_layout(count):
    given = {f"{name} {i}": drawn((4, 3), i).astype("float32") for i in range(count) for name in LAYOUTS}
    ours = {name: torch.zeros(4, 3) for name in given}
    grads = {name: LAYOUTS[name.rpartition(" ")[0]](x) for name, x in given.items()}
    opt = ao.Optimizer(ours, ao.SGD(lr=0.5), engine="numba")
    for _ in range(2):
        opt.step(grads)
    for name, p in ours.items():
        assert torch.equal(p, -grads[name].detach().contiguous()), name
