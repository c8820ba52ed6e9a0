"""The options with which all common tests run each rule. A new rule needs rows here, but no new test."""

import arrayopt as ao
from tests.support.slow import marked

CASES = {
    "LAMB": [
        {},
        {"bias_correction": False, "weight_decay": 0.1, "lr": 0.05},
        {"clip_value": 0.3, "min_norm": 0.2, "max_norm": 1.5},
        {"min_ratio": 0.1, "max_ratio": 1.0, "beta1": 0.0},
        {"adapt": False, "grad_centralization": True},
        {"clip_unit_ratio": 0.3, "lookahead_steps": 2, "lookahead_alpha": 0.8, "ema_decay": 0.9, "lr": 0.05},
        {"grad_averaging": False, "eps_root": 1e-3, "lr": 0.01},
        {"caution": True, "lr": 0.05, "weight_decay": 0.1},
    ],
    "LANS": [
        {},
        {"sequential": True, "weight_decay": 0.1, "lr": 0.05},
        {"clip_value": 0.3, "min_norm": 0.2, "max_norm": 1.5, "bias_correction": False},
        {"adapt": False, "sequential": True, "grad_centralization": True},
        {"min_ratio": 0.5, "max_ratio": 2.0, "beta2": 0.9},
    ],
    "CAME": [
        {"lr": 0.01},
        {"lr": 0.01, "decay_rate": 0.8, "beta3": 0.99, "weight_decay": 0.1},
        {"lr": 0.02, "scale_parameter": True, "clip_threshold": 0.5, "eps1": 1e-20, "eps2": 1e-10, "eps_scale": 0.01},
        {"relative_step": True, "clip_threshold": None},
        {"relative_step": True, "warmup_init": True, "scale_parameter": True, "grad_centralization": True},
        {"lr": 0.01, "clip_value": 0.5, "clip_tensor_norm": 1.0, "ema_decay": 0.5},
    ],
    "LARS": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.01, "eps": 1e-8},
        {"lr": 1.0, "weight_decay": 0.1, "trust_coefficient": 0.01, "decayed_norm": True},
        {"lr": 0.1, "adapt": False, "grad_centralization": True},
        {"lr": 2e-3, "nesterov": True, "trust_clip": True, "weight_decay": 0.01},
        {"lr": 0.1, "clip_value": 0.5, "clip_after_ratio": True, "trust_coefficient": 0.05, "lr_in_momentum": True},
        {"lr": 0.1, "caution": True, "nesterov": True, "weight_decay": 0.01},
    ],
    "AdamW": [
        {},
        {"bias_correction": False, "eps": 1e-6, "lr": 0.01},
        {"amsgrad": True, "beta2": 0.5, "weight_decay": 0.0},
        {"amsgrad": True, "bias_correction": False, "grad_centralization": True},
        {"beta2": 0.9999999, "beta1": 0.99},  # where 1 - beta2 ** t cancels
        {"nesterov": True, "eps_root": 1e-4, "lr": 0.01},
        {"nesterov": True, "bias_correction": False},
        {"caution": True, "lr": 0.01},
        {"mars": 0.1, "lr": 0.01, "beta1": 0.95},
        {"mars": 0.025, "caution": True, "lr": 0.01, "clip_value": 0.5},
    ],
    "Adam": [
        {},
        {"weight_decay": 0.1, "amsgrad": True, "beta2": 0.5},
        {"bias_correction": False, "beta1": 0.0},
        {"nesterov": True, "weight_decay": 0.1},
    ],
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "dampening": 0.5},
        {"lr": 0.1, "dampening": 0.5, "grad_centralization": True},
        {"lr": 0.1, "clip_tensor_norm": 0.5, "clip_value": 0.5, "lookahead_steps": 3},
        {"lr": 0.01, "momentum": 1.0},
    ],
    "Adafactor": [
        {},
        {"lr": 0.01, "relative_step": False, "scale_parameter": False, "weight_decay": 0.1},
        {"warmup_init": True, "beta1": 0.9, "clip_threshold": None},
        {"decay_rate": 0.5, "eps1": 1e-20, "eps_scale": 0.01, "clip_threshold": 0.5, "grad_centralization": True},
        {
            "lr": 0.05,
            "relative_step": False,
            "factored": False,
            "lr_in_momentum": True,
            "beta1": 0.8,
            "weight_decay": 0.1,
        },
    ],
    "Lion": [
        {},
        {"lr": 0.01, "weight_decay": 0.1, "beta1": 0.5},
        {"lr": 0.01, "weight_decay": 0.1, "decoupled": False},
        {"lr": 0.01, "caution": True, "weight_decay": 0.1},
        {"lr": 0.01, "mars": 0.1, "beta1": 0.95, "beta2": 0.95},
    ],
    "RMSprop": [
        {},
        {"lr": 1e-3, "momentum": 0.9, "centered": True},
        {"momentum": 0.5, "nesterov": True, "eps_in_sqrt": True, "initial_scale": 1.0, "lr_in_momentum": True},
        {"bias_correction": True, "decoupled": True, "weight_decay": 0.1, "alpha": 0.9},
        {"weight_decay": 0.1, "alpha": 0.9},
    ],
    "NAdam": [
        {},
        {"weight_decay": 0.1, "decoupled": True, "momentum_decay": 0.5},
        {"weight_decay": 0.1, "momentum_decay": 0.0},
        {"caution": True, "decoupled": True, "weight_decay": 0.1},
    ],
    "RAdam": [
        {},
        {"weight_decay": 0.1, "beta2": 0.98, "threshold": 4.5, "nesterov": True},
        {"weight_decay": 0.1, "decoupled": True, "threshold": 4.1, "eps_root": 1e-3},
    ],
    "Adan": [
        {},
        {"lr": 0.01, "weight_decay": 0.1, "no_prox": True, "eps_root": 1e-3, "weak_differences": True},
        {"lr": 0.01, "weight_decay": 0.1, "beta3": 0.9, "grad_centralization": True},
        {"lr": 0.01, "weight_decay": 0.1, "caution": True},
    ],
    "AdEMAMix": [
        {},
        {"alpha_warmup": 4, "beta3_warmup": 5, "weight_decay": 0.1},
        {"decoupled": False, "weight_decay": 0.1, "eps_root": 1e-4, "beta3": 0.99, "alpha": 2.0},
    ],
    "ScheduleFreeAdamW": [
        {},
        {"lr": 0.01, "warmup_steps": 4, "weight_decay": 0.1},
        {"r": 1.0, "weight_lr_power": 0.5, "beta1": 0.5, "warmup_steps": 2.5},
    ],
    "AdamH": [
        {},
        {"lr": 0.1, "radius": 2.0, "bias_correction": False},
        {"lr": 0.5, "beta1": 0.5, "clip_value": 0.3},
    ],
    "AdaBelief": [
        {"eps_root": 1e-8},
        {"lr": 0.01, "weight_decay": 0.1, "decoupled": False, "eps_root": 1e-8},
        {"lr": 0.01, "weight_decay": 0.1, "nesterov": True, "eps": 1e-8, "eps_root": 1e-6, "beta1": 0.5},
    ],
    "Sophia": [
        {},
        {"lr": 0.01, "weight_decay": 0.1, "gamma": 0.5, "eps": 0.3, "bias_correction": False},
        {"clip_update": 0.5, "eps": 0.1, "clip_tensor_norm": 1.0},
    ],
    "FISTA": [
        {"lr": 0.1},
        {"lr": 0.1, "restart": False, "grad_centralization": True},
        {"lr": 0.5, "clip_value": 0.3},
    ],
}

MATRICES = {
    "Muon": [
        {"lr": 0.02},
        {"lr": 0.1, "nesterov": False, "scale": "match_rms_adamw", "weight_decay": 0.0, "grad_centralization": True},
        {"lr": 0.02, "bias_correction": True, "matrix": "last", "momentum": 0.5, "clip_tensor_norm": 0.5},
        {
            "lr": 0.02,
            "bias_correction": True,
            "nesterov": False,
            "scale": "none",
            "eps": 1e-3,
            "ns_steps": 2,
            "eps_added": True,
        },
        {"lr": 0.02, "lookahead_steps": 2, "ema_decay": 0.9, "clip_value": 0.5, "ns_coefficients": ((2.0, -1.5, 0.5),)},
        {"lr": 0.02, "scale": "last", "ns_steps": 2},
        {"lr": 0.02, "caution": True, "ns_steps": 2},
    ],
    "NorMuon": [
        {"lr": 0.02},
        {"lr": 0.1, "matrix": "last", "beta2": 0.5, "scale": "match_rms_adamw", "bias_correction": True, "eps2": 1e-6},
    ],
    "MuonH": [
        {"lr": 0.02},
        {"lr": 0.1, "radius": 3.0, "matrix": "last", "nesterov": False},
        {"lr": 0.1, "matrix": "last"},
    ],
}
"""Rules only for tensors of rank ≥ 2. Their common tests are in `tests.rules.test_matrices`."""

BRANCHED = {
    "SOAP": [
        {},
        {"lr": 0.1, "precondition_frequency": 1, "weight_decay": 0.1, "shampoo_beta": 0.5, "beta1": 0.8},
        {"precondition_frequency": 2, "matrix": "last", "bias_correction": False, "max_precondition_dim": 3},
        {"lr": 0.02, "precondition_frequency": 2, "clip_tensor_norm": 2.0, "ema_decay": 0.9, "eps": 1e-3, "beta2": 0.0},
    ],
}
"""Rules of which some updates are not fused. Their common tests are those of `MATRICES`."""

JOINT = {
    "Prodigy": [
        {"d0": 0.01},
        {"d0": 0.01, "weight_decay": 0.1, "decouple": False, "growth_rate": 1.5},
        {"d0": 0.01, "bias_correction": True, "safeguard_warmup": True},
    ],
    "LBFGS": [
        {"lr": 0.1, "memory": 2, "line_search": None},
        {"lr": 0.1, "memory": 1, "line_search": None, "joint": False},
        {"lr": 0.1, "memory": 3},
    ],
}
"""Rules with totals over all tensors. They are in the common tests that compare whole runs."""

REFERENCE = "array_api"  # the engine that runs a rule as it is written, and so gives the functional form's bits
# the libraries whose arrays each engine takes: every common test runs on all of these
ENGINES = {REFERENCE: ("numpy", "array_api_strict", "torch", "jax")}
PLACES = [(engine, library) for engine, libraries in ENGINES.items() for library in libraries]

ALL = [(name, options) for name, rows in CASES.items() for options in rows]
IDS = [f"{name}-{i}" for name, rows in CASES.items() for i in range(len(rows))]

RUNS = ALL + [(name, options) for name, rows in JOINT.items() for options in rows]
"""The rows of tests that compare whole runs."""
RUN_IDS = IDS + [f"{name}-{i}" for name, rows in JOINT.items() for i in range(len(rows))]

QUICK_ROWS = marked(((row,) for row in range(len(ALL))), lambda row: int(IDS[row][-1]) < 3, lambda row: IDS[row])
"""All rows; `make test` runs the first three of each rule. For tests that are slow without compiling."""


def each_run(library, row, dtype):
    """Whether `make test` runs a row on a library.

    It runs the first row of each rule, and on NumPy all rows in float64. JAX, which compiles, and array-api-strict run
    only float32, except LAMB.
    """
    name, options = ALL[row]
    if options is CASES[name][0]:
        return library in ("numpy", "torch") or dtype == "float32" or name == "LAMB"
    return library == "numpy" and dtype == "float64"


def make(name, options):
    """Return the rule of a row."""
    return getattr(ao, name)(**options)


ROWS = [(name, i) for name, rows in MATRICES.items() for i in range(len(rows))]
"""Each row of `MATRICES`."""

BRANCHED_ROWS = [(name, i) for name, rows in BRANCHED.items() for i in range(len(rows))]
"""Each row of `BRANCHED`."""

SMALL = {
    "square": (4, 4), "wide": (3, 7), "tall": (7, 3), "row": (1, 5), "column": (5, 1), "kernel": (4, 2, 3, 2),
    "batch": (3, 4, 2), "same": (4, 4), "empty": (0, 3), "still": (3, 4), "huge": (3, 4), "tiny": (5, 3),
    "dead": (2, 3),
}  # fmt: skip
LARGE = {"bands": (300, 200), "wide bands": (140, 260), "small": (5, 6), "many": (70, 9, 8), "rank 4": (2, 3, 40, 30)}
"""The shapes in the tests of rules for matrices."""

FAR = {"float64": 5e-13, "float32": 2e-4, "bfloat16": 2.0**-7, "float16": 2.0**-9}
