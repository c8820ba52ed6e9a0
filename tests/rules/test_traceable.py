"""Rules can be run on any array object: here one that shows only shape, dtype and a short list of operations.

It cannot be indexed, iterated, compared in Python or turned into numbers, so a rule that it passes through can be
traced, and what it records says whether a rule ever decides by a value.
"""

import operator
from types import SimpleNamespace

import numpy as np
import pytest

import arrayopt as ao
from tests.support.cases import ALL, IDS, make
from tests.support.tolerances import TOLERANCES

ELEMENTWISE = ("minimum", "maximum", "clip", "sqrt", "abs", "sign", "exp", "log", "square", "isfinite")
PARTS = ("real", "imag", "conj")
OTHERS = ("where", "astype", "sum", "mean", "max", "expand_dims", "zeros_like", "ones_like")
SCALAR_ONLY = ("expm1",)  # for bias correction without cancellation, where t or beta is traced
ARITHMETIC = ("add", "sub", "mul", "truediv", "mod", "pow")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

SHAPES = {"scalar": (), "vector": (5,), "matrix": (3, 2), "deep": (2, 3, 2), "zero": (3, 2), "silent": (3, 2)}
STEPS = 3


class Recorder:
    """The operations done so far, and the namespace that does them: nothing but what is listed above."""

    __name__ = "recorder"

    def __init__(self):
        self.done = []

    def __getattr__(self, name):
        if name not in ELEMENTWISE + PARTS + OTHERS + SCALAR_ONLY:
            raise AttributeError(f"a rule may not use xp.{name}")
        return lambda *args, **options: self.run(name, getattr(np, name), *args, **options)

    def run(self, name, function, *args, **options):
        """Do an operation on the arrays inside, if it is one of the standard's, and write it down."""
        arrays = [x for x in args if isinstance(x, Opaque)]
        strange = [x for x in args if not isinstance(x, Opaque | bool | int | float) and name != "astype"]
        if not arrays or strange:
            raise TypeError(f"xp.{name} of {args}")
        if name == "where" and arrays[0].dtype != bool:
            raise TypeError(f"xp.where on {arrays[0].dtype}")
        if name == "where" and len(arrays) == 1:
            raise TypeError("xp.where between two Python numbers has no dtype")
        if name in SCALAR_ONLY and arrays[0].ndim:
            raise TypeError(f"a rule may use xp.{name} on 0-d arrays only")
        if len({x.dtype.type for x in arrays if x.dtype != bool} & {np.float32, np.float64}) > 1:
            raise TypeError(f"xp.{name} of dtypes {[x.dtype for x in arrays]}")
        self.done.append((name, [x.shape if isinstance(x, Opaque) else "number" for x in args], sorted(options)))
        with np.errstate(divide="ignore"):  # log(0) of a traced beta of 0
            return Opaque(function(*[x.inside if isinstance(x, Opaque) else x for x in args], **options), self)


class Opaque:
    """An array that only shows its shape and dtype; its namespace is the recorder."""

    __array_ufunc__ = None
    __hash__ = None

    def __init__(self, values, recorder):
        self.inside, self.recorder = np.asarray(values), recorder
        self.inside.flags.writeable = False
        self.shape, self.ndim, self.dtype = self.inside.shape, self.inside.ndim, self.inside.dtype

    def __array_namespace__(self, *, api_version=None):
        return self.recorder

    def __and__(self, other):
        if not (isinstance(other, Opaque) and self.dtype == other.dtype == bool):
            raise TypeError("& of what is not boolean")
        return self.recorder.run("and", operator.and_, self, other)

    def __neg__(self):
        return self.recorder.run("neg", operator.neg, self)


def _binary(name):
    function = getattr(operator, name)
    return lambda self, other: self.recorder.run(name, function, self, other)


def _reflected(name):
    function = getattr(operator, name)
    return lambda self, other: self.recorder.run(name, function, other, self)


def _refused(name):
    def refuse(self, *args, **options):
        raise TypeError(f"{name} of an array that is traced")

    return refuse


REFUSED = (
    "bool",
    "float",
    "int",
    "complex",
    "index",
    "len",
    "iter",
    "getitem",
    "setitem",
    "array",
    "dlpack",
    "contains",
)
for _name in ARITHMETIC:
    setattr(Opaque, f"__{_name}__", _binary(_name))
    setattr(Opaque, f"__r{_name}__", _reflected(_name))
for _name in COMPARISONS:
    setattr(Opaque, f"__{_name}__", _binary(_name))
for _name in REFUSED:
    setattr(Opaque, f"__{_name}__", _refused(_name))


# ---- rules on opaque arrays ------------------------------------------------------------------------------------------

plain = [(row, "float32", "numbers") for row in range(len(ALL))]
traced = [(row, "float64", what) for row in range(len(ALL)) for what in ("numbers", "t", "all")]
in_complex = [
    (row, "complex128", w) for row in range(len(ALL)) for w in ("numbers", "all") if ALL[row][0] in ("LAMB", "AdamW")
]


@pytest.mark.parametrize(
    ("row", "dtype", "arrays"),
    [pytest.param(*case, id=f"{IDS[case[0]]}-{case[1]}-{case[2]}") for case in plain + traced + in_complex],
)
def test_a_rule_passes_opaque_arrays(row, dtype, arrays):
    """`arrays` says which scalars are 0-d arrays: none ("numbers"), the number of updates ("t"), or all."""
    rule, params, grads = make(*ALL[row]), *problem(dtype)
    opt = ao.Optimizer({name: p.copy() for name, p in params.items()}, rule, engine="array_api")
    xp = Recorder()
    opaque = {name: Opaque(p, xp) for name, p in params.items()}
    slots = {name: rule.all_slots(xp, p, str(p.dtype)) for name, p in opaque.items()}
    recorded = {}
    for step, g in enumerate(grads):
        opt.step(g)
        for name, p in opaque.items():
            xp.done = []
            h = scalars(rule, step, arrays, np.empty(0, dtype).real.dtype, xp)
            new, out = rule(xp, p, Opaque(g[name], xp), slots[name], h)
            opaque[name], slots[name] = new, {slot: out[slot] for slot in slots[name]}
            recorded[name, step] = xp.done
            assert set(slots[name]) == set(opt.state[name]) - {"t"}
            equal(new, opt.params[name], dtype, exact=arrays == "numbers")
            for slot, x in slots[name].items():
                equal(x, opt.state[name][slot], dtype, exact=arrays == "numbers")
    for (
        name,
        step,
    ), done in recorded.items():  # the same operations whatever the values are, and whatever a host's t is
        first = 1 if arrays == "numbers" else 0  # which may single out the first update
        assert step < first or done == recorded[name, first]
        assert name not in ("zero", "silent") or done == recorded["matrix", step]
        assert arrays != "numbers" or not {operation for operation, *_ in done} & set(SCALAR_ONLY)


def problem(dtype):
    """Parameters, and gradients for each step; "zero" is a tensor of zeros, "silent" has a gradient only at the end."""
    rng = np.random.default_rng(0)

    def values(shape):
        return np.asarray(
            rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype == "complex128" else 0), dtype
        )

    params = {name: values(shape) * (name != "zero") for name, shape in SHAPES.items()}
    grads = [{name: values(p.shape) for name, p in params.items()} for _ in range(STEPS)]
    for g in grads[:-1]:
        g["silent"] = np.zeros_like(g["silent"])
    return {name: np.asarray(p, dtype) for name, p in params.items()}, grads


def scalars(rule, step, arrays, dtype, xp):
    """The `h` that a rule is called with."""

    def made(x, traced):
        return Opaque(np.asarray(x, dtype), xp) if traced and x is not None else x

    hypers = {name: made(x, arrays == "all") for name, x in rule.at(step).items()}
    return SimpleNamespace(**hypers, t=made(step + 1, arrays != "numbers"))


def equal(actual, expected, dtype, *, exact):
    """The engine's numbers: to the bit where scalars are the host's, else up to how libraries round log and expm1."""
    assert isinstance(actual, Opaque)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if exact:
        assert np.array_equal(actual.inside, expected)
    else:
        near = TOLERANCES[dtype].relative * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(actual.inside, expected, rtol=0, atol=near)


@pytest.mark.parametrize("look", [bool, float, int, complex, len, list, range, np.asarray, np.sqrt, np.from_dlpack])
def test_opaque_arrays_cannot_be_looked_into(look):
    with pytest.raises(TypeError):
        look(Opaque(np.ones(()), Recorder()))


@pytest.mark.parametrize(
    "misuse",
    [
        lambda xp, x: x[0],
        lambda xp, x: 0 in x,
        lambda xp, x: x > 0 and x,
        lambda xp, x: x & x,
        lambda xp, x: x + np.ones(2),
        lambda xp, x: np.ones(2) + x,
        lambda xp, x: x * xp.astype(x, np.float32),
        lambda xp, x: xp.sqrt(2.0),
        lambda xp, x: xp.where(x, x, x),
        lambda xp, x: xp.where(x > 0, 1.0, 0.0),
        lambda xp, x: xp.expm1(x),
        lambda xp, x: xp.reshape(x, (1,)),
    ],
)
def test_the_namespace_holds_nothing_but_what_is_listed(misuse):
    xp = Recorder()
    with pytest.raises((AttributeError, TypeError)):
        misuse(xp, Opaque(np.ones(2), xp))
