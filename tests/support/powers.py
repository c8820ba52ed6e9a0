"""The table of powers: features of an optimizer besides its update, how each is switched on, and what must hold.

A row of `CHANGES` changes what is computed; every engine must agree with `array_api` about it. A row of `RUNS`, of
`CALLS` or of `MODES` (`tests/support/modes.py`) must change no bit. Tests draw pairs and triples of rows, because many
faults occur only in combinations. A new feature is a new row.
"""

import contextlib
import copy
import dataclasses
import os
import pickle
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch

import arrayopt as ao
from arrayopt.arrays import detached, like, store, to_host
from arrayopt.libraries import engines_for
from tests.support.entered import Fault, Raising, contents, held
from tests.support.modes import Mode, entered
from tests.support.ringed import ringed

RULES: dict[str, dict[str, Any]] = {
    "LAMB": {"lr": 0.05, "weight_decay": 0.1},
    "CAME": {"lr": 0.05},
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "AdamW": {"lr": 0.05},
    "SOAP": {"lr": 0.05, "precondition_frequency": 2},
    "ring": {"lr": 0.05},
    "Prodigy": {"d0": 0.01},  # which has totals over all tensors
    "LBFGS": {"lr": 0.05, "memory": 2},  # both
}
SHAPES = {"w": (6, 5), "b": (6,), "stack": (3, 4, 2), "number": (), "empty": (0, 3)}
ADDED = 3
"""The call after which a group is added."""


THEIRS = "b", "stack", "number"
"""The tensors that are PyTorch's if libraries are mixed."""


def torch_of(x: Any) -> Any:
    """A PyTorch tensor with an array's values, shape and dtype."""
    return torch.empty(x.shape, dtype=getattr(torch, str(x.dtype)), device="cpu")


@dataclass
class Case:
    """A problem, in which powers are switched on.

    Attributes
    ----------
    rule, options, groups : dict
        The fields of the rule, the options of the optimizer, and its groups.
    dtype : str
        The dtype of parameters and gradients.
    turned : bool
        Whether arrays do not lie in rows.
    mixed : bool
        Whether some tensors are PyTorch's, if the engine takes them.
    bad : dict of int to float
        What one element of a gradient is at some calls.
    absent : dict of int to str
        The tensor that has no gradient at some calls.
    after : dict of int to callable
        What the user does with the optimizer after some calls.
    valued : bool
        Whether steps are given a value, for a line search.
    later : bool
        Whether a group is added in the middle.
    calls : int
        How often `step` is called.
    begin : int
        What the parameters are drawn from that the optimizer is made with.
    modes : sequence of callable
        The modes of `tests.support.modes` that the optimizer is made and called in.
    """

    name: str = "LAMB"
    rule: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    turned: bool = False
    mixed: bool = False
    bad: dict[int, float] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)
    after: dict[int, Callable[[Any], None]] = field(default_factory=dict)
    valued: bool = False
    later: bool = False
    calls: int = 7
    begin: int = 0
    modes: Sequence[Mode] = ()

    def arrays(self, seed: Any, shapes: dict[str, Any] = SHAPES) -> dict[str, Any]:
        """Random arrays of the parameters' shapes."""
        rng = np.random.default_rng(seed)
        dtype = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype
        made = {name: np.asarray(rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}
        return {name: np.asfortranarray(x) if self.turned else x for name, x in made.items()}

    def grads(self, call: int, scale: float) -> dict[str, Any]:
        """The gradients of a call, multiplied by a loss scale."""
        shapes = SHAPES | ({"later": (4, 5)} if self.later and call > ADDED else {})
        made: dict[str, Any] = {name: (x * x.dtype.type(scale)) for name, x in self.arrays((1, call), shapes).items()}
        if call in self.bad:
            made["w"][1, 2] = self.bad[call]
        if call in self.absent:
            made[self.absent[call]] = None
        return made

    def placed(self, arrays: dict[str, Any], engine: str) -> dict[str, Any]:
        """The arrays in the libraries of the case."""
        if not self.mixed or engine not in engines_for("torch"):
            return arrays
        return arrays | {
            name: like(torch_of(arrays[name]), arrays[name]) for name in THEIRS if arrays[name] is not None
        }

    def make(self, engine: str, comm: Any = None) -> ao.Optimizer:
        """The optimizer before the first call."""
        kind = ringed(2) if self.name == "ring" else getattr(ao, self.name)
        rule, params = kind(**RULES[self.name], **self.rule), self.placed(self.arrays(self.begin), engine)
        with entered(self.modes):
            return ao.Optimizer(params, rule, engine=engine, groups=self.groups, comm=comm, **self.options)

    def add(self, opt: ao.Optimizer) -> None:
        """Add a group."""
        opt.add_group(self.arrays(2, {"later": (4, 5)}))


# ---- what changes what is computed ----------------------------------------------------------------------------------


def _of_16_bits(case: Case) -> None:
    case.dtype = "bfloat16"


def _rounding(case: Case) -> None:
    case.dtype, case.rule["rounding"], case.rule["master_weights"] = "bfloat16", "stochastic", False


def _scaled(case: Case) -> None:
    case.options["loss_scale"] = ao.LossScale(init=8.0, window=2)
    case.bad[3] = np.inf


def _by_slot(case: Case) -> None:
    """Store slots that may be narrowed alternately in 8 and in 16 bits."""
    rule = case.make("array_api").rule
    slots = dataclasses.replace(rule, state_dtype="int8").storage(2)
    names = dict.fromkeys(re.sub(r"_\d+$", "", slot) for slot in slots)  # members of a ring have its name
    case.rule["state_dtype"] = {name: ("int8", "bfloat16")[i % 2] for i, name in enumerate(names)} or None


def _split(case: Case) -> None:
    _of_16_bits(case)
    case.rule["master_weights"] = "split"


def _skipped(case: Case) -> None:
    case.options["skip_nonfinite"] = True
    case.bad[2] = np.nan


def _replaced(opt: Any) -> None:
    for name in ("w", "stack"):
        opt.params[name] = opt.params[name] * 0 + 1


def _written(opt: Any) -> None:
    np.clip(opt.params["w"], -0.5, 0.5, out=opt.params["w"])


def _added(case: Case) -> None:
    case.later, case.after[ADDED] = True, case.add


CHANGES: dict[str, Callable[[Case], Any]] = {
    "value": lambda case: setattr(case, "valued", True),
    "accumulate": lambda case: case.options.update(accumulate=3),
    "clip_norm": lambda case: case.options.update(clip_norm=0.5),
    "loss_scale": _scaled,
    "skip_nonfinite": _skipped,
    "stats": lambda case: case.options.update(stats=True),
    "schedule": lambda case: case.groups.update({"b": {"lr": ao.schedules.Warmup(0.1, 4)}}),
    "a rule of its own": lambda case: case.groups.update({"number": ao.SGD(lr=0.1, momentum=0.5)}),
    "stacked": lambda case: case.groups.update({"stack": {"stacked": True}}),
    "blocks": lambda case: case.groups.update({"w": {"blocks": (2, 2, 1, 1)}}),
    "project": lambda case: case.rule.update(project=ao.projections.box(-0.5, 0.5)),
    "ema": lambda case: case.rule.update(ema_decay=0.5),
    "lookahead": lambda case: case.rule.update(lookahead_steps=2),
    "centralized": lambda case: case.rule.update(grad_centralization=True),
    "master": _of_16_bits,
    "state_dtype": lambda case: case.rule.update(state_dtype="bfloat16"),
    "int8": lambda case: case.rule.update(state_dtype="int8"),
    "storage by slot": _by_slot,
    "split": _split,
    "rounding": _rounding,
    "float64": lambda case: setattr(case, "dtype", "float64"),
    "absent": lambda case: case.absent.update({1: "w", 2: "b", 5: "b"}),
    "turned": lambda case: setattr(case, "turned", True),
    "libraries mixed": lambda case: setattr(case, "mixed", True),
    "replaced": lambda case: case.after.update({2: _replaced}),
    "written": lambda case: case.after.update({4: _written}),
    "add_group": _added,
}
"""Features that change the computation: functions that switch one on in a case."""

DTYPES = ("master", "split", "rounding", "float64")
"""A case has at most one of these."""

STORAGES = ("state_dtype", "int8", "storage by slot")
"""A case has at most one of these formats of slots."""


# ---- what must change no bit: how a call is made --------------------------------------------------------------------


@dataclass
class Place:
    """The surroundings of a run: case, engine, ranks, folder for files, random numbers; whether weights come `late`."""

    case: Case
    engine: str
    comm: Any
    folder: Any
    rng: np.random.Generator
    late: bool = False

    def put(self, opt: Any, arrays: dict[str, Any]) -> None:
        """Write arrays into parameters."""
        for name, x in arrays.items():
            store(detached(opt.params[name]), like(opt.params[name], x))

    def hidden(self, opt: Any, call: int) -> dict[str, Any]:
        """In a `late` run, set parameters that this call does not update to zero, and return their values."""
        if not self.late or (call + 1) % self.case.options.get("accumulate", 1) == 0:
            return {}
        found = {name: to_host(p).copy() for name, p in opt.params.items() if opt.state[name]["t"] == 0}
        self.put(opt, {name: 0 * x for name, x in found.items()})
        return found

    @property
    def rank(self) -> int:
        """This rank."""
        return int(getattr(self.comm, "comm", self.comm).rank)

    def fresh(self, opt: Any = None) -> Any:
        """A new optimizer, with the group that was added if `opt` has it."""
        made = self.case.make(self.engine, self.comm)
        if opt is not None and "later" in opt.params:
            self.case.add(made)
        return made

    def step(self, opt: Any, *grads: Any, **options: Any) -> Any:
        """Make a step; if the rule needs a value, it falls from step to step."""
        value = {"value": 9.0 - 0.5 * opt.step_count} if self.case.valued else {}
        return opt.step(*grads, **value, **options)

    def grads(self, call: int, scale: float) -> dict[str, Any]:
        """The gradients of a call; if ranks add up gradients, all ranks after the first have zeros."""
        made = self.case.grads(call, scale)
        if isinstance(self.comm, ao.Ranks) and self.rank:
            made = {name: None if g is None else np.zeros_like(g) for name, g in made.items()}
        return self.case.placed(made, self.engine)


def _straight(place: Place, opt: Any, grads: Any) -> Any:
    place.step(opt, grads)
    return opt


def _refused(place: Place, opt: Any, grads: Any) -> Any:
    """Pass a gradient of a wrong shape on one rank first: all ranks must refuse that step, and change nothing."""
    bad = dict(grads)
    if place.comm is None or place.comm.rank == place.comm.size - 1:
        bad["b"] = np.ones(77)
    with contextlib.suppress(ValueError, ao.ranks.RankError):
        place.step(opt, bad)
        raise AssertionError("a wrong gradient was taken")
    return _straight(place, opt, grads)


def _entered(place: Place, opt: Any, grads: Any, act: Callable[[], object] | None) -> Any:
    """Raise an error or a signal within the step of the last rank; repeat the step if it was not made."""
    before, at = contents(opt), int(place.rng.integers(0, 1500))
    here = place.comm is None or place.comm.rank == place.comm.size - 1
    if place.comm is not None:
        opt.save(place.folder / "before.safetensors")
    refused = Fault, ao.ranks.RankError, ValueError  # other ranks learn of a fault before a vote in their next call
    with contextlib.suppress(*refused), Raising(at, act) if here else contextlib.nullcontext():
        place.step(opt, grads)
    try:
        made = _told(opt) != before
    except ao.ranks.RankError:  # the step was made on some ranks only
        opt.load(place.folder / "before.safetensors")
        made = False
    if not made:
        place.step(opt, grads)
    return opt


def _told(opt: Any) -> dict[Any, Any]:
    """The contents of an optimizer; a second try if another rank was in another call."""
    try:
        return contents(opt)
    except ValueError:
        return contents(opt)


def _signalled(place: Place, opt: Any, grads: Any) -> Any:
    def handler(number: int, frame: Any) -> None:
        raise Fault

    former = signal.signal(signal.SIGUSR1, handler)
    try:
        return _entered(place, opt, grads, lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, former)


def _faulty(place: Place, opt: Any, grads: Any) -> Any:
    return _entered(place, opt, grads, None)


def _state_dict(place: Place, opt: Any, grads: Any) -> Any:
    other = place.fresh(opt)
    other.load_state_dict(opt.state_dict())
    for name, p in opt.params.items():
        other.params[name][...] = p
    return _straight(place, other, grads)


def _checkpoint(place: Place, opt: Any, grads: Any) -> Any:
    opt.save(place.folder / "run.safetensors")
    other = place.fresh(opt)
    other.load(place.folder / "run.safetensors")
    return _straight(place, other, grads)


def _copied(place: Place, opt: Any, grads: Any) -> Any:
    return _straight(place, copy.deepcopy(opt), grads)


def _pickled(place: Place, opt: Any, grads: Any) -> Any:
    return _straight(place, pickle.loads(pickle.dumps(opt)), grads)


def _given(place: Place, opt: Any, grads: Any, *, wait: bool = True) -> Any:
    """Pass gradients one by one, in random order, unless the step needs all; overwrite each one afterwards."""
    names = [name for name, g in grads.items() if g is not None]
    rank = 0 if place.comm is None else place.rank
    np.random.default_rng([int(place.rng.integers(0, 99)), rank]).shuffle(names)
    for i, name in enumerate(names):
        try:
            opt.give(name, grads[name])
        except ValueError as error:
            if i > 0 or "a step needs all gradients" not in str(error):
                raise
            return _straight(place, opt, grads)
        if not isinstance(grads[name], np.generic):
            grads[name][...] = np.nan
    place.step(opt, wait=wait)
    return opt


def _released(place: Place, opt: Any, grads: Any) -> Any:
    """Pass gradients one by one, and do not wait for parameters from other ranks."""
    return _given(place, opt, grads, wait=False)


def _waited(place: Place, opt: Any, grads: Any) -> Any:
    """Make a step that does not wait for other ranks' parameters; then wait for one parameter."""
    assert place.step(opt, grads, wait=False) is None
    opt.wait(str(place.rng.choice(list(SHAPES))))
    return opt


def _viewed(place: Place, opt: Any, grads: Any) -> Any:
    """Pass gradients that are lazy views of PyTorch, or read-only arrays."""
    views = dict(grads)
    for name, g in grads.items():
        if isinstance(g, torch.Tensor):
            views[name] = torch._neg_view(-g)
        elif isinstance(g, np.ndarray):
            g.flags.writeable = False
    return _straight(place, opt, views)


def _moved(place: Place, opt: Any, grads: Any) -> Any:
    """Move parameters and slots in memory, as each library allows."""
    for name, p in opt.params.items():
        for x in (p, *opt.state[name].values()):
            if isinstance(x, torch.Tensor):
                x.data = x.data.clone()
        if isinstance(p, np.ndarray):
            opt.params[name] = p.copy(order="K")
    return _straight(place, opt, grads)


def _undone(place: Place, opt: Any, grads: Any) -> Any:
    """Save, make another step, and load the saved state."""
    opt.save(place.folder / "undone.safetensors")
    place.step(opt, {name: None if g is None else g * 2 for name, g in grads.items()})
    opt.load(place.folder / "undone.safetensors")
    return _straight(place, opt, grads)


def _elsewhere(place: Place, opt: Any, grads: Any) -> Any:
    """Continue the run with tensors of other libraries, unless the rule runs as written, in each library's bits."""
    if place.case.name == "SOAP" or place.engine == "array_api":
        return _straight(place, opt, grads)
    opt.save(place.folder / "elsewhere.safetensors")
    place.case = dataclasses.replace(place.case, mixed=not place.case.mixed)
    other = place.fresh(opt)
    other.load(place.folder / "elsewhere.safetensors")
    here = {name: None if g is None else to_host(g) for name, g in grads.items()}
    return _straight(place, other, place.case.placed(here, place.engine))


CALLS: dict[str, Callable[[Place, Any, Any], Any]] = {
    "straight": _straight,
    "waiting": _waited,
    "given": _given,
    "release": _released,
    "refused": _refused,
    "signals": _signalled,
    "faults": _faulty,
    "state_dict": _state_dict,
    "checkpoint": _checkpoint,
    "deepcopy": _copied,
    "pickle": _pickled,
    "lazy views": _viewed,
    "moved": _moved,
    "undone": _undone,
    "elsewhere": _elsewhere,
}
"""Ways to make a call of `step`; each returns the optimizer with which the run continues."""

ALONE = ("signals", "deepcopy", "pickle")
"""Ways that ranks leave out: these are threads, which get no signals, and an Optimizer over ranks cannot be copied."""

MAKING = ("pickle", "deepcopy", "moved", "elsewhere")
"""Ways that make new parameters. In `torch.inference_mode`, these could not be written outside of it."""

OWN = ("straight", "waiting", "given", "release", "lazy views", "moved")
"""Ways for ranks with their own gradients. The others do not include the sums of a started accumulation."""


# ---- what must change no bit: where it runs -------------------------------------------------------------------------


def train(place: Place, how: list[str]) -> dict[Any, Any]:
    """Make all calls, by these ways in turn; return the contents of the optimizer."""
    opt = place.fresh()
    place.put(opt, place.case.arrays(0) if place.late else {})
    for call in range(place.case.calls):
        scale = float(opt.loss_scale) if "loss_scale" in place.case.options else 1.0
        grads = place.grads(call, scale)
        hidden = place.hidden(opt, call)
        with entered(place.case.modes):
            opt = CALLS[how[call % len(how)]](place, opt, grads)
        place.put(opt, hidden)
        if call in place.case.after:
            place.case.after[call](opt)
    return held(opt)


def _alone(case: Case, engine: str, how: list[str], folder: Any, seed: int) -> list[Any]:
    return [train(Place(case, engine, None, folder, np.random.default_rng(seed)), how)]


def _threads(case: Case, engine: str, how: list[str], folder: Any, seed: int) -> list[Any]:
    former = os.environ.get("ARRAYOPT_NUM_THREADS")
    os.environ["ARRAYOPT_NUM_THREADS"] = "3"
    try:
        return _alone(case, engine, how, folder, seed)
    finally:
        del os.environ["ARRAYOPT_NUM_THREADS"]
        if former is not None:
            os.environ["ARRAYOPT_NUM_THREADS"] = former


def _ranks(count: int) -> Callable[..., list[Any]]:
    def run(case: Case, engine: str, how: list[str], folder: Any, seed: int) -> list[Any]:
        ways = [way for way in how if way not in ALONE] or ["straight"]

        def rank(comm: Any) -> dict[Any, Any]:
            return train(Place(case, engine, comm, folder, np.random.default_rng(seed)), ways)

        return ao.ranks.run(count, rank)

    return run


def _own(case: Case, engine: str, how: list[str], folder: Any, seed: int) -> list[Any]:
    ways = [way for way in how if way in OWN] or ["release"]

    def rank(comm: Any) -> dict[Any, Any]:
        place = Place(case, engine, ao.Ranks(comm, grads="sum"), folder, np.random.default_rng(seed))
        return train(place, ways)

    return ao.ranks.run(3, rank)


def _late(case: Case, engine: str, how: list[str], folder: Any, seed: int) -> list[Any]:
    """A run whose weights are written after the optimizer was made, and are zeros until their first update."""
    ways = [way for way in how if way != "state_dict"] or ["straight"]  # a state dict lacks weights
    place = Place(dataclasses.replace(case, begin=5), engine, None, folder, np.random.default_rng(seed), late=True)
    return [train(place, ways)]


RUNS: dict[str, Callable[..., list[Any]]] = {
    "alone": _alone,
    "weights later": _late,
    "threads": _threads,
    "two ranks": _ranks(2),
    "three ranks": _ranks(3),
    "four ranks": _ranks(4),
    "own gradients": _own,
}
"""Surroundings in which to make the calls; each returns the contents on each rank."""
