"""Any number of ranks computes what one process does, to the last bit."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arrayopt as ao
from arrayopt.engines.native.cut import NativeCut
from arrayopt.ranks import reduction
from arrayopt.ranks.threads import ThreadComm
from tests.support.engines import COMPILED, SLOW, STAND_IN, each_compiled, each_engine
from tests.support.ranks import OTHER_SLOTS, SHAPES, contents, differing, gradients, kinds, parameters, train
from tests.support.slow import PROFILE, marked, settled

RULES = {
    "LAMB": (ao.LAMB(lr=0.01), {}),
    "LAMB in groups": (ao.LAMB(lr=0.01), {"groups": {"bias": {"weight_decay": 0.0, "adapt": False}}}),
    "LAMB clipped": (ao.LAMB(lr=0.01), {"clip_norm": 1.0, "stats": True}),
    "LAMB scaled": (ao.LAMB(lr=0.01), {"clip_norm": 1.0, "loss_scale": ao.LossScale(init=1024.0)}),
    "LAMB centred": (ao.LAMB(lr=0.01, grad_centralization=True), {}),
    "LANS": (ao.LANS(lr=0.01), {"stats": True}),
    "LARS": (ao.LARS(lr=0.01), {}),
    "AdamW": (ao.AdamW(lr=0.01, ema_decay=0.9), {"accumulate": 2}),
    "AdamW ahead": (ao.AdamW(lr=0.01, lookahead_steps=2, lookahead_alpha=0.5), {}),
    "Adam": (ao.Adam(lr=ao.schedules.Cosine(0.01, 10)), {}),
    "SGD": (ao.SGD(lr=0.01, momentum=0.9), {"skip_nonfinite": True}),
    "CAME": (ao.CAME(lr=0.01), {"clip_norm": 1.0}),
    "Adafactor": (ao.Adafactor(lr=0.01, relative_step=False), {}),
    "Lion": (ao.Lion(lr=0.01), {}),
    "RMSprop": (ao.RMSprop(momentum=0.9, centered=True), {}),
    "NAdam": (ao.NAdam(), {"clip_norm": 1.0}),
    "RAdam": (ao.RAdam(beta2=0.98, threshold=4.1), {}),
    "Adan": (ao.Adan(lr=0.01), {}),
    "Adan cautious": (ao.Adan(lr=0.01, caution=True), {}),
    "AdamW corrected": (ao.AdamW(lr=0.01, mars=0.05, caution=True), {}),
    "AdaBelief": (ao.AdaBelief(lr=0.01, eps_root=1e-8), {}),
    "Sophia": (ao.Sophia(lr=0.01), {"clip_norm": 1.0}),
    "AdEMAMix": (ao.AdEMAMix(beta3_warmup=3), {}),
    "ScheduleFreeAdamW": (ao.ScheduleFreeAdamW(warmup_steps=2), {"accumulate": 2}),
    "AdamH": (ao.AdamH(), {"stats": True}),
    "FISTA": (ao.FISTA(lr=0.01, project=ao.projections.nonnegative), {}),
}
QUICK = {"LAMB clipped", "AdamW"}
RANKS = (2, 3, 7)


def both(rule, ranks, dtype=np.float32, without=("square",), bad=(), **options):
    """What differs between one process and each of some ranks, and what ranks have of the tensors."""
    every = [gradients(k, dtype=dtype, without=without if k == 1 else (), bad=bad if k == 2 else ()) for k in range(4)]
    one = train(parameters(dtype=dtype), rule, every, **options)
    expected, stats = contents(one), one.stats.read() if options.get("stats") else None

    def rank(comm):
        opt = train(parameters(dtype=dtype), rule, every, comm, **options)
        found = differing(expected, contents(opt))
        return found + ([] if stats is None or opt.stats.read() == stats else ["stats"]), kinds(opt)

    results = ao.ranks.run(ranks, rank)
    return [found for found, _ in results], [held for _, held in results]


@pytest.mark.parametrize(
    ("engine", "label"),
    marked(
        [(engine, label) for engine in COMPILED for label in RULES],
        lambda engine, label: label in QUICK and engine not in SLOW,
    ),
)
def test_engines_that_cut_tensors(engine, label):
    rule, options = RULES[label]
    bad = ("words",) if {"loss_scale", "skip_nonfinite"} & options.keys() else ()
    cut = 0
    for ranks in RANKS:
        found, held = both(rule, ranks, bad=bad, engine=engine, **options)
        assert found == [[]] * ranks
        cut += sum(x["cut"] for x in held)
    assert cut, "nothing was cut, so nothing was tested"


@each_compiled
@pytest.mark.parametrize(
    "dtype", marked([("bfloat16",), ("float16",), ("float64",)], lambda dtype: dtype == "bfloat16")
)
def test_other_dtypes(engine, dtype):
    found, _ = both(ao.LAMB(lr=0.01), 3, dtype=np.dtype(getattr(ml_dtypes, dtype, dtype)), engine=engine)
    assert found == [[]] * 3


@pytest.mark.parametrize("engine", ["array_api", "numpy"])
@pytest.mark.parametrize("label", ["LAMB clipped", "CAME"])
def test_engines_that_take_whole_tensors(engine, label):
    rule, options = RULES[label]
    found, held = both(rule, 3, engine=engine, **options)
    assert found == [[]] * 3
    assert not any(x["cut"] for x in held)


@pytest.mark.parametrize("engine", ["array_api", "numpy"])
def test_an_infinite_norm_is_infinite_on_all_ranks(engine):
    """Where nothing is skipped it clips all gradients to nothing, as in one process; one that is NaN clips none."""
    found, _ = both(ao.SGD(lr=0.01), 3, bad=("words",), clip_norm=1.0, engine=engine)
    assert found == [[]] * 3


@each_compiled
@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_number_of_threads_changes_nothing(engine, threads, monkeypatch):
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", threads)
    found, _ = both(ao.LAMB(lr=0.01), 2, engine=engine, clip_norm=1.0)
    assert found == [[]] * 2


@each_compiled
def test_more_ranks_than_tensors(engine):
    every = [{"w": np.full((40, 1000), 0.1 * k, np.float32)} for k in range(3)]
    expected = contents(train({"w": np.ones((40, 1000), np.float32)}, ao.LAMB(lr=0.1), every, engine=engine))

    def rank(comm):
        opt = train({"w": np.ones((40, 1000), np.float32)}, ao.LAMB(lr=0.1), every, comm, engine=engine)
        return differing(expected, contents(opt)), opt.state["w"]["m"].size

    results = ao.ranks.run(9, rank)
    assert [found for found, _ in results] == [[]] * 9
    assert sorted(n for _, n in results) == [0] * 4 + [40_000 % 8192] + [8192] * 4


@each_compiled
def test_norms_of_local_parts_are_noticed(engine, monkeypatch):
    """A control: without the exchange of partial sums the tests above fail."""
    monkeypatch.setattr(NativeCut, "wanted", lambda *args: [])
    found, _ = both(ao.LAMB(lr=0.01), 2, engine=engine)
    assert found != [[]] * 2


def test_sums_in_another_order_are_noticed(monkeypatch):
    """A control: the order in which gradients are added shows."""
    assert local("numpy", 3, "mean") == [[]] * 3
    add_up = reduction.add_up
    monkeypatch.setattr(reduction, "add_up", lambda parts, *rest: add_up(parts[::-1], *rest))
    assert local("numpy", 3, "mean") != [[]] * 3


def local(engine, ranks, how, rule=None, dtype=np.float32, **options):
    """What differs where each rank has gradients of its own."""
    rule = rule or ao.LAMB(lr=0.01)
    own = [[gradients(k, dtype=dtype, seed=10 + r) for k in range(4)] for r in range(ranks)]
    every = []
    for k in range(4):
        total = {name: np.asarray(x, np.float32) for name, x in own[0][k].items()}
        for r in range(1, ranks):
            total = {name: np.asarray(x + np.asarray(own[r][k][name], np.float32)) for name, x in total.items()}
        every.append({n: np.asarray(x / np.float32(ranks if how == "mean" else 1)) for n, x in total.items()})
    expected = contents(train(parameters(dtype=dtype), rule, every, engine=engine, **options))

    def rank(comm):
        there = ao.Ranks(comm, grads=how)
        return differing(
            expected, contents(train(parameters(dtype=dtype), rule, own[comm.rank], there, engine=engine, **options))
        )

    return ao.ranks.run(ranks, rank)


@pytest.mark.parametrize("how", ["mean", "sum"])
@each_engine
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["plain", "clipped"])
def test_gradients_of_each_rank(how, engine, options):
    assert local(engine, 3, how, **options) == [[]] * 3


@each_compiled
def test_narrow_gradients_are_added_in_float32(engine):
    assert local(engine, 3, "mean", dtype=ml_dtypes.bfloat16) == [[]] * 3


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_gradients_that_the_communicator_adds(how):
    """Of all dtypes, complex too, in any order: in the last bits."""
    dtypes = {"a": "float32", "b": "complex64", "c": "float64", "d": "float16", "e": "float32"}
    rng = np.random.default_rng(0)

    def tree():
        made = {name: rng.standard_normal((7, 5)) for name in dtypes}
        made["b"] = made["b"] * (1 + 2j)
        return {name: x.astype(dtypes[name]) for name, x in made.items()}

    params, own = tree(), [tree() for _ in range(3)]
    results = []
    for order in ("ordered", "fast"):

        def rank(comm, order=order):
            there = ao.Ranks(comm, grads=how, reduction=order)
            mine = {name: x.copy() for name, x in params.items()}
            return ao.Optimizer(mine, ao.SGD(lr=0.5), comm=there, engine="numpy").step(own[comm.rank])

        results.append(ao.ranks.run(3, rank))
    for one, other in zip(*results, strict=True):
        for name, x in one.items():
            narrow = 1e-3 if dtypes[name] == "float16" else 1e-6
            np.testing.assert_allclose(other[name], x, rtol=narrow, atol=narrow)
            assert other[name].tobytes() == results[1][0][name].tobytes()


@each_compiled
def test_gradients_of_each_rank_in_micro_steps(engine):
    """Each rank adds its own up; at the end there is one exchange."""
    own = [[gradients(k, seed=10 + r) for k in range(4)] for r in range(2)]
    halves = [[{n: np.float32(0.5) * x for n, x in grads.items()} for grads in mine] for mine in own]
    every = []
    for k in (0, 2):
        sums = [{n: mine[k][n] + mine[k + 1][n] for n in SHAPES} for mine in halves]
        every.append({n: np.asarray((sums[0][n] + sums[1][n]) / np.float32(2)) for n in SHAPES})
    expected = contents(train(parameters(), ao.LAMB(lr=0.01), every, engine=engine))

    def rank(comm):
        there = ao.Ranks(comm, grads="mean")
        opt = train(parameters(), ao.LAMB(lr=0.01), own[comm.rank], there, engine=engine, accumulate=2)
        found = differing(expected, contents(opt))
        opt.step(own[comm.rank][0])
        with pytest.raises(RuntimeError, match="accumulated other gradients"):
            opt.state_dict()
        return found

    assert [set(map(str, found)) for found in ao.ranks.run(2, rank)] == [{"extra"}] * 2


SEVERAL = [
    ao.LAMB(lr=0.01),
    ao.LAMB(lr=0.01, grad_centralization=True),
    ao.LANS(lr=0.01),
    ao.LARS(lr=0.1),
    ao.AdamW(lr=0.01),
    ao.SGD(lr=0.1, momentum=0.9),
    ao.CAME(lr=0.01),
]
WHOLE = list(OTHER_SLOTS.values())


@st.composite
def problems(draw):
    several = SEVERAL[:1] if PROFILE == "quick" else SEVERAL  # each has to be compiled
    rule, engine = draw(st.sampled_from([(x, STAND_IN) for x in several] + [(x, "auto") for x in WHOLE]))
    engine = "numpy" if isinstance(rule, ao.SOAP) else engine
    extents = st.integers(0, 40) | st.sampled_from([64, 128, 1000, 8192])
    shapes = draw(st.lists(st.lists(extents, max_size=3).filter(lambda s: np.prod(s) < 3e5), min_size=1, max_size=6))
    named = {f"x{i}": tuple(shape) for i, shape in enumerate(shapes)}
    absent = draw(st.lists(st.sets(st.sampled_from(sorted(named))), min_size=1, max_size=4))
    options = draw(
        st.fixed_dictionaries(
            {"engine": st.just(engine)},
            optional={"clip_norm": st.just(0.5), "skip_nonfinite": st.just(True), "stats": st.just(True)},
        )
    )
    return rule, named, absent, options, draw(st.integers(2, 6))


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")  # of a rule that looks at shapes
@settled(9)
@given(problems())
def test_random_problems(problem):
    rule, shapes, absent, options, ranks = problem
    every = [gradients(k, shapes, without=without) for k, without in enumerate(absent)]
    expected = contents(train(parameters(shapes), rule, every, **options))

    def rank(comm):
        return differing(expected, contents(train(parameters(shapes), rule, every, comm, **options)))

    assert ao.ranks.run(ranks, rank) == [[]] * ranks


@each_compiled
@pytest.mark.parametrize(
    ("rule", "options", "sums"),
    [
        (ao.AdamW(lr=0.01), {}, 0),
        (ao.LAMB(lr=0.01), {}, 1),
        (ao.LANS(lr=0.01), {}, 2),
        (ao.CAME(lr=0.01), {}, 3),
        (ao.AdamW(lr=0.01), {"clip_norm": 1.0}, 2),  # partial norms, and the norms of all tensors
        (ao.Prodigy(growth_rate=1.1), {}, 2),  # partial sums, and four totals in one
    ],
)
def test_messages_are_counted(engine, rule, options, sums, monkeypatch):
    """A step has a vote, the exchanges of sums, and a broadcast of each bucket: of a large part, or of small ones."""
    calls = []
    for name in ("allgather", "start_broadcast", "start_alltoall"):
        real = getattr(ThreadComm, name)

        def counted(self, *args, name=name, real=real):
            calls.append((self.rank, name))
            return real(self, *args)

        monkeypatch.setattr(ThreadComm, name, counted)

    shapes = {"matrix": (4096, 256), "bias": (256,)}

    def rank(comm):
        opt = ao.Optimizer(parameters(shapes), rule, comm=comm, engine=engine, **options)
        opt.step(gradients(0, shapes))
        before = calls.count((comm.rank, "allgather")), calls.count((comm.rank, "start_broadcast"))
        opt.step(gradients(1, shapes))
        after = calls.count((comm.rank, "allgather")), calls.count((comm.rank, "start_broadcast"))
        return after[0] - before[0], after[1] - before[1]

    assert ao.ranks.run(3, rank) == [(1 + sums, 4)] * 3
    assert not [call for call in calls if call[1] == "start_alltoall"]
