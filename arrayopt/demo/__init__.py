"""The demo: train a small network on scanned digits with several rules. Run it with ``python -m arrayopt demo``."""

from arrayopt.demo.digits import compare, load

__all__ = ["compare", "load"]
