"""A rule is traced, planned as passes over memory, and lowered to a program for engines."""
