"""Layer-wise adaptive and memory-efficient optimizers for any array-API library."""

from typing import TYPE_CHECKING, Any

from arrayopt import projections, ranks, schedules
from arrayopt._version import __version__ as __version__
from arrayopt.engines.registry import NotFusedWarning
from arrayopt.engines.source import source
from arrayopt.exchange.from_optax import load_optax
from arrayopt.exchange.from_torch import load_torch
from arrayopt.exchange.to_torch import to_torch
from arrayopt.foreign import no_attribute as _no_attribute
from arrayopt.functional import init, update
from arrayopt.hyper import Hyper, choice, flag, real
from arrayopt.monitor.monitor import Monitor
from arrayopt.optimizer import Optimizer
from arrayopt.params.parts import Part
from arrayopt.ranks.comm import RankError
from arrayopt.ranks.settings import Ranks
from arrayopt.rules import (
    CAME,
    FISTA,
    LAMB,
    LANS,
    LARS,
    SGD,
    SOAP,
    AdaBelief,
    Adafactor,
    Adam,
    AdamH,
    AdamW,
    Adan,
    AdEMAMix,
    Lion,
    Muon,
    MuonH,
    NAdam,
    NorMuon,
    Prodigy,
    RAdam,
    RMSprop,
    Rule,
    ScheduleFreeAdamW,
    Sophia,
)
from arrayopt.rules.conjugate import CG, SPG
from arrayopt.rules.draws import random
from arrayopt.rules.lbfgs import LBFGS
from arrayopt.rules.rings import combined, dots, put, ring
from arrayopt.rules.totals import total
from arrayopt.solving.minimize import minimize
from arrayopt.solving.result import Result
from arrayopt.state.loss_scale import LossScale

__all__ = [
    "CAME",
    "CG",
    "FISTA",
    "LAMB",
    "LANS",
    "LARS",
    "LBFGS",
    "SGD",
    "SOAP",
    "SPG",
    "AdEMAMix",
    "AdaBelief",
    "Adafactor",
    "Adam",
    "AdamH",
    "AdamW",
    "Adan",
    "Hyper",
    "Lion",
    "LossScale",
    "Monitor",
    "Muon",
    "MuonH",
    "NAdam",
    "NorMuon",
    "NotFusedWarning",
    "Optimizer",
    "Part",
    "Prodigy",
    "RAdam",
    "RMSprop",
    "RankError",
    "Ranks",
    "Result",
    "Rule",
    "ScheduleFreeAdamW",
    "Sophia",
    "choice",
    "combined",
    "dots",
    "flag",
    "init",
    "load_optax",
    "load_torch",
    "minimize",
    "projections",
    "put",
    "random",
    "ranks",
    "real",
    "ring",
    "schedules",
    "source",
    "to_torch",
    "total",
    "update",
]


def __dir__() -> list[str]:
    """What tab completion shows."""
    return [*__all__, "__version__"]


if not TYPE_CHECKING:  # or type checkers would take every name

    def __getattr__(name: str) -> Any:
        """What to take in place of a name that there is not."""
        if name in ("demo", "optax", "testing", "torch"):
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}; import arrayopt.{name} first", name=name
            )
        inner = [f"{part.__name__}.{x}" for part in (projections, schedules) for x in part.__all__]
        raise _no_attribute(__name__, [*__all__, *inner], name)
