"""Random programs in which a rank fails at any call: all make a step or none does, with the bits of one process."""

import contextlib
import sys
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arrayopt as ao
from arrayopt import interrupts
from arrayopt.ranks import gather, layout, mpi
from arrayopt.step import guard
from tests.support.engines import EVERY, SLOW
from tests.support.entered import Fault, Raising
from tests.support.ranks import contents, differing, gradients, parameters
from tests.support.slow import PROFILE, settled

SHAPES = {"words": (300, 64), "bias": (64,), "scalar": (), "empty": (0, 7), "square": (128, 128), "long": (10_001,)}
RULES = {"LAMB": ao.LAMB(lr=0.01), "CAME": ao.CAME(lr=0.01), "AdamW": ao.AdamW(lr=ao.schedules.Cosine(0.01, 10))}
OPTIONS = [{}, {"clip_norm": 0.5}, {"loss_scale": ao.LossScale(init=8.0)}, {"accumulate": 2}, {"accumulate": 3}]


BETWEEN = {"step", "_end_taken", "_made", "after", "collect", "answered", "warned"}


class Inside(threading.local):
    """Whether a rank, here a thread, is where no signal raises; in threads `uninterrupted` does nothing."""

    depth = 0

    def __bool__(self):
        return self.depth > 0

    def move(self, by):
        """Enter or leave a section."""
        self.depth += by


class Heard(Raising):
    """Raises at a call, but not between the parts of a step that tell others of errors: these would wait for long."""

    def __call__(self, frame, event, arg):
        codes = [x.f_code for x in (frame, frame.f_back) if x is not None]
        if not {code.co_name for code in codes} & BETWEEN and guard.__file__ not in {x.co_filename for x in codes}:
            super().__call__(frame, event, arg)


@dataclass
class Program:
    """What ranks do together, and what came of it.

    Attributes
    ----------
    ways : list of str
        Of each step what a failure led to.
    """

    rule: ao.Rule
    options: dict
    engine: str
    ranks: int
    seed: int
    folder: object
    steps: int = 4
    ways: list = field(default_factory=list)

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        self.buckets = int(rng.choice([1 << 12, 1 << 14, 1 << 16]))
        self.absent = [[x for x in SHAPES if x != "bias" and rng.random() < 0.2] for _ in range(self.steps)]
        self.grads_mean = str(rng.choice(["mean", "sum"]))
        self.waits = (rng.random(self.steps) < 0.5).tolist()
        # of each step the rank that fails, its operation (the last one is `step`), and the call in it
        self.fails = [
            (int(rng.integers(self.ranks)), int(rng.integers(len(SHAPES) + 1)), int(10 ** rng.uniform(0, 2.7)))
            for _ in range(self.steps)
        ]
        self.meeting, self.said = threading.Barrier(self.ranks, timeout=60), [None] * self.ranks

    def grads(self, k, rank):
        """The gradients of a step."""
        return gradients(k, SHAPES, seed=rank, without=self.absent[k])

    def optimizer(self, comm):
        """An optimizer of a rank."""
        there = ao.Ranks(comm, grads=self.grads_mean, timeout=60)
        return ao.Optimizer(parameters(SHAPES), self.rule, comm=there, engine=self.engine, **self.options)

    def undisturbed(self, comm):
        """The contents after all steps, with all gradients at once."""
        opt = self.optimizer(comm)
        for k in range(self.steps):
            opt.step(self.grads(k, comm.rank))
        return contents(opt) if opt._step.accumulator.done == 0 else None

    def tell(self, rank, what):
        """What all ranks say."""
        self.said[rank] = what
        self.meeting.wait()
        found = list(self.said)
        self.meeting.wait()
        return found

    def step(self, opt, k, rank, fails=(None, None, None)):
        """One step, in which a rank may fail; what is already taken is not given again."""
        names = [name for name in SHAPES if name not in self.absent[k]]
        np.random.default_rng([self.seed, k, rank]).shuffle(names)
        of, at, call = fails
        every = self.grads(k, rank)
        calls = []
        for name in names:
            if name not in opt._step.release.given:
                calls.append((opt.give, (name, every[name]), {}))
        calls.append((opt.step, (), {"wait": self.waits[k]}))
        for i, (act, given_now, how) in enumerate(calls):
            hit = of == rank and i == min(at, len(calls) - 1)
            with Heard(call) if hit else contextlib.nullcontext(), contextlib.suppress(Fault):
                act(*given_now, **how)

    def disturbed(self, comm):
        """The same contents, given one by one, with failures and what mends them."""
        opt, rank, saved = self.optimizer(comm), comm.rank, 0
        for k in range(self.steps):
            if opt._step.accumulator.done == 0:
                saved = k
                opt.save(self.folder / f"{self.seed}")
            before, way = (opt.step_count, opt._step.accumulator.done), "made"
            try:
                self.step(opt, k, rank, self.fails[k])
                opt.wait()
            except (ao.RankError, ValueError, RuntimeError) as error:
                way = type(error).__name__
            now = opt.step_count, opt._step.accumulator.done
            torn, moved = zip(*self.tell(rank, (opt._team.torn is not None, now != before)), strict=True)
            if any(torn):
                opt.load(self.folder / f"{self.seed}")
                for again in range(saved, k + 1):
                    self.step(opt, again, rank)
            else:
                assert len(set(moved)) == 1, (k, moved)
                if not moved[0]:
                    self.step(opt, k, rank)
            self.ways.append(f"{way}, {'torn' if any(torn) else 'whole'}")
        return contents(opt) if opt._step.accumulator.done == 0 else None

    def __call__(self):
        """What differs, on each rank."""
        one, inside = ao.ranks.run(self.ranks, self.undisturbed), Inside()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interrupts, "_inside", inside)
            patch.setattr(interrupts.uninterrupted, "__enter__", lambda _: inside.move(1))
            patch.setattr(interrupts.uninterrupted, "__exit__", lambda *_: inside.move(-1))
            for home, name, size in (
                (layout, "ROUND", self.buckets),
                (layout, "FOR_EACH", self.buckets >> 4),
                (layout, "GROUPS", 1.5),
                (gather, "ROUND", self.buckets),
                (gather, "LARGE", self.buckets >> 2),
            ):
                patch.setattr(home, name, size)
            many = ao.ranks.run(self.ranks, self.disturbed)
        return [[] if a is None else differing(a, b) for a, b in zip(one, many, strict=True)]


@settled(12)
@given(
    name=st.sampled_from(sorted(RULES)),
    options=st.sampled_from(OPTIONS),
    engine=st.sampled_from([e for e in EVERY if e not in SLOW or PROFILE != "quick"]),
    ranks=st.integers(2, 4),
    seed=st.integers(0, 2**20),
)
def test_a_step_is_made_by_all_or_by_none(name, options, engine, ranks, seed, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    options = dict(options)
    program = Program(RULES[name], options, engine, ranks, seed, folder, 2 * options.get("accumulate", 2))
    assert program() == [[]] * ranks


def test_what_a_micro_step_has_taken_is_not_added_twice():
    """After an error of `step`, all gradients were given again, and were in the sums already."""

    def rank(comm):
        there = ao.Ranks(comm, grads="mean", timeout=20)
        opt = ao.Optimizer({"a": np.zeros(3), "b": np.zeros(3)}, ao.SGD(lr=1.0), comm=there, accumulate=2)
        opt.give("a", np.ones(3))
        if comm.rank:
            with pytest.raises(ValueError, match="shape"):
                opt.give("b", np.ones(4))
        else:
            opt.give("b", np.ones(3))
        with pytest.raises(RuntimeError, match=r"was refused .* and this step has 1 gradient so far; give it again"):
            opt.step()
        with pytest.raises(ValueError, match="'a' was already given in this step"):
            opt.give("a", np.ones(3))
        if comm.rank:
            opt.give("b", np.ones(3))
        opt.step()
        for name in "ab":
            opt.give(name, np.ones(3))
        return {name: x.tolist() for name, x in opt.step().items()}

    assert ao.ranks.run(2, rank) == [{"a": [-1.0] * 3, "b": [-1.0] * 3}] * 2


@pytest.mark.parametrize("call", [0, 1])
def test_ranks_agree_anew_after_a_load(call, tmp_path):
    """One had not heard on which dtypes, or which order of gradients, they had agreed: it sent other buckets."""

    def rank(comm):
        there = ao.Ranks(comm, grads="mean", timeout=20)
        one, other = (ao.Optimizer(parameters(SHAPES), ao.AdamW(lr=0.01), comm=there) for _ in range(2))
        one.save(tmp_path / "x")
        told, heard = [], one._team._comm.tell

        def tell(said):
            told.append(heard(said))
            if comm.rank and len(told) > call:
                raise KeyError("mine")
            return told[-1]

        one._team._comm.tell = tell
        names = ["bias", "long", "words", "square", "scalar", "empty"]
        with contextlib.suppress(KeyError, ao.RankError):
            for name in names:
                one.give(name, gradients(0, SHAPES, seed=comm.rank)[name])
            one.step()
        del one._team._comm.tell
        assert one._team.torn
        one.load(tmp_path / "x")
        for k in range(3):
            for name in names:
                one.give(name, gradients(k, SHAPES, seed=comm.rank)[name])
            one.step()
            other.step(gradients(k, SHAPES, seed=comm.rank))
        return differing(contents(one), contents(other))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "ROUND", 1 << 12)
        patch.setattr(layout, "FOR_EACH", 1 << 8)
        patch.setattr(layout, "GROUPS", 1.5)
        assert ao.ranks.run(2, rank) == [[]] * 2


class FakeMPI:
    """Communicators of MPI with one rank, whose requests are complete when they have been looked at three times."""

    BYTE, IN_PLACE, COMM_NULL, Exception = "BYTE", "IN_PLACE", None, OSError

    def __init__(self):
        self.looks, self.started = {}, []
        self.Request = self

    def start(self, *_):
        """Start a request."""
        self.started.append(object())
        self.looks[self.started[-1]] = 3
        return self.started[-1]

    Ialltoallv = Iallgatherv = Ireduce_scatter = Ibcast = start

    def Testall(self, requests):
        """Look at requests."""
        self.looks |= {request: self.looks[request] - 1 for request in requests}
        return all(self.looks[request] <= 0 for request in requests)

    def Status(self):
        """What tells of a message."""

    def Iprobe(self, **_):
        """Whether there is a message: nobody sends any."""
        return False

    def Get_rank(self):
        """Return the only rank."""
        return 0

    def Get_size(self):
        """Return their number."""
        return 1


@pytest.mark.parametrize("call", ["start_alltoall", "allgather", "start_add", "start_rows"])
def test_a_request_that_is_interrupted_is_kept(call, monkeypatch):
    """MPI writes into its memory, which had been freed: the process ended with a corrupted heap."""
    x = np.ones(4, np.uint8)
    given_now = {"start_alltoall": (x, [4], x.copy(), [4]), "allgather": (x, [4]), "start_add": (x, [4])}
    given_now["start_rows"] = ([(0, x)],)
    for at in range(100):
        fake = FakeMPI()
        duplicate = mpi._Duplicate(comm=fake)
        monkeypatch.setattr(FakeMPI, "Get_attr", lambda *_, duplicate=duplicate: duplicate, raising=False)
        monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=fake))
        monkeypatch.setattr(mpi, "_key", lambda: 0)
        comm, done = mpi.MPIComm(fake, 20.0), False
        with Raising(at), contextlib.suppress(Fault):
            getattr(comm, call)(*given_now[call])()
            done = True
        kept = [request for requests, _ in duplicate.running.values() for request in requests]
        assert all(request in kept or fake.looks[request] <= 0 for request in fake.started), at
        if done:
            assert kept == []
            assert at > 5
            return
    raise AssertionError("it never ended")


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_rank_that_is_interrupted_before_the_vote_votes(one_by_one):
    """The others need not wait for the time limit, and nothing has changed anywhere."""

    def step(opt):
        grads = {"a": np.ones(3)}
        if one_by_one:
            opt.give("a", grads["a"])
        return opt.step(*[] if one_by_one else [grads])

    def rank(comm):
        opt = ao.Optimizer({"a": np.zeros(3)}, ao.SGD(lr=1.0), comm=ao.Ranks(comm, grads="mean", timeout=20))
        make = opt._step.make

        def interrupted(*given, **options):
            opt._step.make = make
            raise KeyboardInterrupt("by the user")

        if comm.rank == 1:
            opt._step.make = interrupted
        text = (
            "by the user" if comm.rank == 1 else "nothing was changed, .*rank 1 failed: KeyboardInterrupt: by the user"
        )
        with pytest.raises(KeyboardInterrupt if comm.rank == 1 else ao.RankError, match=text):
            step(opt)
        return step(opt)["a"].tolist()

    assert ao.ranks.run(2, rank) == [[-1.0] * 3] * 2
