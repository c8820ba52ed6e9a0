"""Every public function with every kind of wrong argument: documented exceptions that say who, and nothing changed.

What is strange may also be accepted, where it happens to mean something; then there is nothing to say here.
"""

import copy
import dataclasses
import math
import tempfile
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt import schedules, testing

STRANGE = {
    "None": None,
    "True": True,
    "0": 0,
    "-1": -1,
    "1.5": 1.5,
    "nan": math.nan,
    "inf": math.inf,
    "1e400": 10**400,
    "fraction": Fraction(10**400, 3),
    "1j": 1j,
    "str": "strange",
    "empty str": "",
    "NUL": "a\0b",
    "surrogate": "\ud800",
    "bytes": b"strange",
    "list": [],
    "dict": {},
    "set": {1},
    "tuple": (None, "x"),
    "list of str": ["x", 1],
    "dict of str": {"w": "x"},
    "dict of int": {1: 2},
    "nested": {"w": {"w": {"w": [None]}}},
    "object": object(),
    "type": int,
    "class": ao.LAMB,
    "function": lambda *args: "strange",
    "...": ...,
    "array": np.ones(3),
    "2-d": np.ones((2, 2)),
    "0-d": np.array(-1.0),
    "integers": np.ones((2, 3), int),
    "objects": np.array([object()]),
    "strings": np.array(["a", "b"]),
    "dates": np.array("2020-01-01", "datetime64[D]"),
    "record": np.zeros(2, [("a", "f4")]),
    "torch": torch.ones(2, 3),
    "iterator": None,  # made anew each time
}
CALLED = ("positional argument", "as an integer", "non-string", "keyword arguments only")
"""What classes say themselves that are called with other arguments than they take."""
EXPECTED = (TypeError, ValueError, OSError, RuntimeError, ImportError)


def strange_of(name):
    return iter([1, "x"]) if name == "iterator" else copy.copy(STRANGE[name])


def ones():
    return {"w": np.ones((2, 3)), "b": np.ones(3)}


def optimizer(rule=None, **options):
    opt = ao.Optimizer(ones(), rule or ao.LAMB(lr=0.1), groups={"b": {"weight_decay": 0.0}}, **options)
    opt.step(ones())
    return opt


def frozen(opt):
    """Everything that there is of an optimizer."""
    saved = opt.state_dict()
    slots = {n: {k: v.tobytes() for k, v in x["slots"].items()} for n, x in saved["tensors"].items()}
    params = opt.params
    shown = {n: x.tobytes() for n, x in params.items()}
    for x in saved["tensors"].values():
        x["slots"] = list(x["slots"])
    return repr(saved), slots, shown, id(params), opt.stats.skipped, [repr(g) for g in opt.groups]


def nodes(tree, path=()):
    """The places in a tree of dicts and lists."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    for key, child in list(children):
        yield (*path, key)
        yield from nodes(child, (*path, key))


def with_node(tree, path, value):
    """A copy of a tree with something else at a place."""
    if not path:
        return value
    made = copy.copy(tree)
    new = with_node(made[path[0]], path[1:], value)
    if isinstance(made, tuple):
        return (*made[: path[0]], new, *made[path[0] + 1 :])
    made[path[0]] = new
    return made


WHO = ("Optimizer", "group", "LAMB", "SGD", "AdamW")


def _setting(name):
    def call(opt, x):
        setattr(opt, name, x)

    return call


def _in_group(name):
    def call(opt, x):
        setattr(opt.groups[1], name, x)

    return call


def with_path(function):
    def call(opt, x):
        with tempfile.TemporaryDirectory() as tmp:
            function(opt, x, Path(tmp, "x"))

    return call


def _saved_and_loaded(opt, x, path):
    opt.save(path, params=x)


FIELDS = [f.name for f in dataclasses.fields(ao.LAMB)]
STATE = optimizer(accumulate=2, loss_scale=ao.LossScale()).state_dict()
METHODS = {
    "step": lambda opt, x: opt.step(x),
    "step w": lambda opt, x: opt.step({**ones(), "w": x}),
    "step loss_scale": lambda opt, x: opt.step(ones(), loss_scale=x),
    "add_group": lambda opt, x: opt.add_group(x),
    "add_group leaf": lambda opt, x: opt.add_group({"n": x}),
    "add_group lr": lambda opt, x: opt.add_group({"n": np.ones(3)}, lr=x),
    "add_group more": lambda opt, x: opt.add_group({"n": np.ones(3)}, more=x),
    "before_step": lambda opt, x: opt.before_step(x)(),
    "after_step": lambda opt, x: opt.after_step(x)(),
    "load_state_dict": lambda opt, x: opt.load_state_dict(x),
    "save": lambda opt, x: opt.save(x),
    "save params": with_path(_saved_and_loaded),
    "load": lambda opt, x: opt.load(x),
    **{f"set {name}": _setting(name) for name in [*FIELDS, "clip_norm", "step_count", "loss_scale", "params", "foo"]},
    **{f"set group {name}": _in_group(name) for name in [*FIELDS, "label", "tensors"]},
}


def tried(calls, who, make=None, unchanged=lambda made: None):
    """Call with every strange value, and list all that went wrong: refused in a wrong way, or something changed.

    What is called gets what `make` makes, which is made anew once it may have changed.
    """
    wrong, made = [], None
    for name, call in calls.items():
        for strange in STRANGE:
            made = made or (make() if make else ())
            before = unchanged(made)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    call(made, strange_of(strange)) if make else call(strange_of(strange))
                made = None
            except EXPECTED as error:
                if not isinstance(error, OSError) and not any(x in str(error) for x in who):
                    wrong.append(f"{name}, {strange}: does not say who: {error!r}")
                if unchanged(made) != before:
                    wrong.append(f"{name}, {strange}: has changed something: {error!r}")
                    made = None
            except Exception as error:
                if not (name.startswith("set ") and type(error) is AttributeError):
                    wrong.append(f"{name}, {strange}: {error!r}")
                made = None
    assert not wrong, "\n" + "\n".join(wrong)


def test_methods(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tried(METHODS, WHO, optimizer, frozen)


OPTIONS = ("groups", "engine", "clip_norm", "loss_scale", "skip_nonfinite", "accumulate", "stats", "more")


def test_making_an_optimizer():
    calls = {name: lambda x, name=name: ao.Optimizer(ones(), ao.LAMB(), **{name: x}) for name in OPTIONS}
    calls |= {
        "params": lambda x: ao.Optimizer(x, ao.LAMB()),
        "leaf": lambda x: ao.Optimizer({"w": np.ones(2), "b": x}, ao.LAMB()),
        "group dict": lambda x: ao.Optimizer([{"params": x}, {"params": [np.ones(2)]}], ao.LAMB()),
        "group dict lr": lambda x: ao.Optimizer([{"params": [np.ones(2)], "lr": x}], ao.LAMB()),
        "order_params": lambda x: ao.Optimizer([{"params": [np.ones(2)]}, {"order_params": x}], ao.LAMB()),
        "rule": lambda x: ao.Optimizer(ones(), x),
        "pattern": lambda x: ao.Optimizer(ones(), ao.LAMB(), groups=[(x, {"lr": 0.1})]),
        "override": lambda x: ao.Optimizer(ones(), ao.LAMB(), groups={"w": x}),
        "override lr": lambda x: ao.Optimizer(ones(), ao.LAMB(), groups={"w": {"lr": x}}),
    }
    tried(calls, (*WHO, "groups"))


RULES = (ao.LAMB, ao.LANS, ao.CAME, ao.LARS, ao.AdamW, ao.Adam, ao.SGD, ao.Adafactor)
RULES += (ao.Lion, ao.RMSprop, ao.NAdam, ao.RAdam, ao.Adan, ao.AdEMAMix, ao.ScheduleFreeAdamW, ao.AdamH)
RULES += (ao.FISTA, ao.AdaBelief, ao.Sophia, ao.Prodigy, ao.Muon, ao.NorMuon, ao.MuonH, ao.SOAP)
REQUIRED = {ao.SGD: {"lr": 0.1}, ao.FISTA: {"lr": 0.1}, ao.LARS: {"lr": 0.1}, ao.CAME: {"lr": 0.1}}
REQUIRED |= {ao.Muon: {"lr": 0.1}, ao.NorMuon: {"lr": 0.1}, ao.MuonH: {"lr": 0.1}}


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule):
    names = [f.name for f in dataclasses.fields(rule)]
    calls = {name: lambda x, name=name: rule(**REQUIRED.get(rule, {}) | {name: x}) for name in names}
    tried(calls, (f"{rule.__name__}: `",))


def test_loss_scales_and_fields():
    names = [f.name for f in dataclasses.fields(ao.LossScale)]
    tried({name: lambda x, name=name: ao.LossScale(**{name: x}) for name in names}, ("LossScale: `",))
    tried({"real": ao.real}, ("real: `",))


SOME = {
    "PiecewiseConstant": {"values": [1.0, 2.0], "milestones": [1, 2]},
    "Join": {"schedules": [schedules.Constant(1.0)] * 2, "boundaries": [1]},
}
OPERATORS = ("Product", "Sum", "unsupported operand", "can't multiply", "concat", "Concat")
"""Where a schedule is refused as an operand, the other operand may be the one that says so."""


@pytest.mark.parametrize("name", [x for x in schedules.__all__ if dataclasses.is_dataclass(getattr(schedules, x))])
def test_schedules(name):
    kind = getattr(schedules, name)
    required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    some = dict.fromkeys(required, 30) | SOME.get(name, {})
    made = kind(**some)
    calls = {f.name: lambda x, f=f: kind(**some | {f.name: x}) for f in dataclasses.fields(kind)}
    calls |= {"step": made, "times": lambda x: made * x, "plus": lambda x: x + made}
    tried(calls, (name, *OPERATORS))


def test_the_functional_form():
    rule, state = ao.LAMB(), ao.init(ao.LAMB(), ones())
    calls = {
        "init rule": lambda x: ao.init(x, ones()),
        "init params": lambda x: ao.init(rule, x),
        "init groups": lambda x: ao.init(rule, ones(), groups=x),
        "init loss_scale": lambda x: ao.init(rule, ones(), loss_scale=x),
        "rule": lambda x: ao.update(x, ones(), ones(), state),
        "params": lambda x: ao.update(rule, x, ones(), state),
        "grads": lambda x: ao.update(rule, ones(), x, state),
        "state": lambda x: ao.update(rule, ones(), ones(), x),
        **{
            option: lambda x, option=option: ao.update(rule, ones(), ones(), state, **{option: x})
            for option in ("groups", "clip_norm", "loss_scale", "skip_nonfinite")
        },
        **{
            f"state {path}": lambda x, path=path: ao.update(rule, ones(), ones(), with_node(state, path, x))
            for path in nodes(state)
            if len(path) < 3 or path[-1] == "t"
        },
    }
    tried(calls, ("init", "update", "group", "LAMB"))


def loading():
    opt = optimizer(accumulate=2, loss_scale=ao.LossScale())
    opt.step(ones())
    return opt


def test_snapshots():
    saved = loading().state_dict()
    calls = {
        str(path): lambda opt, x, path=path: opt.load_state_dict(with_node(saved, path, x)) for path in nodes(saved)
    }
    tried(calls, ("Optimizer.load_state_dict",), loading, frozen)


def test_importing():
    w = torch.nn.Parameter(torch.ones(3))
    theirs = torch.optim.AdamW([w])
    w.grad = torch.ones(3)
    theirs.step()
    saved = theirs.state_dict()

    def make():
        return ao.Optimizer({"w": np.ones(3)}, ao.AdamW())

    calls = {
        "state": lambda opt, x: ao.load_torch(opt, x),
        "names": lambda opt, x: ao.load_torch(opt, saved, names=x),
        "opt": lambda opt, x: ao.load_torch(x, saved),
        **{str(path): lambda opt, x, path=path: ao.load_torch(opt, with_node(saved, path, x)) for path in nodes(saved)},
    }
    tried(calls, ("load_torch",), make, frozen)


def test_monitor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opt = optimizer()
    made = ao.Monitor(opt)
    opt.step(ones())
    calls = {
        "opt": ao.Monitor,
        **{name: lambda x, name=name: ao.Monitor(opt, **{name: x}) for name in ("every", "steps", "keep")},
        "series": made.series,
        "csv": made.to_csv,
        "jsonl": made.to_jsonl,
        "send": made.send,
        "plot": made.plot,
        "plot path": lambda x: made.plot(path=x),
    }
    tried(calls, ("Monitor", *CALLED))


def test_comparing():
    def grads_fn(params, step):
        return params

    given = {"engines": ["numpy:numpy"], "steps": 1}
    calls = {
        "rule": lambda x: testing.assert_equivalent(x, ones(), grads_fn, **given),
        "params": lambda x: testing.assert_equivalent(ao.SGD(lr=0.1), x, grads_fn, **given),
        "grads_fn": lambda x: testing.assert_equivalent(ao.SGD(lr=0.1), ones(), x, **given),
        "grads": lambda x: testing.assert_equivalent(ao.SGD(lr=0.1), ones(), lambda params, step: x, **given),
        **{
            name: lambda x, name=name: testing.assert_equivalent(ao.SGD(lr=0.1), ones(), grads_fn, **given | {name: x})
            for name in ("engines", "max_ulp", "groups", "clip_norm", "more")
        },
        "steps": lambda x: testing.assert_equivalent(
            ao.SGD(lr=0.1), ones(), grads_fn, **given | {"steps": 1 if x is STRANGE["1e400"] else x}
        ),
    }
    tried(calls, ("assert_equivalent", "compare", "choose", "Optimizer", "group", "backend", *CALLED))


def test_source():
    given = {"rule": ao.SGD(lr=0.1)}
    calls = {name: lambda x, name=name: ao.source(**given | {name: x}) for name in ("rule", "engine", "dtype", "rank")}
    tried(calls, ("source",))
