"""A process group of PyTorch, of this process alone: what is kept of its calls, and what is not."""

import weakref

import numpy as np
import pytest

from arrayopt.ranks import process_group

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield process_group.ProcessGroup(dist.group.WORLD, 5.0)
    dist.destroy_process_group()


def test_calls_are_kept_and_their_memory_is_not(group):
    """A thread of gloo that lets go of a call last needs Python's lock, which ends a process that is at its end."""
    process_group._KEPT.clear()
    x = np.arange(1 << 12, dtype=np.uint8)
    seen = weakref.ref(x)
    assert [y.tolist() for y in group.allgather(x[:7], [7])()] == [list(range(7))]
    group.start_broadcast([(0, x)])()
    room = np.zeros_like(x)
    group.start_alltoall(x, [x.size], room, [x.size])()
    assert room.tobytes() == x.tobytes() == np.arange(1 << 12, dtype=np.uint8).tobytes()
    assert [isinstance(work, dist.Work) for work in process_group._KEPT] == [True] * 3
    del x
    assert seen() is None
