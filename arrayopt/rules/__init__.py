"""The update rules: only mathematics."""

from arrayopt.rules.adabelief import AdaBelief
from arrayopt.rules.adam import Adam, AdamW
from arrayopt.rules.adamh import AdamH
from arrayopt.rules.adan import Adan
from arrayopt.rules.ademamix import AdEMAMix
from arrayopt.rules.base import Rule
from arrayopt.rules.factored import CAME, Adafactor
from arrayopt.rules.fista import FISTA
from arrayopt.rules.lamb import LAMB, LANS
from arrayopt.rules.lars import LARS
from arrayopt.rules.lion import Lion
from arrayopt.rules.muon import Muon, MuonH, NorMuon
from arrayopt.rules.nadam import NAdam
from arrayopt.rules.prodigy import Prodigy
from arrayopt.rules.radam import RAdam
from arrayopt.rules.rmsprop import RMSprop
from arrayopt.rules.schedule_free import ScheduleFreeAdamW
from arrayopt.rules.sgd import SGD
from arrayopt.rules.soap import SOAP
from arrayopt.rules.sophia import Sophia

__all__ = [
    "CAME",
    "FISTA",
    "LAMB",
    "LANS",
    "LARS",
    "SGD",
    "SOAP",
    "AdEMAMix",
    "AdaBelief",
    "Adafactor",
    "Adam",
    "AdamH",
    "AdamW",
    "Adan",
    "Lion",
    "Muon",
    "MuonH",
    "NAdam",
    "NorMuon",
    "Prodigy",
    "RAdam",
    "RMSprop",
    "Rule",
    "ScheduleFreeAdamW",
    "Sophia",
]

SOLVERS = ("CG", "LBFGS", "SPG")
"""Rules for whole functions, which `arrayopt.torch` and `arrayopt.optax` do not offer by name."""
