"""Gradients that are given one by one over ranks: the step that all of them make together, bit for bit."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arrayopt as ao
from arrayopt.ranks import layout
from tests.support.engines import EVERY, STAND_IN, each_compiled, each_engine
from tests.support.ranks import SHAPES, contents, differing, gradients, parameters
from tests.support.slow import settled

OPTIONS = {
    "nothing": {},
    "clipped": {"clip_norm": 0.5, "stats": True},
    "scaled": {"loss_scale": ao.LossScale(init=1024.0), "clip_norm": 1.0},
    "checked": {"skip_nonfinite": True},
    "accumulated": {"accumulate": 3, "clip_norm": 1.0},
}
RULES = {"LAMB": ao.LAMB(lr=0.01), "AdamW": ao.AdamW(lr=ao.schedules.Cosine(0.01, 10)), "CAME": ao.CAME(lr=0.01)}


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(layout, "ROUND", 1 << 16)
    monkeypatch.setattr(layout, "FOR_EACH", 1 << 12)
    monkeypatch.setattr(layout, "GROUPS", 1.5)  # groups of buckets, also with two ranks


def run(ranks, rule, options, steps, seed, engine, settings, **made):
    """What differs between steps with all gradients at once and one by one, on each rank."""
    rng = np.random.default_rng(seed)
    absent = [[name for name in SHAPES if rng.random() < 0.2] for _ in range(steps)]
    skips = {"skip_nonfinite", "loss_scale"} & options.keys()
    bad = [["square"] if skips and rng.random() < 0.2 else [] for _ in range(steps)]

    def rank(comm):
        order_of = np.random.default_rng([seed, comm.rank])  # each rank has an order of its own
        there = ao.Ranks(comm, **settings)
        one, other = (ao.Optimizer(parameters(), rule, comm=there, engine=engine, **options) for _ in range(2))
        found = []
        for k in range(steps):
            grads = gradients(k, seed=100 + comm.rank, without=absent[k], bad=bad[k], **made)
            one.step({name: None if g is None else g.copy() for name, g in grads.items()})
            names = [name for name in SHAPES if grads[name] is not None]
            order_of.shuffle(names)
            for name in names:
                other.give(name, grads[name])
                grads[name].fill(np.nan)  # its memory is free
            other.step()
            if (k + 1) % options.get("accumulate", 1) == 0:
                found += differing(contents(one), contents(other))
            if options.get("stats") and one.stats.read() != other.stats.read():
                found.append("stats")
        return found

    return ao.ranks.run(ranks, rank)


@each_compiled
@pytest.mark.parametrize("label", OPTIONS)
def test_it_is_the_step_that_all_gradients_make(engine, label):
    for grads, name in (("mean", "LAMB"), ("sum", "AdamW")):
        found = run(3, RULES[name], OPTIONS[label], 6, 7, engine, {"grads": grads})
        assert found == [[]] * 3


@settled(12)
@given(
    st.sampled_from(EVERY),
    st.sampled_from(sorted(RULES)),
    st.sampled_from(sorted(OPTIONS)),
    st.sampled_from(["mean", "sum"]),
    st.integers(2, 5),
    st.integers(0, 2**20),
)
def test_random_programs(engine, name, label, grads, ranks, seed):
    assert run(ranks, RULES[name], OPTIONS[label], 3, seed, engine, {"grads": grads}) == [[]] * ranks


def test_the_fast_reduction():
    found = run(2, RULES["AdamW"], {}, 3, 1, "auto", {"grads": "mean", "reduction": "fast"})
    assert found == [[]] * 2  # of two numbers the order does not matter


def test_sixteen_bits_travel_as_they_are_or_wider_if_the_first_gradient_is():
    import ml_dtypes

    for dtype, mismatch in (("float32", None), (ml_dtypes.bfloat16, "float32")):

        def rank(comm, dtype=dtype, mismatch=mismatch):
            shapes = {"a": (300, 40), "b": (70,)}
            there = ao.Ranks(comm, grads="mean")
            one, other = (
                ao.Optimizer(parameters(shapes, ml_dtypes.bfloat16), ao.AdamW(lr=0.01), comm=there) for _ in range(2)
            )
            for k in range(3):
                grads = gradients(k, shapes, dtype, seed=comm.rank)
                one.step(grads)
                for name, g in grads.items():
                    other.give(name, g)
                other.step()
            if mismatch:
                with pytest.raises(ValueError, match=r"of 'a' must be bfloat16 or narrower, .* got float32"):
                    other.give("a", gradients(0, shapes)["a"])
                with pytest.raises(RuntimeError, match="nothing was changed; give all gradients of the step again"):
                    other.step()
            return differing(contents(one), contents(other))

        assert ao.ranks.run(2, rank) == [[]] * 2


def test_what_goes_wrong_is_said_on_all_ranks_and_changes_nothing():
    def rank(comm):
        opt = ao.Optimizer(parameters(), ao.LAMB(lr=0.01), comm=ao.Ranks(comm, grads="mean", timeout=20))
        opt.step(gradients(0, seed=comm.rank))
        before, said = contents(opt), []
        for wrong in ("shape", "absent", "nothing", "all"):
            grads = gradients(1, seed=comm.rank)
            try:
                for name, g in grads.items():
                    if comm.rank == 1 and wrong == "shape" and name == "bias":
                        with pytest.raises(ValueError, match="bias"):
                            opt.give(name, np.ones(3, np.float32))
                    elif wrong != "nothing" and not (comm.rank == 1 and wrong == "absent" and name == "words"):
                        opt.give(name, g)
                opt.step()
            except (ValueError, RuntimeError, TypeError) as error:
                said.append(f"{type(error).__name__}: {error}")
                assert differing(before, contents(opt)) == []
        assert opt.step_count == 2
        return said

    first, second = ao.ranks.run(2, rank)
    assert [x.partition(":")[0] for x in first] == ["RankError", "ValueError", "TypeError"]
    assert [x.partition(":")[0] for x in second] == ["RuntimeError", "ValueError", "TypeError"]
    assert "rank 1 failed: RuntimeError: Optimizer.step: the gradient of 'bias' was refused" in first[0]
    assert "the list of tensors without a gradient" in first[1]


def test_a_rank_that_ends_in_the_middle_is_an_error_of_the_others():
    errors = []

    def rank(comm):
        opt = ao.Optimizer(parameters(), ao.AdamW(), comm=ao.Ranks(comm, grads="mean", timeout=20))
        before = {name: x.copy() for name, x in opt.params.items()}
        try:
            opt.give("words", gradients(0)["words"])
            if comm.rank == 1:
                raise KeyError("mine")
            for name in ("wide", "heads", "long"):
                opt.give(name, gradients(0)[name])
            opt.step()
        except ao.RankError as error:
            errors.append(error)
        for name, x in opt.params.items():
            np.testing.assert_array_equal(x, before[name])

    with pytest.raises(KeyError, match="mine"):
        ao.ranks.run(3, rank)
    assert len(errors) == 2


def test_a_load_in_the_middle_begins_anew(tmp_path):
    def rank(comm):
        opt = ao.Optimizer(parameters(), ao.AdamW(lr=0.01), comm=ao.Ranks(comm, grads="mean", timeout=20))
        opt.save(tmp_path / "x")
        for name in ("words", "bias")[: comm.rank + 1]:
            opt.give(name, gradients(0)[name])
        with pytest.raises(RuntimeError, match=r"Optimizer.save: an unfinished step has . gradients?"):
            opt.save(tmp_path / "y")
        opt.load(tmp_path / "x")
        opt.step(gradients(1, seed=comm.rank))
        other = ao.Optimizer(parameters(), ao.AdamW(lr=0.01), comm=ao.Ranks(comm, grads="mean"))
        other.step(gradients(1, seed=comm.rank))
        return differing(contents(opt), contents(other))

    assert ao.ranks.run(2, rank) == [[]] * 2


def test_reduced_gradients_are_given_all_at_once():
    def rank(comm):
        opt = ao.Optimizer(parameters(), ao.AdamW(), comm=comm)
        with pytest.raises(ValueError, match="with `grads='reduced'` of Ranks, a step needs all gradients"):
            opt.give("bias", gradients(0)["bias"])

    ao.ranks.run(2, rank)


@pytest.mark.parametrize("reduction_of", ["ordered", "fast"])
def test_two_buckets_exist_at_a_time_if_gradients_come_in_the_same_order(reduction_of):
    """In the first step the order is that of a backward pass; later it is that of the step before."""
    shapes = {str(i): (4096,) for i in range(40)}

    def rank(comm):
        there = ao.Ranks(comm, grads="mean", reduction=reduction_of)
        opt, found = ao.Optimizer(parameters(shapes), ao.SGD(lr=0.1), comm=there), []
        for order in (list(shapes), list(shapes), list(reversed(shapes))):
            most = 0
            for name in order:
                opt.give(name, np.ones(4096, np.float32))
                running = opt._team.gradients.reduction
                most = max(most, len(running._packed) + (running._in_flight is not None))
            opt.step()
            found.append(most)
        return found

    for unexpected, learned, other in ao.ranks.run(2, rank):
        assert learned == 2
        assert min(unexpected, other) > 2


@pytest.mark.parametrize("reduction_of", ["ordered", "fast"])
def test_sums_are_sent_in_groups_that_go_to_many_ranks(reduction_of, monkeypatch):
    """One bucket's sums go to one rank or two, whose links would be busy alone; unsent sums are a quarter at most."""
    monkeypatch.setattr(layout, "GROUPS", 4)
    monkeypatch.setattr(layout, "ROUND", 1 << 14)
    monkeypatch.setattr(layout, "FOR_EACH", 1)
    shapes, ranks = {str(i): (4096,) for i in range(48)}, 12

    def rank(comm):
        there = ao.Ranks(comm, grads="sum", reduction=reduction_of)
        opt, most = ao.Optimizer(parameters(shapes), ao.SGD(lr=1.0), comm=there), 0
        before = {name: x.copy() for name, x in opt.params.items()}
        for name in reversed(shapes):
            opt.give(name, np.full(4096, float(comm.rank), np.float32))
            most = max(most, sum(total.nbytes for _, total in opt._team.gradients.reduction._unsent))
        buckets = opt._team.gradients._buckets.buckets
        opt.step()
        for name, x in opt.params.items():
            np.testing.assert_array_equal(x, before[name] - np.float32(sum(range(ranks))))
        received, groups = set(), []  # by which ranks, of each group
        for bucket in buckets:
            received |= {piece.rank for piece in bucket.pieces}
            if bucket.sends:
                groups.append(received)
                received = set()
        return most, [len(group) for group in groups], received

    every = sum(4 * 4096 for _ in shapes)
    for most, groups, left in ao.ranks.run(ranks, rank):
        assert 0 < most <= every / 4 / ranks
        assert groups == [3, 3, 3, 3]
        assert not left


def test_a_copy_takes_its_own_gradients():
    """Most gradients go a short way, which a copy of an optimizer has of its own."""

    def rank(comm):
        opt = ao.Optimizer(parameters(), ao.LAMB(lr=0.01), comm=ao.Ranks(comm, grads="mean"))
        one = ao.Optimizer(parameters(), ao.LAMB(lr=0.01), comm=ao.Ranks(comm, grads="mean"))
        for k in range(4):
            grads = gradients(k, seed=comm.rank)
            one.step(grads)
            opt = copy.deepcopy(opt) if k == 2 else opt
            for name, g in grads.items():
                opt.give(name, g)
            opt.step()
        remove = opt.before_step(lambda *_: None)
        with pytest.raises(ValueError, match="with hooks before a step"):
            opt.give("bias", grads["bias"])
        remove()
        return differing(contents(one), contents(opt))

    assert ao.ranks.run(2, rank) == [[]] * 2


def test_conjugate_and_negative_views_in_later_steps():
    torch = pytest.importorskip("torch")

    def rank(comm):
        every = []
        for _ in range(2):
            begin = {"a": torch.zeros(4, dtype=torch.complex64), "b": torch.zeros(5)}
            params = {**begin, "c": torch.zeros(5, dtype=torch.bfloat16)}
            every.append(ao.Optimizer(params, ao.SGD(lr=1.0), comm=ao.Ranks(comm, grads="sum")))
        one, other = every
        for k in range(4):
            a, b = (torch.arange(4) + 1j * (comm.rank + 1)).to(torch.complex64), torch.arange(5.0)
            grads = {"a": a, "b": b, "c": b.bfloat16()}
            if k % 2:
                grads = {"a": a.conj(), "b": torch._neg_view(b), "c": torch._neg_view(b.bfloat16())}
            one.step(grads)
            for name, g in grads.items():
                other.give(name, g)
            other.step()
        return [torch.equal(one.params[name], other.params[name]) for name in "abc"], other.params["c"].tolist()

    assert ao.ranks.run(2, rank) == [([True] * 3, [0.0] * 5)] * 2


def test_a_part_of_a_gradient_may_be_overwritten_once_it_was_given():
    def rank(comm):
        part = ao.Part(np.ones((2, 3), np.float32), offset=(2 * comm.rank, 0), shape=(4, 3))
        opt = ao.Optimizer({"w": part}, ao.SGD(lr=0.5), engine=STAND_IN, comm=ao.Ranks(comm, grads="sum"))
        for _ in range(2):
            grad = np.ones((2, 3), np.float32)
            opt.give("w", grad)
            grad[...] = np.nan
            opt.step()
        return part.array.tolist()

    assert ao.ranks.run(2, rank) == [[[0.0] * 3] * 2] * 2


@pytest.mark.parametrize("later", ["step", "step without waiting", "give"])
def test_a_group_that_is_added_after_gradients_were_given(later):
    def train(comm):
        opt = ao.Optimizer(parameters(), ao.AdamW(lr=0.01), engine="numpy", comm=comm and ao.Ranks(comm, grads="sum"))
        share = 1 if comm is None or comm.rank == 0 else 0

        def grads(k, more):
            found = {name: g * share for name, g in gradients(k).items()}
            return {**found, **{name: np.full(shape, share, np.float32) for name, shape in more.items()}}

        def give(given):
            for name, g in given.items():
                opt.give(name, g)
            opt.step()

        give(grads(0, {}))
        opt.add_group({"more": np.ones((90, 70), np.float32), "one": np.ones(1, np.float32)})
        more = {"more": (90, 70), "one": (1,)}
        for k in (1, 2):
            if later == "give":
                give(grads(k, more))
            else:
                opt.step(grads(k, more), wait=later == "step")
        return {name: x.copy() for name, x in opt.params.items()}

    alone = train(None)
    for found in ao.ranks.run(3, train):
        for name, x in alone.items():
            assert np.array_equal(found[name], x), name


EVERY_OPTION = {**OPTIONS, "everything": {"accumulate": 2, "clip_norm": 0.5, "stats": True, **OPTIONS["scaled"]}}


@each_engine
def test_one_rank_makes_the_same_steps_as_many(engine):
    """Whatever needs all gradients at once: the rank keeps copies of them until the end of the step."""
    shapes = {name: SHAPES[name] for name in ("bias", "scalar", "empty", "kernels")}

    def program(label, comm):
        options = {"engine": engine, "skip_nonfinite": label != "nothing", **EVERY_OPTION[label]}
        opt = ao.Optimizer(parameters(shapes), RULES["LAMB"], comm=ao.Ranks(comm, grads="sum"), **options)
        told = []
        for k in range(6):
            grads = gradients(k, shapes, bad=["kernels"] if k in (2, 3) else [], without=["bias"] if k == 1 else [])
            if k == 5:
                with pytest.raises(ValueError, match="bias"):
                    opt.give("bias", np.ones(3, np.float32))
            for name in shapes:
                if grads[name] is not None and (name, k) != ("bias", 5):
                    if comm.rank:
                        grads[name].fill(0)
                    opt.give(name, grads[name])
                    grads[name].fill(np.nan)  # its memory is free
            opt.step(incomplete=k == 5, wait=False)
            stats = str(opt.stats.read()) if "stats" in options else ""
            told.append((stats, opt.loss_scale, opt.step_count))
        return contents(opt), told

    for label in EVERY_OPTION:
        (one, told), *_ = ao.ranks.run(1, lambda comm, label=label: program(label, comm))
        for many in (2, 3) if label == "everything" else (2,):
            for other, also in ao.ranks.run(many, lambda comm, label=label: program(label, comm)):
                assert differing(one, other) == [], label
                assert also == told, label


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loss_scale_of_a_call_divides_given_gradients_or_is_refused(ranks, accumulate):
    """It is not known when gradients are added to the sum of a micro-step."""

    def rank(comm):
        opt = ao.Optimizer({"x": np.ones(2)}, ao.SGD(lr=0.1), comm=ao.Ranks(comm, grads="mean"), accumulate=accumulate)
        opt.give("x", np.full(2, 8.0))
        if accumulate == 1:
            return opt.step(loss_scale=8.0)["x"].tolist()
        with pytest.raises(ValueError, match="`loss_scale` must be an option of the Optimizer"):
            opt.step(loss_scale=8.0)
        return opt.params["x"].tolist()

    assert ao.ranks.run(ranks, rank) == [[0.9] * 2 if accumulate == 1 else [1.0] * 2] * ranks


def test_a_copy_in_the_middle_of_a_step_is_refused():
    """Its gradients would be lost, which other ranks have in part."""

    def rank(comm):
        opt = ao.Optimizer(parameters(), ao.SGD(lr=0.1), comm=ao.Ranks(comm, grads="mean"))
        opt.give("bias", gradients(0)["bias"])
        with pytest.raises(RuntimeError, match=r"Optimizer: a copy: .* unfinished step .*bias"):
            copy.deepcopy(opt)
        opt.step(incomplete=True)
        return differing(contents(opt), contents(copy.deepcopy(opt)))

    assert ao.ranks.run(2, rank) == [[]] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_changes_its_dtype_after_given_steps_is_refused(ranks):
    """Its slots, which have values now, would be made anew without a word."""
    torch = pytest.importorskip("torch")

    def rank(comm):
        p = torch.ones(3)
        opt = ao.Optimizer({"x": p}, ao.AdamW(lr=0.1), comm=ao.Ranks(comm, grads="mean"))
        opt.give("x", torch.ones(3))
        opt.step(wait=False)
        opt.wait()
        p.data = p.double()
        with pytest.raises(ValueError, match=r"'x' must keep shape, dtype, library and device"):
            opt.give("x", p)

    ao.ranks.run(ranks, rank)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_torn_optimizer_takes_no_gradient(ranks, accumulate):
    """One rank, and sums of several, took them without a word; only the end of the step raised an error."""

    def rank(comm):
        opt = ao.Optimizer({"x": np.ones(2)}, ao.SGD(lr=0.1), comm=ao.Ranks(comm, grads="mean"), accumulate=accumulate)
        opt._team.torn = "a step was broken off"
        with pytest.raises(RuntimeError, match=r"Optimizer.give: a step was broken off.* load a checkpoint"):
            opt.give("x", np.ones(2))
        return opt._step.accumulator.begun | opt._step.release.given.keys()

    assert ao.ranks.run(ranks, rank) == [set()] * ranks
