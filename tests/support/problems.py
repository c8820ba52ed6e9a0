"""Random problems for an optimizer: rule, groups, options, parameters of any dtype and layout, and gradients."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

import arrayopt as ao
from arrayopt.params.trees import flatten

RULES = ("LAMB", "LANS", "CAME", "LARS", "AdamW", "Adam", "SGD", "Adafactor")
RULES += (
    "Lion",
    "RMSprop",
    "NAdam",
    "RAdam",
    "Adan",
    "AdEMAMix",
    "ScheduleFreeAdamW",
    "AdamH",
    "FISTA",
    "AdaBelief",
    "Sophia",
)
COMPLEX = ("LAMB", "AdamW")
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
SHAPES = ((), (1,), (7,), (30,), (3, 2), (1, 1), (5, 1), (1, 4), (9, 17), (2, 1, 3), (2, 3, 2, 2), (0,), (0, 3), (3, 0))

DRAWN = {"state_dtype": (None, "float16", "bfloat16"), "master_weights": ("auto", True, False)}
"""The values from which some options are drawn. 8 bits are in `tests/rules`, and in the table of powers."""

NUMBERS = {
    "lr": [0.0, 1e-3, 0.1],
    "eps": [1e-8, 1e-3],
    "eps_root": [0.0, 1e-8, 1e-3],
    "eps1": [0.0, 1e-30, 1e-8],
    "eps2": [1e-8, 1e-3],  # where u is near m, a smaller one makes rounding errors as large as steps
    "eps_scale": [0.0, 1e-3],
    "weight_decay": [0.0, 0.01, 0.5],
    "clip_value": [None, 0.3, 10.0],
    "clip_tensor_norm": [None, 0.5, 100.0],
    "clip_unit_ratio": [None, 0.01, 10.0],
    "clip_threshold": [None, 0.5, 1.0],
    "min_norm": [None, 0.0, 0.2],
    "max_norm": [None, 1.0, 10.0],
    "min_ratio": [None, 0.0, 0.1],
    "max_ratio": [None, 0.5, 10.0],
    "lookahead_steps": [None, 1, 2],
    "lookahead_alpha": [0.5, 1.0],
    "ema_decay": [None, 0.0, 0.9],
    "decay_rate": [0.0, 0.8, 1.0],
    "trust_coefficient": [1e-3, 1.0],
    "dampening": [0.0, 0.5, 1.0],
    "alpha": [0.5, 0.9, 0.999],
    "initial_scale": [0.0, 1.0],
    "momentum_decay": [0.0, 4e-3, 1.0],
    "threshold": [0.0, 4.1, 5.0],
    "alpha_warmup": [None, 1, 2.5],
    "beta3_warmup": [None, 1, 2.5],
    "warmup_steps": [0.0, 1, 2.5],
    "r": [0.0, 0.5, 1.0],
    "weight_lr_power": [0.0, 1.0, 2.0],
    "radius": [None, 1e-3, 2.0],
    "mars": [None, 0.0, 0.025],
    "gamma": [0.01, 1.0],
    "clip_update": [0.5, 1.0],
    **{name: [0.0, 0.5, 0.9, 0.999] for name in ("beta1", "beta2", "beta3", "momentum")},
}
"""Values of each field that matter: off, ends of its interval, limits that are reached or not."""

PROJECTS = (None, ao.projections.box(-0.5, 0.25), ao.projections.ball(1.5))

GROUPABLE = ("lr", "weight_decay", "grad_centralization", "clip_value", "clip_tensor_norm", "ema_decay", "adapt")
STEPS = 4


def halving(step):
    """A schedule that is a plain function of the step."""
    return 0.1 * 0.5**step


FORMS = {
    "number": lambda x: x,
    "sequence": lambda x: [x, x / 2] * STEPS,
    "array": lambda x: np.asarray(x),
    "schedule": lambda x: ao.schedules.Constant(x),
    "sum": lambda x: ao.schedules.Warmup(x, 2) + 0.0,
}


@st.composite
def rules(draw, names=RULES):
    """A rule with random values in a few fields."""
    kind = getattr(ao, draw(st.sampled_from(names)))
    fields = {f.name: f for f in dataclasses.fields(kind) if f.name != "blocks"}  # tests/engines/test_blocks.py
    chosen = draw(st.sets(st.sampled_from(sorted(fields)), max_size=6))
    given = {}
    for name in sorted(chosen):
        about = fields[name].metadata
        if name == "project":
            given[name] = draw(st.sampled_from(PROJECTS))
        elif name == "seed":
            given[name] = draw(st.sampled_from([0, 1, 2**64 - 1]))
        elif name == "rounding":  # random: tests/rules/test_rounding.py
            given[name] = "nearest"
        elif about.get("flag"):
            given[name] = draw(st.sampled_from(DRAWN.get(name, about.get("options", (True, False)))))
        else:
            given[name] = draw(st.sampled_from(NUMBERS[name]))
            if given[name] is not None and name in ("lr", "weight_decay"):
                given[name] = FORMS[draw(st.sampled_from(sorted(FORMS)))](given[name])
    if kind is ao.CAME:
        given.setdefault("eps2", 1e-8)
    if kind in (ao.SGD, ao.LARS, ao.FISTA):
        given.setdefault("lr", 0.1)
    assume(not (kind is ao.CAME and given.get("beta1") == 0))  # no instability at all: steps of 1/√eps2
    if kind is ao.FISTA:  # the sign of a rounding error would decide whether it restarts
        given["restart"] = False
    if kind is ao.RMSprop and given.get("centered"):  # else the divisor is a variance that is a rounding error
        given |= {"eps": 1e-3, "bias_correction": False, "state_dtype": None}
    if given.get("variant") == "pytorch":
        given |= {"relative_step": False, "scale_parameter": True, "beta1": None, "clip_threshold": 1.5}
    if kind in (ao.CAME, ao.Adafactor):
        relative = given.get("relative_step", kind is ao.Adafactor)
        given["lr"] = None if relative else given.get("lr", 0.01)
        given["warmup_init"] = relative and given.get("warmup_init", False)
    try:
        return kind(**given)
    except ValueError:  # fields that do not go together
        assume(False)


LAYOUTS = {
    "C": lambda x: x,
    "F": lambda x: np.array(x, order="F"),
    "strided": lambda x: np.repeat(x[..., None], 2, axis=-1)[..., 1],
    "reversed": lambda x: x[::-1].copy()[::-1] if x.ndim else x,
    "transposed": lambda x: x.T.copy().T,
    "misaligned": lambda x: np.frombuffer(bytearray(b"." + x.tobytes()), x.dtype, x.size, 1).reshape(x.shape),
    "read-only": lambda x: _read_only(x),
}


def _read_only(x):
    x.flags.writeable = False
    return x


class Values(NamedTuple):
    """The description of an array, from which equal arrays are made."""

    exact: Any
    dtype: str
    layout: str = "C"

    def made(self):
        """Return a new array in its dtype and layout."""
        return LAYOUTS[self.layout](self._rounded())

    def wide(self):
        """The same values in double precision."""
        return self._rounded().astype("complex128" if self.dtype.startswith("complex") else "float64")

    def _rounded(self):
        return np.array(self.exact).astype({"bfloat16": ml_dtypes.bfloat16}.get(self.dtype, self.dtype))


@st.composite
def values(draw, shape, dtypes, kinds):
    """Normally distributed numbers of a random magnitude, of which none, some or all are zero."""
    dtype, layout = draw(st.sampled_from(dtypes)), draw(st.sampled_from(sorted(LAYOUTS)))
    kind, rng = draw(st.sampled_from(kinds)), np.random.default_rng(draw(st.integers(0, 2**16)))
    x = rng.standard_normal(shape) * draw(st.sampled_from([1.0, 1.0, 0.125, 16.0]))
    if dtype.startswith("complex"):
        x = x + 1j * rng.standard_normal(shape)
    x = np.asarray(x) * {"zero": 0.0, "few": rng.random(shape) < 0.5}.get(kind, 1.0)
    if kind in ("inf", "nan") and x.size:
        x.reshape(-1)[rng.integers(x.size)] = float(kind)
    return Values(x, dtype, layout)


class Pair(NamedTuple):
    """A container with its own field names."""

    left: Any
    right: Any


TREES = {
    "dict": lambda xs: {f"p{i}": x for i, x in enumerate(xs)},
    "list": list,
    "tuple": tuple,
    "nested": lambda xs: {"a": [xs[0], None], "b": {"c.d": tuple(xs[1:])}},
    "pair": lambda xs: Pair(xs[0], list(xs[1:])),
    "lone": lambda xs: xs[0],
}


@dataclass
class Problem:
    """Everything that is needed for a run.

    Attributes
    ----------
    rule : Rule
        The rule.
    tree : str
        The kind of tree, of `TREES`, that parameters and gradients come in.
    params : list of Values
        The parameters.
    grads : list of list of Values or None
        For each call of `step` the gradients; None leaves a tensor out.
    groups : list of (set of int, dict)
        Positions of parameters, and what these have for themselves: values of fields, or a rule.
    options : dict
        The Optimizer's.
    """

    rule: Any
    tree: str
    params: list
    grads: list
    groups: list
    options: dict

    def optimizer(self, engine):
        """A new Optimizer."""
        params = TREES[self.tree]([x.made() for x in self.params])
        names = [name for name, x in flatten(params) if x is not None]
        pairs = [(_among({names[i] for i in places}), change) for places, change in self.groups]
        return ao.Optimizer(params, self.rule, groups=pairs, engine=engine, **self.options)

    def step_grads(self, step):
        """The gradients of a call, as a tree like the parameters."""
        return TREES[self.tree]([None if x is None else x.made() for x in self.grads[step]])


def _among(names):
    def among(name, array):
        return name in names

    return among


@st.composite
def problems(draw, rule=None, dtypes=DTYPES, *, plain=False):
    """A `Problem`. If plain, groups do not change the structure, tensors have rank ≤ 2, and there are no reports."""
    rule = draw(rules()) if rule is None else rule
    kinds = [d for d in dtypes if not d.startswith("complex") or (type(rule).__name__ in COMPLEX)]
    if rule.state_dtype is not None or getattr(rule.project, "real_only", False):
        kinds = [d for d in kinds if not d.startswith("complex")]
    if rule.master_weights is True:
        kinds = [d for d in kinds if d in ("float16", "bfloat16")]
    assume(kinds)
    known = [shape for shape in SHAPES if (len(shape) <= 2 or not plain) and (shape or not rule.stacked)]
    shapes = draw(st.lists(st.sampled_from(known), min_size=1, max_size=5))
    tree = draw(st.sampled_from(sorted(TREES)))
    shapes = shapes[:1] if tree == "lone" else shapes
    params = [draw(values(shape, kinds, ["all", "all", "all", "zero"])) for shape in shapes]
    if rule.stacked:  # fused engines refuse stacked arrays that they cannot write in place
        params = [x._replace(layout="C") if x.layout == "read-only" else x for x in params]
    accumulate = draw(st.sampled_from([1, 1, 1, 2]))
    scale = draw(st.sampled_from([None, None, 4.0, ao.LossScale(init=16.0, window=2)]))
    skip = draw(st.booleans())
    options = {
        "accumulate": accumulate,
        "loss_scale": scale,
        "skip_nonfinite": skip,
        "clip_norm": draw(st.sampled_from([None, None, 0.5, 1e4, [0.5] * 9])),
        "stats": not plain and draw(st.booleans()),
    }
    strange = ["inf", "nan"] if scale is not None or skip else []

    def grad(p):
        same = [d for d in kinds if d.startswith("complex") == p.dtype.startswith("complex")]
        found = draw(values(p.exact.shape, [p.dtype, p.dtype, p.dtype, *same], ["all"] * 6 + ["few", "zero", *strange]))
        return draw(st.sampled_from([found, found, found, None]))

    grads = [[grad(p) for p in params] for _ in range(STEPS)]
    groups = []
    if draw(st.booleans()):
        places = set(range(len(params)))
        for _ in range(draw(st.integers(1, 2))):
            some = draw(st.sets(st.sampled_from(sorted(places)), min_size=1)) if places else set()
            fields = [f.name for f in dataclasses.fields(rule) if f.name in (GROUPABLE[:2] if plain else GROUPABLE)]
            if some and not plain and not any(d.startswith("complex") for d in kinds) and draw(st.booleans()):
                other = draw(rules())
                fits = other.master_weights == rule.master_weights and other.stacked == rule.stacked
                groups += [(some, {"rule": other})] if fits else []
                places -= some
                continue
            name = draw(st.sampled_from(fields))
            if name == "lr" and rule.lr is None:
                continue
            change = NUMBERS.get(name, [True, False])
            if some:
                groups.append((some, {name: draw(st.sampled_from(change))}))
            places -= some
    return Problem(rule, tree, params, grads, groups, options)
