"""A rule per group: each group is what an Optimizer of its own would be, and everything else goes on as ever."""

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.schedules import Linear
from tests.support.optimizing import drawn

SHAPES = {"embed": (6, 4), "w": (5, 3), "bias": (3,), "gain": (4,)}
GIVEN = {
    "embed": ao.AdamW(lr=Linear(0.1, 0.01, 10)),
    "w": {"rule": ao.LANS(lr=0.5), "weight_decay": 0.5},
    "bias": {"lr": 0.02},
}
ALONE = {
    "embed": ao.AdamW(lr=Linear(0.1, 0.01, 10)),
    "w": ao.LANS(lr=0.5, weight_decay=0.5),
    "bias": ao.LAMB(lr=0.02),
    "gain": ao.LAMB(lr=0.1),
}
BASE = ao.LAMB(lr=0.1)


def tree(seed=0):
    return {name: drawn(shape, seed + i) for i, (name, shape) in enumerate(SHAPES.items())}


def alone(steps):
    """Each tensor under an Optimizer of its own."""
    params = tree()
    for name, rule in ALONE.items():
        opt = ao.Optimizer({name: params[name]}, rule, engine="numpy")
        for i in range(steps):
            opt.step({name: tree(10 * i + 7)[name]})
    return params


def made(**options):
    return ao.Optimizer(tree(), BASE, groups=GIVEN, **{"engine": "numpy", **options})


def run(opt, steps, first=0):
    for i in range(first, first + steps):
        opt.step(tree(10 * i + 7))
    return opt


def same(left, right):
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name], right[name]) for name in left)


def test_each_group_is_an_optimizer_of_its_own():
    opt = run(made(), 4)
    same(opt.params, alone(4))
    assert [list(opt.state[name]) for name in SHAPES] == [["t", "m", "v"]] * 4
    assert [type(group.rule).__name__ for group in opt.groups] == ["AdamW", "LANS", "LAMB", "LAMB"]


def test_it_is_shown():
    opt = made()
    assert "Group('embed', 1 tensor, 24 parameters, AdamW(lr=Linear(" in repr(opt)
    assert "Group('bias', 1 tensor, 3 parameters, lr=0.02)" in repr(opt)
    assert all(name in opt.explain() for name in ("AdamW", "LANS", "LAMB"))
    assert opt.now() == {"embed": 0.1, "w": 0.5, "bias": 0.02, "rest": 0.1}
    assert opt.now("eps_root") == {"embed": 0.0, "w": None, "bias": 0.0, "rest": 0.0}


def test_settings_of_the_optimizer_are_not_those_of_other_rules():
    opt = made()
    opt.lr = 0.3
    assert [opt.now()[label] for label in ("embed", "w", "bias", "rest")] == [0.1, 0.5, 0.02, 0.3]
    opt.groups[0].lr = 0.7
    assert opt.now()["embed"] == 0.7


def test_a_rule_in_a_group_dict_and_in_one_that_is_added():
    params, own = tree(), alone(4)
    listed = [
        {"params": [params["embed"]], "rule": ALONE["embed"]},
        {"params": [params["w"]], "rule": ao.LANS(lr=0.5), "weight_decay": 0.5},
        {"params": [params["bias"]], "lr": 0.02},
    ]
    opt = ao.Optimizer(listed, BASE, engine="numpy")
    group = opt.add_group([params["gain"]], rule=ALONE["gain"])
    assert group.rule == ALONE["gain"]
    opt.lr = 9.0
    assert [g.lr for g in opt.groups[1:]] == [0.5, 0.02, 0.1], "none follows"
    for i in range(4):
        opt.step(list(tree(10 * i + 7).values()))
    same(params, own)


def test_a_resumed_run_equals_a_straight_one(tmp_path):
    opt = run(made(), 2)
    opt.save(tmp_path / "checkpoint")
    other = made()
    other.load(tmp_path / "checkpoint")
    same(run(other, 2, 2).params, alone(4))
    third = ao.Optimizer({name: x.copy() for name, x in tree().items()}, BASE, groups=GIVEN, engine="numpy")
    third.load_state_dict(run(made(), 2).state_dict())
    third.params = {name: x.copy() for name, x in run(made(), 2).params.items()}
    same(run(third, 2, 2).params, alone(4))


def test_a_state_under_another_rule_does_not_fit():
    other = ao.Optimizer(tree(), BASE, groups={**GIVEN, "embed": {}}, engine="numpy")
    with pytest.raises(ValueError, match="group 'embed' was AdamW, here LAMB"):
        other.load_state_dict(made().state_dict())


def test_statistics_are_those_of_each_rule():
    opt = run(made(stats=True), 1)
    assert ["trust_ratio" in opt.stats[name] for name in SHAPES] == [False, True, True, True]


def test_clipping_and_skipping_are_of_all_groups_together():
    opt = made(clip_norm=0.01, skip_nonfinite=True)
    before = {name: x.copy() for name, x in opt.params.items()}
    opt.step(tree(3) | {"w": np.full(SHAPES["w"], np.nan)})
    same(opt.params, before)
    opt.step(tree(3))
    assert all(not np.array_equal(opt.params[name], before[name]) for name in SHAPES)


def test_the_functional_form():
    params, state = tree(), ao.init(BASE, tree(), groups=GIVEN)
    for i in range(4):
        params, state = ao.update(BASE, params, tree(10 * i + 7), state, groups=GIVEN)
    for name, x in alone(4).items():
        np.testing.assert_allclose(params[name], x, rtol=1e-12)


def test_ranks_share_them():
    def work(comm):
        return run(made(comm=comm), 4).params

    for params in ao.ranks.run(3, work):
        same(params, alone(4))


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ({"w": ao.LAMB}, TypeError, "groups: 'w' must map to a dict of hyper-parameters or to a rule; got <class"),
        ({"w": {"rule": ao.LAMB}}, TypeError, "group 'w': `rule` must be a Rule such as LAMB.lr=1e-3.; got <class"),
        ({"w": {"rule": ao.SGD(lr=1.0), "beta1": 0.1}}, ValueError, "group 'w': SGD has no `beta1`; pass momentum=0.1"),
        ({"w": {"rule": ao.SGD(lr=1.0), "lr": -1.0}}, ValueError, "group 'w': SGD: `lr` must be in"),
    ],
)
def test_what_is_no_rule(given, kind, says):
    with pytest.raises(kind, match=says):
        ao.Optimizer(tree(), BASE, groups=given)
    with pytest.raises(kind, match=says):
        ao.init(BASE, tree(), groups=given)


def test_load_torch_is_for_one_rule():
    with pytest.raises(
        TypeError,
        match="all groups must have the rule AdamW, because an optimizer of PyTorch has one rule; group 'w' SGD",
    ):
        ao.load_torch(ao.Optimizer(tree(), ao.AdamW(), groups={"w": ao.SGD(lr=1.0)}), {})
