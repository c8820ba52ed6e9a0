"""Fusion: a rule is traced, planned as passes over memory, and written out as code for an engine."""
