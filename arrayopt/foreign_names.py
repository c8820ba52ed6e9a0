"""Names in other libraries, and what to do instead of using such a name here."""

import re
from collections.abc import Mapping

OPTAX = {"learning_rate": "lr", "b1": "beta1", "b2": "beta2", "b3": "beta3"}
"""optax's names of fields of rules."""

SAME = {
    # rules
    "b1": ("beta1", "momentum"),
    "b2": ("beta2",),
    "b3": ("beta3",),
    "d": ("clip_threshold",),
    "beta1": ("momentum",),
    "beta_1": ("beta1", "momentum"),
    "beta_2": ("beta2",),
    "beta_3": ("beta3",),
    "clip_gradient": ("clip_value",),
    "clipnorm": ("clip_tensor_norm",),
    "clipvalue": ("clip_value",),
    "ema_momentum": ("ema_decay",),
    "epsilon": ("eps", "eps1"),
    "correct_bias": ("bias_correction",),
    "decoupled_decay": ("decoupled",),
    "decoupled_weight_decay": ("decoupled",),
    "eta": ("trust_coefficient", "lr"),
    "k": ("lookahead_steps",),
    "l2": ("weight_decay",),
    "lambda_": ("weight_decay",),
    "lower_bound": ("min_norm",),
    "max_precond_dim": ("max_precondition_dim",),
    "momentum": ("beta1",),
    "mu": ("momentum", "beta1"),
    "n_sma_threshold": ("threshold",),
    "mu_dtype": ("state_dtype",),
    "rho": ("alpha",),
    "trust_coeff": ("trust_coefficient",),
    "upper_bound": ("max_norm",),
    "use_nesterov": ("nesterov",),
    **dict.fromkeys(("history_size", "m", "maxcor", "memory_size"), ("memory",)),
    "line_search_fn": ("line_search",),
    "wd": ("weight_decay",),
    "weight_decouple": ("decoupled",),
    "weight_decay_rate": ("weight_decay",),
    # minimize
    "fun": ("f", "value"),
    "gtol": ("tol",),
    "max_iter": ("max_steps",),
    "maxfun": ("max_steps",),
    "maxiter": ("max_steps",),
    "nfev": ("evaluations",),
    "nit": ("steps",),
    "pgtol": ("tol",),
    "success": ("converged",),
    "x": ("params",),
    "x0": ("params",),
    # rules and schedules
    "base_lr": ("lr", "init_value", "peak_value", "value"),
    "init_lr": ("init_value", "value", "lr"),
    "initial_learning_rate": ("init_value", "value", "lr"),
    "learning_rate": ("lr", "peak_value", "init_value", "value"),
    "lr": ("peak_value", "init_value", "value"),
    "step_size": ("decay_steps", "lr"),
    # monitors
    **dict.fromkeys(("every_n_steps", "freq", "frequency", "interval", "log_every", "log_freq"), ("every",)),
    **dict.fromkeys(("capacity", "last", "maxlen", "max_steps"), ("keep",)),
    # schedules
    "boundaries": ("milestones",),
    "cycle_steps": ("decay_steps",),
    "decay_steps": ("cycle_steps", "total_steps"),
    "end_learning_rate": ("end_value",),
    "end_lr": ("end_value",),
    "eta_min": ("end_value",),
    "final_lr": ("end_value",),
    "first_decay_steps": ("cycle_steps",),
    "gamma": ("decay_rate",),
    "init_value": ("value",),
    "is_stair": ("staircase",),
    "learning_rates": ("values",),
    "max_lr": ("peak_value", "init_value"),
    "milestone": ("milestones", "boundaries"),
    "milestones": ("boundaries",),
    "min_lr": ("end_value",),
    "num_training_steps": ("decay_steps", "total_steps"),
    "num_warmup_steps": ("warmup_steps",),
    "peak_lr": ("peak_value", "init_value"),
    "peak_value": ("init_value",),
    "rate": ("decay_rate",),
    "schedulers": ("schedules",),
    "step_per_epoch": ("steps_per_epoch",),
    "T_0": ("cycle_steps",),
    "T_max": ("decay_steps", "cycle_steps"),
    "T_mult": ("cycle_multiplier",),
    "t_mul": ("cycle_multiplier",),
    "total_iters": ("decay_steps", "total_steps", "warmup_steps"),
    "total_steps": ("decay_steps",),
    "transition_steps": ("decay_steps", "total_steps"),
    "warmup_iters": ("warmup_steps",),
}
"""The fields that a name may stand for; the first one that exists is meant."""

SPREAD = {
    "betas": (("beta1", "beta2", "beta3"), ("beta1", "beta2"), ("b1", "b2", "b3"), ("b1", "b2")),
    "eps": (("eps1", "eps_scale", "eps2"), ("eps1", "eps2"), ("eps1", "eps_scale")),
}
"""Names for several values at once, with the fields that they stand for, in order."""

GLOBAL_CLIP = (
    *("clip_by_global_norm", "clip_grad_norm", "clip_grad_norm_", "global_clipnorm", "grad_clip", "gradient_clip_val"),
    *("gradient_clipping", "max_grad_norm", "max_norm"),
)
"""Names for a limit of the norm of all gradients together."""

_OPTION = "an option of the optimizer: Optimizer(params, rule, {}=...)"
_SCHEDULED = "use a schedule, such as lr=Cosine(0.1, decay_steps=1000); see arrayopt.schedules"
_ENGINE = "leave it out: the optimizer chooses an engine for the arrays"
_GROUPS = 'use groups: Optimizer(params, rule, groups={"*.bias": {"weight_decay": 0.0}})'

RULE: Mapping[str, str] = {
    **{
        name: f"it is {_OPTION.format(option)}"
        for option, names in {
            "clip_norm": ("clip_norm", *GLOBAL_CLIP),
            "loss_scale": ("loss_scale", "grad_scale", "rescale_grad"),
            "accumulate": ("accumulate", "gradient_accumulation_steps"),
            "skip_nonfinite": ("skip_nonfinite",),
            "groups": ("groups",),
            "engine": ("engine",),
            "stats": ("stats",),
        }.items()
        for name in names
    },
    **dict.fromkeys(("capturable", "differentiable", "foreach", "fused"), _ENGINE),
    **dict.fromkeys(
        ("exclude_from_layer_adaptation", "exclude_from_weight_decay", "mask", "weight_decay_mask"), _GROUPS
    ),
    **dict.fromkeys(
        (
            *("T_0", "T_max", "T_mult", "decay_rate", "decay_steps", "end_value", "eta_min", "gamma", "init_value"),
            *("max_lr", "milestones", "min_lr", "num_training_steps", "num_warmup_steps", "peak_value", "schedule"),
            *("scheduler", "total_iters", "total_steps", "transition_steps", "warmup", "warmup_steps"),
        ),
        _SCHEDULED,
    ),
    **dict.fromkeys(
        ("bits", "optim_bits", "precision", "quantize", "state", "state_bits", "storage"),
        'set state_dtype="int8" on the rule for a state in 8 bits',
    ),
    "beta2_decay": "it is -decay_rate here",
    **dict.fromkeys(
        ("max_eval", "max_iter", "maxiter", "tolerance_change", "tolerance_grad"),
        "one update is one step; minimize(f, params, LBFGS(), max_steps=500, tol=1e-6) makes many, and stops",
    ),
    "bounds": "pass project=projections.box(low, high)",
    "corrected_weight_decay": "no field does that; leave it out, or make weight_decay a schedule",
    "decoupled_decay": "its decay is of one kind, which its page describes; leave it out",
    "decay": "pass weight_decay; or, for a learning rate that decays, lr=InverseTime(0.1, 1.0, decay_steps=1000)",
    "maximize": "negate the gradients",
    "params": "a rule holds no parameters; pass them to the optimizer: Optimizer(params, rule)",
    "trust_clip": "pass max_ratio=1.0",
    "t_alpha_beta3": "pass both alpha_warmup and beta3_warmup",
    "weight_decay": "nothing decays under it; leave it out",
    "use_ema": "pass ema_decay, such as ema_decay=0.999",
}
"""What to do instead of passing a name to a rule."""

_DICTS = 'pass group dicts: [{"params": biases, "weight_decay": 0.0}, {"params": others}]'

DOOR: Mapping[str, str] = {
    **RULE,
    **{name: _DICTS for name, said in RULE.items() if said == _GROUPS},
    **{name: f"{said}; or use torch.optim.lr_scheduler" for name, said in RULE.items() if said == _SCHEDULED},
    **dict.fromkeys(GLOBAL_CLIP, "it is the option clip_norm here"),
    **dict.fromkeys(("loss_scale", "grad_scale", "rescale_grad"), "use torch.amp.GradScaler"),
    **dict.fromkeys(("accumulate", "gradient_accumulation_steps"), "call backward() several times before each step()"),
    "groups": _DICTS,
    "params": "parameters come first: LAMB(params, lr=1e-3)",
    "rule": 'pass it in a group: [{"params": matrices, "rule": Muon, "lr": 0.02}, {"params": others}]',
}
"""What to do instead of passing a name to an optimizer of `arrayopt.torch`, or to one of its groups."""

_WARMUP = "put a warm-up before it: Join([Warmup(0.1, 100), Cosine(0.1, 900)], boundaries=[100])"

SCHEDULE: Mapping[str, str] = {
    **dict.fromkeys(("num_warmup_steps", "warmup", "warmup_iters", "warmup_steps"), _WARMUP),
    **dict.fromkeys(("start_factor", "end_factor"), "pass values and not factors: init_value, end_value"),
    **dict.fromkeys(
        ("base_momentum", "cycle_momentum", "max_momentum"), "give the rule's momentum or beta1 a schedule of its own"
    ),
    **dict.fromkeys(("last_epoch", "last_step"), "set opt.step_count instead: a schedule is a function of the step"),
    "alpha": "pass end_value, which is alpha times the first value",
    "div_factor": "pass init_value, which is peak_value / div_factor",
    "final_div_factor": "pass end_value, which is init_value / final_div_factor",
    "gamma": "pass values, one for each piece",
    "init_value": "it begins at 0; Linear(init_value, end_value, decay_steps) begins anywhere",
    "lr_lambda": "any function of the step can stand in place of a schedule",
    "optimizer": "a schedule holds no optimizer; pass it to a rule: LAMB(lr=Cosine(0.1, decay_steps=1000))",
    "transition_begin": "begin later with Join([Constant(0.1), Cosine(0.1, 900)], boundaries=[100])",
}
"""What to do instead of passing a name to a schedule."""

_GRADIENT = "`f` returns both: f(params) -> (value, grads)"
SOLVER: Mapping[str, str] = {
    **dict.fromkeys(("disp", "iprint", "verbose"), "pass progress=True or a callback"),
    **dict.fromkeys(("f_tol", "ftol", "xtol", "rtol", "atol"), "only the gradient ends a run: pass tol"),
    **dict.fromkeys(("fprime", "grad", "gradient", "has_aux", "jac", "value_and_grad"), _GRADIENT),
    **dict.fromkeys(("history_size", "maxcor", "memory"), "pass a rule, such as LBFGS(memory=20)"),
    **dict.fromkeys(("method", "optimizer"), "pass a rule, such as LBFGS(), CG() or SPG()"),
    **dict.fromkeys(("learning_rate", "lr"), "pass a rule that has one, such as Adam(lr=0.1)"),
    **dict.fromkeys(("constraints", "hess", "hessp"), "use scipy.optimize.minimize"),
    "args": "pass a function of the parameters alone, such as lambda params: f(params, data)",
    "bounds": "pass project=projections.box(low, high)",
    "maxls": "a line search takes at most 20 evaluations",
    "options": "it has max_steps and tol; or pass a rule, such as LBFGS(memory=20)",
}
"""What to do instead of passing a name to `minimize`; most are SciPy's."""

OPTIMIZER: Mapping[str, str] = {
    "apply_gradients": "call opt.step(grads)",
    "defaults": "opt.rule has the values",
    "engine": "opt.explain() names it",
    "get_last_lr": "call opt.now()",
    "global_step": "read opt.step_count",
    "iterations": "read opt.step_count",
    "lr_now": "call opt.now()",
    "minimize": "compute the gradients, and call opt.step(grads)",
    "param_groups": "read opt.groups; opt.now() is the learning rate as a number",
    "update": "call opt.step(grads); arrayopt.update is the functional form",
    "zero_grad": "there is nothing to zero: pass gradients to opt.step(grads)",
}
"""What to do instead of reading an attribute of an optimizer."""

INNER: Mapping[str, str] = {
    **{
        name: f"it is opt.inner.{name} here"
        for name in ("averaged", "clip_norm", "explain", "nonfinite", "now", "skipped_layers", "stats", "step_count")
    },
    **dict.fromkeys(("advance", "launch"), "captured steps need an arrayopt.Optimizer"),
    **dict.fromkeys(("groups", "params"), "read opt.param_groups"),
    **dict.fromkeys(("eval", "train"), "opt.inner.averaged() returns the parameters to evaluate"),
    "add_group": "call opt.add_param_group",
    "after_step": "call opt.register_step_post_hook",
    "before_step": "call opt.register_step_pre_hook",
    "get_last_lr": "call opt.inner.now()",
    "give": "make the optimizer with release=True: the backward pass gives gradients then",
    "load": "call opt.load_state_dict(torch.load(path))",
    "loss_scale": "use torch.amp.GradScaler",
    "save": "call torch.save(opt.state_dict(), path)",
}
"""What to do instead of reading an attribute of `arrayopt.Optimizer` on an optimizer of `arrayopt.torch`."""

ABSENT = {
    **dict.fromkeys(("adadelta", "adagrad", "adamax", "asgd", "rprop"), "RMSprop or AdamW, or a Rule of your own"),
    **dict.fromkeys(
        (
            *("adabound", "adamod", "adopt", "fromage", "grams", "laprop", "novograd", "qhadam", "sgdw", "signum"),
            *("stableadamw", "yogi"),
        ),
        "Adam or SGD, or the Rule from the documentation's gallery",
    ),
    **dict.fromkeys(("momentum", "nesterov", "sgdm"), "SGD(lr=0.1, momentum=0.9)"),
    **dict.fromkeys(("dadaptadam", "dadaptsgd", "dog", "momo"), "Prodigy"),
    **dict.fromkeys(("deepspeedcpuadam", "fusedadam"), "AdamW, its default, or Adam for adam_w_mode=False"),
    **dict.fromkeys(("averagedmodel", "ema", "swa"), "ema_decay, a field of each rule"),
    "adahessian": "Sophia",
    "adamwschedulefree": "ScheduleFreeAdamW",
    "ftrl": "SGD(lr=0.1, project=projections.soft_threshold(l1))",
    "gradscaler": "Optimizer(params, rule, loss_scale=LossScale()), or torch.amp.GradScaler in a PyTorch loop",
    "load": "opt.load(path)",
    "lookahead": "lookahead_steps, a field of each rule",
    "ranger": "RAdam(lookahead_steps=6)",
    "save": "opt.save(path)",
    "shampoo": "SOAP",
    **dict.fromkeys(("cosineannealinglr", "cosinedecay", "cosinedecayschedule"), "Cosine(lr, decay_steps=1000)"),
    **dict.fromkeys(("constant", "constantschedule", "lambdalr"), "a number, or any function of the step"),
    **dict.fromkeys(("cosineannealingwarmrestarts", "cosinedecayrestarts"), "CosineRestarts"),
    **dict.fromkeys(("joinschedules", "sequentiallr"), "Join(schedules, boundaries)"),
    **dict.fromkeys(("multisteplr", "piecewiseconstantschedule"), "PiecewiseConstant(milestones, values)"),
    "reducelronplateau": "opt.lr = 0.5 * opt.lr in your loop",
    "steplr": "Exponential(lr, gamma, decay_steps=step_size, staircase=True)",
    "warmupcosinedecayschedule": "Join([Warmup(lr, 100), Cosine(lr, 900)], [100])",
    **dict.fromkeys(("bounds", "clamp", "clip"), "projections.box(low, high)"),
    "l1": "projections.soft_threshold(l1)",
    "mask": "projections.support(mask)",
    "positive": "projections.nonnegative",
}
"""What to use instead of names that do not exist here, in lower case."""

STORED = re.compile(r"(?:distributed|deepspeed|cpu|fused|nv|paged)*(.*?)(4bit|8bit)?(?:32bit)?")
"""Matches other libraries' names, in lower case, of variants of a rule that differ in their storage or launches."""
