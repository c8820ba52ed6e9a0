"""What slots are stored in, through the door of PyTorch: the same bits as of `arrayopt.Optimizer`."""

import ml_dtypes
import numpy as np
import pytest
import torch

import arrayopt as ao
import arrayopt.torch as door

STORAGES = {"int8": "int8", "bfloat16": torch.bfloat16, "by slot": {"m": torch.int8, "v": "bfloat16"}, "wide": None}


def arrays(seed, dtype):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.standard_normal(n).astype("f4")).to(dtype) for n in ((8, 64), (64,), (5, 7))]


def bits(opt, params):
    """Parameters and slots, each as bytes."""
    made = []
    for i, p in enumerate(params):
        state = opt.state[str(i)] if isinstance(opt, ao.Optimizer) else opt.state[p]
        slots = {name: x for name, x in state.items() if name not in ("t", "step")}
        made.append({"p": p.detach(), **slots})
    return [
        {name: (x.dtype, x.contiguous().view(torch.uint8).numpy().tobytes()) for name, x in one.items()} for one in made
    ]


def trained(opt, params, dtype, first, steps):
    for step in range(first, first + steps):
        grads = arrays((1, step), dtype)
        if isinstance(opt, ao.Optimizer):
            opt.step({str(i): g for i, g in enumerate(grads)})
            continue
        opt.zero_grad()
        sum((p * g).sum() for p, g in zip(params, grads, strict=True)).backward()
        opt.step()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype", "masters"), [("AdamW", torch.float32, "auto"), ("LAMB", torch.bfloat16, "split")]
)
def test_the_door_stores_as_an_optimizer_does(name, dtype, masters, release, storage):
    options = {"lr": 0.01, "state_dtype": STORAGES[storage], "master_weights": masters}
    params = [torch.nn.Parameter(x) for x in arrays(0, dtype)]
    opt = getattr(door, name)(params, release=release, **options)
    others = dict(enumerate(arrays(0, dtype)))
    mine = ao.Optimizer({str(i): x for i, x in others.items()}, getattr(ao, name)(**options))
    for one in (opt, mine):
        trained(one, params, dtype, 0, 3)
    assert bits(opt, params) == bits(mine, list(mine.params.values()))


@pytest.mark.parametrize("release", [False, True])
def test_a_storage_that_is_set_in_a_group_goes_on_with_the_state(release):
    params = [torch.nn.Parameter(x) for x in arrays(0, torch.float32)]
    opt = door.AdamW(params, lr=0.01, release=release)
    mine = ao.Optimizer({str(i): x for i, x in enumerate(arrays(0, torch.float32))}, ao.AdamW(lr=0.01))
    for turn, storage in enumerate(["int8", torch.bfloat16, {"v": torch.int8}, None]):
        for one in (opt, mine):
            trained(one, params, torch.float32, 2 * turn, 2)
        opt.param_groups[0]["state_dtype"] = mine.state_dtype = storage
        opt.param_groups[0]["lr"] = mine.lr = 0.01 / (turn + 1)  # both at once
    for one in (opt, mine):
        trained(one, params, torch.float32, 100, 1)
    assert bits(opt, params) == bits(mine, list(mine.params.values()))
    assert opt.state[params[0]]["v"].dtype == torch.float32


def test_masters_that_are_set_in_a_group_go_on_in_the_other_form():
    dtype, kinds = torch.bfloat16, []
    params, ours = [torch.nn.Parameter(x) for x in arrays(0, dtype)], arrays(0, dtype)
    theirs = door.LAMB(params, lr=0.01)
    opt = ao.Optimizer({str(i): x for i, x in enumerate(ours)}, ao.LAMB(lr=0.01))
    for first, masters in enumerate(("auto", "split", True, "auto", "split")):
        theirs.param_groups[0]["master_weights"] = opt.master_weights = masters
        trained(theirs, params, dtype, first, 1)
        trained(opt, ours, dtype, first, 1)
        kinds.append(theirs.state[params[0]]["master"].dtype)
        assert bits(theirs, params) == bits(opt, ours)
    assert kinds == [torch.float32, torch.int8, torch.float32, torch.float32, torch.int8]
    theirs.param_groups[0]["master_weights"] = False
    with pytest.raises(ValueError, match="master_weights cannot change like this while training"):
        theirs.step()


def test_a_storage_that_cannot_be_is_refused_and_nothing_changes():
    params = [torch.nn.Parameter(x) for x in arrays(0, torch.float32)]
    opt = door.AdamW(params, lr=0.01)
    trained(opt, params, torch.float32, 0, 1)
    before = bits(opt, params)
    for storage, message in ((torch.float64, "must be None, 'float16'"), ({"w": "int8"}, "must name slots")):
        opt.param_groups[0]["state_dtype"] = storage
        with pytest.raises(ValueError, match=message):
            trained(opt, params, torch.float32, 1, 1)
        opt.param_groups[0]["state_dtype"] = None
        assert bits(opt, params) == before


@pytest.mark.parametrize("dtype", [np.int8, np.dtype("int8"), torch.int8, "int8"], ids=repr)
def test_a_dtype_counts_as_its_name(dtype):
    assert ao.LAMB(state_dtype=dtype) == ao.LAMB(state_dtype="int8")
    assert ao.LAMB(state_dtype={"v": dtype}) == ao.LAMB(state_dtype={"v": "int8"})


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), torch.bfloat16], ids=repr)
def test_bfloat16_of_any_library_counts_as_its_name(dtype):
    assert ao.LAMB(state_dtype=dtype).state_dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [np.float64, torch.float32, float, np.ones(2), 8], ids=repr)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(
        (TypeError, ValueError), match="LAMB: `state_dtype` must be None, 'float16', 'bfloat16' or 'int8'; got"
    ):
        ao.LAMB(state_dtype=dtype)


def test_to_torch_says_what_to_do_about_8_bits():
    weight = torch.nn.Parameter(torch.ones(40))
    opt = door.AdamW([weight], lr=0.1, state_dtype="int8")
    weight.grad = torch.ones(40)
    opt.step()
    with pytest.raises(ValueError, match=r"state_dtype='int8' in group '0'; set `state_dtype` to None first"):
        ao.to_torch(opt)
    opt.param_groups[0]["state_dtype"] = None
    assert ao.to_torch(opt)["state"][0]["exp_avg"].shape == (40,)
