"""What comes before an update: accumulation, the loss scale, the check for finite gradients, the joint norm."""

import math
from collections.abc import Sequence
from typing import Any

from arrayopt.accumulate import Accumulator
from arrayopt.arrays import Array
from arrayopt.clipping import Verdict, gradient_norms, judge
from arrayopt.engines import Bucket
from arrayopt.hyper import is_number, scalar
from arrayopt.scaling import LOSS_SCALE, LossScale, as_loss_scale

__all__ = ["Prologue"]


class Prologue:
    """Turns the gradients that an Optimizer is given into those of a step, and into what the step is to do with them.

    Attributes
    ----------
    scaling : LossScale or None
        How the loss is scaled.
    skip_nonfinite : bool
        Whether steps with a non-finite gradient are skipped without a loss scale too.
    scale : dict
        The state of the loss scale.
    accumulator : Accumulator
        What has been summed up in micro-steps.
    norms : dict of str to float or 0-d array, or None
        The norms of the last step's gradients by tensor name, where they were looked at.
    skipped : int
        How many steps were skipped.
    """

    def __init__(self, loss_scale: Any, skip_nonfinite: Any, accumulate: Any) -> None:
        if not isinstance(skip_nonfinite, bool):
            raise TypeError(f"Optimizer: `skip_nonfinite` must be True or False; got {skip_nonfinite!r}")
        self.skip_nonfinite = skip_nonfinite
        self.scaling, self.accumulator = as_loss_scale("Optimizer", loss_scale), Accumulator(accumulate)
        self.scale = (self.scaling or LossScale(init=1.0)).start()
        self.norms: dict[str, Any] | None = None
        self.skipped = 0

    def scale_of(self, given: Any) -> Any:
        """The loss scale of one call: the one that is given, or the Optimizer's own, or None.

        Raises
        ------
        TypeError, ValueError
            If what is given is no positive number, or there is one already.
        """
        if given is None:
            return None if self.scaling is None else self.scale["scale"]
        if self.scaling is not None:
            raise ValueError("Optimizer.step: `loss_scale` is given, but the Optimizer has one of its own")
        return float(scalar("Optimizer.step: `loss_scale`", given, LOSS_SCALE))

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do before a step."""
        return self.scaling is None and not self.skip_nonfinite and self.accumulator.every == 1

    @property
    def waiting(self) -> bool:
        """Whether the next call makes no step, for more micro-steps are to come."""
        return self.accumulator.done + 1 < self.accumulator.every

    def gather(
        self, engine: str, buckets: Sequence[Bucket], grads: list[Array | None], scale: Any
    ) -> tuple[list[Array | None], Any]:
        """Take the gradients of one call in; those of the step so far, and the scale that is still in them."""
        if self.accumulator.every == 1:
            return grads, scale
        self.accumulator.add(engine, buckets, grads, scale)
        return self.accumulator.means(buckets, len(grads)), None

    def judge(self, engine: str, buckets: Sequence[Bucket], grads: Sequence[Array | None], **options: Any) -> Verdict:
        """What the step is to do with these gradients; the options are those of `clipping.judge`."""
        self.norms = None
        if not options["check"] and options["limit"] is None:
            return Verdict()
        self.norms = gradient_norms(engine, buckets, grads)
        return judge(list(self.norms.values()), **options)

    def end(self, skip: Any) -> None:
        """The step is made, or skipped, which a 0-d array may say."""
        self.skipped = self.skipped + skip
        self.accumulator.clear()
        if self.scaling is not None:
            self.scale = self.scaling.next(self.scale, skip)

    def nonfinite(self) -> list[str]:
        """See `Optimizer.nonfinite`."""
        if self.norms is None:
            raise RuntimeError("Optimizer: the step did not look; give skip_nonfinite, loss_scale or clip_norm")
        return [name for name, norm in self.norms.items() if not math.isfinite(float(norm))]

    def explain(self, *, clips: bool) -> list[str]:
        """What is done before buckets are updated, in some lines."""
        lines = []
        if self.accumulator.every > 1:
            lines.append(f"the mean gradient of {self.accumulator.every} calls; each adds to it: load g sum; store sum")
        if clips or self.skip_nonfinite or self.scaling is not None:
            lines.append("the joint norm of all gradients: load g; reduce per tensor")
        return lines

    # ---- saving -----------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Its state but for arrays, as plain numbers."""
        return {
            "skipped": int(self.skipped),
            "loss_scale": None if self.scaling is None else _plain(self.scale),
            "accumulate": self.accumulator.every,
            "micro_steps": self.accumulator.done,
        }

    def differences(self, was: dict[str, Any]) -> list[str]:
        """In what numbers that were saved do not fit."""
        wrong, scale, done, every = [], was["loss_scale"], was["micro_steps"], was["accumulate"]
        if (scale is None) != (self.scaling is None):
            wrong.append(f"saved {'without' if scale is None else 'with'} a loss scale, unlike here")
        elif scale is not None and not (is_number(scale["scale"]) and scale["scale"] > 0 and is_count(scale["good"])):
            wrong.append(f"the loss scale is {scale!r}")
        if not (is_count(was["skipped"]) and is_count(done) and is_count(every) and done < every):
            wrong.append(f"counts are {was!r}")
        elif done and every != self.accumulator.every:
            wrong.append(f"saved after {done} of {every} micro-steps, here {self.accumulator.every} make a step")
        return wrong

    def load(self, was: dict[str, Any]) -> None:
        """Bring the numbers to the saved ones, which fit."""
        self.skipped, self.scale = was["skipped"], dict(was["loss_scale"] or self.scale)
        self.accumulator.done = was["micro_steps"]
        self.norms = None


def _plain(scale: dict[str, Any]) -> dict[str, Any]:
    """The state of a loss scale as Python numbers; waits for the device."""
    return {"scale": float(scale["scale"]), "good": int(scale["good"])}


def is_count(x: Any) -> bool:
    """Whether x is a natural number of 64 bits, as engines hold it."""
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**63


def checked_count(where: str, x: Any) -> int:
    """x, if `is_count`; else TypeError or ValueError."""
    if not is_count(x):
        wrong = ValueError if isinstance(x, int) and not isinstance(x, bool) else TypeError
        raise wrong(f"{where} must be a whole number from 0; got {x!r}")
    return int(x)
