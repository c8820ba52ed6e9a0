"""Layer-wise adaptive and memory-efficient optimizers for any array-API library."""

from arrayopt import schedules
from arrayopt.functional import init, update
from arrayopt.fusion.source import source
from arrayopt.hyper import Hyper, flag, real
from arrayopt.importers import load_torch
from arrayopt.monitor import Monitor
from arrayopt.optimizer import Optimizer
from arrayopt.rules import CAME, LAMB, LANS, LARS, SGD, Adafactor, Adam, AdamW, Rule
from arrayopt.scaling import LossScale

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
    "Optimizer",
    "Rule",
    "flag",
    "init",
    "load_torch",
    "real",
    "schedules",
    "source",
    "update",
]

__version__ = "0.1.0"
