"""State in each storage, loaded in each way: the next steps are those of the run that went on."""

import itertools

import ml_dtypes
import numpy as np
import optax
import pytest
import torch

import arrayopt as ao
from tests.support.ranks import contents, differing
from tests.support.slow import marked

SHAPES = {"w": (10, 64), "b": (33,), "stack": (3, 4, 32), "number": (), "empty": (0, 3)}
STORAGES = {
    "wide": ("float32", {}),
    "bfloat16": ("float32", {"state_dtype": "bfloat16"}),
    "int8": ("float32", {"state_dtype": "int8"}),
    "by slot": ("float32", {"state_dtype": {"m": "bfloat16", "v": "int8"}}),
    "masters": ("bfloat16", {"master_weights": True}),
    "split": ("bfloat16", {"master_weights": "split"}),
    "split, int8": ("bfloat16", {"master_weights": "split", "state_dtype": "int8"}),
}


def each(*further):
    """Each storage, early and late, by one rank and two: `make test` has all pairs of these, in half of the cases."""
    lists = [list(STORAGES), [0, 3], [1, 2], *further]
    cases = itertools.product(*lists)

    def quick(*case):
        return sum(values.index(x) for values, x in zip(lists, case, strict=True)) % 2 == 0

    return marked(cases, quick, lambda x: getattr(x, "__name__", str(x)))


def arrays(seed, dtype):
    rng, dtype = np.random.default_rng(seed), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return {name: np.array(rng.standard_normal(shape), np.float32).astype(dtype) for name, shape in SHAPES.items()}


def optimizer(storage, comm, seed=0, **options):
    dtype, fields = STORAGES[storage]
    params = {name: np.array(x) for name, x in arrays(seed, dtype).items()}
    return ao.Optimizer(params, ao.AdamW(lr=0.01, **{**fields, **options}), comm=comm, engine="array_api")


def go_on(opt, dtype, count):
    for k in range(opt.step_count, opt.step_count + count):
        opt.step({name: np.array(x) for name, x in arrays((1, k), dtype).items()})
    return contents(opt)


def on_ranks(ranks, run):
    for wrong in [run(None)] if ranks == 1 else ao.ranks.run(ranks, run):
        assert wrong == []


@pytest.mark.parametrize(("storage", "steps", "ranks"), each())
def test_a_run_goes_on_where_it_was_saved(storage, steps, ranks, tmp_path):
    dtype = STORAGES[storage][0]

    def run(comm):
        opt, wrong = optimizer(storage, comm), []
        go_on(opt, dtype, steps)
        opt.save(tmp_path / "saved")
        saved, weights = opt.state_dict(), {name: np.array(x) for name, x in opt.params.items()}
        expected = go_on(opt, dtype, 3)
        for first in (True, False):  # the weights, or the state
            other = optimizer(storage, comm, seed=5)
            for load in (False, True) if first else (True, False):
                if load:
                    other.load_state_dict(saved)
                else:
                    other.params = {name: x.copy() for name, x in weights.items()}
            wrong += differing(expected, go_on(other, dtype, 3))
        other = optimizer(storage, comm, seed=5)
        other.load(tmp_path / "saved")
        return wrong + differing(expected, go_on(other, dtype, 3))

    on_ranks(ranks, run)


def of_torch(dtype, steps):
    params = [torch.nn.Parameter(torch.tensor(x.astype(np.float32))) for x in arrays(0, dtype).values()]
    theirs = torch.optim.AdamW(params, lr=0.01)
    for k in range(steps):
        for p, g in zip(params, arrays((2, k), dtype).values(), strict=True):
            p.grad = torch.tensor(g.astype(np.float32))
        theirs.step()
    return lambda opt: ao.load_torch(opt, theirs.state_dict())


def of_optax(dtype, steps):
    theirs = optax.adamw(0.01)
    params = arrays(0, "float32")
    state = theirs.init(params)
    for k in range(steps):
        _, state = theirs.update(arrays((2, k), "float32"), state, params)
    return lambda opt: ao.load_optax(opt, state)


@pytest.mark.parametrize(("storage", "steps", "ranks", "source"), each([of_torch, of_optax]))
def test_state_from_elsewhere_is_stored_as_if_it_had_been_loaded_first(source, storage, steps, ranks):
    dtype, fields = STORAGES[storage]
    load = source(dtype, steps)

    def run(comm):
        direct = optimizer(storage, comm)
        load(direct)
        later = optimizer(storage, comm, state_dtype=None, master_weights="auto")
        load(later)
        for name, value in fields.items():
            setattr(later, name, value)
        return differing(go_on(direct, dtype, 3), go_on(later, dtype, 3))

    on_ranks(ranks, run)
