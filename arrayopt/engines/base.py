"""What an engine is: something that runs a rule's update over tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from arrayopt.arrays import Array
from arrayopt.groups import Tensor
from arrayopt.rules.base import Rule

__all__ = ["Engine", "Task"]


@dataclass(frozen=True, slots=True)
class Task:
    """One tensor's part in a step: the tensor, its gradient, its rule, and the rule's hyper-parameters evaluated."""

    tensor: Tensor
    grad: Array
    rule: Rule
    hypers: dict[str, Any]


class Engine(Protocol):
    """Runs rules over tensors. It writes nothing before `launch`, so that a step that fails has changed nothing."""

    name: str

    def prepare(
        self, tasks: Sequence[Task], *, clip: Array | None, stats: bool
    ) -> Callable[[], dict[str, dict[str, Array]]]:
        """Make a step ready, raising whatever there is to raise.

        Parameters
        ----------
        tasks : sequence of Task
            Tensors of one library, each with a gradient.
        clip : 0-d array, optional
            What to multiply all gradients by first.
        stats : bool
            Whether norms are to be reported beside what the rules report.

        Returns
        -------
        callable
            Called once, it updates the tensors (arrays, slots and counts) and returns the reports by tensor name.
        """

    def explain(self, rule: Rule, tensors: Sequence[Tensor]) -> str:
        """Say in a few lines how these tensors' updates are run."""
