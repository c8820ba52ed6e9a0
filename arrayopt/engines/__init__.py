"""Engines: how an update is run."""
