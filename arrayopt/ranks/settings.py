"""`Ranks`: a communicator with options, and the kinds of communicators."""

from dataclasses import dataclass
from typing import Any

from arrayopt.hyper import scalar
from arrayopt.ranks.comm import Comm
from arrayopt.ranks.threads import ThreadComm

KINDS = {
    "mpi4py.Intracomm": "mpi",
    "torch.ProcessGroup": "group",
    "torch.DeviceMesh": "mesh",
    "cupy_backends.NcclCommunicator": "nccl",
    "cupyx.NCCLBackend": "nccl",
}
"""The kind of each supported class of communicators, by its package and name."""

GRADS = ("reduced", "mean", "sum")
GATHER = ("in_place", "packed")
REDUCTION = ("ordered", "fast")
CHECK = 100


@dataclass(frozen=True)
class Ranks:
    """A communicator with options for an `Optimizer`.

    Parameters
    ----------
    comm : communicator
        A communicator of mpi4py; a process group or one-dimensional device mesh of
        ``torch.distributed``; an NCCL communicator of CuPy; or one of `arrayopt.ranks.threads`.
    grads : {"reduced", "mean", "sum"}
        Which gradients `step` gets. ``"reduced"``: the same on all ranks. ``"mean"``, ``"sum"``:
        each rank has its own, and the step uses their mean or sum, added in float32 at least.
    timeout : float
        Seconds that a rank waits for the others before it raises a `RankError`, in (0, inf).
    gather : {"in_place", "packed"}
        How ranks receive the parameters that other ranks update. ``"in_place"``: large parameters
        are received directly into their memory. ``"packed"``: each rank sends one message, through
        a buffer.
    reduction : {"ordered", "fast"}
        How the gradients of ranks are added. ``"ordered"``: in the order of ranks, so that every
        run gives the same bits. ``"fast"``: by a reduction of MPI or NCCL, whose last bits may
        differ from run to run.
    check : int, bool or None
        Ranks compare checksums of parameters and of reduced gradients in the first step and in
        every `check`-th step after it. 1 means every step; 0, False or None never; True the
        default, 100.

    Raises
    ------
    TypeError, ValueError
        For any other value.
    """

    comm: Any
    grads: str = "reduced"
    timeout: float = 300.0
    gather: str = "in_place"
    reduction: str = "ordered"
    check: int | None = CHECK

    def __post_init__(self) -> None:
        for name, allowed in (("grads", GRADS), ("gather", GATHER), ("reduction", REDUCTION)):
            given, said = getattr(self, name), ", ".join(map(repr, allowed))
            if given not in allowed:
                raise ValueError(f"Ranks: `{name}` must be one of {said}; got {given!r}")
        object.__setattr__(
            self, "timeout", float(scalar("Ranks: `timeout`", self.timeout, "(0, inf)"))
        )
        check: Any = CHECK if self.check is True else 0 if self.check is None else self.check
        if not isinstance(check, int) or check < 0:
            wrong = ValueError if isinstance(check, int) else TypeError
            raise wrong(
                f"Ranks: `check` must be an integer from 0, True, False or None; got {self.check!r}"
            )
        object.__setattr__(self, "check", int(check))
        _kind(self.comm, "Ranks")

    def __deepcopy__(self, memo: Any) -> "Ranks":
        return self  # copies share the communicator

    def __reduce__(self) -> Any:
        raise TypeError("a communicator cannot be pickled; save and load the Optimizer's state")

    def open(self) -> Comm:
        """Return the communicator as a `Comm`."""
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
    """Return a communicator, with or without settings, as `Ranks`."""
    if not isinstance(comm, Ranks):
        _kind(comm)
    return comm if isinstance(comm, Ranks) else Ranks(comm)


def _kind(comm: Any, who: str = "Optimizer") -> str:
    """Return the kind of a communicator; raise TypeError for anything else."""
    if isinstance(comm, ThreadComm):
        return "threads"
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(comm).__mro__}
    for name, found in KINDS.items():
        if name in names:
            return found
    raise TypeError(
        f"{who}: `comm` must be a communicator of mpi4py, a process group of torch.distributed,"
        f" an NCCL communicator of CuPy, one of arrayopt.ranks.threads(n), or Ranks of such; got"
        f" {comm!r}"
    )
