"""Decisions that depend on all gradients of a step: unscale, clip by the global norm, or skip."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from arrayopt.arrays import on_its_device
from arrayopt.engines.base import Criteria, Judge, Swap
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.layers import layer_name
from arrayopt.engines.registry import select
from arrayopt.hyper import checked_bool, scalar
from arrayopt.ranks.alone import Alone
from arrayopt.ranks.team import Team
from arrayopt.state.loss_scale import LOSS_SCALE, as_loss_scale
from arrayopt.state.run import Run
from arrayopt.state.tensors import Left
from arrayopt.state.verdict import Verdict, joint_norm, judge
from arrayopt.step.norms import Measures, Norms, measured


class Known(NamedTuple):
    """What the host knows about these decisions before the gradients."""

    scale: float | None = None
    """The loss scale that was passed to `step`."""
    limit: float | None = None
    """The limit of the global norm."""
    check: bool = False
    """Whether a gradient that is not finite skips the step."""
    judge: Judge | None = None
    """The device's part that decides instead of the host."""
    verdict: Verdict | None = None
    """The decision of a caller, such as a GradScaler. Gradients are not measured then."""
    stacks: Sequence[Bucket] = ()
    """The buckets of stacked tensors whose layers may be skipped one by one."""

    @property
    def measures(self) -> bool:
        """Whether gradients must be measured."""
        return self.check or self.limit is not None


_NOTHING, _AS_IT_IS = Known(), Verdict()
"""The knowledge and the decision for steps whose gradients are not checked."""


class Judging:
    """Decides what a step does with its gradients, on the host or on their device.

    Attributes
    ----------
    scaling : LossScale or None
        The optimizer's own loss scale.
    """

    def __init__(
        self, engine: str, run: Run, loss_scale: Any, skip_nonfinite: Any, team: Alone
    ) -> None:
        checked_bool("Optimizer: `skip_nonfinite`", skip_nonfinite)
        self._engine, self._run, self._team = engine, run, team
        self.skip_nonfinite, self.scaling = skip_nonfinite, as_loss_scale("Optimizer", loss_scale)
        if self.scaling is not None:
            run.loss = self.scaling.start()
        self._norms: Callable[[], dict[str, Any]] | None = None  # of the last step
        self._judged: Callable[[], dict[str, Any]] | None = None  # of the step that is being made
        self._last: Norms | None = None  # the launches of the last step, if another may use them
        self._judge: tuple[int, Judge | None] = (-1, None)  # of which version of the buckets

    def known(
        self, buckets: list[Bucket], version: int, given: Any, limit: float | None, *, scaled: bool
    ) -> Known:
        """Return what is known before the gradients. `scaled` is whether accumulated gradients are
        of a scaled loss.

        `given` is a loss scale, or a `Verdict` of 0-d arrays on the gradients' device: a factor in
        float64, and in int32 whether to skip. If the host decides, it waits for their values. Raise
        TypeError or ValueError if the loss scale is not a positive number, or there already is one.
        """
        if isinstance(given, Verdict) and given.factor is None and given.skip is False:
            return Known(verdict=given)
        if isinstance(given, Verdict):
            known, (factor, skip, *_) = self._deciding(Known(), buckets, version), given
            if known.judge is None:
                given = Verdict(None if factor is None else float(factor), bool(skip))
            return known._replace(verdict=given)
        if given is not None:
            if self.scaling is not None:
                raise ValueError(
                    "Optimizer.step: leave out `loss_scale`; this Optimizer has its own"
                )
            given = float(scalar("Optimizer.step: `loss_scale`", given, LOSS_SCALE))
        check = given is not None or self.scaling is not None or self.skip_nonfinite or scaled
        if not check and limit is None:
            return _NOTHING
        scaled = scaled or given is not None or self.scaling is not None
        stacks = () if scaled or not check else [x for x in buckets if x.rule.stacked]
        return self._deciding(Known(given, limit, check, stacks=stacks), buckets, version)

    def _deciding(self, known: Known, buckets: list[Bucket], version: int) -> Known:
        """Add the device's part that decides instead of the host, if all buckets have the same."""
        if self._judge[0] != version:
            engines = [select(self._engine, bucket)[0] for bucket in [*buckets, *measured(buckets)]]
            one = len({x.name for x in engines}) == 1
            self._judge = version, engines[0].judge(buckets) if one else None
        return known._replace(judge=self._judge[1])

    @property
    def _swap(self) -> Swap | None:
        """The function by which several ranks exchange partial results."""
        return self._team.swap if isinstance(self._team, Team) else None

    def inverse(self, known: Known) -> Any:
        """Return the factor that unscales the gradients of this call; None for 1."""
        if known.scale is not None:
            return 1.0 / known.scale
        if self.scaling is None:
            return None
        on_device = self._run.peek("inverse")
        return 1.0 / self._run.peek("scale") if on_device is None else on_device

    def advance(self, known: Known) -> None:
        """Copy the host's data of the next step to where a captured step reads it."""
        if known.judge is not None:
            known.judge.send(known.scale, known.limit)
            self._run.give_to(known.judge)

    def judge(
        self, measures: Callable[[], Measures], known: Known, *, form: Any, scaled: bool = True
    ) -> Verdict:
        """Decide what the step does with the gradients that `measures` returns requests for.
        `scaled` is whether they contain the loss scale. `form` is as in `Ready`.
        """
        self._judged = None
        own = self.scaling is not None
        if known.verdict is not None:
            return known.verdict
        if not known.measures:
            return _AS_IT_IS
        if known.judge is not None:
            scale = "scale" if own else None if known.scale is None else "given_scale"
            self.advance(known)
            # norms of this step overwrite those of the last one
            self._norms = self._norms and _overwritten
            scale = scale if scaled else None
            criteria = Criteria(self.scaling, scale, known.limit is not None, known.check)
            found = known.judge(measures(), criteria, self._swap, bool(known.stacks))
            self._judged = known.judge.each_norm
            return found
        asked, last, self._last = measures(), self._last, None
        if last is None or not last.again([wanted for _, wanted in asked], form):
            last = Norms(self._engine, asked, form)
        norms = last.norms(asked, self._team)
        self._last = last if last.form is not None else None
        self._judged = lambda: norms
        factor = self._run.peek("scale") if own else known.scale
        left, first = None, next(iter(norms.values()), 0.0)
        with on_its_device(first):
            total = joint_norm(list(norms.values()))
            if known.stacks and not math.isfinite(float(total)):
                left, rest = _left_out(known.stacks, norms)
                total = joint_norm(list(rest.values()))
            found = judge(
                total, scale=factor if scaled else None, limit=known.limit, check=known.check
            )
        return found._replace(skip=bool(found.skip), left=left)

    def end(self, verdict: Verdict, known: Known) -> None:
        """Update the loss scale and counts after a step, made or skipped."""
        self._norms = self._judged
        if known.judge is not None and known.measures:
            known.judge.commit()
        if known.judge is not None or not known.check:
            return
        loss = self._run.loss
        scaled = {} if self.scaling is None else self.scaling.next(loss, verdict.skip)
        self._run.loss = {**scaled, "skipped": loss["skipped"] + verdict.skip}

    def nonfinite(self) -> list[str]:
        if self._norms is None:
            raise RuntimeError(
                "Optimizer.nonfinite: the last step did not check its gradients, or there is none"
                " yet; set skip_nonfinite, loss_scale or clip_norm"
            )
        return [name for name, norm in self._norms().items() if not math.isfinite(float(norm))]

    def __getstate__(self) -> dict[str, Any]:
        gone = dict.fromkeys(("_norms", "_judged", "_last"))
        return {**self.__dict__, **gone, "_judge": (-1, None)}


def _overwritten() -> dict[str, Any]:
    """Raise an error in place of the norms of the last step, after a later one has failed."""
    raise RuntimeError(
        "Optimizer: the norms of the last step are lost, because a later step failed after"
        " measuring its gradients"
    )


def _left_out(stacks: Sequence[Bucket], norms: dict[str, Any]) -> tuple[Left, dict[str, Any]]:
    """Return the layers that a step skips, and the norms of all others by name of tensor or layer.

    Layers with the same index belong together in all stacked tensors with the same number of
    layers, as one fit, or one layer of a model. If a tensor that is not stacked is not finite, or
    nothing would be left, no layers are returned, and the whole step is skipped.
    """
    places = {}
    for bucket in stacks:
        for tensor in bucket.whole.tensors:
            for layer in range(tensor.layers):
                places[layer_name(tensor.name, layer)] = (tensor.layers, layer)
    left: Left = {}
    for name, norm in norms.items():
        if not math.isfinite(float(norm)):
            if name not in places:
                return {}, norms
            count, layer = places[name]
            left.setdefault(count, np.zeros(count, bool))[layer] = True
    rest = dict(norms)
    for name, (count, layer) in places.items():
        if count in left and left[count][layer]:
            rest.pop(name, None)
    return (left, rest) if rest else ({}, norms)
