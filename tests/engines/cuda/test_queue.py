"""The order of tickets: each piece occurs once, after all pieces for which it waits, so no grid can deadlock."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import arrayopt as ao
from arrayopt.engines.cuda.pieces import pieces, tiles
from arrayopt.engines.cuda.queue import Queue, tickets
from arrayopt.fusion.layout import geometry
from arrayopt.fusion.lower_stages import in_stages
from arrayopt.fusion.plans import plan_for
from tests.support.slow import settled

TOGETHER = st.lists(st.integers(1, 5), max_size=4)
"""The numbers of pieces of a ticket, by pass."""

SIZES = st.lists(st.sampled_from([1, 7, 4096, 4097, 9000, 70_000]), min_size=1, max_size=6)
FEW, MANY = st.sampled_from([1, 3, 20]), st.sampled_from([1, 3, 40, 130])
MATRICES = st.lists(st.tuples(FEW, FEW, MANY, MANY), min_size=1, max_size=4)
some = settled(25)


def check(rule, shapes, lag, chosen, *, separate=False, together=()):
    plan = plan_for(rule, len(shapes[0]), "float32", shape=shapes[0], lean=True)
    geo = geometry(shapes, plan.element)
    tiles(geo, plan.element)
    made = in_stages(plan).stages
    counts = pieces(made, geo)
    rows = np.flatnonzero([i in chosen for i in range(len(shapes))])
    spans = np.ones(len(made), int)
    at = [i for i, stage in enumerate(made) if stage.function.shared == "tiles"]
    spans[at[: len(together)]] = together[: len(at)]
    queue, ends = tickets(made, counts, rows, lag, separate=separate, spans=spans)
    assert ends == sorted(ends)
    assert ends[-1] == len(queue)
    assert len(ends) == (1 if lag is not None else len(plan.passes) + separate)
    depth = np.cumsum([0, *(stage.kind in ("pass", "product") for stage in made)])
    launch = np.searchsorted(ends, np.arange(len(queue)), "right")
    kinds, done = [stage.kind for stage in made], np.zeros(len(shapes), int)
    seen, made_of, stops = set(), 0 * counts, [[] for _ in shapes]
    for ticket, part in zip(queue.tolist(), launch.tolist(), strict=True):
        tensor, piece, first, stop, wait, count = ticket
        assert done[tensor] >= wait == sum(other <= first for other in stops[tensor])
        assert (made_of[tensor, :first] == counts[tensor, :first]).all()
        assert not separate or set(depth[first:stop]) == {part}
        assert stop == first + 1 or (counts[tensor, first:stop] == 1).all()
        for stage in range(first, stop):
            assert 1 <= count <= spans[stage]
            assert piece + count <= counts[tensor, stage]
            seen |= {(tensor, stage, piece + i) for i in range(count)}
            made_of[tensor, stage] += count
        done[tensor] += 1
        stops[tensor].append(stop)
        if all(kind != "product" for kind in kinds[first:]) and (counts[tensor, first:] == 1).all() and not separate:
            assert stop == len(made)  # nobody else is to wait
    assert seen == {(i, j, k) for i in rows.tolist() for j in range(len(made)) for k in range(counts[i, j])}


@pytest.mark.parametrize("lag", [None, 3])
@some
@given(sizes=SIZES, chosen=st.sets(st.integers(0, 5)))
@example(sizes=[9000, 70_000], chosen={0})  # which has the first ticket of each launch
def test_what_is_left_of_a_queue(lag, sizes, chosen):
    plan = plan_for(ao.LANS(), 1, "float32", lean=True)
    geo = geometry([(n,) for n in sizes], plan.element)
    tiles(geo, plan.element)
    made = in_stages(plan).stages
    whole = Queue(*tickets(made, pieces(made, geo), np.arange(len(sizes)), lag), len(sizes))
    part = np.array([i in chosen for i in range(len(sizes))])
    queue, ends = whole.select(part)
    left = [[x for x in q[i:j].tolist() if part[x[0]]] for q, e in ((queue, ends), (whole.tickets, whole.ends))
            for i, j in zip([0, *e], e, strict=False)]  # fmt: skip
    assert left[: len(ends)] == left[len(ends) :]
    taken = sum(map(len, left)) // 2
    assert len(queue) == (len(whole.tickets) if 2 * taken >= len(whole.tickets) else taken)


@pytest.mark.parametrize("lag", [None, 0, 3, 1000])
@pytest.mark.parametrize("rule", [ao.LAMB(), ao.LANS(), ao.AdamW()], ids=lambda rule: type(rule).__name__)
@some
@given(sizes=SIZES, chosen=st.sets(st.integers(0, 5), min_size=1), together=TOGETHER)
def test_rows_of_elements(rule, lag, sizes, chosen, together):
    if chosen & set(range(len(sizes))):
        check(rule, [(n,) for n in sizes], lag, chosen, together=together)


@pytest.mark.parametrize("lag", [None, 0, 5])
@pytest.mark.parametrize("rule", [ao.CAME(lr=0.1), ao.Adafactor()], ids=lambda rule: type(rule).__name__)
@some
@given(shapes=MATRICES, together=TOGETHER)
def test_matrices(rule, lag, shapes, together):
    check(rule, shapes, lag, set(range(len(shapes))), together=together)


@pytest.mark.parametrize("rule", [ao.CAME(lr=0.1), ao.Muon(lr=0.1, ns_steps=2)], ids=lambda rule: type(rule).__name__)
@some
@given(shapes=MATRICES)
def test_a_launch_for_each_pass_where_something_comes_between(rule, shapes):
    """Products, and exchanges with other ranks: of no tensor two passes are in one launch, be it small."""
    check(rule, [(a, b, min(r, c), max(r, c)) for a, b, r, c in shapes], None, set(range(len(shapes))), separate=True)
