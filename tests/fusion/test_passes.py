"""Passes and what is between them say everything once, in an order that can be followed."""

import pytest

import arrayopt as ao
from arrayopt.fusion.layout import layout
from arrayopt.fusion.passes import KINDS, in_loops
from arrayopt.fusion.plans import plan_for
from arrayopt.fusion.segments import in_segments
from tests.support.cases import ALL, IDS, make

RANKS = (1, 2, 4)


def plans(name, options):
    return [plan_for(make(name, options), rank, "float32", stats=rank == 2) for rank in RANKS]


@pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)
def test_what_is_between_passes_is_made_once_and_in_order(name, options):
    """Each value between passes is made once, after its arguments; each pass knows all that it reads."""
    for plan in plans(name, options):
        assert len(plan.between) == len(plan.passes) + 1
        made = set()
        for k, between in enumerate(plan.between):
            assert between.combine == (plan.passes[k - 1].sums if k else ())
            made |= set(between.combine)
            for loop in between.loops:
                for n in loop.nodes:
                    assert n not in made
                    assert n.axes == loop.axes
                    assert all(a in made or a.on_host or a.op == "input" for a in n.args)
                    made.add(n)
                assert loop.reduces == (len(loop.nodes) == 1 and loop.nodes[0].reduces)
            if k < len(plan.passes):
                p = plan.passes[k]
                assert set(p.using("tensor", "row", "column", "batch")) - made == {
                    n for n in p.uses if n.op == "input" and n.data in plan.slots
                }
                assert set(p.uses.values()) <= {"host", *KINDS}
        assert {name: plan.small[name] for name in plan.between[-1].stores} == plan.between[-1].stores
        assert not any(b.stores for b in plan.between[:-1])


@pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)
def test_every_value_has_one_place(name, options):
    for plan in plans(name, options):
        where = layout(plan)
        for n in [n for b in plan.between for n in (*b.combine, *b.nodes)]:
            assert (n in where.tensor) == (n.axes == "")
            assert not (n in where.tensor and n in where.vectors)
        for p in plan.passes:  # what a pass reads outlives the loop that makes it
            assert all(n.on_host or n.op == "input" or n in where.tensor or n in where.vectors for n in p.uses)


def test_partial_results_are_combined_before_anything_that_follows():
    plan = plan_for(ao.LAMB(), 1, "float32")
    first, second, third = plan.between
    assert not first
    assert [n.op for n in second.combine] == ["sum"] * 6  # of each norm three
    assert set(second.combine) == set(plan.passes[0].reductions)
    assert all(a in second.nodes or a in second.combine or a.on_host for n in second.nodes for a in n.args)
    assert not third


def test_loops_of_what_is_combined_and_of_what_follows_can_be_one():
    plan = plan_for(ao.Adafactor(), 2, "float32")
    b = plan.between[1]
    both = in_loops([*b.combine, *b.nodes], plan.element)
    assert len(both) < len(b.combine) + len(b.loops)
    assert {n for loop in both for n in loop.nodes} == {*b.combine, *b.nodes}


def test_segments_combine_what_the_passes_reduce():
    plan = plan_for(ao.CAME(lr=0.1), 4, "float32")
    split = in_segments(plan)
    combined = [n for s in split.segments for n in s.before.combine] + [*split.last.combine]
    assert combined == [n for p in plan.passes for n in p.reducing("tensor")]
