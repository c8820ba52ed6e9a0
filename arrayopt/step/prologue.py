"""What comes before an update: accumulation, the loss scale, the check for finite gradients, the joint norm."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from arrayopt.arrays import Array
from arrayopt.engines.base import Bucket, Judge
from arrayopt.engines.table import select
from arrayopt.hyper import is_number, scalar
from arrayopt.state.loss_scale import LOSS_SCALE, LossScale, as_loss_scale
from arrayopt.state.verdict import Verdict, joint_norm, judge
from arrayopt.step.accumulate import Accumulator
from arrayopt.step.clipping import gradient_norms, measured

__all__ = ["Known", "Prologue", "checked_count", "is_count"]


class Known(NamedTuple):
    """What the host knows of a step before its gradients.

    Attributes
    ----------
    scale : float or None
        The loss scale that is given with the step.
    limit : float or None
        What the joint norm is limited to.
    check : bool
        Whether a gradient that is not finite skips the step.
    judge : Judge or None
        What decides in the host's place.
    """

    scale: float | None = None
    limit: float | None = None
    check: bool = False
    judge: Judge | None = None


class Prologue:
    """Turns the gradients that an Optimizer is given into those of a step, and into what the step is to do with them.

    Attributes
    ----------
    scaling : LossScale or None
        How the loss is scaled.
    skip_nonfinite : bool
        Whether steps with a non-finite gradient are skipped without a loss scale too.
    accumulator : Accumulator
        What has been summed up in micro-steps.
    """

    def __init__(self, loss_scale: Any, skip_nonfinite: Any, accumulate: Any) -> None:
        if not isinstance(skip_nonfinite, bool):
            raise TypeError(f"Optimizer: `skip_nonfinite` must be True or False; got {skip_nonfinite!r}")
        self.skip_nonfinite = skip_nonfinite
        self.scaling, self.accumulator = as_loss_scale("Optimizer", loss_scale), Accumulator(accumulate)
        self._state: dict[str, Any] = {**(self.scaling or LossScale(init=1.0)).start(), "skipped": 0}
        self._norms: Callable[[], dict[str, Any]] | None = None
        self._judges: tuple[list[Bucket], Judge | None] | None = None
        self._there: Judge | None = None  # what holds the state in the place of `_state`

    @property
    def state(self) -> dict[str, Any]:
        """The state of the loss scale, ``scale`` and ``good``, and how many steps were ``skipped``."""
        return self._state if self._there is None else self._there.read()

    def skipped(self) -> Any:
        """How many steps were skipped."""
        return self.state["skipped"]

    def known(self, engine: str, buckets: list[Bucket], given: Any, limit: float | None) -> Known:
        """What there is to know before the gradients.

        Raises
        ------
        TypeError, ValueError
            If the loss scale that is given is no positive number, or there is one already.
        """
        if given is not None:
            if self.scaling is not None:
                raise ValueError("Optimizer.step: `loss_scale` is given, but the Optimizer has one of its own")
            given = float(scalar("Optimizer.step: `loss_scale`", given, LOSS_SCALE))
        check = given is not None or self.scaling is not None or self.skip_nonfinite or self.accumulator.scaled
        if not check and limit is None:
            return Known()
        return Known(given, limit, check, self._judge(engine, buckets))

    def _judge(self, engine: str, buckets: list[Bucket]) -> Judge | None:
        """What decides for these buckets; it is kept while they are."""
        if self._judges is None or self._judges[0] is not buckets:
            self._come_home()
            chosen = [select(engine, bucket)[0] for bucket in [*buckets, *measured(buckets)]]
            one = len({x.name for x in chosen}) == 1
            self._judges = buckets, chosen[0].judge(buckets) if one else None
        return self._judges[1]

    def _come_home(self) -> None:
        """Have the state on the host; waits for the device."""
        if self._there is not None:
            self._state, self._there = _plain(self.state), None

    @property
    def idle(self) -> bool:
        """Whether no gradient is kept for a later step."""
        return self.accumulator.every == 1

    @property
    def waiting(self) -> bool:
        """Whether the next call makes no step, for more micro-steps are to come."""
        return self.accumulator.done + 1 < self.accumulator.every

    def gather(
        self, engine: str, buckets: Sequence[Bucket], grads: list[Array | None], known: Known
    ) -> list[Array | None]:
        """Take the gradients of one call in; those of the step so far, in which there is no loss scale any more."""
        if self.accumulator.every == 1:
            return grads
        inverse = None
        if known.scale is not None:
            inverse = 1.0 / known.scale
        elif self.scaling is not None:
            inverse = 1.0 / self._state["scale"] if self._there is None else self._there.inverse
        self.accumulator.add(engine, buckets, grads, inverse)
        return self.accumulator.means(buckets, len(grads))

    def advance(self, known: Known) -> None:
        """Have what the host knows of the next step where a captured step will look for it."""
        if known.judge is not None:
            known.judge.give(known.scale, known.limit)
            known.judge.hold(self._state)

    def judge(self, engine: str, buckets: Sequence[Bucket], grads: list[Array | None], known: Known) -> Verdict:
        """What the step is to do with these gradients."""
        self._norms = None
        scaled, own = self.accumulator.every == 1, self.scaling is not None
        if not known.check and known.limit is None:
            return Verdict()
        if known.judge is not None:
            scale = "scale" if own else None if known.scale is None else "given_scale"
            self.advance(known)
            found = known.judge(
                measured(buckets), grads, self.scaling, scale if scaled else None, known.limit is not None, known.check
            )
            self._norms = known.judge.each_norm
            return found
        norms = gradient_norms(engine, buckets, grads)
        self._norms = lambda: norms
        held = self.state["scale"] if own else known.scale
        found = judge(
            joint_norm(list(norms.values())), scale=held if scaled else None, limit=known.limit, check=known.check
        )
        return found._replace(skip=bool(found.skip))

    def end(self, verdict: Verdict, known: Known) -> None:
        """The step is made, or skipped."""
        self.accumulator.clear()
        if known.judge is not None and known.check:
            known.judge.settle()
            self._there = known.judge
        elif known.check:
            self._come_home()
            scaled = {} if self.scaling is None else self.scaling.next(self._state, verdict.skip)
            self._state = {**self._state, **scaled, "skipped": self._state["skipped"] + verdict.skip}

    def nonfinite(self) -> list[str]:
        """See `Optimizer.nonfinite`."""
        if self._norms is None:
            raise RuntimeError("Optimizer: the step did not look; give skip_nonfinite, loss_scale or clip_norm")
        return [name for name, norm in self._norms().items() if not math.isfinite(float(norm))]

    def explain(self, *, clips: bool) -> list[str]:
        """What is done before buckets are updated, in some lines."""
        lines = []
        if self.accumulator.every > 1:
            lines.append(f"the mean gradient of {self.accumulator.every} calls; each adds to it: load g sum; store sum")
        if clips or self.skip_nonfinite or self.scaling is not None:
            lines.append("the joint norm of all gradients: load g; reduce per tensor")
        return lines

    # ---- saving -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_state": _plain(self.state), "_there": None, "_norms": None, "_judges": None}

    def dump(self) -> dict[str, Any]:
        """Its state but for arrays, as plain numbers; waits for the device."""
        state = _plain(self.state)
        skipped = state.pop("skipped")
        return {
            "skipped": skipped,
            "loss_scale": None if self.scaling is None else state,
            "accumulate": self.accumulator.every,
            "micro_steps": self.accumulator.done,
            "scaled": self.accumulator.scaled,
        }

    def differences(self, was: dict[str, Any]) -> list[str]:
        """In what numbers that were saved do not fit."""
        wrong, scale, done, every = [], was["loss_scale"], was["micro_steps"], was["accumulate"]
        if (scale is None) != (self.scaling is None):
            wrong.append(f"saved {'without' if scale is None else 'with'} a loss scale, unlike here")
        elif scale is not None and not (is_number(scale["scale"]) and scale["scale"] > 0 and is_count(scale["good"])):
            wrong.append(f"the loss scale is {scale!r}")
        if not isinstance(was["scaled"], bool):
            wrong.append(f"`scaled` is {was['scaled']!r}")
        if not (is_count(was["skipped"]) and is_count(done) and is_count(every) and done < every):
            wrong.append(f"counts are {was!r}")
        elif done and every != self.accumulator.every:
            wrong.append(f"saved after {done} of {every} micro-steps, here {self.accumulator.every} make a step")
        return wrong

    def load(self, was: dict[str, Any]) -> None:
        """Bring the numbers to the saved ones, which fit."""
        self._there, self._norms = None, None
        self._state = {**self._state, **(was["loss_scale"] or {}), "skipped": was["skipped"]}
        self.accumulator.done, self.accumulator.scaled = was["micro_steps"], was["scaled"]


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a loss scale as Python numbers; waits for the device."""
    return {"scale": float(state["scale"]), "good": int(state["good"]), "skipped": int(state["skipped"])}


def is_count(x: Any) -> bool:
    """Whether x is a natural number of 64 bits, as engines hold it."""
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**63


def checked_count(where: str, x: Any) -> int:
    """x, if `is_count`; else TypeError or ValueError."""
    if not is_count(x):
        wrong = ValueError if isinstance(x, int) and not isinstance(x, bool) else TypeError
        raise wrong(f"{where} must be a whole number from 0; got {x!r}")
    return int(x)
