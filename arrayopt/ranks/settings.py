"""What is said of ranks, and which communicators there are."""

from dataclasses import dataclass
from typing import Any

from arrayopt.hyper import scalar
from arrayopt.ranks.comm import Comm
from arrayopt.ranks.threads import ThreadComm

__all__ = ["Ranks", "as_ranks"]

KINDS = {
    "mpi4py.Intracomm": "mpi",
    "torch.ProcessGroup": "group",
    "torch.DeviceMesh": "mesh",
    "cupy_backends.NcclCommunicator": "nccl",
    "cupyx.NCCLBackend": "nccl",
}
"""The classes of communicators, by their package and name."""

GRADS = ("reduced", "mean", "sum")
GATHER = ("in_place", "packed")
REDUCTION = ("ordered", "fast")
CHECK = 100


@dataclass(frozen=True)
class Ranks:
    """A communicator, and how an `Optimizer` uses it.

    Parameters
    ----------
    comm : communicator
        Of mpi4py; a process group or one-dimensional device mesh of ``torch.distributed``; an NCCL communicator of
        CuPy; or one of `arrayopt.ranks.threads`.
    grads : {"reduced", "mean", "sum"}
        What gradients are given to `step`. ``"reduced"``: the same ones on all ranks. ``"mean"``, ``"sum"``: each rank
        has its own, and the step uses their mean or sum; they are added in float32 at least.
    timeout : float
        Seconds that a rank waits for the others before it raises a `RankError`, in (0, inf).
    gather : {"in_place", "packed"}
        How ranks get the parameters that others have updated: large ones straight into their memory, or all of them by
        way of a buffer, in one message from each rank.
    reduction : {"ordered", "fast"}
        How ranks' own gradients are added. ``"ordered"``: in the order of ranks, so that a run repeats bit for bit.
        ``"fast"``: as the communicator's own reduction does it, which may differ in the last bits from run to run.
    check : int, bool or None
        In the first step, and in each `check`-th one after it, ranks compare checksums of what must be the same bytes
        on all of them: parameters, and gradients that are reduced. 1: in each step. 0, False or None: never. True: as
        by default, 100.

    Raises
    ------
    TypeError, ValueError
        For anything else.
    """

    comm: Any
    grads: str = "reduced"
    timeout: float = 300.0
    gather: str = "in_place"
    reduction: str = "ordered"
    check: int | None = CHECK

    def __post_init__(self) -> None:
        for name, known in (("grads", GRADS), ("gather", GATHER), ("reduction", REDUCTION)):
            if getattr(self, name) not in known:
                said = ", ".join(map(repr, known))
                raise ValueError(
                    f"Ranks: `{name}` must be one of {said}; got {getattr(self, name)!r}"
                )
        object.__setattr__(
            self, "timeout", float(scalar("Ranks: `timeout`", self.timeout, "(0, inf)"))
        )
        check: Any = CHECK if self.check is True else 0 if self.check is None else self.check
        if not isinstance(check, int) or check < 0:
            wrong = ValueError if isinstance(check, int) else TypeError
            raise wrong(
                f"Ranks: `check` must be a whole number from 0, True, False or None; got {self.check!r}"
            )
        object.__setattr__(self, "check", int(check))
        _kind(self.comm)

    def open(self) -> Comm:
        """The communicator, as this package uses it."""
        kind = _kind(self.comm)
        if kind == "threads":
            made: Comm = self.comm.limited(self.timeout)
            return made
        if kind == "mpi":
            from arrayopt.ranks.mpi import MPIComm

            return MPIComm(self.comm, self.timeout)
        if kind == "nccl":
            from arrayopt.ranks.nccl import NcclComm

            return NcclComm(getattr(self.comm, "_comm", self.comm), self.timeout)
        from arrayopt.ranks.process_group import ProcessGroup

        return ProcessGroup(self.comm.get_group() if kind == "mesh" else self.comm, self.timeout)


def as_ranks(comm: Any) -> Ranks:
    """A communicator, with or without settings, as `Ranks`."""
    return comm if isinstance(comm, Ranks) else Ranks(comm)


def _kind(comm: Any) -> str:
    """Of which library a communicator is; TypeError if it is none."""
    if isinstance(comm, ThreadComm):
        return "threads"
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(comm).__mro__}
    for name, found in KINDS.items():
        if name in names:
            return found
    raise TypeError(
        "Optimizer: `comm` must be a communicator of mpi4py, a process group of torch.distributed, an NCCL"
        f" communicator of CuPy, one of arrayopt.ranks.threads(n), or Ranks of such; got {comm!r}"
    )
