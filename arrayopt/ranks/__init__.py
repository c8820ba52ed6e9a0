"""Ranks: one optimizer over many processes, or over threads that stand for them."""

from arrayopt.ranks.comm import RankError as RankError
from arrayopt.ranks.machine import shared
from arrayopt.ranks.settings import Ranks as Ranks
from arrayopt.ranks.threads import run, threads

__all__ = ["run", "shared", "threads"]
