"""Names from other libraries: each is refused, and answered with what to write here."""

import dataclasses
import re

import numpy as np
import pytest

import arrayopt as ao
from arrayopt import foreign, foreign_names, schedules

RULES = [x for x in vars(ao).values() if isinstance(x, type) and issubclass(x, ao.Rule) and x is not ao.Rule]
SCHEDULES = [x for x in vars(schedules).values() if dataclasses.is_dataclass(x)]
NAMES = sorted({*foreign_names.SAME, *foreign_names.SPREAD, *foreign_names.RULE, *foreign_names.SCHEDULE})

CALLS = [
    (lambda: ao.LAMB(betas=(0.9, 0.999)), "LAMB has no `betas`; pass beta1=0.9, beta2=0.999"),
    (lambda: ao.CAME(lr=0.1, betas=[0.9, 0.99, 0.9]), "CAME has no `betas`; pass beta1=0.9, beta2=0.99, beta3=0.9"),
    (lambda: ao.CAME(lr=0.1, eps=(1e-30, 1e-16)), "CAME has no `eps`; pass eps1=1e-30, eps2=1e-16"),
    (lambda: ao.CAME(lr=0.1, eps=(1, 2, 3)), "CAME has no `eps`; pass eps1=1, eps_scale=2, eps2=3"),
    (lambda: ao.Adafactor(eps=(None, 1e-3)), "Adafactor has no `eps`; pass eps1=None, eps_scale=0.001"),
    (lambda: ao.AdamW(learning_rate=1e-3), "AdamW has no `learning_rate`; pass lr=0.001"),
    (lambda: ao.AdamW(learning_rate=schedules.Constant(1.0)), "AdamW has no `learning_rate`; pass lr"),
    (lambda: ao.AdamW(b1=0.9), "AdamW has no `b1`; pass beta1=0.9"),
    (lambda: ao.AdamW(beta_2=0.99), "AdamW has no `beta_2`; pass beta2=0.99"),
    (lambda: ao.LAMB(momentum=0.9), "LAMB has no `momentum`; pass beta1=0.9"),
    (lambda: ao.SGD(lr=0.1, beta1=0.9), "SGD has no `beta1`; pass momentum=0.9"),
    (lambda: ao.AdamW(weight_decay_rate=0.1), "AdamW has no `weight_decay_rate`; pass weight_decay=0.1"),
    (lambda: ao.AdamW(lambda_=0.1), "AdamW has no `lambda_`; pass weight_decay=0.1"),
    (lambda: ao.AdamW(decay=0.1), "AdamW has no `decay`; pass weight_decay; or, for a learning rate that decays, lr="),
    (lambda: ao.AdamW(clipnorm=1.0), "AdamW has no `clipnorm`; pass clip_tensor_norm=1.0"),
    (
        lambda: ao.AdamW(global_clipnorm=1.0),
        "no `global_clipnorm`; it is an option of the optimizer: Optimizer(params,",
    ),
    (lambda: ao.AdamW(max_norm=1.0), "rule, clip_norm=...)"),
    (lambda: ao.AdamW(step_size=0.1), "AdamW has no `step_size`; pass lr=0.1"),
    (lambda: ao.AdamW(gamma=0.1), "AdamW has no `gamma`; use a schedule"),
    (lambda: ao.AdamW(warmup_steps=10), "AdamW has no `warmup_steps`; use a schedule"),
    (lambda: ao.AdamW(fused=True), "AdamW has no `fused`; leave it out"),
    (lambda: ao.AdamW([np.ones(2)], lr=0.1), "AdamW takes keyword arguments only: pass fields by name, such as lr=0.1"),
    (lambda: ao.AdamW(weigth_decay=0.1), "AdamW has no `weigth_decay`; did you mean `weight_decay`?"),
    (lambda: ao.AdamW(biasCorrection=True), "AdamW has no `biasCorrection`; did you mean `bias_correction`?"),
    (lambda: ao.Lion(betas=(0.9, 0.99)), "Lion has no `betas`; pass beta1=0.9, beta2=0.99"),
    (lambda: ao.Adan(betas=(0.98, 0.92, 0.99)), "Adan has no `betas`; pass beta1=0.98, beta2=0.92, beta3=0.99"),
    (lambda: ao.RMSprop(rho=0.9), "RMSprop has no `rho`; pass alpha=0.9"),
    (lambda: ao.RMSprop(decoupled_decay=True), "RMSprop has no `decoupled_decay`; pass decoupled=True"),
    (lambda: ao.NAdam(decoupled_weight_decay=True), "NAdam has no `decoupled_weight_decay`; pass decoupled=True"),
    (lambda: ao.RAdam(n_sma_threshold=5), "RAdam has no `n_sma_threshold`; pass threshold=5"),
    (lambda: ao.AdEMAMix(t_alpha_beta3=9), "AdEMAMix has no `t_alpha_beta3`; pass both alpha_warmup and beta3_warmup"),
    (lambda: ao.Adan(max_grad_norm=1.0), "Adan has no `max_grad_norm`; it is an option of the optimizer"),
    (lambda: ao.AdamH(weight_decay=0.1), "AdamH has no `weight_decay`; nothing decays under it; leave it out"),
    (lambda: ao.AdamW(zzz=0.1), "AdamW has no `zzz`; it has "),
    (lambda: schedules.Cosine(0.1, T_max=100), "Cosine has no `T_max`; pass decay_steps=100"),
    (lambda: schedules.Cosine(lr=0.1, decay_steps=9), "Cosine has no `lr`; pass init_value=0.1"),
    (lambda: schedules.Cosine(0.1, total_steps=9), "Cosine has no `total_steps`; pass decay_steps=9"),
    (lambda: schedules.Cosine(0.1, 9, eta_min=0.01), "Cosine has no `eta_min`; pass end_value=0.01"),
    (lambda: schedules.Cosine(0.1, 9, warmup_steps=3), "Cosine has no `warmup_steps`; put a warm-up before it: Join("),
    (lambda: schedules.Cosine(0.1, 9, last_epoch=3), "Cosine has no `last_epoch`; set opt.step_count"),
    (lambda: schedules.Exponential(0.1, gamma=0.9, decay_steps=1), "Exponential has no `gamma`; pass decay_rate=0.9"),
    (lambda: schedules.Exponential(0.1, 0.9, step_size=7), "Exponential has no `step_size`; pass decay_steps=7"),
    (lambda: schedules.Warmup(init_value=0.1, warmup_steps=3), "Warmup has no `init_value`; it begins at 0; Linear("),
    (lambda: schedules.CosineRestarts(0.1, T_0=7), "CosineRestarts has no `T_0`; pass cycle_steps=7"),
    (lambda: schedules.OneCycle(max_lr=0.1, total_steps=7), "OneCycle has no `max_lr`; pass peak_value=0.1"),
    (lambda: schedules.Join([], milestones=[3]), "Join has no `milestones`; pass boundaries"),
    (lambda: ao.minimize(abs, 1, maxiter=9), "minimize has no `maxiter`; pass max_steps=9"),
    (lambda: ao.minimize(abs, 1, gtol=0.1), "minimize has no `gtol`; pass tol=0.1"),
    (lambda: ao.minimize(abs, 1, method="CG"), "minimize has no `method`; pass a rule, such as LBFGS(), CG() or SPG()"),
    (lambda: ao.minimize(abs, 1, bounds=[(0, 1)]), "minimize has no `bounds`; pass project=projections.box(low, high)"),
    (lambda: ao.minimize(abs, 1, jac=True), "minimize has no `jac`; `f` returns both: f(params) -> (value, grads)"),
    (lambda: ao.minimize(abs, 1, max_step=1), "minimize has no `max_step`; did you mean `max_steps`?"),
    (lambda: ao.Monitor(None, interval=3), "Monitor has no `interval`; pass every=3"),
    (lambda: ao.Monitor(None, evry=3), "Monitor has no `evry`; did you mean `every`?"),
    (lambda: schedules.Cosine(0.1, decay_step=3), "Cosine has no `decay_step`; did you mean `decay_steps`?"),
]


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[words for _, words in CALLS])
def test_a_name_from_elsewhere_is_answered_with_the_one_here(call, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        call()


OPTIONS = {
    "max_norm": "no `max_norm`; it is an option of the optimizer: Optimizer(params, rule, clip_norm=...)",
    "max_grad_norm": "no `max_grad_norm`; it is an option of the optimizer: Optimizer(params, rule, clip_norm=...)",
    "clip_grad_norm_": "no `clip_grad_norm_`; it is an option of the optimizer: Optimizer(params, rule, clip_norm=...)",
    "global_clipnorm": "no `global_clipnorm`; it is an option of the optimizer: Optimizer(params, rule, clip_norm=...)",
    "clipnorm": "Optimizer has no `clipnorm`; set it on the rule, AdamW(...): pass clip_tensor_norm=1.5",
    "grad_scale": "no `grad_scale`; it is an option of the optimizer: Optimizer(params, rule, loss_scale=...)",
    "lr": "Optimizer has no `lr`; set it on the rule, AdamW(...): pass lr=1.5",
    "weight_decay": "Optimizer has no `weight_decay`; set it on the rule, AdamW(...): pass weight_decay=1.5",
    "learning_rate": "Optimizer has no `learning_rate`; set it on the rule, AdamW(...): pass lr=1.5",
    "betas": "Optimizer has no `betas`; set it on the rule, AdamW(...): it is `beta1` and `beta2` here",
    "scheduler": "Optimizer has no `scheduler`; use a schedule",
    "fused": "Optimizer has no `fused`; leave it out",
    "clipnrom": "Optimizer has no `clipnrom`; did you mean `clip_norm`?",
    "state": 'Optimizer has no `state`; set state_dtype="int8" on the rule',
    "zzz": "Optimizer has no `zzz`; it has groups, engine, clip_norm",
}


@pytest.mark.parametrize("rule", [ao.AdamW(), ao.AdamW], ids=["rule", "class"])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_optimizer_answers_too(name, rule):
    for call in (
        lambda: ao.Optimizer(np.ones(2), rule, **{name: 1.5}),
        lambda: ao.Optimizer(np.ones(2), rule=rule, **{name: 1.5}),
    ):
        with pytest.raises(TypeError, match=re.escape(OPTIONS[name])):
            call()


def test_an_optimizer_answers_with_values_of_several_fields():
    with pytest.raises(TypeError, match=re.escape("set it on the rule, LAMB(...): pass beta1=0.8, beta2=0.9")):
        ao.Optimizer(np.ones(2), ao.LAMB(), betas=(0.8, 0.9))


@pytest.mark.parametrize("kind", [*RULES, *SCHEDULES], ids=lambda kind: kind.__name__)
def test_every_answer_names_what_there_is(kind):
    """Each name that the table knows is a field, or the answer's fields and options are real ones."""
    advice = foreign_names.RULE if kind in RULES else foreign_names.SCHEDULE
    fields = [f.name for f in dataclasses.fields(kind)]
    for name in NAMES:
        if name not in fields:
            said = foreign.unknown(kind.__name__, fields, name, advice, 0.1)
            given = re.search(r"; give (\w+)=0\.1$", said)
            assert given is None or given[1] in fields
            option = re.search(r"Optimizer\(params, rule, (\w+)=\.\.\.\)", said)
            assert option is None or option[1] in ao.Optimizer.__init__.__kwdefaults__


def test_code_in_the_answers_runs():
    from arrayopt.schedules import Constant, Cosine, InverseTime, Join, Warmup  # noqa: F401

    texts = " ".join([*foreign_names.RULE.values(), *foreign_names.SCHEDULE.values()])
    calls = re.findall(r"(?:Join\(.*?boundaries=\[100\]\)|(?:Cosine|InverseTime)\([^)]*\))", texts)
    assert len(calls) > 3
    for call in calls:
        assert eval(call)(0) >= 0


@pytest.fixture
def opt():
    params = {"w": np.ones((2, 2)), "b": np.ones(2)}
    return ao.Optimizer(params, ao.LAMB(lr=schedules.Linear(0.1, 0.0, 10)), groups={"b": {"weight_decay": 0.0}})


def test_names_of_results_and_schedules_are_answered():
    found = ao.minimize(lambda x: (x @ x, 2 * x), np.ones(2), max_steps=1)
    for name, words in {"x": "`params`", "fun": "`value`", "nit": "`steps`", "convergd": "`converged`?"}.items():
        with pytest.raises(AttributeError, match=re.escape(f"Result has no `{name}`; ") + ".*" + re.escape(words)):
            getattr(found, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'CosineAnealing'"):
        schedules.CosineAnealing  # noqa: B018
    with pytest.raises(AttributeError, match=r"did you mean `Polynomial`"):
        schedules.polynomial  # noqa: B018
    for name, words in {
        "CosineAnnealing": "did you mean `Cosine`?",
        "WarmupCosine": "`Cosine`",
        "get_linear_schedule_with_warmup": "did you mean `Warmup`?",
        "CosineAnnealingWarmRestarts": "use CosineRestarts",
    }.items():
        with pytest.raises(AttributeError, match=re.escape(words)):
            getattr(schedules, name)


def test_rules_of_other_names_are_answered():
    from arrayopt import torch

    for name, words in {
        "FusedLAMB": "use LAMB",
        "DeepSpeedCPUAdam": "use Adam",
        "FusedAdam": "use AdamW, its default, or Adam for",
        "LaProp": "use Adam or SGD, or the Rule from the documentation's gallery",
        "Ranger": "use RAdam(lookahead_steps=6)",
        "PagedAdamW8bit": 'use AdamW with state_dtype="int8"',
        "Lamb": "did you mean `LAMB`?",
        "fused_lam": "dir(arrayopt",
        "FusedNovoGrad": "dir(arrayopt",
        "Lookahead": "use lookahead_steps, a field of each rule",
    }.items():
        for module in (ao, torch):
            with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}; {words}")):
                getattr(module, name)
    assert not hasattr(ao, "_")


def test_groups_and_attributes_are_answered_too(opt):
    with pytest.raises(ValueError, match=r"group '\*': LAMB has no `betas`; pass beta1=0.5, beta2=0.6"):
        ao.Optimizer(np.ones(2), ao.LAMB(), groups={"*": {"betas": (0.5, 0.6)}})
    with pytest.raises(AttributeError, match=r"Optimizer: LAMB has no `betas`; pass beta1=0.5, beta2=0.6"):
        opt.betas = (0.5, 0.6)
    with pytest.raises(AttributeError, match=r"group 'b': LAMB has no `wd`; pass weight_decay=0.1"):
        opt.groups[0].wd = 0.1
    for name, words in foreign_names.OPTIMIZER.items():
        with pytest.raises(AttributeError, match=re.escape(f"Optimizer has no `{name}`; {words}")):
            getattr(opt, name)
    with pytest.raises(AttributeError, match="Optimizer has no `parms`; did you mean `params`"):
        _ = opt.parms
    assert not hasattr(opt, "__array__")


# ---- the numbers of the next step ------------------------------------------------------------------------------------


def test_now_is_what_the_next_step_uses(opt):
    for step in range(3):
        before, lr = opt.params["b"].copy(), opt.now()
        assert lr == pytest.approx(0.1 - 0.01 * step)
        assert type(lr) is float
        opt.step({"w": np.zeros((2, 2)), "b": np.ones(2)})
        trust = np.linalg.norm(before) / np.sqrt(2.0)
        np.testing.assert_allclose(before - opt.params["b"], lr * trust, rtol=1e-5)


def test_now_is_a_dict_where_groups_differ(opt):
    assert opt.now("weight_decay") == {"b": 0.0, "rest": 0.01}
    assert opt.now("clip_value") is None
    opt.groups[0].lr = [0.3, 0.2]
    assert opt.now() == {"b": 0.3, "rest": 0.1}


def test_groups_of_one_label_do_not_hide_each_other():
    groups = [(lambda name, p: name == "a", {"lr": 0.1}), (lambda name, p: name == "b", {"lr": 0.2})]
    opt = ao.Optimizer({x: np.ones(2) for x in "abc"}, ao.SGD(lr=0.3), groups=groups)
    assert opt.now() == {"<lambda>": 0.1, "<lambda> (1)": 0.2, "rest": 0.3}


def test_now_says_what_it_cannot_tell():
    assert ao.Optimizer(np.ones(2), ao.Adafactor()).now() is None
    opt = ao.Optimizer(np.ones(2), ao.SGD(lr=[0.1]))
    with pytest.raises(ValueError, match=r"Optimizer.now: SGD has no `learning_rate`; it is `lr` here"):
        opt.now("learning_rate")
    opt.step(np.ones(2))
    with pytest.raises(ValueError, match="has run out at step 1"):
        opt.now()


def test_tab_completion_shows_public_names():
    assert set(dir(ao)) == {*ao.__all__, "__version__"}
