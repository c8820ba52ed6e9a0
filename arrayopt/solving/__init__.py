"""Solvers: loops that call a function until its gradient is small."""
