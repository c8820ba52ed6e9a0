"""Stages: the one form of a plan that engines run or print says everything once, in an order that can be followed."""

import pytest

import arrayopt as ao
from arrayopt.fusion.lanes import lanes
from arrayopt.fusion.layout import layout
from arrayopt.fusion.plans import plan_for
from arrayopt.fusion.stages import KINDS, loops, staged
from tests.support.cases import ALL, IDS, make

RANKS = (1, 2, 4)


def plans(name, options):
    return [plan_for(make(name, options), rank, "float32", stats=rank == 2) for rank in RANKS]


@pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)
def test_stages_are_the_plan(name, options):
    """Each value between passes is made once, after its arguments; each pass knows all that it reads."""
    for plan in plans(name, options):
        form = staged(plan)
        assert len(form.between) == len(form.passes) + 1
        made = set()
        for k, between in enumerate(form.between):
            assert between.combine == (plan.passes[k - 1].reductions if k else ())
            assert set(between.nodes) == set(plan.between[k])
            made |= set(between.combine)
            for loop in between.after:
                for n in loop.nodes:
                    assert n not in made
                    assert n.axes == loop.axes
                    assert all(a in made or a.on_host or a.op == "input" for a in n.args)
                    made.add(n)
                assert loop.reduces == (len(loop.nodes) == 1 and loop.nodes[0].reduces)
            if k < len(form.passes):
                p = form.passes[k]
                assert set(p.using("tensor", "row", "column", "batch")) - made == {
                    n for n in p.uses if n.op == "input" and n.data in plan.slots
                }
                assert set(p.uses.values()) <= {"host", *KINDS}
        assert {name: plan.small[name] for name in form.between[-1].stores} == form.between[-1].stores
        assert not any(b.stores for b in form.between[:-1])


@pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)
def test_every_value_has_one_place(name, options):
    for plan in plans(name, options):
        form, where = staged(plan), layout(plan)
        for n in [n for b in form.between for n in (*b.combine, *b.nodes)]:
            assert where.place(n) in ("tensor", "vector", "local")
            assert (where.place(n) == "tensor") == (n.axes == "")
        for p in form.passes:  # what a pass reads outlives the loop that makes it
            assert {where.place(n) for n in p.uses} <= {"scalar", "tensor", "vector", "stored"}


def test_partial_results_are_combined_before_anything_that_follows():
    form = staged(plan_for(ao.LAMB(), 1, "float32"))
    first, second, third = form.between
    assert not first
    assert [n.op for n in second.combine] == ["sum"] * 6  # of each norm three
    assert set(second.combine) == set(form.passes[0].reductions)
    assert all(a in second.nodes or a in second.combine or a.on_host for n in second.nodes for a in n.args)
    assert not third


def test_loops_of_what_is_combined_and_of_what_follows_can_be_one():
    plan = plan_for(ao.Adafactor(), 2, "float32")
    b = staged(plan).between[1]
    both = loops([*b.combine, *b.nodes], plan.element)
    assert len(both) < len(b.combine) + len(b.after)
    assert {n for loop in both for n in loop.nodes} == {*b.combine, *b.nodes}


def test_a_plan_and_its_segments_are_staged_once():
    plan = plan_for(ao.CAME(lr=0.1), 4, "float32")
    assert staged(plan) is staged(plan)
    split = lanes(plan)
    combined = [n for s in split.segments for n in s.before.combine] + [*split.after.combine]
    assert combined == [n for p in staged(plan).passes for n in p.reducing("tensor")]
