"""`diagnose` says what published optimizers do, of whose runs the golden files are: all of these, numbers unknown."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from arrayopt.rules.fields import hypers
from arrayopt.testing import Trajectory, diagnose
from arrayopt.testing.diagnosis.fit import MADE_UP
from tests.support.golden_cases import ELSEWHERE, GOLDENS, LEFT_OUT
from tests.support.slow import marked

FOLDER = Path(__file__).parents[1] / "goldens"
FILES = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.npz"))

# What is said besides, of files whose rule is said in other words than ours, or where nothing is to be found.
WORDS = {
    "mx_lans/fused_default": "zerograd.weight, lategrad.weight hold values that are no finite numbers",
    "ms_momentum/default": "weight_decay is not the same for all tensors",
    "ms_adam/default": "eps is added to √v before the bias correction of v",
    "ms_adam/groups": "eps is added to √v before the bias correction of v",
    "ms_adam/amsgrad": "AMSGrad: the largest v so far",
    "ms_momentum/nesterov_is_ignored_on_cpu": "follows SGD as documented",
    "optax_radam/nesterov": "eps is added to √v after the bias correction of v",
    "optax_lars/nesterov": "the norm of the decayed gradient",
    "came_ms/beta1_zero": "gradients do nothing",
    "came_ms/relative_step": "follows no rule: the parameters never move",
    "tf_lamb/exclude": "no bias correction",
}

# Files that are not named, and why. Their tensors that do follow a rule are told.
NOT_NAMED = {
    "po_lamb/default_f64": "three things at once: no c2, the decay before the update, and a norm clamped to 10",
    "optax_adan/default": "optax multiplies differences by b2, which is neither a switch nor a twist",
    "optax_schedulefree/warmup": "z moves by the learning rate of the step before",
    "po_schedulefree/default": "1e-15 is added under the root, which shows in one tensor",
    "optax_adafactor/default": "the decay is computed in float32, and the two largest axes are factored",
    "torch_adafactor/default_f64": "no eps is added to g²; this shows in the tensors that are tiny",
    "po_radam/standing": "in the first five steps there is nothing but decay, for which a rule with a warm-up is taken",
    "optax_radam/default": "its rectification loses five digits where ρ is near its threshold",
    "optax_muon/triples": "three triples of coefficients that nobody has published as such",
    "timm_rmsproptf/decoupled": "four options at once: eps in the root, v begins at 1, centred, decoupled decay",
    "came_ms/relative_step": "its parameters never move",
    "came_ms/compression_v120": "three vectors are told to be near CAME, not to follow it: the search ends beside it",
    "mx_lans/fused_default": "where the gradient is zero, the parameters become NaN",
    "mx_lans/fused_nowd": "where the gradient is zero, the parameters become NaN",
    "mx_lans/step_default": "where the gradient is zero, the parameters become NaN",
    "mx_lans/step_nowd": "where the gradient is zero, the parameters become NaN",
    "ms_lamb_ascend/groups_mixed": "in one group the learning rate and the decay both change from step to step",
}

SAME = {"Adam": "AdamW", "AdamW": "Adam"}
"""Without decay these are one rule."""


def load(file):
    with np.load(FOLDER / f"{file}.npz") as saved:
        arrays = dict(saved)
    meta = json.loads(str(arrays["meta"]))
    shapes = dict(zip(meta["names"], map(tuple, meta["shapes"]), strict=True))
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes.values()])[:-1]
    skip = meta.get("skip") or {}

    def tensors(flat):
        return {n: x.reshape(shapes[n]).astype(float) for n, x in zip(shapes, np.split(flat, ends), strict=True)}

    grads = [
        {name: None if step in skip.get(name, ()) else x for name, x in tensors(row).items()}
        for step, row in enumerate(arrays["g"])
    ]
    dtypes = dict.fromkeys(shapes, str(arrays["p0"].dtype))
    return Trajectory(dtypes, [tensors(arrays["p0"]), *map(tensors, arrays["p"])], grads, file)


EACH_RUN = {"torch_sgd/nesterov_f64", "timm_lion/default"}
RUNS = [file for file in FILES if file not in ELSEWHERE]
TRIED = [file for file in RUNS if not file.startswith("po_soap/")]  # SOAP is not among the rules that are tried


@pytest.mark.parametrize("file", RUNS)
def test_every_file_has_a_rule_or_a_reason(file):
    assert file in GOLDENS or file in LEFT_OUT
    assert file in NOT_NAMED or file in WORDS or file in GOLDENS


@pytest.mark.parametrize("file", marked(((file,) for file in TRIED), lambda file: file in EACH_RUN))
def test_published_systems_are_named(file):
    found = diagnose(load(file), depth=2)
    if file in NOT_NAMED:
        assert not found.explained, f"{file} is named; take it out of NOT_NAMED\n{found}"
    else:
        assert found.explained, str(found)
    assert WORDS.get(file, "") in str(found)
    if file not in NOT_NAMED and file in GOLDENS:
        is_named(GOLDENS[file], found, UNSEEN.get(file, ""), ALSO.get(file))


def is_named(golden, found, unseen="", also=None):
    """Whether a diagnosis, or one of its parts, has the rule, its choices, and its numbers as far as they show."""
    rule, parts = golden.rule, [part for _, part in found.parts] or [found]
    assert {part.name for part in parts} <= {type(rule).__name__, SAME.get(type(rule).__name__), also}, str(found)
    of_groups = ("lr", "weight_decay") if golden.groups is not None else ()
    made_up = {name for pair in MADE_UP if all(hasattr(rule, name) for name in pair) for name in pair}
    wrong = [differing(rule, part, (*made_up, *of_groups, unseen)) for part in parts if part.name != also]
    assert not all(wrong), f"{wrong}\n{found}"


def differing(rule, part, made_up):
    """The fields whose value is another one in a diagnosis, of those that it can see and that stay the same."""
    kind, found, made = hypers(type(rule)), part.hypers, []
    for f in dataclasses.fields(rule):
        true = getattr(rule, f.name)
        if f.name not in kind:
            same = f.name in ("master_weights", *made_up) or part.switches.get(f.name, f.default) == true
        elif f.name not in found or np.ndim(found[f.name]) or f.name in (*part.unseen, *made_up):
            same = True
        else:
            near = {"rtol": 0.2 if f.name.startswith("eps") else 1e-2, "atol": 0.0 if true else 1e-5}
            same = not isinstance(true, float) or np.isclose(found[f.name], true, **near)
        if not same:
            made.append((f.name, true))
    return made


ALSO = {"timm_lars/nesterov_clip_f64": "SGD"}
"""What some tensors follow as well: where the trust ratio is clamped, LARS is SGD."""

UNSEEN = {
    "mx_lans/step_clip_rescale": "sequential",  # two forms that differ by lr times the decay
    "mx_lans/step_default": "sequential",
    "mx_lans/step_fp16_mp": "sequential",
    "mx_lans/step_nowd": "sequential",
    "mx_lars/fused_nomom": "eps",  # 1e-6, beside norms of about 1
    "mx_lars/step_nomom": "eps",
    "po_normuon/no_nesterov": "scale",  # it is told as a learning rate of each tensor by itself
    "optax_muon/no_nesterov": "bias_correction",  # a factor before the product is normalised
    "timm_adan/no_prox": "no_prox",  # a thousandth more of lr makes up for it
    "po_adafactor/default_f64": "relative_step",  # in the first steps it is 0.01, which is the lr given
}
"""Fields that these steps do not show."""
