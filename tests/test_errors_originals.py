"""The originals' own errors, and what is said or done here."""

import json
import re
from collections import OrderedDict

import pytest

import arrayopt as ao
from tests.support.originals import (
    GOLDENS,
    Refused,
    Works,
    because,
    eps_as_int,
    eps_zero,
    follows_witness,
    from_a_generator,
    group_follows_witness,
    group_takes_beta1,
    lars_by_name,
    many_tensors,
    one_more_step,
    plain_tensors,
    runs_as_it_comes,
    same_as,
    sequences_are_independent,
    unknown,
)
from tests.support.refusals import A, B, ones, optimizer

pytestmark = pytest.mark.usefixtures("auto")

INT = "an int is a number"
ONE_UNKNOWN = "there is no such option"
LOSS_SCALE = "the scale of a loss is taken off before the rule sees gradients, so no rule has that option"
LAMB_GROUPS = [{"params": [A]}, {"params": [B]}]
ANSWERS = {
    "ms_lamb_ascend/errors.json": {
        "beta1=0.0": Works(
            lambda: follows_witness("LAMB", {"lr": 0.1, "beta1": 0.0}, other={"lr": 0.1}),
            "no momentum is a momentum of 0: m is the gradient",
        ),
        "beta1=1 int": Refused(
            lambda: ao.LAMB(beta1=1),
            ValueError,
            "LAMB: `beta1` must be in [0, 1); got 1.0",
            f"{INT}; this one is out of range",
        ),
        "beta1=1.0": Refused(lambda: ao.LAMB(beta1=1.0), ValueError, "LAMB: `beta1` must be in [0, 1); got 1.0"),
        "beta2=1.5": Refused(lambda: ao.LAMB(beta2=1.5), ValueError, "LAMB: `beta2` must be in [0, 1); got 1.5"),
        "duplicate names ungrouped": Refused(
            lambda: optimizer(made=OrderedDict({"a.b": A, "a": {"b": B}})), ValueError, "two parameters are named 'a.b'"
        ),
        "eps int": Works(lambda: same_as("LAMB", {"lr": 0.1, "eps": 1}, {"lr": 0.1, "eps": 1.0}), INT),
        "eps=0.0": Refused(lambda: ao.LAMB(eps=0.0), ValueError, "LAMB: `eps` must be in (0, inf); got 0.0"),
        "group bad key": Works(
            group_takes_beta1, "a group may override every field of the rule; an unknown key is a ValueError"
        ),
        "group dup param": Refused(
            lambda: optimizer(made=[{"params": [A, A]}]), ValueError, "'0' and '1' are the same array"
        ),
        "group empty params": Refused(
            lambda: optimizer(made=[{"params": []}]), ValueError, "group 0: params must hold at least one array"
        ),
        "group gc not bool": Refused(
            lambda: optimizer(made=[{"params": [A], "grad_centralization": 1}]),
            TypeError,
            "group '0': LAMB: `grad_centralization` must be True or False; got 1",
        ),
        "group lr list length differs": Works(
            sequences_are_independent, "each sequence is read for itself; the shorter one is the first to run out"
        ),
        "group order length": Refused(
            lambda: optimizer(made=[{"params": [A]}, {"order_params": [A, B]}]),
            ValueError,
            "of the groups once; missing: [], not parameters: positions [1], got 2 for 1",
        ),
        "group order other names": Refused(
            lambda: optimizer(made=[*LAMB_GROUPS, {"order_params": ["0", "a"]}]),
            ValueError,
            "missing: ['1'], not parameters: positions [1]",
        ),
        "group order with other key": Refused(
            lambda: optimizer(made=[*LAMB_GROUPS, {"order_params": [A, B], "lr": 0.1}]),
            ValueError,
            "`order_params` must appear once, alone in its dict; got keys ['order_params', 'lr']",
        ),
        "lr 2-D": Refused(
            lambda: ao.LAMB(lr=ones(2, 2)),
            ValueError,
            "LAMB: `lr` must be a number or a sequence; got an array of shape (2, 2)",
        ),
        "lr None": Refused(
            lambda: ao.LAMB(lr=None),
            TypeError,
            "LAMB: `lr` must be a number, a schedule (a function of the step) or a sequence of numbers; got None",
        ),
        "lr bool": Refused(
            lambda: ao.LAMB(lr=True),
            TypeError,
            "LAMB: `lr` must be a number",
            "True as a learning rate is a slip, not 1.0",
        ),
        "lr empty list": Refused(
            lambda: ao.LAMB(lr=[]),
            ValueError,
            "LAMB: `lr` must hold a value for each step; got an empty sequence",
            "it could not make one step",
        ),
        "lr list shorter than steps": Refused(
            lambda: [o := ao.Optimizer(ones(2), ao.LAMB(lr=[0.1, 0.2])), *(o.step(ones(2)) for _ in range(3))],
            ValueError,
            "LAMB: `lr`: the sequence has 2 values and has run out at step 2 (steps count from 0)",
            "a value that is missing is a ValueError, and nothing has changed then",
        ),
        "lr str": Refused(
            lambda: ao.LAMB(lr="0.1"),
            TypeError,
            "LAMB: `lr` must be a number",
            "a string is another kind, not another value",
        ),
        "lr<0": Refused(lambda: ao.LAMB(lr=-1.0), ValueError, "LAMB: `lr` must be in [0, inf); got -1.0"),
        "mixed list": Refused(
            lambda: optimizer(made=[A, {"params": [B]}]),
            TypeError,
            "Optimizer: params must be all group dicts or none; got ndarray among group dicts",
        ),
        "params None": Refused(
            lambda: ao.Optimizer(None, ao.LAMB()),
            ValueError,
            "Optimizer: params must hold at least one array; got None",
        ),
        "params empty": Refused(
            lambda: ao.Optimizer([], ao.LAMB()), ValueError, "Optimizer: params must hold at least one array; got []"
        ),
        "params generator": Works(from_a_generator),
        "params tensor element": Works(
            plain_tensors, "any array is a parameter; there is no class of its own for them"
        ),
        "wd bool": Refused(
            lambda: ao.LAMB(weight_decay=True),
            TypeError,
            "LAMB: `weight_decay` must be a number",
            "True as a weight decay is a slip, not 1.0",
        ),
        "wd str": Refused(lambda: ao.LAMB(weight_decay="0.1"), TypeError, "LAMB: `weight_decay` must be a number"),
        "wd<0": Refused(
            lambda: ao.LAMB(weight_decay=-0.1), ValueError, "LAMB: `weight_decay` must be in [0, inf); got -0.1"
        ),
    },
    "mx_lans/errors.json": {
        "agg46": Works(lambda: many_tensors(46), "a step takes as many tensors as there are"),
        "fused_float64": Works(
            lambda: follows_witness("LANS", {"lr": 0.1}), "arithmetic is in the parameter's own precision"
        ),
        "fused_fp16_nomp": Works(
            lambda: follows_witness("LANS", {"lr": 0.1}, dtype="float16"),
            "float16 needs no switch: state and arithmetic are float32",
        ),
        "step_float64": Works(
            lambda: follows_witness(
                "LANS", {"lr": 0.1, "sequential": True, "weight_decay": 0.5}, other={"lr": 0.1, "weight_decay": 0.5}
            ),
            "as fused_float64",
        ),
        "step_fp16_nomp": Works(
            lambda: follows_witness("LANS", {"lr": 0.1, "sequential": True}, dtype="float16"), "as fused_fp16_nomp"
        ),
    },
    "came_ms/behaviour.json": {
        "0-d parameter": Works(lambda: follows_witness("CAME", {"lr": 0.1}, shape=()), "0-d arrays are arrays"),
        "CPU default (use_fused_ada_factor left True)": Works(
            runs_as_it_comes, "what runs the rule is chosen by the arrays; the switch does not exist"
        ),
        "ctor beta1 1.0": Refused(
            lambda: ao.CAME(lr=0.1, beta1=1.0),
            ValueError,
            "CAME: `beta1` must be in [0, 1); got 1.0",
            "with 1 the parameters would never move",
        ),
        "ctor beta1 None": Refused(
            lambda: ao.CAME(lr=0.1, beta1=None),
            TypeError,
            "CAME: `beta1` must be a number",
            "CAME is about how far m can be trusted; Adafactor(beta1=None) is the rule without m",
        ),
        "ctor clip_threshold 0.0": Refused(
            lambda: ao.CAME(lr=0.1, clip_threshold=0.0),
            ValueError,
            "CAME: `clip_threshold` must be in (0, inf); got 0.0",
            "u would be divided by infinity; None means no limit",
        ),
        "ctor clip_threshold int": Works(
            lambda: same_as("CAME", {"lr": 0.1, "clip_threshold": 2}, {"lr": 0.1, "clip_threshold": 2.0}), INT
        ),
        "ctor compression=True": because(unknown("compression", compression=True), ONE_UNKNOWN),
        "ctor decay_rate 1.1": Refused(
            lambda: ao.CAME(lr=0.1, decay_rate=1.1), ValueError, "CAME: `decay_rate` must be in [0, 1]; got 1.1"
        ),
        "ctor eps 2-tuple": because(
            unknown("eps", eps=(1e-30, 1e-3)), "the three are fields of their own: eps1, eps_scale, eps2"
        ),
        "ctor eps int": Works(eps_as_int, f"there is no `eps`, but eps1, eps_scale and eps2; {INT}"),
        "ctor eps zero": Works(eps_zero),
        "ctor loss_scale 0": because(unknown("loss_scale", loss_scale=0.0), LOSS_SCALE),
        "ctor loss_scale float": because(unknown("loss_scale", loss_scale=2.0), LOSS_SCALE),
        "ctor lr None": Refused(
            lambda: ao.CAME(lr=None), ValueError, "CAME: `lr` must be given unless relative_step=True; got lr=None"
        ),
        "ctor lr and relative_step": Refused(
            lambda: ao.CAME(lr=0.1, relative_step=True),
            ValueError,
            "CAME: `lr` and relative_step=True exclude each other; set relative_step=False to use lr",
        ),
        "ctor lr int": Works(lambda: same_as("CAME", {"lr": 1}, {"lr": 1.0})),
        "ctor warmup without relative": Refused(
            lambda: ao.CAME(lr=0.1, warmup_init=True), ValueError, "CAME: `warmup_init` needs relative_step=True"
        ),
        "ctor wd 1.5": Works(
            lambda: follows_witness("CAME", {"lr": 0.1, "weight_decay": 1.5}, other={"lr": 0.1}),
            "it is multiplied by lr, so 1.5 is as good as any",
        ),
        "ctor wd int": Works(
            lambda: same_as("CAME", {"lr": 0.1, "weight_decay": 1}, {"lr": 0.1, "weight_decay": 1.0}), INT
        ),
        "float16 params": Works(lambda: follows_witness("CAME", {"lr": 0.1}, dtype="float16")),
        "grad_centralization": Works(
            lambda: follows_witness("CAME", {"lr": 0.1, "grad_centralization": True}, other={"lr": 0.1}),
            "it is documented, so it is done",
        ),
        "group lr": Works(
            lambda: group_follows_witness("CAME", {"lr": 0.1}, {"lr": 0.5}), "it is documented, so it is done"
        ),
        "group weight_decay": Works(
            lambda: group_follows_witness("CAME", {"lr": 0.1, "weight_decay": 0.2}, {"weight_decay": 1.0}),
            "it is documented, so it is done",
        ),
        "group weight_decay with optimizer weight_decay 0": Works(
            lambda: group_follows_witness("CAME", {"lr": 0.1}, {"weight_decay": 1.0}), "it is documented, so it is done"
        ),
        "loss_scale=1024": because(unknown("loss_scale", loss_scale=1024), LOSS_SCALE),
    },
    "ms_momentum/failures.json": {
        "ms_lars/held/lars_clip": because(
            unknown("use_clip", "LARS", use_clip=True),
            "LARS runs on any device; an upper limit of its ratio is not part of it",
        ),
        "ms_lars/held/lars_filter": Works(lars_by_name, "LARS runs on any device; layers are taken out by groups"),
        "ms_lars/open/lars": Works(
            lambda: follows_witness("LARS", {"lr": 0.5, "weight_decay": 0.1}, other={"lr": 0.5}),
            "LARS runs on any device",
        ),
    },
}
KEYS = [(file, key) for file, answers in ANSWERS.items() for key in answers]


@pytest.mark.parametrize("file", ANSWERS)
def test_every_error_of_the_originals_has_an_answer(file):
    assert list(ANSWERS[file]) == list(json.loads((GOLDENS / file).read_text()))


@pytest.mark.parametrize(("file", "key"), KEYS, ids=[f"{file.partition('/')[0]} {key}" for file, key in KEYS])
def test_what_the_originals_refuse(file, key):
    answer, theirs = ANSWERS[file][key], json.loads((GOLDENS / file).read_text())[key]
    answer()
    refused = re.match(r"\w+(?=: )", theirs)
    ours = answer.exception.__name__ if isinstance(answer, Refused) else None
    same = ours == (refused and refused[0]) and "ignored" not in theirs and "no effect" not in theirs
    assert answer.why or same, "a difference needs its reason"


def test_a_sequence_that_runs_out_leaves_no_trace():
    one_more_step(ao.Optimizer(ones(2), ao.LAMB(lr=[0.1, 0.2])), steps=2)
