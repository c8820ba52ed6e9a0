"""The update rules: mathematics and nothing else."""

from arrayopt.rules.adam import Adam, AdamW
from arrayopt.rules.base import Rule
from arrayopt.rules.factored import CAME, Adafactor
from arrayopt.rules.lamb import LAMB, LANS
from arrayopt.rules.lars import LARS
from arrayopt.rules.muon import Muon, MuonH, NorMuon
from arrayopt.rules.sgd import SGD

__all__ = ["CAME", "LAMB", "LANS", "LARS", "SGD", "Adafactor", "Adam", "AdamW", "Muon", "MuonH", "NorMuon", "Rule"]
