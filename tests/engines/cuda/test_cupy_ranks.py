"""The CuPy engine over ranks: large tensors are cut, and all ranks compute what one process does, bit for bit."""

import contextlib
import importlib
from types import SimpleNamespace

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines import registry as engines
from arrayopt.engines.cuda import pieces
from tests.cudacpu import standin
from tests.engines.cuda.test_cupy import needs_two_devices, trees
from tests.support import parts as cut
from tests.support.ranks import gradients, left_by, parameters
from tests.support.slow import marked

SHAPES = {"w": (256, 128), "b": (130,), "k": (70, 20), "s": (), "e": (0, 3), "l": (20000,)}


def trained(cupy, rule, comm=None, bad=False, **options):
    """An optimizer over CuPy's arrays after some steps: one gradient is absent in one, infinite in another."""
    params = {name: cupy.asarray(x) for name, x in trees(SHAPES, "float32", 0).items()}
    opt = ao.Optimizer(params, rule, comm=comm, **options)
    for k in range(3):
        grads = trees(SHAPES, "float32", 1 + k)
        grads["w"][200, 7] = np.inf if bad and k == 2 else 0.5
        grads = {name: cupy.asarray(g) for name, g in grads.items()}
        if k == 1:
            grads["b"] = None
        opt.step(grads)
    return opt


def held(opt):
    """All numbers of an optimizer; ranks call it together."""
    saved = opt.state_dict()
    found = {name: x.get().tobytes() for name, x in opt.params.items()}
    for name, about in saved["tensors"].items():
        found |= {(name, slot): ao.arrays.to_host(x).tobytes() for slot, x in about["slots"].items()}
        found[name, "t"] = about["t"], about.get("skipped")
    return found | {"step": saved["step"], "extra": saved["extra"]}


def shaken(xp, p, h):
    """The parameters, and random numbers."""
    return p + h.lr * (ao.random(h) - 0.5)


RULES = {
    "LAMB": (ao.LAMB(lr=0.01), {"clip_norm": 0.5, "stats": True}),
    "LANS": (ao.LANS(lr=0.01), {}),
    "AdamW": (ao.AdamW(lr=0.01), {"loss_scale": 8.0, "bad": True}),
    "LAMB, scaled": (ao.LAMB(lr=0.01), {"loss_scale": ao.LossScale(), "bad": True}),
    "LAMB, a layer skipped": (ao.LAMB(), {"groups": {"w": {"stacked": True}}, "skip_nonfinite": True, "bad": True}),
    "LAMB, blocks": (ao.LAMB(), {"groups": {"w": {"blocks": 2}}, "stats": True}),
    "CAME": (ao.CAME(lr=0.01), {}),
    "Adafactor": (ao.Adafactor(), {"clip_norm": 0.5}),
    "Muon": (ao.AdamW(lr=0.01), {"groups": {x: ao.Muon(lr=0.02) for x in "wk"}}),  # whole matrices
    "random numbers": (ao.AdamW(lr=0.01, project=shaken), {}),
    "random numbers, rows": (ao.CAME(lr=0.01, project=shaken), {}),
    "random numbers, matrices": (
        ao.AdamW(lr=0.01),
        {"groups": {x: ao.Muon(lr=0.02, project=shaken) for x in "wk"}},
    ),
}
QUICK = (("LAMB", 2), ("AdamW", 3))


@pytest.mark.parametrize(("label", "ranks"), marked([(x, n) for x in RULES for n in (2, 3)], lambda *x: x in QUICK))
def test_ranks_compute_what_one_process_does(cupy, label, ranks, tmp_path):
    pytest.importorskip("safetensors")
    rule, options = RULES[label]
    one = trained(cupy, rule, **options)
    one.save(tmp_path / "one")
    expected, stats = held(one), one.stats.read() if options.get("stats") else None

    def rank(comm):
        opt = trained(cupy, rule, comm, **options)
        opt.save(tmp_path / "many")
        kinds = {x.name: x.kind for x in opt._parameters.all}
        found = [key for key, x in held(opt).items() if x != expected[key]]
        return found, kinds, opt.stats.read() if stats is not None else None

    results = ao.ranks.run(ranks, rank)
    assert [found for found, *_ in results] == [[]] * ranks
    whole = label in ("Muon", "random numbers, matrices", "LAMB, a layer skipped", "LAMB, blocks")
    cut = {name for _, kinds, *_ in results for name, kind in kinds.items() if kind == "cut"}
    assert ("w" in cut) != whole
    assert all(other == stats for *_, other in results)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()


def test_ranks_share_what_is_taken_in_longer_pieces_by_one(cupy, monkeypatch):
    """As in a large model, where nothing is summed."""
    monkeypatch.setattr(pieces, "MANY", 0)
    one = held(trained(cupy, ao.AdamW(lr=0.01)))

    def rank(comm):
        opt = trained(cupy, ao.AdamW(lr=0.01), comm)
        assert any(x.kind == "cut" for x in opt._parameters.all)
        return held(opt) == one

    assert all(ao.ranks.run(3, rank))


def test_scratch_memory_of_slices_lies_within_what_there_is(cupy):
    """Kernels count elements from the beginning of a whole tensor. Slices begin at words, and are apart."""
    from arrayopt.engines.cuda.cut import DeviceCut

    made = object.__new__(DeviceCut)
    made.shares = [SimpleNamespace(first=x, last=y) for x, y in ((4096, 9001), (0, 4096), (8192, 8192), (40960, 40967))]
    made.windows, made.plan = {}, SimpleNamespace(spilled={"spill": None})
    starts, size = made.scratch_starts()["spill"]
    end = 0
    for start, share in zip(starts.tolist(), made.shares, strict=True):
        assert start + share.first >= end
        assert (start + share.first) % 8 == 0
        end = start + share.last
    assert size >= end


PARTS = {
    "LAMB": (ao.LAMB(lr=0.01), {"clip_norm": 0.5, "stats": True}),
    "LANS": (ao.LANS(lr=0.01), {"loss_scale": ao.LossScale()}),
    "LARS": (ao.LARS(lr=0.1), {"loss_scale": 8.0}),
    "AdamW": (ao.AdamW(lr=0.01, ema_decay=0.9), {"clip_norm": 0.5}),
    "AdamW in micro-steps": (ao.AdamW(lr=0.01), {"accumulate": 2}),
    "CAME": (ao.CAME(lr=0.01), {"clip_norm": 0.5, "stats": True, "loss_scale": 8.0}),
    "Adafactor": (ao.Adafactor(), {}),
    "LAMB, centralized": (ao.LAMB(lr=0.01, grad_centralization=True), {}),
    "CAME, random numbers": (ao.CAME(lr=0.01, project=shaken), {}),
}


@pytest.mark.parametrize(
    ("label", "ranks"),
    marked([(x, n) for x in PARTS for n in (2, 4)], lambda label, ranks: (label, ranks) == ("LAMB", 2)),
)
def test_norms_of_parts_are_those_of_whole_tensors(cupy, label, ranks, tmp_path):
    pytest.importorskip("safetensors")
    rule, options = PARTS[label]
    one = ao.Optimizer({n: np.asarray(x) for n, x in parameters(cut.SHAPES).items()}, rule, engine="numpy", **options)
    for k in range(4):
        one.step(gradients(k, cut.SHAPES))

    def rank(comm):
        mine = cut.parts(comm.rank, ranks, cupy.asarray)
        opt = ao.Optimizer(mine, rule, comm=comm, **options)
        assert "engine cupy" in opt.explain()
        for k in range(4):
            given = {n: cut.taken(n, g, comm.rank, ranks) for n, g in gradients(k, cut.SHAPES).items()}
            opt.step({n: cupy.asarray(g) for n, g in given.items()})
        opt.save(tmp_path / "parts")
        return {n: x.array.get() for n, x in mine.items()}, opt.stats.read() if options.get("stats") else None

    results = ao.ranks.run(ranks, rank)
    for r, (mine, stats) in enumerate(results):
        for name, x in mine.items():
            whole = cut.taken(name, one.params[name], r, ranks)
            np.testing.assert_allclose(x, whole, rtol=2e-6, atol=2e-6)
        for name, report in one.stats.read().items() if stats is not None else ():
            assert stats[name] == pytest.approx(report, rel=1e-5)
    loaded = ao.Optimizer(parameters(cut.SHAPES), rule, engine="numpy", **options)  # one process reads the file
    loaded.load(tmp_path / "parts")
    for name, x in results[-1][0].items():
        assert cut.taken(name, loaded.params[name], ranks - 1, ranks).tobytes() == x.tobytes()


def test_norms_have_one_order_on_all_ranks(cupy):
    """However many tensors each rank has whole, cut, or not at all, and whichever take part."""
    needs_two_devices(cupy)
    shapes = {"x": (5000,), "y": (5000,), "w": (2000,), "c": (18000,)}

    def rank(comm):
        with cupy.cuda.Device(1):  # which need not be the current one in a step
            params, grads = ({n: cupy.ones(s, "f4") for n, s in shapes.items()} for _ in range(2))
            grads["w"][3] = grads["y"][0] = np.nan
        opt = ao.Optimizer(params, ao.SGD(lr=0.1), comm=comm, clip_norm=1.0)
        opt.step(grads)
        found = opt.nonfinite()
        opt.step(grads | {"x": None, "w": None})
        return found, opt.nonfinite()

    with standin.checking(check=False):
        assert ao.ranks.run(3, rank) == [(["y", "w"], ["y"])] * 3


def test_ranks_exchange_more_norms_than_a_block_has_threads(cupy):
    def rank(comm):
        params, grads = ([cupy.ones(1, "f4") for _ in range(260)] for _ in range(2))
        grads[-1][0] = np.nan
        opt = ao.Optimizer(params, ao.SGD(lr=0.1), comm=ao.Ranks(comm, check=None), clip_norm=1.0)
        opt.step(grads)
        return opt.nonfinite()

    with standin.checking(check=False):
        assert ao.ranks.run(2, rank) == [["259"]] * 2


def test_norms_have_one_order_whoever_has_which_tensor(cupy):
    shapes, owners = {"x": (5000,), "y": (300,), "w": (2000,)}, {"x": 2, "y": 0, "w": 0}

    def rank(comm):
        sizes = {n: x if owners[n] == comm.rank else (0,) for n, x in shapes.items()}
        params = {n: ao.Part(cupy.ones(sizes[n], "f4"), (0,), x) for n, x in shapes.items()}
        opt = ao.Optimizer(params, ao.SGD(lr=0.1), comm=comm, clip_norm=1.0)
        grads = {n: cupy.ones(x, "f4") for n, x in sizes.items()}
        grads["w"][:3] = np.nan
        opt.step(grads)
        return opt.nonfinite()

    with standin.checking(check=False):
        assert ao.ranks.run(3, rank) == [["w"]] * 3


def test_who_is_let_go_is_free_at_once(cupy):
    assert left_by(lambda: ao.ranks.run(2, lambda comm: trained(cupy, ao.LAMB(lr=0.01), comm))) == set()


def test_random_numbers_of_parts_are_those_of_the_whole(cupy):
    def step(rule, comm=None, first=0, rows=300):
        w = cupy.ones((rows, 100), "f4")
        part = w if comm is None else ao.Part(w, (first, 0), (300, 100))
        opt = ao.Optimizer({"w": part}, rule, comm=comm, engine="cupy")
        opt.step({"w": cupy.ones((rows, 100), "f4")})
        return w.get()

    rule = ao.SGD(lr=0.1, project=shaken)
    found = ao.ranks.run(2, lambda comm: step(rule, comm, 170 * comm.rank, (170, 130)[comm.rank]))
    assert np.concatenate(found).tobytes() == step(rule).tobytes()


@pytest.mark.parametrize("kind", ["strided", "matrices", "pytorch"])
def test_a_step_whose_messages_go_through_the_host_is_not_captured(cupy, monkeypatch, kind):
    """Though the communicator takes arrays on devices, as NCCL does: a copy would end the capture amid the commit."""
    needs_two_devices(cupy)
    told = contextlib.nullcontext
    if kind == "pytorch":
        pytest.importorskip("torch")
        there = importlib.import_module("tests.support.there")
        monkeypatch.setitem(engines.FUSED, "torch", ("cupy",))
        streams, told = there.Streams(cupy).installed(monkeypatch), there.Factories

    def arrays(rank):
        x = np.ones((6, 4), "f4")
        if kind == "pytorch":
            return {"w": there.copied(x, rank)}
        return {"w": ao.Part(cupy.asarray(x), (6 * rank, 0), (12, 4)) if kind == "matrices" else cupy.asarray(x).T}

    def rank(comm):
        with cupy.cuda.Device(comm.rank if kind == "pytorch" else 1) as device:
            stream = streams.now[comm.rank].it if kind == "pytorch" else cupy.cuda.Stream(non_blocking=True)
        with device, stream, told():
            rule = ao.Muon(lr=0.1, ns_steps=1) if kind == "matrices" else ao.SGD(lr=0.1)
            opt, grads = ao.Optimizer(arrays(comm.rank), rule, comm=comm), arrays(comm.rank)
            opt.step(grads)
            opt.advance()
            monkeypatch.setattr(opt._team._comm, "on_device", True)
            stream.begin_capture()
            message = "captured only over NCCL, with contiguous CuPy arrays"
            with cupy.cuda.Device(0), pytest.raises(RuntimeError, match=message):
                opt.launch(grads)
            stream.end_capture()
            monkeypatch.setattr(opt._team._comm, "on_device", False)
            opt.step(grads)

    ao.ranks.run(2, rank)
