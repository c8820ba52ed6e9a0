"""Saving: state dicts and checkpoint files."""
