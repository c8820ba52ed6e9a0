"""What an engine is: something that runs a rule's update over a bucket of tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from arrayopt.arrays import Array, dtype_name, place
from arrayopt.params.groups import Group
from arrayopt.rules.base import Rule
from arrayopt.state.loss_scale import LossScale
from arrayopt.state.tensors import Counts, Tensor
from arrayopt.state.verdict import Verdict

__all__ = ["Bucket", "Engine", "Judge", "Report", "beside", "bucketed", "chosen"]

Report = dict[str, Array]
"""What a step reports of one tensor."""


def chosen(every: Sequence[Any], places: Sequence[int] | Any) -> Sequence[Any]:
    """Those at some places, which ascend; the list itself where that is all of it."""
    return every if len(places) == len(every) else list(map(every.__getitem__, places))


@dataclass(slots=True)
class Bucket:
    """Tensors of one library, device and dtype, under rules of one structure; it lasts until groups change.

    Attributes
    ----------
    groups : list of Group
        The groups that the tensors come from.
    tensors : list of Tensor
        The tensors.
    group_of : list of int
        For each tensor the position of its group in `groups`.
    places : list of int
        For each tensor its position among all the optimizer's.
    kept : dict
        What an engine keeps from step to step.
    """

    groups: list[Group] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def counts(self) -> Counts:
        """The tensors' numbers of updates, together, where they all look."""
        if "counts" not in self.kept:
            self.kept["counts"] = counts = Counts(tensor.t for tensor in self.tensors)
            for i, tensor in enumerate(self.tensors):
                tensor.counts, tensor.place = counts, i
        made: Counts = self.kept["counts"]
        return made

    def own(self, every: Sequence[Any]) -> Sequence[Any]:
        """Those of all tensors' gradients that are of the bucket's tensors."""
        if "in order" not in self.kept:
            self.kept["in order"] = self.places == list(range(len(self.places)))
        return chosen(every, self.places) if self.kept["in order"] else [every[i] for i in self.places]

    @property
    def rule(self) -> Rule:
        """A rule of the bucket's structure."""
        return self.groups[0].rule


def beside(bucket: Bucket, rule: Rule, tensor_of: Callable[[Tensor], Tensor]) -> Bucket:
    """A bucket of the same parameters under another rule, with state of its own; made once, and kept with the first."""
    made: Bucket | None = bucket.kept.get(("beside", type(rule)))
    if made is None:
        mine = [tensor_of(tensor) for tensor in bucket.tensors]
        made = Bucket([Group("", rule, {}, mine)], mine, [0] * len(mine), bucket.places)
        bucket.kept["beside", type(rule)] = made
    if made.kept.get("taken over") != bucket.counts.replaced:
        made.kept["taken over"] = bucket.counts.replaced
        made.counts.replaced += 1
        for mine_, tensor in zip(made.tensors, bucket.tensors, strict=True):
            mine_.array = tensor.array
    made.groups[0].replace_rule(rule)
    return made


def bucketed(groups: list[Group], tensors: list[Tensor]) -> list[Bucket]:
    """Tensors that share a structure of rule, a dtype, a library and a device."""
    buckets: dict[Any, Bucket] = {}
    position = {tensor.name: i for i, tensor in enumerate(tensors)}
    for group in groups:
        for tensor in group.tensors:
            xp, device = place(tensor.array)
            key = (group.rule.structure, dtype_name(tensor.array), xp, str(device))
            bucket = buckets.setdefault(key, Bucket())
            if group not in bucket.groups:
                bucket.groups.append(group)
            bucket.tensors.append(tensor)
            bucket.places.append(position[tensor.name])
            bucket.group_of.append(len(bucket.groups) - 1)
    return list(buckets.values())


class Engine(Protocol):
    """Runs rules over tensors. It writes nothing before `launch`, so that a step that fails has changed nothing."""

    @property
    def name(self) -> str:
        """What the engine is called."""

    def check(self, bucket: Bucket) -> None:
        """Raise ValueError or `TraceError`, saying why, if the bucket is not for this engine."""

    def prepare(
        self,
        bucket: Bucket,
        grads: Sequence[Array | None],
        hypers: Sequence[dict[str, Any]],
        *,
        clip: Array | None,
        stats: bool,
        skip: Array | None = None,
    ) -> Callable[[], dict[str, Report]]:
        """Make a step ready, raising whatever there is to raise.

        Parameters
        ----------
        bucket : Bucket
            The tensors.
        grads : sequence of array or None
            A gradient for each tensor; None leaves it out.
        hypers : sequence of dict
            For each group of the bucket its hyper-parameters' values at this step.
        clip : 0-d array or float, optional
            What to multiply all gradients by first.
        stats : bool
            Whether norms and what the rule reports are wanted.
        skip : 0-d array of bool, optional
            Whether to change nothing after all, which only the device knows: what `judge` has said.

        Returns
        -------
        callable
            Called once, it updates the tensors (arrays, slots and counts) and returns the reports by tensor name, as
            arrays that later steps leave alone.
        """

    def advance(self, bucket: Bucket, hypers: Sequence[dict[str, Any]]) -> None:
        """Have the hyper-parameters of the next step where a captured step will look for them."""

    def judge(self, buckets: Sequence[Bucket]) -> "Judge | None":
        """What decides for all these buckets together, on their device; None where the host does."""

    def explain(self, bucket: Bucket) -> str:
        """Say in a few lines how these tensors' updates are run."""


class Judge(Protocol):
    """Decides on a device what becomes of each step, and keeps what the next one needs to know of it.

    Attributes
    ----------
    inverse : 0-d array
        What gradients are multiplied by for the loss scale that is held, on the device.
    """

    inverse: Any

    def give(self, scale: float | None, limit: float | None) -> None:
        """Have the host's numbers for the next step where a captured step will look for them."""

    def hold(self, state: Mapping[str, Any]) -> None:
        """Take over ``scale``, ``good`` and ``skipped``, unless this very mapping was taken over before."""

    def __call__(
        self,
        buckets: Sequence[Bucket],
        grads: list[Array | None],
        scaling: LossScale | None,
        scale: str | None,
        limit: bool,
        check: bool,
    ) -> Verdict:
        """Say what these gradients mean for the step.

        Parameters
        ----------
        buckets : sequence of Bucket
            Those that measure gradients; see `arrayopt.step.clipping.measured`.
        grads : sequence of array or None
            All gradients.
        scaling, scale, limit, check
            As for `arrayopt.engines.cuda.emit_judge.emit_judge`.
        """

    def each_norm(self) -> dict[str, Any]:
        """The norms of the last step's gradients by tensor name."""

    def settle(self) -> None:
        """The step is made: its state becomes what is held."""

    def read(self) -> dict[str, Any]:
        """What is held, as 0-d arrays that later steps leave alone."""
