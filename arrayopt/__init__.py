"""Layer-wise adaptive and memory-efficient optimizers for any array-API library."""

from arrayopt import ranks, schedules
from arrayopt._version import __version__ as __version__
from arrayopt.engines.source import source
from arrayopt.functional import init, update
from arrayopt.hyper import Hyper, flag, real
from arrayopt.importers import load_torch
from arrayopt.monitor.monitor import Monitor
from arrayopt.optimizer import Optimizer
from arrayopt.params.parts import Part
from arrayopt.ranks.comm import RankError
from arrayopt.ranks.settings import Ranks
from arrayopt.rules import CAME, LAMB, LANS, LARS, SGD, Adafactor, Adam, AdamW, Muon, MuonH, NorMuon, Rule
from arrayopt.state.loss_scale import LossScale

__all__ = [
    "CAME",
    "LAMB",
    "LANS",
    "LARS",
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Hyper",
    "LossScale",
    "Monitor",
    "Muon",
    "MuonH",
    "NorMuon",
    "Optimizer",
    "Part",
    "RankError",
    "Ranks",
    "Rule",
    "flag",
    "init",
    "load_torch",
    "ranks",
    "real",
    "schedules",
    "source",
    "update",
]


def __dir__() -> list[str]:
    """What tab completion shows."""
    return [*__all__, "__version__"]
