"""Parts of tensors on PyTorch's devices: ranks compute what one process does, in PyTorch's streams, on two devices.

The ranks are threads, so no group of PyTorch's joins them: the mesh of a DTensor is told its rank.
"""

import importlib
import itertools
import math

import numpy as np
import pytest

import arrayopt as ao
from tests.cudacpu import standin
from tests.support.slow import marked

torch = pytest.importorskip("torch")
there = importlib.import_module("tests.support.there")

MESHES = {2: (2,), 3: (3,), 4: (2, 2)}
"""The sides of the mesh for so many ranks."""
TENSORS = {
    "rows": ((256, 128), (0,), (None, 0)),
    "columns": ((64, 384), (1,), (None, 1)),
    "both": ((128, 256), (0,), (0, 1)),
    "few": ((5, 64), (0,), (0, None)),
    "bias": ((384,), (0,), (None, 0)),
    "same": ((3, 4), (None,), (None, None)),
    "small": ((7, 6), (0,), (0, 1)),
}
"""Each tensor's shape, and which axis each side of a mesh of one or two sides divides. Of `few` some ranks have no or
fewer rows; `rows` begin at units of work on two ranks."""


def block_of(name, rank, ranks):
    """A rank's part of a tensor, divided as PyTorch does: all but the last are equal."""
    shape, *axes = TENSORS[name]
    found = [slice(0, n) for n in shape]
    sides = MESHES[ranks]
    for axis, number, side in zip(axes[len(sides) - 1], np.unravel_index(rank, sides), sides, strict=True):
        if axis is not None:
            first, last = found[axis].start, found[axis].stop
            each = -(-(last - first) // side)
            found[axis] = slice(min(last, first + each * int(number)), min(last, first + each * int(number + 1)))
    return tuple(found)


def dtensor(name, part, rank, ranks, parameter):
    """A part as a DTensor. The mesh has a name of its own: it would equal that of other ranks."""
    placed = importlib.import_module("torch.distributed.tensor")
    shape, *axes = TENSORS[name]
    sides = MESHES[ranks]
    names = tuple(f"{i} of rank {rank}" for i in range(len(sides)))
    every = np.arange(ranks).reshape(sides)
    mesh = placed.DeviceMesh("cpu", every, mesh_dim_names=names, _init_backend=False, _rank=rank)
    lie = [placed.Replicate() if axis is None else placed.Shard(axis) for axis in axes[len(sides) - 1]]
    whole = {"shape": torch.Size(shape), "stride": tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))}
    made = placed.DTensor.from_local(part.as_subclass(torch.Tensor), mesh, lie, run_check=False, **whole)
    made = torch.nn.Parameter(made) if parameter else made
    made._local_tensor = part
    return made


def made_of(x, name, rank, ranks, kind, *, parameter=False):
    """A rank's part of an array, on the rank's device."""
    at = block_of(name, rank, ranks)
    part = there.copied(np.ascontiguousarray(x[at]), rank % 2)
    if kind == "DTensor":
        return dtensor(name, part, rank, ranks, parameter)
    return ao.Part(part, tuple(each.start if part.numel() else 0 for each in at), x.shape)


def local(x):
    return x.array if isinstance(x, ao.Part) else x._local_tensor


def numbers(seed, names):
    r = np.random.default_rng(seed)
    return {name: r.standard_normal(TENSORS[name][0]).astype("f4") for name in names}


def late(cupy, streams, x):
    """As a backward pass leaves a gradient: still to come, on PyTorch's stream."""
    part = local(x)
    if part.numel():
        with cupy.cuda.Device(part.number):
            into = cupy.ndarray(part.shape, "f4", cupy.cuda.MemoryPointer(part.memory, 0))
            values = into.get()
            for each in (np.full_like(values, np.nan), values):
                into.set(each, streams.now[part.number].it)
    return x


FEW, SMALL = ("few", "bias", "same"), ("small", "bias")
ALL = tuple(name for name in TENSORS if name != "small")
CASES = {
    "LAMB, few": (ao.LAMB(lr=0.01), {"stats": True}, FEW, ("same",)),
    "Muon, small": (ao.Muon(lr=0.01, ns_steps=1), {"groups": {"bias": ao.SGD(lr=0.1)}}, SMALL, SMALL),
    "AdamW": (ao.AdamW(lr=0.01, ema_decay=0.9), {"loss_scale": 4.0, "accumulate": 2}, ALL, ALL),
    "AdamW, int8": (ao.AdamW(lr=0.01, state_dtype="int8"), {}, ALL, ALL),
    "LAMB": (ao.LAMB(lr=0.01), {"stats": True}, ALL, ("rows", "same")),
    "LANS": (ao.LANS(lr=0.01), {"clip_norm": 0.5, "loss_scale": ao.LossScale(init=4.0)}, ALL, ()),
    "CAME": (ao.CAME(lr=0.01), {"skip_nonfinite": True}, ALL, ("same",)),
    "Muon": (ao.Muon(lr=0.01), {"groups": {"bias": ao.AdamW(lr=0.01)}}, ALL, ALL),
}
"""Of each case the rule, options, the tensors, and those that have the bits of one process on two ranks."""
SEEDS = {"late and checked": None, "in any order": 0}
"""Work is done as late as may be, and checked, or in an order that a seed draws."""

EVERY = itertools.product(CASES, MESHES, SEEDS, ("Part", "DTensor"))


def quick(label, ranks, order, kind):
    return (ranks, order, kind) == (2, "in any order", "Part") and label in ("LAMB, few", "Muon, small")


@pytest.fixture
def streams(cupy, monkeypatch):
    monkeypatch.setitem(ao.engines.registry.FUSED, "torch", ("cupy",))
    return there.Streams(cupy).installed(monkeypatch)


@pytest.mark.parametrize(
    ("label", "ranks", "order", "kind"),
    marked(filter(lambda case: case[3] == "DTensor" or "few" in case[0] or "small" in case[0], EVERY), quick),
)
def test_parts_are_updated_as_whole_tensors_are(cupy, streams, label, ranks, order, kind):
    (rule, options, names, exact), seed = CASES[label], SEEDS[order]
    host = [numbers(k, names) for k in range(5)]
    with standin.checking(check=False):
        one = ao.Optimizer({name: cupy.asarray(x) for name, x in host[0].items()}, rule, **options)
        for grads in host[1:]:
            one.step({name: cupy.asarray(x) for name, x in grads.items()})

    def rank(comm):
        place = comm.rank, ranks, kind
        params = {name: made_of(x, name, *place, parameter=True) for name, x in host[0].items()}
        with there.Factories():
            opt = ao.Optimizer(params, rule, comm=comm, **options)
            assert "engine cupy" in opt.explain()
            for values in host[1:]:
                opt.step({name: late(cupy, streams, made_of(x, name, *place)) for name, x in values.items()})
            read = opt.stats.read() if options.get("stats") else {}
            assert {local(p).device.index for p in params.values()} == {comm.rank % 2}
            return {name: local(p).numpy(force=True) for name, p in params.items()}, read

    if seed is None:
        found = ao.ranks.run(ranks, rank)
    else:
        with standin.any_order(seed), standin.checking(check=False):
            found = ao.ranks.run(ranks, rank)
    for number, (parts, read) in enumerate(found):
        for name, part in parts.items():
            whole = np.ascontiguousarray(one.params[name].get()[block_of(name, number, ranks)])
            if name in exact and (ranks == 2 or exact is names):
                assert part.tobytes() == whole.tobytes(), name
            else:
                np.testing.assert_allclose(part, whole, rtol=2e-6, atol=2e-6)
        for name, report in one.stats.read().items() if read else ():
            assert read[name] == pytest.approx(report, rel=1e-5)


def test_slots_that_are_not_divided_lie_beside_their_parts(cupy, streams):
    """Row and column slots; not on the host, where PyTorch makes tensors unless it is told where."""

    def rank(comm):
        params = {name: made_of(x, name, comm.rank, 2, "Part") for name, x in numbers(0, SMALL).items()}
        with there.Factories():
            opt = ao.Optimizer(params, ao.CAME(lr=0.01), comm=comm)
        return {x.device for slots in opt.state.values() for name, x in slots.items() if name != "t"}

    assert ao.ranks.run(2, rank) == [{torch.device("cuda", number)} for number in range(2)]


def test_slots_of_no_layers_lie_on_the_device(cupy, streams):
    with there.Factories():
        k = there.copied(np.zeros((0, 3, 4), "f4"), 1)
        opt = ao.Optimizer({"k": k}, ao.LAMB(), groups={"k": {"stacked": True}})
    assert {x.device for name, x in opt.state["k"].items() if name != "t"} == {torch.device("cuda", 1)}


def test_a_listed_learning_rate_is_read_on_the_device_of_the_step(cupy, streams):
    with there.Factories():
        step = there.copied(np.array(1), 1)
        assert float(ao.hyper.Listed((0.1, 0.05))(step)) == pytest.approx(0.05)
