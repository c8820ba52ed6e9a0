"""Watching layers."""
