"""What an Optimizer does beside steps, done by ranks: checkpoints, replaced parameters, groups, reports, libraries."""

import copy
import pickle
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import array_api_compat
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.ranks import layout as layout_module
from arrayopt.ranks.gather import Gather
from tests.support.engines import each_compiled, each_of_torch
from tests.support.ranks import OTHER_SLOTS, SHAPES, contents, differing, gradients, kinds, parameters, train
from tests.support.slow import marked

RULES = [ao.LAMB(lr=0.01), ao.CAME(lr=0.01)]


@each_compiled
@pytest.mark.parametrize("rule", marked([(rule,) for rule in RULES], lambda rule: isinstance(rule, ao.LAMB)))
def test_checkpoints_know_no_ranks(engine, rule, tmp_path):
    """The file of any number of ranks is that of one process, and any number goes on from it."""
    every = [gradients(k) for k in range(4)]
    train(parameters(), rule, every[:2], engine=engine).save(tmp_path / "one")
    expected = contents(train(parameters(), rule, every, engine=engine))
    for ranks in (2, 5):
        ao.ranks.run(
            ranks, lambda comm: train(parameters(), rule, every[:2], comm, engine=engine).save(tmp_path / "many")
        )
        assert (tmp_path / "many").read_bytes() == (tmp_path / "one").read_bytes()

    def go_on(comm):
        opt = ao.Optimizer(parameters(seed=9), type(rule)(lr=0.5), comm=comm, engine=engine)
        opt.load(tmp_path / "many")
        for grads in every[2:]:
            opt.step(grads)
        return differing(expected, contents(opt))

    for ranks in (1, 3, 4):
        assert ao.ranks.run(ranks, go_on) == [[]] * ranks


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")  # of a rule that looks at shapes
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("label", OTHER_SLOTS)
def test_slots_of_any_shape_come_home_whole(label, ranks, tmp_path):
    """They were as large as the parameter: what did not fit was lost, and what was missing was any memory."""
    rule = OTHER_SLOTS[label]
    shapes = {"w": (4, 60), "k": (8, 11, 6), "tall": (60, 4), "b": (5,), "s": (), "empty": (0, 3)}
    every = [gradients(k, shapes) for k in range(4)]
    one = train(parameters(shapes), rule, every[:3])
    one.save(tmp_path / "one")
    halfway, saved, average = contents(one), one.state_dict(), one.averaged()
    one.step(every[3])
    expected = contents(one)

    def rank(comm):
        opt = train(parameters(shapes), rule, every[:3], comm)
        opt.save(tmp_path / "many")
        found = differing(halfway, contents(opt))
        found += [n for n, x in opt.averaged().items() if x.tobytes() != average[n].tobytes()]
        for load in (lambda x: x.load(tmp_path / "many"), lambda x: x.load_state_dict(saved)):
            other = ao.Optimizer({n: x.copy() for n, x in opt.params.items()}, rule, comm=comm)
            load(other)
            other.step(every[3])
            found += differing(expected, contents(other))
        return found

    assert ao.ranks.run(ranks, rank) == [[]] * ranks
    assert (tmp_path / "many").read_bytes() == (tmp_path / "one").read_bytes()


SPOILT = {
    "a slot is too small": lambda opt, r: opt._parameters.all[0].slots.update(m=np.zeros(3)),
    "a slot is too large": lambda opt, r: opt._parameters.all[0].slots.update(m=np.zeros(90_000)),
    "elements are nobody's": lambda opt, r: _share(opt, (0, 8192, 8192 * 2)),
}


def _share(opt, ends):
    opt._parameters.all[0].share = replace(opt._parameters.all[0].share, ends=ends)


@each_compiled
@pytest.mark.parametrize("label", SPOILT)
@pytest.mark.parametrize("call", ["state_dict", "save", "averaged"])
def test_what_does_not_cover_a_slot_is_an_error(engine, label, call, tmp_path):
    def rank(comm):
        rule = ao.LAMB(lr=0.01, ema_decay=0.5)
        opt = ao.Optimizer({"w": np.ones((300, 301))}, rule, comm=comm, engine=engine)
        if comm.rank or "nobody" in label:
            SPOILT[label](opt, comm.rank)
        words = r"slot '\w+' of 'w', of shape \(300, 301\), cannot be assembled from the ranks' parts: "
        with pytest.raises((ValueError, ao.RankError), match=words):
            getattr(opt, call)(*([tmp_path / "x"] if call == "save" else []))

    ao.ranks.run(2, rank)


@each_compiled
def test_a_part_that_lies_on_another_is_an_error(engine):
    def rank(comm):
        opt = ao.Optimizer(
            {"w": ao.Part(np.ones((2, 3)), (2 * comm.rank, 0), (4, 3))}, ao.LAMB(), comm=comm, engine=engine
        )
        (tensor,) = opt._parameters.all
        tensor.share = replace(tensor.share, blocks=(((0, 0), (2, 3)), ((1, 0), (2, 3))))
        with pytest.raises(ValueError, match="must cover"):
            opt.state_dict()

    ao.ranks.run(2, rank)


@each_compiled
@pytest.mark.parametrize("reduction", ["ordered", "fast"])
def test_means_take_three_buckets_of_memory(engine, reduction, monkeypatch):
    """Beside the gradients and their means: one that is filled, one that is sent, and what is received of that.

    One large tensor took as much as 2.6 times its gradient, and 3.7 times.
    """
    monkeypatch.setattr(layout_module, "ROUND", 1 << 18)
    monkeypatch.setattr(layout_module, "FOR_EACH", 1 << 10)
    n, every = 2_000_000, []

    def rank(comm):
        x, g = np.zeros(n, np.float32), np.full(n, 1.0 + comm.rank, np.float32)
        there = ao.Ranks(comm, grads="mean", reduction=reduction, check=None)
        params = ao.ranks.shared({"x": x, "y": np.zeros(70)}, comm)  # which travel without a copy
        opt = ao.Optimizer(params, ao.SGD(lr=1.0), comm=there, engine=engine)
        opt.step({"x": g, "y": np.full(70, 1.0 + comm.rank)})
        if comm.rank == 0:
            tracemalloc.start()
        comm.meet()()
        opt.step({"x": g, "y": np.full(70, 1.0 + comm.rank)})
        comm.meet()()
        if comm.rank == 0:
            every.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert (opt.params["x"] == -3.0).all()
        assert (opt.params["y"] == -3.0).all()

    ao.ranks.run(2, rank)
    means = 4 * n  # of both ranks, which are threads here
    # and each of two ranks has the sums of its half of the bucket before, which are on their way
    assert every[0] < means + 2 * 3.5 * layout_module.ROUND + 100_000


def test_the_list_of_what_is_gathered_is_made_once(monkeypatch):
    """It is made again where arrays are others, lie elsewhere, or other tensors take part."""
    made = []
    real = Gather.__init__

    def counted(self, comm, *args, **options):
        made.append(comm.rank)
        real(self, comm, *args, **options)

    monkeypatch.setattr(Gather, "__init__", counted)

    def rank(comm):
        opt = ao.Optimizer(parameters(), ao.SGD(lr=0.1), comm=comm, engine="numpy")
        found = []
        for k in range(7):
            if k == 3:
                opt.params["bias"] = opt.params["bias"].copy()
            opt.step(gradients(0, without=("square",) if k == 5 else ()))
            found.append(made.count(comm.rank))
        return found

    assert ao.ranks.run(2, rank) == [[1, 1, 1, 2, 2, 3, 4]] * 2


@each_compiled
def test_a_state_dict_is_whole_on_each_rank(engine):
    every = [gradients(k) for k in range(3)]
    expected = contents(train(parameters(), ao.LAMB(lr=0.01), every, engine=engine))
    halfway = train(parameters(), ao.LAMB(lr=0.01), every[:2], engine=engine)
    saved, held = halfway.state_dict(), halfway.params

    def go_on(comm):
        opt = ao.Optimizer(copy.deepcopy(held), ao.LAMB(), comm=comm, engine=engine)
        opt.load_state_dict(saved)
        opt.step(every[2])
        return differing(expected, contents(opt))

    assert ao.ranks.run(3, go_on) == [[]] * 3


@pytest.mark.parametrize("what", ["count", "slot"])
def test_a_state_dict_is_the_same_on_each_rank(what):
    """Else each rank would go on from another state."""

    def rank(comm):
        opt = train(parameters(), ao.AdamW(lr=0.1), [gradients(0)], comm, engine="numpy")
        saved, before = opt.state_dict(), contents(opt)
        about = saved["tensors"]["bias"]
        if comm.rank == 1 and what == "count":
            about["t"] = 50
        elif comm.rank == 1:
            about["slots"]["m"][3] += 1
        with pytest.raises(ValueError, match=r"Optimizer.load_state_dict: nothing was changed.*the state of 'bias' is"):
            opt.load_state_dict(saved)
        return differing(before, contents(opt))

    assert ao.ranks.run(2, rank) == [[]] * 2


@each_compiled
def test_a_file_that_does_not_fit_changes_nothing_anywhere(engine, tmp_path):
    train(parameters({"other": (3,)}), ao.LAMB(), []).save(tmp_path / "x")

    def load(comm):
        opt = train(parameters(), ao.LAMB(lr=0.01), [gradients(0)], comm, engine=engine)
        before = contents(opt)
        with pytest.raises((ValueError, ao.RankError), match="missing 'words'"):
            opt.load(tmp_path / "x")
        with pytest.raises((FileNotFoundError, ValueError)):
            opt.load(tmp_path / ("x" if comm.rank == 1 else "nothing"))
        return differing(before, contents(opt))

    assert ao.ranks.run(2, load) == [[]] * 2


@each_compiled
def test_a_file_that_cannot_be_written_is_an_error_of_all_ranks(engine, tmp_path):
    def save(comm):
        opt = train(parameters(), ao.LAMB(lr=0.01), [gradients(0)], comm, engine=engine)
        with pytest.raises((OSError, ao.RankError), match="No such file"):
            opt.save(tmp_path / "no folder" / "x")
        opt.step(gradients(1))
        return opt.step_count

    assert ao.ranks.run(3, save) == [2] * 3


@each_compiled
@pytest.mark.parametrize("rule", [ao.LAMB(lr=0.01), ao.LAMB(lr=0.01, master_weights=True)], ids=["float32", "float16"])
def test_replaced_parameters(engine, rule):
    dtype = np.float16 if rule.master_weights else np.float32

    def clipped(opt):
        for k in range(3):
            params = opt.step(gradients(k, dtype=dtype))
            params["words"] = np.clip(params["words"], -0.5, 0.5)
        opt.params = {name: x * dtype(0.5) if x.ndim else x for name, x in opt.params.items()}
        opt.step(gradients(3, dtype=dtype))
        return contents(opt)

    expected = clipped(ao.Optimizer(parameters(dtype=dtype), rule, engine=engine))

    def rank(comm):
        return differing(expected, clipped(ao.Optimizer(parameters(dtype=dtype), rule, comm=comm, engine=engine)))

    assert ao.ranks.run(3, rank) == [[]] * 3


@each_compiled
def test_groups_that_are_added(engine):
    more = {"more": (50, 1000), "few": (3,)}

    def grown(comm=None):
        opt = ao.Optimizer(parameters(), ao.LAMB(lr=0.01), comm=comm, engine=engine)
        opt.step(gradients(0))
        opt.add_group(parameters(more), lr=0.02)
        for k in (1, 2):
            opt.step(gradients(k) | gradients(k, more))
        return contents(opt)

    expected = grown()
    assert ao.ranks.run(3, lambda comm: differing(expected, grown(comm))) == [[]] * 3

    def wrong(comm):
        opt = ao.Optimizer(parameters(), ao.LAMB(lr=0.01), comm=comm, engine=engine)
        with pytest.raises((ValueError, ao.RankError), match="already a parameter at bias"):
            opt.add_group(parameters(more) if comm.rank else {"bias": np.ones(3)})
        opt.step(gradients(0))
        return len(opt.groups), opt.step_count

    assert ao.ranks.run(2, wrong) == [(1, 1)] * 2


@each_compiled
def test_averages_stats_and_names_of_what_is_not_finite(engine):
    rule = ao.LAMB(lr=0.01, ema_decay=0.9)
    every = [gradients(0), gradients(1, bad=("words", "bias"))]
    options = {"skip_nonfinite": True, "stats": True, "engine": engine}
    one = train(parameters(), rule, every[:1], **options)
    averages, stats = one.averaged(), one.stats.read()
    one.step(every[1])

    def rank(comm):
        opt = train(parameters(), rule, every[:1], comm, **options)
        found = opt.averaged()
        same = all(np.array_equal(found[name], averages[name]) for name in SHAPES), opt.stats.read() == stats
        opt.step(every[1])
        return *same, opt.nonfinite() == one.nonfinite(), opt.stats.skipped, opt.stats.global_norm

    assert ao.ranks.run(3, rank) == [(True, True, True, 1, one.stats.global_norm)] * 3


@each_compiled
def test_one_rank_may_watch(engine):
    """A Monitor on rank 0 has the reports of all tensors."""
    expected = train(parameters(), ao.LAMB(lr=0.01), [gradients(0)], engine=engine, stats=True).stats.read()

    def rank(comm):
        opt = ao.Optimizer(parameters(), ao.LAMB(lr=0.01), comm=comm, engine=engine, stats=comm.rank == 0)
        opt.step(gradients(0))
        return opt.stats.read() if comm.rank == 0 else None

    assert ao.ranks.run(3, rank) == [expected, None, None]


@each_compiled
def test_memory(engine):
    """Slots of element-wise rules are a share of the whole, plus one unit."""
    shapes = {f"x{i}": (70, 999) for i in range(5)} | {"long": (300_000,), "small": (10,)}
    total = sum(int(np.prod(s)) for s in shapes.values())

    def rank(comm):
        opt = ao.Optimizer(parameters(shapes), ao.AdamW(lr=0.1), comm=comm, engine=engine)
        return sum(about["m"].size for about in opt.state.values())

    for ranks in (2, 3, 5, 8):
        held = ao.ranks.run(ranks, rank)
        assert sum(held) == total
        assert max(held) <= 1.05 * total / ranks + 8192


@each_of_torch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_pytorch(engine, dtype):
    def tensors(tree):
        return {name: torch.tensor(np.asarray(x)).to(dtype) for name, x in tree.items()}

    def trained(comm=None):
        params = tensors(parameters())
        opt = ao.Optimizer(params, ao.LAMB(lr=0.01), comm=comm, engine=engine, clip_norm=1.0)
        versions = [x._version for x in params.values()]
        for k in range(2):
            opt.step(tensors(gradients(k)))
        grown = [x._version > old for x, old in zip(params.values(), versions, strict=True) if x.numel()]
        return {name: x.float().numpy().tobytes() for name, x in params.items()}, all(grown)

    expected = trained()
    assert expected[1]
    assert ao.ranks.run(3, trained) == [expected] * 3


JAX = [(how, options) for how in ("reduced", "mean") for options in ({"clip_norm": 0.1}, {})]


@pytest.mark.parametrize(("how", "options"), marked(JAX, lambda how, options: how == "mean" and not options))
def test_arrays_of_jax(how, options):
    def arrays(tree):
        return {name: jnp.asarray(x) for name, x in tree.items()}

    shapes = {"a": (50, 20), "b": (7,), "c": (300,), "d": ()}
    expected = train(arrays(parameters(shapes)), ao.LAMB(lr=0.01), [arrays(gradients(0, shapes))] * 2, **options)

    before = contents(expected)

    def rank(comm):
        there = ao.Ranks(comm, grads=how)
        opt = train(arrays(parameters(shapes)), ao.LAMB(lr=0.01), [arrays(gradients(0, shapes))] * 2, there, **options)
        assert all(map(array_api_compat.is_jax_array, opt.params.values()))
        return differing(before, contents(opt)), kinds(opt)["cut"]

    assert ao.ranks.run(2, rank) == [([], 0)] * 2


@each_compiled
def test_arrays_that_do_not_lie_in_a_row(engine):
    def make(comm=None):
        params = {
            "f": np.asfortranarray(parameters({"f": (200, 300)})["f"]),
            "s": np.ones((60_000, 2), np.float32)[:, 0],
            "r": np.ones((300, 100), np.float32),
        }
        params["r"].flags.writeable = False
        shapes = {name: x.shape for name, x in params.items()}
        opt = train(params, ao.LAMB(lr=0.01), [gradients(k, shapes) for k in range(3)], comm, engine=engine)
        return {name: x.tobytes() for name, x in opt.params.items()}

    expected = make()
    assert ao.ranks.run(3, make) == [expected] * 3


@each_compiled
def test_packed_parameters_are_the_same(engine):
    expected = contents(train(parameters(), ao.LAMB(lr=0.01), [gradients(0)], engine=engine))
    found = ao.ranks.run(
        3,
        lambda comm: differing(
            expected,
            contents(
                train(parameters(), ao.LAMB(lr=0.01), [gradients(0)], ao.Ranks(comm, gather="packed"), engine=engine)
            ),
        ),
    )
    assert found == [[]] * 3


@each_compiled
def test_advance_and_launch(engine):
    expected = contents(train(parameters(), ao.LAMB(lr=0.01), [gradients(0), gradients(1)], engine=engine))

    def rank(comm):
        opt = ao.Optimizer(parameters(), ao.LAMB(lr=0.01), comm=comm, engine=engine)
        for k in range(2):
            opt.advance()
            opt.launch(gradients(k))
        return differing(expected, contents(opt))

    assert ao.ranks.run(2, rank) == [[]] * 2


@each_compiled
def test_copies_and_pickles(engine):
    def rank(comm):
        opt = train(parameters(), ao.LAMB(lr=0.01), [gradients(0)], comm, engine=engine)
        other = copy.deepcopy(opt)
        other.step(gradients(1))
        with pytest.raises(TypeError, match="cannot be pickled; save it"):
            pickle.dumps(opt)
        return opt.step_count, other.step_count, (opt.params["bias"] != other.params["bias"]).any()

    assert ao.ranks.run(2, rank) == [(1, 2, True)] * 2


@pytest.mark.parametrize("how", ["replaced", "written"])
def test_a_copy_compares_its_own_parameters(how):
    def rank(comm):
        opt = train({"b": np.zeros(7)}, ao.SGD(lr=0.1), [], ao.Ranks(comm, check=how == "written"), engine="numpy")
        other = copy.deepcopy(opt)
        if comm.rank == 1 and how == "replaced":
            other.params["b"] = np.ones(7)
        elif comm.rank == 1:
            other.params["b"][...] = 1.0
        with pytest.raises(ValueError, match=r"'b' (was replaced|has other values) on rank 1"):
            other.step({"b": np.ones(7)})
        return float(opt.step({"b": np.ones(7)})["b"][0])

    assert ao.ranks.run(2, rank) == [-0.1] * 2


@each_compiled
def test_explain_says_what_a_rank_has(engine):
    found = ao.ranks.run(2, lambda comm: ao.Optimizer(parameters(), ao.LAMB(), comm=comm, engine=engine).explain())
    assert found[1].startswith("rank 1 of 2; tensors here: ")
    assert "engine none (other ranks have these tensors)" in found[0]


def test_a_call_of_nccl_that_fails_leaves_no_group_open():
    """In an open group later calls do not start, also those of another communicator."""
    from arrayopt.ranks.nccl import NcclComm

    comm, called = object.__new__(NcclComm), []
    stream = SimpleNamespace(ptr=0, is_capturing=lambda: False)
    comm.device, comm.xp = nullcontext(), SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))
    comm._nccl = SimpleNamespace(
        groupStart=lambda: called.append("start"),
        groupEnd=lambda: called.append("end"),
    )

    def fails(stream):
        raise ValueError("invalid argument")

    with pytest.raises(ao.RankError, match="NCCL: invalid argument"):
        comm._call([fails])
    assert called == ["start", "end"]
