"""State that goes on in another storage while ranks share it: the bytes of one process."""

import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from tests.support.ranks import contents, differing, gradients, parameters

SHAPES = {"rows": (600, 64), "bias": (45,), "number": (), "empty": (0, 3), "kernels": (70, 2, 3), "long": (30_001,)}
INT8, WIDE = {"state_dtype": "int8"}, {"state_dtype": None}
RULES = {
    "LAMB": (ao.LAMB(lr=0.01), "float32", [INT8, {"state_dtype": {"m": "bfloat16", "v": "int8"}}, WIDE]),
    "CAME": (ao.CAME(lr=0.01), "float32", [{"master_weights": "split"}, INT8]),
    "masters": (ao.LAMB(lr=0.01), "bfloat16", [{"master_weights": "split"}, INT8, {"master_weights": True}]),
}


def trained(rule, dtype, changes, comm=None, path=None):
    """The contents after two steps in each storage; or from a file on, in all but the first."""
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    opt = ao.Optimizer(parameters(SHAPES, dtype), rule, comm=comm, engine="cpp")
    if path is not None and path.exists():
        opt.load(path)
    for change in changes if opt.step_count else [{}, *changes]:
        for name, value in change.items():
            setattr(opt, name, value)
        for _ in range(2):
            opt.step(gradients(opt.step_count, SHAPES, dtype))
        if path is not None and not path.exists():
            opt.save(path)
    return contents(opt)


@pytest.mark.parametrize("name", RULES)
def test_storage_changes_over_ranks_as_in_one_process(name, tmp_path):
    rule, dtype, changes = RULES[name]
    one = trained(rule, dtype, changes, path=tmp_path / "saved")
    assert differing(one, trained(rule, dtype, changes)) == []
    for path in (None, tmp_path / "saved"):  # in a run; and from a checkpoint of one process on
        for many in ao.ranks.run(3, lambda comm, path=path: trained(rule, dtype, changes, comm, path)):
            assert differing(one, many) == []


def test_parts_change_their_storage_where_they_are_whole_blocks():
    whole, grads = np.ones((6, 64), np.float32), gradients(0, {"w": (6, 64)})["w"]

    def run(columns):
        def rank(comm):
            mine = slice(0, columns) if comm.rank == 0 else slice(columns, 64)
            part = ao.Part(whole[:, mine].copy(), (0, mine.start), whole.shape)
            opt = ao.Optimizer({"w": part}, ao.AdamW(lr=0.01), comm=comm, engine="cpp")
            opt.step({"w": grads[:, mine].copy()})
            opt.state_dtype = "int8"
            opt.step({"w": grads[:, mine].copy()})
            return opt.state_dict()["tensors"]["w"]["slots"]

        return ao.ranks.run(2, rank)

    one = ao.Optimizer({"w": whole.copy()}, ao.AdamW(lr=0.01), engine="cpp")
    for change in (None, "int8"):
        one.state_dtype = change
        one.step({"w": grads})
    saved = one.state_dict()["tensors"]["w"]["slots"]
    for slots in run(32):
        assert all(np.asarray(slots[slot]).tobytes() == np.asarray(x).tobytes() for slot, x in saved.items())
    with pytest.raises(ValueError, match="parts must start and end at multiples of 32"):
        run(33)


def test_masters_of_a_tensor_that_one_rank_updates_do_not_change_and_nothing_is_lost():
    shape, half = (8, 6), ml_dtypes.bfloat16
    whole, grads = parameters({"w": shape}, half)["w"], [gradients(k, {"w": shape}, half)["w"] for k in range(2)]

    def run(refused):
        def rank(comm):
            mine = slice(0, 4) if comm.rank == 0 else slice(4, 8)
            part = ao.Part(whole[mine].copy(), (mine.start, 0), shape)
            opt = ao.Optimizer({"w": part}, ao.Muon(lr=0.01), comm=comm)
            opt.step({"w": grads[0][mine].copy()})
            if refused:
                with pytest.raises(
                    ValueError, match="masters of 'w' cannot be added or removed while one rank holds them"
                ):
                    opt.master_weights = "split"
            opt.step({"w": grads[1][mine].copy()})
            return opt.state_dict()["tensors"]["w"]["slots"]

        return ao.ranks.run(2, rank)

    for slots, others in zip(run(True), run(False), strict=True):
        assert slots.keys() == {"m", "master"}
        assert all(x.any() and x.tobytes() == others[slot].tobytes() for slot, x in slots.items())
