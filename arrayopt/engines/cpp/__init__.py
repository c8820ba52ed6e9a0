"""The C++ engine."""
