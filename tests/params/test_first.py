"""What users write into parameters before the first update is what slots begin as."""

import copy
import pickle
import weakref
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import arrayopt as ao
import arrayopt.torch as door

RULES = {
    "lookahead": ao.SGD(lr=0.1, lookahead_steps=2),
    "ema": ao.AdamW(lr=0.1, ema_decay=0.5),
    "Prodigy": ao.Prodigy(d0=0.01),
    "ScheduleFreeAdamW": ao.ScheduleFreeAdamW(lr=0.1),
}
SHAPES = {"w": (4, 3), "b": (3,), "number": (), "empty": (0, 2)}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(size=shape)).astype("float32") for name, shape in SHAPES.items()}


def write(opt):
    for name, x in arrays(1).items():
        opt.params[name][...] = x
    return opt


def put(opt):
    opt.params = arrays(1)
    return opt


def write_and_copy(opt):
    return copy.deepcopy(write(opt))


def copy_and_write(opt):
    return write(copy.deepcopy(opt))


def write_and_save(opt, make, path):
    write(opt).save(path)
    other = make(arrays(2))
    other.load(path)
    return other


def run(opt, seed=3):
    for step in range(3):
        opt.step(arrays((seed, step)))
    return {**opt.params, **{f"averaged {name}": x for name, x in opt.averaged().items()}}


def check_same(found, expected):
    for name, x in expected.items():
        assert np.array_equal(found[name], x), name


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("how", [write, put, write_and_copy, copy_and_write, write_and_save])
def test_slots_begin_as_what_was_written(name, how, tmp_path):
    def make(params):
        return ao.Optimizer(params, RULES[name], engine="numpy", groups={"b": {"lr": 0.2}})

    more = [make, tmp_path / "run.safetensors"] if how is write_and_save else []
    changed, expected = how(make(arrays(0)), *more), make(arrays(1))
    check_same(changed.averaged(), expected.averaged())
    check_same(run(changed), run(expected))


@pytest.mark.parametrize("mode", ["reduced", "sum"])
def test_over_ranks(mode):
    def train(comm):
        found = []
        for seed, how in ((0, write), (1, lambda opt: opt)):
            opt = how(ao.Optimizer(arrays(seed), RULES["lookahead"], engine="numpy", comm=ao.Ranks(comm, grads=mode)))
            if mode == "sum":
                for name, x in arrays(9).items():
                    opt.give(name, x)
                opt.step()
            found.append(run(opt))
        return found

    for late, early in ao.ranks.run(2, train):
        check_same(late, early)


def test_a_tensor_of_which_ranks_have_parts_and_one_updates_it():
    def train(comm):
        found = []
        for late in (True, False):
            half = slice(2 * comm.rank, 2 * comm.rank + 2)
            begin, grad = (arrays(seed)["w"][half].copy() for seed in (0, 1))
            part = ao.Part(begin * 0 if late else begin.copy(), offset=(2 * comm.rank, 0), shape=(4, 3))
            rule = ao.Muon(lr=0.1, lookahead_steps=2, ema_decay=0.5)
            opt = ao.Optimizer({"w": part}, rule, engine="numpy", comm=comm)
            assert opt._team.has_homes
            part.array[...] = begin
            for step in range(3):
                opt.step({"w": grad + step})
            found.append((part.array.copy(), opt.averaged()["w"]))
        return all(map(np.array_equal, *found))

    assert ao.ranks.run(2, train) == [True, True]


@pytest.mark.parametrize("how", ["state_dict", "save"])
def test_what_is_saved_of_a_tensor_of_which_ranks_have_parts_follows_too(how, tmp_path):
    def train(comm):
        half, grad = slice(2 * comm.rank, 2 * comm.rank + 2), arrays(2)["w"]
        begin, rule, found = arrays(0)["w"][half], ao.Muon(lr=0.1, ema_decay=0.5), []
        parts = [ao.Part(x.copy(), offset=(2 * comm.rank, 0), shape=(4, 3)) for x in (begin, 0 * begin)]
        opts = [ao.Optimizer({"w": part}, rule, engine="numpy", comm=comm) for part in parts]
        parts[0].array[...] = begin + 1
        if how == "save":
            opts[0].save(tmp_path / "x")
            opts[1].load(tmp_path / "x")
        else:
            parts[1].array[...] = begin + 1
            opts[1].load_state_dict(opts[0].state_dict())
        for part, opt in zip(parts, opts, strict=True):
            found.append(opt.averaged()["w"])
            part.array[...] = begin - 1
            opt.step({"w": grad[half]})
            found.append(opt.averaged()["w"])
        whole = arrays(0)["w"]
        assert np.array_equal(found[0], whole + 1)
        assert np.abs(found[1] - (whole - 1)).max() < 0.5
        return all(map(np.array_equal, found[:2], found[2:]))

    assert ao.ranks.run(2, train) == [True, True]


def test_a_tensor_follows_until_its_own_first_update():
    opts = [ao.Optimizer(arrays(seed), RULES["ema"], engine="numpy") for seed in (0, 1)]
    for opt in opts:
        opt.params["w"][...] = arrays(0)["w"]
        opt.step({**arrays(5), "b": None})
    opts[0].params["b"][...] = opts[1].params["b"]
    opts[0].add_group({"more": np.zeros(2)})
    opts[1].add_group({"more": np.ones(2)})
    opts[0].params["more"][...] = 1
    for opt in opts:
        opt.step({**arrays(6), "more": np.ones(2)})
    averaged = [opt.averaged() for opt in opts]
    for name in ("w", "b", "more"):
        assert np.array_equal(averaged[0][name], averaged[1][name])


@pytest.mark.parametrize("given", ["assigned", "in place"])
def test_a_slot_that_was_written_stays(given):
    opt = ao.Optimizer(arrays(0), ao.SGD(lr=0.1, ema_decay=0.5), engine="numpy")
    average = np.full((4, 3), 3.0, np.float32)
    if given == "assigned":
        opt.state["w"]["ema"] = average
    else:
        opt.state["w"]["ema"][...] = average
    write(opt)
    opt.step(arrays(4))
    assert np.array_equal(opt.state["w"]["ema"], 0.5 * average + 0.5 * opt.params["w"])


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def train(model, opt):
    for step in range(4):
        torch.manual_seed(step)
        opt.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        opt.step()


def grown(opt):
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize("before", ["step", "add_param_group", "deepcopy", "grown, and loaded", "copied, and loaded"])
def test_a_model_may_be_loaded_after_its_optimizer_was_made(before):
    models = []
    for late in (False, True):
        model = linear()
        weights = copy.deepcopy(model.state_dict())
        for p in model.parameters() if late else ():
            torch.nn.init.normal_(p, std=9.0)
        opt = door.SGD(model.parameters(), lr=0.01, lookahead_steps=2, engine="array_api")
        if before == "grown, and loaded":
            grown(opt)
        elif before == "copied, and loaded":
            model, opt = pickle.loads(pickle.dumps((model, opt)))
        model.load_state_dict(weights)
        if before == "add_param_group":
            grown(opt)
        elif before == "deepcopy":
            model, opt = copy.deepcopy((model, opt))
        train(model, opt)
        models.append(model)
    assert torch.equal(models[0].weight, models[1].weight)
    assert torch.equal(models[0].bias, models[1].bias)


def test_what_was_written_before_the_first_update_outlives_new_groups():
    model = linear()
    opt = door.AdamW([model.weight], lr=0.1, engine="array_api")
    opt.state[model.weight]["m"] = torch.full((2, 3), 2.0)
    opt.state[model.weight]["v"].fill_(3.0)
    opt.add_param_group({"params": [model.bias], "lr": 0.2})
    assert opt.state[model.weight]["m"].unique().tolist() == [2.0]
    assert opt.state[model.weight]["v"].unique().tolist() == [3.0]
    opt.param_groups[0]["amsgrad"] = True  # state of another rule begins anew
    assert opt.state[model.weight]["m"].unique().tolist() == [0.0]


@pytest.mark.parametrize("how", ["pop", "clear", "set"])
def test_state_of_pytorch_that_begins_anew_follows_again(how):
    model = linear()
    opt = door.SGD(model.parameters(), lr=0.1, ema_decay=0.5, engine="array_api")
    train(model, opt)
    if how == "pop":
        opt.state.pop(model.weight)
    elif how == "clear":
        opt.state.clear()
    else:
        opt.state[model.weight] = {}
    torch.nn.init.constant_(model.weight, 9.0)
    opt.zero_grad(set_to_none=False)
    opt.step()
    assert opt.state[model.weight]["ema"].unique().tolist() == [9.0]


EMA = ao.SGD(lr=0.1, ema_decay=0.5)


def made(x, rule=EMA, **options):
    return ao.Optimizer({"w": x}, rule, **options)


def test_what_was_loaded_stays_though_it_is_what_a_slot_begins_as(tmp_path):
    opt, other = made(np.ones(2)), made(np.zeros(2))
    opt.state["w"]["ema"][...] = 0.0
    opt.save(tmp_path / "x")
    other.load(tmp_path / "x")
    for x in (opt, other):
        x.step({"w": np.ones(2)})
    assert opt.averaged()["w"].tolist() == other.averaged()["w"].tolist() == [0.45, 0.45]


@pytest.mark.parametrize("how", ["load_state_dict", "load"])
@pytest.mark.parametrize("t", [0, 1])
def test_a_run_that_was_loaded_goes_on_as_the_one_that_was_saved(how, t, tmp_path):
    """Also if it is loaded into one that has made steps: what follows the parameters follows them again."""
    opt, other = made(np.ones(2)), made(np.ones(2))
    other.step({"w": np.ones(2)})
    for _ in range(t):
        opt.step({"w": np.ones(2)})
    opt.save(tmp_path / "x")
    if how == "load":
        other.load(tmp_path / "x")
    else:
        other.params["w"][...] = opt.params["w"]
        other.load_state_dict(opt.state_dict())
    for x in (opt, other):
        x.params["w"][...] = 3.0
        x.step({"w": np.ones(2)})
    assert opt.averaged()["w"].tolist() == other.averaged()["w"].tolist()
    assert abs(opt.averaged()["w"][0] - (1.925 if t else 2.95)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("written", [True, False])
def test_after_a_change_of_dtype(dtype, written):
    w = torch.ones(2)
    opt = made(w)
    w.data = w.data.to(dtype)
    opt.params  # noqa: B018 - takes the new arrays up
    if written:
        opt.state["w"]["ema"][...] = 0.0
    else:
        w.data.fill_(3.0)
    opt.step({"w": torch.zeros(2, dtype=dtype)})
    assert float(opt.state["w"]["ema"][0]) == (0.5 if written else 3.0)


@pytest.mark.parametrize("xp", [np, jnp, torch])
def test_a_step_that_is_skipped_is_no_update(xp):
    opt = made(xp.ones(2), skip_nonfinite=True)
    opt.step({"w": xp.full((2,), xp.nan)})
    opt.params["w"] = xp.full((2,), 3.0)
    opt.step({"w": xp.zeros(2)})
    assert opt.state["w"]["ema"].tolist() == [3.0, 3.0]


def accumulated(xp, comm, last):
    """A slot after a step of two micro-steps, between which the parameter was written; `last`: with its gradient."""
    more = {"comm": ao.Ranks(comm, grads="sum")} if comm else {}
    opt = ao.Optimizer({"w": xp.ones(2), "x": xp.ones(2)}, EMA, accumulate=2, **more)
    grad = 0 * xp.ones(2)
    opt.step({"w": grad, "x": grad})
    opt.params["w"] = 3 * xp.ones(2)
    opt.step({"w": grad if last else None, "x": grad})
    return opt.averaged()["w"].tolist()


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("xp", [np, jnp, torch])
def test_a_micro_step_is_no_update(xp, last):
    assert accumulated(xp, None, last) == [3.0, 3.0]


def test_a_micro_step_of_ranks_is_no_update():
    for last in (True, False):
        assert ao.ranks.run(2, lambda comm, last=last: accumulated(np, comm, last)) == [[3.0, 3.0]] * 2


@dataclass(frozen=True, kw_only=True)
class Scaled(ao.Rule):
    """Has a number in its first state, and the distance from a mean, which of one element is zero."""

    a: float = ao.real("[0, 1]", 0.0)

    def slots(self, xp, p):
        return {"scaled": self.a * p, "centred": p - xp.mean(p), "number": xp.full_like(p, self.a)}

    def update(self, xp, p, g, s, h):
        return p - g, dict(s)


def test_slots_follow_in_each_group_with_its_own_numbers():
    params = {"v": np.array([1.0, 3.0]), "w": np.array([1.0, 3.0])}
    opt = ao.Optimizer(params, Scaled(), groups={"w": {"a": 1.0}}, engine="array_api")
    for x in params.values():
        x[...] = [2.0, 6.0]
    opt.step({name: np.zeros(2) for name in params})
    assert {name: opt.state[name]["scaled"].tolist() for name in params} == {"v": [0.0, 0.0], "w": [2.0, 6.0]}
    assert opt.state["v"]["centred"].tolist() == opt.state["w"]["centred"].tolist() == [-2.0, 2.0]


def test_slots_follow_numbers_that_are_set_before_the_first_update():
    opt = ao.Optimizer(np.array([1.0, 3.0]), Scaled(), engine="numpy")
    for a in (0.5, 1.0):  # the first step has it; later ones change nothing
        opt.a = a
        opt.step(np.zeros(2))
    state = opt.state["param"]
    assert state["scaled"].tolist() == [0.5, 1.5]
    assert state["number"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("engine", ["array_api", "numpy"])
@pytest.mark.parametrize("saved", [False, True])
def test_a_layer_that_was_skipped_follows_until_its_own_first_update(engine, saved, tmp_path):
    def train(late):
        w = np.zeros((3, 2)) if late else np.full((3, 2), 5.0)
        rule = ao.SGD(lr=0.1, ema_decay=0.5, stacked=True, lookahead_steps=2)
        opt = ao.Optimizer({"w": w}, rule, engine=engine, skip_nonfinite=True)
        opt.state["w"]["ema"][2] = 7.0
        bad = np.ones((3, 2))
        bad[1:] = np.nan
        opt.step({"w": bad})
        if saved:
            opt.save(tmp_path / "x")
            opt = ao.Optimizer({"w": np.zeros((3, 2))}, rule, engine=engine, skip_nonfinite=True)
            opt.load(tmp_path / "x")
        first = {slot: x[0].copy() for slot, x in opt.state["w"].items() if slot != "t"}
        opt.params["w"][1:] = 5.0
        opt.averaged()
        assert all(np.array_equal(opt.state["w"][slot][0], x) for slot, x in first.items())
        assert np.all(opt.state["w"]["ema"][2] == 7.0)
        opt.step({"w": np.ones((3, 2))})
        opt.params["w"][1] += 1.0
        opt.step({"w": np.ones((3, 2))})
        return np.stack([opt.params["w"][1], *(x[1] for slot, x in opt.state["w"].items() if slot != "t")])

    assert np.array_equal(train(True), train(False))


def test_an_array_that_was_replaced_before_the_first_update_is_freed():
    params = {"w": np.ones(8, np.float32), "b": np.ones(3, np.float32)}
    opt = ao.Optimizer(params, RULES["ema"], engine="numpy")
    old, params["w"] = weakref.ref(params["w"]), np.full(8, 2, np.float32)
    opt.step({"w": None, "b": np.ones(3, np.float32)})
    assert old() is None
    opt.step({"w": np.zeros(8, np.float32), "b": None})
    np.testing.assert_allclose(opt.state["w"]["ema"], 2.0, rtol=0.01)
