"""An optimizer used in any order of calls, beside the plain model: steps, changes, groups, saving, loading, failing."""

import copy
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import arrayopt as ao
from tests.support.engines import EVERY, SLOW
from tests.support.model import Model
from tests.support.slow import PROFILE, settled
from tests.test_random import frozen

SHAPES = {"w": (3, 4), "b": (5,), "s": (), "e": (0, 2), "n0": (2, 3), "n1": (4,)}
RULES = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "ema_decay": 0.5},
    "LAMB": {"lr": 0.1, "weight_decay": 0.1, "clip_tensor_norm": 0.5},
    "AdamW": {"lr": 0.01, "lookahead_steps": 2, "clip_value": 1.0},
}
"""Few structures of rules, for each has to be compiled."""

PLACES = [(engine, name) for engine in EVERY for name in sorted(RULES)]
if PROFILE == "quick":
    PLACES = [(engine, name) for engine, name in PLACES if engine not in SLOW]

SEEDS = st.integers(0, 99)


def drawn(seed, shape):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape))


class Training(RuleBasedStateMachine):
    """An optimizer, and the model that it has to agree with; what changes something goes on with a step."""

    @initialize(
        place=st.sampled_from(PLACES),
        accumulate=st.sampled_from([1, 1, 3]),
        scale=st.sampled_from([None, 4.0, ao.LossScale(init=8.0, window=2)]),
        skip=st.booleans(),
        clip=st.sampled_from([None, 0.5]),
    )
    def make(self, place, accumulate, scale, skip, clip):
        engine, name = place
        self.folder = tempfile.TemporaryDirectory()
        self.made = {"engine": engine, "accumulate": accumulate, "loss_scale": scale, "skip_nonfinite": skip}
        self.rule, self.added = getattr(ao, name)(**RULES[name]), []
        self.opt = self.fresh()
        self.opt.clip_norm = clip
        self.checks = skip or scale is not None
        if isinstance(scale, ao.LossScale):
            scale = {"scale": scale.init, "factor": scale.factor, "window": scale.window}
        options = {x: {**RULES[name], **({"weight_decay": 0.0} if x == "b" else {})} for x in list(SHAPES)[:4]}
        self.model = Model(
            name,
            {x: drawn(i, SHAPES[x]) for i, x in enumerate(options)},
            options,
            clip_norm=clip,
            accumulate=accumulate,
            skip_nonfinite=skip,
            scale={"scale": scale} if isinstance(scale, float) else scale,
        )
        self.monitor, self.watched, self.kept, self.files = None, [], None, 0

    def fresh(self):
        """A new optimizer of the same groups, over arrays of its own."""
        params = {x: drawn(i, SHAPES[x]) for i, x in enumerate(list(SHAPES)[:4])}
        made = ao.Optimizer(params, self.rule, groups={"b": {"weight_decay": 0.0}}, **self.made)
        for name in self.added:
            made.add_group({name: drawn(9, SHAPES[name])})
        return made

    # ---- steps ------------------------------------------------------------------------------------------------------

    def grads(self, seed, absent=(), bad=None):
        found = {n: None if n in absent else drawn((seed, i), SHAPES[n]) for i, n in enumerate(self.opt.state)}
        if bad is not None:
            found["w"][1, 2] = bad
        return found

    def step(self, grads):
        steps = self.opt.step_count
        given = copy.deepcopy(grads)
        result = self.opt.step(grads)
        self.model.step(given)
        assert result is self.opt.params
        assert all(g is None or g.tobytes() == given[n].tobytes() for n, g in grads.items())
        if self.monitor is not None and self.opt.step_count > steps:
            self.watched.append(steps)

    @rule(seed=SEEDS, absent=st.sets(st.sampled_from(["w", "b", "s", "e"])))
    def steps(self, seed, absent):
        self.step(self.grads(seed, absent))

    @precondition(lambda self: self.checks)
    @rule(seed=SEEDS, bad=st.sampled_from([np.inf, -np.inf, np.nan]))
    def overflows(self, seed, bad):
        self.step(self.grads(seed, bad=bad))

    @rule(how=st.sampled_from(["shape", "missing", "integers", "schedule", "loss_scale"]))
    def fails(self, how):
        before, grads = frozen(self.opt), self.grads(0)
        last = list(grads)[-1]
        if how == "missing":
            del grads[last]
        elif how == "schedule":
            lr = self.opt.lr
            self.opt.lr = lambda step: -1.0
        else:
            grads[last] = {"shape": np.ones(77), "integers": np.ones(SHAPES[last], int)}.get(how, grads[last])
        with pytest.raises((ValueError, TypeError)):
            self.opt.step(grads, loss_scale=0.0 if how == "loss_scale" else None)
        if how == "schedule":
            self.opt.lr = lr
        assert frozen(self.opt) == before

    # ---- changes ----------------------------------------------------------------------------------------------------

    @rule(lr=st.sampled_from([0.0, 0.01, 0.2, ao.schedules.Warmup(0.1, 4)]), seed=SEEDS)
    def sets_lr(self, lr, seed):
        self.opt.lr = lr
        for options in self.model.options.values():
            options["lr"] = lr
        self.step(self.grads(seed))

    @rule(weight_decay=st.sampled_from([0.0, 0.3]), seed=SEEDS)
    def sets_a_groups_weight_decay(self, weight_decay, seed):
        self.opt.groups[0].weight_decay = weight_decay
        self.model.options["b"]["weight_decay"] = weight_decay
        self.step(self.grads(seed))

    @rule(weight_decay=st.sampled_from([0.0, 0.2]), seed=SEEDS)
    def sets_weight_decay(self, weight_decay, seed):
        self.opt.weight_decay = weight_decay
        for name, options in self.model.options.items():
            if name != "b":
                options["weight_decay"] = weight_decay
        self.step(self.grads(seed))

    @rule(clip_norm=st.sampled_from([None, 0.1, 100.0]), seed=SEEDS)
    def sets_clip_norm(self, clip_norm, seed):
        self.opt.clip_norm = self.model.clip_norm = clip_norm
        self.step(self.grads(seed))

    @precondition(lambda self: len(self.added) < 2)
    @rule(seed=SEEDS)
    def adds_a_group(self, seed):
        name = f"n{len(self.added)}"
        self.added.append(name)
        self.opt.add_group({name: drawn(9, SHAPES[name])})
        self.model.add(name, drawn(9, SHAPES[name]), dict(self.model.options["w"]))
        self.kept = None
        self.step(self.grads(seed))

    # ---- saving and watching ----------------------------------------------------------------------------------------

    def replaced(self, opt):
        assert frozen(opt) == frozen(self.opt)
        self.unwatch()
        self.opt = opt

    @rule(seed=SEEDS)
    def goes_on_from_a_snapshot(self, seed):
        opt = self.fresh()
        opt.load_state_dict(self.opt.state_dict())
        for name, p in opt.params.items():
            p[...] = self.opt.params[name]
        self.replaced(opt)
        self.step(self.grads(seed))

    @rule(seed=SEEDS)
    def goes_on_from_a_file(self, seed):
        opt = self.fresh()
        self.opt.save(Path(self.folder.name, "now"))
        assert opt.load(Path(self.folder.name, "now")) is opt.params
        self.replaced(opt)
        self.step(self.grads(seed))

    @rule()
    def keeps_a_file(self):
        self.opt.save(Path(self.folder.name, "kept"))
        self.kept = copy.deepcopy(self.model), frozen(self.opt)

    @precondition(lambda self: self.kept is not None)
    @rule(seed=SEEDS)
    def goes_back_to_the_file(self, seed):
        self.unwatch()
        self.opt.load(Path(self.folder.name, "kept"))
        self.model = copy.deepcopy(self.kept[0])
        assert frozen(self.opt) == self.kept[1]
        self.step(self.grads(seed))

    @rule()
    def watches(self):
        if self.monitor is None:
            self.monitor = ao.Monitor(self.opt)
        else:
            self.unwatch()

    def unwatch(self):
        """Look at what has been watched, and stop."""
        if self.monitor is not None:
            self.monitor.close()
            assert len(self.monitor) == len(self.watched)
            assert {row["step"] for row in self.monitor.read()} <= set(self.watched)
        self.monitor, self.watched = None, []

    @invariant()
    def agrees(self):
        opt, model = self.opt, self.model
        assert opt.step_count == model.step_count
        assert opt.loss_scale == (model.scale["scale"] if model.scale else 1.0)
        assert opt.state_dict()["extra"]["skipped"] == model.skipped
        averaged = opt.averaged()
        for name, exact in model.tensors().items():
            found = {"p": opt.params[name], **opt.state[name]}
            assert found.pop("t") == exact["t"]
            for key, x in found.items():
                start = exact["p"] if key in ("ema", "slow") else np.zeros(x.shape)
                y = exact.get(key, start).reshape(x.shape)
                assert type(x) is np.ndarray, (name, key)
                np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12, err_msg=f"{name}.{key}")
            assert np.array_equal(averaged[name], found.get("ema", found["p"]))

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()


TestTraining = Training.TestCase
TestTraining.settings = settings(settled(50), stateful_step_count=25)
